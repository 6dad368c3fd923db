"""Greedy decoding and beam search in the kernels for a model in torch; see `kernel_search`."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch

from regard.models.inference.compiled_transformer import read_parameters
from regard.models.packed import Packed
from regard.models.seq2seq import Seq2Seq
from regard.models.transformer import Transformer
from regard.translation.decoding.constraints import Constraints
from regard.translation.decoding.hypothesis import Hypothesis
from regard.translation.decoding.kernel_search import search_in_kernels
from regard.translation.decoding.strategies import Beam


def search_compiled(
    model: Seq2Seq,
    source: Packed,
    beam: Beam,
    limits: Sequence[int],
    *,
    attention_layer: int | None = None,
    constraints: Constraints | None = None,
) -> list[list[Hypothesis]] | None:
    """Decode each sentence; return its completed hypotheses, or None if the kernels do not support the call.

    The arguments are those of `search`; limits: max_new_tokens of each sentence.
    """
    if (
        not isinstance(model, Transformer)
        or (constraints is not None and any(constraints.phrases))
        or (model.decoding is not None and model.decoding.forced_end)
        or torch.is_autocast_enabled("cpu")
        or source.tokens.device.type != "cpu"
    ):
        return None
    ids, ends = source.tokens.tolist(), source.lengths.cumsum(0).tolist()
    return search_in_kernels(
        partial(read_parameters, model),
        model.special_tokens,
        [ids[start:end] for start, end in pairwise([0, *ends])],
        beam,
        limits,
        attention_layer=attention_layer,
        max_unknown=None if constraints is None else constraints.max_unknown,
    )
