"""Scores as query, key and the operations applied to their product, from which `watch` builds lazy weights.

A model without an attention function computes scores as query · keyᵀ, scales and masks them, adds biases
and reshapes them, and applies softmax. `Scores` repeats these operations on query and key, on their leading
axes, and on the masks and biases, so that the n × n scores need not be stored.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from regard.inspection.calls.capture import CapturedCall
from regard.inspection.calls.mask_reading import RowMask, row_mask
from regard.inspection.hooks.handwritten.merged_heads import adjacent_axis
from regard.inspection.hooks.token_tracker import Tokens

_HIDDEN = -5e4  # a fill value of at most this hides a key: exp(score - max) is zero
Axes = tuple[int, ...]


class Term(NamedTuple):
    """A tensor added to the scores, times `factor`, or a mask that sets scores to `fill` where True."""

    tensor: Tensor
    factor: float = 1.0
    fill: float | None = None


@dataclass(frozen=True)
class Scores:
    """Scores (*lead, q, k): query (*frame, q, d) · key (*frame, k, d), with scale, softcap and terms.

    frame: the leading axes before any of them were merged, such as (b, h). lead: the current leading axes,
    such as (b·h,).
    softcap: if not None, the scores are softcap · tanh(scale · product).
    sources: the operands of the product, with the version counters they had when it was computed.
    tokens: the tokens of the queries and keys in each window, if they are known.
    head_axis: the leading axis adjacent to the features in the query's memory: usually the heads axis.
    """

    query: Tensor
    key: Tensor
    frame: Axes
    lead: Axes
    scale: float = 1.0
    softcap: float | None = None
    terms: tuple[Term, ...] = ()
    sources: tuple[tuple[Tensor, int], ...] = ()
    tokens: tuple[Tokens, Tokens] | None = None
    head_axis: int | None = None

    @classmethod
    def of(cls, query: Tensor, key: Tensor) -> "Scores":
        """Return the product of query (…, q, d) and key (…, k, d)."""
        frame = tuple(torch.broadcast_shapes(query.shape[:-2], key.shape[:-2]))
        query, key = query.detach(), key.detach()
        sources = tuple((x, _version(x)) for x in (query, key))
        query, key = (x.expand(*frame, *x.shape[-2:]) for x in (query, key))
        head_axis = adjacent_axis(query, range(len(frame)), query.dim() - 1)
        return cls(query, key, frame, frame, sources=sources, head_axis=head_axis)

    @property
    def shape(self) -> Axes:
        return (*self.lead, self.query.shape[-2], self.key.shape[-2])

    @property
    def is_current(self) -> bool:
        """Whether neither query nor key has been modified since their product was computed."""
        return all(_version(x) == version for x, version in self.sources)

    def scaled(self, factor: float | Tensor) -> "Scores | None":
        """Multiply by a number, or by a tensor with one factor per row."""
        if isinstance(factor, Tensor):
            if factor.numel() == 1:
                return self.scaled(float(factor))
            rows = self._in_frame(factor)
            if rows is None or rows.shape[-1] != 1 or self.softcap is not None:
                return None
            terms = tuple(t if t.fill is not None else t._replace(tensor=t.tensor * rows) for t in self.terms)
            return replace(self, query=self.query * rows, terms=terms)
        terms = tuple(t if t.fill is not None else t._replace(factor=t.factor * factor) for t in self.terms)
        if self.softcap is not None:
            return replace(self, softcap=self.softcap * factor, terms=terms)
        return replace(self, scale=self.scale * factor, terms=terms)

    def tanh(self) -> "Scores | None":
        """Apply tanh to the scaled product."""
        return None if self.terms or self.softcap is not None else replace(self, softcap=1.0)

    def plus(self, term: Tensor | float, factor: float = 1.0) -> "Scores | None":
        """Add a number or a tensor, times a factor."""
        if not isinstance(term, Tensor):
            term = self.query.new_full((1, 1), float(term))
        return self._with(Term(term.detach(), factor))

    def filled(self, mask: Tensor, value: float) -> "Scores | None":
        """Replace the scores where the mask is True with a value that hides them."""
        return self._with(Term(mask, fill=value)) if value <= _HIDDEN else None

    def _with(self, term: Term) -> "Scores | None":
        tensor = self._in_frame(term.tensor)
        return None if tensor is None else replace(self, terms=(*self.terms, term._replace(tensor=tensor)))

    def _in_frame(self, x: Tensor) -> Tensor | None:
        """View a tensor that broadcasts to `shape` as one that broadcasts to (*frame, q, k)."""
        x = x[(None,) * (2 - x.dim())] if x.dim() < 2 else x
        groups = _groups(self.lead, self.frame)
        if groups is None or x.dim() - 2 > len(self.lead):
            return None
        lead = (1,) * (len(self.lead) + 2 - x.dim()) + tuple(x.shape[:-2])
        if any(n not in (1, m) for n, m in zip(lead, self.lead, strict=True)):
            return None
        size = [1 if n == 1 else m for n, group in zip(lead, groups, strict=True) for m in group]
        return x.reshape(*size, *x.shape[-2:])

    def reshaped(self, shape: Sequence[int]) -> "Scores | None":
        """Split or merge leading axes."""
        lead = tuple(shape[:-2])
        if tuple(shape[-2:]) != self.shape[-2:] or math.prod(lead) != math.prod(self.lead):
            return None
        if _groups(lead, self.frame) is not None and len(lead) <= len(self.frame):
            return replace(self, lead=lead, head_axis=self.head_axis if lead == self.lead else None)
        groups = _groups(self.frame, lead)
        if groups is None:
            return None
        terms = tuple(t._replace(tensor=_split(t.tensor, groups)) for t in self.terms)
        query, key = _split(self.query, groups), _split(self.key, groups)
        return replace(self, query=query, key=key, frame=lead, lead=lead, terms=terms, head_axis=None)

    def permuted(self, order: Sequence[int]) -> "Scores | None":
        """Permute the leading axes."""
        axes, count = [axis % len(order) for axis in order], len(self.lead)
        if self.lead != self.frame or axes[-2:] != [count, count + 1]:
            return None

        def permute(x: Tensor) -> Tensor:
            return x[(None,) * (count + 2 - x.dim())].permute(axes)

        lead = tuple(self.lead[axis] for axis in axes[:-2])
        terms = tuple(t._replace(tensor=permute(t.tensor)) for t in self.terms)
        moved = replace(self, query=permute(self.query), key=permute(self.key), frame=lead, lead=lead)
        head_axis = None if self.head_axis is None else axes.index(self.head_axis)
        return replace(moved, terms=terms, tokens=None, head_axis=head_axis)

    def with_heads_first(self, heads: int) -> "Scores | None":
        """Split the leading axis h·b and move the heads last: (b, h)."""
        split = self.reshaped((heads, self.lead[0] // heads, *self.shape[-2:]))
        return None if split is None else split.permuted([1, 0, 2, 3])

    def captured(self, heads: int | None = None) -> CapturedCall | None:
        """Return the scores as a captured call, or None if a captured call cannot represent their terms.

        heads: number of heads, used to split a single leading axis (b·h).
        """
        scores: Scores | None = self
        if len(self.frame) == 1 and heads and self.frame[0] % heads == 0:
            scores = self.reshaped((self.frame[0] // heads, heads, *self.shape[-2:]))
        elif len(self.frame) > 2 and len(self.lead) == 2:  # windows, merged with the batch
            scores = self._merged()
        return None if scores is None else scores._captured()

    def _merged(self) -> "Scores":
        def merge(x: Tensor) -> Tensor:
            if all(n == 1 for n in x.shape[:-2]):
                return x.reshape(*[1] * len(self.lead), *x.shape[-2:])
            x = x[(None,) * (len(self.frame) + 2 - x.dim())]
            return x.expand(*self.frame, *x.shape[-2:]).reshape(*self.lead, *x.shape[-2:])

        terms = tuple(t._replace(tensor=merge(t.tensor)) for t in self.terms)
        return replace(self, query=merge(self.query), key=merge(self.key), frame=self.lead, terms=terms)

    def _captured(self) -> CapturedCall | None:
        masks, biases = list[RowMask](), list[Tensor]()
        for term in self.terms:
            tensor = term.tensor
            if term.fill is not None:
                tensor = ~tensor if math.isinf(term.fill) else _additive(tensor, self.query)
            rows = row_mask(tensor, self.query, self.key)
            assert rows is not None
            if rows.bias is None:
                masks.append(rows)
            else:
                biases.append(rows.bias if term.factor == 1 else rows.bias * term.factor)
        mask = masks[0] if masks else None
        for other in masks[1:]:
            assert mask is not None
            mask = mask.intersect(other)
        hidden = mask is not None and (len(masks) > 1 or bool(biases)) and _any_hidden_row(masks, mask)
        if hidden:  # in rows without visible keys, weights depend on the masks' finite fill values
            return None
        scale, softcap = self.scale, self.softcap
        if softcap is not None:
            scale *= softcap
        return CapturedCall(
            self.query,
            self.key,
            scale,
            softcap,
            mask=mask,
            biases=tuple(b.to(self.query.dtype) for b in biases),
        )


def _additive(hidden: Tensor, query: Tensor) -> Tensor:
    """Return a finite additive mask: softmax gives uniform weights to rows without visible keys."""
    lowest = torch.finfo(torch.float32).min
    return torch.zeros(hidden.shape, device=query.device).masked_fill(hidden, lowest)


def _any_hidden_row(masks: list[RowMask], mask: RowMask) -> bool:
    if any(m.uniform is not None for m in masks):
        return True
    if mask.allowed is None:
        return bool((mask.start >= mask.stop).any())
    keys = torch.arange(mask.allowed.shape[-1], device=mask.allowed.device)
    return not bool((mask.allowed & (keys >= mask.start) & (keys < mask.stop)).any(-1).all())


def _groups(coarse: Axes, fine: Axes) -> list[Axes] | None:
    """Return for each axis of `coarse` the axes of `fine` that it merges, or None if there is no such split.

    >>> from regard.inspection.hooks.handwritten.scores import _groups
    >>> _groups((6, 5), (2, 3, 5))
    [(2, 3), (5,)]
    """
    groups, rest = list[Axes](), list(fine)
    for number, size in enumerate(coarse):
        group: list[int] = [rest.pop(0)] if size == 1 and rest and rest[0] == 1 else []
        while rest and math.prod(group) < size:
            group.append(rest.pop(0))
        last = number == len(coarse) - 1
        while last and rest and rest[0] == 1:
            group.append(rest.pop(0))
        if math.prod(group) != size:
            return None
        groups.append(tuple(group))
    return groups if not rest else None


def _split(x: Tensor, groups: list[Axes]) -> Tensor:
    """Split the leading axes of a tensor; an axis of size 1 becomes several."""
    x = x[(None,) * (len(groups) + 2 - x.dim())]
    size = [m if n != 1 else 1 for n, group in zip(x.shape[:-2], groups, strict=True) for m in group]
    return x.reshape(*size, *x.shape[-2:])


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version
