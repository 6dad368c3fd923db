"""What is kept of an attention that somebody else computed: query, key and rules, in linear memory.

A mask that lets each row see an interval of keys is kept as two numbers per row; others as they came.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.mechanism import fused
from regard.mechanism.call.arguments import Call, prepare
from regard.mechanism.call.layout import Layout
from regard.mechanism.call.problem import Problem
from regard.mechanism.mask_algebra import BUILT_IN, CallShape, Mask, MaskTerm, as_mask
from regard.mechanism.normalizers import Normalizer, Softmax, Softmax1
from regard.mechanism.scores import ScaledDot
from regard.mechanism.weights.matrix import Weights

Kind = Literal["self", "cross"]
_CHUNK = 2**24  # entries of a mask that are looked at together


class Ranges(Mask):
    """An interval of keys for each row: start and stop broadcast to (…, q, 1).

    >>> import torch
    >>> from regard.inspection.capture import Ranges
    >>> print(Ranges(torch.tensor([[0], [1]]), torch.tensor([[1], [3]])).draw(2, 3))
    ■··
    ·■■
    """

    def __init__(self, start: Tensor, stop: Tensor) -> None:
        self.start, self.stop = start, stop

    def terms(self, scene: CallShape) -> tuple[MaskTerm, ...]:
        return (MaskTerm(self.start.to(scene.device), self.stop.to(scene.device).clamp(max=scene.keys)),)


BUILT_IN.add(Ranges)  # shared by all layers of a model: a checked copy for each would add up


class Rows(NamedTuple):
    """What a mask says of each row: an interval (…, q, 1); `allowed` and `bias` (…, q, k) where it says more.

    dark: rows that see no key by an additive mask of finite numbers, which makes them look at all alike.
    """

    start: Tensor
    stop: Tensor
    allowed: Tensor | None = None
    bias: Tensor | None = None
    dark: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> "Rows":
        """All of it changed alike."""
        allowed, bias, dark = (None if t is None else change(t) for t in self[2:])
        return Rows(change(self.start), change(self.stop), allowed, bias, dark)


@dataclass(frozen=True)
class CapturedCall:
    """One call: query (b, h, q, d) and key (b, g, k, d), and what its scores and weights followed from."""

    query: Tensor
    key: Tensor
    scale: float | None = None
    softcap: float | None = None
    sink: Tensor | None = None
    rows: Rows | None = None  # None: every query sees every key
    biases: tuple[Tensor, ...] = ()
    kind: Kind = "self"
    new: Tensor | None = None  # the part of the key that a cache was given in this call
    cached: bool = False

    def weights(self) -> Weights:
        """The lazy weights."""
        rows = self.rows or Rows(*_nothing())
        others = {"mask": rows.allowed, "bias": rows.bias, "sink": self.sink}
        others |= {f"bias{number}": bias for number, bias in enumerate(self.biases, 1)}
        inputs = {"query": self.query, "key": self.key}
        inputs |= {name: tensor for name, tensor in others.items() if tensor is not None}
        lead = Layout.of(self.query, self.key, self.key).lead
        return Weights(partial(_problem, self), None, lead, inputs=inputs)

    def owned(self) -> "CapturedCall":
        """The same, with a key that nobody writes to; see `keep_key`."""
        query = self.query.clone() if self.query.is_inference() else self.query
        return replace(self, query=query, key=keep_key(self.key), new=None)

    def some(self, heads: Sequence[int]) -> "CapturedCall":
        """Some heads only; what the others used is let go."""
        count, groups = self.query.shape[-3], self.key.shape[-3]
        if wrong := [head for head in heads if not -count <= head < count]:
            raise ArgumentError(
                f"watch got heads={list(heads)} and a layer has 0 to {count - 1}; leave {wrong[0]} away."
            )
        chosen = torch.tensor([range(count)[head] for head in heads], device=self.query.device)

        def pick(x: Tensor | None, of: Tensor = chosen) -> Tensor | None:
            if x is None or x.dim() < 3 or x.shape[-3] == 1:
                return x
            return x.index_select(-3, of)

        shared = chosen // (count // groups)
        key = self.key if groups == 1 else self.key.index_select(-3, shared)
        return replace(
            self,
            query=self.query.index_select(-3, chosen),
            key=key,
            new=None if self.new is None or groups == 1 else self.new.index_select(-3, shared),
            sink=self.sink if self.sink is None or self.sink.numel() == 1 else self.sink[chosen],
            rows=None if self.rows is None else Rows(*(pick(part) for part in self.rows)),  # type: ignore[arg-type]
            biases=tuple(b if (p := pick(b)) is None else p for b in self.biases),
        )


def _nothing() -> tuple[Tensor, Tensor]:
    return torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long)


def _mask(rows: Rows) -> Mask:
    ranges = Ranges(rows.start, rows.stop)
    return ranges if rows.allowed is None else ranges & as_mask(rows.allowed)


def _problem(kept: CapturedCall) -> Problem:
    """The problem of kept weights, made when somebody looks."""
    query, mask, biases = kept.query, None, kept.biases
    if kept.rows is not None:
        rows = kept.rows
        mask = _mask(rows)
        if rows.bias is not None:
            biases = (*biases, rows.bias.to(query.dtype))
        if rows.dark is not None:
            query = query * ~rows.dark  # equal scores everywhere
    normalize: Normalizer = Softmax() if kept.sink is None else Softmax1(kept.sink.detach())
    call = Call(ScaledDot(kept.scale, kept.softcap), mask, biases or None, normalize, 0.0, None)
    layout = Layout.of(query, kept.key, kept.key)
    with torch.no_grad():
        problem = prepare(query, kept.key, kept.key[..., :1], layout, call).without("value")
    able = fused.refusal(normalize, problem["query"].dtype, query.device) is None
    # nobody has computed τ, and whoever needs it computes it: this says its size
    size = (*layout.batch, layout.groups, layout.per_group, query.shape[-2], 2)
    unknown = problem["query"].new_full((1,), math.nan).expand(size)
    return problem.with_rules(fused=able).with_tensors({**problem.tensors, "tau": unknown})


def keep_key(key: Tensor) -> Tensor:
    """The key, copied if it lies in a buffer that was written to before, as that of a static cache is."""
    key = key.detach()
    uncounted = key.is_inference()  # of changes
    return key.clone() if uncounted or key._version > 0 else key


# Masks


class MaskReader:
    """Makes rows of masks, and remembers what it made of a mask: all layers of a model share one.

    >>> import torch
    >>> from regard.inspection.capture import MaskReader
    >>> MaskReader().read(torch.ones(3, 3, dtype=torch.bool).tril()).stop.squeeze()
    tensor([1, 2, 3])
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], Any, Rows]] = {}

    def read(self, mask: Tensor, keys: int | None = None) -> Rows:
        """Rows of a mask (…, q, k), boolean with True = may look, or numbers to add to the scores."""
        mask = mask.detach() if mask.requires_grad else mask
        counted = not mask.is_inference()  # what may have changed unnoticed is read anew
        state = (mask._version if counted else None, tuple(mask.shape), keys)
        known = self._known.get(id(mask)) if counted else None
        if known is not None and known[0]() is mask and known[1] == state:
            return known[2]
        cut = mask if keys is None or mask.shape[-1] in (1, keys) else mask[..., :keys]
        found = _rows(
            cut.detach()
        )  # rows may keep what they are given, and must not keep the mask itself alive
        if counted:
            self._known[id(mask)] = (weakref.ref(mask, partial(_forget, self._known, id(mask))), state, found)
        return found


