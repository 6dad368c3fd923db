"""How the C library treats large blocks of memory that a training step frees: keep them, or return them.

Both functions change the whole process, so that no other function of regard calls them. The command line
does, when it trains: `keep_memory` as a rule, `return_memory` with --shard.
"""

import ctypes
import os

# What glibc's malloc.h calls them.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4
_PAD = 64 * 2**20
_LARGE = 2**20


def keep_memory() -> bool:
    """Keep freed memory for the next tensors of this process; whether the C library was told so.

    glibc gives large blocks back to the system as soon as they are freed, so that each large tensor of each
    training step gets new pages, and every page is cleared and mapped when it is first touched. After this
    call the process keeps what it once had for as long as it lives: its memory does not shrink below its
    peak, and grows in steps of 64 MB. It helps tensors on the CPU, works on the whole process, and cannot be
    undone. Elsewhere than with glibc (macOS, Windows, musl) it does nothing.

    `regard train` calls it; `regard.translation.train` does not. To train as fast from Python, call it once,
    before the training:

    >>> from regard.models import keep_memory
    >>> keep_memory()  # doctest: +SKIP
    True
    """
    # 0 blocks by mmap: its threshold cannot be set above 32 MB. −1: the top of the heap is never given back.
    return _set({_MMAP_MAX: 0, _TRIM_THRESHOLD: -1, _TOP_PAD: _PAD})


def return_memory() -> bool:
    """Return freed blocks of 1 MB and more to the system at once; whether the C library was told so.

    By default glibc raises that bound with the blocks that it sees, up to 32 MB, and keeps smaller ones in a
    heap that can only shrink at its end. Tensors of different sizes and lifetimes then leave gaps: a training
    with sharded parameters had a heap of 890 MB, of which 580 were gaps. After this call each large tensor
    gets new pages, which takes time. It works on the whole process; elsewhere than with glibc it does
    nothing.

    `regard train --shard` calls it; `regard.translation.train` does not:

    >>> from regard.models import return_memory
    >>> return_memory()  # doctest: +SKIP
    True
    """
    return _set({_MMAP_THRESHOLD: _LARGE})  # a bound that is set is no longer raised


def _set(options: dict[int, int]) -> bool:
    if not _glibc():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    answers = [mallopt(option, value) for option, value in options.items()]
    return all(answers)


def _glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError, OSError):  # not Unix; another C library
        return False
