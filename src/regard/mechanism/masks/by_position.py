"""Masks by position: `Causal`, `Window`, `Prefix`, and the base class `Rule`.

By default, position rules align the last query with the last key; `align="start"` aligns the first query with
the first key. The two differ only if the number of queries differs from the number of keys.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from regard._util.checks import check_int
from regard._util.name_hints import hint_arguments
from regard._util.text import type_name
from regard.errors import ArgumentError, DTypeError, MaskError
from regard.mechanism.call import validation
from regard.mechanism.masks.algebra import BUILT_IN, CHECKED, CallShape, Mask, MaskTerm

Align = Literal["end", "start"]


class Rule(Mask):
    """Base class for masks that depend only on positions. Each query attends to one interval of keys.

    Subclasses implement `ranges`. `Documents(within=rule)` applies a rule to each document.

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
        """Return the start and stop of each query's interval of keys.

        position: the key position of each query.
        keys: the number of keys, one for all queries or one per query.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement ranges(position, keys)")

    def positions(self, rows: Tensor, queries: int | Tensor, keys: int | Tensor) -> Tensor:
        """Return the key position that corresponds to each query row."""
        return rows if self.align == "start" else rows + (keys - queries)

    def terms(self, call_shape: CallShape) -> tuple[MaskTerm, ...]:
        """Return one interval per row."""
        rows = torch.arange(call_shape.queries, device=call_shape.device)[:, None]
        position = self.positions(rows, call_shape.queries, call_shape.keys)
        return (MaskTerm(*ranges_of(self, position, call_shape.keys, call_shape)),)


def ranges_of(
    rule: Rule, position: Tensor, keys: int | Tensor, call_shape: CallShape
) -> tuple[Tensor | None, Tensor | None]:
    """Return the ranges of a rule. They are checked unless the rule is built in."""
    ranges = rule.ranges(position, keys)
    if type(rule) in BUILT_IN:
        return ranges
    name = f"{type(rule).__name__}.ranges"
    if not isinstance(ranges, list | tuple) or len(ranges) != 2:
        actual = f"{len(ranges)} values" if isinstance(ranges, list | tuple) else type_name(ranges)
        raise MaskError(
            f"{name} returned {actual}; it must return two values, start and stop: (None, position + 1)."
        )
    rows = (*call_shape.lead, call_shape.queries, 1)
    start, stop = (
        validation.interval_side(f"{name} returned a {side}", x, rows, call_shape.device)
        for side, x in zip(("start", "stop"), ranges, strict=True)
    )
    return start, stop


class Immutable(Mask):
    """A mask whose attributes cannot be set, because its intervals are cached."""

    def __setattr__(self, name: str, value: object) -> None:
        if type(self) in BUILT_IN or hasattr(self, name):
            self._raise_immutable("set", name)
        super().__setattr__(name, value)  # subclasses may add attributes

    def __delattr__(self, name: str) -> None:
        self._raise_immutable("delete", name)

    def _raise_immutable(self, verb: str, name: str) -> None:
        kind = type(self).__name__
        raise AttributeError(
            f"cannot {verb} {name} of {self!r}: masks are immutable. Create a new {kind}(…)."
        )


def _check_align(mask: str, align: str) -> None:
    if align not in ("end", "start"):
        raise ArgumentError(
            f"{mask} got align={align!r}; use 'end' (aligns the last query with the last key) or 'start' "
            "(aligns the first query with the first key)."
        )


@hint_arguments
@dataclass(frozen=True)
class Causal(Rule):
    """Causal mask: a query attends to its own key and to earlier keys.

    align: "end" aligns the last query with the last key, as in incremental decoding. "start" aligns the first
    query with the first key, like `is_causal` in torch.

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


@hint_arguments
class Window(Immutable, Rule):
    """Sliding-window mask. `Window(n)` allows the n keys up to and including the query's own key.

    `Window(left=a, right=b)` allows the query's own key, a keys before it and b keys after it. None means no
    limit.

    align: see `Causal`.

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
                f"Window got keys={keys}, left={left}, right={right}; pass either the number of keys, "
                "Window(4), or the sides, Window(left=3, right=0)."
            )
        if keys is not None:
            if isinstance(keys, tuple | list):
                raise DTypeError(f"Window got keys={keys}; for both sides, use Window(left=n, right=m).")
            check_int("Window got keys", keys, min=1, why=", to include the query's own key")
            left, right = keys - 1, 0
        for side, size in (("left", left), ("right", right)):
            if size is not None:
                check_int(f"Window got {side}", size)
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


@hint_arguments
@dataclass(frozen=True)
class Prefix(Rule):
    """Prefix-LM mask: all queries attend to the first `length` keys; attention to the others is causal.

    See Raffel et al. 2020, figure 3. The mask equals `Causal() | Padding(length)`, but is stored as a single
    interval.

    align: see `Causal`.

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


BUILT_IN |= {Causal, Window, Prefix}
CHECKED |= {Rule.terms}
