"""Masks: which keys a query may look at.

Rules about positions count from the end: the last query stands at the last key. `align="start"` puts the
first query at the first key instead. The two differ only when there are more keys than queries, or fewer.
"""

from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from regard._util.checks import check_dense, check_int
from regard.errors import ArgumentError, DeviceError, DTypeError, MaskError
from regard.mechanism.call import validation
from regard.mechanism.mask_algebra import BUILT_IN, CHECKED, CallShape, Mask, MaskTerm, broadcasts
from regard.mechanism.torch_state import concrete

Align = Literal["end", "start"]
_COMPARED = 4096  # lengths up to which masks are compared by value


class Rule(Mask):
    """A mask that follows from positions alone: a start and a stop for each query's position.

    Subclasses give `ranges`; a `Rule` can also be put to work inside each document of `Documents`.

    >>> import regard
    >>> class Ahead(regard.Rule):
    ...     def ranges(self, position, keys):
    ...         return position + 1, None
    >>> print(Ahead().draw(3))
    ·■■
    ··■
    ···
    """

    align: Align = "end"

    def ranges(self, position: Tensor, keys: int | Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Start and stop for queries that stand at these key positions, among this many keys."""
        raise NotImplementedError(f"{type(self).__name__} needs a method ranges(position, keys)")

    def positions(self, rows: Tensor, queries: int | Tensor, keys: int | Tensor) -> Tensor:
        """The key position at which each query row stands."""
        return rows if self.align == "start" else rows + (keys - queries)

    def terms(self, scene: CallShape) -> tuple[MaskTerm, ...]:
        """One interval per row."""
        rows = torch.arange(scene.queries, device=scene.device)[:, None]
        position = self.positions(rows, scene.queries, scene.keys)
        return (MaskTerm(*ranges_of(self, position, scene.keys, scene)),)


def ranges_of(
    rule: Rule, position: Tensor, keys: int | Tensor, scene: CallShape
) -> tuple[Tensor | None, Tensor | None]:
    """The ranges of a rule, checked if its class is not built in."""
    ranges = rule.ranges(position, keys)
    if type(rule) in BUILT_IN:
        return ranges
    name = f"{type(rule).__name__}.ranges"
    if not isinstance(ranges, list | tuple) or len(ranges) != 2:
        seen = f"{len(ranges)} values" if isinstance(ranges, list | tuple) else f"a {type(ranges).__name__}"
        raise MaskError(f"{name} returned {seen}; it must return two, start and stop: (None, position + 1).")
    rows = (*scene.lead, scene.queries, 1)
    start, stop = (
        validation.interval_side(f"{name} returned a {side}", x, rows, scene.device)
        for side, x in zip(("start", "stop"), ranges, strict=True)
    )
    return start, stop


class _Frozen(Mask):
    """A mask whose attributes cannot be set: calls remember what they computed of it."""

    def __setattr__(self, name: str, value: object) -> None:
        if type(self) in BUILT_IN or hasattr(self, name):
            self._refuse("set", name)
        super().__setattr__(name, value)  # a subclass may have attributes of its own

    def __delattr__(self, name: str) -> None:
        self._refuse("delete", name)

    def _refuse(self, verb: str, name: str) -> None:
        kind = type(self).__name__
        raise AttributeError(f"cannot {verb} {name} of {self!r}: masks are immutable. Make a new {kind}(…).")


def _check_align(mask: str, align: str) -> None:
    if align not in ("end", "start"):
        raise ArgumentError(
            f"{mask} got align={align!r}; it is 'end' (the last query sees the last key) or "
            "'start' (top-left: the first query sees the first key)."
        )


@dataclass(frozen=True)
class Causal(Rule):
    """No looking ahead: a query sees its own key and those before it.

    With the default align="end" the last query sees the last key, as in step-by-step decoding;
    align="start" is the top-left rule of torch's `is_causal`.

    >>> import regard
    >>> print(regard.Causal().draw(3, 5))
    ■■■··
    ■■■■·
    ■■■■■
    >>> print(regard.Causal(align="start").draw(3, 5))
    ■····
    ■■···
    ■■■··
    """

    align: Align = "end"

    def __post_init__(self) -> None:
        _check_align("Causal", self.align)

    def ranges(self, position: Tensor, keys: int | Tensor) -> tuple[Tensor | None, Tensor | None]:
        return None, position + 1

    def __repr__(self) -> str:
        return "Causal()" if self.align == "end" else "Causal(align='start')"


class Window(_Frozen, Rule):
    """Near keys only. `Window(n)` keeps the n keys that end with the query's own.

    `Window(left=a, right=b)` keeps a keys before the query's own, its own, and b after it; None is no limit.
    `align` is that of `Causal`.

    >>> import regard
    >>> print(regard.Window(left=1, right=1).draw(4))
    ■■··
    ■■■·
    ·■■■
    ··■■
    """

    left: int | None
    right: int | None

    def __init__(
        self,
        keys: int | None = None,
        *,
        left: int | None = None,
        right: int | None = None,
        align: Align = "end",
    ) -> None:
        _check_align("Window", align)
        if (keys is None) == (left is None and right is None):
            raise ArgumentError(
                f"Window got keys={keys}, left={left}, right={right}; give either the number of keys, "
                "Window(4), or the sides, Window(left=3, right=0)."
            )
        if keys is not None:
            check_int("Window got keys", keys, min=1, why=", the query's own")
            left, right = keys - 1, 0
        for side, reach in (("left", left), ("right", right)):
            if reach is not None:
                check_int(f"Window got {side}", reach)
        vars(self).update(left=left, right=right, align=align)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Window) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.left, self.right, self.align))

    def ranges(self, position: Tensor, keys: int | Tensor) -> tuple[Tensor | None, Tensor | None]:
        far = validation.FAR
        start = None if self.left is None else position - min(self.left, far)
        stop = None if self.right is None else position + (min(self.right, far) + 1)
        return start, stop

    def __repr__(self) -> str:
        sides = f"left={self.left}, right={self.right}"
        if self.left is not None and self.right == 0:
            sides = str(self.left + 1)
        return f"Window({sides})" if self.align == "end" else f"Window({sides}, align='start')"


@dataclass(frozen=True)
class Prefix(Rule):
    """Everybody sees the first `length` keys, and beyond them no query looks ahead.

    The mask of a prefix language model (Raffel et al. 2020, figure 3). The same as
    `Causal() | Padding(length)`, in one interval. `align` is that of `Causal`.

    >>> import regard
    >>> print(regard.Prefix(3).draw(5))
    ■■■··
    ■■■··
    ■■■··
    ■■■■·
    ■■■■■
    """

    length: int
    align: Align = "end"

    def __post_init__(self) -> None:
        _check_align("Prefix", self.align)
        check_int("Prefix got length", self.length)

    def ranges(self, position: Tensor, keys: int | Tensor) -> tuple[Tensor | None, Tensor | None]:
        return None, (position + 1).clamp(min=min(self.length, validation.FAR))

    def __repr__(self) -> str:
        return f"Prefix({self.length})" if self.align == "end" else f"Prefix({self.length}, align='start')"


class _ByLengths(_Frozen):
    """A mask made of lengths, which are copied: changing the caller's tensor later changes no mask.

    Two are equal if their lengths are; with more than 4,096 lengths, or lengths that Python cannot read now,
    each is equal to itself only.
    """

    compared: Hashable | None  # equal for equal masks, and never changed; None if equal to itself only

    def __eq__(self, other: object) -> bool:
        if self is other or type(self) is not type(other):
            return self is other
        return self.compared is not None and self.compared == other.compared

    def __hash__(self) -> int:
        return id(self) if self.compared is None else hash(self.compared)


class Padding(_ByLengths):
    """Only the first `lengths[i]` keys of sequence i are real; with side="left", the last ones.

    `lengths` runs along the first leading axes of the call: (b,) for a batch, whatever the heads.
    A `Padding` is immutable; `lengths` is a copy.

    >>> import torch, regard
    >>> regard.Padding([1, 3]).dense(1, 4, lead=[2])
    tensor([[[ True, False, False, False]],
    <BLANKLINE>
            [[ True,  True,  True, False]]])
    >>> regard.Padding([1, 3]) == regard.Padding(torch.tensor([1, 3]))
    True
    """

    _lengths: Tensor
    side: Literal["right", "left"]

    def __init__(
        self, lengths: Sequence[int] | Tensor | int, *, side: Literal["right", "left"] = "right"
    ) -> None:
        if side not in ("right", "left"):
            raise ArgumentError(f"Padding got side={side!r}; the padding is at the 'right' or at the 'left'.")
        own = _integers("Padding", lengths)
        known = _compared(own)
        vars(self).update(_lengths=own, side=side, compared=None if known is None else (side, known))

    @property
    def lengths(self) -> Tensor:
        """The lengths, as a copy."""
        return self._lengths.clone()

    @property
    def axes(self) -> int:
        """The number of axes of the lengths."""
        return self._lengths.dim()

    def terms(self, scene: CallShape) -> tuple[MaskTerm, ...]:
        lengths = _to(self._lengths, scene.device)
        if not broadcasts(lengths.shape, scene.lead[: lengths.dim()]) or lengths.dim() > len(scene.lead):
            raise MaskError(
                f"Padding has lengths of shape {tuple(lengths.shape)} and the call has leading axes "
                f"{scene.lead}; lengths need one number per sequence, along the first axes."
            )
        lengths = lengths.reshape(*lengths.shape, *[1] * (len(scene.lead) - lengths.dim() + 2))
        if self.side == "left":
            return (MaskTerm(start=scene.keys - lengths),)
        return (MaskTerm(stop=lengths.clone()),)  # whoever gets it may change it

    def drawn_size(self) -> tuple[int, int] | None:
        longest = int(self._lengths.max()) if concrete(self._lengths) and self._lengths.numel() else 0
        return None if longest <= 8 else (8, longest)

    def __repr__(self) -> str:
        side = "" if self.side == "right" else ", side='left'"
        return f"Padding({_short(self._lengths)}{side})"


class Documents(_ByLengths):
    """Several sequences packed one after the other: each query sees the keys of its own sequence only.

    `Documents(lengths)` serves self-attention; `Documents(queries, keys)` has lengths of its own for the
    keys, as in cross-attention. `within` is a rule that holds inside each sequence, counted from that
    sequence's own ends. `Documents` are immutable; `queries` and `keys` are copies.

    >>> import regard
    >>> print(regard.Documents([2, 3], within=regard.Causal()).draw())
    ■····
    ■■···
    ··■··
    ··■■·
    ··■■■
    >>> print(regard.Documents([1, 2], [3, 2]).draw())
    ■■■··
    ···■■
    ···■■
    """

    _queries: Tensor
    _keys: Tensor
    within: Rule | None

    def __init__(
        self,
        queries: Sequence[int] | Tensor,
        keys: Sequence[int] | Tensor | None = None,
        *,
        within: Rule | None = None,
    ) -> None:
        own = _integers("Documents", queries)
        own_keys = own if keys is None else _integers("Documents", keys)
        if own.dim() != 1 or own.shape != own_keys.shape:
            raise MaskError(
                f"Documents has query lengths of shape {tuple(own.shape)} and key lengths of shape "
                f"{tuple(own_keys.shape)}; give one list each, with one number per document."
            )
        if within is not None and not isinstance(within, Rule):
            name = f"the class {within.__name__}" if isinstance(within, type) else repr(within)
            raise MaskError(
                f"Documents got within={name}; a rule about positions is needed, "
                "such as Causal() or Window(4). Combine other masks with &."
            )
        known = _compared(own)
        known_keys = known if keys is None else _compared(own_keys)
        fixed = within is None or type(within) in BUILT_IN  # a custom rule may change
        compared = (known, known_keys, within) if fixed and known and known_keys else None
        vars(self).update(_queries=own, _keys=own_keys, within=within, compared=compared)

    @property
    def queries(self) -> Tensor:
        """The number of queries of each document, as a copy."""
        return self._queries.clone()

    @property
    def keys(self) -> Tensor:
        """The number of keys of each document, as a copy."""
        return self._keys.clone()

    def terms(self, scene: CallShape) -> tuple[MaskTerm, ...]:
        queries, keys = _to(self._queries, scene.device), _to(self._keys, scene.device)
        self._check(scene)
        row = torch.arange(scene.queries, device=scene.device)
        ends = queries.cumsum(0)
        document = torch.searchsorted(ends, row, right=True).clamp(max=max(len(ends) - 1, 0))
        if not len(ends):
            return (MaskTerm(start=row[:, None] * 0, stop=row[:, None] * 0),)
        length = keys[document][:, None]
        start = (keys.cumsum(0) - keys)[document][:, None]
        stop = start + length
        if self.within is not None:
            local = (row - (ends - queries)[document])[:, None]
            position = self.within.positions(local, queries[document][:, None], length)
            low, high = ranges_of(self.within, position, length, scene)
            stop = stop if high is None else torch.minimum(stop, start + high)
            start = start if low is None else torch.maximum(start, start + low)
        return (MaskTerm(start, stop),)

    def _check(self, scene: CallShape) -> None:
        if not concrete(self._queries, self._keys):
            return
        for what, lengths, size in (
            ("queries", self._queries, scene.queries),
            ("keys", self._keys, scene.keys),
        ):
            total = int(lengths.sum())
            if total != size or (len(lengths) and int(lengths.max()) > size):
                raise MaskError(
                    f"Documents has {sum(lengths.tolist())} {what} in all and the call has {size} {what}; "
                    "the lengths must add up to the packed length."
                )

    def drawn_size(self) -> tuple[int, int] | None:
        if not concrete(self._queries, self._keys):
            return None
        return int(self._queries.sum()), int(self._keys.sum())

    def __repr__(self) -> str:
        keys = "" if self._keys is self._queries else f", {_short(self._keys)}"
        within = "" if self.within is None else f", within={self.within!r}"
        return f"Documents({_short(self._queries)}{keys}{within})"


BUILT_IN |= {Causal, Window, Prefix, Padding, Documents}
CHECKED |= {Rule.terms, Documents.terms}


def _integers(mask: str, lengths: Sequence[int] | Tensor | int) -> Tensor:
    """The lengths in memory of their own, which is no inference tensor: backward may need it."""
    inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
    with torch.inference_mode(False) if inference else nullcontext():
        try:
            tensor = torch.as_tensor(lengths)
        except (TypeError, ValueError, RuntimeError):
            raise DTypeError(
                f"{mask} got lengths {lengths!r}; it needs integers, in a list or a tensor."
            ) from None
        check_dense("lengths", tensor)
        if tensor.numel() and (
            tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool
        ):  # an empty list has no dtype of its own
            raise DTypeError(f"{mask} got lengths of {tensor.dtype}; a length is an integer.")
        tensor = tensor.to(torch.int64, copy=True)
    if concrete(tensor) and tensor.numel() and int(tensor.min()) < 0:
        raise MaskError(f"{mask} got a length of {int(tensor.min())}; a length is at least 0.")
    return tensor


def _compared(lengths: Tensor) -> Hashable | None:
    """The lengths as a value that can be compared and hashed; None if they are many or cannot be read."""
    if not concrete(lengths) or lengths.device.type != "cpu" or lengths.numel() > _COMPARED:
        return None
    return tuple(lengths.shape), lengths.numpy().tobytes()


def _to(lengths: Tensor, device: torch.device) -> Tensor:
    if lengths.is_meta and device.type != "meta":
        raise DeviceError(
            f"query is on {device} and the mask's lengths on meta; give lengths that have values."
        )
    return lengths.to(device)


def _short(lengths: Tensor) -> str:
    if not concrete(lengths) or lengths.numel() > 8:
        return f"<{' × '.join(map(str, lengths.shape))} lengths>"
    return str(lengths.tolist())
