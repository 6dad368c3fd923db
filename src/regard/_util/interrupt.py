"""Stop long computations between tiles.

Loops over tiles call `check`, which calls the function installed with `checked_by`. That function can raise
an exception to stop the loop.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_PAIRS = 2**28  # queries × keys × heads to compute between two checks: less than a second of work
_CHECK: ContextVar[Callable[[], None] | None] = ContextVar("regard_interrupt", default=None)


class Interrupted(BaseException):
    """Raised when the caller no longer needs the result. `except Exception` does not catch it.

    >>> from regard._util.interrupt import Interrupted
    >>> issubclass(Interrupted, Exception)
    False
    """


@contextmanager
def checked_by(check: Callable[[], None]) -> Iterator[None]:
    """Call `check` before each tile that this thread computes inside the `with` block.

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
    """Yield slices of query rows that each take less than a second, and call `check` before each slice.

    width: number of keys × number of heads.

    >>> from regard._util import interrupt
    >>> list(interrupt.bands(10, 100))
    [slice(0, 10, None)]
    """
    rows = max(_PAIRS // max(width, 1), 1)
    for start in range(0, max(queries, 1), rows):
        check()
        yield slice(start, min(start + rows, queries))
