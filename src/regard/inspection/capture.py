"""Captured attention calls: query, key and options of another library's call, in linear memory.

A mask whose rows each allow an interval of keys is stored as two numbers per row, any other mask as it is.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from regard.errors import ArgumentError
from regard.mechanism.call.arguments import Call, prepare
from regard.mechanism.call.layout import Layout
from regard.mechanism.call.problem import Problem
from regard.mechanism.mask_algebra import BUILT_IN, CallShape, Mask, MaskTerm, as_mask
from regard.mechanism.normalizers import Normalizer, Softmax, Softmax1
from regard.mechanism.scores import ScaledDot
from regard.mechanism.weights.matrix import Weights

AttentionKind = Literal["self", "cross"]
_CHUNK = 2**24  # mask entries processed at a time


class Intervals(Mask):
    """One interval of keys per row: start and stop broadcast to (…, q, 1).

    >>> import torch
    >>> from regard.inspection.capture import Intervals
    >>> print(Intervals(torch.tensor([[0], [1]]), torch.tensor([[1], [3]])).draw(2, 3))
    ■··
    ·■■
    """

    def __init__(self, start: Tensor, stop: Tensor) -> None:
        self.start, self.stop = start, stop

    def terms(self, call_shape: CallShape) -> tuple[MaskTerm, ...]:
        return (
            MaskTerm(
                self.start.to(call_shape.device), self.stop.to(call_shape.device).clamp(max=call_shape.keys)
            ),
        )


BUILT_IN.add(Intervals)  # not copied: all layers of a model share them


class RowMask(NamedTuple):
    """A mask by rows: an interval of keys (…, q, 1), and `allowed` and `bias` (…, q, k) where needed.

    uniform: rows that a finite additive mask hides entirely. Softmax makes their weights uniform.
    """

    start: Tensor
    stop: Tensor
    allowed: Tensor | None = None
    bias: Tensor | None = None
    uniform: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> "RowMask":
        """Apply a function to every tensor."""
        return RowMask(*(None if tensor is None else function(tensor) for tensor in self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class CapturedCall:
    """One attention call: query (b, h, q, d), key (b, g, k, d), and everything else its weights depend on."""

    query: Tensor
    key: Tensor
    scale: float | None = None
    softcap: float | None = None
    sink: Tensor | None = None
    mask: RowMask | None = None  # None: every query attends to every key
    biases: tuple[Tensor, ...] = ()
    kind: AttentionKind = "self"
    new_keys: Tensor | None = None  # the keys that this call added to a cache
    cached: bool = False

    def weights(self) -> Weights:
        """Return the lazy weights."""
        options = {} if self.mask is None else {"mask": self.mask.allowed, "bias": self.mask.bias}
        options |= {"sink": self.sink}
        options |= {f"bias{number}": bias for number, bias in enumerate(self.biases, 1)}
        inputs = {"query": self.query, "key": self.key}
        inputs |= {name: tensor for name, tensor in options.items() if tensor is not None}
        lead = Layout.of(self.query, self.key, self.key).lead
        return Weights(partial(_problem, self), None, lead, inputs=inputs)

    def detached(self) -> "CapturedCall":
        """Return the call with tensors that later steps do not overwrite; see `unshared_key`."""
        query = self.query.clone() if self.query.is_inference() else self.query
        return replace(self, query=query, key=unshared_key(self.key), new_keys=None)

    def select_heads(self, heads: Sequence[int]) -> "CapturedCall":
        """Keep some heads and drop the tensors of the others."""
        count, groups = self.query.shape[-3], self.key.shape[-3]
        if wrong := [head for head in heads if not -count <= head < count]:
            raise ArgumentError(
                f"watch(heads={list(heads)}): head {wrong[0]} is out of range; this layer has heads 0 to "
                f"{count - 1}."
            )
        index = torch.tensor([range(count)[head] for head in heads], device=self.query.device)
        key_index = index // (count // groups)

        def select(x: Tensor) -> Tensor:
            return x if x.dim() < 3 or x.shape[-3] == 1 else x.index_select(-3, index)

        def select_keys(x: Tensor) -> Tensor:
            return x if groups == 1 else x.index_select(-3, key_index)

        return replace(
            self,
            query=self.query.index_select(-3, index),
            key=select_keys(self.key),
            new_keys=None if self.new_keys is None else select_keys(self.new_keys),
            sink=self.sink if self.sink is None or self.sink.numel() == 1 else self.sink[index],
            mask=None if self.mask is None else self.mask.map(select),
            biases=tuple(map(select, self.biases)),
        )


def _problem(call: CapturedCall) -> Problem:
    """Prepare the problem of captured weights, on their first use."""
    query, biases = call.query, call.biases
    mask: Mask | None = None
    if call.mask is not None:
        mask = Intervals(call.mask.start, call.mask.stop)
        if call.mask.allowed is not None:
            mask = mask & as_mask(call.mask.allowed)
        if call.mask.bias is not None:
            biases = (*biases, call.mask.bias.to(query.dtype))
        if call.mask.uniform is not None:
            query = query * ~call.mask.uniform  # equal scores
    normalize: Normalizer = Softmax() if call.sink is None else Softmax1(call.sink.detach())
    arguments = Call(ScaledDot(call.scale, call.softcap), mask, biases or None, normalize, 0.0, None)
    layout = Layout.of(query, call.key, call.key)
    with torch.no_grad():
        problem = prepare(query, call.key, call.key[..., :1], layout, arguments).without("value")
    # τ is unknown (NaN) and computed on first use; here it only has its shape
    size = (*layout.batch, layout.groups, layout.per_group, query.shape[-2], 2)
    unknown = problem["query"].new_full((1,), math.nan).expand(size)
    return problem.with_config(fused=True).with_tensors({**problem.tensors, "tau": unknown})


def unshared_key(key: Tensor) -> Tensor:
    """Return the key, cloned if it is a buffer that is written to, as in a static cache."""
    key = key.detach()
    # inference tensors have no version counter
    return key.clone() if key.is_inference() or key._version > 0 else key


# Masks


class MaskReader:
    """Converts masks to `RowMask`, and caches the results: all layers of a model share one mask.

    >>> import torch
    >>> from regard.inspection.capture import MaskReader
    >>> MaskReader().read(torch.ones(3, 3, dtype=torch.bool).tril()).stop.squeeze()
    tensor([1, 2, 3])
    """

    def __init__(self) -> None:
        self._cache: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def read(self, mask: Tensor, keys: int | None = None) -> RowMask:
        """Convert a mask (…, q, k): boolean, True = may attend; or numbers that are added to the scores."""
        mask = mask.detach() if mask.requires_grad else mask
        if mask.is_inference():  # no version counter: it may have changed since
            return _row_mask(mask, keys)
        state = mask._version, tuple(mask.shape), keys
        cached: tuple[Any, RowMask] | None = self._cache.get(mask)
        if cached is None or cached[0] != state:
            # detached: a result that holds the mask itself would keep its cache entry alive
            self._cache[mask] = cached = (state, _row_mask(mask.detach(), keys))
        return cached[1]


def _row_mask(mask: Tensor, keys: int | None) -> RowMask:
    if keys is not None and mask.shape[-1] not in (1, keys):
        mask = mask[..., :keys]
    mask = torch.atleast_2d(mask)
    finite = False
    if mask.is_floating_point():
        only_hides, finite = additive_kind(mask)
        if not only_hides:
            return RowMask(*_all_keys(mask), bias=mask)
        mask = mask == 0
    allowed = mask if mask.dtype is torch.bool else mask != 0
    start, stop = _intervals(allowed) or (None, None)
    if start is None or stop is None:
        hidden = ~allowed.any(-1, keepdim=True)
        ends = _all_keys(allowed)
        if finite and bool(hidden.any()):
            return RowMask(*ends, allowed | hidden, uniform=hidden)
        return RowMask(*ends, allowed)
    hidden = start >= stop
    if not finite or not bool(hidden.any()):
        return RowMask(start, stop)
    return RowMask(start.masked_fill(hidden, 0), stop.masked_fill(hidden, allowed.shape[-1]), uniform=hidden)


def _all_keys(mask: Tensor) -> tuple[Tensor, Tensor]:
    start = torch.zeros(1, 1, dtype=torch.long, device=mask.device)
    return start, start + (mask.shape[-1] if mask.shape[-1] > 1 else 2**40)


def _intervals(allowed: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return start and stop of each row, (…, q, 1), if no row has gaps."""
    if allowed.shape[-1] == 0:
        return None
    if allowed.shape[-1] == 1:  # broadcast over all keys
        return torch.zeros_like(allowed, dtype=torch.long), torch.where(allowed, 2**40, 0)
    start, stop, exact = key_intervals(allowed.cpu().numpy())
    ends = (torch.from_numpy(end)[..., None].to(allowed.device) for end in (start, stop))
    return (next(ends), next(ends)) if exact else None


