"""Lazy low-rank matrices (…, q, k), and their elementwise products with attention weights.

    LowRank         left · rightᵀ                     such as the gradient of the weights, dO · Vᵀ
    WeightProduct   weights ∘ (left · rightᵀ)         such as norms (rank 1) and gradient × weight

Both are computed tile by tile: memory is linear in the number of tokens.
"""

import math
from collections.abc import Iterator
from typing import Self

import torch
from torch import Tensor

from regard._util import interrupt
from regard.errors import ArgumentError
from regard.mechanism.call.problem import Tile
from regard.mechanism.weights.tensor_like import Index, SplitIndex, split_index
from regard.mechanism.weights.tiled_matrix import TiledMatrix
from regard.mechanism.weights.weights import Weights

_CELLS = 2**20  # values per block of rows


class LazyProduct(TiledMatrix):
    """A lazy matrix (…, q, k) that is computed from left (…, h, q, e) and right (…, h, k, e).

    Subclasses define `tiles`, `rows` and `__getitem__`.
    """

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self._left, self._right = left, right

    @property
    def shape(self) -> torch.Size:
        lead = torch.broadcast_shapes(self._left.shape[:-2], self._right.shape[:-2])
        return torch.Size((*lead, self._left.shape[-2], self._right.shape[-2]))

    @property
    def dtype(self) -> torch.dtype:
        return self._left.dtype

    @property
    def device(self) -> torch.device:
        return self._left.device

    @property
    def requires_grad(self) -> bool:
        return self._left.requires_grad or self._right.requires_grad

    def __repr__(self) -> str:
        return f"{type(self).__name__}({' × '.join(map(str, self.shape))})"


class LowRank(LazyProduct):
    """The matrix left · rightᵀ of each head: left (…, h, q, e), right (…, h, k, e).

    >>> import torch
    >>> from regard.inspection.measures.lazy_products import LowRank
    >>> left, right = torch.randn(2, 5, 3), torch.randn(2, 7, 3)
    >>> torch.allclose(LowRank(left, right) @ torch.ones(7), (left @ right.mT).sum(-1), atol=1e-5)
    True
    """

    def dense(self) -> Tensor:
        """Return the full matrix as a dense tensor, with q × k values per head."""
        return self._left @ self._right.mT

    def __getitem__(self, index: Index) -> Tensor:
        """Return part of the matrix, such as one row, as a dense tensor: [batch, head, query] or slices."""
        lead, rows, columns, dropped = _split(index, self.shape)
        left = self._left.expand(*self.shape[:-2], *self._left.shape[-2:])[(*lead, rows)]
        right = self._right.expand(*self.shape[:-2], *self._right.shape[-2:])[(*lead, columns)]
        return (left @ right.mT)[dropped]

    def rows(self, rows: slice | Tensor) -> Self:
        """Select queries. The result is lazy."""
        return type(self)(self._left[..., rows, :], self._right)

    def tiles(self) -> Iterator[tuple[Tile, Tensor]]:
        """Yield each block of rows with its entries, in linear memory."""
        *lead, queries, keys = self.shape
        for rows in row_blocks(queries, math.prod(lead) * keys):
            interrupt.check()
            yield Tile((), rows, slice(0, keys)), self._left[..., rows, :] @ self._right.mT

    def _product(self, x: Tensor, *, transposed: bool = False) -> Tensor:
        """Return matrix · x, or matrixᵀ · x, in time linear in the number of queries and keys."""
        left, right = (self._right, self._left) if transposed else (self._left, self._right)
        columns = x[:, None] if x.dim() == 1 else x
        product = left @ (right.mT @ columns.to(self.dtype))
        return product[..., 0] if x.dim() == 1 else product


