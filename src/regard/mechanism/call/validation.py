"""Checks of what custom classes return: scores, masks, relative biases and normalizers.

The implementations, and the kernels above all, take these for granted of every tensor of a `Problem`:

- its dtype: int64 for intervals, bool for `allowed`, and the query's float32 or float64 for all others;
- its device, and that it is dense;
- its shape: as `problem` lists it, where an axis is whole or has size 1;
- key numbers that can be added up without leaving int64.

Every result of a method that a caller may write passes through one of these functions before it becomes a
part of a `Problem`. Methods of built-in classes without state of their own are exempt, by exact type.
"""

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from regard._util.checks import check_dense, check_number
from regard.errors import ArgumentError, DeviceError, DTypeError, MaskError, ShapeError
from regard.mechanism.call.layout import broadcasts
from regard.mechanism.normalizers import Normalizer
from regard.mechanism.scores import Prepared, Score, check_softcap

FAR = 2**40  # beyond any key, and so far from the ends of int64 that sums of a few stay within it
_NEAR = {torch.int8, torch.int16, torch.int32, torch.uint8}  # integers below FAR


def _dense(what: str, x: object, device: torch.device) -> Tensor:
    """A dense tensor on the query's device. `what` says where it is from: "Ahead.ranges returned a start"."""
    if not isinstance(x, Tensor):
        raise DTypeError(f"{what} that is a {type(x).__name__}; it must be a tensor.")
    if x.layout is not torch.strided or x.is_nested or x.is_quantized:
        raise DTypeError(
            f"{what} that is not a dense tensor but {_kind(x)}; return an ordinary one: x.to_dense()."
        )
    if x.device != device:
        raise DeviceError(f"{what} on {x.device} and query is on {device}; return it .to({str(device)!r}).")
    return x


def _kind(x: Tensor) -> str:
    return "a nested one" if x.is_nested else f"of {x.dtype}" if x.is_quantized else f"of {x.layout}"


# Scores


def prepared(score: Score, result: object, query: Tensor, key: Tensor, lead: Sequence[int]) -> Prepared:
    """What `Score.prepare` returned for (… g r q d) and (… g 1 k d); `lead` is (…, g, r) in full."""
    name = f"{type(score).__name__}.prepare"
    if not isinstance(result, Prepared):
        raise DTypeError(
            f"{name} returned a {type(result).__name__}; it must return a Prepared, as "
            "ScaledDot().prepare(query, key) does."
        )
    for what, x, given, whole in (
        ("query", result.query, query, lead),
        ("key", result.key, key, (*lead[:-1], 1)),
    ):
        x = _like(f"{name} returned a {what}", x, query)
        if x.dim() != given.dim() or x.shape[-2] != given.shape[-2] or not broadcasts(x.shape[:-2], whole):
            raise ShapeError(
                f"{name} returned a {what} of shape {tuple(x.shape)} for one of shape {tuple(given.shape)}; "
                "it may change the last axis, and no other."
            )
    width = result.query.shape[-1]
    if result.key.shape[-1] != width:
        raise ShapeError(
            f"{name} returned a query with {width} features and a key with {result.key.shape[-1]}; "
            "they need equal widths."
        )
    _check_family(name, result, width)
    return result._replace(
        query=_as_wide(result.query, query),
        key=_as_wide(result.key, key),
        softcap=None if result.softcap == math.inf else result.softcap,
        biases=_biases(name, result.biases, query, (*lead, query.shape[-2], key.shape[-2])),
    )


def _as_wide(x: Tensor, given: Tensor) -> Tensor:
    """x with the leading axes that were given: one that came back with size 1 is the same for all."""
    lead = [
        theirs if mine == 1 else mine for mine, theirs in zip(x.shape[:-2], given.shape[:-2], strict=True)
    ]
    return x if lead == [*x.shape[:-2]] else x.expand(*lead, -1, -1)


def _like(what: str, x: object, query: Tensor) -> Tensor:
    """A tensor of the dtype that `prepare` got."""
    x = _dense(what, x, query.device)
    if x.dtype != query.dtype:
        raise DTypeError(
            f"{what} of {x.dtype} for inputs of {query.dtype}; the dtype must stay the same: "
            "return it .to(query.dtype)."
        )
    return x


