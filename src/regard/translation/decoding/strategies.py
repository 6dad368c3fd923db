"""Decoding strategies: greedy, beam search, sampling. Does not import torch."""

import math
from dataclasses import dataclass

from regard._util.checks import check_int, check_number
from regard._util.name_hints import hint_arguments
from regard.errors import ArgumentError
from regard.models.generation import EarlyStopping

MAX_HYPOTHESES = 10_000  # maximum beam size, and maximum number of samples per sentence
MAX_BATCH_SIZE = 100_000  # maximum number of sentences to decode together
MAX_LENGTH_PENALTY = 100  # a larger exponent overflows for long hypotheses
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e6  # beyond these, probabilities are all 0 or 1, or all equal


@dataclass(frozen=True)
class Greedy:
    """Greedy decoding: the most probable token at each step. Equivalent to `Beam(1)`.

    >>> from regard.translation.decoding.strategies import Greedy
    >>> Greedy()
    Greedy()
    """


@hint_arguments
@dataclass(frozen=True)
class Beam:
    """Beam search.

    size: beam size. n_best: number of hypotheses to return, at most `size`.
    length_penalty: hypotheses are ranked by log probability / length ** length_penalty; 0 favors short
        outputs, 1 ranks by mean log probability per token. For a pretrained translator in Hugging Face
        format, the default of 1 means the value in its generation_config.json.
    prune_threshold: drop hypotheses whose log probability is lower than the best by more than this (relative
        threshold pruning, Freitag and Al-Onaizan 2017). A threshold of 3 saves a fifth of the time and rarely
        changes the translation. Fewer than `n_best` hypotheses may be returned.
    early_stopping: when the search for a sentence ends. None: when no other hypothesis can become one of the
        n best; finished hypotheses keep their slots. The other values work as in `transformers`, which
        refills the slots of finished hypotheses. True: when `size` hypotheses have finished. False: when,
        in addition, the best unfinished hypothesis scores no higher than any of them at its current length.
        "never": the same, but at any length up to the maximum. Default: for a pretrained translator in
        Hugging Face format, the value in its generation_config.json; otherwise None.

    >>> from regard.translation.decoding.strategies import Beam
    >>> Beam(size=4, n_best=5)
    Traceback (most recent call last):
    regard.errors.ArgumentError: Beam got size=4 and n_best=5; n_best cannot exceed size. Use size=5.
    """

    size: int = 5
    length_penalty: float = 1.0
    n_best: int = 1
    prune_threshold: float = math.inf
    early_stopping: EarlyStopping | None = None

    def __post_init__(self) -> None:
        check_int("Beam got size", self.size, min=1)
        check_number("Beam got size", self.size, max=MAX_HYPOTHESES, cure="5 is usually enough.")
        check_int("Beam got n_best", self.n_best, min=1)
        check_number("Beam got length_penalty", self.length_penalty, min=0, max=MAX_LENGTH_PENALTY)
        if self.prune_threshold != math.inf:
            check_number("Beam got prune_threshold", self.prune_threshold, min=0)
        if self.early_stopping is not None and self.early_stopping not in (True, False, "never"):
            raise ArgumentError(
                f"Beam got early_stopping={self.early_stopping!r}; it must be True, False, 'never' or None."
            )
        if self.n_best > self.size:
            raise ArgumentError(
                f"Beam got size={self.size} and n_best={self.n_best}; n_best cannot exceed size. Use "
                f"size={self.n_best}."
            )


@hint_arguments
@dataclass(frozen=True)
class Sample:
    """Sample from the model's distribution.

    The result depends on the source sentence and the seed, not on the rest of the batch.

    temperature: below 1 sharpens the distribution, above 1 flattens it.
    top_p: nucleus sampling: sample only from the smallest set of most probable tokens whose total probability
        is at least `top_p` (Holtzman et al. 2020).
    seed: random seed. n_samples: samples per sentence; some may be identical.

    >>> from regard.translation.decoding.strategies import Sample
    >>> Sample(top_p=0)
    Traceback (most recent call last):
    regard.errors.ArgumentError: Sample got top_p=0; it must be above 0 and at most 1. ...
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    n_samples: int = 1

    def __post_init__(self) -> None:
        cure = "To always choose the most probable token, decode greedily."
        check_number(
            "Sample got temperature", self.temperature, min=MIN_TEMPERATURE, max=MAX_TEMPERATURE, cure=cure
        )
        check_number("Sample got top_p", self.top_p, above=0, max=1, cure="1 samples from all tokens.")
        check_int("Sample got seed", self.seed)
        check_int("Sample got n_samples", self.n_samples, min=1)
        cure = "Sample several times with different seeds."
        check_number("Sample got n_samples", self.n_samples, max=MAX_HYPOTHESES, cure=cure)


Strategy = Greedy | Beam | Sample


def check_batch_size(batch_size: int) -> None:
    """Raise unless the batch size is valid."""
    check_int("translate got batch_size", batch_size, min=1)
    check_number("translate got batch_size", batch_size, max=MAX_BATCH_SIZE)
