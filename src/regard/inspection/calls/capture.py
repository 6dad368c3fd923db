"""Captured attention calls: query, key and options of another library's call, in linear memory.

A mask that allows one interval of keys per row is stored as two numbers per row; other masks stay dense.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from regard.inspection.calls.mask_reading import Intervals, RowMask, key_intervals
from regard.inspection.layers import head_numbers
from regard.inspection.measures.call_record import AttentionOutput
from regard.mechanism.call.arguments import Call, Layout, prepare
from regard.mechanism.call.problem import Problem
from regard.mechanism.masks.algebra import Mask, as_mask
from regard.mechanism.normalizers import Normalizer, Relu, Softmax, Softmax1
from regard.mechanism.scores import ScaledDot
from regard.mechanism.weights.weights import Weights

AttentionKind = Literal["self", "cross"]


class WindowPositions(NamedTuple):
    """Token indices in each window, counted across the batch: queries (w, q), keys (w, k); −1 for padding."""

    queries: Tensor
    keys: Tensor
    batch: int
    tokens: int

    def scatter_queries(self, x: Tensor) -> Tensor:
        """Move query rows (w, h, q, e) to the positions of their tokens: (b, h, tokens, e)."""
        return self._scatter(x, self.queries)

    def scatter_keys(self, x: Tensor) -> Tensor:
        """Move key rows (w, h, k, e) to the positions of their tokens: (b, h, tokens, e)."""
        return self._scatter(x, self.keys)

    def _scatter(self, x: Tensor, rows: Tensor) -> Tensor:
        heads, width = x.shape[-3], x.shape[-1]
        result = x.new_zeros(self.batch * self.tokens, heads, width)
        valid = (rows >= 0).flatten()
        result[rows.flatten()[valid]] = x.transpose(-3, -2).reshape(-1, heads, width)[valid]
        return result.unflatten(0, (self.batch, self.tokens)).transpose(1, 2)


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
    dense: bool = False  # True: weights = biases[0] / (number of visible keys); query and key are empty
    value: Tensor | None = None  # b g k e
    output: AttentionOutput | None = None  # not detached: its gradient may be recorded
    windows: WindowPositions | None = None  # set if the batch entries are windows of larger images

    def weights(self) -> Weights:
        """Return the lazy weights."""
        lead = Layout.of(self.query, self.key, self.key).lead
        return Weights(partial(_problem, self), None, lead, inputs=self.inputs())

    def inputs(self) -> dict[str, Tensor]:
        """Return the tensors from which the weights are computed, by name."""
        options = {} if self.mask is None else {"mask": self.mask.allowed, "bias": self.mask.bias}
        options |= {"sink": self.sink}
        options |= {f"bias{number}": bias for number, bias in enumerate(self.biases, 1)}
        inputs = {"query": self.query, "key": self.key}
        return inputs | {name: tensor for name, tensor in options.items() if tensor is not None}

    def detached(self) -> "CapturedCall":
        """Copy the tensors that later steps may overwrite, as in a static cache."""
        query, key = self.query, self.key.detach()
        query = query.clone() if query.is_inference() else query  # inference tensors have no version counter
        key = key.clone() if key.is_inference() or key._version > 0 else key
        value = self.value
        if value is not None and (value.is_inference() or value._version > 0):
            value = value.clone()
        return replace(self, query=query, key=key, value=value, new_keys=None)

    def select_heads(self, heads: Sequence[int]) -> "CapturedCall":
        """Keep only the tensors of the given heads."""
        count = self.query.shape[-3]
        index = torch.tensor(head_numbers("watch", heads, count), device=self.query.device)

        def select(x: Tensor) -> Tensor:
            return x if x.dim() < 3 or x.shape[-3] == 1 else x.index_select(-3, index)

        def select_keys(x: Tensor) -> Tensor:
            groups = x.shape[-3]
            return x if groups == 1 else x.index_select(-3, index // (count // groups))

        return replace(
            self,
            query=self.query.index_select(-3, index),
            key=select_keys(self.key),
            value=None if self.value is None else select_keys(self.value),
            new_keys=None if self.new_keys is None else select_keys(self.new_keys),
            sink=self.sink if self.sink is None or self.sink.numel() == 1 else self.sink[index],
            mask=None if self.mask is None else self.mask.map(select),
            biases=tuple(map(select, self.biases)),
        )


def dense_call(weights: Tensor, kind: AttentionKind = "self") -> CapturedCall:
    """Return a call that stores dense weights (…, q, k), for attention whose query and key are unknown.

    >>> import torch
    >>> from regard.inspection.calls.capture import dense_call
    >>> dense_call(torch.tensor([[0.25, 0.75]])).weights().dense()
    tensor([[0.2500, 0.7500]])
    """
    weights = weights.detach()
    query = weights.new_empty(*weights.shape[:-1], 0)
    key = weights.new_empty(*weights.shape[:-2], weights.shape[-1], 0)
    if not weights.shape[-1] or weights.is_meta:
        return CapturedCall(query, key, biases=(weights * weights.shape[-1],), kind=kind, dense=True)
    start, stop, _ = key_intervals((weights != 0).cpu().numpy())  # zeros inside the interval stay zeros
    ends = (torch.from_numpy(end)[..., None].to(weights.device) for end in (start, stop))
    mask = RowMask(*ends)
    visible = mask.stop - mask.start
    return CapturedCall(query, key, mask=mask, biases=(weights * visible,), kind=kind, dense=True)


def _problem(call: CapturedCall) -> Problem:
    """Build the problem for captured weights, on first use."""
    query, biases = call.query, call.biases
    mask: Mask | None = None
    if call.mask is not None:
        stop, uniform = call.mask.stop, call.mask.uniform
        if uniform is not None and call.sink is not None:  # the sink receives all the weight of the row
            stop = torch.where(uniform, 0, stop)
        mask = Intervals(call.mask.start, stop)
        if call.mask.allowed is not None:
            mask = mask & as_mask(call.mask.allowed)
        if call.mask.bias is not None:
            biases = (*biases, call.mask.bias.to(query.dtype))
        if uniform is not None and call.sink is None:
            query = query * ~uniform  # zero queries give equal scores
    normalize: Normalizer = Softmax() if call.sink is None else Softmax1(call.sink.detach())
    if call.dense:
        normalize = Relu()  # max(x, 0) / n
    arguments = Call(ScaledDot(call.scale, call.softcap), mask, biases or None, normalize)
    with torch.no_grad():
        return lazy_problem(query, call.key, arguments)


def lazy_problem(query: Tensor, key: Tensor, arguments: Call) -> Problem:
    """Build a problem without a value; τ is computed on first use."""
    layout = Layout.of(query, key, key)
    problem = prepare(query, key, key[..., :1], layout, arguments).without("value")
    # τ is unknown (NaN); only its shape is known
    size = (*layout.batch, layout.groups, layout.per_group, query.shape[-2], 2)
    unknown = problem["query"].new_full((1,), math.nan).expand(size)
    return problem.with_config(fused=True).with_tensors({**problem.tensors, "tau": unknown})
