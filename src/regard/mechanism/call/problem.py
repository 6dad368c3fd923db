"""A call made ready: every tensor in one layout, so that the implementations need to know nothing else.

All tensors of a `Problem` have the same number of axes, (…, g, r, ·, ·): batch axes, key heads g, query
heads r per key head, and two axes of their own. Axes along which a tensor is the same have size 1, so
nothing is repeated in memory, a tile is a slice of each tensor, and `vmap` is one more batch axis.

    query    … g r q d      key   … g 1 k d      value  … g 1 k e      vector  … 1 1 1 d (additive scores)
    bias     … g r q k      line  … g r 1 l      relative biases, over the l = q + k − 1 distances
    start    … g r q 1      stop  … g r q 1      allowed … g r q k     the mask's terms
    sink     … g r 1 1      seed  … 1 1 1 1      row    … 1 1 q 1      head    … g r 1 1 (they number dropout)
    tau      … g r q 2      in lazy weights, once the rows' statistic is known
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.mechanism.mask_algebra import MaskTerm, union
from regard.mechanism.normalizers import Normalizer
from regard.mechanism.torch_state import concrete

QUERY_AXIS = {"query": -2, "bias": -2, "allowed": -2, "start": -2, "stop": -2, "row": -2, "tau": -2}
KEY_AXIS = {"key": -2, "value": -2, "bias": -1, "allowed": -1}
WHOLE = 2**15  # scores of a problem that is solved in one piece, without looking at its intervals first
DIFFERENTIABLE = ("query", "key", "value", "vector", "bias", "line", "sink")


class Rules(NamedTuple):
    """The part of a problem that is no tensor."""

    normalize: Normalizer
    family: str = "dot"  # or "tanh", "relu": the additive ones
    scale: float = 1.0  # of the dot product
    softcap: float | None = None
    dropout: float = 0.0
    terms: int = 0  # of the mask
    queries: int = 0  # of the whole call, which relative biases count from
    careful: bool = True  # the tensors may hold NaN or infinity
    score: str = ""  # its name, for people
    fused: bool = False  # whether the kernels are to solve it, if they can


def kind(name: str) -> str:
    """The kind of a tensor: bias for bias0, bias1, …"""
    return name.rstrip("0123456789")


@dataclass(frozen=True)
class Problem:
    """Rules, named tensors, and where this tile begins in the whole."""

    rules: Rules
    tensors: Mapping[str, Tensor]
    first_row: int = 0
    first_key: int = 0

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def get(self, name: str) -> Tensor | None:
        return self.tensors.get(name)

    def all(self, wanted: str) -> list[Tensor]:
        """All tensors of a kind, in order."""
        return [tensor for name, tensor in self.tensors.items() if kind(name) == wanted]

    @property
    def queries(self) -> int:
        return self["query"].shape[-2]

    @property
    def keys(self) -> int:
        return self["key"].shape[-2]

    def lead(self) -> tuple[int, ...]:
        """(…, g, r): the leading axes that all tensors together have."""
        found = [1] * (self["query"].dim() - 2)
        for tensor in self.tensors.values():
            for axis, size in enumerate(tensor.shape[:-2]):
                if size != 1 and found[axis] == 1:
                    found[axis] = size
        return tuple(found)

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "Problem":
        return Problem(self.rules, dict(tensors), self.first_row, self.first_key)

    def with_rules(self, **changes: Any) -> "Problem":
        return Problem(self.rules._replace(**changes), self.tensors, self.first_row, self.first_key)

    def checked(self, *others: Tensor) -> "Problem":
        """The same problem, careful only if it must be.

        It must where the inputs, or others, hold NaN or infinity, and where a match of query and key may
        overflow.
        """
        matched = [self.tensors[name] for name in ("query", "key", "vector") if name in self.tensors]
        # a sum may also overflow; then being careful costs time and nothing else
        summed = [*(t for name, t in self.tensors.items() if name == "value"), *others]
        calm = concrete(*matched, *summed) and all(math.isfinite(t.sum().item()) for t in summed)
        return self.with_rules(careful=not (calm and self._bounded(*map(_largest, matched))))

    def _bounded(self, query: float, key: float, vector: float = 1.0) -> bool:
        """Whether no score can overflow, given the largest magnitudes; not if one of them is NaN."""
        width, real = max(self["query"].shape[-1], 1), self["query"].dtype
        scaled = query * abs(self.rules.scale)
        each = scaled * key if self.rules.family == "dot" else (scaled + key) * vector
        limit = torch.finfo(real).max / 4
        return max(scaled, key, vector) < limit and width * each < limit

    def map(self, change: Callable[[str, Tensor], Tensor]) -> "Problem":
        return self.with_tensors({name: change(name, tensor) for name, tensor in self.tensors.items()})

    def without(self, *names: str) -> "Problem":
        return self.with_tensors({name: t for name, t in self.tensors.items() if name not in names})

    def key_numbers(self) -> Tensor:
        """The number of each key of this tile in the whole."""
        return torch.arange(self.first_key, self.first_key + self.keys, device=self["key"].device)

    def terms(self) -> list[MaskTerm]:
        """The mask's terms; none is no mask."""
        return [
            MaskTerm(self.get(f"start{i}"), self.get(f"stop{i}"), self.get(f"allowed{i}"))
            for i in range(self.rules.terms)
        ]

    def visible(self) -> Tensor | None:
        """Which keys are in sight, (…, g, r, q, k), or None if all are."""
        return union(self.terms(), self.key_numbers()) if self.rules.terms else None

    def part(self, tile: "Tile") -> "Problem":
        """A tile as a problem of its own, on views of the same tensors."""
        return replace(
            self,
            tensors={name: tensor[tile.cut(name, tensor.shape)] for name, tensor in self.tensors.items()},
            first_row=self.first_row + tile.rows.start,
            first_key=self.first_key + tile.keys.start,
        )


