"""Greedy decoding and beam search in the kernels, without Python between the steps (kernels/search.h)."""

from collections.abc import Sequence
from itertools import accumulate

import torch

from regard._util import interrupt
from regard.mechanism.kernels import layer_kernels
from regard.models.inference.compiled_transformer import CompiledTransformer
from regard.models.packed import Packed
from regard.models.seq2seq import Seq2Seq
from regard.models.transformer import Transformer
from regard.translation.decoding.constraints import Constraints
from regard.translation.decoding.hypothesis import Hypothesis
from regard.translation.decoding.strategies import Beam

_MAX_LENGTH = 4096  # tokens: longer translations would need large tables of positions
_SECONDS = 0.2  # between checks for an interruption
_MAX_RECORDED = 2**26  # maximum number of weights to record, 256 MB; above it, they are computed afterwards


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
    special, longest = model.special_tokens, max(limits)
    lengths = source.lengths.tolist()
    if (
        not isinstance(model, Transformer)
        or (constraints is not None and any(constraints.phrases))
        or (model.decoding is not None and model.decoding.forced_end)
        or sorted(special.never_generated) != list(range(len(special.never_generated)))
        or torch.is_autocast_enabled("cpu")
        or max(longest, *lengths) > _MAX_LENGTH
        or not min(lengths)
    ):
        return None
    layers = len(model.decoder.blocks)
    if attention_layer is not None and not -layers <= attention_layer < layers:
        return None
    tokens = source.tokens
    if tokens.device.type != "cpu" or not _in_vocabulary(model, tokens, special.target_start):
        return None
    compiled = CompiledTransformer.of(model, max(lengths), max(longest, len(special.target_start)) + 1)
    if compiled is None:
        return None
    max_unknown = [-1] * len(limits)
    if constraints is not None and constraints.max_unknown is not None:
        max_unknown = list(constraints.max_unknown)
    ids = tokens.tolist()
    starts = [0, *accumulate(lengths)][:-1]
    sentences = [
        (ids[start : start + length], limit, unknown)
        for start, length, limit, unknown in zip(starts, lengths, limits, max_unknown, strict=True)
    ]
    heads = model.decoder.config.heads
    too_many = beam.size * len(lengths) * longest * heads * max(lengths) > _MAX_RECORDED
    recorded = -1 if attention_layer is None or too_many else attention_layer % layers
    options = [beam.size, beam.n_best, len(special.never_generated), special.end, special.unknown, recorded]
    running = layer_kernels.start_search(
        compiled.numbers,
        compiled.factors,
        options,
        beam.length_penalty,
        beam.prune_threshold,
        list(special.target_start),
        sentences,
    )
    while not running.run(_SECONDS):
        interrupt.check()
    if not running.is_valid():
        return None
    hypotheses: list[list[Hypothesis]] = [[] for _ in limits]
    first = len(special.target_start)
    for sentence, total, finished, generated, length, weights in running.results():
        steps = len(generated) - 1
        score = total / max(steps, 1) ** beam.length_penalty
        matrix = None
        if recorded >= 0 and steps:
            matrix = torch.frombuffer(weights, dtype=torch.float32).view(heads, steps, length)
        tokens_only = generated[first : -1 if finished else None]
        hypotheses[sentence].append(Hypothesis(tokens_only, score, total, finished, matrix))
    return hypotheses


def _in_vocabulary(model: Transformer, tokens: torch.Tensor, start: Sequence[int]) -> bool:
    size = (model.source_embedding or model.embedding).num_embeddings
    low, high = (int(bound) for bound in tokens.aminmax())
    return low >= 0 and high < size and all(0 <= token < model.embedding.num_embeddings for token in start)
