"""How trainings go: what `regard train` has logged so far."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from regard.app.server.schema import Row, Sample, State, Training, TrainingRows
from regard.errors import ArgumentError
from regard.translation.config import TranslationConfig
from regard.translation.training.checkpoint import Checkpoint, is_training, read_config
from regard.translation.training.logs import LOG, SAMPLES, read_log
from regard.translation.training.logs import Row as LogRow

_MOST = 20_000_000  # bytes of samples that are read


def training(name: str, folder: Path) -> Training:
    """How far a training has come."""
    running = is_training(folder)  # before the log is read, which may end meanwhile
    rows = read_log(folder / LOG)
    return Training(name=name, steps=_steps(rows), state=_state(folder, rows, running))


def rows_after(folder: Path, after: int) -> TrainingRows:
    """What was logged after a step."""
    running = is_training(folder)
    logged = read_log(folder / LOG)
    rows = [
        Row(**{field: getattr(row, field) for field in Row.__struct_fields__})
        for row in logged
        if row.step > after
    ]
    samples = [one for one in _samples(folder) if one.step > after]
    return TrainingRows(
        steps=_steps(logged), state=_state(folder, logged, running), rows=rows, samples=samples
    )


def state_of(folder: Path) -> State:
    """Whether a training is at work in a folder, and if not, whether it came to the end of its config."""
    running = is_training(folder)
    try:
        rows = read_log(folder / LOG)
    except (OSError, ValueError):
        rows = []
    return _state(folder, rows, running)


def _steps(rows: list[LogRow]) -> int:
    return rows[-1].step if rows else 0


def _state(folder: Path, rows: list[LogRow], running: bool) -> State:
    if running:
        return "running"
    try:
        folder_config: dict[str, Any] = read_config(folder)
        config = TranslationConfig.from_dict(folder_config["settings"]).training
    except (ValueError, OSError):
        return "stopped"
    if config.updates:
        reached = _steps(rows) >= config.updates
    else:
        reached = max((row.epoch or 0.0 for row in rows), default=0.0) >= config.epochs
    return "finished" if reached or (config.patience and _gave_up(folder, config.patience, folder_config)) else "stopped"


def _gave_up(folder: Path, patience: int, folder_config: dict[str, Any]) -> bool:
    """Whether it ended early, as it no longer improved; one that was lengthened since then has not."""
    saved, lengthened = Checkpoint.all(folder), folder_config.get("extended")
    if not saved or (isinstance(lengthened, list) and saved[-1].step in lengthened):
        return False
    try:
        waited = saved[-1].state().get("without_improvement")
    except ArgumentError:  # damaged
        return False
    return isinstance(waited, int) and waited >= patience


def _samples(folder: Path) -> Iterator[Sample]:
    """What the dev sample was translated to; a last line that was not finished is left out."""
    try:
        with open(folder / SAMPLES, "rb") as file:
            lines = file.read(_MOST).split(b"\n")[:-1]
    except OSError:
        return
    for line in lines:
        try:
            yield msgspec.json.decode(line, type=Sample)
        except (ValueError, RecursionError):  # no sample, and none of the reader's mistakes
            continue
