"""Training logs: log.csv, which `regard curves` draws, samples.jsonl, and TensorBoard files."""

import csv
import json
import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from regard._util.extras import install_command
from regard._util.files import check_regular, read_regular, write_atomic
from regard._util.text import printable
from regard.errors import ArgumentError
from regard.translation.model_folder import LOG, SAMPLES, TENSORBOARD
from regard.translation.training.callbacks import Callback, Report, ValidationResult, selection_score

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_FLUSH_INTERVAL = 60.0  # seconds between flushes of the TensorBoard files
_MAX_LOG_BYTES = 1 << 28  # enough for millions of rows
_MAX_VALUE = 1e15  # largest valid step or measurement


class LogRow(NamedTuple):
    """A row in log.csv, with columns from `Report` and `ValidationResult`; missing values are None.

    A validation without a report has the `seconds` of the previous report.
    """

    step: int
    epoch: float | None = None
    loss: float | None = None
    learning_rate: float | None = None
    tokens_per_second: float | None = None
    seconds: float | None = None
    dev_loss: float | None = None
    dev_bleu: float | None = None


def best_row(rows: Sequence[LogRow]) -> LogRow | None:
    """Return the row with the best BLEU, with ties broken by lower loss; None if no row has a BLEU score."""
    scored = [
        (selection_score(row.dev_bleu, row.dev_loss or 0.0), row)
        for row in rows
        if row.dev_bleu is not None and math.isfinite(row.dev_bleu)
    ]
    return max(scored, key=lambda item: item[0])[1] if scored else None  # the first in a tie


def read_log(path: str | os.PathLike[str]) -> list[LogRow]:
    """Read the rows of a log. An incomplete last line is ignored.

    path: log.csv, or the model folder.

    >>> import tempfile
    >>> from regard.translation.training.logs import CsvLog, read_log
    >>> from regard.translation.training.callbacks import ValidationResult
    >>> folder = tempfile.mkdtemp()
    >>> log = CsvLog(folder)
    >>> log.on_begin("A small Transformer", 0, 2000)
    >>> log.on_validation(ValidationResult(500, 2.5, 31.4, None, None, True))
    >>> read_log(folder)[0].dev_bleu
    31.4
    """
    path = Path(path) / LOG if Path(path).is_dir() else Path(path)
    return [row for row, _ in _rows(path, read_regular(path, _MAX_LOG_BYTES))]


def _rows(path: Path, content: bytes) -> list[tuple[LogRow, bytes]]:
    """Return each row with its line in the file."""
    lines = content.splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()  # training was killed while writing this line
    if not lines:
        return []
    try:
        names = _values(lines[0])
    except csv.Error:  # an unterminated field
        names = []
    if not set(LogRow._fields) <= set(names):
        raise ArgumentError(
            f"{os.fspath(path)!r} is not a training log: its first line must be {','.join(LogRow._fields)}."
        )
    rows = []
    for number, line in enumerate(lines[1:], 2):
        try:
            rows.append((_row(dict(zip(names, _values(line), strict=True))), line))
        except (ValueError, OverflowError, csv.Error):
            raise ArgumentError(
                f"{os.fspath(path)!r}, line {number}: expected a number in each of {len(names)} columns. "
                "Remove the line."
            ) from None
    return rows


def _values(line: bytes) -> list[str]:
    return next(csv.reader([line.decode(errors="replace")]), [])


def _row(values: dict[str, str]) -> LogRow:
    numbers = {name: float(values[name]) if values[name] else None for name in LogRow._fields[1:]}
    step = int(values["step"])
    if not 0 <= step < _MAX_VALUE or any(
        _MAX_VALUE < abs(value) < math.inf for value in numbers.values() if value
    ):
        raise ValueError("out of range")
    return LogRow(step, **numbers)


def _line(row: LogRow) -> bytes:
    file = StringIO()
    numbers = ("" if value is None else f"{value:.8g}" for value in row[1:])
    csv.writer(file, lineterminator="\n").writerow([row.step, *numbers])
    return file.getvalue().encode()


