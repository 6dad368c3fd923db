"""Timing that a noisy machine cannot spoil: contenders take turns, and medians are compared."""

import gc
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Contender = Callable[[], object]


class Lineup(NamedTuple):
    """The contenders of a race, "regard" first, and how regard computes its part."""

    contenders: dict[str, Contender]
    implementation: str


@dataclass(frozen=True)
class Race:
    """One line of a table: regard and its peers at the same work.

    target: how many times as long as regard the first peer must take, at least.
    limit: how many times as long as the first peer regard may take, at most.
    """

    group: str
    name: str
    contenders: Callable[[], Lineup]
    backward: bool = False
    flops: float | None = None
    bytes: float | None = None
    target: float | None = None
    limit: float | None = None
    threads: tuple[int, ...] = (2,)

    def met(self, ratio: float) -> bool | None:
        """Is this ratio, the first peer's time over regard's, good enough?"""
        if self.limit is not None:
            return 1 / ratio <= self.limit
        return None if self.target is None else ratio >= self.target


def race(
    contenders: Mapping[str, Contender], seconds: float, least: int = 3, patience: float = 8.0
) -> dict[str, list[float]]:
    """The times of each contender in seconds.

    Each round calls every contender once, in an order drawn anew, so that none always finds the caches as
    the same other one left them. There are at least `least` rounds, unless they take `patience` × seconds.
    """
    order, shuffle = list(contenders), random.Random(0).shuffle
    times: dict[str, list[float]] = {name: [] for name in order}
    begun = time.perf_counter()
    while time.perf_counter() < begun + seconds / 10:  # warm up
        for name in order:
            contenders[name]()
    rounds, begun = 0, time.perf_counter()
    gc.collect()
    gc.disable()
    try:
        while (now := time.perf_counter()) < begun + seconds or rounds < least:
            if rounds and now > begun + patience * seconds:
                break
            shuffle(order)
            for name in order:
                start = time.perf_counter()
                contenders[name]()
                times[name].append(time.perf_counter() - start)
            rounds += 1
    finally:
        gc.enable()
    return times


def differences(results: Mapping[str, object]) -> dict[str, float]:
    """How far the peers' results are from the first one's, relative to its largest number.

    Peers whose results have other shapes are left out: they do comparable work, not the same.
    """
    ours, *others = ((name, _tensors(result)) for name, result in results.items())
    return {
        name: max(map(_distance, ours[1], theirs))
        for name, theirs in others
        if ours[1] and [x.shape for x in theirs] == [x.shape for x in ours[1]]
    }


def tolerance(result: object) -> float:
    """The difference that rounding explains, generously."""
    tensors = _tensors(result)
    return 3e-2 if tensors and tensors[0].dtype in (torch.bfloat16, torch.float16) else 1e-3


def _tensors(result: object) -> list[Tensor]:
    parts = result if isinstance(result, tuple) else (result,)
    return [part for part in parts if isinstance(part, Tensor)]


def _distance(ours: Tensor, theirs: Tensor) -> float:
    scale = ours.abs().max().item() if ours.numel() else 0.0
    return (ours - theirs).abs().max().item() / scale if scale else 0.0
