"""Relative biases, added to the scores before the normalizer.

A dense bias is a tensor that broadcasts to (…, h, q, k). A *relative* bias depends only on the distance
key − query. It is stored as one vector per head, so the bias and its gradient take linear memory.
"""

from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import DTypeError, ShapeError


class RelativeBias(nn.Module):
    """Base class for biases that depend only on the distance key − query.

    Distances are measured with the last query aligned to the last key.

    Subclasses implement `forward(distance)`, which returns the bias at each distance: (l) → (h, l), or
    (l) → (l) if all heads share the bias.

    >>> import torch, regard
    >>> class Far(regard.RelativeBias):
    ...     def forward(self, distance):
    ...         return 0.1 * distance.abs()
    >>> Far().dense(2, 3)
    tensor([[0.1000, 0.0000, 0.1000],
            [0.2000, 0.1000, 0.0000]])
    """

    def line(self, queries: int, keys: int, device: torch.device | str) -> Tensor:
        """Return the bias at every distance, in increasing order: (…, q + k − 1)."""
        distance = torch.arange(max(queries + keys - 1, 0), device=device) - (keys - 1)
        return self(distance)

    def dense(self, queries: int, keys: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the bias as a matrix (…, queries, keys)."""
        return expand_line(self.line(queries, keys, device), queries, keys)

    def encode(self, x: Tensor, positions: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Return x unchanged, and this bias as a keyword argument for attention layers."""
        return x, {"bias": self}


class ClippedRelativeBias(RelativeBias):
    """One bias per head and distance, with distances clipped to [−r, r] (Shaw et al. 2018, section 3.2).

    vector: (h, 2r + 1), or (2r + 1) if all heads share it; entry r is for distance 0. Can be an nn.Parameter.

    >>> import torch, regard
    >>> bias = regard.ClippedRelativeBias(torch.tensor([0.0, 1.0, 2.0]))  # left, same position, right
    >>> bias.dense(2, 3)
    tensor([[0., 1., 2.],
            [0., 0., 1.]])
    """

    vector: Tensor

    def __init__(self, vector: Tensor) -> None:
        super().__init__()
        if not isinstance(vector, Tensor) or not vector.is_floating_point():
            kind = f"dtype {vector.dtype}" if isinstance(vector, Tensor) else f"type {type(vector).__name__}"
            raise DTypeError(
                f"ClippedRelativeBias got a vector of {kind}; pass a floating-point tensor: torch.tensor(…)."
            )
        if vector.dim() not in (1, 2) or vector.shape[-1] % 2 != 1:
            raise ShapeError(
                f"ClippedRelativeBias got a vector of shape {tuple(vector.shape)}; pass (2r + 1) or (heads, "
                "2r + 1), with distance 0 in the middle."
            )
        if isinstance(vector, nn.Parameter):
            self.vector = vector
        else:
            self.register_buffer("vector", vector)

    def forward(self, distance: Tensor) -> Tensor:
        limit = self.vector.shape[-1] // 2
        return self.vector[..., distance.clamp(-limit, limit) + limit]

    def extra_repr(self) -> str:
        return f"vector={tuple(self.vector.shape)}"


def expand_line(line: Tensor, queries: int, keys: int) -> Tensor:
    """Expand the values at all distances to a matrix: entry (i, j) is line[j − i + queries − 1]."""
    rows = torch.arange(queries - 1, -1, -1, device=line.device)[:, None]
    return line[..., torch.arange(keys, device=line.device) + rows]


def sum_diagonals(matrix: Tensor) -> Tensor:
    """Sum along each diagonal, (…, q, k) → (…, q + k − 1). This is the transpose of `expand_line`.

    Reshaping the padded matrix to rows one element shorter shifts each row by one: diagonals become columns.
    """
    queries, keys = matrix.shape[-2:]
    if queries == 0:
        return matrix.new_zeros(*matrix.shape[:-2], max(keys - 1, 0))
    lead, length = matrix.shape[:-2], queries + keys - 1
    wide = nn.functional.pad(matrix.flip(-2), (0, queries)).reshape(*lead, queries * (length + 1))
    return wide[..., : queries * length].reshape(*lead, queries, length).sum(-2)
