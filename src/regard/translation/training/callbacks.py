"""Events of a training run, and the callbacks that receive them.

A trainer calls `on_begin`, then `on_report`, `on_validation`, `on_save` and `on_message` in any order, then
`on_end`.
"""

import os
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

_LOSS_WEIGHT = 1e-3  # to break ties: BLEU is 0 at first, and remains 0 if all sentences are very short


class Report(NamedTuple):
    """Training progress.

    epoch: number of passes over the corpus. loss: mean loss per token since the last report. seconds:
    training time, including earlier runs. left: estimated remaining seconds.
    """

    step: int
    steps: int
    epoch: float
    loss: float
    learning_rate: float
    tokens_per_second: float
    seconds: float
    left: float


class SampleTranslation(NamedTuple):
    """A validation sentence, its translation by the model, and its reference translation.

    alignment: `Alignment.to_dict` for the translation; None for a model without cross-attention.
    """

    source: str
    translation: str
    reference: str
    alignment: dict[str, Any] | None = None

    def texts(self) -> dict[str, str]:
        """Return source, translation and reference by name."""
        return {"source": self.source, "translation": self.translation, "reference": self.reference}


class ValidationResult(NamedTuple):
    """Scores on the validation set.

    loss: mean loss per token. bleu: 0 to 100. exact: fraction of sentences that equal the reference.
    best: whether this is the best result so far.
    """

    step: int
    loss: float
    bleu: float
    exact: float
    sample: SampleTranslation
    best: bool = False

    def score(self, metric: str) -> float:
        """Return the value that selects the best model: negative loss, or BLEU. Larger is better."""
        return -self.loss if metric == "loss" else selection_score(self.bleu, self.loss)


class Callback:
    """Receives the events of a training run. By default, all methods do nothing.

    >>> from regard.translation.training.callbacks import Callback
    >>> class Count(Callback):
    ...     reports = 0
    ...
    ...     def on_report(self, report):
    ...         self.reports += 1
    """

    def on_begin(self, about: str, step: int, steps: int) -> None:
        """Called when training starts, or resumes after `step` of `steps` updates.

        about: description of the model.
        """

    def on_report(self, report: Report) -> None:
        """Called regularly to report progress."""

    def on_validation(self, result: ValidationResult) -> None:
        """Called after each validation."""

    def on_save(self, step: int, path: str | os.PathLike[str]) -> None:
        """Called after a checkpoint is saved."""

    def on_message(self, text: str) -> None:
        """Called with a message for the user."""

    def on_end(self, text: str) -> None:
        """Called when training finishes or is interrupted, as described by `text`."""


class CallbackList(Callback):
    """Passes every event to several callbacks."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self._callbacks = tuple(callbacks)
        for event in vars(Callback):
            if event.startswith("on_"):
                setattr(self, event, partial(self._forward, event))

    def _forward(self, event: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, event)(*arguments)


def selection_score(bleu: float, loss: float) -> float:
    """Return the score that selects the best model: BLEU, with ties broken by lower loss."""
    return bleu - _LOSS_WEIGHT * loss
