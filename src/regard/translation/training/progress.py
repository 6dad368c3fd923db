"""What a training tells while it runs, and how it is shown: live on a terminal, as plain lines elsewhere.

A trainer calls its callbacks: `begin`, then `report`, `judge`, `saved` and `say` in any order, then `end`.
"""

import atexit
import math
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from regard._util.text import printable, shorten

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

JUDGEMENTS = 4  # of the last ones that stay in sight
FRAMES = 2  # a second
PAUSE = 5.0  # seconds between two plain lines, at first
SHARE = 50  # and later this part of the time so far
MOST_PAUSE = 20.0  # but no more; a trainer reports every 30 seconds, or more often
LONGEST = 60  # characters of a sample's sentence in a plain line
_TIE = 1e-3  # BLEU is 0 at first, and always where all sentences are short; then the loss decides


class Report(NamedTuple):
    """Where a training stands.

    epoch: how often the corpus was read; loss: per token, mean since the last report; learning_rate;
    seconds: trained so far, over all resumes; left: how many more to expect, where that is known.
    """

    step: int
    steps: int
    epoch: float
    loss: float
    learning_rate: float
    tokens_per_second: float
    seconds: float
    left: float | None


class SampleTranslation(NamedTuple):
    """A sentence of the dev data, how the model translates it, and how it should.

    alignment: which of the model's words came from which, as `Alignment.to_dict` says it; None if the model
    does not attend to the source.
    """

    source: str
    translation: str
    reference: str
    alignment: dict[str, Any] | None = None

    def texts(self) -> dict[str, str]:
        """The three sentences, by name."""
        return {"source": self.source, "translation": self.translation, "reference": self.reference}


class ValidationResult(NamedTuple):
    """How good the model is on the dev data.

    loss: per token; bleu: 0 to 100; exact: the share of sentences translated exactly, 0 to 1;
    best: better than ever before.
    """

    step: int
    loss: float
    bleu: float | None
    exact: float | None
    sample: SampleTranslation | None
    best: bool


class Callback:
    """Who is told how a training goes; this one does nothing with it.

    >>> from regard.translation.training.progress import Callback
    >>> class Count(Callback):
    ...     reports = 0
    ...
    ...     def on_report(self, report):
    ...         self.reports += 1
    """

    def on_begin(self, about: str, step: int, steps: int) -> None:
        """A training begins, or goes on after `step`, up to `steps`; `about` says in words what it is."""

    def on_report(self, report: Report) -> None:
        """Some more steps are done."""

    def on_validation(self, judgement: ValidationResult) -> None:
        """The model was tried on the dev data."""

    def on_save(self, step: int, path: str | os.PathLike[str]) -> None:
        """A checkpoint was written."""

    def on_message(self, text: str) -> None:
        """Something that a person should know."""

    def on_end(self, text: str) -> None:
        """The training is over, or was interrupted; `text` says which."""


class CallbackList(Callback):
    """Several callbacks as one: each is told all.

    >>> from regard.translation.training.progress import PlainDisplay, CallbackList
    >>> CallbackList([PlainDisplay(), PlainDisplay()]).on_message("half of it is done")
    half of it is done
    half of it is done
    """

    def __init__(self, all_of_them: Sequence[Callback] = ()) -> None:
        self._all = tuple(all_of_them)

    def on_begin(self, about: str, step: int, steps: int) -> None:
        for one in self._all:
            one.on_begin(about, step, steps)

    def on_report(self, report: Report) -> None:
        for one in self._all:
            one.on_report(report)

    def on_validation(self, judgement: ValidationResult) -> None:
        for one in self._all:
            one.on_validation(judgement)

    def on_save(self, step: int, path: str | os.PathLike[str]) -> None:
        for one in self._all:
            one.on_save(step, path)

    def on_message(self, text: str) -> None:
        for one in self._all:
            one.on_message(text)

    def on_end(self, text: str) -> None:
        for one in self._all:
            one.on_end(text)


def create_display(console: "Console | None" = None) -> Callback:
    """What shows a training best: a `Display` on a terminal, `Lines` where there is none.

    >>> from io import StringIO
    >>> from rich.console import Console
    >>> from regard.translation.training.progress import create_display
    >>> type(create_display(Console(file=StringIO()))).__name__
    'PlainDisplay'
    """
    from rich.console import Console

    console = console or Console(highlight=False)
    live = console.is_interactive and not console.is_dumb_terminal
    if live and console.file.isatty() and console.encoding.startswith("utf"):
        return LiveDisplay(console)
    return PlainDisplay(console.file)


