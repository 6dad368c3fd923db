"""Mask algebra: unions and intersections of key intervals.

A mask is a union of `MaskTerm`s. A term has an interval of keys for each query row, start ≤ key < stop, and
optionally a dense boolean tensor (True = may attend). `&` is the intersection of masks; `|` is their union.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Never

import numpy as np
import torch
from torch import Tensor

from regard._util.checks import check_dense, check_device
from regard._util.text import type_name
from regard.errors import DeviceError, DTypeError, MaskError
from regard.mechanism.call import keyword_hints, validation
from regard.mechanism.call.validation import broadcasts as broadcasts

Combine = Callable[[Tensor, Tensor], Tensor]
_COMBINE = "Combine masks with & (keys that both allow) or | (keys that either allows)."


class CallShape(NamedTuple):
    """Shape of a call: leading axes (batch, heads), number of queries and keys, and device."""

    lead: tuple[int, ...]
    queries: int
    keys: int
    device: torch.device


class MaskTerm(NamedTuple):
    """The keys in [start, stop) that are also `allowed`.

    start and stop broadcast to (lead, q, 1), allowed to (lead, q, k). None means no restriction.
    """

    start: Tensor | None = None
    stop: Tensor | None = None
    allowed: Tensor | None = None

    def intersect(self, other: "MaskTerm") -> "MaskTerm":
        """Return a term with the keys that both terms allow."""

        def both(a: Tensor | None, b: Tensor | None, combine: Combine) -> Tensor | None:
            if a is None or b is None:
                return b if a is None else a
            return combine(a, b)

        return MaskTerm(
            both(self.start, other.start, torch.maximum),
            both(self.stop, other.stop, torch.minimum),
            both(self.allowed, other.allowed, torch.logical_and),
        )

    def visible(self, keys: Tensor) -> Tensor | None:
        """Return which of the given key indices are allowed, as a boolean tensor, or None if all are."""
        visible = self.allowed
        if self.start is not None:
            visible = keys >= self.start if visible is None else visible & (keys >= self.start)
        if self.stop is not None:
            visible = keys < self.stop if visible is None else visible & (keys < self.stop)
        return visible


# Built-in masks, whose terms are not checked. The terms of their subclasses are checked.
BUILT_IN: set[type] = set()
CHECKED: set[object] = set()  # `terms` methods that check the results of subclass methods


class Mask:
    """Base class for masks. Combine masks and boolean tensors with `&` and `|`.

    >>> import regard
    >>> print(regard.Causal() & regard.Window(3))
    Causal() & Window(3)
    ■·······
    ■■······
    ■■■·····
    ·■■■····
    ··■■■···
    ···■■■··
    ····■■■·
    ·····■■■
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def terms(self, call_shape: CallShape) -> tuple[MaskTerm, ...]:
        """Return the mask as a union of terms."""
        raise NotImplementedError(f"{type(self).__name__} must implement terms(call_shape)")

    def alignments(self) -> set[str]:
        """Return the set of alignments ("end", "start") of the position rules in this mask."""
        align = getattr(self, "align", None)
        return set() if align is None else {align}

    def default_size(self) -> tuple[int, int] | None:
        """Return the number of queries and keys to draw, or None if the mask fits any size."""
        return None

    def __and__(self, other: "Mask | Tensor") -> "Mask":
        return _All(self, as_mask(other))

    def __rand__(self, other: "Mask | Tensor") -> "Mask":
        return _All(as_mask(other), self)

    def __or__(self, other: "Mask | Tensor") -> "Mask":
        return _Any(self, as_mask(other))

    def __ror__(self, other: "Mask | Tensor") -> "Mask":
        return _Any(as_mask(other), self)

    def __bool__(self) -> bool:
        """Raise an error: `first and second` would silently drop the first mask."""
        raise TypeError(f"{self!r} is neither true nor false. {_COMBINE}")

    def __add__(self, other: object) -> Never:
        raise TypeError(f"Masks cannot be added or multiplied. {_COMBINE}")

    __radd__ = __mul__ = __rmul__ = __add__

    def __invert__(self) -> Never:
        raise TypeError(f"{self!r} has no complement. Use mask=~mask.dense(queries, keys).")

    def dense(self, queries: int, keys: int | None = None, lead: Sequence[int] = ()) -> Tensor:
        """Return the mask as a boolean tensor (*lead, queries, keys).

        >>> import regard
        >>> regard.Causal().dense(2, 3)
        tensor([[ True,  True, False],
                [ True,  True,  True]])
        """
        keys = queries if keys is None else keys
        call_shape = CallShape(tuple(lead), queries, keys, torch.device("cpu"))
        shape = (*call_shape.lead, queries, keys)
        visible = union(terms_of(self, call_shape), torch.arange(keys))
        return torch.ones(shape, dtype=torch.bool) if visible is None else visible.expand(shape).clone()

    def draw(self, queries: int | None = None, keys: int | None = None, lead: Sequence[int] = ()) -> str:
        """Draw the mask as text, in at most 32 × 64 cells: ■ all pairs visible, ▪ some pairs, · none.

        >>> import regard
        >>> print(regard.Prefix(2).draw(4))
        ■■··
        ■■··
        ■■■·
        ■■■■
        """
        if queries is None:
            queries, own_keys = self.default_size() or (8, 8)
            keys = own_keys if keys is None else keys
        keys = queries if keys is None else keys
        if 0 in lead:
            return ""  # an empty batch
        terms = terms_of(self, CallShape(tuple(lead), queries, keys, torch.device("cpu")))
        bands = (np.arange(33) * queries // 32).tolist() if queries > 32 else list(range(queries + 1))
        return "\n".join(_draw_rows(terms, rows, keys) for rows in itertools.pairwise(bands))

    def __str__(self) -> str:
        queries, keys = self.default_size() or (8, 8)
        if queries * keys > 2**26:
            return repr(self)  # drawing would take seconds
        try:
            return f"{self!r}\n{self.draw()}"
        except (MaskError, DeviceError):  # the mask does not fit this shape, or its tensors have no values
            return repr(self)


def terms_of(mask: Mask, call_shape: CallShape) -> tuple[MaskTerm, ...]:
    """Return the terms of a mask. They are checked unless the mask is built in."""
    terms = mask.terms(call_shape)
    if type(mask) in BUILT_IN or getattr(mask.terms, "__func__", None) in CHECKED:
        return terms
    name = f"{type(mask).__name__}.terms"
    if (
        not isinstance(terms, list | tuple)
        or not all(isinstance(term, MaskTerm) for term in terms)
        or not terms
    ):
        actual = type_name(terms)
        if isinstance(terms, list | tuple) and not isinstance(terms, MaskTerm):
            actual = f"[{', '.join(type(term).__name__ for term in terms)}]"
        raise MaskError(
            f"{name} returned {actual}; it must return a tuple of at least one MaskTerm: (MaskTerm(start, "
            "stop),). MaskTerm() allows every key, and MaskTerm(stop=0) allows none."
        )
    lead, queries, keys, device = call_shape
    rows, pairs = (*lead, queries, 1), (*lead, queries, keys)
    return tuple(
        MaskTerm(
            validation.interval_side(f"{name} returned a start", term.start, rows, device),
            validation.interval_side(f"{name} returned a stop", term.stop, rows, device),
            validation.allowed(f"{name} returned an `allowed`", term.allowed, pairs, device),
        )
        for term in terms
    )


def union(terms: Sequence[MaskTerm], keys: Tensor) -> Tensor | None:
    """Return a boolean tensor that is True for keys allowed by at least one term, or None if all are."""
    visible: Tensor | None = None
    for term in terms:
        part = term.visible(keys)
        if part is None:
            return None
        visible = part if visible is None else visible | part
    return visible


def _draw_rows(terms: Sequence[MaskTerm], rows: tuple[int, int], keys: int) -> str:
    """Draw a range of query rows as one line of text, with only a few dense rows in memory at a time."""
    cells = min(keys, 64)
    any_visible = torch.zeros(cells, dtype=torch.bool)
    all_visible = torch.ones(cells, dtype=torch.bool)
    step = max(2**22 // max(keys, 1), 1)
    for begin in range(*rows, step):
        part = slice(begin, min(begin + step, rows[1]))
        part_terms = [
            MaskTerm(*(t if t is None or t.shape[-2] == 1 else t[..., part, :] for t in term))
            for term in terms
        ]
        visible = union(part_terms, torch.arange(keys))
        visible = torch.ones(1, 1, dtype=torch.bool) if visible is None else visible
        while visible.dim() > 2:
            visible = visible[0]
        visible = visible.expand(part.stop - part.start, keys)
        if cells:
            any_visible |= torch.stack([cell.any() for cell in visible.any(0).tensor_split(cells)])
            all_visible &= torch.stack([cell.all() for cell in visible.all(0).tensor_split(cells)])
    return "".join("■" if a else "▪" if b else "·" for a, b in zip(all_visible, any_visible, strict=True))


def as_mask(mask: "Mask | Tensor") -> Mask:
    """Return a mask unchanged; wrap a boolean tensor as a mask."""
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, type) and issubclass(mask, Mask):
        raise DTypeError(f"mask is the class {mask.__name__}; pass an instance: mask={mask.__name__}(…).")
    if isinstance(mask, list | tuple) and any(isinstance(item, Mask) for item in mask):
        raise DTypeError(f"mask is {type_name(mask)} of masks; combine them with &: mask=Causal() & other.")
    if not isinstance(mask, Tensor):
        raise DTypeError(
            f"mask is {type_name(mask)}; pass a mask, such as {keyword_hints.suggest_mask(mask)}, or a "
            "boolean tensor."
        )
    check_dense("mask", mask)
    return _Dense(mask)


@dataclass(frozen=True, eq=False)
class _Dense(Mask):
    tensor: Tensor

    def __post_init__(self) -> None:
        if self.tensor.dtype is not torch.bool:
            cure = "To add numbers to the scores, use bias=."
            if self.tensor.dim() == 1 and not self.tensor.is_floating_point():
                cure = "For the lengths of sequences, use mask=Padding(lengths)."
            raise DTypeError(
                f"mask has dtype {self.tensor.dtype}; it must be torch.bool (True = may attend). {cure}"
            )

    def terms(self, call_shape: CallShape) -> tuple[MaskTerm, ...]:
        shape = (*call_shape.lead, call_shape.queries, call_shape.keys)
        check_device("mask", self.tensor, call_shape.device)
        if not broadcasts(self.tensor.shape, shape):
            cure = "Insert axes of size 1 where the mask is shared."
            if call_shape.lead and tuple(self.tensor.shape) == (call_shape.lead[0], call_shape.keys):
                cure = "For a mask of shape (batch, keys), use Padding(lengths), or " + (
                    f"mask[:, {'None, ' * len(call_shape.lead)}:]."
                )
            elif len(call_shape.lead) == 2 and self.tensor.shape == (
                call_shape.lead[0] * call_shape.lead[1],
                *shape[2:],
            ):
                cure = f"For torch's shape (batch · heads, …), use mask.unflatten(0, {call_shape.lead})."
            raise MaskError(
                f"mask has shape {tuple(self.tensor.shape)}, which does not broadcast to the shape of "
                f"the weights, {shape}. {cure}"
            )
        return (MaskTerm(allowed=torch.atleast_2d(self.tensor)),)

    def default_size(self) -> tuple[int, int] | None:
        queries, keys = torch.atleast_2d(self.tensor).shape[-2:]
        return (8 if queries == 1 else queries), (8 if keys == 1 else keys)

    def __repr__(self) -> str:
        return f"mask{tuple(self.tensor.shape)}"


class _Pair(Mask):
    symbol = "?"

    def __init__(self, first: Mask, second: Mask) -> None:
        self.first, self.second = first, second
        if len(self.alignments()) > 1:
            raise MaskError(
                f"{first!r} and {second!r} align positions differently: one at the start (top-left), one at "
                "the end. Use the same align= ('end' or 'start') for both."
            )

    def alignments(self) -> set[str]:
        return self.first.alignments() | self.second.alignments()

    def default_size(self) -> tuple[int, int] | None:
        first, second = self.first.default_size(), self.second.default_size()
        return (second or first) if isinstance(self.second, _Dense) or first is None else first

    def __repr__(self) -> str:
        return f"{self.first!r} {self.symbol} {self.second!r}"


class _All(_Pair):
    symbol = "&"

    def terms(self, call_shape: CallShape) -> tuple[MaskTerm, ...]:
        first, second = terms_of(self.first, call_shape), terms_of(self.second, call_shape)
        return tuple(a.intersect(b) for a in first for b in second)

    def __repr__(self) -> str:
        sides = (
            f"({side!r})" if isinstance(side, _Any) else repr(side) for side in (self.first, self.second)
        )
        return " & ".join(sides)


class _Any(_Pair):
    symbol = "|"

    def terms(self, call_shape: CallShape) -> tuple[MaskTerm, ...]:
        return terms_of(self.first, call_shape) + terms_of(self.second, call_shape)


BUILT_IN |= {_Dense, _All, _Any}
