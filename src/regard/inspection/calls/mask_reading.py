"""Convert dense masks to one interval of keys per row, or to the cheapest equivalent mask.

All layers of a model share one dense mask, so the result is cached while the mask exists and is unmodified.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from regard.errors import ArgumentError
from regard.mechanism.masks.algebra import BUILT_IN, CallShape, Mask, MaskTerm, as_mask, union
from regard.mechanism.masks.by_length import Padding
from regard.mechanism.torch_state import concrete

_CHUNK = 2**24  # mask entries processed at a time
_FAR = 2**40  # stop of an interval without an upper bound
_SPARSE = 0.9  # intervals around rows with gaps are used only if they cover less than this fraction


class Intervals(Mask):
    """One interval of keys per row: start and stop broadcast to (…, q, 1).

    >>> import torch
    >>> from regard.inspection.calls.mask_reading import Intervals
    >>> print(Intervals(torch.tensor([[0], [1]]), torch.tensor([[1], [3]])).draw(2, 3))
    ■··
    ·■■
    """

    def __init__(self, start: Tensor, stop: Tensor) -> None:
        self.start, self.stop = start, stop

    def terms(self, call_shape: CallShape) -> tuple[MaskTerm, ...]:
        start, stop = (end.to(call_shape.device) for end in (self.start, self.stop))
        return (MaskTerm(start, stop.clamp(max=call_shape.keys)),)


BUILT_IN.add(Intervals)  # its terms need no validation


_RESULTS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # mask → results, by function and arguments


def _cached(mask: Tensor, compute: Callable[..., Any], *arguments: Hashable) -> Any:
    """Return compute(mask, …), cached until the mask changes."""
    if mask.is_inference():  # without a version counter, changes would go unnoticed
        return compute(mask, *arguments)
    results = _RESULTS.setdefault(mask, {})
    key, state = (compute, *arguments), (mask._version, mask.shape)
    if key not in results or results[key][0] != state:
        # detached: a result that refers to the mask itself would keep the cache entry alive
        results[key] = state, compute(mask.detach(), *arguments)
    return results[key][1]


def key_intervals(allowed: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64], bool]:
    """Return the smallest interval with all allowed keys of each row, and whether all its keys are allowed.

    Rows without allowed keys have the interval (0, 0).

    >>> import numpy as np
    >>> from regard.inspection.calls.mask_reading import key_intervals
    >>> start, stop, exact = key_intervals(np.array([[True, True, False], [False, False, False]]))
    >>> start.tolist(), stop.tolist(), exact
    ([0, 0], [2, 0], True)
    """
    start = allowed.argmax(-1)
    any_key = np.take_along_axis(allowed, start[..., None], -1)[..., 0]
    stop = np.where(any_key, allowed.shape[-1] - allowed[..., ::-1].argmax(-1), 0)
    return start, stop, int((stop - start).sum()) == int(np.count_nonzero(allowed))


def _additive_kind(mask: Tensor) -> tuple[bool, bool]:
    """Return whether an additive mask only hides keys, and whether it does so with finite values."""
    finite, lowest = False, torch.finfo(mask.dtype).min
    rows = mask.flatten(0, -2)
    for part in rows.split(max(_CHUNK // max(rows.shape[-1], 1), 1)):
        hidden = part <= lowest / 2
        if not bool((hidden | (part == 0)).all()):
            return False, False
        finite = finite or bool((hidden & torch.isfinite(part)).any())
    return True, finite


# Row masks, for `watch`


class RowMask(NamedTuple):
    """A row-wise mask: one interval of keys per row (…, q, 1), plus `allowed` and `bias` (…, q, k) if needed.

    uniform: rows in which a finite additive mask hides every key; softmax gives them uniform weights.
    """

    start: Tensor
    stop: Tensor
    allowed: Tensor | None = None
    bias: Tensor | None = None
    uniform: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> "RowMask":
        """Apply a function to every tensor."""
        return RowMask(*(None if tensor is None else function(tensor) for tensor in self))  # type: ignore[arg-type]

    def intersect(self, other: "RowMask | None") -> "RowMask":
        """Return the keys that both masks allow, with the sum of their biases."""
        if other is None:
            return self
        start, stop, allowed = MaskTerm(*self[:3]).intersect(MaskTerm(*other[:3]))
        assert start is not None
        assert stop is not None
        biases = [mask.bias for mask in (self, other) if mask.bias is not None]
        return RowMask(start, stop, allowed, sum(biases[1:], biases[0]) if biases else None)


def row_mask(mask: Any, query: Tensor, key: Tensor) -> RowMask | None:
    """Convert the mask of a call: a tensor, a regard mask, or a FlexAttention BlockMask.

    A tensor is either boolean (True = may attend) or added to the scores.

    >>> import torch
    >>> from regard.inspection.calls.mask_reading import row_mask
    >>> x = torch.zeros(3, 2)
    >>> row_mask(torch.ones(3, 3, dtype=torch.bool).tril(), x, x).stop.squeeze()
    tensor([1, 2, 3])
    """
    size = (query.shape[-2], key.shape[-2])
    if mask is None:
        return None
    if isinstance(mask, Mask):
        terms = mask.terms(CallShape(tuple(query.shape[:-2]), *size, query.device))
        start, stop, allowed = terms[0]
        if len(terms) == 1 and allowed is None:
            zero = torch.zeros(1, 1, dtype=torch.long, device=query.device)
            return RowMask(zero if start is None else start, zero + size[1] if stop is None else stop)
        mask = union(terms, torch.arange(size[1], device=query.device))
    elif hasattr(mask, "mask_mod"):
        from torch.nn.attention.flex_attention import create_mask

        mask = create_mask(mask.mask_mod, query.shape[0], None, *size, device=str(query.device))
    if mask is not None and not isinstance(mask, Tensor):
        raise ArgumentError(
            f"unsupported mask type {type(mask).__name__}; pass a tensor, a regard mask or a BlockMask"
        )
    return None if mask is None else _cached(mask, _read_rows, size[1])


def _read_rows(mask: Tensor, keys: int) -> RowMask:
    if mask.shape[-1] not in (1, keys):
        mask = mask[..., :keys]
    mask = torch.atleast_2d(mask)
    finite = False
    first = torch.zeros(1, 1, dtype=torch.long, device=mask.device)
    every = first, first + (mask.shape[-1] if mask.shape[-1] > 1 else _FAR)
    if mask.is_floating_point():
        only_hides, finite = _additive_kind(mask)
        if not only_hides:
            return RowMask(*every, bias=mask)
        mask = mask == 0
    allowed = mask if mask.dtype is torch.bool else mask != 0
    start, stop = _intervals(allowed) or (None, None)
    if start is None or stop is None:
        hidden = ~allowed.any(-1, keepdim=True)
        if finite and bool(hidden.any()):
            return RowMask(*every, allowed | hidden, uniform=hidden)
        return RowMask(*every, allowed)
    hidden = start >= stop
    if not finite or not bool(hidden.any()):
        return RowMask(start, stop)
    return RowMask(start.masked_fill(hidden, 0), stop.masked_fill(hidden, allowed.shape[-1]), uniform=hidden)


def _intervals(allowed: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the start and stop of each row, (…, q, 1), or None if a row has gaps."""
    if allowed.shape[-1] == 0:
        return None
    if allowed.shape[-1] == 1:  # broadcast over all keys
        return torch.zeros_like(allowed, dtype=torch.long), torch.where(allowed, _FAR, 0)
    start, stop, exact = key_intervals(allowed.cpu().numpy())
    if not exact:
        return None
    mask = _as_intervals(start, stop)
    return mask.start.to(allowed.device), mask.stop.to(allowed.device)


