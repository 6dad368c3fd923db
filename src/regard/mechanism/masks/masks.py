"""Masks: which keys a query may attend to.

By default, position rules align the last query with the last key; `align="start"` aligns the first query with
the first key. The two differ only if the numbers of queries and keys differ.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from regard._util.checks import check_int
from regard._util.name_hints import hint_arguments
from regard._util.text import type_name
from regard.errors import ArgumentError, DTypeError, MaskError
from regard.mechanism.call import validation
from regard.mechanism.masks.algebra import BUILT_IN, CHECKED, CallShape, Mask, MaskTerm, broadcasts
from regard.mechanism.masks.lengths import as_lengths, length_key, lengths_on, summarize_lengths
from regard.mechanism.torch_state import concrete

Align = Literal["end", "start"]


class Rule(Mask):
    """Base class for masks that depend only on positions. Each query sees an interval of keys.

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
        """Return the start and stop of each query's interval. position: the key position of each query."""
        raise NotImplementedError(f"{type(self).__name__} must implement ranges(position, keys)")

    def positions(self, rows: Tensor, queries: int | Tensor, keys: int | Tensor) -> Tensor:
        """Return the key position of each query row."""
        return rows if self.align == "start" else rows + (keys - queries)

    def terms(self, call_shape: CallShape) -> tuple[MaskTerm, ...]:
        """Return one interval per row."""
        rows = torch.arange(call_shape.queries, device=call_shape.device)[:, None]
        position = self.positions(rows, call_shape.queries, call_shape.keys)
        return (MaskTerm(*ranges_of(self, position, call_shape.keys, call_shape)),)


def ranges_of(
    rule: Rule, position: Tensor, keys: int | Tensor, call_shape: CallShape
) -> tuple[Tensor | None, Tensor | None]:
    """Return the ranges of a rule. They are checked unless the rule is a built-in class."""
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


class _Immutable(Mask):
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
    """Causal mask: a query attends to its own key and earlier ones.

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
class Window(_Immutable, Rule):
    """Sliding-window mask. `Window(n)` keeps the n keys up to and including the query's own key.

    `Window(left=a, right=b)` keeps the query's own key, a keys before it and b keys after it. None means no
    limit. align: see `Causal`.

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
            check_int("Window got keys", keys, min=1, why=", for the query's own key")
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


@dataclass(frozen=True)
class Prefix(Rule):
    """Prefix-LM mask: all queries see the first `length` keys, and attention to the other keys is causal.

    See Raffel et al. 2020, figure 3. Equal to `Causal() | Padding(length)`, but stored as a single interval.
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


class _LengthMask(_Immutable):
    """A mask defined by lengths, copied from the caller's tensor.

    Masks with equal lengths are equal. Masks with more than 4,096 lengths, and all masks while tracing, are
    compared by identity.
    """

    cache_key: Hashable | None  # equal for equal masks; None: compare by identity

    def __eq__(self, other: object) -> bool:
        if self is other or type(self) is not type(other):
            return self is other
        return self.cache_key is not None and self.cache_key == other.cache_key

    def __hash__(self) -> int:
        return id(self) if self.cache_key is None else hash(self.cache_key)


@hint_arguments
class Padding(_LengthMask):
    """Padding mask: sequence i sees only its first `lengths[i]` keys (its last ones if side="left").

    lengths: one length per sequence, along the first leading axes of the call, e.g. (b,) for a batch.
    side: "right" or "left", the side of the padding.
    `Padding` masks are immutable; `lengths` is a copy.

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
            raise ArgumentError(f"Padding got side={side!r}; use 'right' or 'left'.")
        lengths = as_lengths("Padding", lengths)
        key = length_key(lengths)
        vars(self).update(_lengths=lengths, side=side, cache_key=None if key is None else (side, key))

    @property
    def lengths(self) -> Tensor:
        """A copy of the lengths."""
        return self._lengths.clone()

    def terms(self, call_shape: CallShape) -> tuple[MaskTerm, ...]:
        lengths = lengths_on(self._lengths, call_shape.device)
        if not broadcasts(lengths.shape, call_shape.lead[: lengths.dim()]) or lengths.dim() > len(
            call_shape.lead
        ):
            raise MaskError(
                f"Padding has lengths of shape {tuple(lengths.shape)} and the call has leading axes "
                f"{call_shape.lead}; pass one length per sequence, along the first axes."
            )
        lengths = lengths.reshape(*lengths.shape, *[1] * (len(call_shape.lead) - lengths.dim() + 2))
        if self.side == "left":
            return (MaskTerm(start=call_shape.keys - lengths),)
        return (MaskTerm(stop=lengths.clone()),)  # a copy: the caller may modify it

    def default_size(self) -> tuple[int, int] | None:
        longest = int(self._lengths.max()) if concrete(self._lengths) and self._lengths.numel() else 0
        return None if longest <= 8 else (8, longest)

    def __repr__(self) -> str:
        side = "" if self.side == "right" else ", side='left'"
        return f"Padding({summarize_lengths(self._lengths)}{side})"