def _forget(
    known: dict[int, tuple["weakref.ref[Tensor]", Any, Rows]], number: int, mask: "weakref.ref[Tensor]"
) -> None:
    """Let the rows of a mask go with the mask, unless another mask has its number by now."""
    if number in known and known[number][0] is mask:
        del known[number]


def _rows(mask: Tensor) -> Rows:
    if mask.dim() < 2:
        mask = torch.atleast_2d(mask)
    allowed, finite = mask, False
    if mask.dtype is not torch.bool:
        if not mask.is_floating_point():
            return _rows(mask != 0)
        low = torch.finfo(mask.dtype).min
        plain, finite = _plain(mask, low)
        if not plain:
            ends = _everything(mask)
            return Rows(*ends, bias=mask)
        allowed = mask == 0
    found = intervals(allowed)
    if found is None:
        start, stop = _everything(allowed)
        dark = ~allowed.any(-1, keepdim=True) if finite else None
        if dark is not None and bool(dark.any()):
            return Rows(start, stop, allowed | dark, dark=dark)
        return Rows(start, stop, allowed)
    start, stop = found
    dark = start >= stop if finite else None
    if dark is None or not bool(dark.any()):
        return Rows(start, stop)
    return Rows(start.masked_fill(dark, 0), stop.masked_fill(dark, allowed.shape[-1]), dark=dark)


