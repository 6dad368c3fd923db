"""Estimate the rounding error of a result, and compare results within it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.cases import leaves
from tests.fuzz import oracle
from tests.fuzz.case import Failure
from tests.fuzz.draw import Call

SAMPLES = 4  # perturbed runs; with 2, one case in 18,082 underestimated its rounding error
FACTOR = 16.0  # allowed error, as a multiple of the largest deviation of the samples


class Expected(NamedTuple):
    """The exact results of a call and the largest allowed error of each (None: no limit)."""

    output: Tensor
    weights: Tensor
    scores: Tensor
    gradients: Sequence[Tensor]
    output_error: float | None
    weights_error: float | None
    scores_error: float
    gradient_errors: Sequence[float] | None


def expected(call: Call, grad: Tensor | None = None) -> Expected:
    """Return output, weights, scores and, for an output gradient, gradients, in float64."""
    results = [_solve(call, grad, None)]
    for sample in range(SAMPLES):
        noise = oracle.Noise(call.rounding, torch.Generator().manual_seed(sample), grad)
        results.append(_solve(call, grad, noise))
    exact, gradients = results[0]
    # entmax with α > 2 has an infinite slope at zero, which two samples may miss
    steep = call.normalize in ("entmax 2.5", "entmax 4")
    factor, floor = (10 * FACTOR, call.rounding**0.6) if steep else (FACTOR, 64 * call.rounding)
    output_error = max(_distance(exact.output, noisy.output) for noisy, _ in results[1:])
    weights_error = max(_distance(exact.weights, noisy.weights) for noisy, _ in results[1:])
    errors = [
        FACTOR * max(_distance(gradient, noisy[i]) for _, noisy in results[1:])
        + _rounded(call, gradient, 2.0)
        for i, gradient in enumerate(gradients)
    ]
    largest = exact.weights.abs() @ torch.ones(exact.weights.shape[-1], 1, dtype=torch.float64)
    value = _largest(call.inputs(torch.float64)[2])
    slack = floor * _largest(largest) * value
    return Expected(
        exact.output,
        exact.weights,
        exact.scores,
        gradients,
        None if exact.jump else factor * output_error + slack + _rounded(call, exact.output, 1.0),
        None if exact.jump else factor * weights_error + floor * _largest(exact.weights),
        32 * call.rounding * _largest(exact.size),
        None if exact.jump or exact.bend else errors,
    )


def _solve(call: Call, grad: Tensor | None, noise: oracle.Noise | None) -> tuple[oracle.Result, list[Tensor]]:
    inputs = [x.requires_grad_(grad is not None) for x in call.inputs(torch.float64)]
    options = call.options(torch.float64)
    result = oracle.attention(*inputs, **options, seen=call.seen, noise=noise, rounding=call.rounding)
    if grad is None:
        return oracle.Result(*(x.detach() if isinstance(x, Tensor) else x for x in result)), []
    above = grad if noise is None else noise.on(grad)
    parameters = [*inputs, *leaves(options)]
    return result, differentiate(result.output, parameters, above)


def differentiate(output: Tensor, inputs: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """Return the gradients; zeros for inputs that the output does not depend on."""
    if not output.requires_grad:
        return [torch.zeros_like(x) for x in inputs]
    found = torch.autograd.grad(output, inputs, grad.to(output.dtype), allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]


def check(name: str, result: Tensor, exact: Tensor, error: float | None, kind: str) -> None:
    """Raise a Failure if a result has the wrong shape or differs by more than `error`."""
    if result.shape != exact.shape:
        raise Failure(f"{kind}: {name} has a wrong shape", f"{tuple(result.shape)}, not {tuple(exact.shape)}")
    if error is None or not exact.numel():
        return
    result, exact = result.detach(), exact.detach()
    distance = (result.double() - exact.double()).abs()
    distance[result.isinf() & (exact.abs() > 0.99 * torch.finfo(result.dtype).max)] = 0  # overflow
    error += 1e-24  # tiny weights may be rounded to zero, and gradients of any size multiply them
    if bool((distance <= error).all()):
        return
    at = tuple(int(i) for i in torch.unravel_index(distance.nan_to_num(torch.inf).argmax(), distance.shape))
    raise Failure(
        f"{kind}: {name} is wrong",
        f"{float(result[at]):.6g} at {at}, not {float(exact[at]):.6g}; off by {float(distance[at]):.2g}, "
        f"allowed is {error:.2g}",
    )


def _distance(a: Tensor, b: Tensor) -> float:
    return _largest(a.detach() - b.detach())


def _largest(x: Any) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0


def _rounded(call: Call, x: Tensor, times: float) -> float:
    """Return the error of rounding a result to the dtype of the call."""
    unit = torch.finfo(call.dtype)
    return times * (max(unit.eps, 16 * call.rounding) * _largest(x) + unit.tiny)
