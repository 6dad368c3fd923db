"""A dense mask in the cheapest form that says the same: nothing, fewer keys, lengths, an interval per row.

Models hand over one dense mask, and all their layers share it. It is read once, and what was read is noted
on the tensor itself, beside the version that was read.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.inspection.capture import Ranges
from regard.mechanism.mask_algebra import Mask, as_mask
from regard.mechanism.masks import Padding
from regard.mechanism.torch_state import concrete

Integers = NDArray[np.int64]
_NOTE = "_regard_reading"
_SPARSE = 0.9  # the share of keys below which the interval around a mask's holes is worth knowing


class Reading(NamedTuple):
    """What a mask (…, q, k) says: where `exact`, `mask` says it all; otherwise it only bounds it.

    span: the keys that everybody sees, if they are the same for all rows and follow one another.
    """

    mask: Mask | None
    exact: bool = True
    span: tuple[int, int] | None = None


def read(mask: Tensor) -> Reading:
    """The reading of a boolean mask, True = may look; noted on the tensor for the next layer.

    >>> import torch
    >>> from regard.inspection.mask_compaction import read
    >>> read(torch.tensor([[True, True, False]])).span
    (0, 2)
    >>> rows = torch.tensor([[True, False, False], [True, True, False]])
    >>> read(rows[:, None, None].expand(2, 1, 3, 3)).mask
    Padding([1, 2])
    """
    version = None if mask.is_inference() else mask._version  # None: nobody counts changes
    noted = getattr(mask, _NOTE, None)
    if noted is not None and version is not None and noted[0] == version:
        return noted[1]
    found = _read(mask)
    setattr(mask, _NOTE, (version, found))
    return found


def readable(mask: Tensor) -> bool:
    """Whether the values of a mask can be looked at, and without waiting for another device."""
    return mask.device.type == "cpu" and mask.dim() >= 2 and mask.numel() > 0 and concrete(mask)


def hides(mask: Tensor) -> Tensor | None:
    """An additive mask as a boolean one, if it only hides keys; None if it says more.

    Where a row sees no key at all, numbers that are only very low make it look at all alike: that is more.

    >>> import torch
    >>> from regard.inspection.mask_compaction import hides
    >>> hides(torch.tensor([[0.0, torch.finfo(torch.float32).min]]))
    tensor([[ True, False]])
    >>> hides(torch.tensor([[0.0, -1.0]])) is None
    True
    """
    version = None if mask.is_inference() else mask._version
    noted = getattr(mask, _NOTE, None)
    if noted is not None and version is not None and noted[0] == version:
        return noted[1]
    small = _once(mask)
    seen, low = small == 0, torch.finfo(mask.dtype).min / 2
    plain = bool((seen | (small <= low)).all()) and bool(seen.any(-1).all())
    found = seen.expand(mask.shape) if plain else None
    setattr(mask, _NOTE, (version, found))
    return found


def _once(mask: Tensor) -> Tensor:
    """Without repetition: axes along which it was expanded have size 1."""
    steps = mask.stride()
    return mask[tuple(slice(0, 1) if step == 0 else slice(None) for step in steps[:-1])]


def _read(mask: Tensor) -> Reading:
    small = _once(mask)
    seen: NDArray[np.bool_] = small.detach().numpy()
    keys = mask.shape[-1]
    start, stop = _hull(seen)
    widths, first, last = int((stop - start).sum()), int(start.min()), int(stop.max())
    exact = widths == int(np.count_nonzero(seen))  # no row has a hole
    if exact and widths == start.size * keys:
        return Reading(None, span=(0, keys))
    if exact and widths == start.size * (last - first) > 0:
        return Reading(_ranges(start, stop), span=(first, last))
    if exact and small.dim() == 4 and small.shape[1] == small.shape[2] == 1:
        if first == 0 == int(start.max()):
            return Reading(Padding(torch.from_numpy(stop.reshape(-1))))
        # what sees nothing starts at the end
        if int(stop.min()) in (0, keys) and bool(((stop == keys) | (stop == 0)).all()):
            return Reading(Padding(torch.from_numpy((stop - start).reshape(-1)), side="left"))
    if exact or widths < _SPARSE * seen.size:
        return Reading(_ranges(start, stop), exact)
    return Reading(None, exact=False)


def _hull(seen: NDArray[np.bool_]) -> tuple[Integers, Integers]:
    """The first key that each row sees, and the one after the last; 0 and 0 for a row that sees none."""
    keys = seen.shape[-1]
    start = seen.argmax(-1)
    some = np.take_along_axis(seen, start[..., None], -1)[..., 0]
    stop = np.where(some, keys - seen[..., ::-1].argmax(-1), 0)
    return start, stop


def _ranges(start: Integers, stop: Integers) -> Ranges:
    return Ranges(torch.from_numpy(start)[..., None], torch.from_numpy(stop)[..., None])


def cheapest(mask: Tensor) -> tuple[Mask | Tensor | None, tuple[int, int] | None]:
    """A boolean mask as `attention` should get it, and the keys that all rows see, if only these matter."""
    if not readable(mask):
        return mask, None
    found = read(mask)
    if found.exact:
        return found.mask, found.span
    return (mask if found.mask is None else found.mask & as_mask(mask)), None
