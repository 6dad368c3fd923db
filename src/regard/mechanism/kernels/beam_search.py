"""Beam search in the kernels. Does not import torch."""

import os
import sys
from typing import Any

from regard.mechanism.kernels.library import KERNELS

_MAX_DIGITS = 10  # OpenMP ignores a number of threads that does not fit in 32 bits


def available() -> bool:
    """Whether the kernels are compiled and loaded."""
    return KERNELS is not None


def count_threads() -> int:
    """Return the number of threads to use: torch's setting, or torch's default if it is not loaded.

    >>> from regard.mechanism.kernels.beam_search import count_threads
    >>> count_threads() >= 1
    True
    """
    torch = sys.modules.get("torch")
    if hasattr(torch, "get_num_threads"):  # not while torch is being imported
        return int(torch.get_num_threads())  # type: ignore[union-attr]
    setting = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # "4,2" is for nested regions
    if setting.isascii() and setting.isdecimal() and len(setting) < _MAX_DIGITS and int(setting):
        return int(setting)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start_search(
    numbers: list[int],
    factors: tuple[float, float, float, float],
    options: list[int],
    length_penalty: float,
    prune_threshold: float,
    start: list[int],
    sentences: list[tuple[list[int], int, int]],
) -> Any:
    """Start a beam search (kernels/search.h). Call `run(seconds)` until it returns True, then `results()`.

    numbers, factors, options: see `start_search` in kernels/module.cpp.
    sentences: source tokens, maximum length and maximum number of unknown tokens (−1: any) of each sentence.
    """
    return KERNELS.Search(
        numbers, factors, options, length_penalty, prune_threshold, start, sentences, count_threads()
    )
