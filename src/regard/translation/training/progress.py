"""Callbacks that display progress: live on a terminal, as plain lines elsewhere."""

import atexit
import math
import os
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING

from regard._util.extras import require
from regard._util.text import printable, shorten
from regard.translation.training.callbacks import Callback, Report, SampleTranslation, ValidationResult

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

SHOWN_VALIDATIONS = 4  # number of validations in the live display
FRAMES_PER_SECOND = 2
MIN_INTERVAL = 5.0  # seconds between plain progress lines
INTERVAL_DIVISOR = 50  # later, the interval is the elapsed time divided by this
MAX_INTERVAL = 20.0  # a trainer reports at least every 30 seconds
MAX_SAMPLE_LENGTH = 60  # maximum length of a sample sentence in a plain line


def create_display(console: "Console | None" = None) -> Callback:
    """Return a `LiveDisplay` on a terminal, otherwise a `PlainDisplay`."""
    if find_spec("rich") is None:
        return PlainDisplay()
    from rich.console import Console

    console = console or Console(highlight=False)
    interactive = console.is_interactive and not console.is_dumb_terminal
    if interactive and console.file.isatty() and console.encoding.startswith("utf"):
        return LiveDisplay(console)
    return PlainDisplay(console.file)


class PlainDisplay(Callback):
    """Prints a line for each validation, and progress every 5 seconds, later every 20 to 30 seconds."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream
        self._steps = 0
        self._next = -math.inf

    def on_begin(self, about: str, step: int, steps: int) -> None:
        self._steps, self._next = steps, -math.inf
        self._print(about)
        if step:
            self._print(f"resuming after step {step:,}")

    def on_report(self, report: Report) -> None:
        self._steps = report.steps
        if report.seconds < self._next and report.step < report.steps:
            return
        self._next = report.seconds + min(max(MIN_INTERVAL, report.seconds / INTERVAL_DIVISOR), MAX_INTERVAL)
        epoch, left = f"epoch {report.epoch:.2f}", f"{format_duration(report.left)} left"
        self._print("  ".join([self._format_step(report.step), epoch, *_format_report(report), left]))

    def on_validation(self, result: ValidationResult) -> None:
        scores = [f"{name} {score}" for name, score in _format_scores(result).items()]
        source, translation, reference = (
            shorten(printable(text), MAX_SAMPLE_LENGTH) for text in result.sample.texts().values()
        )
        sample = f'"{source}" → "{translation}" (reference "{reference}")'
        self._print("  ".join([self._format_step(result.step), *scores, *["best"] * result.best, sample]))

    def on_message(self, text: str) -> None:
        self._print(text)

    def on_end(self, text: str) -> None:
        self._print(text)

    def _format_step(self, step: int) -> str:
        steps = f"{self._steps:,}"
        return f"step {step:>{len(steps)},}/{steps}"

    def _print(self, text: str) -> None:
        stream = self._stream or sys.stdout  # looked up each time: it may be redirected
        encoding = getattr(stream, "encoding", None) or "utf-8"
        text = "\n".join(printable(line) for line in text.splitlines())
        with suppress(OSError):  # a closed pipe must not end training
            print(text.encode(encoding, "replace").decode(encoding), file=stream, flush=True)


class LiveDisplay(Callback):
    """A live progress bar with the last validations and a sample translation."""

    def __init__(self, console: "Console | None" = None) -> None:
        require("rich", "LiveDisplay")
        from rich.console import Console

        self._console = console or Console(highlight=False)
        self._live: Live | None = None
        self._reset(0, 0)

    def _reset(self, step: int, steps: int) -> None:
        self._step, self._steps = step, steps
        self._report: Report | None = None
        self._reported = time.monotonic()
        self._results: list[ValidationResult] = []
        self._saved: int | None = None

    def on_begin(self, about: str, step: int, steps: int) -> None:
        from rich.live import Live

        self._stop()
        self._reset(step, steps)
        self.on_message(about)
        if step:
            self.on_message(f"resuming after step {step:,}")
        self._live = Live(
            get_renderable=self._render,
            console=self._console,
            refresh_per_second=FRAMES_PER_SECOND,
            transient=False,
        )
        atexit.register(self._stop)  # restore the cursor, however the program ends
        self._live.start()

    def on_report(self, report: Report) -> None:
        self._report, self._reported = report, time.monotonic()
        self._step, self._steps = report.step, report.steps

    def on_validation(self, result: ValidationResult) -> None:
        self._results = [*self._results, result]  # a new list: another thread may be rendering the old one
        self._step = max(self._step, result.step)

    def on_save(self, step: int, path: str | os.PathLike[str]) -> None:
        self._saved = step
        self._step = max(self._step, step)

    def on_message(self, text: str) -> None:
        from rich.text import Text

        with suppress(OSError):  # a closed terminal must not end training
            for line in text.splitlines():
                self._console.print(Text(printable(line)), soft_wrap=True)

    def on_end(self, text: str) -> None:
        self._stop()
        self.on_message(text)

    def _stop(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            atexit.unregister(self._stop)
            with suppress(OSError):
                live.stop()

    def _render(self) -> "RenderableType":
        from rich.console import Group
        from rich.text import Text

        parts = [self._bar(), self._numbers()]
        if self._results:
            parts += [self._table(), _render_sample(self._results[-1].sample)]
        return Group(*parts, Text())  # an empty last line, where the terminal prints ^C

    def _bar(self) -> "RenderableType":
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        done = self._step / self._steps if self._steps else 0.0
        row = Table.grid(padding=(0, 2, 0, 0), expand=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        left = self._left()
        row.add_row(
            ProgressBar(total=max(self._steps, 1), completed=self._step),
            f"{done:.0%}  step {self._step:,}/{self._steps:,}" + (f"  {left} left" if left else ""),
        )
        return row

    def _left(self) -> str:
        """Return the remaining time, counted down between reports."""
        if self._report is None:
            return ""
        elapsed = time.monotonic() - self._reported
        return format_duration(max(self._report.left - elapsed, 0.0))

    def _numbers(self) -> "RenderableType":
        from rich.text import Text

        if self._report is None:
            return Text("starting …", style="dim")
        parts = [
            *_format_report(self._report),
            f"epoch {self._report.epoch:.2f}",
            format_duration(self._report.seconds),
        ]
        if self._saved is not None:
            parts.append(f"saved at step {self._saved:,}")
        return Text("  ".join(parts), no_wrap=True, overflow="ellipsis")

    def _table(self) -> "RenderableType":
        """Return a table of the last validations, including the best one if it is older."""
        from rich.table import Table

        best = max((result.step for result in self._results if result.best), default=None)
        shown = self._results[-SHOWN_VALIDATIONS:]
        older = [result for result in self._results[:-SHOWN_VALIDATIONS] if result.best][-1:]
        if older and older[0].step == best:
            shown = [*older, *shown[1:]]
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
        for name in ("step", *_format_scores(shown[-1])):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        for result in shown:
            label, style = ("best", "bold green") if result.step == best else ("", None)
            table.add_row(f"{result.step:,}", *_format_scores(result).values(), label, style=style)
        return table


def _render_sample(sample: SampleTranslation) -> "RenderableType":
    """Render three lines, truncated to the width of the terminal."""
    from rich.console import Group
    from rich.text import Text

    texts = sample.texts()
    width = max(map(len, texts)) + 2
    lines = (((f"{name:<{width}}", "dim"), printable(sentence)) for name, sentence in texts.items())
    return Group(*(Text.assemble(*line, no_wrap=True, overflow="ellipsis") for line in lines))


def _format_report(report: Report) -> list[str]:
    return [
        f"loss {report.loss:.3f}",
        f"lr {report.learning_rate:.2e}",
        f"{report.tokens_per_second:,.0f} tokens/s",
    ]


def _format_scores(result: ValidationResult) -> dict[str, str]:
    bleu, exact = f"{result.bleu:.1f}", f"{100 * result.exact:.1f} %"
    return {"dev loss": f"{result.loss:.3f}", "dev BLEU": bleu, "exact": exact}


def format_duration(seconds: float) -> str:
    """Format seconds as m:ss or h:mm:ss; "?" if not finite."""
    if not math.isfinite(seconds):
        return "?"
    minutes, seconds = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
