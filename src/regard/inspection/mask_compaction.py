"""Compact forms of dense masks: no mask, fewer keys, lengths, or one interval per row.

The layers of a model share one dense mask. It is read once; the result is stored on the tensor, with the
version that was read.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.inspection.capture import Intervals, additive_kind, key_intervals
from regard.mechanism.mask_algebra import Mask, as_mask
from regard.mechanism.masks import Padding
from regard.mechanism.torch_state import concrete

_ATTRIBUTE = "_regard_compact_mask"
_SPARSE = 0.9  # intervals around masks with gaps are used if they hold less than this fraction of the keys


class CompactMask(NamedTuple):
    """A compact form of a mask (…, q, k).

    mask: an equivalent mask if `exact`, otherwise an upper bound. None: all keys.
    span: first key and stop, if all rows have the same interval of keys.
    """

    mask: Mask | None
    exact: bool = True
    span: tuple[int, int] | None = None


def read(mask: Tensor) -> CompactMask:
    """Compact a boolean mask, True = may attend; the result is cached on the tensor.

    >>> import torch
    >>> from regard.inspection.mask_compaction import read
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
    """Convert an additive mask that only hides keys to a boolean one; None for others.

    Rows that a finite mask hides entirely have uniform weights; a boolean mask would make them zero.

    >>> import torch
    >>> from regard.inspection.mask_compaction import as_boolean
    >>> as_boolean(torch.tensor([[0.0, torch.finfo(torch.float32).min]]))
    tensor([[ True, False]])
    >>> as_boolean(torch.tensor([[0.0, -1.0]])) is None
    True
    """
    return _cached(mask, _as_boolean)


def compact(mask: Tensor) -> tuple[Mask | Tensor | None, tuple[int, int] | None]:
    """Return the cheapest mask for `attention`, and the span of keys if all rows have the same."""
    if not readable(mask):
        return mask, None
    compacted = read(mask)
    if compacted.exact:
        return compacted.mask, compacted.span
    return (mask if compacted.mask is None else compacted.mask & as_mask(mask)), None


def _cached(mask: Tensor, compute: Callable[[Tensor], Any]) -> Any:
    version = None if mask.is_inference() else mask._version  # inference tensors have no version counter
    cached = getattr(mask, _ATTRIBUTE, None)
    if cached is not None and version is not None and cached[0] == version:
        return cached[1]
    result = compute(mask)
    setattr(mask, _ATTRIBUTE, (version, result))
    return result


def _as_boolean(mask: Tensor) -> Tensor | None:
    unexpanded = _unexpanded(mask)
    allowed = unexpanded == 0
    if additive_kind(unexpanded)[0] and bool(allowed.any(-1).all()):
        return allowed.expand(mask.shape)
    return None


def _unexpanded(mask: Tensor) -> Tensor:
    """Undo `expand`: axes with stride 0 get size 1."""
    return mask[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride()[:-1])]


def _read(mask: Tensor) -> CompactMask:
    unexpanded = _unexpanded(mask)
    allowed = unexpanded.detach().numpy()
    keys = mask.shape[-1]
    start, stop, exact = key_intervals(allowed)
    total, first, last = int((stop - start).sum()), int(start.min()), int(stop.max())
    if exact and total == start.size * keys:
        return CompactMask(None, span=(0, keys))
    if exact and total == start.size * (last - first) > 0:
        return CompactMask(_intervals(start, stop), span=(first, last))
    if exact and unexpanded.dim() == 4 and unexpanded.shape[1] == unexpanded.shape[2] == 1:
        if first == 0 == int(start.max()):
            return CompactMask(Padding(torch.from_numpy(stop.reshape(-1))))
        if bool(((stop == keys) | (stop == 0)).all()):  # 0: a row without keys
            return CompactMask(Padding(torch.from_numpy((stop - start).reshape(-1)), side="left"))
    if exact or total < _SPARSE * allowed.size:
        return CompactMask(_intervals(start, stop), exact)
    return CompactMask(None, exact=False)


def _intervals(start: NDArray[np.int64], stop: NDArray[np.int64]) -> Intervals:
    return Intervals(torch.from_numpy(start)[..., None], torch.from_numpy(stop)[..., None])
