"""Batch lines from a stream without delaying any of them."""

import io
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from queue import Empty, Full, Queue
from typing import BinaryIO

from regard.errors import ArgumentError

TIMEOUT = 0.002  # seconds to wait for another line before yielding a partial batch
_POLL_INTERVAL = 0.2  # seconds between the reader thread's checks for cancellation


class _EndOfStream:
    """Marks the end of the queue; `error` is the exception that ended reading, if any."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


def batch_lines(lines: Iterable[str], max_size: int, timeout: float = TIMEOUT) -> Iterator[list[str]]:
    """Yield lists of up to `max_size` lines, or a partial list if no line arrives within `timeout` seconds.

    A background thread reads at most one batch ahead. If reading fails, the lines before the failure are
    yielded first, then the exception is raised. `sys.stdin` is decoded as UTF-8, whatever the locale.

    >>> from regard.translation.streaming import batch_lines
    >>> list(batch_lines(iter("abcde"), max_size=2))
    [['a', 'b'], ['c', 'd'], ['e']]
    """
    lines = read_stdin() if lines is sys.stdin else lines
    queue: Queue[str | _EndOfStream] = Queue(max_size)
    cancelled = threading.Event()
    threading.Thread(target=_fill_queue, args=(lines, queue, cancelled), daemon=True).start()
    try:
        end = None
        while end is None:
            batch: list[str] = []
            while end is None and len(batch) < max_size:
                try:
                    line = queue.get(timeout=timeout if batch else None)
                except Empty:
                    break
                if isinstance(line, _EndOfStream):
                    end = line
                else:
                    batch.append(line)
            if batch:
                yield batch
        if end.error is not None:
            raise end.error
    finally:
        cancelled.set()


def _fill_queue(lines: Iterable[str], queue: "Queue[str | _EndOfStream]", cancelled: threading.Event) -> None:
    """Put lines into the queue until the input ends or the consumer stops."""

    def put(line: str | _EndOfStream) -> bool:
        while not cancelled.is_set():
            try:
                queue.put(line, timeout=_POLL_INTERVAL)
                return True
            except Full:
                continue
        return False

    try:
        for line in lines:
            if not put(line):
                return
        put(_EndOfStream())
    except BaseException as error:  # re-raised in the consumer
        put(_EndOfStream(error))


def read_stdin() -> Iterator[str]:
    """Yield the lines of standard input, decoded as UTF-8, without line endings."""
    with _duplicate_stdin() as file:
        for number, line in enumerate(file, start=1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError:
                raise ArgumentError(
                    f"Line {number:,} of standard input is not UTF-8. Convert it first: iconv -t utf-8."
                ) from None


def _duplicate_stdin() -> AbstractContextManager[BinaryIO]:
    """Open a duplicate of stdin: Python locks sys.stdin at exit, and the reader thread may hold that lock."""
    try:
        return open(os.dup(sys.stdin.fileno()), "rb")
    except io.UnsupportedOperation:  # sys.stdin was replaced by an object without a file descriptor
        return nullcontext(sys.stdin.buffer)
