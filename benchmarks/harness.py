"""Timing that is robust to a noisy machine: calls alternate, and their medians are compared."""

import gc
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Call = Callable[[], object]


class Candidates(NamedTuple):
    """The calls to compare, "regard" first, and the implementation that regard dispatches to."""

    calls: dict[str, Call]
    implementation: str


@dataclass(frozen=True)
class Comparison:
    """One row of a table: regard and other libraries on the same task.

    setup: builds the inputs and the calls. backward: whether gradients are computed.
    flops, bytes: work of one call, for throughput.
    target: minimum speedup of regard over the fastest of `rivals`, by default the first peer.
    limit: maximum time of regard relative to the same peer.
    threads: thread counts to measure.
    """

    group: str
    name: str
    setup: Callable[[], Candidates]
    backward: bool = False
    flops: float | None = None
    bytes: float | None = None
    target: float | None = None
    limit: float | None = None
    rivals: tuple[str, ...] = ()
    threads: tuple[int, ...] = (2,)

    def ratio(self, ratios: Mapping[str, float]) -> float:
        """Return the ratio that the target refers to. ratios: each peer's time / regard's time."""
        return min(
            (ratios[name] for name in self.rivals if name in ratios), default=next(iter(ratios.values()))
        )

    def met(self, ratio: float) -> bool | None:
        """Return whether a peer's time / regard's time meets the target; None without a target."""
        if self.limit is not None:
            return 1 / ratio <= self.limit
        return None if self.target is None else ratio >= self.target


def time_calls(
    calls: Mapping[str, Call],
    seconds: float,
    min_rounds: int = 3,
    timeout_factor: float = 8.0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time every call, in seconds.

    clock: `time.process_time` measures CPU time, which other processes influence less.

    Each round runs every call once, in random order, so no call always inherits the caches of the same
    predecessor. There are at least `min_rounds` rounds, unless they exceed `timeout_factor` × seconds.
    """
    order, shuffle = list(calls), random.Random(0).shuffle
    times: dict[str, list[float]] = {name: [] for name in order}
    start = time.perf_counter()
    while time.perf_counter() < start + seconds / 10:  # warm up
        for name in order:
            calls[name]()
    rounds, start = 0, time.perf_counter()
    gc.collect()
    gc.disable()
    try:
        while (now := time.perf_counter()) < start + seconds or rounds < min_rounds:
            if rounds and now > start + timeout_factor * seconds:
                break
            shuffle(order)
            for name in order:
                call_start = clock()
                calls[name]()
                times[name].append(clock() - call_start)
            rounds += 1
    finally:
        gc.enable()
    return times


def differences(results: Mapping[str, object]) -> dict[str, float]:
    """Compute each peer's maximum difference from the first result, relative to its largest magnitude.

    Peers whose results have other shapes are skipped: their work is comparable but not identical.
    """
    expected, *peers = (_tensors(result) for result in results.values())
    return {
        name: max(map(_relative_error, expected, tensors))
        for name, tensors in zip(list(results)[1:], peers, strict=True)
        if expected and [x.shape for x in tensors] == [x.shape for x in expected]
    }


def tolerance(result: object) -> float:
    """Return the largest relative difference that rounding explains."""
    tensors = _tensors(result)
    return 3e-2 if tensors and tensors[0].dtype in (torch.bfloat16, torch.float16) else 1e-3


def _tensors(result: object) -> list[Tensor]:
    parts = result if isinstance(result, tuple) else (result,)
    return [part for part in parts if isinstance(part, Tensor)]


def _relative_error(expected: Tensor, actual: Tensor) -> float:
    scale = expected.abs().max().item() if expected.numel() else 0.0
    return (expected - actual).abs().max().item() / scale if scale else 0.0
