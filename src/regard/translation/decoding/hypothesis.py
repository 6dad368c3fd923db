"""The result of a search."""

from typing import NamedTuple

from torch import Tensor


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
    weights: Tensor | None = None
