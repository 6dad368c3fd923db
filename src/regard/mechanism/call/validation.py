"""Check the results of custom scores, masks, relative biases and normalizers.

The implementations, especially the kernels, rely on the following properties of every tensor in a `Problem`:

- dtype: int64 for intervals, bool for `allowed`, the query's float32 or float64 for all others;
- the query's device, and a dense layout;
- shape: as listed in `problem`, where each axis has its full size or size 1;
- key indices that can be added without int64 overflow.

Every result of a user-defined method passes through one of these functions before it becomes part of a
`Problem`. Built-in scores, masks and normalizers are exempt, except for the score of a sink. Subclasses of
built-in classes are not exempt.
"""

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from regard._util.checks import check_dense, check_number
from regard._util.text import pluralize, type_name
from regard.errors import ArgumentError, DeviceError, DTypeError, MaskError, ShapeError
from regard.mechanism.normalizers import Normalizer
from regard.mechanism.scores import FAMILIES, Prepared, Score, check_softcap

FAR = 2**40  # larger than any key index, but small enough to add without int64 overflow
_BELOW_FAR = {torch.int8, torch.int16, torch.int32, torch.uint8}  # dtypes whose values are all below FAR


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether a tensor of this shape can be expanded to the shape `to`."""
    return len(shape) <= len(to) and all(
        size == 1 or size == target for size, target in zip(reversed(shape), reversed(to), strict=False)
    )


def _dense(what: str, x: object, device: torch.device) -> Tensor:
    """Return x if it is a dense tensor on the query's device.

    what: start of the error message, such as "Ahead.ranges returned a start".
    """
    if not isinstance(x, Tensor):
        raise DTypeError(f"{what} of type {type(x).__name__}; it must be a tensor.")
    if x.layout is not torch.strided or x.is_nested or x.is_quantized:
        raise DTypeError(f"{what} that is {_kind(x)}; return a dense tensor: x.to_dense().")
    if x.device != device:
        raise DeviceError(f"{what} on {x.device}, but query is on {device}; return x.to({str(device)!r}).")
    return x


def _kind(x: Tensor) -> str:
    return "nested" if x.is_nested else f"of dtype {x.dtype}" if x.is_quantized else f"of layout {x.layout}"


# Scores


def prepared(score: Score, result: object, query: Tensor, key: Tensor, lead: Sequence[int]) -> Prepared:
    """Check the result of `Score.prepare` for query (… g r q d) and key (… g 1 k d).

    lead: the leading axes (…, g, r).
    """
    name = f"{type(score).__name__}.prepare"
    if not isinstance(result, Prepared):
        raise DTypeError(
            f"{name} returned {type_name(result)}; it must return a Prepared, as "
            "ScaledDot().prepare(query, key) does."
        )
    for what, x, original, full_lead in (
        ("query", result.query, query, lead),
        ("key", result.key, key, (*lead[:-1], 1)),
    ):
        x = _like(f"{name} returned a {what}", x, query)
        same = x.dim() == original.dim() and x.shape[-2] == original.shape[-2]
        if not same or not broadcasts(x.shape[:-2], full_lead):
            raise ShapeError(
                f"{name} returned a {what} of shape {tuple(x.shape)} for an input of shape "
                f"{tuple(original.shape)}; only the last axis may change."
            )
    width = result.query.shape[-1]
    if result.key.shape[-1] != width:
        raise ShapeError(
            f"{name} returned a query with {pluralize(width, 'feature')} and a key with "
            f"{int(result.key.shape[-1]):,}; the widths must be equal."
        )
    _check_family(name, result, width)
    return result._replace(
        query=_expand_lead(result.query, query),
        key=_expand_lead(result.key, key),
        biases=_biases(name, result.biases, query, (*lead, query.shape[-2], key.shape[-2])),
    )


def _expand_lead(x: Tensor, original: Tensor) -> Tensor:
    """Expand leading axes of size 1 to their size in the original tensor."""
    lead = [n if size == 1 else size for size, n in zip(x.shape[:-2], original.shape[:-2], strict=True)]
    return x if lead == [*x.shape[:-2]] else x.expand(*lead, -1, -1)


def _like(what: str, x: object, query: Tensor) -> Tensor:
    """Return x if it is a dense tensor with the dtype and device of query."""
    x = _dense(what, x, query.device)
    if x.dtype != query.dtype:
        raise DTypeError(
            f"{what} of dtype {x.dtype} for inputs of dtype {query.dtype}; they must be equal: "
            "return x.to(query.dtype)."
        )
    return x


def _check_family(name: str, result: Prepared, width: int) -> None:
    if result.family not in FAMILIES:
        raise ArgumentError(
            f'{name} returned family={result.family!r}; it must be "dot", or "tanh" or "relu" with a vector.'
        )
    vector = result.vector
    if (vector is None) != (result.family == "dot"):
        actual = "no vector" if vector is None else "a vector"
        raise ArgumentError(
            f'{name} returned family={result.family!r} and {actual}. "dot" takes no vector; "tanh" and '
            '"relu" need one: vectorᵀ act(query + key).'
        )
    if vector is not None:
        vector = _like(f"{name} returned a vector", vector, result.query)
        if vector.shape != (width,):
            raise ShapeError(
                f"{name} returned a vector of shape {tuple(vector.shape)} for a query with "
                f"{pluralize(width, 'feature')}; it must have shape ({width},)."
            )
    if isinstance(result.scale, Tensor):
        raise DTypeError(
            f"{name} returned a scale of type Tensor; it must be a number. Multiply the query by a learned "
            "scale instead."
        )
    check_number(f"{name} returned scale", result.scale)
    if vector is not None and result.scale != 1:
        raise ArgumentError(
            f'{name} returned scale={result.scale} with family={result.family!r}; only "dot" has a scale. '
            "Scale query and key instead."
        )
    check_softcap(f"{name} returned softcap", result.softcap)


def _biases(name: str, biases: Any, query: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """Check biases against the shape (… g r q k) and add missing leading axes."""
    if not isinstance(biases, list | tuple):
        raise DTypeError(
            f"{name} returned biases of type {type(biases).__name__}; return a tuple of tensors."
        )
    for bias in biases:
        bias = _like(f"{name} returned a bias", bias, query)
        if not broadcasts(bias.shape, shape):
            raise ShapeError(
                f"{name} returned a bias of shape {tuple(bias.shape)}, which does not broadcast to the "
                f"shape of the scores, {tuple(shape)}."
            )
    missing = [len(shape) - bias.dim() for bias in biases]
    return tuple(bias[(None,) * n] if n else bias for bias, n in zip(biases, missing, strict=True))


def function_scores(scores: object, query: Tensor, key: Tensor, shape: Sequence[int]) -> Tensor:
    """Check the result of a score function: it must broadcast to (…, h, q, k)."""
    if not isinstance(scores, Tensor) or not broadcasts(scores.shape, shape):
        actual = f"shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else type_name(scores)
        raise ShapeError(
            f"score returned {actual} for query {tuple(query.shape)} and key {tuple(key.shape)}; "
            f"it must return shape {shape}."
        )
    if not scores.is_floating_point():
        raise DTypeError(
            f"score returned dtype {scores.dtype}; it must be floating point. Return scores.float()."
        )
    check_dense("the score's result", scores)
    if scores.device != query.device:
        raise DeviceError(
            f"query is on {query.device}, but score returned a tensor on {scores.device}; "
            f"return scores.to({str(query.device)!r})."
        )
    return scores


# Masks


def interval_side(what: str, side: object, rows: Sequence[int], device: torch.device) -> Tensor | None:
    """Check the start or stop of an interval and convert it to int64 with at least 2 axes.

    It must broadcast to `rows`, (…, q, 1). Integer tensors of any dtype and Python integers are accepted.
    """
    if side is None:
        return None
    if isinstance(side, Integral | torch.SymInt) and not isinstance(side, bool):
        if isinstance(side, Integral):
            side = min(max(int(side), -FAR), FAR)
        return torch.full((1, 1), side, dtype=torch.int64, device=device)  # type: ignore[arg-type]
    if not isinstance(side, Tensor):
        raise DTypeError(
            f"{what} of type {type(side).__name__}; return an integer tensor, an integer, or None for "
            "no limit."
        )
    side = _dense(what, side, device)
    if side.is_floating_point() or side.is_complex() or side.dtype is torch.bool:
        raise DTypeError(f"{what} of dtype {side.dtype}; it must contain key indices: return x.long().")
    if side.dim() == 0:
        side = side.reshape(1, 1)
    if side.dim() < 2 or not broadcasts(side.shape, rows):
        queries = rows[-2]
        noun = "query" if queries == 1 else "queries"
        raise MaskError(
            f"{what} of shape {tuple(side.shape)} for {queries} {noun}; it must have one value per query: "
            f"({queries}, 1), or {tuple(rows)} if the sequences differ."
        )
    int64 = side.to(torch.int64)
    if side.dtype is torch.uint64:  # values beyond int64 wrap around to negative values
        int64 = torch.where(int64 < 0, FAR, int64)
    return int64 if side.dtype in _BELOW_FAR else int64.clamp(-FAR, FAR)


def allowed(what: str, x: object, pairs: Sequence[int], device: torch.device) -> Tensor | None:
    """Check a boolean tensor that broadcasts to `pairs`, (…, q, k); return it with at least 2 axes."""
    if x is None:
        return None
    x = _dense(what, x, device)
    if x.dtype is not torch.bool:
        raise DTypeError(
            f"{what} of dtype {x.dtype}; it must be torch.bool (True = may attend). Return x.bool()."
        )
    if not broadcasts(x.shape, pairs):
        raise MaskError(
            f"{what} of shape {tuple(x.shape)}, which does not broadcast to the shape of the weights, "
            f"{tuple(pairs)}. Insert axes of size 1 where the mask is shared."
        )
    return torch.atleast_2d(x)


# Biases


def line(bias: object, result: object, heads: int, length: int, device: torch.device) -> Tensor:
    """Check the values of a relative bias at `length` distances: (h, l), or (1, l) if all heads share it."""
    if not isinstance(result, Tensor):
        raise DTypeError(f"{bias} returned {type_name(result)}; forward(distance) must return a tensor.")
    _dense(f"{bias} returned a bias", result, device)
    if result.dtype is torch.bool or result.is_complex():
        raise DTypeError(
            f"{bias} returned a bias of dtype {result.dtype}; it is added to the scores, so it must "
            "contain real numbers: return x.float()."
        )
    if not 1 <= result.dim() <= 2 or result.shape[-1] != length:
        raise ShapeError(
            f"{bias} returned shape {tuple(result.shape)} for {pluralize(length, 'distance')}; it must "
            f"return ({heads}, {length}), or ({length},) to share the bias across all heads."
        )
    line = torch.atleast_2d(result)
    if line.shape[-2] != 1 and line.shape[-2] != heads:
        raise ShapeError(
            f"{bias} has {line.shape[-2]} heads and the call has {heads}; a relative bias needs one vector "
            "per head, or one for all heads."
        )
    return line


# Normalizers


def sink(normalize: Normalizer, result: object, heads: int, device: torch.device) -> Tensor | float:
    """Check the result of `Normalizer.sink`: a number, or a tensor with one number per head."""
    name = f"{type(normalize).__name__}.sink"
    if not isinstance(result, Tensor):
        if result != -math.inf:
            check_number(f"{name} returned score", result)
        return float(result)  # type: ignore[arg-type]
    if result.device != device:
        raise DeviceError(
            f"query is on {device} and the sink on {result.device}; use sink.to({str(device)!r})."
        )
    _dense(f"{name} returned a score", result, device)
    if not result.is_floating_point():
        raise DTypeError(
            f"{name} returned dtype {result.dtype}; it must be floating point. Convert it with .float()."
        )
    if result.dim() > 1 or (result.numel() != 1 and result.numel() != heads):
        raise ShapeError(
            f"the sink has shape {tuple(result.shape)} and the call has {pluralize(heads, 'head')}; the sink "
            "needs one number per head, or one for all heads."
        )
    return result


def normalizer(normalize: Normalizer, scores: Tensor) -> None:
    """Call the methods of a custom normalizer on some rows of scores and check the results."""
    name, visible = type(normalize).__name__, scores != -math.inf
    rows = (*scores.shape[:-1], 1)
    if normalize.sums_to_one:
        maximum = scores.amax(-1, keepdim=True)
        scores = scores - torch.where(maximum == -math.inf, 0.0, maximum)
    tau = normalize.tau(scores)
    _check_rows(f"{name}.tau returned", tau, scores, rows)
    x = torch.where(visible, scores - tau, 0.0)
    _check_pairs(f"{name}.phi returned", normalize.phi(x), x)
    if type(normalize).slope is not Normalizer.slope:
        _check_pairs(f"{name}.slope returned", normalize.slope(x), x)
    divisor = normalize.divisor(x, visible)
    if divisor is not None and (isinstance(divisor, bool) or not isinstance(divisor, Real)):
        _check_rows(f"{name}.divisor returned", divisor, scores, rows)


def _check_rows(what: str, x: object, scores: Tensor, rows: tuple[int, ...]) -> None:
    x = _check_tensor(what, x, scores)
    if x.shape != rows:
        raise ShapeError(
            f"{what} shape {tuple(x.shape)} for scores of shape {tuple(scores.shape)}; it must return one "
            f"number per row, {rows}: keep the last axis with keepdim=True."
        )


def _check_pairs(what: str, result: object, x: Tensor) -> None:
    result = _check_tensor(what, result, x)
    if result.shape != x.shape:
        raise ShapeError(
            f"{what} shape {tuple(result.shape)} for x of shape {tuple(x.shape)}; it is elementwise, so the "
            "shapes must be equal."
        )


def _check_tensor(what: str, x: object, scores: Tensor) -> Tensor:
    if not isinstance(x, Tensor):
        raise DTypeError(f"{what} {type_name(x)}; it must return a tensor.")
    if x.dtype != scores.dtype:
        raise DTypeError(
            f"{what} dtype {x.dtype} for scores of dtype {scores.dtype}; they must be equal: "
            "return x.to(scores.dtype)."
        )
    if x.device != scores.device:
        raise DeviceError(
            f"{what} a tensor on {x.device} for scores on {scores.device}; return x.to(scores.device)."
        )
    return x


def row_sums(normalize: Normalizer, sums: Tensor, visible: Tensor) -> None:
    """Check that the rows where `visible` is True sum to one."""
    off = visible & ((sums - 1).abs() > 0.01)
    if normalize.sums_to_one and bool(off.any()):
        raise ArgumentError(
            f"{type(normalize).__name__} has sums_to_one = True, but a row sums to {sums[off][0]:.3g}; set "
            "sums_to_one = False, or return a tau with Σ phi(scores − tau) = 1."
        )
