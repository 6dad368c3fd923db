"""Dropout on the weights: which are kept depends on a seed, the row and the key, and on nothing else.

A hash instead of a stream of random numbers: any tile can be decided on its own, in any order, forward
and backward, and always comes out the same.
"""

import torch
from torch import Tensor

from regard.mechanism.call.problem import Problem

_BITS = 0xFFFFFFFF


def draw_seed(device: torch.device, generator: torch.Generator | None) -> Tensor:
    """A seed from torch's generator."""
    place = device if generator is None else generator.device
    return torch.randint(_BITS, (), dtype=torch.int64, device=place, generator=generator).to(device)


def keep(problem: Problem, dtype: torch.dtype) -> Tensor:
    """0 for the pairs that are dropped, 1 / (1 − dropout) for the others: (…, g, r, q, k)."""
    dropout = problem.rules.dropout
    row = _mix(problem["head"] * problem.rules.queries + problem["row"] ^ problem["seed"])
    other = _mix(row + 0x9E3779B9 & _BITS)
    hashed = _mix(_mix(problem.key_numbers() ^ row) ^ other)
    return (hashed >= int(dropout * (_BITS + 1))).to(dtype) / (1 - dropout)


def _mix(x: Tensor) -> Tensor:
    """A 32-bit hash, two multiplications between three shifts, held in 64 bits (Wellons' lowbias32)."""
    x = x & _BITS
    x = (x ^ (x >> 16)) * 0x7FEB352D & _BITS
    x = (x ^ (x >> 15)) * 0x846CA68B & _BITS
    return x ^ (x >> 16)
