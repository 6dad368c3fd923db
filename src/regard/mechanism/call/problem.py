"""`Problem`: a prepared call, with all tensors in one layout.

All tensors in a `Problem` have the same number of axes, (…, g, r, ·, ·): batch axes, key heads g, query
heads r per key head, and two axes that depend on the tensor. Shared axes have size 1, so nothing is repeated
in memory, a tile is a slice of each tensor, and `vmap` adds one batch axis.

    query    … g r q d      key   … g 1 k d      value  … g 1 k e      vector  … 1 1 1 d (additive scores)
    bias     … g r q k      line  … g r 1 l      line: a relative bias at its l = q + k − 1 distances
    start    … g r q 1      stop  … g r q 1      allowed … g r q k     mask terms
    sink     … g r 1 1      seed  … 1 1 1 1      row    … 1 1 q 1      head    … g r 1 1 (for dropout)
    tau      … g r q 2      row statistic, in lazy weights
    key_scale, value_scale  … g 1 k 1      if key or value is int8 (see `Quantized`)
    center   … g r q 1      span  … g r q 2s     token  … g r q 2m     key_token … 1 1 k m (see `fused.sums`)
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.mechanism.masks.algebra import MaskTerm, union
from regard.mechanism.normalizers import Normalizer, from_text, to_text
from regard.mechanism.torch_state import concrete

QUERY_AXIS = {"query": -2, "bias": -2, "allowed": -2, "start": -2, "stop": -2, "row": -2, "tau": -2}
QUERY_AXIS |= {"center": -2, "span": -2, "token": -2}
KEY_AXIS = {"key": -2, "value": -2, "bias": -1, "allowed": -1, "key_token": -2}
KEY_AXIS |= {"key_scale": -2, "value_scale": -2}
# Tensors whose token axis is never shared: size 1 means that there is one token.
_NEVER_SHARED = {"query", "key", "value", "key_scale", "value_scale"}
# Problems with at most this many scores form a single tile, so their mask intervals need not be read.
MAX_SINGLE_TILE = 2**15
DIFFERENTIABLE = ("query", "key", "value", "vector", "bias", "line", "sink")


class ProblemConfig(NamedTuple):
    """The non-tensor part of a problem."""

    normalize: Normalizer
    family: str = "dot"  # or, for additive scores, "tanh" or "relu"
    scale: float = 1.0  # factor for the dot product
    softcap: float | None = None
    dropout: float = 0.0
    terms: int = 0  # number of mask terms
    queries: int = 0  # in the full call; needed for relative biases, dropout and the summation order
    nan_safe: bool = True  # the tensors may contain NaN or inf
    score: str = ""  # name of the score, for display
    fused: bool = False  # use the kernels if they support the problem


def serialize(config: ProblemConfig, names: Sequence[str]) -> str:
    """Write a configuration and its tensor names as text, for compiled graphs and files.

    The text omits the number of queries, which may be symbolic, and the score's name and the implementation,
    which are not part of the problem.
    """
    softcap = "" if config.softcap is None else float(config.softcap).hex()
    numbers = f"{float(config.scale).hex()}|{softcap}|{float(config.dropout).hex()}|{config.terms}"
    return f"{to_text(config.normalize)}|{config.family}|{numbers}|{','.join(names)}"


@lru_cache(maxsize=256)
def deserialize(text: str) -> tuple[ProblemConfig, tuple[str, ...]]:
    """Parse the result of `serialize`; raise ValueError if the text is invalid."""
    normalize, family, scale, softcap, dropout, terms, names = text.split("|")
    config = ProblemConfig(
        from_text(normalize),
        family,
        float.fromhex(scale),
        float.fromhex(softcap) if softcap else None,
        float.fromhex(dropout),
        int(terms),
    )
    return config, tuple(names.split(","))


def kind(name: str) -> str:
    """Return the kind of a tensor from its name: "bias" for bias0, bias1, …"""
    return name.rstrip("0123456789")


@dataclass(frozen=True)
class Problem:
    """A prepared call, or a tile of it: configuration, named tensors, and the tile's first row and key."""

    config: ProblemConfig
    tensors: Mapping[str, Tensor]
    first_row: int = 0
    first_key: int = 0

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def get(self, name: str) -> Tensor | None:
        return self.tensors.get(name)

    def dequantized(self, name: str) -> Tensor:
        """Return key or value in the query's dtype. int8 values are multiplied by their scales."""
        tensor, scale = self[name], self.get(f"{name}_scale")
        dtype = self["query"].dtype
        return tensor if scale is None else tensor.to(dtype) * scale.to(dtype)

    def all(self, tensor_kind: str) -> list[Tensor]:
        """Return all tensors of a kind, in order."""
        return [tensor for name, tensor in self.tensors.items() if kind(name) == tensor_kind]

    @property
    def queries(self) -> int:
        return self["query"].shape[-2]

    @property
    def keys(self) -> int:
        return self["key"].shape[-2]

    def lead(self) -> tuple[int, ...]:
        """Return the leading axes (…, g, r) to which all tensors broadcast."""
        lead = [1] * (self["query"].dim() - 2)
        for tensor in self.tensors.values():
            for axis, size in enumerate(tensor.shape[:-2]):
                if size != 1 and lead[axis] == 1:
                    lead[axis] = size
        return tuple(lead)

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "Problem":
        return Problem(self.config, dict(tensors), self.first_row, self.first_key)

    def with_inputs(self, inputs: Mapping[str, Tensor], grad_enabled: bool) -> "Problem":
        """Replace tensors with the caller's tensors, converted to the shapes and dtypes of the originals.

        grad_enabled: the grad mode of the forward pass, which may differ from the current mode.
        """
        with torch.inference_mode(False), torch.set_grad_enabled(grad_enabled):
            views = {name: x.to(self[name].dtype).view(self[name].shape) for name, x in inputs.items()}
        return self.with_tensors({**self.tensors, **views})

    def with_config(self, **changes: Any) -> "Problem":
        return Problem(self.config._replace(**changes), self.tensors, self.first_row, self.first_key)

    def nan_checked(self, *others: Tensor) -> "Problem":
        """Return the problem with `nan_safe` set only if needed.

        It is needed if the inputs or `others` contain NaN or inf, or if a score may overflow.
        """
        scored = [self.dequantized(name) for name in ("query", "key", "vector") if name in self.tensors]
        # a sum of finite values may overflow; nan_safe is then set unnecessarily, which only costs time
        summed = [*(t for name, t in self.tensors.items() if name == "value"), *others]
        finite = concrete(*scored, *summed) and all(math.isfinite(t.sum().item()) for t in summed)
        return self.with_config(nan_safe=not (finite and self._cannot_overflow(*map(_max_abs, scored))))

    def _cannot_overflow(self, query: float, key: float, vector: float = 1.0) -> bool:
        """Whether the scores cannot overflow, given the largest magnitude of each tensor. NaN gives False."""
        width, dtype = max(self["query"].shape[-1], 1), self["query"].dtype
        scaled = query * abs(self.config.scale)
        term = scaled * key if self.config.family == "dot" else (scaled + key) * vector
        limit = torch.finfo(dtype).max / 4
        return max(scaled, key, vector) < limit and width * term < limit

    def map(self, change: Callable[[str, Tensor], Tensor]) -> "Problem":
        return self.with_tensors({name: change(name, tensor) for name, tensor in self.tensors.items()})

    def without(self, *names: str) -> "Problem":
        return self.with_tensors({name: t for name, t in self.tensors.items() if name not in names})

    def select_rows(self, rows: slice | Tensor) -> "Problem":
        """Select query rows by a slice or by their indices."""

        def cut(name: str, tensor: Tensor) -> Tensor:
            # tensors shared by all rows are not sliced; query and τ always have one row per query
            has_rows = kind(name) in ("query", "tau") or (kind(name) in QUERY_AXIS and tensor.shape[-2] > 1)
            return tensor[..., rows, :] if has_rows else tensor

        return self.map(cut)

    def key_indices(self) -> Tensor:
        """Return the index in the full problem of each key in this tile."""
        return torch.arange(self.first_key, self.first_key + self.keys, device=self["key"].device)

    def terms(self) -> list[MaskTerm]:
        """Return the mask terms; an empty list means no mask."""
        return [
            MaskTerm(self.get(f"start{i}"), self.get(f"stop{i}"), self.get(f"allowed{i}"))
            for i in range(self.config.terms)
        ]

    def visible(self) -> Tensor | None:
        """Return a boolean tensor of visible pairs, (…, g, r, q, k), or None if all pairs are visible."""
        return union(self.terms(), self.key_indices()) if self.config.terms else None

    def part(self, tile: "Tile") -> "Problem":
        """Return a tile as a problem whose tensors are views of this problem's tensors."""
        return replace(
            self,
            tensors={name: tensor[tile.slices(name, tensor.shape)] for name, tensor in self.tensors.items()},
            first_row=self.first_row + tile.rows.start,
            first_key=self.first_key + tile.keys.start,
        )


