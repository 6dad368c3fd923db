"""Parts of a lazy matrix: some rows and some keys, for what it costs to compute these alone.

The weight of a pair needs the row's statistic τ, which depends on all keys of the row. It is known since the
attention ran, so a part of the matrix costs as much as its own pairs. The scores must then round as they did
when τ was found: the kernels see to that, and for torch's products it matters where scores are large, so that
there rows are solved again with all of their keys.
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
from regard.mechanism.torch_state import concrete
from regard.mechanism.weights.index import some_rows
from regard.mechanism.weights.lazy_matrix import LazyMatrix, _kernels_can
from regard.mechanism.weights.reader import Reader

_BAND = 32  # rows; narrower bands are summed from their weights
_ROUNDING = 2e-5  # of a score, and so of a weight, that torch's products may be off by


def pool(matrix: LazyMatrix, sizes: tuple[int, int], within: tuple[slice, slice]) -> Tensor:
    """The mean weight of each of about rows × columns equal blocks of a part: (…, rows, columns)."""
    rows, keys = (_span(part, n) for part, n in zip(within, matrix.shape[-2:], strict=True))
    row_edges, key_edges = (_edges(span, n) for span, n in zip((rows, keys), sizes, strict=True))
    matrix._settle()
    found = matrix._new(len(row_edges) - 1, len(key_edges) - 1)
    cells = torch.from_numpy(np.outer(np.diff(row_edges), np.diff(key_edges))).to(found)
    # which block each row and each key of the part belongs to
    row_of, key_of = (_owners(edges) for edges in (row_edges, key_edges))
    if _in_bands(matrix, rows, keys, row_edges, _as_index(key_of, found), found):
        return matrix._merge(found / cells)
    for at, block in blocks(matrix, rows, keys):
        if not block.numel():
            continue
        bands, columns = row_of[at.rows], key_of[at.keys.start - keys.start : at.keys.stop - keys.start]
        first, last = int(bands[0]), int(bands[-1]) + 1
        summed = block
        if last - first < block.shape[-2]:
            summed = block.new_zeros(*block.shape[:-2], last - first, block.shape[-1])
            summed = summed.index_add(-2, _as_index(bands - first, block), block)
        place: Any = (*at.lead, ..., slice(first, last), slice(None))
        found[place] = found[place].index_add(-1, _as_index(columns, block), summed.to(found.dtype))
    return matrix._merge(found / cells)


def _in_bands(
    matrix: LazyMatrix,
    rows: slice,
    keys: slice,
    edges: NDArray[np.int64],
    key_of: Tensor,
    found: Tensor,
) -> bool:
    """Add up wide bands of rows by kernels that hold no weights; False if that cannot be."""
    matrix._check()
    problem, _, fitted = matrix._now()
    wide = rows.stop - rows.start >= _BAND * max(len(edges) - 1, 1) and keys.stop > keys.start
    if not wide or not fitted or not _kernels_can(problem) or not _tau_serves(problem, fitted):
        return False
    lead = problem.lead()
    every = tuple(slice(0, n) for n in lead[:-1])
    width = math.prod(lead) * (keys.stop - keys.start)
    for band, (low, high) in enumerate(itertools.pairwise((edges + rows.start).tolist())):
        for some in interrupt.bands(high - low, width):
            part = problem.part(Tile(every, slice(low + some.start, low + some.stop), keys))
            ones = part["query"].new_ones(*lead, some.stop - some.start, 1)
            sums = Reader(part, matrix._rows_together()).transposed_product(ones)  # … g r k 1
            if sums is None:
                found.zero_()
                return False
            sums = sums[..., 0].mean((-3, -2)) if matrix._heads == "mean" else sums[..., 0]
            found[..., band, :].index_add_(-1, key_of, sums.to(found.dtype))
    return True


def blocks(matrix: LazyMatrix, rows: slice, keys: slice) -> Iterator[tuple[Tile, Tensor]]:
    """Tile after tile of a part: where it stands, rows counted from the part's first, and its weights."""
    matrix._check()
    matrix._settle()
    part = matrix._like(some_rows(matrix._problem, rows), matrix._lead)
    if rows == slice(0, matrix.shape[-2]) and keys == slice(0, matrix.shape[-1]):
        part = matrix
    problem, _, fitted = part._now()
    if not _tau_serves(problem, fitted):
        # rows are solved again, with all of their keys
        for at, block in part._blocks():
            interrupt.check()
            seen = _common(at.keys, keys)
            yield (
                at._replace(keys=seen),
                block[..., seen.start - at.keys.start : seen.stop - at.keys.start],
            )
        return
    mean = matrix._heads == "mean"
    share = max(problem.keys, 1) / max(keys.stop - keys.start, 1)
    for at in tiles(problem, int(tiled.budget(problem) * share), all_heads=mean):
        interrupt.check()
        at = at._replace(keys=_common(at.keys, keys))
        block = _known(part, problem.part(at))
        if mean:
            at, block = at._replace(lead=at.lead[:-1]), block.mean((-4, -3))
        yield at, block


