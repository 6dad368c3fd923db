"""The precision of matrix products in training: float32, or bfloat16 where it is faster.

In bfloat16, `torch.autocast` rounds the inputs of matrix products and of attention; the sums are in
float32. Norms, softmax and the loss are computed in float32. Parameters, gradients and the optimizer state
stay in float32.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from regard.models.inference.quantization import runs_bfloat16
from regard.translation.training.training_config import Precision

MIN_SPEEDUP = 1.15  # a smaller speedup does not justify the coarser rounding of bfloat16
TOKENS = 1024  # maximum number of tokens in a timed training step
_ROWS = (64, 512)  # rows of the timed products; the small product shows whether to time the large one
_ROUNDS, _SECONDS = 4, 0.2  # maximum rounds and seconds per measurement
_MAX_STEP = 0.2  # seconds; products dominate longer training steps, so timing the products is enough
PRECISIONS: tuple[Precision, Precision] = ("float32", "bfloat16")
Times = tuple[float, float]  # seconds in float32 and in bfloat16


class PrecisionChoice(NamedTuple):
    """The chosen precision, and the reason.

    >>> from regard.translation.training.precision import PrecisionChoice
    >>> print(PrecisionChoice.from_times((0.3, 0.2)))
    matrix products in bfloat16: 1.50 × as fast as float32 on this machine
    >>> print(PrecisionChoice.from_times((0.2, 0.4)))
    matrix products in float32: bfloat16 is only 0.50 × as fast as float32 on this machine
    """

    precision: Precision
    reason: str

    @classmethod
    def from_times(cls, times: Sequence[float]) -> "PrecisionChoice":
        """Choose bfloat16 if it is at least `MIN_SPEEDUP` × as fast as float32. times: see `Times`."""
        speedup = times[0] / times[1]
        if speedup >= MIN_SPEEDUP:
            return cls("bfloat16", f"{speedup:.2f} × as fast as float32 on this machine")
        return cls("float32", f"bfloat16 is only {speedup:.2f} × as fast as float32 on this machine")

    def __str__(self) -> str:
        return f"matrix products in {self.precision}: {self.reason}"


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context manager that computes matrix products in the given precision.

    >>> import torch
    >>> from regard.translation.training.precision import autocast
    >>> layer, x = torch.nn.Linear(3, 5), torch.randn(2, 3)
    >>> with autocast("bfloat16", x.device):
    ...     layer(x).dtype
    torch.bfloat16
    """
    return torch.autocast(device.type, torch.bfloat16) if precision == "bfloat16" else nullcontext()


def choose_precision(
    run_step: Callable[[Precision], None],
    *,
    width: int,
    parameters: int,
    device: torch.device,
    sums: Callable[[Sequence[float]], list[float]] = list,
) -> PrecisionChoice:
    """Choose the faster precision with measurements that take about a second.

    Matrix products with the width of the model are timed first. If bfloat16 is faster, whole training steps
    are timed too, unless the model is so large that matrix products dominate.

    run_step: runs a training step on at most about `TOKENS` tokens. width, parameters: size of the model.
    sums: sums values over all processes, so that all choose the same precision.
    """
    if sums([0.0 if runs_bfloat16(device) else 1.0])[0]:
        return PrecisionChoice("float32", "this processor has no bfloat16 instructions")
    *times, processes = sums([*_time_products(width, device), 1.0])
    step = times[0] / processes * parameters / (4 * width**2) * TOKENS / _ROWS[-1]  # seconds, in float32
    if times[0] >= MIN_SPEEDUP * times[1] and step < _MAX_STEP:
        times = sums(time_steps(run_step, rounds=_ROUNDS))
    return PrecisionChoice.from_times(times)


def _time_products(width: int, device: torch.device) -> Times:
    """Time the forward and backward pass of a linear layer, on many rows only if bfloat16 may be faster."""
    layer, times = nn.Linear(width, 4 * width, device=device), (0.0, 0.0)
    for rows in _ROWS:
        x = torch.ones(rows, width, device=device, requires_grad=True)

        def run(precision: Precision, x: torch.Tensor = x) -> None:
            with autocast(precision, device):
                y = layer(x)
            y.backward(torch.ones_like(y))
            assert x.grad is not None
            float(x.grad[0, 0])  # waits for the device

        float32, bfloat16 = time_steps(run, rounds=_ROUNDS, seconds=_SECONDS)
        times = float32 * _ROWS[-1] / rows, bfloat16 * _ROWS[-1] / rows
        if bfloat16 > 2 * float32:
            break
    return times


def time_steps(
    run: Callable[[Precision], None],
    *,
    rounds: int,
    seconds: float = float("inf"),
    precisions: Sequence[Precision] = PRECISIONS,
) -> list[float]:
    """Return the shortest time of a function in each precision; calls alternate between them.

    rounds: number of calls in each precision. seconds: no further round starts after this time.
    """
    best = dict.fromkeys(precisions, float("inf"))
    start = time.perf_counter()
    for _ in range(rounds):
        for precision in precisions:
            before = time.perf_counter()
            run(precision)
            best[precision] = min(best[precision], time.perf_counter() - before)
        if time.perf_counter() - start > seconds:
            break
    return list(best.values())
