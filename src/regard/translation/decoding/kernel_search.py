"""Greedy decoding and beam search in the kernels, from the first token to the last. Does not import torch."""

from collections.abc import Callable, Iterator, Sequence

import numpy

from regard._util import interrupt
from regard.mechanism.kernels import beam_search
from regard.models.generation import SpecialTokens
from regard.models.inference.transformer_layout import TransformerParameters
from regard.translation.decoding.hypothesis import Hypothesis
from regard.translation.decoding.strategies import Beam

_MAX_LENGTH = 4096  # tokens: longer translations would need large tables of positions
_SECONDS = 0.2  # between checks for an interruption
_MAX_RECORDED = 2**26  # maximum number of weights to record, 256 MB; above it, they are computed afterwards


def search_in_kernels(
    read_parameters: Callable[[int, int], TransformerParameters | None],
    special: SpecialTokens,
    sources: Sequence[list[int]],
    beam: Beam,
    limits: Sequence[int],
    *,
    attention_layer: int | None = None,
    max_unknown: Sequence[int] | None = None,
) -> list[list[Hypothesis]] | None:
    """Decode each sentence; return its completed hypotheses, or None if the kernels do not support the call.

    read_parameters: returns the parameters for the given maximum source and target length, or None.
    sources: token ids with special tokens. limits: maximum length of each translation and its end token.
    attention_layer: the decoder layer whose cross-attention weights to return.
    max_unknown: maximum number of unknown tokens in each translation. Default: no limit.
    """
    lengths, longest, start = list(map(len, sources)), max(limits), special.target_start
    if max(longest, *lengths) > _MAX_LENGTH or not min(lengths):
        return None
    if sorted(special.never_generated) != list(range(len(special.never_generated))):
        return None
    parameters = read_parameters(max(lengths), max(longest, len(start)) + 1)
    if parameters is None or not _in_vocabulary(parameters, sources, start):
        return None
    heads, layers = parameters.heads, parameters.layers
    if attention_layer is not None and not -layers <= attention_layer < layers:
        return None
    too_many = beam.size * len(lengths) * longest * heads * max(lengths) > _MAX_RECORDED
    recorded = -1 if attention_layer is None or too_many else attention_layer % layers
    unknown = [-1] * len(limits) if max_unknown is None else max_unknown
    running = beam_search.start_search(
        parameters.numbers,
        parameters.factors,
        [beam.size, beam.n_best, len(special.never_generated), special.end, special.unknown, recorded],
        beam.length_penalty,
        beam.prune_threshold,
        list(start),
        list(zip(sources, limits, unknown, strict=True)),
    )
    while not running.run(_SECONDS):
        interrupt.check()
    if not running.is_valid():
        return None
    hypotheses: list[list[Hypothesis]] = [[] for _ in limits]
    for sentence, total, finished, generated, length, weights in running.results():
        steps = len(generated) - 1
        score = total / max(steps, 1) ** beam.length_penalty
        matrix = None
        if recorded >= 0 and steps:
            matrix = numpy.frombuffer(weights, numpy.float32).reshape(heads, steps, length)
        tokens = generated[len(start) : -1 if finished else None]
        hypotheses[sentence].append(Hypothesis(tokens, score, total, finished, matrix))
    return hypotheses


def _in_vocabulary(
    parameters: TransformerParameters, sources: Sequence[list[int]], start: Sequence[int]
) -> bool:
    return (
        min(map(min, sources)) >= 0
        and max(map(max, sources)) < parameters.source_vocabulary
        and all(0 <= token < parameters.target_vocabulary for token in start)
    )


def split_by_length(sources: Sequence[Sequence[int]], size: int) -> Iterator[list[int]]:
    """Yield the indices of sentences in batches of similar lengths, shortest first.

    >>> from regard.translation.decoding.kernel_search import split_by_length
    >>> list(split_by_length([[5, 6], [7], [8, 9, 5]], size=2))
    [[1, 0], [2]]
    """
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    for first in range(0, len(order), size):
        yield order[first : first + size]
