"""Logs of training runs."""

from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from regard.app.server.endpoints import endpoint
from regard.app.server.schema import Alignment, Request, Response
from regard.app.server.security import RequestError
from regard.app.server.state import AppState
from regard.errors import ArgumentError
from regard.translation.config import TranslationConfig
from regard.translation.folder_lock import is_training
from regard.translation.model_folder import LOG, SAMPLES, read_config
from regard.translation.training.checkpoint import Checkpoint
from regard.translation.training.logs import LogRow as CsvRow
from regard.translation.training.logs import read_log

_MAX_SAMPLE_BYTES = 20_000_000


class TrainingRequest(Request, kw_only=True):
    """The part of the log to return."""

    after: Annotated[int, Meta(ge=-1, le=2**53, description="Return rows after this step.")] = -1


State = Literal["running", "finished", "stopped"]


class TrainingInfo(Response, kw_only=True):
    """A training run with a log. The state "stopped" means that the run is incomplete."""

    name: str
    steps: int
    state: State


class TrainingsResponse(Response, kw_only=True):
    """The training runs in the folders specified at startup."""

    trainings: list[TrainingInfo]


class LogRow(Response, kw_only=True):
    """A row of the training log."""

    step: int
    loss: float | None
    dev_loss: float | None
    dev_bleu: float | None
    learning_rate: float | None
    tokens_per_second: float | None
    seconds: float | None


class Sample(Response, kw_only=True):
    """A validation sentence and its translation at one step."""

    step: int
    source: str
    text: str
    reference: str
    alignment: Alignment | None


class TrainingResponse(Response, kw_only=True):
    """Log rows and samples after the requested step, and the current state."""

    steps: int
    state: State
    rows: list[LogRow]
    samples: list[Sample]


class DemoResponse(Response, kw_only=True):
    """The name of the demo translator."""

    name: str


@endpoint("POST", "/api/demo", "Train the demo translator in the background.")
def train_demo(state: AppState) -> DemoResponse:
    """Start training the demo translator, unless it is trained or in training."""
    demo = state.registry.demo
    if demo is None:
        raise ArgumentError(
            "There is no demo translator on this server. Start the server without folders or --recording: "
            "regard look."
        )
    demo.start()
    return DemoResponse(name=demo.name)


@endpoint("GET", "/api/training", "Training runs.")
def trainings(state: AppState) -> TrainingsResponse:
    """Return the training runs that have a log."""
    infos = []
    for name, folder in state.registry.trainings().items():
        rows, run_state = _read(folder)
        infos.append(TrainingInfo(name=name, steps=_last_step(rows), state=run_state))
    return TrainingsResponse(trainings=infos)


@endpoint("GET", "/api/training/{name:path}", "Log of a training run.")
def training(state: AppState, request: TrainingRequest, path: dict[str, str]) -> TrainingResponse:
    """Return everything that a training run logged after a step."""
    folders = state.registry.trainings()
    if path["name"] not in folders:
        names = ", ".join(map(repr, list(folders)[:20])) or "none"
        raise RequestError(
            HTTPStatus.NOT_FOUND, f"Unknown training run {path['name'][:200]!r}. Available: {names}."
        )
    folder, after = folders[path["name"]], request.after
    rows, run_state = _read(folder)
    later = [row for row in rows if row.step > after]
    return TrainingResponse(
        steps=_last_step(rows),
        state=run_state,
        rows=[LogRow(**{field: getattr(row, field) for field in LogRow.__struct_fields__}) for row in later],
        samples=[sample for sample in _read_samples(folder) if sample.step > after],
    )


def _read(folder: Path) -> tuple[list[CsvRow], State]:
    """Return the log and the state of a training run."""
    running = is_training(folder)  # check before reading the log, because the run may end in between
    rows = read_log(folder / LOG)
    return rows, _state(folder, rows, running)


def state_of(folder: Path) -> State:
    """Return the state of the training run in a folder, even if its log is missing or corrupted."""
    try:
        return _read(folder)[1]
    except (OSError, ValueError):
        return _state(folder, [], is_training(folder))


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
    """Return whether early stopping ended the run and the run has not been extended since."""
    checkpoints, extended = Checkpoint.all(folder), config.get("extended")
    if not checkpoints or (isinstance(extended, list) and checkpoints[-1].step in extended):
        return False
    try:
        waited = checkpoints[-1].state().get("without_improvement")
    except ArgumentError:  # the file is corrupted
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
        except (ValueError, RecursionError):  # the line is not a sample
            continue