def _tau_serves(problem: Problem, fitted: bool | None) -> bool:
    """Whether the τ at hand gives the weights of some keys alone.

    Not where weights depend on the number of visible keys too; nor where derivatives are asked for; nor where
    NaN or infinity occurs, as one bad key spoils its whole row; nor where it was found by torch for scores so
    large that their rounding shows.
    """
    normalize = problem.rules.normalize
    if isinstance(normalize, Sigmoid) or type(normalize).divisor is not Normalizer.divisor:
        return False
    tensors = problem.tensors.values()
    if not concrete(*tensors) or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        return False
    biases = [t for kind in ("bias", "line", "sink") for t in problem.all(kind)]
    finite = all(bool((~(t.isnan() | (t == math.inf))).all()) for t in biases)
    if not finite or bool(problem["tau"].isnan().any()) or problem.checked().rules.careful:
        return False
    if fitted and _kernels_can(problem):
        return True
    return _largest(problem) * torch.finfo(problem["query"].dtype).eps <= _ROUNDING


def _largest(problem: Problem) -> float:
    """A bound of all scores, biases included."""
    if not problem["tau"].numel() or not problem.keys:
        return 0.0
    query, key, vector = problem["query"], problem["key"], problem.get("vector")
    if vector is None:
        bound = abs(problem.rules.scale) * float(query.norm(dim=-1).max()) * float(key.norm(dim=-1).max())
    else:
        reach = 1.0 if problem.rules.family == "tanh" else float(query.abs().max() + key.abs().max())
        bound = float(vector.abs().sum(-1).max()) * reach
    bound = bound if problem.rules.softcap is None else min(bound, problem.rules.softcap)
    biases = (t for kind in ("bias", "line") for t in problem.all(kind) if t.numel())
    return bound + sum(float(t.masked_fill(t == -math.inf, 0.0).abs().max()) for t in biases)


def _known(matrix: LazyMatrix, part: Problem) -> Tensor:
    """The weights of a part of a matrix, given the τ of its rows."""
    if matrix._now().fitted and _kernels_can(part):
        found = Reader(part, matrix._rows_together()).weights()
        if found is not None:
            return found
    part = part.with_rules(careful=False)
    found = reference.weights(part, matrix._scores(part), part["tau"])
    return found.expand(*part.lead(), *found.shape[-2:])


def _span(part: slice, size: int) -> slice:
    """A slice with a beginning and an end, which lies within an axis."""
    if not isinstance(part, slice) or part.step not in (None, 1):
        raise ArgumentError(
            f"pool got within={part!r} for an axis of {size}; give a slice without a step for rows and one "
            "for keys: within=(slice(0, 100), slice(None))."
        )
    start, stop, _ = part.indices(size)
    return slice(start, max(start, stop))


def _edges(span: slice, parts: int) -> NDArray[np.int64]:
    """Where to cut a span into at most `parts` nearly equal parts, counted from its beginning."""
    size = span.stop - span.start
    parts = min(parts, size)
    return np.arange(parts + 1) * size // max(parts, 1)


def _owners(edges: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.repeat(np.arange(len(edges) - 1), np.diff(edges))


def _as_index(places: NDArray[np.int64], like: Tensor) -> Tensor:
    return torch.from_numpy(places).to(like.device)


def _common(one: slice, other: slice) -> slice:
    start = max(one.start, other.start)
    return slice(start, max(start, min(one.stop, other.stop)))
