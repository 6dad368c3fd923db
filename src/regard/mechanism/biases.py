"""Relative biases, added to the scores before the normalizer.

A dense bias is a tensor that broadcasts to (…, h, q, k). A *relative* bias depends only on the distance
key − query. It is one vector per head, so the bias and its gradient take linear memory.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from regard._util.checks import check_int
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

    vector: (h, 2r + 1), or (2r + 1) if all heads share it; entry r is for distance 0. It can be a parameter.

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


class ALiBi(RelativeBias):
    """The bias −slope · |distance|, with slopes 2^(−8/h), 2^(−16/h), … (Press et al. 2022, section 3).

    ALiBi has no parameters. If the number of heads is not a power of two, the slopes for the next smaller
    power are followed by every other slope for the next larger one, as in the authors' code.

    >>> import torch, regard
    >>> regard.ALiBi(2).slopes
    tensor([0.0625, 0.0039])
    >>> x = torch.randn(2, 5, 4)
    >>> regard.attention(x, x, x, mask=regard.Causal(), bias=regard.ALiBi(2)).shape
    torch.Size([2, 5, 4])
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        check_int("ALiBi got heads", heads, min=1)
        self.heads = heads

    @property
    def slopes(self) -> Tensor:
        """The slope of each head."""
        return torch.tensor(_slopes(self.heads))

    def forward(self, distance: Tensor) -> Tensor:
        # not a buffer: it would become float16 in half-precision models, too coarse for distances above 2,048
        slopes = torch.tensor(_slopes(self.heads), device=distance.device)
        return -slopes[:, None] * distance.abs()

    def extra_repr(self) -> str:
        return f"heads={self.heads}"


def _slopes(heads: int) -> list[float]:
    power = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    return slopes if power == heads else slopes + _slopes(2 * power)[0::2][: heads - power]


class T5Bias(RelativeBias):
    """A learned bias for each head and distance bucket (Raffel et al. 2020, section 2.1).

    buckets: number of buckets. Half of them cover one distance each; the others are spaced logarithmically.
    max_distance: larger distances share the last bucket.
    bidirectional: split the buckets between left and right; otherwise all keys to the right share the
        bucket for distance 0.

    >>> import torch, regard
    >>> bias = regard.T5Bias(heads=8)
    >>> bias.bucket(torch.tensor([-200, -1, 0, 1, 200]))
    tensor([15,  1,  0, 17, 31])
    >>> x = torch.randn(8, 5, 4)
    >>> regard.attention(x, x, x, bias=bias).sum().backward()
    >>> bias.table.grad.shape
    torch.Size([32, 8])
    """

    def __init__(
        self, heads: int, buckets: int = 32, max_distance: int = 128, bidirectional: bool = True
    ) -> None:
        super().__init__()
        check_int("T5Bias got heads", heads, min=1)
        check_int("T5Bias got buckets", buckets, min=4 if bidirectional else 2)
        exact = buckets // 4 if bidirectional else buckets // 2
        check_int(
            "T5Bias got max_distance", max_distance, min=exact + 1, why=f", above the {exact} exact distances"
        )
        self.buckets, self.max_distance, self.bidirectional = buckets, max_distance, bidirectional
        self.table = nn.Parameter(torch.randn(buckets, heads) * 0.1)

    def bucket(self, distance: Tensor) -> Tensor:
        """Return the bucket of each key − query distance."""
        buckets, base = self.buckets, torch.zeros_like(distance)
        if self.bidirectional:
            buckets //= 2
            base = (distance > 0) * buckets
            far = distance.abs()
        else:
            far = (-distance).clamp(min=0)
        exact = buckets // 2
        growth = torch.log(far.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        coarse = (exact + (growth * (buckets - exact)).long()).clamp(max=buckets - 1)
        return base + torch.where(far < exact, far, coarse)

    def forward(self, distance: Tensor) -> Tensor:
        return self.table[self.bucket(distance)].mT  # l h -> h l

    def extra_repr(self) -> str:
        direction = "" if self.bidirectional else ", bidirectional=False"
        sizes = f"heads={self.table.shape[1]}, buckets={self.buckets}, max_distance={self.max_distance}"
        return sizes + direction


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
