"""Follow the torch functions that a watched model calls, to see attention that no other hook reports.

`Tracer` is a TorchFunctionMode: it sees every call of a torch function in its thread, by whichever name
the function was imported. It reports SDPA, FlexAttention, and attention written by hand: query · keyᵀ,
then scale, masks, biases and reshapes, then softmax, then the product with the values. The functions run
unchanged.

Each tensor of such a chain has a node: `Scores` while all operations are understood, `UNKNOWN` afterwards,
and `Softmaxed` after the softmax. A product with a `Softmaxed` tensor is an attention call. Its weights are
lazy if query, key and masks reproduce them, which is checked on a few rows, and dense otherwise.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from regard.errors import ArgumentError
from regard.inspection.capture import CapturedCall, dense_call
from regard.inspection.hooks import interception
from regard.inspection.hooks.interception import (
    Function,
    inside_attention,
    is_observed,
    located,
    observed_module,
    records_values,
    report,
)
from regard.inspection.hooks.operations import (
    UNKNOWN,
    Node,
    Operation,
    Softmaxed,
    SoftmaxedAxis,
    version_of,
)
from regard.inspection.hooks.products import Values, product, values, weights_of
from regard.inspection.hooks.score_chain import Scores
from regard.inspection.hooks.sdpa_calls import capture_flex, capture_sdpa
from regard.inspection.hooks.tokens import Tokens, TokenTracker, tensors
from regard.inspection.hooks.torch import capture_multihead_function
from regard.inspection.measures.record import AttentionOutput
from regard.inspection.windows import in_windows
from regard.mechanism.torch_state import concrete

_CHECKED_ROWS = 4  # rows of lazy weights that are compared with the model's own
_TOLERANCE = 1e-5


class Tracer(TorchFunctionMode):
    """Reports the attention calls of one thread."""

    def __init__(self) -> None:
        super().__init__()
        self._nodes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # tensor → node, version
        self._reported: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # weights that were reported
        self.tokens: TokenTracker | None = None  # while a model with windows is observed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":  # a property, such as x.mT
            name = getattr(func.__self__, "__name__", "")
        output = self._called(name, func, args, kwargs)
        if self.tokens is not None and is_observed():
            self.tokens.follow(name, func, args, kwargs, output)
        return output

    def _called(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function, and report the attention that it computes."""
        handler = _CALLS.get(name)
        if handler is not None and is_observed():
            return handler(func, args, kwargs)
        rule = _RULES.get(name)
        if rule is None or not (self._nodes or rule in (product, _softmax)) or not is_observed():
            return func(*args, **kwargs)
        operands = tensors(args) + tensors(tuple(kwargs.values()))
        nodes = [self._node(operand) for operand in operands]
        output = func(*args, **kwargs)
        if rule is _softmax and not any(nodes):
            _note_softmax()
        if rule is product or any(node is not None for node in nodes):
            with torch.no_grad():
                self._follow(Operation(name, args, kwargs, operands, nodes, output), rule)
        return output

    def _node(self, x: Tensor) -> Node | None:
        node, version = self._nodes.get(x, (None, 0))
        if node is None or version == version_of(x):
            return node
        return Softmaxed(None, x.detach()) if isinstance(node, Softmaxed) else UNKNOWN  # modified in place

    def _follow(self, operation: "Operation", rule: "Rule") -> None:
        """Set the node of an operation's output, and report a product with weights."""
        if rule is product:
            weights = next(filter(None, (_weights(operation, node) for node in operation.nodes)), None)
            if weights is not None:
                return self._report(operation, weights)
        try:
            node = rule(operation)
        except (RuntimeError, ValueError, TypeError, IndexError):  # a form of the call that is not followed
            node = None if rule is product else operation.unfollowed()
        if rule is product and isinstance(node, Scores) and self.tokens is not None:
            node = replace(node, tokens=self._product_tokens(operation))
        outputs = operation.args[0] if operation.name == "__setitem__" else operation.output
        for output in tensors(outputs):
            if node is not None and output.is_floating_point():
                self._nodes[output] = node, version_of(output)
            else:
                self._nodes.pop(output, None)

    def _report(self, operation: Operation, node: Softmaxed) -> None:
        module, frame = observed_module()
        if module is None or any(weights in self._reported for weights in node.copies()):
            return
        for weights in node.copies():
            self._reported[weights] = True
        if self.tokens is not None and node.tokens is not None and node.order == "same":
            self.tokens.set_output(operation.output, node.tokens[0], -3)
        found = values(operation, node) if records_values() else None
        report(module, lambda: _capture(node, found, module, frame))

    def _product_tokens(self, operation: Operation) -> tuple[Tokens, Tokens] | None:
        """Return the tokens of query and key in query · keyᵀ."""
        assert self.tokens is not None
        if operation.name != "matmul" or len(operation.operands) != 2:
            return None
        query, key = operation.operands
        return self.tokens.pair(query, key, transposed=True)

    def clear(self) -> None:
        """Forget all tensors."""
        self._nodes.clear()
        self._reported.clear()
        if self.tokens is not None:
            self.tokens.clear()


