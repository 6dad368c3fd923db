"""What remains of a training: log.csv, which `regard curves` draws, samples.jsonl, files for TensorBoard."""

import csv
import json
import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from regard._util.files import check_regular, read_regular, write_atomic
from regard._util.text import printable
from regard.errors import ArgumentError
from regard.translation.training.progress import Callback, Report, ValidationResult, selection_score

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_FLUSH = 60.0  # seconds after which TensorBoard's files are brought up to date
_LARGEST = 1 << 28  # bytes of a log: millions of rows
_MOST = 1e15  # steps, and whatever else is counted or measured
LOG, SAMPLES = "log.csv", "samples.jsonl"


class LogRow(NamedTuple):
    """A row of a log: what was reported at a step, and what was judged; None for what was not.

    The columns are those of `Report` and `ValidationResult`. In a row that was judged and not reported, `seconds` is
    that of the report before it.
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
    """The row with the best BLEU, the one that a training keeps: see `worth`. None if none was judged.

    >>> from regard.translation.training.logs import LogRow, best_row
    >>> best_row([LogRow(10, dev_bleu=9, dev_loss=2), LogRow(20, dev_bleu=9, dev_loss=1), LogRow(30)]).step
    20
    """
    judged = [
        (selection_score(row.dev_bleu, row.dev_loss or 0.0), row)
        for row in rows
        if row.dev_bleu is not None and math.isfinite(row.dev_bleu)
    ]
    return max(judged, key=lambda one: one[0])[1] if judged else None  # the first of several that are equal


def read_log(path: str | os.PathLike[str]) -> list[LogRow]:
    """The rows of a log; the file's name or its folder's. A last line that was not finished is left out.

    path: of log.csv, or of the model folder.

    >>> import tempfile
    >>> from regard.translation.training.logs import CsvLog, read_log
    >>> from regard.translation.training.progress import ValidationResult
    >>> folder = tempfile.mkdtemp()
    >>> log = CsvLog(folder)
    >>> log.on_begin("A small Transformer", 0, 2000)
    >>> log.on_validation(ValidationResult(500, 2.5, 31.4, None, None, True))
    >>> read_log(folder)[0].dev_bleu
    31.4
    """
    path = Path(path) / LOG if Path(path).is_dir() else Path(path)
    return [row for row, _ in _rows(path, read_regular(path, _LARGEST))]


def _rows(path: Path, content: bytes) -> list[tuple[LogRow, bytes]]:
    """Each row, and the line it was read from."""
    lines = content.splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()  # a training was killed while it wrote this line
    if not lines:
        return []
    try:
        names = _values(lines[0])
    except csv.Error:  # a field without end
        names = []
    if not set(LogRow._fields) <= set(names):
        raise ArgumentError(
            f"{os.fspath(path)!r} is no log of a training; its first line should be {','.join(LogRow._fields)}."
        )
    rows = []
    for number, line in enumerate(lines[1:], 2):
        try:
            rows.append((_row(dict(zip(names, _values(line), strict=True))), line))
        except (ValueError, OverflowError, csv.Error):
            raise ArgumentError(
                f"{os.fspath(path)!r}, line {number}, has not a number in each of its {len(names)} columns; "
                "remove the line."
            ) from None
    return rows


def _values(line: bytes) -> list[str]:
    return next(csv.reader([line.decode(errors="replace")]), [])


def _row(values: dict[str, str]) -> LogRow:
    numbers = {name: float(values[name]) if values[name] else None for name in LogRow._fields[1:]}
    step = int(values["step"])
    if not 0 <= step < _MOST or any(_MOST < abs(one) < math.inf for one in numbers.values() if one):
        raise ValueError("no number that a training has")
    return LogRow(step, **numbers)


def _line(row: LogRow) -> bytes:
    file = StringIO()
    numbers = ("" if value is None else f"{value:.8g}" for value in row[1:])
    csv.writer(file, lineterminator="\n").writerow([row.step, *numbers])
    return file.getvalue().encode()


class CsvLog(Callback):
    """Writes FOLDER/log.csv, one row for each step that was reported or judged, at once.

    When a training goes on after a step, the rows of later steps are removed first: they will come again.

    >>> import tempfile
    >>> from regard.translation.training.logs import CsvLog, read_log
    >>> from regard.translation.training.progress import Report
    >>> log = CsvLog(tempfile.mkdtemp())
    >>> log.on_begin("A small Transformer", 0, 2000)
    >>> for step in (100, 200, 300):
    ...     log.on_report(Report(step, 2000, 0.5, 4.2, 1e-3, 7800, 60, None))
    >>> log.on_begin("A small Transformer", 200, 2000)
    >>> [row.step for row in read_log(log.path)]
    [100, 200]
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder) / LOG
        self._existed = self.path.parent.is_dir()
        self._row = LogRow(-1)  # the last one
        self._start = self._stop = 0  # its bytes

    def on_begin(self, about: str, step: int, steps: int) -> None:
        kept = []
        if step and self.path.exists():
            rows = _rows(self.path, read_regular(self.path, _LARGEST))
            kept = [(row, line) for row, line in rows if row.step <= step]
        content = b"".join([_HEADER, *(line for _, line in kept)])
        if self._existed:
            self.path.parent.stat()  # as below
        write_atomic(self.path, content)
        self._row, last = kept[-1] if kept else (LogRow(-1), b"")
        self._start, self._stop = len(content) - len(last), len(content)

    def on_report(self, report: Report) -> None:
        known = {name: value for name, value in report._asdict().items() if name in LogRow._fields}
        self._put(report.step, known)

    def on_validation(self, judgement: ValidationResult) -> None:
        self._put(judgement.step, {"dev_loss": judgement.loss, "dev_bleu": judgement.bleu})

    def _put(self, step: int, known: dict[str, float | None]) -> None:
        """A new row, or more of the last one if it is of the same step."""
        if step == self._row.step:
            self._row = self._row._replace(**known)  # type: ignore[arg-type]
        else:
            self._row = LogRow(step, seconds=self._row.seconds)._replace(**known)  # type: ignore[arg-type]
            self._start = self._stop
        if not self.path.exists() or self.path.stat().st_size < self._start:
            self.path.parent.stat()  # of a folder that is gone, no new one is made
            write_atomic(self.path, _HEADER)  # somebody has removed it, and the training goes on
            self._start = len(_HEADER)
        line = _line(self._row)
        self._stop = self._start + len(line)
        with _named(self.path), open(self.path, "r+b") as file:
            file.seek(self._start)
            file.write(line)
            file.truncate()


