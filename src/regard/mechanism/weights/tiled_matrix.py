"""A lazy matrix that is computed tile by tile: its products, its transpose and its largest entries."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from regard._util.text import pluralize, type_name
from regard.errors import ArgumentError, DTypeError, ShapeError
from regard.mechanism import reference
from regard.mechanism.autocast import in_own_dtype
from regard.mechanism.call.problem import Tile
from regard.mechanism.masks.algebra import broadcasts
from regard.mechanism.torch_state import concrete
from regard.mechanism.weights.tensor_like import TensorLike, dense_arguments
from regard.mechanism.weights.transpose import TransposedWeights

_MAX_KERNEL_K = 64  # maximum k that the topk kernel supports


class TopK(NamedTuple):
    """The k largest weights of each row and their keys.

    values: (…, q, k), in descending order. indices: (…, q, k), the key of each value.

    >>> import torch, regard
    >>> x = torch.eye(3)
    >>> regard.attend(x, x, x)[1].topk(1).indices.squeeze(-1)
    tensor([0, 1, 2])
    """

    values: Tensor
    indices: Tensor


class TiledMatrix(TensorLike):
    """A lazy matrix (…, q, k) that yields its tiles. Subclasses define `tiles` and `rows`."""

    def tiles(self) -> Iterator[tuple[Tile, Tensor]]:
        """Yield each tile with its entries."""
        raise NotImplementedError

    def rows(self, rows: slice | Tensor) -> Self:
        """Select queries. The result is lazy."""
        raise NotImplementedError

    def reader(self) -> Any:
        """Return a reader that uses the kernels, or None if they do not support this matrix."""
        return None

    @property
    def problem_lead(self) -> tuple[int, ...]:
        """Leading axes of the tiles."""
        return tuple(self.shape[:-2])

    def _new(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        """Create a tensor of zeros (*problem_lead, *size)."""
        return torch.zeros((*self.problem_lead, *size), dtype=dtype or self.dtype, device=self.device)

    def _axes(self, dim: int | Sequence[int] | None) -> list[int]:
        """Return axes as sorted nonnegative numbers. As in torch, None and () mean all axes."""
        ndim = len(self.shape)
        dims = range(ndim) if dim is None or dim == () else [dim] if isinstance(dim, int) else dim
        for axis in dims:
            if not -ndim <= axis < ndim:
                raise IndexError(f"axis {axis} is out of range for weights with {ndim} axes")
        return sorted(axis % ndim for axis in dims)

    def _merge_heads(self, x: Tensor) -> Tensor:
        """Merge the leading axes of the tiles into those of the matrix."""
        return x.reshape(*self.shape[:-2], *x.shape[len(self.problem_lead) :])

    def dense(self) -> Tensor:
        """Return the full matrix as a dense tensor, with q × k entries per head."""
        result = self._new(*self.shape[-2:])
        for tile, block in self.tiles():
            result[tile.rows_index][..., tile.keys] = block
        return self._merge_heads(result)

    # Products

    def __matmul__(self, x: Any) -> Tensor:
        """Return weights · x, where x has shape (k) or (…, k, e). Leading axes broadcast.

        With grouped-query attention, x may have one head per key head, like `value`.
        """
        return self._product(dense_arguments(x))

    def matmul(self, x: Any) -> Tensor:
        """Return weights @ x."""
        return self @ x

    def __rmatmul__(self, x: Any) -> Any:
        """Return x · weights, where x has shape (q) or (…, e, q). Leading axes broadcast."""
        if isinstance(x, np.ndarray):
            return x @ self.numpy()
        if not isinstance(x, Tensor) or x.dim() < 2:
            return self._product(x, transposed=True)
        return self._product(x.mT, transposed=True).mT

    @property
    def T(self) -> TransposedWeights:
        """The transpose (…, k, q) as a linear operator, used as `weights.T @ x`."""
        return TransposedWeights(self)

    mT = mH = T

    @in_own_dtype
    def _product(self, x: Tensor, *, transposed: bool = False) -> Tensor:
        """Return weights · x, or weightsᵀ · x."""
        queries, keys = self.shape[-2:]
        columns, is_vector = self._operand(x, queries if transposed else keys)
        reader = None if _records_grad(columns) else self.reader()
        result = None
        if reader is not None:
            result = reader.transposed_product(columns) if transposed else reader.product(columns)
        if result is None:
            nan_safe = not (concrete(columns) and bool(torch.isfinite(columns).all()))
            result = self._new(keys if transposed else queries, columns.shape[-1])
            for tile, block in self.tiles():
                if transposed:
                    part = reference.weighted_sum(block.mT, columns[tile.rows_index], nan_safe=nan_safe)
                    result[tile.keys_index] += part
                else:
                    part = reference.weighted_sum(block, columns[tile.keys_index], nan_safe=nan_safe)
                    result[tile.rows_index] = part
        result = self._merge_heads(result)
        return result[..., 0] if is_vector else result

    def _operand(self, x: Tensor, size: int) -> tuple[Tensor, bool]:
        """Return x as columns in the layout of the tiles, and whether it was a single vector."""
        if not isinstance(x, Tensor):
            raise DTypeError(f"cannot multiply weights by {type_name(x)}; pass a torch.Tensor.")
        columns = x[:, None] if x.dim() == 1 else x
        lead, grouped = tuple(self.shape[:-2]), self._grouped(columns)
        fits = grouped is not None or broadcasts(columns.shape[:-2], lead)
        if x.dim() == 0 or columns.shape[-2] != size or not fits:
            raise ShapeError(
                f"cannot multiply weights of shape {tuple(self.shape)} by a tensor of shape "
                f"{tuple(x.shape)}; it needs {size} rows and leading axes that broadcast to {lead}."
            )
        if grouped is not None:
            return grouped.to(self.dtype).resolve_neg(), False
        columns = columns.resolve_neg()
        columns = columns.to(self.dtype).expand(*lead, *columns.shape[-2:])
        return columns.reshape(*self.problem_lead, *columns.shape[-2:]), x.dim() == 1

    def _grouped(self, x: Tensor) -> Tensor | None:
        """Expand x from key heads to query heads, or return None for other shapes."""
        return None

    # Reductions

    def topk(self, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> TopK:
        """Return the k largest weights of each row and their keys: values and indices, each (…, q, k).

        dim: -1, or -2 for the largest weights of each key and their queries, (…, k, keys).

        As in `torch.topk`, k must not exceed the size of the axis. Masked keys have weight 0.

        >>> import torch, regard
        >>> x = torch.eye(3)
        >>> values, indices = regard.attend(x, x, x, score=regard.Dot())[1].topk(1)
        >>> indices.squeeze(-1)
        tensor([0, 1, 2])
        """
        (axis,) = self._axes(dim)
        best = _find_largest(self, k, axis) if largest else None
        return TopK(*(best or self.to_dense().topk(k, dim, largest, sorted)))

    def received(self) -> Tensor:
        """Return the total weight that each key receives, summed over the queries: (…, k).

        >>> import torch, regard
        >>> x = torch.zeros(4, 2)
        >>> regard.attend(x, x, x, mask=regard.Causal())[1].received()
        tensor([2.0833, 1.0833, 0.5833, 0.2500])
        """
        ones = torch.ones(self.shape[-2], dtype=self.dtype, device=self.device)
        return self._product(ones, transposed=True)


def _find_largest(matrix: TiledMatrix, k: int, axis: int) -> tuple[Tensor, Tensor] | None:
    """Return the k largest weights along an axis and their positions, or None for a leading axis."""
    size = matrix.shape[axis]
    if not min(size, 1) <= k <= size:
        name = {1: "key", 2: "query"}.get(len(matrix.shape) - axis, "entry")
        raise ArgumentError(
            f"topk got k={k} for weights with {pluralize(size, name)}; k must be between 1 and the size of "
            f"axis {axis}: topk(min(k, weights.shape[{axis - len(matrix.shape)}]), "
            f"{axis - len(matrix.shape)})."
        )
    if axis == len(matrix.shape) - 1:
        return _row_topk(matrix, k)
    return _column_topk(matrix, k) if axis == len(matrix.shape) - 2 else None


def _row_topk(matrix: TiledMatrix, k: int) -> tuple[Tensor, Tensor]:
    reader = matrix.reader() if k <= _MAX_KERNEL_K else None
    best = None if reader is None else reader.topk(k)
    # the kernel ranks only visible keys, but masked keys, with weight 0, precede negative weights
    if best is not None and not bool((best[0] < 0).any()):
        return matrix._merge_heads(best[0]), matrix._merge_heads(_fill_missing(best[1]))
    values = matrix._new(matrix.shape[-2], k)
    indices = matrix._new(matrix.shape[-2], k, dtype=torch.long)
    for tile, block in matrix.tiles():
        # the keys outside a tile have weight 0; k of them on each side suffice
        before = min(tile.keys.start, k)
        after = min(matrix.shape[-1] - tile.keys.stop, k)
        largest, at = _topk(pad(block, (before, after)), k, -1)
        values[tile.rows_index] = largest
        indices[tile.rows_index] = torch.where(at < before, at, at + (tile.keys.start - before))
    return matrix._merge_heads(values), matrix._merge_heads(indices)


def _topk(x: Tensor, k: int, dim: int) -> tuple[Tensor, Tensor]:
    """Return the k largest values and their positions. For k = 1, ties go to the first value, as in `max`."""
    values, indices = x.max(dim, keepdim=True) if k == 1 and x.shape[dim] else x.topk(k, dim)
    return values, indices


def _fill_missing(indices: Tensor) -> Tensor:
    """Replace −1, the placeholder in rows with fewer than k visible keys, with masked keys."""
    incomplete = (indices < 0).any(-1)
    if not bool(incomplete.any()):
        return indices
    rows = indices[incomplete]  # n k
    k = rows.shape[-1]
    listed = torch.zeros(len(rows), k + 1, dtype=torch.int8, device=rows.device)
    listed.scatter_(-1, torch.where((rows < 0) | (rows >= k), k, rows), 1)
    unlisted = listed[:, :k].argsort(dim=-1, stable=True)  # unlisted keys come first
    missing = rows < 0
    rank = (missing.cumsum(-1) - 1).clamp(min=0)
    indices[incomplete] = torch.where(missing, unlisted.gather(-1, rank), rows)
    return indices


def _column_topk(matrix: TiledMatrix, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest weights of each column and their queries, merged tile by tile."""
    first_rows = matrix.rows(slice(0, k)).dense().reshape(*matrix.problem_lead, k, matrix.shape[-1])
    values, order = first_rows.sort(-2, descending=True)
    indices = order.clone()  # the derivative of sort needs the unmodified order
    for tile, block in matrix.tiles():
        start = max(tile.rows.start, k)
        block, keys = block[..., start - tile.rows.start :, :], tile.keys
        if not block.numel():
            continue
        if bool((values[tile.lead] < 0).any()):  # keys outside this tile have a larger weight: 0
            block = pad(block, (keys.start, matrix.shape[-1] - keys.stop))
            keys = slice(0, matrix.shape[-1])
        at: Any = (*tile.lead, ..., keys)
        rows = torch.arange(start, tile.rows.stop, device=block.device)[:, None].expand(block.shape)
        best, order = _topk(torch.cat([values[at], block], -2), k, -2)
        values[at] = best
        indices[at] = torch.cat([indices[at], rows], -2).gather(-2, order)
    return matrix._merge_heads(values), matrix._merge_heads(indices)


def _records_grad(x: Tensor) -> bool:
    return not concrete(x) or (torch.is_grad_enabled() and x.requires_grad)