def empty_results(problem: Problem, *, keep_dtype: bool = False) -> tuple[Tensor, Tensor]:
    """Allocate output and τ, in float32 or float64. The output has the query's memory order.

    keep_dtype: allocate the output in the query's dtype.
    """
    query, tokens = problem["query"], problem.queries
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    shape = (*problem.lead(), tokens, problem["value"].shape[-1])
    output = empty_in_order(shape, query, dtype=query.dtype if keep_dtype else dtype)
    return output, query.new_empty(*problem.lead(), tokens, 2, dtype=dtype)


def empty_in_order(
    shape: Sequence[int], like: Tensor, *, segments: tuple[int, ...] = (), dtype: torch.dtype | None = None
) -> Tensor:
    """Allocate a tensor (*segments, *shape) with heads and tokens in the memory order of `like`.

    Autograd then does not need to copy gradients, and outputs have the same memory order as in torch.
    """
    *batch, groups, per_group, tokens, width = shape
    sizes = zip(like.shape[-4:-2], like.stride()[-4:-2], strict=True)
    if groups * per_group > 1 and all(n == 1 or n * step <= like.stride(-2) for n, step in sizes):
        # stored token by token, as in the output of a projection
        x = like.new_empty(*segments, *batch, tokens, groups, per_group, width, dtype=dtype)
        return x.movedim(-4, -2)
    return like.new_empty(*segments, *shape, dtype=dtype)


