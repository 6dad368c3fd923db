"""Dropout on the weights: a hash of seed, row and key decides which weights are dropped.

Because of the hash, each tile can be reproduced independently and in any order, in the forward and the
backward pass, which is impossible with a stream of random numbers.
"""

import torch
from torch import Tensor

from regard.mechanism.call.problem import Problem

_BITS = 0xFFFFFFFF


def draw_seed(device: torch.device, generator: torch.Generator | None) -> Tensor:
    """Draw a seed from a generator, by default torch's global one."""
    seed_device = device if generator is None else generator.device
    return torch.randint(_BITS, (), dtype=torch.int64, device=seed_device, generator=generator).to(device)


def dropout_factors(problem: Problem, dtype: torch.dtype) -> Tensor:
    """Return 0 for dropped pairs and 1 / (1 − dropout) for the others: (…, g, r, q, k)."""
    dropout = problem.config.dropout
    row = _mix(problem["head"] * problem.config.queries + problem["row"] ^ problem["seed"])
    second = _mix(row + 0x9E3779B9 & _BITS)
    hashed = _mix(_mix(problem.key_indices() ^ row) ^ second)
    return (hashed >= int(dropout * (_BITS + 1))).to(dtype) / (1 - dropout)


def _mix(x: Tensor) -> Tensor:
    """Compute Wellons' 32-bit hash lowbias32 in 64-bit integers."""
    x = x & _BITS
    x = (x ^ (x >> 16)) * 0x7FEB352D & _BITS
    x = (x ^ (x >> 15)) * 0x846CA68B & _BITS
    return x ^ (x >> 16)
