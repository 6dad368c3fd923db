"""Compute the τ of α-entmax with Newton's method or bisection."""

import math

import torch
from torch import Tensor

from regard.mechanism.torch_state import concrete


def power(x: Tensor, exponent: float) -> Tensor:
    """Return x^exponent if x > 0, otherwise 0 with zero derivatives."""
    if exponent == 0:
        return (x > 0).to(x.dtype)
    if exponent == 1:
        return x.clamp(min=0)
    if exponent == 2:
        return x.clamp(min=0).square()
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1.0) ** exponent, 0.0)


def solve_tau(x: Tensor, p: float, steps: int = 60) -> Tensor:
    """Solve Σ max(x − τ, 0)^p = 1 for τ, in rows whose maximum is 0.

    For p ≥ 1 the norm ‖max(x − τ, 0)‖ₚ is convex and decreasing in τ. Newton's method starts left of the
    root, at −1, and converges monotonically in a few steps; for p = 1 the result is exact. For p < 1 the norm
    is not convex, and τ is found by bisection between −1 and −n^(−1/p), in log space because −τ may be tiny.
    """
    tau = torch.full_like(x[..., :1], -1.0)
    if p < 1:
        lower, upper = torch.zeros_like(tau), torch.full_like(tau, -math.log(x.shape[-1]) / p)
        for _ in range(steps):
            middle = (lower + upper) / 2
            above = power(x + middle.exp(), p).sum(-1, keepdim=True) >= 1
            lower, upper = torch.where(above, middle, lower), torch.where(above, upper, middle)
        return -lower.exp()
    for _ in range(steps):
        updated = torch.maximum(tau, tau + _newton_step(x, tau, p))
        if concrete(tau) and torch.equal(updated, tau):
            break
        tau = updated
    # τ has converged from the left; two unconstrained Newton steps correct overshoot due to rounding
    for _ in range(2):
        tau = tau + _newton_step(x, tau, p)
    return tau


def _newton_step(x: Tensor, tau: Tensor, p: float) -> Tensor:
    """Return (‖max(x − τ, 0)‖ₚ − 1) / slope, or 0 if no x exceeds τ."""
    gap = x - tau
    norm = power(gap, p).sum(-1, keepdim=True) ** (1 / p)
    slope = power(gap, p - 1).sum(-1, keepdim=True) / norm ** (p - 1)
    return torch.where(slope > 0, (norm - 1) / slope, 0.0)
