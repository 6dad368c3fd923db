"""How trainings go: what `regard train` has logged so far."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from regard.translation.checkpoint import read_config
from regard.translation.logs import LOG, SAMPLES, read_log
from regard.translation.logs import Row as LogRow
from regard.view.server.answers import Row, Sample, Training, TrainingRows

_MOST = 20_000_000  # bytes of samples that are read


def training(name: str, folder: Path) -> Training:
    """How far a training has come."""
    rows = read_log(folder / LOG)
    return Training(name=name, steps=rows[-1].step if rows else 0, finished=_is_finished(folder, rows))


def rows_after(folder: Path, after: int) -> TrainingRows:
    """What was logged after a step."""
    rows = [
        Row(**{field: getattr(row, field) for field in Row.__struct_fields__})
        for row in read_log(folder / LOG)
        if row.step > after
    ]
    return TrainingRows(rows=rows, samples=[one for one in _samples(folder) if one.step > after])


def _is_finished(folder: Path, rows: list[LogRow]) -> bool:
    """Its last act is to choose how alignments are read; one without attention ends with its last update."""
    try:
        config: dict[str, Any] = read_config(folder)
    except ValueError:
        return False
    plan = config["plan"].get("training", {})
    epochs, updates = plan.get("epochs"), plan.get("updates")
    reached = max((row.epoch or 0.0 for row in rows), default=0.0)
    done = bool(updates) and bool(rows) and rows[-1].step >= updates
    return "alignment" in config or done or (isinstance(epochs, int) and not updates and reached >= epochs)


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