def _largest(tensor: Tensor) -> float:
    """The largest magnitude; NaN if there is one."""
    if not tensor.numel():
        return 0.0
    least, most = tensor.detach().aminmax()
    return torch.maximum(-least, most).item()


class Tile(NamedTuple):
    """Which leading indices (…, g), query rows and keys a tile has."""

    lead: tuple[slice, ...]
    rows: slice
    keys: slice

    @property
    def rows_index(self) -> tuple[Any, ...]:
        """Where this tile stands in a tensor (…, g, r, q, ·)."""
        return (*self.lead, ..., self.rows, slice(None))

    @property
    def keys_index(self) -> tuple[Any, ...]:
        """Where this tile stands in a tensor (…, g, r, k, ·)."""
        return (*self.lead, ..., self.keys, slice(None))

    def cut(self, name: str, shape: Sequence[int]) -> tuple[slice, ...]:
        """Where it stands in a tensor of this name and shape; axes of size 1 serve every tile."""
        index = [slice(None)] * len(shape)
        for axis, chosen in enumerate(self.lead):
            if shape[axis] > 1:
                index[axis] = chosen
        for axes, chosen in ((QUERY_AXIS, self.rows), (KEY_AXIS, self.keys)):
            at = axes.get(kind(name))
            if at is not None and (shape[at] != 1 or kind(name) in ("query", "key", "value")):
                index[at] = chosen
        return tuple(index)


def tiles(problem: Problem, budget: int, *, all_heads: bool = False) -> Iterator[Tile]:
    """Cut a problem into tiles of about `budget` scores, each with all the keys that its rows can see.

    Many rows of few heads rather than few rows of many; with `all_heads`, no tile divides the heads.
    """
    *batch, groups, per_group = problem.lead()
    every_row, every_key = slice(0, problem.queries), slice(0, problem.keys)
    # a graph has no loops, and its sizes may have no values yet; a small problem is not worth cutting
    if torch.compiler.is_compiling() or _pairs(problem) <= min(budget, WHOLE):
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


def _lead_slices(sizes: tuple[int, ...], most: int) -> Iterator[tuple[slice, ...]]:
    """Cut leading axes into boxes of at most `most` entries, whole axes first from the right."""
    if not sizes:
        yield ()
        return
    *outer, last = sizes
    step = max(min(last, most), 1)
    for rest in _lead_slices(tuple(outer), most // step if step == last else 1):
        for begin in range(0, last, step):
            yield (*rest, slice(begin, min(begin + step, last)))


def _row_blocks(problem: Problem, budget: int) -> Iterator[tuple[slice, slice]]:
    """Blocks of query rows with the interval of keys that they see: at most `budget` pairs, little waste."""
    starts, stops = _bounds(problem)
    widths = (stops - starts).clip(min=0)
    begin, count = 0, len(starts)
    while begin < len(starts):
        count = min(2 * count, len(starts) - begin)
        while True:
            rows = slice(begin, begin + count)
            low, high = int(starts[rows].min()), int(stops[rows].max())
            seen = int(widths[rows].sum())
            pairs = count * max(high - low, 0)
            # a large block of rows that see different keys wastes time on pairs that nobody sees
            if count == 1 or (pairs <= budget and (count <= 32 or pairs <= 2 * seen + 32 * count)):
                break
            count = (count + 1) // 2
        yield rows, slice(low, max(low, high))
        begin += count


def _bounds(problem: Problem) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first key that each row sees in any head, and the one after the last; all keys if nobody knows."""
    queries, keys, terms = problem.queries, problem.keys, problem.terms()
    if not terms or not concrete(*problem.all("start"), *problem.all("stop")):
        return np.zeros(queries, np.int64), np.full(queries, keys, np.int64)

    def extreme(side: Tensor | None, otherwise: int, choose: Callable[..., Any]) -> NDArray[np.int64]:
        if side is None or not side.numel():
            return np.full(queries, otherwise, np.int64)
        bound: NDArray[np.int64] = choose(
            side.cpu().numpy().clip(0, keys)[..., 0].reshape(-1, side.shape[-2]), axis=0
        )
        return np.broadcast_to(bound, queries)

    starts = np.min([extreme(term.start, 0, np.min) for term in terms], axis=0)
    stops = np.max([extreme(term.stop, keys, np.max) for term in terms], axis=0)
    return starts, stops
