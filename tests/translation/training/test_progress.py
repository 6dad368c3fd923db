"""Progress displays work for any sentences."""

import io
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from regard.translation.training import progress
from regard.translation.training.callbacks import Callback, Report, SampleTranslation, ValidationResult
from regard.translation.training.progress import LiveDisplay, PlainDisplay, create_display

CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
SENTENCE = SampleTranslation("Ein [bold]Mann[/] \x1b[31m schläft", "A man [sleeps]\n", "A 人 is sleeping")


def report(step: int = 100, steps: int = 1000, seconds: float = 60.0, left: float = 90.0) -> Report:
    return Report(step, steps, 1.25, 2.5, 7e-4, 7800.4, seconds, left)


def validation(step: int = 100, best: bool = False, sample=SENTENCE) -> ValidationResult:
    return ValidationResult(step, 2.25, 31.4, 0.125, sample, best)


def plain_lines(*calls) -> list[str]:
    stream = io.StringIO()
    lines = PlainDisplay(stream)
    for name, *arguments in calls:
        getattr(lines, name)(*arguments)
    return stream.getvalue().splitlines()


def live(*calls, width: int = 80) -> str:
    """Return the output of a live display, excluding control sequences."""
    stream = io.StringIO()
    shown = LiveDisplay(Console(file=stream, force_terminal=True, width=width, height=40, color_system=None))
    shown.on_begin("a model", 0, 1000)
    for name, *arguments in calls:
        getattr(shown, name)(*arguments)
    shown.on_end("the end")
    return CONTROL.sub("", stream.getvalue())


def last_frame(text: str) -> list[str]:
    """Return the lines from the last progress bar on."""
    lines = text.replace("\r", "\n").splitlines()
    return lines[max(i for i, line in enumerate(lines) if re.search(r"step [\d,]+/", line)) :]


def test_a_callback_ignores_events_by_default():
    for event in vars(Callback):
        if event.startswith("on_"):
            getattr(Callback(), event)(*[""] * (getattr(Callback, event).__code__.co_argcount - 1))


def test_a_report_is_one_line():
    (line,) = plain_lines(("on_report", report()))
    for part in ("100/1,000", "epoch 1.25", "loss 2.500", "lr 7.00e-04", "7,800 tokens/s", "1:30 left"):
        assert part in line


def test_a_validation_is_one_line_and_the_best_is_marked():
    first, second = plain_lines(("on_validation", validation(best=True)), ("on_validation", validation()))
    assert "dev loss 2.250  dev BLEU 31.4  exact 12.5 %  best" in first
    assert "best" not in second


def test_reports_are_printed_rarely():
    calls = [("on_report", report(step, 100_000, seconds=step / 10)) for step in range(1, 100_001, 5)]
    lines = plain_lines(*calls)  # nearly three hours
    assert 500 < len(lines) < 700
    assert "100,000/100,000" in plain_lines(*calls, ("on_report", report(100_000, 100_000)))[-1]  # always


def test_a_long_run_prints_every_report():
    seconds = [86_400.0 * 3 + 30 * n for n in range(100)]  # reports every 30 seconds after three days
    calls = [("on_report", report(n, 10**6, seconds=at)) for n, at in enumerate(seconds)]
    assert len(plain_lines(*calls)) == 100


def test_a_closed_terminal_does_not_end_a_run():
    class Closed(io.StringIO):
        def write(self, text):
            raise OSError(5, "Input/output error")

        def flush(self):
            raise OSError(5, "Input/output error")

    shown = LiveDisplay(Console(file=Closed(), force_terminal=True, width=80))
    shown.on_message("stopping after this update …")
    shown.on_end("stopped")


def test_resuming_prints_the_step():
    assert plain_lines(("on_begin", "a model", 500, 1000)) == ["a model", "resuming after step 500"]


@given(st.text(), st.text(), st.text())
def test_no_sentence_breaks_a_line(source, translation, reference):
    lines = plain_lines(
        ("on_validation", validation(sample=SampleTranslation(source, translation, reference)))
    )
    assert len(lines) == 1
    assert all(char.isprintable() or char in "\u200c\u200d" for char in lines[0])


def test_plain_lines_without_utf8():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    PlainDisplay(stream).on_message("eine schöne 漢字")
    assert stream.buffer.getvalue() == b"eine sch?ne ??\n"


def test_plain_lines_follow_a_redirection(capsys):
    PlainDisplay().on_message("here")
    assert capsys.readouterr().out == "here\n"