class PlainDisplay(Callback):
    """Plain lines: one for each judgement, and one for reports every 5 seconds, later every 20 or 30.

    >>> from regard.translation.training.progress import ValidationResult, PlainDisplay, SampleTranslation
    >>> lines = PlainDisplay()
    >>> lines.on_begin("A small Transformer", 0, 2000)
    A small Transformer
    >>> lines.on_validation(
    ...     ValidationResult(500, 2.5, 31.4, 0.25, SampleTranslation("Hunde bellen", "dogs bark", "dogs bark"), True)
    ... )
    step   500/2,000  dev loss 2.500  dev BLEU 31.4  exact 25.0 %  best  "Hunde bellen" → "dogs bark"
    (reference "dogs bark")
    """

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream
        self._steps = 0
        self._next = -math.inf

    def on_begin(self, about: str, step: int, steps: int) -> None:
        self._steps, self._next = steps, -math.inf
        self._print(about)
        if step:
            self._print(f"goes on after step {step:,}")

    def on_report(self, report: Report) -> None:
        self._steps = report.steps
        if report.seconds < self._next and report.step < report.steps:
            return
        self._next = report.seconds + min(max(PAUSE, report.seconds / SHARE), MOST_PAUSE)
        left = [] if report.left is None else [f"{format_duration(report.left)} left"]
        self._print(
            "  ".join([self._where(report.step), f"epoch {report.epoch:.2f}", *_figures(report), *left])
        )

    def on_validation(self, judgement: ValidationResult) -> None:
        parts = [self._where(judgement.step), *_verdict(judgement)]
        if judgement.best:
            parts.append("best")
        if judgement.sample:
            source, translation, reference = (
                shorten(printable(one), LONGEST) for one in judgement.sample.texts().values()
            )
            parts.append(f'"{source}" → "{translation}" (reference "{reference}")')
        self._print("  ".join(parts))

    def on_message(self, text: str) -> None:
        self._print(text)

    def on_end(self, text: str) -> None:
        self._print(text)

    def _where(self, step: int) -> str:
        steps = f"{self._steps:,}"
        return f"step {step:>{len(steps)},}/{steps}"

    def _print(self, text: str) -> None:
        stream = self._stream or sys.stdout  # looked up now: whoever redirects it later is heeded
        encoding = getattr(stream, "encoding", None) or "utf-8"
        text = "\n".join(printable(line) for line in text.splitlines())
        # who no longer listens, as `head` does, does not end the training
        with suppress(OSError):
            print(text.encode(encoding, "replace").decode(encoding), file=stream, flush=True)