@hint_arguments
class Documents(_LengthMask):
    """Mask for packed sequences: each query sees only the keys of its own sequence.

    Use `Documents(lengths)` for self-attention, and `Documents(queries, keys)`, with separate key lengths,
    for cross-attention. within: a rule applied inside each sequence, with positions relative to its start.
    `Documents` masks are immutable; `queries` and `keys` are copies.

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
        query_lengths = as_lengths("Documents", queries)
        key_lengths = query_lengths if keys is None else as_lengths("Documents", keys)
        if query_lengths.dim() != 1 or query_lengths.shape != key_lengths.shape:
            raise MaskError(
                f"Documents got query lengths of shape {tuple(query_lengths.shape)} and key lengths of shape "
                f"{tuple(key_lengths.shape)}; pass one list of lengths for each, with one number per "
                "document."
            )
        if within is not None and not isinstance(within, Rule):
            name = f"the class {within.__name__}" if isinstance(within, type) else repr(within)
            raise MaskError(
                f"Documents got within={name}; pass a Rule, such as Causal() or Window(4). Combine other "
                "masks with &."
            )
        query_key, key_key = length_key(query_lengths), length_key(key_lengths)
        fixed = within is None or type(within) in BUILT_IN  # custom rules may be mutable
        cache_key = (query_key, key_key, within) if fixed and query_key and key_key else None
        vars(self).update(_queries=query_lengths, _keys=key_lengths, within=within, cache_key=cache_key)

    @property
    def queries(self) -> Tensor:
        """The number of queries in each document, as a copy."""
        return self._queries.clone()

    @property
    def keys(self) -> Tensor:
        """The number of keys in each document, as a copy."""
        return self._keys.clone()

    def terms(self, call_shape: CallShape) -> tuple[MaskTerm, ...]:
        queries, keys = (
            lengths_on(self._queries, call_shape.device),
            lengths_on(self._keys, call_shape.device),
        )
        self._check(call_shape)
        row = torch.arange(call_shape.queries, device=call_shape.device)
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
            low, high = ranges_of(self.within, position, length, call_shape)
            stop = stop if high is None else torch.minimum(stop, start + high)
            start = start if low is None else torch.maximum(start, start + low)
        return (MaskTerm(start, stop),)

    def _check(self, call_shape: CallShape) -> None:
        if not concrete(self._queries, self._keys):
            return
        for what, lengths, size in (
            ("queries", self._queries, call_shape.queries),
            ("keys", self._keys, call_shape.keys),
        ):
            total = int(lengths.sum())
            if total != size or (len(lengths) and int(lengths.max()) > size):
                raise MaskError(
                    f"Documents has {sum(lengths.tolist())} {what} in total and the call has {size} {what}; "
                    "the lengths must sum to the packed length. To convert document ids to lengths, use "
                    "torch.unique_consecutive(ids, return_counts=True)[1]."
                )

    def default_size(self) -> tuple[int, int] | None:
        if not concrete(self._queries, self._keys):
            return None
        return int(self._queries.sum()), int(self._keys.sum())

    def __repr__(self) -> str:
        keys = "" if self._keys is self._queries else f", {summarize_lengths(self._keys)}"
        within = "" if self.within is None else f", within={self.within!r}"
        return f"Documents({summarize_lengths(self._queries)}{keys}{within})"


BUILT_IN |= {Causal, Window, Prefix, Padding, Documents}
CHECKED |= {Rule.terms, Documents.terms}