_HEADER = (",".join(LogRow._fields) + "\n").encode()


class SampleLog(Callback):
    """Writes FOLDER/samples.jsonl: how one sentence of the dev data is translated, whenever it is judged.

    Each line is an object with step, source, text, reference and alignment: which of the model's words came
    from which, as `Alignment.to_dict` says it, or null. Lines of later steps than a training goes on from are
    removed, as in `CsvLog`.

    >>> import tempfile
    >>> from regard.translation.training.logs import SampleLog
    >>> from regard.translation.training.progress import SampleTranslation, ValidationResult
    >>> log = SampleLog(tempfile.mkdtemp())
    >>> log.on_begin("A small Transformer", 0, 2000)
    >>> log.on_validation(ValidationResult(500, 2.5, 31.4, 0.25, SampleTranslation("zwei Hunde", "two dogs", "two dogs"), True))
    >>> log.path.read_text()
    '{"step": 500, "source": "zwei Hunde", "text": "two dogs", "reference": "two dogs", "alignment": null}\\n'
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder) / SAMPLES

    def on_begin(self, about: str, step: int, steps: int) -> None:
        kept = b""
        if step and self.path.exists():
            lines = read_regular(self.path, _LARGEST).splitlines(keepends=True)
            kept = b"".join(line for line in lines if 0 <= _step(line) <= step)
        write_atomic(self.path, kept)

    def on_validation(self, judgement: ValidationResult) -> None:
        sample = judgement.sample
        if sample is None:
            return
        found = {
            "step": judgement.step,
            "source": sample.source,
            "text": sample.translation,
            "reference": sample.reference,
            "alignment": sample.alignment,
        }
        line = json.dumps(found, ensure_ascii=False).encode(errors="replace")
        if self.path.exists():
            check_regular(self.path)  # a pipe would be waited for
        with _named(self.path), open(self.path, "ab") as file:
            file.write(line + b"\n")


def _step(line: bytes) -> int:
    """The step of a line of samples; −1 if it is none, as a training was killed while it wrote it."""
    try:
        found = json.loads(line)["step"] if line.endswith(b"\n") else -1
    except (ValueError, LookupError, TypeError, RecursionError):
        return -1
    return found if type(found) is int else -1


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """An error of the system names the file; that of a full disk would name none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