def _check_family(name: str, result: Prepared, width: int) -> None:
    if result.family not in ("dot", "tanh", "relu"):
        raise ArgumentError(
            f'{name} returned family={result.family!r}; it is "dot", or "tanh" or "relu" with a vector.'
        )
    vector = result.vector
    if (vector is None) != (result.family == "dot"):
        seen = "no vector" if vector is None else "a vector"
        raise ArgumentError(
            f'{name} returned family={result.family!r} and {seen}; "dot" has none, and "tanh" and "relu" '
            "compute vectorᵀ act(query + key)."
        )
    if vector is not None:
        vector = _like(f"{name} returned a vector", vector, result.query)
        if vector.shape != (width,):
            raise ShapeError(
                f"{name} returned a vector of shape {tuple(vector.shape)} for a query with {width} features; "
                f"it needs one number for each, ({width},)."
            )
    if isinstance(result.scale, Tensor):
        raise DTypeError(
            f"{name} returned a scale that is a Tensor; it must be a number. Multiply the query by a scale "
            "that learns."
        )
    check_number(f"{name} returned scale", result.scale)
    if vector is not None and result.scale != 1:
        raise ArgumentError(
            f"{name} returned scale={result.scale} with family={result.family!r}; only a dot product has a "
            "scale. Scale the query and the key instead."
        )
    check_softcap(f"{name} returned softcap", result.softcap)


def _biases(name: str, biases: Any, query: Tensor, whole: Sequence[int]) -> tuple[Tensor, ...]:
    """Biases … g r q k, with all axes."""
    if not isinstance(biases, list | tuple):
        raise DTypeError(
            f"{name} returned biases that are a {type(biases).__name__}; return a tuple of them."
        )
    for bias in biases:
        bias = _like(f"{name} returned a bias", bias, query)
        if not broadcasts(bias.shape, whole):
            raise ShapeError(
                f"{name} returned a bias of shape {tuple(bias.shape)}, which does not broadcast to the "
                f"scores' shape {tuple(whole)}."
            )
    missing = [len(whole) - bias.dim() for bias in biases]
    return tuple(bias[(None,) * n] if n else bias for bias, n in zip(biases, missing, strict=True))


def function_scores(scores: object, query: Tensor, key: Tensor, whole: Sequence[int]) -> Tensor:
    """What a function of query and key returned: scores that broadcast to (…, h, q, k)."""
    if not isinstance(scores, Tensor) or not broadcasts(scores.shape, whole):
        seen = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ShapeError(
            f"score returned {seen} for query {tuple(query.shape)} and key {tuple(key.shape)}; "
            f"it must return scores of shape {whole}."
        )
    if not scores.is_floating_point():
        raise DTypeError(
            f"score returned scores of {scores.dtype}; they must be floating point: scores.float()."
        )
    check_dense("the score's result", scores)
    if scores.device != query.device:
        raise DeviceError(
            f"query is on {query.device} and the score's result on {scores.device}; "
            f"bring them together: scores.to({str(query.device)!r})."
        )
    return scores


# Masks


def interval_side(what: str, side: object, rows: Sequence[int], device: torch.device) -> Tensor | None:
    """The start or stop of an interval as int64, with at least 2 axes, that broadcasts to `rows`, (…, q, 1).

    Integers of every dtype are accepted, and a Python integer for all rows.
    """
    if side is None:
        return None
    if isinstance(side, Integral | torch.SymInt) and not isinstance(side, bool):
        if isinstance(side, Integral):
            side = min(max(int(side), -FAR), FAR)
        return torch.full((1, 1), side, dtype=torch.int64, device=device)  # type: ignore[arg-type]
    if not isinstance(side, Tensor):
        raise DTypeError(
            f"{what} that is a {type(side).__name__}; return a tensor of integers, one integer, or None for "
            "no limit."
        )
    side = _dense(what, side, device)
    if side.is_floating_point() or side.is_complex() or side.dtype is torch.bool:
        raise DTypeError(f"{what} of {side.dtype}; it must be the number of a key, an integer: x.long().")
    if side.dim() == 0:
        side = side.reshape(1, 1)
    if side.dim() < 2 or not broadcasts(side.shape, rows):
        queries = rows[-2]
        one = "query" if queries == 1 else "queries"
        raise MaskError(
            f"{what} of shape {tuple(side.shape)} for {queries} {one}; it needs one number per query, "
            f"({queries}, 1), with leading axes if the sequences differ: {tuple(rows)}."
        )
    whole = side.to(torch.int64)
    if side.dtype is torch.uint64:  # beyond int64 is far to the right, not negative
        whole = torch.where(whole < 0, FAR, whole)
    return whole if side.dtype in _NEAR else whole.clamp(-FAR, FAR)


def allowed(what: str, x: object, pairs: Sequence[int], device: torch.device) -> Tensor | None:
    """A boolean tensor with at least 2 axes that broadcasts to `pairs`, (…, q, k)."""
    if x is None:
        return None
    x = _dense(what, x, device)
    if x.dtype is not torch.bool:
        raise DTypeError(f"{what} of {x.dtype}; it must be torch.bool, True = may look: x.bool().")
    if not broadcasts(x.shape, pairs):
        raise MaskError(
            f"{what} of shape {tuple(x.shape)}, which does not broadcast to the weights' shape "
            f"{tuple(pairs)}. Add axes of size 1 where it is the same for all."
        )
    return torch.atleast_2d(x)


# Biases


