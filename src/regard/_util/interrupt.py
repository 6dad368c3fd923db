"""Stop long computations between tiles.

The caller installs a function with `checked_by`; loops over tiles call `check`, which runs it. To stop the
loop, the function raises.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_PAIRS = 2**28  # queries × keys × heads between two checks: less than a second of work
_CHECK: ContextVar[Callable[[], None] | None] = ContextVar("regard_interrupt", default=None)


class Interrupted(BaseException):
    """The caller no longer needs the result. Not an `Exception`, so no error handler swallows it.

    >>> from regard._util.interrupt import Interrupted
    >>> issubclass(Interrupted, Exception)
    False
    """


@contextmanager
def checked_by(check: Callable[[], None]) -> Iterator[None]:
    """Call `check` before each tile that this thread computes within the block.

    >>> from regard._util import interrupt
    >>> calls = []
    >>> with interrupt.checked_by(lambda: calls.append("tile")):
    ...     interrupt.check()
    >>> interrupt.check()
    >>> calls
    ['tile']
    """
    token = _CHECK.set(check)
    try:
        yield
    finally:
        _CHECK.reset(token)


def check() -> None:
    """Call the installed function, if any."""
    installed = _CHECK.get()
    if installed is not None:
        installed()


def bands(queries: int, width: int) -> Iterator[slice]:
    """Yield slices of query rows, each less than a second of work, and call `check` before each.

    width: keys × heads.


    >>> from regard._util import interrupt
    >>> list(interrupt.bands(10, 100))
    [slice(0, 10, None)]
    """
    rows = max(_PAIRS // max(width, 1), 1)
    for start in range(0, max(queries, 1), rows):
        check()
        yield slice(start, min(start + rows, queries))
