"""batch_lines: order, batch sizes, timeouts, cancellation and errors."""

import io
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.errors import ArgumentError
from regard.translation.streaming import batch_lines, read_stdin


@settings(max_examples=30)
@given(st.lists(st.text(max_size=3), max_size=40), st.integers(1, 7))
def test_batches_are_full_and_in_order(lines, max_size):
    batches = list(batch_lines(iter(lines), max_size, timeout=5))
    assert [line for batch in batches for line in batch] == lines
    assert all(len(batch) == max_size for batch in batches[:-1])


def test_a_timeout_yields_a_partial_batch():
    go = threading.Event()

    def slow():
        yield "a"
        yield "b"
        assert go.wait(30)
        yield "c"

    batches = batch_lines(slow(), max_size=10)
    assert next(batches) == ["a", "b"]
    go.set()
    assert list(batches) == [["c"]]


def test_closing_the_generator_stops_the_reader():
    before = threading.active_count()
    read = []

    def endless():
        while True:
            read.append(1)
            yield "line"

    batches = batch_lines(endless(), max_size=3)
    next(batches)
    batches.close()
    until = time.monotonic() + 30
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() == before
    assert len(read) < 20


def test_stdin_is_decoded_as_utf8_whatever_the_locale(monkeypatch):
    stdin = io.TextIOWrapper(io.BytesIO("\ufeffné\r\n\n漢\u2028字".encode()), encoding="ascii")
    monkeypatch.setattr("sys.stdin", stdin)
    assert list(batch_lines(sys.stdin, 9)) == [["né", "", "漢\u2028字"]]


def test_other_encodings_are_rejected(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ok\n\xff\n")))
    lines = read_stdin()
    assert next(lines) == "ok"
    with pytest.raises(ArgumentError, match="Line 2 of standard input is not UTF-8"):
        next(lines)


def test_an_interrupt_while_waiting_for_stdin():
    """The waiting reader thread must not keep the process from exiting."""
    program = (
        "import sys\n"
        "from regard.translation.streaming import batch_lines\n"
        "try:\n"
        "    for batch in batch_lines(sys.stdin, 9):\n"
        "        print(*batch, flush=True)\n"
        "except KeyboardInterrupt:\n"
        "    sys.exit(7)\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], text=True, **pipes) as process:
        process.stdin.write("hello\n")
        process.stdin.flush()
        assert process.stdout.readline() == "hello\n"
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(60) == 7
        assert process.stderr.read() == ""
