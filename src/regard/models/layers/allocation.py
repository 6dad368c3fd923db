"""Configure whether glibc keeps or releases large blocks of freed memory.

Both settings affect the whole process, so only the command line applies them: `regard train` calls
`keep_memory`, or `return_memory` with --shard.
"""

import ctypes
import os

# option numbers from glibc's malloc.h
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4
_PAD = 64 * 2**20
_LARGE = 2**20


def keep_memory() -> bool:
    """Keep freed memory for later tensors in this process. Returns whether the C library supports this.

    By default, glibc returns large blocks to the system as soon as they are freed, so every large tensor in
    every training step needs new pages, which the system has to clear and map. After this call, the process
    never releases memory and grows in steps of 64 MB. This makes CPU training faster and cannot be undone.
    The function has no effect on systems without glibc (macOS, Windows, musl).

    `regard train` calls this function; `regard.translation.train` does not. Call it once before training:

    >>> from regard.models import keep_memory
    >>> keep_memory()  # doctest: +SKIP
    True
    """
    # MMAP_MAX=0, because the mmap threshold cannot exceed 32 MB. TRIM_THRESHOLD=−1: never release the heap.
    return _set({_MMAP_MAX: 0, _TRIM_THRESHOLD: -1, _TOP_PAD: _PAD})


def return_memory() -> bool:
    """Release freed blocks of 1 MB or more immediately. Returns whether the C library supports this.

    By default, glibc raises this threshold to the size of the largest freed block, up to 32 MB, and keeps
    smaller blocks in a heap that shrinks only at its end. Tensors of different sizes and
    lifetimes then leave gaps: in a run with sharded parameters, 580 MB of a heap of 890 MB were gaps. After
    this call, each large tensor needs new pages, which takes time. The function has no effect on systems
    without glibc.

    `regard train --shard` calls this function; `regard.translation.train` does not:

    >>> from regard.models import return_memory
    >>> return_memory()  # doctest: +SKIP
    True
    """
    return _set({_MMAP_THRESHOLD: _LARGE})  # glibc does not adjust an explicit threshold


def _set(options: dict[int, int]) -> bool:
    if not _glibc():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    results = [mallopt(option, value) for option, value in options.items()]  # try all, even if one fails
    return all(results)


def _glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError, OSError):  # not Unix, or another C library
        return False