def _weights(operation: Operation, node: Node | None) -> Softmaxed | None:
    """Return the weights that a factor of a product is, if any."""
    if isinstance(node, SoftmaxedAxis):
        weights = weights_of(operation, node)
        return None if weights is None else Softmaxed(None, weights, "other", node.output)
    return node if isinstance(node, Softmaxed) else None


def _note_softmax() -> None:
    """Tell the observers which module computed a softmax that does not belong to a chain."""
    module, _ = observed_module()
    for observer in interception.THREAD.observers:
        if module is not None and module in observer.names:
            observer.on_softmax(module)


_BLOCK_SPARSE = (
    "block-sparse attention computes its weights in pieces: a row of random, local and global blocks has no "
    'single softmax. Use full attention, which attends to all tokens: attention_type="original_full" in the '
    "config"
)


def _capture(node: Softmaxed, found: Values | None, module: nn.Module, frame: Any) -> CapturedCall:
    if type(module).__name__.endswith("BlockSparseAttention"):  # BigBird
        raise ArgumentError(_BLOCK_SPARSE)
    heads = _head_count(module)
    call = None if node.scores is None else node.scores.captured(heads)
    if call is None:
        call = dense_call(_with_heads(node.weights, heads))
    call = in_windows(call, node.tokens)
    return located(call if found is None else _with_values(call, node, found), module, frame)


def _with_values(call: CapturedCall, node: Softmaxed, found: Values) -> CapturedCall:
    """Add values and output to a call, in the leading axes of its query; which split or merge others."""
    *lead, queries, _ = node.weights.shape
    size, value = call.query.shape[:-2], found.value
    if math.prod(size) != math.prod(lead) or call.query.shape[-2] != queries:  # heads and queries swapped
        return call
    if list(size) == lead:  # heads may share values
        value = value.expand(*lead[:-1], *value.shape[-3:]) if lead else value
    else:
        value = value.expand(*lead, *value.shape[-2:]).reshape(*size, *value.shape[-2:])
    width = value.shape[-1]

    def heads(gradient: Tensor) -> Tensor:
        return found.heads(gradient).reshape(*size, queries, width)

    heads_width = (size[-1] if size else 1) * width
    return replace(call, value=value, output=AttentionOutput(found.output, heads, heads_width))


def _head_count(module: nn.Module) -> int | None:
    for name in ("num_heads", "num_attention_heads", "n_heads", "heads", "n_head", "nhead"):
        if type(count := getattr(module, name, None)) is int and count > 0:
            return count
    return None


def _with_heads(weights: Tensor, heads: int | None) -> Tensor:
    """Return weights (…, h, q, k): split b·h, or swap heads and queries."""
    if heads is None or weights.dim() < 3:
        return weights
    if weights.dim() == 3 and weights.shape[0] % heads == 0:
        return weights.unflatten(0, (-1, heads))
    if weights.dim() == 4 and weights.shape[-3] != heads and weights.shape[-2] == heads:
        return weights.transpose(-3, -2)
    return weights


Rule = Callable[[Operation], Node | None]


def _changes(change: Callable[[Scores, Operation], Scores | None]) -> Rule:
    """Return the rule of an operation that changes the values of scores."""

    def rule(operation: Operation) -> Node | None:
        node = operation.node
        changed = change(node, operation) if isinstance(node, Scores) else None
        if changed is None or changed.shape != tuple(operation.output.shape):
            return operation.unfollowed()
        return changed

    return rule


def _scale(scores: Scores, operation: Operation) -> Scores | None:
    return scores.scaled(operation.other())