def line(bias: object, result: object, heads: int, length: int, device: torch.device) -> Tensor:
    """What a relative bias says of `length` distances: (h, l), or (1, l) for all heads."""
    if not isinstance(result, Tensor):
        raise DTypeError(
            f"{bias} gave a {type(result).__name__}; its forward(distance) must return a tensor."
        )
    _dense(f"{bias} gave a bias", result, device)
    if result.dtype is torch.bool or result.is_complex():
        raise DTypeError(
            f"{bias} gave a bias of {result.dtype}; it is added to the scores, so it needs real numbers: "
            "return it .float()."
        )
    if not 1 <= result.dim() <= 2 or result.shape[-1] != length:
        raise ShapeError(
            f"{bias} gave {tuple(result.shape)} for {length} distances; it must give a tensor of shape "
            f"({heads}, {length}), or ({length},) for all heads."
        )
    found = torch.atleast_2d(result)
    if found.shape[-2] != 1 and found.shape[-2] != heads:
        raise ShapeError(
            f"{bias} has {found.shape[-2]} heads and the call has {heads}; a relative bias needs one "
            "vector per head, or one for all."
        )
    return found


# Normalizers


def sink(normalize: Normalizer, result: object, heads: int, device: torch.device) -> Tensor | float:
    """What `Normalizer.sink` returned, if not None: a number, or a tensor with one per head."""
    name = f"{type(normalize).__name__}.sink"
    if not isinstance(result, Tensor):
        if result != -math.inf:
            check_number(f"{name} returned score", result)
        return float(result)  # type: ignore[arg-type]
    if result.device != device:
        raise DeviceError(
            f"query is on {device} and the sink on {result.device}; bring them together: "
            f"sink.to({str(device)!r})."
        )
    _dense(f"{name} returned a score", result, device)
    if not result.is_floating_point():
        raise DTypeError(f"{name} returned a score of {result.dtype}; a score is floating point: x.float().")
    if result.dim() > 1 or (result.numel() != 1 and result.numel() != heads):
        raise ShapeError(
            f"the sink has shape {tuple(result.shape)} and the call has {heads} heads; "
            "it needs one number per head, or one for all."
        )
    return result


def normalizer(normalize: Normalizer, scores: Tensor) -> None:
    """Call the methods of a custom normalizer on some rows of scores, and check what they return."""
    name, visible = type(normalize).__name__, scores != -math.inf
    rows = (*scores.shape[:-1], 1)
    if normalize.sums_to_one:
        top = scores.amax(-1, keepdim=True)
        scores = scores - torch.where(top == -math.inf, 0.0, top)
    tau = normalize.tau(scores)
    _of_rows(f"{name}.tau returned", tau, scores, rows)
    x = torch.where(visible, scores - tau, 0.0)
    _of_pairs(f"{name}.phi returned", normalize.phi(x), x)
    if type(normalize).slope is not Normalizer.slope:
        _of_pairs(f"{name}.slope returned", normalize.slope(x), x)
    divisor = normalize.divisor(x, visible)
    if divisor is not None and (isinstance(divisor, bool) or not isinstance(divisor, Real)):
        _of_rows(f"{name}.divisor returned", divisor, scores, rows)


def _of_rows(what: str, x: object, scores: Tensor, rows: tuple[int, ...]) -> None:
    x = _numbers(what, x, scores)
    if x.shape != rows:
        raise ShapeError(
            f"{what} {tuple(x.shape)} for scores of shape {tuple(scores.shape)}; it needs "
            f"one number per row, {rows}: keep the last axis with keepdim=True."
        )


def _of_pairs(what: str, result: object, x: Tensor) -> None:
    result = _numbers(what, result, x)
    if result.shape != x.shape:
        raise ShapeError(
            f"{what} {tuple(result.shape)} for x of shape {tuple(x.shape)}; it is elementwise, "
            "so the shape must stay the same."
        )


def _numbers(what: str, x: object, scores: Tensor) -> Tensor:
    if not isinstance(x, Tensor):
        raise DTypeError(f"{what} a {type(x).__name__}; it must return a tensor.")
    if x.dtype != scores.dtype:
        raise DTypeError(
            f"{what} {x.dtype} for scores of {scores.dtype}; the dtype must stay the same: "
            "x.to(scores.dtype)."
        )
    if x.device != scores.device:
        raise DeviceError(f"{what} a tensor on {x.device} for scores on {scores.device}.")
    return x


def row_sums(normalize: Normalizer, sums: Tensor, seen: Tensor) -> None:
    """The sums of some rows of weights; `seen` tells the rows that see a key."""
    off = seen & ((sums - 1).abs() > 0.01)
    if normalize.sums_to_one and bool(off.any()):
        raise ArgumentError(
            f"{type(normalize).__name__} says that its rows sum to one, and a row sums to "
            f"{sums[off][0]:.3g}; give it sums_to_one = False, or a tau with Σ phi(scores − tau) = 1."
        )
