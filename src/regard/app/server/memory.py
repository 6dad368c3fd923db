"""A limit of the address space (`ulimit -v`): work that may not fit is refused before it begins.

Where memory runs out inside a library, Python may get no chance to report it: OpenMP and the tokenizers,
which are written in Rust, end the process.
"""

import os
from http import HTTPStatus

import torch

from regard._util.files import readable
from regard.app.server.security import Refused
from regard.mechanism.operator import attention

RESERVE = 2**28  # bytes that must be left for each piece of long work under way
LITTLE = 2**26  # and for a quick one


def left() -> int | None:
    """How many bytes of address space the process may still get; None if there is no limit.

    >>> from regard.app.server.memory import left
    >>> left() is None or left() > 0
    True
    """
    try:
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit == resource.RLIM_INFINITY:
            return None
        with open("/proc/self/statm", "rb") as file:
            pages = int(file.read().split()[0])
        return max(limit - pages * os.sysconf("SC_PAGE_SIZE"), 0)
    except (ImportError, OSError, ValueError):  # a system that does not tell
        return None


def check(needed: int) -> None:
    """Refuse work if less memory than this is left."""
    room = left()
    if room is not None and room < needed:
        raise Refused(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"the server may get {readable(room)} more memory, and needs {readable(needed)} to be safe; ask "
            "again when others are done, or start it with a higher limit (ulimit -v).",
        )


def prepare_thread() -> None:
    """Start the threads of OpenMP for this thread now, if memory is limited: later there may be no room."""
    if left() is not None:
        torch.zeros(2**20).add_(1)
        x = torch.zeros(1, 512, 16)
        attention(x, x, x)
