"""Compute regions of a lazy matrix, at a cost proportional to their size.

Each weight depends on the row statistic τ, which depends on all keys of the row but is known from the forward
pass. The scores must be rounded in the same way as when τ was computed. The kernels guarantee this; torch's
matmul does not, so rows with large scores are recomputed with all of their keys.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard._util import interrupt
from regard.errors import ArgumentError
from regard.mechanism import reference, tiled
from regard.mechanism.call.problem import Problem, Tile, tiles
from regard.mechanism.normalizers import Normalizer, Sigmoid
from regard.mechanism.scores import ACTIVATIONS
from regard.mechanism.torch_state import concrete
from regard.mechanism.weights.index import SelectableMatrix
from regard.mechanism.weights.reader import Reader, kernels_support
from regard.mechanism.weights.tensor_like import Index

_BAND = 32  # minimum number of rows per band (output row) for pooling with the kernels
_ROUNDING = 2e-5  # accepted rounding error of a score computed by torch


def read_columns(matrix: SelectableMatrix, columns: slice) -> Tensor:
    """Return some columns of the matrix as a dense tensor, (…, q, columns)."""
    keys = range(matrix.shape[-1])[columns]
    span = slice(keys[0], keys[-1] + 1) if keys else slice(0, 0)
    indices = torch.arange(matrix.shape[-1], device=matrix.device)[columns]
    result = matrix._new(matrix.shape[-2], len(indices))
    for tile, block in _column_tiles(matrix, span):
        if block.shape[-1] == len(indices):
            result[tile.rows_index] = block
            continue
        inside = (indices >= tile.keys.start) & (indices < tile.keys.stop)
        result[tile.rows_index][..., inside] = block[..., indices[inside] - tile.keys.start]
    return matrix._merge_heads(result)


def _column_tiles(matrix: SelectableMatrix, span: slice) -> Iterator[tuple[Tile, Tensor]]:
    """Yield tiles that cover a span of keys. Omit other keys if the weights stay exactly the same."""
    partial = span.stop - span.start < matrix.shape[-1]
    if partial and matrix.compute_tau() and kernels_support(matrix.problem):
        return region_tiles(matrix, slice(0, matrix.shape[-2]), span)
    return matrix.tiles()


def read_elements(matrix: SelectableMatrix, index: Index) -> Tensor:
    """Return matrix[index] for an index with arrays, by computing only the rows that contain its elements."""
    *lead, queries, keys = matrix.shape
    row_numbers = torch.arange(math.prod(lead) * queries, device="cpu").reshape(*lead, queries, 1)
    rows = row_numbers.expand(matrix.shape)[index]
    columns = torch.arange(keys, device="cpu").expand(matrix.shape)[index]
    result = torch.zeros(rows.shape, dtype=matrix.dtype, device=matrix.device)
    if not rows.numel():
        return result
    span = slice(int(columns.min()), int(columns.max()) + 1)
    columns = (columns - span.start).to(matrix.device)
    for head in torch.unique(rows // queries).tolist():
        lead_index = [slice(int(i), int(i) + 1) for i in np.unravel_index(head, lead)] if lead else []
        in_head = (rows // queries == head).to(matrix.device)
        needed, inverse = torch.unique(rows.to(matrix.device)[in_head] % queries, return_inverse=True)
        dense = read_columns(matrix.part(lead_index, needed), span).reshape(len(needed), -1)
        result[in_head] = dense[inverse, columns[in_head]]
    return result


def pool(matrix: SelectableMatrix, sizes: tuple[int, int], within: tuple[slice, slice]) -> Tensor:
    """Average-pool a region to at most rows × columns blocks: (…, rows, columns)."""
    rows, keys = (_resolve_slice(part, n) for part, n in zip(within, matrix.shape[-2:], strict=True))
    row_edges, key_edges = (_edges(span, n) for span, n in zip((rows, keys), sizes, strict=True))
    matrix.compute_tau()
    result = matrix._new(len(row_edges) - 1, len(key_edges) - 1)
    cells = torch.from_numpy(np.outer(np.diff(row_edges), np.diff(key_edges))).to(result)
    # block index of each row and of each key
    row_of, key_of = (_block_of(edges) for edges in (row_edges, key_edges))
    if _pool_with_kernels(matrix, rows, keys, row_edges, _as_index(key_of, result), result):
        return matrix._merge_heads(result / cells)
    for tile, block in region_tiles(matrix, rows, keys):
        if not block.numel():
            continue
        bands, columns = row_of[tile.rows], key_of[tile.keys.start - keys.start : tile.keys.stop - keys.start]
        first, last = int(bands[0]), int(bands[-1]) + 1
        summed = block
        if last - first < block.shape[-2]:
            summed = block.new_zeros(*block.shape[:-2], last - first, block.shape[-1])
            summed = summed.index_add(-2, _as_index(bands - first, block), block)
        index: Any = (*tile.lead, ..., slice(first, last), slice(None))
        result[index] = result[index].index_add(-1, _as_index(columns, block), summed.to(result.dtype))
    return matrix._merge_heads(result / cells)


def _pool_with_kernels(
    matrix: SelectableMatrix,
    rows: slice,
    keys: slice,
    edges: NDArray[np.int64],
    key_of: Tensor,
    result: Tensor,
) -> bool:
    """Sum many rows at a time without materializing weights. Returns False if the kernels cannot do this."""
    matrix.check_inputs()
    problem, _, from_kernels = matrix._state()
    wide = rows.stop - rows.start >= _BAND * max(len(edges) - 1, 1) and keys.stop > keys.start
    if not (wide and from_kernels and kernels_support(problem) and _tau_is_exact(problem, from_kernels)):
        return False
    lead = problem.lead()
    lead_slices = tuple(slice(0, n) for n in lead[:-1])
    width = math.prod(lead) * (keys.stop - keys.start)
    for band, (low, high) in enumerate(itertools.pairwise((edges + rows.start).tolist())):
        for step in interrupt.bands(high - low, width):
            part = problem.part(Tile(lead_slices, slice(low + step.start, low + step.stop), keys))
            ones = part["query"].new_ones(*lead, step.stop - step.start, 1)
            sums = Reader(part, matrix._rows_per_key_head()).transposed_product(ones)  # … g r k 1
            if sums is None:
                result.zero_()
                return False
            sums = sums[..., 0].mean((-3, -2)) if matrix.is_head_mean else sums[..., 0]
            result[..., band, :].index_add_(-1, key_of, sums.to(result.dtype))
    return True


def region_tiles(matrix: SelectableMatrix, rows: slice, keys: slice) -> Iterator[tuple[Tile, Tensor]]:
    """Yield each tile of a region with its weights. Rows are relative to the region."""
    matrix.check_inputs()
    matrix.compute_tau()
    whole = rows == slice(0, matrix.shape[-2]) and keys == slice(0, matrix.shape[-1])
    part = matrix if whole else matrix.rows(rows)
    problem, _, from_kernels = part._state()
    if not _tau_is_exact(problem, from_kernels):
        # recompute the rows with all of their keys
        for tile, block in part.tiles():
            interrupt.check()
            common = _intersect(tile.keys, keys)
            yield (
                tile._replace(keys=common),
                block[..., common.start - tile.keys.start : common.stop - tile.keys.start],
            )
        return
    mean = matrix.is_head_mean
    ratio = max(problem.keys, 1) / max(keys.stop - keys.start, 1)
    for tile in tiles(problem, int(tiled.budget(problem) * ratio), all_heads=mean):
        interrupt.check()
        tile = tile._replace(keys=_intersect(tile.keys, keys))
        block = _weights_from_tau(part, problem.part(tile))
        if mean:
            tile, block = tile._replace(lead=tile.lead[:-1]), block.mean((-4, -3))
        yield tile, block


def _tau_is_exact(problem: Problem, tau_from_kernels: bool | None) -> bool:
    """Whether weights of a subset of keys can be computed from the known τ.

    This is impossible if weights also depend on the number of visible keys, if gradients are needed, if there
    are NaNs or infinities (one such key affects the whole row), or if torch computed τ from scores so large
    that their rounding error matters.
    """
    normalize = problem.config.normalize
    if isinstance(normalize, Sigmoid) or type(normalize).divisor is not Normalizer.divisor:
        return False
    tensors = problem.tensors.values()
    if not concrete(*tensors) or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        return False
    biases = [t for kind in ("bias", "line", "sink") for t in problem.all(kind)]
    finite = all(bool((~(t.isnan() | (t == math.inf))).all()) for t in biases)
    if not finite or bool(problem["tau"].isnan().any()) or problem.nan_checked().config.nan_safe:
        return False
    if tau_from_kernels and kernels_support(problem):
        return True
    return _score_bound(problem) * torch.finfo(problem["query"].dtype).eps <= _ROUNDING


def _score_bound(problem: Problem) -> float:
    """Return an upper bound on the magnitude of all scores, including biases."""
    if not problem["tau"].numel() or not problem.keys:
        return 0.0
    query, key, vector = problem["query"], problem.dequantized("key"), problem.get("vector")
    if vector is None:
        bound = abs(problem.config.scale) * float(query.norm(dim=-1).max()) * float(key.norm(dim=-1).max())
    else:
        largest = query.abs().max() + key.abs().max()
        activation = ACTIVATIONS[problem.config.family].apply(torch.stack([largest, -largest]))
        bound = float(vector.abs().sum(-1).max()) * float(activation.abs().max())
    bound = bound if problem.config.softcap is None else min(bound, problem.config.softcap)
    biases = (t for kind in ("bias", "line") for t in problem.all(kind) if t.numel())
    return bound + sum(float(t.masked_fill(t == -math.inf, 0.0).abs().max()) for t in biases)


def _weights_from_tau(matrix: SelectableMatrix, part: Problem) -> Tensor:
    """Compute the weights of a part from the known τ of its rows."""
    if matrix._state().tau_from_kernels and kernels_support(part):
        result = Reader(part, matrix._rows_per_key_head()).weights()
        if result is not None:
            return result
    part = part.with_config(nan_safe=False)
    result = reference.weights(part, matrix._scores(part), part["tau"])
    return result.expand(*part.lead(), *result.shape[-2:])


def _resolve_slice(part: slice, size: int) -> slice:
    """Clip a slice to an axis of the given size."""
    if not isinstance(part, slice) or part.step not in (None, 1):
        raise ArgumentError(
            f"pool got within={part!r} for an axis of size {size}; pass two slices without steps, for rows "
            "and keys: within=(slice(0, 100), slice(None))."
        )
    start, stop, _ = part.indices(size)
    return slice(start, max(start, stop))


def _edges(span: slice, parts: int) -> NDArray[np.int64]:
    """Divide a span into at most `parts` nearly equal parts; return the boundaries relative to its start."""
    size = span.stop - span.start
    parts = min(parts, size)
    return np.arange(parts + 1) * size // max(parts, 1)


def _block_of(edges: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.repeat(np.arange(len(edges) - 1), np.diff(edges))


def _as_index(indices: NDArray[np.int64], like: Tensor) -> Tensor:
    return torch.from_numpy(indices).to(like.device)


def _intersect(a: slice, b: slice) -> slice:
    start = max(a.start, b.start)
    return slice(start, max(start, min(a.stop, b.stop)))