class CsvLog(Callback):
    """Writes one row to FOLDER/log.csv immediately after each reported or validated step.

    When training resumes after a step, the rows for later steps are removed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder) / LOG
        self._existed = self.path.parent.is_dir()
        self._row = LogRow(-1)  # the last row
        self._start = self._stop = 0  # its position in the file

    def on_begin(self, about: str, step: int, steps: int) -> None:
        kept = []
        if step and self.path.exists():
            rows = _rows(self.path, read_regular(self.path, _MAX_LOG_BYTES))
            kept = [(row, line) for row, line in rows if row.step <= step]
        content = b"".join([_HEADER, *(line for _, line in kept)])
        if self._existed:
            self.path.parent.stat()  # raises if the folder was removed
        write_atomic(self.path, content)
        self._row, last = kept[-1] if kept else (LogRow(-1), b"")
        self._start, self._stop = len(content) - len(last), len(content)

    def on_report(self, report: Report) -> None:
        known = {name: value for name, value in report._asdict().items() if name in LogRow._fields}
        self._put(report.step, known)

    def on_validation(self, result: ValidationResult) -> None:
        self._put(result.step, {"dev_loss": result.loss, "dev_bleu": result.bleu})

    def _put(self, step: int, known: dict[str, float | None]) -> None:
        """Append a row, or update the last one if it has the same step."""
        if step == self._row.step:
            self._row = self._row._replace(**known)  # type: ignore[arg-type]
        else:
            self._row = LogRow(step, seconds=self._row.seconds)._replace(**known)  # type: ignore[arg-type]
            self._start = self._stop
        if not self.path.exists() or self.path.stat().st_size < self._start:
            self.path.parent.stat()  # raises if the folder was removed
            write_atomic(self.path, _HEADER)  # the log was removed: start a new one
            self._start = len(_HEADER)
        line = _line(self._row)
        self._stop = self._start + len(line)
        with _named(self.path), open(self.path, "r+b") as file:
            file.seek(self._start)
            file.write(line)
            file.truncate()


_HEADER = (",".join(LogRow._fields) + "\n").encode()


class SampleLog(Callback):
    """Writes FOLDER/samples.jsonl: the translation of one sentence at each validation.

    Each line has step, source, text, reference and alignment (`Alignment.to_dict`, or null). As in `CsvLog`,
    resuming removes the lines for later steps.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder) / SAMPLES

    def on_begin(self, about: str, step: int, steps: int) -> None:
        kept = b""
        if step and self.path.exists():
            lines = read_regular(self.path, _MAX_LOG_BYTES).splitlines(keepends=True)
            kept = b"".join(line for line in lines if 0 <= _step(line) <= step)
        write_atomic(self.path, kept)

    def on_validation(self, result: ValidationResult) -> None:
        values = (result.step, *result.sample)
        line = dict(zip(("step", "source", "text", "reference", "alignment"), values, strict=True))
        content = json.dumps(line, ensure_ascii=False).encode(errors="replace")
        if self.path.exists():
            check_regular(self.path)  # a pipe would block
        with _named(self.path), open(self.path, "ab") as file:
            file.write(content + b"\n")


def _step(line: bytes) -> int:
    """Return the step in a line of samples.jsonl; -1 if the line is incomplete."""
    try:
        step = json.loads(line)["step"] if line.endswith(b"\n") else -1
    except (ValueError, LookupError, TypeError, RecursionError):
        return -1
    return step if type(step) is int else -1


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Add the file name to OSErrors; the error for a full disk has none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


class TensorBoardLog(Callback):
    """Writes FOLDER/tensorboard/ if tensorboard is installed; prints a warning if it is missing or fails."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder) / TENSORBOARD
        self._writer: SummaryWriter | None = None
        self._flushed = 0.0

    def on_begin(self, about: str, step: int, steps: int) -> None:
        self.on_end("")
        if find_spec("tensorboard") is None:
            command = install_command("tensorboard")
            print(f"No TensorBoard files will be written. To enable them, run: {command}", file=sys.stderr)
            return
        with warnings.catch_warnings():  # from tensorboard's dependencies
            warnings.simplefilter("ignore")
            from torch.utils.tensorboard import SummaryWriter

            with self._contained():
                # No automatic flushes: their thread prints a traceback if the folder is gone.
                self._writer = SummaryWriter(
                    os.fspath(self.path), purge_step=step + 1, flush_secs=threading.TIMEOUT_MAX
                )
                self._writer.add_text("about", about, step)
                self._flushed = time.monotonic()

    @contextmanager
    def _contained(self) -> Iterator[None]:
        """Turn any TensorBoard failure into a warning."""
        try:
            yield
        except Exception as error:
            self._writer = None
            reason = printable(str(error))
            print(f"TensorBoard failed; no more files will be written: {reason}", file=sys.stderr)

    def on_report(self, report: Report) -> None:
        names = ("loss", "learning_rate", "tokens_per_second")
        self._write(report.step, {f"train/{name}": getattr(report, name) for name in names})

    def on_validation(self, result: ValidationResult) -> None:
        # indented by four spaces: TensorBoard shows it verbatim
        sample = "\n".join(f"    {name}: {text}" for name, text in result.sample.texts().items())
        scores = {"dev/loss": result.loss, "dev/bleu": result.bleu, "dev/exact": result.exact}
        self._write(result.step, scores, sample)

    def on_end(self, text: str) -> None:
        if writer := self._current_writer():
            with self._contained():
                writer.close()
            self._writer = None

    def _write(self, step: int, numbers: dict[str, float], sample: str = "") -> None:
        if writer := self._current_writer():
            with self._contained():
                for name, number in numbers.items():
                    writer.add_scalar(name, number, step)
                if sample:
                    writer.add_text("dev/sample", sample, step)
                if sample or time.monotonic() - self._flushed > _FLUSH_INTERVAL:
                    writer.flush()
                    self._flushed = time.monotonic()

    def _current_writer(self) -> "SummaryWriter | None":
        """Return the writer; None if there is none, or if its folder was removed."""
        if self._writer and not self.path.is_dir():
            self._writer = None
        return self._writer
