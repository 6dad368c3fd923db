"""Logs of training runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from regard.app.server.schema import LogRow, Sample, State, TrainingInfo, TrainingResponse
from regard.errors import ArgumentError
from regard.translation.config import TranslationConfig
from regard.translation.training.checkpoint import Checkpoint, is_training, read_config
from regard.translation.training.logs import LOG, SAMPLES, read_log
from regard.translation.training.logs import LogRow as CsvRow

_MAX_SAMPLE_BYTES = 20_000_000


def training_info(name: str, folder: Path) -> TrainingInfo:
    """Return the progress of a training run."""
    running = is_training(folder)  # before reading the log: the run may end in between
    rows = read_log(folder / LOG)
    return TrainingInfo(name=name, steps=_last_step(rows), state=_state(folder, rows, running))


def rows_after(folder: Path, after: int) -> TrainingResponse:
    """Return everything logged after a step."""
    running = is_training(folder)
    log = read_log(folder / LOG)
    rows = [
        LogRow(**{field: getattr(row, field) for field in LogRow.__struct_fields__})
        for row in log
        if row.step > after
    ]
    samples = [sample for sample in _read_samples(folder) if sample.step > after]
    state = _state(folder, log, running)
    return TrainingResponse(steps=_last_step(log), state=state, rows=rows, samples=samples)


def state_of(folder: Path) -> State:
    """Return the state of the training run in a folder."""
    running = is_training(folder)
    try:
        rows = read_log(folder / LOG)
    except (OSError, ValueError):
        rows = []
    return _state(folder, rows, running)


def _last_step(rows: list[CsvRow]) -> int:
    return rows[-1].step if rows else 0


def _state(folder: Path, rows: list[CsvRow], running: bool) -> State:
    if running:
        return "running"
    try:
        config: dict[str, Any] = read_config(folder)
        settings = TranslationConfig.from_dict(config["settings"]).training
    except (ValueError, OSError):
        return "stopped"
    if settings.updates:
        complete = _last_step(rows) >= settings.updates
    else:
        complete = max((row.epoch or 0.0 for row in rows), default=0.0) >= settings.epochs
    if complete or (settings.patience and _stopped_early(folder, settings.patience, config)):
        return "finished"
    return "stopped"


def _stopped_early(folder: Path, patience: int, config: dict[str, Any]) -> bool:
    """Return whether early stopping ended the run, and it was not extended since."""
    checkpoints, extended = Checkpoint.all(folder), config.get("extended")
    if not checkpoints or (isinstance(extended, list) and checkpoints[-1].step in extended):
        return False
    try:
        waited = checkpoints[-1].state().get("without_improvement")
    except ArgumentError:  # damaged
        return False
    return isinstance(waited, int) and waited >= patience


def _read_samples(folder: Path) -> Iterator[Sample]:
    """Yield the sample translations; an incomplete last line is skipped."""
    try:
        with open(folder / SAMPLES, "rb") as file:
            lines = file.read(_MAX_SAMPLE_BYTES).split(b"\n")[:-1]
    except OSError:
        return
    for line in lines:
        try:
            yield msgspec.json.decode(line, type=Sample)
        except (ValueError, RecursionError):  # not a sample
            continue
