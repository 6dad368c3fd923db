"""Helpers for exact comparisons in float64."""

from typing import Any

import torch
from torch import Tensor, nn


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Return normal values in float64, determined by shape and seed."""
    generator = torch.Generator().manual_seed(seed + 1000 * len(shape) + sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def close(actual: Tensor, expected: Tensor, within: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=within, atol=within)


def filled(module: nn.Module) -> Any:
    """Convert to float64 and randomize all parameters."""
    module.double()
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=seed) / 2)
    return module
