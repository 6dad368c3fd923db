"""Lines that arrive one by one, in groups as large as they come without anybody waiting for an answer."""

import io
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from queue import Empty, Full, Queue
from typing import BinaryIO

from regard.errors import ArgumentError

PAUSE = 0.05  # seconds without a line, after which those that came are not kept waiting
_LOOK = 0.2  # seconds after which the reader looks whether it is still needed


class _End:
    """Nothing more comes; `error` is why, if something went wrong."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


def batch_lines(lines: Iterable[str], most: int, pause: float = PAUSE) -> Iterator[list[str]]:
    """Groups of at most so many lines; a group ends where the next line lets wait for itself.

    A thread reads ahead, by no more than a group. What goes wrong while reading is raised after the lines
    before it. `sys.stdin` is read as UTF-8, whatever the terminal says, as files are.

    >>> from regard.translation.streaming import batch_lines
    >>> list(batch_lines(iter("abcde"), most=2))
    [['a', 'b'], ['c', 'd'], ['e']]
    """
    lines = read_stdin() if lines is sys.stdin else lines
    queue: Queue[str | _End] = Queue(most)
    unneeded = threading.Event()
    threading.Thread(target=_read, args=(lines, queue, unneeded), daemon=True).start()
    try:
        end = None
        while end is None:
            group: list[str] = []
            while end is None and len(group) < most:
                try:
                    line = queue.get(timeout=pause if group else None)
                except Empty:
                    break
                if isinstance(line, _End):
                    end = line
                else:
                    group.append(line)
            if group:
                yield group
        if end.error is not None:
            raise end.error
    finally:
        unneeded.set()


def _read(lines: Iterable[str], queue: "Queue[str | _End]", unneeded: threading.Event) -> None:
    """Put lines into the queue until there are no more, or nobody wants them."""

    def put(line: str | _End) -> bool:
        while not unneeded.is_set():
            try:
                queue.put(line, timeout=_LOOK)
                return True
            except Full:
                continue
        return False

    try:
        for line in lines:
            if not put(line):
                return
        put(_End())
    except BaseException as error:  # to be raised where the lines are wanted
        put(_End(error))


def read_stdin() -> Iterator[str]:
    """The lines of standard input, which must be UTF-8, without their ends."""
    with _own_reader() as file:
        for number, line in enumerate(file, start=1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError:
                raise ArgumentError(
                    f"line {number:,} of standard input is no UTF-8 text; convert it first: iconv -t utf-8."
                ) from None


def _own_reader() -> AbstractContextManager[BinaryIO]:
    """A reader of our own: Python locks its own one at the end, and a thread may still be waiting with it."""
    try:
        return open(os.dup(sys.stdin.fileno()), "rb")
    except io.UnsupportedOperation:  # no real file
        return nullcontext(sys.stdin.buffer)