def _max_abs(tensor: Tensor) -> float:
    """Return the largest magnitude, or NaN if the tensor contains NaN."""
    if not tensor.numel():
        return 0.0
    low, high = tensor.detach().aminmax()
    return torch.maximum(-low, high).item()


class Tile(NamedTuple):
    """The leading indices (…, g), query rows and keys of a tile."""

    lead: tuple[slice, ...]
    rows: slice
    keys: slice

    @property
    def rows_index(self) -> tuple[Any, ...]:
        """Index of this tile in a tensor (…, g, r, q, ·)."""
        return (*self.lead, ..., self.rows, slice(None))

    @property
    def keys_index(self) -> tuple[Any, ...]:
        """Index of this tile in a tensor (…, g, r, k, ·)."""
        return (*self.lead, ..., self.keys, slice(None))

    def slices(self, name: str, shape: Sequence[int]) -> tuple[slice, ...]:
        """Index of this tile in a tensor with the given name and shape. All tiles share axes of size 1."""
        index = [slice(None)] * len(shape)
        for axis, chosen in enumerate(self.lead):
            if shape[axis] > 1:
                index[axis] = chosen
        for axes, chosen in ((QUERY_AXIS, self.rows), (KEY_AXIS, self.keys)):
            at = axes.get(kind(name))
            if at is not None and (shape[at] != 1 or kind(name) in _NEVER_SHARED):
                index[at] = chosen
        return tuple(index)


