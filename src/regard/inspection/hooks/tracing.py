"""Follow the torch functions that a watched model calls, to find attention that no other hook reports.

`Tracer` is a TorchFunctionMode: it intercepts every call to a torch function in its thread, no matter
under which name the function was imported. It reports calls to torch's attention functions, and attention in
plain tensor operations (`handwritten`). The weights of the latter are lazy if query, key and masks reproduce
them on a few rows, and dense otherwise. The functions run unchanged.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from regard.errors import ArgumentError
from regard.inspection.calls.capture import CapturedCall, dense_call
from regard.inspection.calls.windows import add_window_positions
from regard.inspection.hooks import interception
from regard.inspection.hooks.functional_calls import capture_flex, capture_sdpa
from regard.inspection.hooks.handwritten.chains import Chains
from regard.inspection.hooks.handwritten.merged_heads import split_heads
from regard.inspection.hooks.handwritten.operations import Operation, Softmaxed
from regard.inspection.hooks.handwritten.products import Values, values
from regard.inspection.hooks.handwritten.scores import Scores
from regard.inspection.hooks.interception import (
    Function,
    inside_attention,
    is_observed,
    located,
    observed_module,
    records_values,
    report,
)
from regard.inspection.hooks.token_tracker import TokenTracker
from regard.inspection.hooks.torch_layers import capture_multihead_function
from regard.inspection.measures.call_record import AttentionOutput


class Tracer(TorchFunctionMode):
    """Reports the attention calls of one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.chains = Chains(self._on_product, _on_softmax)
        self._reported: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # weights that were reported

    @property
    def tokens(self) -> TokenTracker | None:
        """The tracker of the activations' tokens; None unless a model with windows is observed."""
        return self.chains.tokens

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, function_name(func)
        if not is_observed():
            return func(*args, **kwargs)
        handler = _CALLS.get(name)
        if handler is not None:
            return handler(func, args, kwargs)
        output = self.chains.call(name, func, args, kwargs)
        if self.tokens is not None:
            self.tokens.follow(name, func, args, kwargs, output)
        return output

    def _on_product(self, operation: Operation, node: Softmaxed) -> Any:
        """Report a product of weights and values; return its output unchanged."""
        module, frame = observed_module()
        if module is None or any(weights in self._reported for weights in node.copies()):
            return operation.output
        for weights in node.copies():
            self._reported[weights] = True
        if self.tokens is not None and node.tokens is not None and node.order == "same":
            self.tokens.set_output(operation.output, node.tokens[0], -3)
        product = values(operation, node) if records_values() else None
        report(module, lambda: _capture(node, product, module, frame))
        for other in node.others:
            report(module, lambda other=other: _capture(other, None, module, frame))  # type: ignore[misc]
        return operation.output

    def clear(self) -> None:
        """Forget all tensors."""
        self.chains.clear()
        self._reported.clear()


def function_name(func: Any) -> str:
    """Return the name of a torch function, or of the property that it gets, such as x.mT."""
    name = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", "") if name == "__get__" else name


def _on_softmax(pools: bool) -> None:
    """Report to the observers which module computed a softmax that does not belong to a chain."""
    module, _ = observed_module()
    for observer in interception.THREAD.observers:
        if module is not None and module in observer.names:
            observer.on_softmax(module, pools)


_BLOCK_SPARSE = (
    "block-sparse attention computes its weights in pieces: a row of random, local and global blocks has no "
    'single softmax. Use full attention, which attends to all tokens: attention_type="original_full" in the '
    "config"
)


def _capture(node: Softmaxed, product: Values | None, module: nn.Module, frame: Any) -> CapturedCall:
    if type(module).__name__.endswith("BlockSparseAttention"):  # BigBird
        raise ArgumentError(_BLOCK_SPARSE)
    heads = head_count(module)
    node = checked_heads(node, heads)
    if node.heads_first is not None:
        scores = None if node.scores is None else node.scores.with_heads_first(node.heads_first.heads)
        weights = split_heads(node.weights, node.heads_first.heads)
    else:
        scores = None if node.scores is None else _scores_with_heads(node.scores, heads)
        weights = with_heads(node.weights, heads)
    call = None if scores is None else scores.captured(heads)
    if call is None:
        call = dense_call(weights)
    call = add_window_positions(call, node.tokens)
    product = None if has_swapped_heads(node, heads) else product
    return located(call if product is None else _with_values(call, node, product), module, frame)


def _with_values(call: CapturedCall, node: Softmaxed, product: Values) -> CapturedCall:
    """Add values and output to a call, with the leading axes of its query."""
    size, queries = call.query.shape[:-2], call.query.shape[-2]
    value = values_in(size, queries, node, product)
    if value is None:
        return call
    value, width = value.detach(), value.shape[-1]

    def heads(gradient: Tensor) -> Tensor:
        gradient = product.heads(gradient)
        if node.heads_first is not None:
            return split_heads(gradient, node.heads_first.heads)
        return gradient.reshape(*size, queries, width)

    heads_width = (size[-1] if size else 1) * width
    return replace(call, value=value, output=AttentionOutput(product.output, heads, heads_width))


