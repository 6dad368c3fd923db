"""Stop long computations between tiles.

Whoever starts one may install a check; loops over tiles call `check`, and what it raises ends them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_PAIRS = 2**28  # queries × keys × heads between two checks, less than a second of work
_CHECK: ContextVar[Callable[[], None] | None] = ContextVar("regard_interrupt", default=None)


class Interrupted(BaseException):
    """The caller no longer needs the result. Not an `Exception`, so no error handler swallows it.

    >>> from regard._util.interrupt import Interrupted
    >>> issubclass(Interrupted, Exception)
    False
    """


@contextmanager
def checked_by(check: Callable[[], None]) -> Iterator[None]:
    """Within the block, in this thread, loops over tiles call this function before each tile.

    >>> from regard._util import interrupt
    >>> calls = []
    >>> with interrupt.checked_by(lambda: calls.append("tile")):
    ...     interrupt.check()
    >>> interrupt.check()
    >>> calls
    ['tile']
    """
    before = _CHECK.set(check)
    try:
        yield
    finally:
        _CHECK.reset(before)


def check() -> None:
    """Call what the caller installed, if anything; it raises to stop the computation."""
    installed = _CHECK.get()
    if installed is not None:
        installed()


def bands(queries: int, width: int) -> Iterator[slice]:
    """Bands of query rows with about a second of work each, checked in between; width: keys × heads.

    >>> from regard._util import interrupt
    >>> list(interrupt.bands(10, 100))
    [slice(0, 10, None)]
    """
    rows = max(_PAIRS // max(width, 1), 1)
    for start in range(0, max(queries, 1), rows):
        check()
        yield slice(start, min(start + rows, queries))
