"""The largest weights along an axis of a lazy matrix, and their positions, in linear memory."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.errors import ArgumentError
from regard.mechanism.call.problem import Tile
from regard.mechanism.weights.reader import Reader

_MAX_KERNEL_K = 64  # largest k that the topk kernel supports


class TiledMatrix(Protocol):
    """A lazy matrix (…, q, k) that yields its tiles, in linear memory."""

    @property
    def shape(self) -> torch.Size: ...
    @property
    def ndim(self) -> int: ...
    @property
    def problem_lead(self) -> tuple[int, ...]: ...
    def tiles(self) -> Iterator[tuple[Tile, Tensor]]: ...
    def rows(self, rows: slice | Tensor) -> Any: ...
    def reader(self) -> Reader | None: ...
    def _new(self, *size: int, dtype: torch.dtype | None = None) -> Tensor: ...
    def _merge_heads(self, x: Tensor) -> Tensor: ...


def find_largest(matrix: TiledMatrix, k: int, axis: int) -> tuple[Tensor, Tensor] | None:
    """Return the k largest weights along an axis and their positions, or None for a leading axis."""
    size = matrix.shape[axis]
    if not min(size, 1) <= k <= size:
        name = {1: "keys", 2: "queries"}.get(matrix.ndim - axis, f"entries along axis {axis}")
        raise ArgumentError(
            f"topk got k={k} for weights with {size} {name}; k must be between 1 and the size of the axis: "
            f"topk(min(k, weights.shape[{axis - matrix.ndim}]), {axis - matrix.ndim})."
        )
    if axis == matrix.ndim - 1:
        return _row_topk(matrix, k)
    return _column_topk(matrix, k) if axis == matrix.ndim - 2 else None


def _row_topk(matrix: TiledMatrix, k: int) -> tuple[Tensor, Tensor]:
    reader = matrix.reader() if k <= _MAX_KERNEL_K else None
    best = None if reader is None else reader.topk(k)
    # the kernel ranks visible keys only; if it lists negative weights, masked keys may be larger
    if best is not None and not bool((best[0] < 0).any()):
        return matrix._merge_heads(best[0]), matrix._merge_heads(_fill_missing(best[1]))
    values = matrix._new(matrix.shape[-2], k)
    indices = matrix._new(matrix.shape[-2], k, dtype=torch.long)
    for tile, block in matrix.tiles():
        # the keys outside a tile have weight 0; k of them suffice
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
    """Replace −1 with masked keys, in rows that see fewer than k keys and therefore list all of them."""
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
    indices = order.clone()  # the derivative of sort needs the original
    for tile, block in matrix.tiles():
        start = max(tile.rows.start, k)
        block, keys = block[..., start - tile.rows.start :, :], tile.keys
        if not block.numel():
            continue
        if bool((values[tile.lead] < 0).any()):  # a key that this tile does not see has weight 0: larger
            block = pad(block, (keys.start, matrix.shape[-1] - keys.stop))
            keys = slice(0, matrix.shape[-1])
        at: Any = (*tile.lead, ..., keys)
        rows = torch.arange(start, tile.rows.stop, device=block.device)[:, None].expand(block.shape)
        best, order = _topk(torch.cat([values[at], block], -2), k, -2)
        values[at] = best
        indices[at] = torch.cat([indices[at], rows], -2).gather(-2, order)
    return matrix._merge_heads(values), matrix._merge_heads(indices)
