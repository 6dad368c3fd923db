"""A tiny training task: reverse the digits of a number; callbacks that record or interrupt its training."""

import hashlib
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from regard._util.files import CHECKSUMS
from regard.translation.config import TranslationConfig
from regard.translation.data.batches import InMemoryPairs
from regard.translation.data.pairs import Pair
from regard.translation.model_folder import MODEL, STATE
from regard.translation.tokens import Tokenizer, TokenizerPair
from regard.translation.training.callbacks import Callback, Report, ValidationResult
from regard.translation.training.loop import Trainer, TrainingResult
from regard.translation.training.preparation import TrainingData
from tests.translation.folders import content

PAIRS = [Pair(" ".join(str(n)), " ".join(reversed(str(n)))) for n in range(95, 155)]
DEV = [Pair(" ".join(str(n)), " ".join(reversed(str(n)))) for n in range(98, 118, 4)]
_SHARED = Tokenizer.learn([pair.source for pair in PAIRS], kind="words", size=20)
TOKENS = TokenizerPair(_SHARED, _SHARED)
IDS = InMemoryPairs([(_SHARED.encode(pair.source), _SHARED.encode(pair.target)) for pair in PAIRS])
PATIENT = ("patience=1", "learning_rate=0.3", "updates=40")  # stops improving early
_SETTINGS = """
model.width=16 model.layers=1 model.heads=2 model.dropout=0.2 tokens.kind=words tokens.size=20
training.updates=10 training.batch_tokens=64 training.accumulate=2 training.warmup=4 training.validate_every=4
training.save_every=3 training.average_checkpoints=3 training.unknown_rate=0.2 training.learning_rate=0.01
training.metric=loss training.threads=1 training.precision=float32
"""


def small_config(model: str = "transformer", *settings: str) -> TranslationConfig:
    """Return a config with every feature that makes resuming difficult, unless overridden.

    settings: "model.width=32", or "updates=3" for "training.updates=3".
    """
    named = [text if "." in text.partition("=")[0] else f"training.{text}" for text in settings]
    return TranslationConfig.preset("tiny", model).override([*_SETTINGS.split(), *named])


def small_trainer(
    folder: Path,
    config: TranslationConfig | None = None,
    *,
    pairs: InMemoryPairs = IDS,
    dev: Sequence[Pair] = DEV,
    callbacks: Sequence[Callback] = (),
) -> Trainer:
    """Return a trainer for a folder, which is created if necessary."""
    folder.mkdir(parents=True, exist_ok=True)
    data = TrainingData(TOKENS, pairs, list(dev))
    return Trainer(folder, config or small_config(), data, callbacks=callbacks)


def train_small(folder: Path, config: TranslationConfig | None = None) -> TrainingResult:
    """Train a small model in `folder`, resuming from the last checkpoint if there is one."""
    return small_trainer(folder, config).run()


class Recorder(Callback):
    """Records all events of a training run."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.validations: list[ValidationResult] = []
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.texts: list[str] = []
        self.begun: list[tuple[int, int]] = []

    def on_begin(self, about: str, step: int, steps: int) -> None:
        self.begun.append((step, steps))

    def on_report(self, report: Report) -> None:
        self.reports.append(report)

    def on_validation(self, result: ValidationResult) -> None:
        self.validations.append(result)

    def on_save(self, step: int, path: str | os.PathLike[str]) -> None:
        self.weights[step] = load_file(Path(path) / MODEL)

    def on_message(self, text: str) -> None:
        self.texts.append(text)

    on_end = on_message


def bits(folder: Path) -> dict[str, Any]:
    """Return digests of a training's files, excluding times; pytest takes minutes to compare long bytes."""
    found: dict[str, Any] = content(folder)
    for name in found:
        if name.endswith(STATE):
            found[name] = json.loads(found[name]) | {"seconds": None, "validation_seconds": None}
        elif name.endswith(CHECKSUMS):
            found[name] = [line for line in found[name].decode().splitlines() if not line.endswith(STATE)]
        else:
            found[name] = hashlib.sha256(found[name]).hexdigest()
    return found


class Interrupts(Recorder):
    """Sends a signal at one event."""

    def __init__(self, moment: str, step: int, number: signal.Signals = signal.SIGINT) -> None:
        super().__init__()
        self._moment, self._step, self._number = moment, step, number

    def on_save(self, step: int, path: str | os.PathLike[str]) -> None:
        super().on_save(step, path)
        self._press("on_save", step)

    def on_validation(self, result: ValidationResult) -> None:
        super().on_validation(result)
        self._press("on_validation", result.step)

    def _press(self, moment: str, step: int) -> None:
        if (moment, step) == (self._moment, self._step):
            signal.raise_signal(self._number)