def key_intervals(allowed: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64], bool]:
    """Return the smallest interval that holds each row's allowed keys, and whether no row has gaps.

    Rows without keys have the interval (0, 0).

    >>> import numpy as np
    >>> from regard.inspection.capture import key_intervals
    >>> start, stop, exact = key_intervals(np.array([[True, True, False], [False, False, False]]))
    >>> start.tolist(), stop.tolist(), exact
    ([0, 0], [2, 0], True)
    """
    start = allowed.argmax(-1)
    any_key = np.take_along_axis(allowed, start[..., None], -1)[..., 0]
    stop = np.where(any_key, allowed.shape[-1] - allowed[..., ::-1].argmax(-1), 0)
    return start, stop, int((stop - start).sum()) == int(np.count_nonzero(allowed))


def additive_kind(mask: Tensor) -> tuple[bool, bool]:
    """Return whether an additive mask only hides keys, and whether it does so with finite numbers."""
    finite, lowest = False, torch.finfo(mask.dtype).min
    rows = mask.flatten(0, -2)
    for part in rows.split(max(_CHUNK // max(rows.shape[-1], 1), 1)):
        hidden = part <= lowest / 2
        if not bool((hidden | (part == 0)).all()):
            return False, False
        finite = finite or bool((hidden & torch.isfinite(part)).any())
    return True, finite


def causal_mask(queries: int, keys: int, device: torch.device, align: str = "start") -> RowMask:
    """Return a causal mask, aligned to the first key ("start") or the last one ("end")."""
    position = torch.arange(queries, device=device)[:, None] + (0 if align == "start" else keys - queries)
    return RowMask(torch.zeros_like(position), (position + 1).clamp(0, keys))


def intersect(first: RowMask | None, second: RowMask | None) -> RowMask | None:
    """Return the keys that both masks allow, with the sum of their biases."""
    if first is None or second is None:
        return first if second is None else second
    allowed = [mask.allowed for mask in (first, second) if mask.allowed is not None]
    bias = [mask.bias for mask in (first, second) if mask.bias is not None]
    return RowMask(
        torch.maximum(first.start, second.start),
        torch.minimum(first.stop, second.stop),
        None if not allowed else allowed[0] if len(allowed) == 1 else allowed[0] & allowed[1],
        None if not bias else bias[0] if len(bias) == 1 else bias[0] + bias[1],
    )