def values_in(size: torch.Size, queries: int, node: Softmaxed, product: Values) -> Tensor | None:
    """Return the values with leading axes `size`: those of the weights, after splitting or merging axes.

    Returns None if the heads were moved or swapped with the queries.
    """
    *lead, rows, _ = node.weights.shape
    value = product.value
    if math.prod(size) != math.prod(lead) or queries != rows:
        return None
    if node.heads_first is not None:
        return split_heads(value.expand(*lead, *value.shape[-2:]), node.heads_first.heads)
    if list(size) != lead and sorted(size) == sorted(lead):  # permuted
        return None
    if list(size) == lead:  # heads may share values
        return value.expand(*lead[:-1], *value.shape[-3:]) if lead else value
    return value.expand(*lead, *value.shape[-2:]).reshape(*size, *value.shape[-2:])


def head_count(module: nn.Module) -> int | None:
    for name in ("num_heads", "num_attention_heads", "n_heads", "heads", "n_head", "nhead"):
        if type(count := getattr(module, name, None)) is int and count > 0:
            return count
    return None


def checked_heads(node: Softmaxed, heads: int | None) -> Softmaxed:
    """Assume that the first axis is b·h, not h·b, if the module has a different number of heads."""
    first = node.heads_first
    return node if first is None or first.agrees_with(heads) else replace(node, heads_first=None)


def head_order(lead: Sequence[int], heads: int | None, hint: int | None = None) -> list[int] | None:
    """Return the order of leading axes that puts the heads last; None if they are last or unknown.

    If several axes have size `heads`, `hint` selects one of them. Without a hint, the last one is used,
    because the batch usually comes first.

    >>> from regard.inspection.hooks.tracing import head_order
    >>> head_order((4, 2, 3), 4), head_order((2, 4), 4), head_order((4, 4, 2), 4), head_order((4, 4), 4, 0)
    ([1, 2, 0], None, [0, 2, 1], [1, 0])
    """
    matching = [axis for axis, size in enumerate(lead) if size == heads]
    if len(lead) < 2 or not matching:
        return None
    axis = hint if hint in matching else matching[-1]
    order = [other for other in range(len(lead)) if other != axis] + [axis]
    return None if axis == len(lead) - 1 else order


def has_swapped_heads(node: Softmaxed, heads: int | None) -> bool:
    """Return whether the sizes of the leading axes alone would select the wrong axis as the heads axis."""
    lead, scores = node.weights.shape[:-2], node.scores
    if scores is None or scores.lead != tuple(lead):
        return False
    return head_order(lead, heads, scores.head_axis) != head_order(lead, heads)


def _scores_with_heads(scores: Scores, heads: int | None) -> Scores | None:
    order = head_order(scores.lead, heads, scores.head_axis)
    if order is None:
        return scores
    count = len(order)
    return scores.permuted([*order, count, count + 1])


def with_heads(weights: Tensor, heads: int | None) -> Tensor:
    """Return weights (…, h, q, k): split b·h, swap heads and queries, or move the heads from another axis."""
    if heads is None or weights.dim() < 3:
        return weights
    if (order := head_order(weights.shape[:-2], heads)) is not None and weights.shape[-2] != heads:
        return weights.permute(*order, -2, -1)
    if weights.dim() == 3 and weights.shape[0] % heads == 0:
        return weights.unflatten(0, (-1, heads))
    if weights.dim() == 4 and weights.shape[-3] != heads and weights.shape[-2] == heads:
        return weights.transpose(-3, -2)
    return weights


# Attention functions


def _reports(capture: Callable[..., CapturedCall | None]) -> Callable[[Function, Any, Any], Any]:
    """Return a handler that calls an attention function and reports capture(output, *arguments)."""

    def handler(func: Function, args: Any, kwargs: Any) -> Any:
        with inside_attention():
            output = func(*args, **kwargs)
        module, frame = observed_module()
        tracker = interception.THREAD.tracer.tokens
        if tracker is not None and isinstance(output, Tensor):
            tracker.set_output(output, _query_and_key(args, kwargs)[0], -3)
        if module is not None:

            def captured() -> CapturedCall | None:
                call = capture(output, *args, **kwargs)
                if call is None:
                    return None
                tokens = None if tracker is None else tracker.pair(*_query_and_key(args, kwargs))
                return located(add_window_positions(call, tokens), module, frame)

            report(module, captured)
        return output

    return handler


def _query_and_key(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the first two arguments of an attention function, which may be passed by name."""
    query, key = (args[i] if len(args) > i else kwargs.get(name) for i, name in enumerate(("query", "key")))
    return query, key


_CALLS: dict[str, Callable[[Function, Any, Any], Any]] = {
    "scaled_dot_product_attention": _reports(capture_sdpa),
    "flex_attention": _reports(capture_flex),
    "multi_head_attention_forward": _reports(capture_multihead_function),
}
