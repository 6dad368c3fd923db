"""Solve the condition of a mask for the intervals of keys that each query may attend to.

    q >= k              keys [0, q + 1)
    q - k <= window     keys [q − window, …)
    a & b, a | b, ~a    intersection, union and complement of intervals
    doc[q] == doc[k]    one interval if doc is sorted

The intervals follow from the traced expression, in time and memory linear in the number of tokens.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.mechanism.flex.expressions import COMPARISONS, Constant, Index, evaluate, linear
from regard.mechanism.masks.algebra import BUILT_IN, CallShape, Mask, MaskTerm

MAX_TERMS = 4  # maximum number of intervals per query that the kernels support


class Sizes(NamedTuple):
    """Batch size and number of heads, queries and keys."""

    batch: int
    heads: int
    queries: int
    keys: int


class Interval(NamedTuple):
    """One interval of keys per query: start and stop, (b, h, q, 1), in [0, keys]; empty if stop <= start."""

    start: Tensor
    stop: Tensor

    def intersect(self, other: "Interval") -> "Interval":
        return Interval(torch.maximum(self.start, other.start), torch.minimum(self.stop, other.stop))

    def is_empty(self) -> bool:
        """Whether the interval is empty for every query."""
        return not bool((self.start < self.stop).any())


@dataclass(frozen=True, eq=False)
class Intervals(Mask):
    """A mask given by a union of key intervals."""

    parts: tuple[Interval, ...]

    def terms(self, call_shape: CallShape) -> tuple[MaskTerm, ...]:
        return tuple(MaskTerm(part.start, part.stop) for part in self.parts)

    def intersect(self, other: "Intervals") -> "Intervals | None":
        """Return the keys that both masks allow, or None if they form too many intervals."""
        pairs = [a.intersect(b) for a in self.parts for b in other.parts]
        return _union(pairs)

    def copy(self) -> "Intervals":
        """Return a mask with its own memory."""
        return Intervals(tuple(Interval(start.clone(), stop.clone()) for start, stop in self.parts))

    def complement(self, keys: int) -> "Intervals | None":
        """Return the keys that this mask does not allow."""
        result: Intervals | None = None
        for start, stop in self.parts:
            stop = torch.maximum(start, stop)
            zero, end = torch.zeros_like(start), torch.full_like(stop, keys)
            rest = _union([Interval(zero, start), Interval(stop, end)])
            result = rest if result is None or rest is None else result.intersect(rest)
            if result is None:
                return None
        return result


BUILT_IN |= {Intervals}


def _union(parts: list[Interval]) -> Intervals | None:
    """Merge intervals that overlap or touch for every query; None if too many remain for the kernels."""
    merged: list[Interval] = []
    for part in parts:
        if part.is_empty():
            continue
        for i, other in enumerate(merged):
            joined = _join(other, part)
            if joined is not None:
                merged[i] = joined
                break
        else:
            merged.append(part)
    if len(merged) > MAX_TERMS:
        return None
    return Intervals(tuple(merged or parts[:1]))


def _join(a: Interval, b: Interval) -> Interval | None:
    """Return the union of two intervals, or None if it is not one interval for every query."""
    a_empty, b_empty = a.start >= a.stop, b.start >= b.stop
    touch = torch.maximum(a.start, b.start) <= torch.minimum(a.stop, b.stop)
    if not bool((touch | a_empty | b_empty).all()):
        return None
    start, stop = torch.minimum(a.start, b.start), torch.maximum(a.stop, b.stop)
    start = torch.where(a_empty, b.start, torch.where(b_empty, a.start, start))
    return Interval(start, torch.where(a_empty, b.stop, torch.where(b_empty, a.stop, stop)))


def solve(condition: Constant | Index, sizes: Sizes, device: torch.device) -> Intervals | None:
    """Return the keys for which a boolean expression is True, or None if it cannot be solved."""
    if isinstance(condition, Constant):
        return _rows(condition.tensor, sizes)
    function, args = condition.function, condition.args
    if function in (torch.bitwise_and, torch.logical_and, torch.bitwise_or, torch.logical_or):
        sides = [solve(arg, sizes, device) if _is_condition(arg) else None for arg in args]
        if len(sides) != 2 or sides[0] is None or sides[1] is None:
            return None
        if function in (torch.bitwise_and, torch.logical_and):
            return sides[0].intersect(sides[1])
        return _union([*sides[0].parts, *sides[1].parts])
    if function in (torch.bitwise_not, torch.logical_not) and _is_condition(args[0]):
        inner = solve(args[0], sizes, device)
        return None if inner is None else inner.complement(sizes.keys)
    if function in COMPARISONS and function is not torch.ne:
        result = _solve_comparison(condition, sizes, device)
        if result is not None:
            return result
    if not condition.depends & {"k", "d"}:
        return _rows(evaluate(condition, index_vectors(sizes, device)), sizes)
    if condition.depends <= set("bhk"):
        return _columns(evaluate(condition, index_vectors(sizes, device)), sizes)
    return None


def _is_condition(arg: object) -> bool:
    if isinstance(arg, Constant):
        return arg.tensor.dtype is torch.bool
    return isinstance(arg, Index) and arg.boolean


def _rows(visible: Tensor, sizes: Sizes) -> Intervals | None:
    """Return the intervals of a condition that, for each query, holds for all keys or for none."""
    if visible.dtype is not torch.bool:
        return None
    visible = visible.reshape((1,) * (4 - visible.dim()) + tuple(visible.shape))
    # the value is the same for all keys, even if the condition contains k, as in k − k: use the first key
    stop = torch.where(visible[..., :1], sizes.keys, 0)
    return Intervals((Interval(torch.zeros_like(stop), stop),))


def _columns(visible: Tensor, sizes: Sizes) -> Intervals | None:
    """Return the keys for which a condition (b, h, 1, k) holds, or None if they are not one interval."""
    if visible.dtype is not torch.bool:
        return None
    keys = torch.arange(sizes.keys, device=visible.device)
    start = torch.where(visible, keys, sizes.keys).amin(-1, keepdim=True)
    stop = torch.where(visible, keys + 1, 0).amax(-1, keepdim=True)
    if bool(((stop - start).clamp(min=0) != visible.sum(-1, keepdim=True)).any()):
        return None
    return Intervals((Interval(start, stop),))


_SWAPPED: dict[Any, Any] = {
    torch.lt: torch.gt,
    torch.le: torch.ge,
    torch.gt: torch.lt,
    torch.ge: torch.le,
    torch.eq: torch.eq,
}


def _solve_comparison(condition: Index, sizes: Sizes, device: torch.device) -> Intervals | None:
    """Solve a comparison between a function of the key and a function of the query."""
    compare, (a, b) = condition.function, condition.args
    indices = index_vectors(sizes, device)
    slopes, _ = linear(torch.sub, condition.args, {})
    if slopes is not None and slopes[1] in (1, -1):  # a − b = slope · k + rest, compared with 0
        indices["k"] = indices["k"][..., :1]  # k = 0
        rest = evaluate(a, indices) - evaluate(b, indices)
        if slopes[1] == -1:
            compare, rest = _SWAPPED[compare], -rest
        left = (-rest).clamp(0, sizes.keys)
        right = (1 - rest).clamp(0, sizes.keys)
    else:
        if _is_sided(a, "q") and _is_sided(b, "k"):
            a, b, compare = b, a, _SWAPPED[compare]
        if not (_is_sided(a, "k") and _is_sided(b, "q")):
            return None
        by_key, by_query = evaluate(a, indices), evaluate(b, indices)
        bounds = _search(by_key, by_query, sizes)
        if bounds is None:
            return None
        left, right = bounds
    zero, end = torch.zeros_like(left), torch.full_like(left, sizes.keys)
    starts: dict[Any, Tensor] = {torch.eq: left, torch.ge: left, torch.gt: right}
    stops: dict[Any, Tensor] = {torch.eq: right, torch.le: right, torch.lt: left}
    return Intervals((Interval(starts.get(compare, zero), stops.get(compare, end)),))


def _is_sided(value: object, side: str) -> bool:
    """Whether an expression is an integer that depends on index `side` and otherwise only on b and h."""
    return isinstance(value, Index) and value.integer and side in value.depends <= {"b", "h", side}


def _search(by_key: Tensor, by_query: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor] | None:
    """Return, for each query with value v, the first key with a value ≥ v and the first with a value > v.

    Returns None if the values are not sorted by key.
    """
    if by_key.dtype != by_query.dtype or bool((by_key[..., 1:] < by_key[..., :-1]).any()):
        return None
    lead = torch.broadcast_shapes(by_key.shape[:2], by_query.shape[:2])
    values = by_key[..., 0, :].expand(*lead, sizes.keys).contiguous()
    wanted = by_query[..., 0].expand(*lead, sizes.queries).contiguous()
    left, right = (torch.searchsorted(values, wanted, right=after)[..., None] for after in (False, True))
    return left, right


def index_vectors(sizes: Sizes, device: torch.device) -> dict[str, Tensor]:
    """Return all indices as tensors that broadcast to (b, h, q, k)."""
    vectors = (torch.arange(size, device=device) for size in sizes)
    shapes = ((-1, 1, 1, 1), (1, -1, 1, 1), (1, 1, -1, 1), (1, 1, 1, -1))
    return {name: x.view(shape) for name, x, shape in zip("bhqk", vectors, shapes, strict=True)}
