"""What masks are made of: intervals of keys per query row, united and intersected.

A mask is a union of `MaskTerm`s. A term says for each query row which interval of keys it may read,
start ≤ key < stop, and where intervals do not say it all, a dense boolean tensor stands beside them.
True means *may look*. `&` intersects two masks, `|` unites them.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard._util.checks import check_dense, check_device
from regard.errors import DeviceError, DTypeError, MaskError
from regard.mechanism.call import keyword_hints, validation
from regard.mechanism.call.layout import broadcasts as broadcasts

Combine = Callable[[Tensor, Tensor], Tensor]


class CallShape(NamedTuple):
    """What a mask must know of a call: its leading axes (batch, heads) and the number of queries and keys."""

    lead: tuple[int, ...]
    queries: int
    keys: int
    device: torch.device


class MaskTerm(NamedTuple):
    """Keys in [start, stop), and allowed: tensors that broadcast to (lead, q, 1) and (lead, q, k)."""

    start: Tensor | None = None
    stop: Tensor | None = None
    allowed: Tensor | None = None

    def meet(self, other: "MaskTerm") -> "MaskTerm":
        """What both terms let through."""

        def both(mine: Tensor | None, theirs: Tensor | None, combine: Combine) -> Tensor | None:
            if mine is None or theirs is None:
                return theirs if mine is None else mine
            return combine(mine, theirs)

        return MaskTerm(
            both(self.start, other.start, torch.maximum),
            both(self.stop, other.stop, torch.minimum),
            both(self.allowed, other.allowed, torch.logical_and),
        )

    def visible(self, keys: Tensor) -> Tensor | None:
        """A boolean tensor over the given key numbers, or None if the term lets everything through."""
        seen = self.allowed
        if self.start is not None:
            seen = keys >= self.start if seen is None else seen & (keys >= self.start)
        if self.stop is not None:
            seen = keys < self.stop if seen is None else seen & (keys < self.stop)
        return seen


BUILT_IN: set[type] = set()  # masks whose terms need no check: exact types, so that a subclass is checked
CHECKED: set[object] = set()  # methods `terms` that check what they use of a subclass


class Mask:
    """Base of all masks; combine them with `&` and `|`, also with boolean tensors.

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

    def terms(self, scene: CallShape) -> tuple[MaskTerm, ...]:
        """The mask as a union of terms."""
        raise NotImplementedError(f"{type(self).__name__} needs a method terms(scene)")

    def alignments(self) -> set[str]:
        """Which ends the rules about positions in this mask count from."""
        align = getattr(self, "align", None)
        return set() if align is None else {align}

    def drawn_size(self) -> tuple[int, int] | None:
        """The number of queries and keys that this mask is for, if it is for some in particular."""
        return None

    def __and__(self, other: "Mask | Tensor") -> "Mask":
        return _All(self, as_mask(other))

    def __rand__(self, other: "Mask | Tensor") -> "Mask":
        return _All(as_mask(other), self)

    def __or__(self, other: "Mask | Tensor") -> "Mask":
        return _Any(self, as_mask(other))

    def __ror__(self, other: "Mask | Tensor") -> "Mask":
        return _Any(as_mask(other), self)

    def dense(self, queries: int, keys: int | None = None, lead: Sequence[int] = ()) -> Tensor:
        """The mask as a boolean tensor of shape (*lead, queries, keys).

        >>> import regard
        >>> regard.Causal().dense(2, 3)
        tensor([[ True,  True, False],
                [ True,  True,  True]])
        """
        keys = queries if keys is None else keys
        scene = CallShape(tuple(lead), queries, keys, torch.device("cpu"))
        shape = (*scene.lead, queries, keys)
        seen = union(terms_of(self, scene), torch.arange(keys))
        return torch.ones(shape, dtype=torch.bool) if seen is None else seen.expand(shape).clone()

    def draw(self, queries: int | None = None, keys: int | None = None, lead: Sequence[int] = ()) -> str:
        """The mask in text, a row per query, at most 32 × 64 cells: ■ all in sight, ▪ some, · none.

        >>> import regard
        >>> print(regard.Prefix(2).draw(4))
        ■■··
        ■■··
        ■■■·
        ■■■■
        """
        if queries is None:
            queries, own_keys = self.drawn_size() or (8, 8)
            keys = own_keys if keys is None else keys
        keys = queries if keys is None else keys
        if 0 in lead:
            return ""  # an empty batch
        terms = terms_of(self, CallShape(tuple(lead), queries, keys, torch.device("cpu")))
        bands = (np.arange(33) * queries // 32).tolist() if queries > 32 else list(range(queries + 1))
        return "\n".join(_draw_rows(terms, rows, keys) for rows in itertools.pairwise(bands))

    def __str__(self) -> str:
        queries, keys = self.drawn_size() or (8, 8)
        if queries * keys > 2**26:
            return repr(self)  # printing should not take seconds
        try:
            return f"{self!r}\n{self.draw()}"
        except (MaskError, DeviceError):  # it only fits a batch of its own, or has no values
            return repr(self)


def terms_of(mask: Mask, scene: CallShape) -> tuple[MaskTerm, ...]:
    """The terms of a mask, checked if its class is not built in."""
    terms = mask.terms(scene)
    if type(mask) in BUILT_IN or getattr(mask.terms, "__func__", None) in CHECKED:
        return terms
    name = f"{type(mask).__name__}.terms"
    if (
        not isinstance(terms, list | tuple)
        or not all(isinstance(term, MaskTerm) for term in terms)
        or not terms
    ):
        seen = f"a {type(terms).__name__}"
        if isinstance(terms, list | tuple) and not isinstance(terms, MaskTerm):
            seen = f"[{', '.join(type(term).__name__ for term in terms)}]"
        raise MaskError(
            f"{name} returned {seen}; it must return a tuple with at least one Term: (MaskTerm(start, stop),). "
            "MaskTerm() lets every key through, and MaskTerm(stop=0) none."
        )
    rows, pairs = (*scene.lead, scene.queries, 1), (*scene.lead, scene.queries, scene.keys)
    return tuple(
        MaskTerm(
            validation.interval_side(f"{name} returned a start", term.start, rows, scene.device),
            validation.interval_side(f"{name} returned a stop", term.stop, rows, scene.device),
            validation.allowed(f"{name} returned an allowed", term.allowed, pairs, scene.device),
        )
        for term in terms
    )


def union(terms: Sequence[MaskTerm], keys: Tensor) -> Tensor | None:
    """What any of the terms lets through, of these keys; None if that is everything."""
    seen: Tensor | None = None
    for term in terms:
        part = term.visible(keys)
        if part is None:
            return None
        seen = part if seen is None else seen | part
    return seen


def _draw_rows(terms: Sequence[MaskTerm], rows: tuple[int, int], keys: int) -> str:
    """One line of a drawing, for a band of query rows; never more than some rows at a time are dense."""
    cells = min(keys, 64)
    some = torch.zeros(cells, dtype=torch.bool)
    every = torch.ones(cells, dtype=torch.bool)
    step = max(2**22 // max(keys, 1), 1)
    for begin in range(*rows, step):
        part = slice(begin, min(begin + step, rows[1]))
        cut = [
            MaskTerm(*(t if t is None or t.shape[-2] == 1 else t[..., part, :] for t in term))
            for term in terms
        ]
        seen = union(cut, torch.arange(keys))
        seen = torch.ones(1, 1, dtype=torch.bool) if seen is None else seen
        while seen.dim() > 2:
            seen = seen[0]
        seen = seen.expand(part.stop - part.start, keys)
        some |= torch.stack([cell.any() for cell in seen.any(0).tensor_split(cells)]) if cells else some
        every &= torch.stack([cell.all() for cell in seen.all(0).tensor_split(cells)]) if cells else every
    return "".join("■" if a else "▪" if b else "·" for a, b in zip(every, some, strict=True))


def as_mask(mask: "Mask | Tensor") -> Mask:
    """A mask as it is; a boolean tensor as a mask."""
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, type) and issubclass(mask, Mask):
        raise DTypeError(f"mask is the class {mask.__name__}; pass an instance: mask={mask.__name__}(…).")
    if not isinstance(mask, Tensor):
        kind = type(mask).__name__
        raise DTypeError(
            f"mask is of type {kind}; pass a regard mask, such as {keyword_hints.mask(mask)}, or a boolean "
            "tensor."
        )
    check_dense("mask", mask)
    return _Dense(mask)


@dataclass(frozen=True, eq=False)
class _Dense(Mask):
    tensor: Tensor

    def __post_init__(self) -> None:
        if self.tensor.dtype is not torch.bool:
            raise DTypeError(
                f"mask is a tensor of {self.tensor.dtype}; it must be torch.bool, True = may look. "
                "Numbers to add to the scores go to bias=."
            )

    def terms(self, scene: CallShape) -> tuple[MaskTerm, ...]:
        whole = (*scene.lead, scene.queries, scene.keys)
        check_device("mask", self.tensor, scene.device)
        if not broadcasts(self.tensor.shape, whole):
            cure = "Add axes of size 1 where it is the same for all."
            if scene.lead and tuple(self.tensor.shape) == (scene.lead[0], scene.keys):
                cure = "For a mask of (batch, keys) use Padding(lengths), or " + (
                    f"mask[:, {'None, ' * len(scene.lead)}:]."
                )
            raise MaskError(
                f"mask has shape {tuple(self.tensor.shape)}, which does not broadcast to the weights' "
                f"shape {whole}. {cure}"
            )
        return (MaskTerm(allowed=torch.atleast_2d(self.tensor)),)

    def drawn_size(self) -> tuple[int, int] | None:
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
                f"{first!r} and {second!r} count positions from different ends: one is aligned to the "
                "start (top-left) and one to the end. Give both the same align= ('end' or 'start')."
            )

    def alignments(self) -> set[str]:
        return self.first.alignments() | self.second.alignments()

    def drawn_size(self) -> tuple[int, int] | None:
        first, second = self.first.drawn_size(), self.second.drawn_size()
        return (second or first) if isinstance(self.second, _Dense) or first is None else first

    def __repr__(self) -> str:
        return f"{self.first!r} {self.symbol} {self.second!r}"


class _All(_Pair):
    symbol = "&"

    def terms(self, scene: CallShape) -> tuple[MaskTerm, ...]:
        first, second = terms_of(self.first, scene), terms_of(self.second, scene)
        return tuple(a.meet(b) for a in first for b in second)

    def __repr__(self) -> str:
        sides = (
            f"({side!r})" if isinstance(side, _Any) else repr(side) for side in (self.first, self.second)
        )
        return " & ".join(sides)


class _Any(_Pair):
    symbol = "|"

    def terms(self, scene: CallShape) -> tuple[MaskTerm, ...]:
        return terms_of(self.first, scene) + terms_of(self.second, scene)


BUILT_IN |= {_Dense, _All, _Any}