def _divide(scores: Scores, operation: Operation) -> Scores | None:
    if operation.args[0] is not operation.scored() or len(operation.args) > 2 or operation.kwargs:
        return None
    divisor = operation.args[1]
    return scores.scaled(divisor.reciprocal() if isinstance(divisor, Tensor) else 1 / divisor)


def _add(scores: Scores, operation: Operation) -> Scores | None:
    alpha = float(operation.kwargs.get("alpha", 1))
    if operation.adds_scores():
        return None
    if operation.args[0] is operation.scored():
        return scores.plus(operation.args[1], alpha)
    return scores.plus(operation.args[0]) if alpha == 1 else None


def _subtract(scores: Scores, operation: Operation) -> Scores | None:
    if operation.args[0] is not operation.scored() or operation.adds_scores():
        return None
    return scores.plus(operation.args[1], -float(operation.kwargs.get("alpha", 1)))


def _fill(scores: Scores, operation: Operation) -> Scores | None:
    if operation.args[0] is not operation.scored():
        return None
    return scores.filled(operation.argument(1, "mask"), float(operation.argument(2, "value")))


def _where(scores: Scores, operation: Operation) -> Scores | None:
    condition, x, y = (operation.argument(i, name) for i, name in enumerate(("condition", "input", "other")))
    if operation.name == "where" and condition is operation.scored():  # scores.where(condition, value)
        condition, x = x, condition
    if x is operation.scored():
        return scores.filled(~condition, float(y))
    return scores.filled(condition, float(x)) if y is operation.scored() else None


def _clamp(scores: Scores, operation: Operation) -> Scores | None:
    low = operation.argument(1, "min", operation.kwargs.get("other"))
    high = operation.argument(2, "max")
    is_wide = (low is None or float(low) <= -5e4) and (high is None or float(high) >= 5e4)
    return scores if is_wide else None


def _same(operation: Operation) -> Node | None:
    """The rule of casts, copies and dropout."""
    return operation.node if operation.nodes[0] else None  # not of x in x.type_as(weights)


def _reshape(operation: Operation) -> Node | None:
    node, shape = operation.node, operation.output.shape
    if not operation.nodes[0] or math.prod(shape) != operation.operands[0].numel():
        return operation.unfollowed()
    if isinstance(node, Scores):
        return node.reshaped(shape) or UNKNOWN
    if isinstance(node, Softmaxed) and shape[-2:] == node.weights.shape[-2:]:
        scores = None if node.scores is None else node.scores.reshaped(shape)
        if math.prod(shape) == node.weights.numel() and (scores is not None or node.scores is None):
            return replace(node, scores=scores, weights=node.weights.reshape(shape))
    return replace(node, order="other") if isinstance(node, Softmaxed) else node


def _permute(operation: Operation) -> Node | None:
    node, dims = operation.node, operation.operands[0].dim()
    order = list(range(dims))
    if operation.name == "permute":
        sizes = operation.args[1:] or (operation.kwargs["dims"],)
        order = list(sizes[0]) if isinstance(sizes[0], list | tuple | torch.Size) else list(sizes)
    elif operation.name in ("T", "H"):
        order.reverse()
    elif operation.name in ("mT", "mH"):
        order[-2:] = order[-1], order[-2]
    else:
        first, second = operation.argument(1, "dim0"), operation.argument(2, "dim1")
        order[first], order[second] = order[second], order[first]
    if isinstance(node, Scores):
        return node.permuted(order) or UNKNOWN
    swapped = [axis % dims for axis in order] == [*range(dims - 2), dims - 1, dims - 2]
    if isinstance(node, SoftmaxedAxis):
        return Softmaxed(None, operation.output.detach()) if swapped and node.axis == dims - 2 else UNKNOWN
    if isinstance(node, Softmaxed):
        flipped: Any = {"same": "transposed", "transposed": "same"}.get(node.order, "other")
        return replace(node, order=flipped if swapped else "other")
    return node


def _unfollowed(operation: Operation) -> Node | None:
    return operation.unfollowed()


def _mix(operation: Operation) -> Node | None:
    """The rule of layers that mix heads: the weights are those before it, as they are before dropout."""
    node = operation.node
    return replace(node, order="other") if isinstance(node, Softmaxed) else UNKNOWN


