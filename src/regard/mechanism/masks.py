"""Masks: which keys a query may look at.

Rules about positions count from the end: the last query stands at the last key. `align="start"` puts the
first query at the first key instead. The two differ only when there are more keys than queries, or fewer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from regard.errors import ArgumentError, DeviceError, DTypeError, MaskError
from regard.mechanism.checks import count
from regard.mechanism.concrete import concrete
from regard.mechanism.masking import Mask, Scene, Term, broadcasts

Align = Literal["end", "start"]


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

    def terms(self, scene: Scene) -> tuple[Term, ...]:
        """One interval per row."""
        rows = torch.arange(scene.queries, device=scene.device)[:, None]
        start, stop = self.ranges(self.positions(rows, scene.queries, scene.keys), scene.keys)
        return (Term(start, stop),)


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


class Window(Rule):
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
            count("Window got keys", keys, least=1, why=", the query's own")
            left, right = keys - 1, 0
        for side, reach in (("left", left), ("right", right)):
            if reach is not None:
                count(f"Window got {side}", reach)
        vars(self).update(left=left, right=right, align=align)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"a Window does not change, as calls may remember it; make another one with {name}={value!r}"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Window) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.left, self.right, self.align))

    def ranges(self, position: Tensor, keys: int | Tensor) -> tuple[Tensor | None, Tensor | None]:
        start = None if self.left is None else position - self.left
        stop = None if self.right is None else position + self.right + 1
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
        count("Prefix got length", self.length)

    def ranges(self, position: Tensor, keys: int | Tensor) -> tuple[Tensor | None, Tensor | None]:
        return None, (position + 1).clamp(min=self.length)

    def __repr__(self) -> str:
        return f"Prefix({self.length})" if self.align == "end" else f"Prefix({self.length}, align='start')"


class Padding(Mask):
    """Only the first `lengths[i]` keys of sequence i are real; with side="left", the last ones.

    `lengths` runs along the first leading axes of the call: (b,) for a batch, whatever the heads.

    >>> import torch, regard
    >>> regard.Padding([1, 3]).dense(1, 4, lead=[2])
    tensor([[[ True, False, False, False]],
    <BLANKLINE>
            [[ True,  True,  True, False]]])
    """

    def __init__(
        self, lengths: Sequence[int] | Tensor | int, *, side: Literal["right", "left"] = "right"
    ) -> None:
        if side not in ("right", "left"):
            raise ArgumentError(f"Padding got side={side!r}; the padding is at the 'right' or at the 'left'.")
        self.lengths, self.side = _integers("Padding", lengths), side

    def terms(self, scene: Scene) -> tuple[Term, ...]:
        lengths = _to(self.lengths, scene.device)
        if not broadcasts(lengths.shape, scene.lead[: lengths.dim()]) or lengths.dim() > len(scene.lead):
            raise MaskError(
                f"Padding has lengths of shape {tuple(lengths.shape)} and the call has leading axes "
                f"{scene.lead}; lengths need one number per sequence, along the first axes."
            )
        lengths = lengths.reshape(*lengths.shape, *[1] * (len(scene.lead) - lengths.dim() + 2))
        if self.side == "left":
            return (Term(start=scene.keys - lengths),)
        return (Term(stop=lengths),)

    def drawn_size(self) -> tuple[int, int] | None:
        longest = int(self.lengths.max()) if concrete(self.lengths) and self.lengths.numel() else 0
        return None if longest <= 8 else (8, longest)

    def __repr__(self) -> str:
        side = "" if self.side == "right" else ", side='left'"
        return f"Padding({_short(self.lengths)}{side})"


class Documents(Mask):
    """Several sequences packed one after the other: each query sees the keys of its own sequence only.

    `Documents(lengths)` serves self-attention; `Documents(queries, keys)` has lengths of its own for the
    keys, as in cross-attention. `within` is a rule that holds inside each sequence, counted from that
    sequence's own ends.

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

    def __init__(
        self,
        queries: Sequence[int] | Tensor,
        keys: Sequence[int] | Tensor | None = None,
        *,
        within: Rule | None = None,
    ) -> None:
        self.queries = _integers("Documents", queries)
        self.keys = self.queries if keys is None else _integers("Documents", keys)
        self.within = within
        if self.queries.dim() != 1 or self.queries.shape != self.keys.shape:
            raise MaskError(
                f"Documents has query lengths of shape {tuple(self.queries.shape)} and key lengths of shape "
                f"{tuple(self.keys.shape)}; give one list each, with one number per document."
            )
        if within is not None and not isinstance(within, Rule):
            name = f"the class {within.__name__}" if isinstance(within, type) else repr(within)
            raise MaskError(
                f"Documents got within={name}; a rule about positions is needed, "
                "such as Causal() or Window(4). Combine other masks with &."
            )

    def terms(self, scene: Scene) -> tuple[Term, ...]:
        queries, keys = _to(self.queries, scene.device), _to(self.keys, scene.device)
        self._check(scene)
        row = torch.arange(scene.queries, device=scene.device)
        ends = queries.cumsum(0)
        document = torch.searchsorted(ends, row, right=True).clamp(max=max(len(ends) - 1, 0))
        if not len(ends):
            return (Term(start=row[:, None] * 0, stop=row[:, None] * 0),)
        length = keys[document][:, None]
        start = (keys.cumsum(0) - keys)[document][:, None]
        stop = start + length
        if self.within is not None:
            local = (row - (ends - queries)[document])[:, None]
            position = self.within.positions(local, queries[document][:, None], length)
            low, high = self.within.ranges(position, length)
            stop = stop if high is None else torch.minimum(stop, start + high)
            start = start if low is None else torch.maximum(start, start + low)
        return (Term(start, stop),)

    def _check(self, scene: Scene) -> None:
        if not concrete(self.queries, self.keys):
            return
        for what, lengths, size in (
            ("queries", self.queries, scene.queries),
            ("keys", self.keys, scene.keys),
        ):
            if int(lengths.sum()) != size:
                raise MaskError(
                    f"Documents has {int(lengths.sum())} {what} in all and the call has {size} {what}; "
                    "the lengths must add up to the packed length."
                )

    def drawn_size(self) -> tuple[int, int] | None:
        if not concrete(self.queries, self.keys):
            return None
        return int(self.queries.sum()), int(self.keys.sum())

    def __repr__(self) -> str:
        keys = "" if self.keys is self.queries else f", {_short(self.keys)}"
        within = "" if self.within is None else f", within={self.within!r}"
        return f"Documents({_short(self.queries)}{keys}{within})"


def _integers(mask: str, lengths: Sequence[int] | Tensor | int) -> Tensor:
    try:
        tensor = torch.as_tensor(lengths)
    except (TypeError, ValueError, RuntimeError):
        raise DTypeError(
            f"{mask} got lengths {lengths!r}; it needs integers, in a list or a tensor."
        ) from None
    if not tensor.numel():
        return tensor.long()  # an empty list has no dtype of its own
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool:
        raise DTypeError(f"{mask} got lengths of {tensor.dtype}; a length is an integer.")
    tensor = tensor.long()
    if concrete(tensor) and int(tensor.min()) < 0:
        raise MaskError(f"{mask} got a length of {int(tensor.min())}; a length is at least 0.")
    return tensor


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