def tiles(problem: Problem, budget: int, *, all_heads: bool = False) -> Iterator[Tile]:
    """Divide a problem into tiles of about `budget` scores, each with all keys visible to its rows.

    Tiles contain many rows of a few heads rather than a few rows of many heads.

    all_heads: whether each tile contains all heads.
    """
    *batch, groups, per_group = problem.lead()
    every_row, every_key = slice(0, problem.queries), slice(0, problem.keys)
    # compiled graphs have no loops and may have symbolic sizes; small problems are not divided
    if torch.compiler.is_compiling() or _pairs(problem) <= min(budget, MAX_SINGLE_TILE):
        yield Tile(tuple(slice(0, n) for n in (*batch, groups)), every_row, every_key)
        return
    sizes = tuple(batch) if all_heads else (*batch, groups)
    rest = (slice(0, groups),) if all_heads else ()
    width = max(problem.keys, 1) * per_group * (max(groups, 1) if all_heads else 1)
    rows = min(max(budget // width, 1), max(problem.queries, 1))
    for lead in _lead_slices(sizes, max(budget // (rows * width), 1)):
        box = problem.part(Tile((*lead, *rest), every_row, every_key))
        for row_block, key_block in _row_blocks(box, max(budget // max(math.prod(box.lead()), 1), 1)):
            yield Tile((*lead, *rest), row_block, key_block)


def _pairs(problem: Problem) -> int:
    return math.prod(problem.lead()) * problem.queries * problem.keys


def _lead_slices(sizes: tuple[int, ...], max_entries: int) -> Iterator[tuple[slice, ...]]:
    """Divide the leading axes into blocks of at most `max_entries` entries, filling the last axes first."""
    if not sizes:
        yield ()
        return
    *outer, last = sizes
    step = max(min(last, max_entries), 1)
    for rest in _lead_slices(tuple(outer), max_entries // step if step == last else 1):
        for begin in range(0, last, step):
            yield (*rest, slice(begin, min(begin + step, last)))


def _row_blocks(problem: Problem, budget: int) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of query rows and the interval of their visible keys, at most `budget` pairs per block."""
    starts, stops = _bounds(problem)
    widths = (stops - starts).clip(min=0)
    begin, count = 0, len(starts)
    while begin < len(starts):
        count = min(2 * count, len(starts) - begin)
        while True:
            rows = slice(begin, begin + count)
            low, high = int(starts[rows].min()), int(stops[rows].max())
            visible = int(widths[rows].sum())
            pairs = count * max(high - low, 0)
            # halve a block that exceeds the budget or in which most pairs are masked
            if count == 1 or (pairs <= budget and (count <= 32 or pairs <= 2 * visible + 32 * count)):
                break
            count = (count + 1) // 2
        yield rows, slice(low, max(low, high))
        begin += count


def _bounds(problem: Problem) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the range of keys visible to each row in any head, or all keys if the mask is unknown."""
    queries, keys, terms = problem.queries, problem.keys, problem.terms()
    if not terms or not concrete(*problem.all("start"), *problem.all("stop")):
        return np.zeros(queries, np.int64), np.full(queries, keys, np.int64)

    def extreme(side: Tensor | None, default: int, reduce: Callable[..., Any]) -> NDArray[np.int64]:
        if side is None or not side.numel():
            return np.full(queries, default, np.int64)
        bound: NDArray[np.int64] = reduce(
            side.cpu().numpy().clip(0, keys)[..., 0].reshape(-1, side.shape[-2]), axis=0
        )
        return np.broadcast_to(bound, queries)

    starts = np.min([extreme(term.start, 0, np.min) for term in terms], axis=0)
    stops = np.max([extreme(term.stop, keys, np.max) for term in terms], axis=0)
    return starts, stops