class WeightProduct(LazyProduct):
    """weights ∘ (left · rightᵀ), computed on demand; left (…, h, q, e), right (…, h, k, e), h as in weights.

    positive: replace negative entries with zero.

    >>> import torch, regard
    >>> from regard.inspection.measures.lazy_products import WeightProduct
    >>> x = torch.randn(2, 5, 3)
    >>> weights = regard.attend(x, x, x)[1]
    >>> product = WeightProduct(weights, x, x)
    >>> torch.allclose(product.dense(), weights.dense() * (x @ x.mT), atol=1e-6)
    True
    """

    def __init__(self, weights: Weights, left: Tensor, right: Tensor, *, positive: bool = False) -> None:
        self._weights, self._positive = weights, positive
        lead = weights.shape[:-2]
        super().__init__(left.expand(*lead, *left.shape[-2:]), right.expand(*lead, *right.shape[-2:]))

    @property
    def requires_grad(self) -> bool:
        return self._weights.requires_grad or super().requires_grad

    def positive(self) -> Self:
        """Return the matrix with zeros instead of negative entries. The result is lazy."""
        return self._with(self._weights, self._left, self._right, True)

    def rows(self, rows: slice | Tensor) -> Self:
        """Select queries. The result is lazy."""
        return self._with(self._weights.rows(rows), self._left[..., rows, :], self._right, self._positive)

    def _with(self, weights: Weights, left: Tensor, right: Tensor, positive: bool) -> Self:
        part = type(self).__new__(type(self))
        WeightProduct.__init__(part, weights, left, right, positive=positive)
        return part

    @property
    def problem_lead(self) -> tuple[int, ...]:
        """Leading axes of the tiles, (…, g, r)."""
        return self._weights.problem_lead

    def tiles(self) -> Iterator[tuple[Tile, Tensor]]:
        """Yield each tile (…, g, r, q, k) with its entries, in linear memory."""
        left, right = (x.reshape(*self.problem_lead, *x.shape[-2:]) for x in (self._left, self._right))
        for tile, block in self._weights.tiles():
            interrupt.check()
            entries = block * (left[tile.rows_index] @ right[tile.keys_index].mT)
            yield tile, entries.clamp(min=0) if self._positive else entries

    def __getitem__(self, index: Index) -> Tensor:
        """Return part of the matrix, such as one row, as a dense tensor: [batch, head, query] or slices."""
        lead, rows, columns, dropped = _split(index, self.shape)
        weights = self._weights.part(lead, rows)
        part = self._with(weights, self._left[(*lead, rows)], self._right[lead], self._positive)
        return part.dense()[..., columns][dropped]


def _split(index: Index, shape: torch.Size) -> SplitIndex:
    split = split_index(index, shape)
    if split is None:
        raise ArgumentError(
            f"cannot index a lazy matrix of shape {tuple(shape)} with {index!r}; use numbers and slices, or "
            "rows(indices)."
        )
    return split


def row_blocks(rows: int, row_size: int) -> Iterator[slice]:
    """Divide rows into blocks of about 2²⁰ values.

    >>> from regard.inspection.measures.lazy_products import row_blocks
    >>> list(row_blocks(3, 2**19))
    [slice(0, 2, None), slice(2, 3, None)]
    """
    step = max(_CELLS // max(row_size, 1), 1)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def expand_heads(value: Tensor, weights: Weights) -> Tensor:
    """Repeat key heads for the query heads that share them, (…, g, k, e) → (…, h, k, e).

    >>> import torch, regard
    >>> from regard.inspection.measures.lazy_products import expand_heads
    >>> weights = regard.attend(torch.zeros(6, 5, 3), torch.zeros(2, 7, 3), torch.zeros(2, 7, 3))[1]
    >>> expand_heads(torch.zeros(2, 7, 3), weights).shape
    torch.Size([6, 7, 3])
    """
    if not weights.has_heads:
        return value
    heads, groups = int(weights.shape[-3]), value.shape[-3]
    assert heads % groups == 0, (groups, heads)
    return value if groups == heads else value.repeat_interleave(heads // groups, -3)