def _as_intervals(start: NDArray[np.int64], stop: NDArray[np.int64]) -> Intervals:
    return Intervals(torch.from_numpy(start)[..., None], torch.from_numpy(stop)[..., None])


# Compact masks, for `attention`: no mask, fewer keys, lengths, or one interval per row


class CompactMask(NamedTuple):
    """A compact form of a mask (…, q, k).

    mask: an equivalent mask if `exact`, otherwise a mask that allows a superset of the keys. None: all keys.
    span: start and stop of the interval, if it is the same for all rows.
    """

    mask: Mask | None
    exact: bool = True
    span: tuple[int, int] | None = None


def read(mask: Tensor) -> CompactMask:
    """Compact a boolean mask (True = may attend). The result is cached.

    >>> import torch
    >>> from regard.inspection.calls.mask_reading import read
    >>> read(torch.tensor([[True, True, False]])).span
    (0, 2)
    >>> rows = torch.tensor([[True, False, False], [True, True, False]])
    >>> read(rows[:, None, None].expand(2, 1, 3, 3)).mask
    Padding([1, 2])
    """
    return _cached(mask, _read)


def readable(mask: Tensor) -> bool:
    """Return whether a mask's values can be read without synchronizing with another device."""
    return mask.device.type == "cpu" and mask.dim() >= 2 and mask.numel() > 0 and concrete(mask)


