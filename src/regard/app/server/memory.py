"""Reject work that might exceed the address space limit (`ulimit -v`).

If memory runs out inside OpenMP or the Rust tokenizers, they abort the process without raising an exception.
"""

import os
from http import HTTPStatus

import torch

from regard._util.text import format_bytes
from regard.app.server.security import RequestError
from regard.mechanism.operator import attention

RESERVE = 2**28  # bytes that must be free per long job
QUICK_RESERVE = 2**26  # bytes that must be free per short job


def available() -> int | None:
    """Return the address space left to this process in bytes; None if unlimited.

    >>> from regard.app.server.memory import available
    >>> available() is None or available() > 0
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
    except (ImportError, OSError, ValueError):  # not Linux
        return None


def check(required: int) -> None:
    """Raise RequestError if fewer than `required` bytes are available."""
    free = available()
    if free is not None and free < required:
        raise RequestError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"Not enough memory: {format_bytes(free)} available, {format_bytes(required)} required. Retry "
            "later, or start the server with a higher limit (ulimit -v).",
        )


def prepare_thread() -> None:
    """If memory is limited, start this thread's OpenMP threads now, while memory is available."""
    if available() is not None:
        torch.zeros(2**20).add_(1)
        x = torch.zeros(1, 512, 16)
        attention(x, x, x)