class LiveDisplay(Callback):
    """A live progress bar on a terminal, below it the last judgements and a sample translation.

    >>> from io import StringIO
    >>> from rich.console import Console
    >>> from regard.translation.training.progress import LiveDisplay, Report
    >>> shown = LiveDisplay(Console(file=StringIO(), force_terminal=True, width=80))
    >>> shown.on_begin("A small Transformer", 0, 2000)
    >>> shown.on_report(Report(500, 2000, 3.2, 2.5, 7e-4, 7800, 60, 180))
    >>> shown.on_end("Interrupted after step 500.")
    """

    def __init__(self, console: "Console | None" = None) -> None:
        from rich.console import Console

        self._console = console or Console(highlight=False)
        self._live: Live | None = None
        self._begin(0, 0)

    def _begin(self, step: int, steps: int) -> None:
        self._step, self._steps = step, steps
        self._report: Report | None = None
        self._reported = time.monotonic()
        self._judgements: list[ValidationResult] = []
        self._saved: int | None = None

    def on_begin(self, about: str, step: int, steps: int) -> None:
        from rich.live import Live

        self._stop()
        self._begin(step, steps)
        self.on_message(about)
        if step:
            self.on_message(f"goes on after step {step:,}")
        self._live = Live(
            get_renderable=self._drawing, console=self._console, refresh_per_second=FRAMES, transient=False
        )
        atexit.register(self._stop)  # whatever ends the program, the terminal gets its cursor back
        self._live.start()

    def on_report(self, report: Report) -> None:
        self._report, self._reported = report, time.monotonic()
        self._step, self._steps = report.step, report.steps

    def on_validation(self, judgement: ValidationResult) -> None:
        self._judgements = [*self._judgements, judgement]  # a new list: another thread may be drawing the old
        self._step = max(self._step, judgement.step)

    def on_save(self, step: int, path: str | os.PathLike[str]) -> None:
        self._saved = step
        self._step = max(self._step, step)

    def on_message(self, text: str) -> None:
        from rich.text import Text

        with suppress(OSError):  # a terminal that was closed does not end the training
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

    def _drawing(self) -> "RenderableType":
        from rich.console import Group
        from rich.text import Text

        parts = [self._bar(), self._numbers()]
        if self._judgements:
            parts.append(self._table())
            if self._judgements[-1].sample:
                parts.append(_sample(self._judgements[-1].sample))
        return Group(*parts, Text())  # an empty last line, where the ^C of a terminal moves nothing

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
        """It is counted down between two reports."""
        if self._report is None or self._report.left is None:
            return ""
        passed = time.monotonic() - self._reported
        return format_duration(max(self._report.left - passed, 0.0))

    def _numbers(self) -> "RenderableType":
        from rich.text import Text

        if self._report is None:
            return Text("the first steps …", style="dim")
        parts = [*_figures(self._report), f"epoch {self._report.epoch:.2f}", format_duration(self._report.seconds)]
        if self._saved is not None:
            parts.append(f"saved at step {self._saved:,}")
        return Text("  ".join(parts), no_wrap=True, overflow="ellipsis")

    def _table(self) -> "RenderableType":
        """The last judgements, and the best, if it is older."""
        from rich.table import Table

        best = max((j.step for j in self._judgements if j.best), default=None)
        shown = self._judgements[-JUDGEMENTS:]
        older = [j for j in self._judgements[:-JUDGEMENTS] if j.best][-1:]
        if older and older[0].step == best:
            shown = [*older, *shown[1:]]
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
        for name in ("step", "dev loss", "dev BLEU", "exact"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        for one in shown:
            bleu = "" if one.bleu is None else f"{one.bleu:.1f}"
            exact = "" if one.exact is None else f"{100 * one.exact:.1f} %"
            is_best = one.step == best
            mark = "best" if is_best else ""
            style = "bold green" if is_best else None
            table.add_row(f"{one.step:,}", f"{one.loss:.3f}", bleu, exact, mark, style=style)
        return table


def _sample(sample: SampleTranslation) -> "RenderableType":
    """Three lines, cut where the terminal ends."""
    from rich.console import Group
    from rich.text import Text

    texts = sample.texts()
    width = max(map(len, texts)) + 2
    lines = (((f"{name:<{width}}", "dim"), printable(sentence)) for name, sentence in texts.items())
    return Group(*(Text.assemble(*line, no_wrap=True, overflow="ellipsis") for line in lines))


def _figures(report: Report) -> list[str]:
    return [
        f"loss {report.loss:.3f}",
        f"rate {report.learning_rate:.2e}",
        f"{report.tokens_per_second:,.0f} tokens/s",
    ]


def _verdict(judgement: ValidationResult) -> list[str]:
    return [
        f"dev loss {judgement.loss:.3f}",
        *([] if judgement.bleu is None else [f"dev BLEU {judgement.bleu:.1f}"]),
        *([] if judgement.exact is None else [f"exact {100 * judgement.exact:.1f} %"]),
    ]


def selection_score(bleu: float, loss: float) -> float:
    """What is to be as large as possible: BLEU, and of two that are equal the one with the lower loss.

    The best of a training is the first with the largest one.

    >>> from regard.translation.training.progress import selection_score
    >>> selection_score(31.4, 2.0) > selection_score(31.4, 2.5) > selection_score(31.3, 2.0)
    True
    """
    return bleu - _TIE * loss


def format_duration(seconds: float) -> str:
    """Seconds as a clock shows them.

    >>> from regard.translation.training.progress import format_duration
    >>> format_duration(75), format_duration(7265)
    ('1:15', '2:01:05')
    """
    if not math.isfinite(seconds):
        return "?"
    minutes, seconds = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
