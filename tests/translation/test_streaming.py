"""Lines that arrive one by one: in groups, in order, and nobody waits for an answer."""

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
def test_groups_are_full_and_in_order(lines, most):
    groups = list(batch_lines(iter(lines), most, pause=5))
    assert [line for group in groups for line in group] == lines
    assert all(len(group) == most for group in groups[:-1])


def test_a_group_ends_where_nothing_comes():
    go = threading.Event()

    def slow():
        yield "a"
        yield "b"
        assert go.wait(30)
        yield "c"

    groups = batch_lines(slow(), most=10)
    assert next(groups) == ["a", "b"]
    go.set()
    assert list(groups) == [["c"]]


def test_who_stops_listening_stops_the_reading():
    before = threading.active_count()
    read = []

    def endless():
        while True:
            read.append(1)
            yield "line"

    groups = batch_lines(endless(), most=3)
    next(groups)
    groups.close()
    until = time.monotonic() + 30
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() == before
    assert len(read) < 20


def test_standard_input_is_utf8_whatever_the_terminal_says(monkeypatch):
    given_ = io.TextIOWrapper(io.BytesIO("\ufeffné\r\n\n漢\u2028字".encode()), encoding="ascii")
    monkeypatch.setattr("sys.stdin", given_)
    assert list(batch_lines(sys.stdin, 9)) == [["né", "", "漢\u2028字"]]


def test_other_encodings_are_refused(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ok\n\xff\n")))
    lines = read_stdin()
    assert next(lines) == "ok"
    with pytest.raises(ArgumentError, match="line 2 of standard input is no UTF-8 text"):
        next(lines)


def test_an_interrupt_while_waiting_for_standard_input():
    """The thread that waits for it must not hold up the end of the process."""
    program = (
        "import sys\n"
        "from regard.translation.streaming import batch_lines\n"
        "try:\n"
        "    for group in batch_lines(sys.stdin, 9):\n"
        "        print(*group, flush=True)\n"
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