def test_a_display_shows_numbers_and_the_last_sample():
    text = live(
        ("on_report", report(step=250)), ("on_validation", validation(250, best=True)), ("on_save", 200, "x")
    )
    frame = "\n".join(last_frame(text))
    numbers = ("25%", "step 250/1,000", "loss 2.500", "7,800 tokens/s", "saved at step 200", "31.4", "12.5 %")
    assert all(part in frame for part in numbers)
    assert "source       Ein [bold]Mann[/] �[31m schläft" in frame
    assert "translation  A man [sleeps]" in frame
    assert "reference    A 人 is sleeping" in frame
    assert frame.endswith("the end")


def test_the_best_validation_stays_visible():
    best = 300
    calls = [("on_validation", validation(step, best=step <= best)) for step in range(100, 1001, 100)]
    rows = [line.split() for line in last_frame(live(*calls)) if "2.250" in line]
    assert [row[0] for row in rows] == ["300", "800", "900", "1,000"]
    assert [row[0] for row in rows if row[-1] == "best"] == ["300"]


def test_messages_appear_above_the_bar():
    text = live(("on_message", "mind [red]this[/red]"), ("on_report", report()))
    assert "mind [red]this[/red]" in text
    assert "mind" not in "".join(last_frame(text))


@settings(max_examples=25)
@given(st.text(), st.text(), st.integers(20, 120))
def test_no_sentence_breaks_the_display(source, translation, width):
    text = live(
        ("on_validation", validation(sample=SampleTranslation(source, translation, source))), width=width
    )
    frame = last_frame(text)
    assert sum(line.startswith(("source ", "translation ", "reference ")) for line in frame) == 3
    assert all(cell_len(line) <= width for line in frame)


def test_a_display_can_start_and_end_twice():
    stream = io.StringIO()
    shown = LiveDisplay(Console(file=stream, force_terminal=True, width=80))
    for _ in range(2):
        shown.on_begin("a model", 0, 10)
        shown.on_validation(validation())
        shown.on_end("once")
        shown.on_end("again")
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h") == 2


def test_zero_steps():
    assert "step 0/0" in live(("on_report", report(step=0, steps=0)))


def test_time_left_is_counted_down_between_reports(monkeypatch):
    shown = LiveDisplay(Console(file=io.StringIO(), force_terminal=True))
    now = time.monotonic()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    shown.on_report(report(left=100))
    monkeypatch.setattr(progress.time, "monotonic", lambda: now + 40)
    assert shown._left() == "1:00"
    monkeypatch.setattr(progress.time, "monotonic", lambda: now + 400)
    assert shown._left() == "0:00"


def test_durations():
    shown = {0: "0:00", 59.6: "1:00", 75: "1:15", 3600: "1:00:00", 7265: "2:01:05", -1: "0:00"}
    assert {seconds: progress.format_duration(seconds) for seconds in shown} == shown
    assert progress.format_duration(float("nan")) == "?"


# load only this module: importing regard takes seconds
PROGRAM = """
import importlib.util, sys, time
spec = importlib.util.spec_from_file_location("progress", sys.argv[1])
progress = importlib.util.module_from_spec(spec)
spec.loader.exec_module(progress)
Report, create_display = progress.Report, progress.create_display
shown = create_display()
print(type(shown).__name__, flush=True)
shown.on_begin("a model", 0, 100)
shown.on_report(Report(10, 100, 1.0, 2.0, 1e-3, 100.0, 1.0, 9.0))
print("ready", flush=True)
time.sleep(60)
"""


def in_terminal(environment: dict[str, str]) -> tuple[bytes, int]:
    """Return the terminal output of a program until Ctrl-C ends it, and its exit status."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    settings = {**os.environ, "TERM": "xterm", "PYTHONIOENCODING": "utf-8", **environment}
    child = subprocess.Popen([sys.executable, "-c", PROGRAM, progress.__file__], **streams, env=settings)
    os.close(theirs)
    written = b""
    while b"ready" not in written or b"10/100" not in written:  # the live display draws in another thread
        written += os.read(ours, 4096)
    child.send_signal(signal.SIGINT)
    while True:
        try:
            written += os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
    os.close(ours)
    return written, child.wait()


def test_an_interrupt_gives_the_cursor_back():
    written, status = in_terminal({})
    assert status == -signal.SIGINT
    assert b"LiveDisplay" in written
    assert b"KeyboardInterrupt" in written
    assert written.count(b"\x1b[?25l") == 1  # cursor hidden
    assert written.rfind(b"\x1b[?25h") > written.rfind(b"\x1b[?25l")  # cursor shown again


def test_a_dumb_terminal_gets_plain_lines():
    written, _ = in_terminal({"TERM": "dumb"})
    assert b"PlainDisplay" in written
    assert b"step  10/100" in written
    assert b"\x1b" not in written


def test_no_terminal_gets_plain_lines(monkeypatch):
    assert isinstance(create_display(Console(file=io.StringIO())), PlainDisplay)
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich assumes a terminal
    assert isinstance(create_display(Console(file=io.StringIO())), PlainDisplay)