def as_boolean(mask: Tensor) -> Tensor | None:
    """Convert an additive mask that only hides keys to a boolean mask; return None for other masks.

    Also returns None if a row has no visible key: with a finite mask its weights would be uniform, but with a
    boolean mask they are zero.

    >>> import torch
    >>> from regard.inspection.calls.mask_reading import as_boolean
    >>> as_boolean(torch.tensor([[0.0, torch.finfo(torch.float32).min]]))
    tensor([[ True, False]])
    >>> as_boolean(torch.tensor([[0.0, -1.0]])) is None
    True
    """
    return _cached(mask, _as_boolean)


def compact(mask: Tensor) -> tuple[Mask | Tensor | None, tuple[int, int] | None]:
    """Return the cheapest mask for `attention`, and the span of keys if it is the same for all rows."""
    if not readable(mask):
        return mask, None
    compacted = read(mask)
    if compacted.exact:
        return compacted.mask, compacted.span
    return (mask if compacted.mask is None else compacted.mask & as_mask(mask)), None


def _as_boolean(mask: Tensor) -> Tensor | None:
    unexpanded = _unexpanded(mask)
    allowed = unexpanded == 0
    if _additive_kind(unexpanded)[0] and bool(allowed.any(-1).all()):
        return allowed.expand(mask.shape)
    return None


def _unexpanded(mask: Tensor) -> Tensor:
    """Undo `expand`: axes with stride 0 get size 1."""
    return mask[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride()[:-1])]


def _read(mask: Tensor) -> CompactMask:
    unexpanded = _unexpanded(mask)
    allowed = unexpanded.numpy()
    keys = mask.shape[-1]
    start, stop, exact = key_intervals(allowed)
    total, first, last = int((stop - start).sum()), int(start.min()), int(stop.max())
    if exact and total == start.size * keys:
        return CompactMask(None, span=(0, keys))
    if exact and total == start.size * (last - first) > 0:
        return CompactMask(_as_intervals(start, stop), span=(first, last))
    if exact and unexpanded.dim() == 4 and unexpanded.shape[1] == unexpanded.shape[2] == 1:
        if first == 0 == int(start.max()):
            return CompactMask(Padding(torch.from_numpy(stop.reshape(-1))))
        if bool(((stop == keys) | (stop == 0)).all()):  # 0: a row without keys
            return CompactMask(Padding(torch.from_numpy((stop - start).reshape(-1)), side="left"))
    if exact or total < _SPARSE * allowed.size:
        return CompactMask(_as_intervals(start, stop), exact)
    return CompactMask(None, exact=False)