def _softmax(operation: Operation) -> Node | None:
    dim = operation.argument(1, "dim")
    output = operation.output
    if isinstance(operation.node, Softmaxed | SoftmaxedAxis) or dim is None:
        _note_softmax()
        return None
    if dim not in (-1, output.dim() - 1):
        _note_softmax()  # unless a product contracts this axis
        return SoftmaxedAxis(output.detach(), dim % output.dim())
    scores = operation.node if isinstance(operation.node, Scores) else None
    tokens = None if scores is None else scores.tokens
    if scores is not None and not _reproduces(scores, output):
        scores = None
    return Softmaxed(scores, output.detach(), tokens=tokens)


def _reproduces(scores: Scores, weights: Tensor) -> bool:
    """Return whether some rows of the lazy weights equal those of the model."""
    call = scores.captured() if scores.is_current else None
    if call is None or not concrete(scores.query, scores.key, weights):
        return False
    lazy = call.weights()
    queries = weights.shape[-2]
    rows = sorted({queries * i // (_CHECKED_ROWS - 1) for i in range(_CHECKED_ROWS - 1)} | {queries - 1})
    expected = weights.detach().reshape(lazy.shape)[..., rows, :]
    eps = torch.finfo(min(weights.dtype, scores.query.dtype, key=lambda d: torch.finfo(d).bits)).eps
    return torch.allclose(
        lazy[..., rows, :].to(expected.dtype), expected, rtol=0, atol=max(_TOLERANCE, 4 * eps)
    )


# Tables


def _reports(capture: Callable[..., CapturedCall | None]) -> Callable[[Function, Any, Any], Any]:
    """Return the handler of an attention function: `capture` takes its output and its arguments."""

    def handler(func: Function, args: Any, kwargs: Any) -> Any:
        with inside_attention():
            output = func(*args, **kwargs)
        module, frame = observed_module()
        tracker = interception.THREAD.tracer.tokens
        if tracker is not None and isinstance(output, Tensor):
            tracker.set_output(output, tensors(args)[0], -3)
        if module is not None:

            def captured() -> CapturedCall | None:
                call = capture(output, *args, **kwargs)
                return None if call is None else located(in_windows(call, _tokens(args)), module, frame)

            report(module, captured)
        return output

    return handler


def _tokens(args: Any) -> tuple[Tokens, Tokens] | None:
    """Return the tokens of query and key, the first arguments."""
    tracker = interception.THREAD.tracer.tokens
    return tracker.pair(*args[:2]) if tracker is not None and len(args) > 1 else None


_CALLS: dict[str, Callable[[Function, Any, Any], Any]] = {
    "scaled_dot_product_attention": _reports(capture_sdpa),
    "flex_attention": _reports(capture_flex),
    "multi_head_attention_forward": _reports(capture_multihead_function),
}


def _table() -> dict[str, Rule]:
    rules: dict[str, Rule] = {}
    for names, rule in (
        ("matmul __rmatmul__ bmm mm einsum baddbmm cdist", product),
        ("softmax", _softmax),
        ("mul multiply __rmul__", _changes(_scale)),
        ("div divide true_divide", _changes(_divide)),
        ("add __radd__", _changes(_add)),
        ("sub subtract", _changes(_subtract)),
        ("masked_fill", _changes(_fill)),
        ("where", _changes(_where)),
        ("clamp clamp_min clip max maximum", _changes(_clamp)),
        ("tanh", _changes(lambda scores, _: scores.tanh())),
        ("float half bfloat16 double to type type_as contiguous clone detach dropout nan_to_num", _same),
        ("view reshape view_as reshape_as flatten unflatten unsqueeze squeeze __getitem__", _reshape),
        ("transpose swapaxes swapdims permute mT mH T H", _permute),
        (
            "cat concat stack pad gather take_along_dim index_select narrow select chunk split unbind",
            _unfollowed,
        ),
        (
            "expand expand_as repeat repeat_interleave roll flip as_strided unfold movedim tril triu",
            _unfollowed,
        ),
        ("__setitem__ copy minimum min scatter scatter_add masked_scatter index_put index_add", _unfollowed),
        ("rsub __rsub__ neg exp log pow relu leaky_relu sigmoid diagonal", _unfollowed),
        ("abs sign square sqrt log1p softplus logsigmoid cumsum __rpow__ __rtruediv__", _unfollowed),
        ("linear conv1d conv2d", _mix),
    ):
        for name in names.split():
            rules[name] = rule
            if not name.startswith("__"):
                rules[f"{name}_"] = rule
    return rules


_RULES = _table()