class TensorBoardLog(Callback):
    """Writes FOLDER/tensorboard/, if the package tensorboard is there, and otherwise says once how to get it.

    say: who is told so; standard error by default.

    >>> import tempfile
    >>> from regard.translation.training.logs import TensorBoardLog
    >>> log = TensorBoardLog(tempfile.mkdtemp())
    >>> log.on_end("nothing was logged")
    """

    def __init__(self, folder: str | os.PathLike[str], say: Callable[[str], None] | None = None) -> None:
        self.path = Path(folder) / "tensorboard"
        self._say = say or (lambda text: print(text, file=sys.stderr))
        self._writer: SummaryWriter | None = None
        self._flushed = 0.0

    def on_begin(self, about: str, step: int, steps: int) -> None:
        self.on_end("")
        if find_spec("tensorboard") is None:
            self._say("There will be no files for TensorBoard; to get them: pip install tensorboard")
            return
        with warnings.catch_warnings():  # of tensorboard's own dependencies: none is for the user
            warnings.simplefilter("ignore")
            from torch.utils.tensorboard import SummaryWriter

            with self._spared():
                # Its own thread would flush at any time, and print a traceback if the folder is gone by then.
                self._writer = SummaryWriter(
                    os.fspath(self.path), purge_step=step + 1, flush_secs=threading.TIMEOUT_MAX
                )
                self._writer.add_text("about", about, step)
                self._flushed = time.monotonic()

    @contextmanager
    def _spared(self) -> Iterator[None]:
        """Whatever fails in TensorBoard, a folder whose name is no text for example, ends no training."""
        try:
            yield
        except Exception as error:
            self._writer = None
            self._say(f"There will be no more files for TensorBoard, which failed: {printable(str(error))}")

    def on_report(self, report: Report) -> None:
        names = ("loss", "learning_rate", "tokens_per_second")
        self._add(report.step, {f"train/{name}": getattr(report, name) for name in names})

    def on_validation(self, judgement: ValidationResult) -> None:
        known = {"dev/loss": judgement.loss, "dev/bleu": judgement.bleu, "dev/exact": judgement.exact}
        self._add(judgement.step, {name: value for name, value in known.items() if value is not None})
        if self._there() and self._writer and judgement.sample:
            # indented by four blanks, so that TensorBoard's markdown shows a sentence as it is
            text = "\n".join(f"    {name}: {text}" for name, text in judgement.sample.texts().items())
            with self._spared():
                self._writer.add_text("dev/sample", text, judgement.step)
                self._flush()

    def on_end(self, text: str) -> None:
        if self._there() and self._writer:
            with self._spared():
                self._writer.close()
            self._writer = None

    def _add(self, step: int, numbers: dict[str, float]) -> None:
        if self._there() and self._writer:
            with self._spared():
                for name, number in numbers.items():
                    self._writer.add_scalar(name, number, step)
                if time.monotonic() - self._flushed > _FLUSH:
                    self._flush()

    def _flush(self) -> None:
        if self._writer:
            self._writer.flush()
            self._flushed = time.monotonic()

    def _there(self) -> bool:
        """Whether it can be written; where the folder was removed, no more is."""
        if self._writer and not self.path.is_dir():
            self._writer = None
        return self._writer is not None