def _everything(mask: Tensor) -> tuple[Tensor, Tensor]:
    start = torch.zeros(1, 1, dtype=torch.long, device=mask.device)
    return start, start + (mask.shape[-1] if mask.shape[-1] > 1 else 2**40)


def _plain(mask: Tensor, low: float) -> tuple[bool, bool]:
    """Whether an additive mask only hides keys; and whether by a number that is finite."""
    finite = False
    for part in _pieces(mask):
        hidden = part <= low / 2
        if not bool((hidden | (part == 0)).all()):
            return False, False
        finite = finite or bool((hidden & torch.isfinite(part)).any())
    return True, finite


def _pieces(mask: Tensor) -> list[Tensor]:
    """A mask in blocks of rows, so that what is computed of it is small."""
    flat = mask.flatten(0, -2) if mask.dim() > 2 else mask
    return list(flat.split(max(_CHUNK // max(flat.shape[-1], 1), 1)))


def intervals(allowed: Tensor) -> tuple[Tensor, Tensor] | None:
    """Start and stop of the keys that each row sees, (…, q, 1), if they are neighbours in every row.

    >>> import torch
    >>> from regard.inspection.capture import intervals
    >>> [side.squeeze(-1).tolist() for side in intervals(torch.tensor([[True, True, False], [False] * 3]))]
    [[0, 0], [2, 0]]
    >>> intervals(torch.tensor([[True, False, True]])) is None
    True
    """
    if allowed.shape[-1] == 0:
        return None
    if allowed.shape[-1] == 1:  # it serves all keys alike
        start = torch.zeros_like(allowed, dtype=torch.long)
        return start, torch.where(allowed, 2**40, 0)
    starts, stops = [], []
    for part in _pieces(allowed):
        count = part.sum(-1, keepdim=True)
        start = part.view(torch.uint8).argmax(-1, keepdim=True)
        begins = (part[:, 1:] & ~part[:, :-1]).sum(-1, keepdim=True) + part[:, :1]
        if bool((begins > 1).any()):
            return None
        starts.append(start)
        stops.append(start + count)
    shape = (*allowed.shape[:-1], 1)
    return torch.cat(starts).reshape(shape), torch.cat(stops).reshape(shape)


def causal_rows(queries: int, keys: int, device: torch.device, align: str = "start") -> Rows:
    """No looking ahead: the first query sees the first key, or with "end" the last one the last."""
    place = torch.arange(queries, device=device)[:, None] + (0 if align == "start" else keys - queries)
    return Rows(torch.zeros_like(place), (place + 1).clamp(0, keys))


def meet(first: Rows | None, second: Rows | None) -> Rows | None:
    """What both let through."""
    if first is None or second is None:
        return first if second is None else second
    allowed = [rows.allowed for rows in (first, second) if rows.allowed is not None]
    bias = [rows.bias for rows in (first, second) if rows.bias is not None]
    return Rows(
        torch.maximum(first.start, second.start),
        torch.minimum(first.stop, second.stop),
        None if not allowed else allowed[0] if len(allowed) == 1 else allowed[0] & allowed[1],
        None if not bias else bias[0] if len(bias) == 1 else bias[0] + bias[1],
    )
