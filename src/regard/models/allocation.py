"""Memory that is used again: what the C library does with large blocks that a training step frees."""

import ctypes
import os

# What glibc's malloc.h calls them.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_PAD = 64 * 2**20


def keep_memory() -> bool:
    """Keep freed memory for the next tensors of this process; whether the C library was told so.

    glibc gives large blocks back to the system as soon as they are freed, so that each large tensor of each
    training step gets new pages, and every page is cleared and mapped when it is first touched. After this
    call the process keeps what it once had for as long as it lives: its memory does not shrink below its
    peak, and grows in steps of 64 MB. It helps tensors on the CPU, works on the whole process, and cannot be
    undone. Elsewhere than with glibc (macOS, Windows, musl) it does nothing.

    >>> from regard.models.allocation import keep_memory
    >>> keep_memory()  # doctest: +SKIP
    True
    """
    if not _glibc():
        return False
    tell = ctypes.CDLL(None).mallopt
    # 0 blocks by mmap: its threshold cannot be set above 32 MB. −1: the top of the heap is never given back.
    return all([tell(_MMAP_MAX, 0), tell(_TRIM_THRESHOLD, -1), tell(_TOP_PAD, _PAD)])


def _glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError, OSError):  # not Unix; another C library
        return False
