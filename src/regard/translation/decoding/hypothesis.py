"""The result of a search. Does not import torch."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy

Array = numpy.ndarray[Any, Any]


class Hypothesis(NamedTuple):
    """A decoded target sentence.

    tokens: token ids without special tokens.
    score: the ranking score; for samples, the log probability per token.
    log_probability: sum over all tokens, including the end token.
    finished: whether the end token was generated.
    weights: cross-attention weights (heads, steps, source tokens) of the requested layer, or None. Each
        step reads one token, beginning with the start token; an unfinished hypothesis has not read its last
        token.

    >>> from regard.translation.decoding.hypothesis import Hypothesis
    >>> Hypothesis([5, 6], score=-0.5, log_probability=-1.5, finished=True).tokens
    [5, 6]
    """

    tokens: list[int]
    score: float
    log_probability: float
    finished: bool
    weights: Array | None = None


def rank(hypotheses: Sequence[Sequence[Hypothesis]], n_best: int) -> list[list[Hypothesis]]:
    """Return the n best hypotheses of each sentence: finished before unfinished, then by score."""
    return [sorted(h, key=lambda h: (h.finished, h.score), reverse=True)[:n_best] for h in hypotheses]
