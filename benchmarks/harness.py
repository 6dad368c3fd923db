"""Timing that a noisy machine cannot spoil: contenders take turns, and medians are compared."""

import statistics
import time
from collections.abc import Callable, Mapping

Contender = Callable[[], object]


def race(contenders: Mapping[str, Contender], seconds: float = 2.0, least: int = 5) -> dict[str, float]:
    """The median time of each contender in seconds, all of them run in turn."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run()  # warm up
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < least:
        for name, run in contenders.items():
            begun = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - begun)
    return {name: statistics.median(taken) for name, taken in times.items()}
