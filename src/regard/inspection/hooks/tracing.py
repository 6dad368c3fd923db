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
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from regard.inspection.capture import CapturedCall, dense_call
from regard.inspection.hooks import interception
from regard.inspection.hooks.interception import (
    Function,
    inside_attention,
    is_observed,
    located,
    observed_module,
    report,
)
from regard.inspection.hooks.score_chain import Scores
from regard.inspection.hooks.sdpa_calls import capture_flex, capture_sdpa
from regard.inspection.hooks.torch import capture_multihead_function
from regard.mechanism.sdpa import SDPACall
from regard.mechanism.torch_state import concrete

_CHECKED_ROWS = 4  # rows of lazy weights that are compared with the model's own
_TOLERANCE = 1e-5
UNKNOWN = "unknown"  # node of scores that derive from a product by operations that are not followed


@dataclass(frozen=True)
class Softmaxed:
    """The weights: their scores, if they reproduce the weights, and the weights themselves.

    The tensor of the node may be a rearranged copy of the weights, such as a padded one.
    """

    scores: Scores | None
    weights: Tensor


Node = Scores | Softmaxed | str


class Tracer(TorchFunctionMode):
    """Reports the attention calls of one thread."""

    def __init__(self) -> None:
        super().__init__()
        self._nodes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # tensor → node, version
        self._reported: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # weights that were reported

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        handler = _CALLS.get(name)
        if handler is not None and is_observed():
            return handler(func, args, kwargs)
        rule = _RULES.get(name)
        if rule is None or not (self._nodes or rule in (_product, _softmax)) or not is_observed():
            return func(*args, **kwargs)
        operands = _tensors(args) + _tensors(tuple(kwargs.values()))
        nodes = [self._node(operand) for operand in operands]
        output = func(*args, **kwargs)
        if rule is _softmax and not any(nodes):
            _note_softmax()
        if rule is _product or any(node is not None for node in nodes):
            with torch.no_grad():
                self._follow(_Operation(name, args, kwargs, operands, nodes, output), rule)
        return output

    def _node(self, x: Tensor) -> Node | None:
        node, version = self._nodes.get(x, (None, 0))
        if node is None or version == _version(x):
            return node
        return Softmaxed(None, x.detach()) if isinstance(node, Softmaxed) else UNKNOWN  # modified in place

    def _follow(self, operation: "_Operation", rule: "Rule") -> None:
        """Set the node of an operation's output, and report a product with weights."""
        if rule is _product:
            weights = next((node for node in operation.nodes if isinstance(node, Softmaxed)), None)
            if weights is not None:
                return self._report(weights)
        try:
            node = rule(operation)
        except (RuntimeError, ValueError, TypeError, IndexError):  # a form of the call that is not followed
            node = None if rule is _product else operation.unfollowed()
        outputs = operation.args[0] if operation.name == "__setitem__" else operation.output
        for output in _tensors(outputs):
            if node is not None and output.is_floating_point():
                self._nodes[output] = node, _version(output)
            else:
                self._nodes.pop(output, None)

    def _report(self, node: Softmaxed) -> None:
        module, frame = observed_module()
        if module is None or node.weights in self._reported:
            return
        self._reported[node.weights] = True
        report(module, lambda: _capture(node, module, frame))

    def clear(self) -> None:
        """Forget all tensors."""
        self._nodes.clear()
        self._reported.clear()


def _note_softmax() -> None:
    """Tell the observers which module computed a softmax that does not belong to a chain."""
    module, _ = observed_module()
    for observer in interception.THREAD.observers:
        if module is not None and module in observer.names:
            observer.on_softmax(module)


def _capture(node: Softmaxed, module: nn.Module, frame: Any) -> CapturedCall:
    heads = _head_count(module)
    call = None if node.scores is None else node.scores.captured(heads)
    if call is None:
        call = dense_call(_with_heads(node.weights, heads))
    return located(call, module, frame)


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


# Operations


@dataclass(frozen=True)
class _Operation:
    """A call of a torch function with at least one tensor that has a node."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: list[Tensor]
    nodes: list[Node | None]  # nodes of the operands
    output: Any

    @property
    def node(self) -> Node:
        """The node that the output depends on most: weights, scores that are known, or unknown ones."""
        for kind in (Softmaxed, Scores, str):
            for node in self.nodes:
                if isinstance(node, kind):
                    return node
        raise ValueError("no operand has a node")

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def unfollowed(self) -> Node | None:
        """Return the node of an output whose relation to the operands is not followed."""
        node = next((node for node in self.nodes if isinstance(node, Softmaxed)), None)
        if node is None:
            return UNKNOWN
        output = self.output
        if isinstance(output, Tensor) and output.shape[:-1] == node.weights.shape[:-1]:
            return Softmaxed(None, output.detach())  # masked or shortened weights
        return node

    def adds_scores(self) -> bool:
        """Return whether both operands are scores; lazy weights would have to store one of them densely."""
        other = [
            x for x, node in zip(self.operands, self.nodes, strict=True) if node and node is not self.node
        ]
        return any(x.numel() == self.output.numel() for x in other)

    def other(self) -> Any:
        """Return the other operand of a binary operation."""
        return self.args[1] if self.args[0] is self.scored() else self.args[0]

    def scored(self) -> Tensor:
        """Return the operand of `node`."""
        return next(x for x, node in zip(self.operands, self.nodes, strict=True) if node is self.node)


Rule = Callable[[_Operation], Node | None]


def _changes(change: Callable[[Scores, _Operation], Scores | None]) -> Rule:
    """Return the rule of an operation that changes the values of scores."""

    def rule(operation: _Operation) -> Node | None:
        node = operation.node
        changed = change(node, operation) if isinstance(node, Scores) else None
        if changed is None or changed.shape != tuple(operation.output.shape):
            return operation.unfollowed()
        return changed

    return rule


def _scale(scores: Scores, operation: _Operation) -> Scores | None:
    return scores.scaled(operation.other())


def _divide(scores: Scores, operation: _Operation) -> Scores | None:
    if operation.args[0] is not operation.scored() or len(operation.args) > 2 or operation.kwargs:
        return None
    divisor = operation.args[1]
    return scores.scaled(divisor.reciprocal() if isinstance(divisor, Tensor) else 1 / divisor)


def _add(scores: Scores, operation: _Operation) -> Scores | None:
    alpha = float(operation.kwargs.get("alpha", 1))
    if operation.adds_scores():
        return None
    if operation.args[0] is operation.scored():
        return scores.plus(operation.args[1], alpha)
    return scores.plus(operation.args[0]) if alpha == 1 else None


def _subtract(scores: Scores, operation: _Operation) -> Scores | None:
    if operation.args[0] is not operation.scored() or operation.adds_scores():
        return None
    return scores.plus(operation.args[1], -float(operation.kwargs.get("alpha", 1)))


def _fill(scores: Scores, operation: _Operation) -> Scores | None:
    if operation.args[0] is not operation.scored():
        return None
    return scores.filled(operation.argument(1, "mask"), float(operation.argument(2, "value")))


def _where(scores: Scores, operation: _Operation) -> Scores | None:
    condition, x, y = (operation.argument(i, name) for i, name in enumerate(("condition", "input", "other")))
    if operation.name == "where" and condition is operation.scored():  # scores.where(condition, value)
        condition, x = x, condition
    if x is operation.scored():
        return scores.filled(~condition, float(y))
    return scores.filled(condition, float(x)) if y is operation.scored() else None


def _clamp(scores: Scores, operation: _Operation) -> Scores | None:
    low = operation.argument(1, "min", operation.kwargs.get("other"))
    high = operation.argument(2, "max")
    is_wide = (low is None or float(low) <= -5e4) and (high is None or float(high) >= 5e4)
    return scores if is_wide else None


def _same(operation: _Operation) -> Node | None:
    """The rule of casts, copies and dropout."""
    return operation.node


def _reshape(operation: _Operation) -> Node | None:
    node, shape = operation.node, operation.output.shape
    if not operation.nodes[0] or math.prod(shape) != operation.operands[0].numel():
        return operation.unfollowed()
    if isinstance(node, Scores):
        return node.reshaped(shape) or UNKNOWN
    if isinstance(node, Softmaxed) and shape[-2:] == node.weights.shape[-2:]:
        if math.prod(shape) != node.weights.numel():
            return node
        scores = None if node.scores is None else node.scores.reshaped(shape)
        return node if scores is None and node.scores else Softmaxed(scores, node.weights.reshape(shape))
    return node


def _permute(operation: _Operation) -> Node | None:
    node, dims = operation.node, operation.operands[0].dim()
    order = list(range(dims))
    if operation.name == "permute":
        sizes = operation.args[1:] or (operation.kwargs["dims"],)
        order = list(sizes[0]) if isinstance(sizes[0], list | tuple | torch.Size) else list(sizes)
    else:
        first, second = operation.argument(1, "dim0"), operation.argument(2, "dim1")
        order[first], order[second] = order[second], order[first]
    if isinstance(node, Scores):
        return node.permuted(order) or UNKNOWN
    return node


def _unfollowed(operation: _Operation) -> Node | None:
    return operation.unfollowed()


def _softmax(operation: _Operation) -> Node | None:
    dim = operation.argument(1, "dim")
    output = operation.output
    if isinstance(operation.node, Softmaxed) or dim not in (-1, output.dim() - 1):
        _note_softmax()
        return None
    scores = operation.node if isinstance(operation.node, Scores) else None
    if scores is not None and not _reproduces(scores, output):
        scores = None
    return Softmaxed(scores, output.detach())


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


# Products


def _product(operation: _Operation) -> Node | None:
    """The rule of products: scores, if neither factor is a parameter."""
    name, args = operation.name, operation.args
    if name == "einsum":
        factors = _einsum_factors(operation)
    elif name in ("baddbmm", "baddbmm_"):
        factors = operation.argument(1, "batch1"), operation.argument(2, "batch2")
    elif name == "__rmatmul__":
        factors = args[1], args[0]
    else:
        factors = args[0], operation.argument(1, "mat2", operation.kwargs.get("other"))
    if factors is None or any(not isinstance(x, Tensor) or x.dim() < 2 for x in factors):
        return None
    query, key = factors[0], factors[1].transpose(-1, -2)
    if _is_parameter(key) or not query.is_floating_point():
        return None
    scores = Scores.of(query, key)
    if name in ("baddbmm", "baddbmm_"):
        alpha, beta = operation.kwargs.get("alpha", 1), operation.kwargs.get("beta", 1)
        scaled = scores.scaled(float(alpha))
        bias = operation.argument(0, "input")
        return scaled.plus(bias, float(beta)) or UNKNOWN if scaled and beta else scaled
    return scores if scores.shape == tuple(operation.output.shape) else UNKNOWN


def _einsum_factors(operation: _Operation) -> tuple[Tensor, Tensor] | None:
    """Return the factors (…, q, d) and (…, d, k) of an einsum (…, q, k)."""
    equation, *rest = operation.args
    operands = list(rest[0]) if len(rest) == 1 and isinstance(rest[0], list | tuple) else rest
    if not isinstance(equation, str) or len(operands) != 2 or "->" not in equation:
        return None
    left, _, out = _without_ellipsis(equation.replace(" ", ""), operands[0].dim()).partition("->")
    first, second = left.split(",")
    if len(out) < 2 or len(set(first)) != len(first) or len(set(second)) != len(second):
        return None
    if out[-2] in second and out[-1] in first:
        first, second, operands = second, first, operands[::-1]
    batch, contracted = out[:-2], set(first) & set(second) - set(out)
    if len(contracted) != 1 or set(first) != {*batch, out[-2], *contracted}:
        return None
    if set(second) != {*batch, out[-1], *contracted} or set(first) & set(second) != {*batch, *contracted}:
        return None
    (d,) = contracted
    query = operands[0].permute([first.index(axis) for axis in (*batch, out[-2], d)])
    return query, operands[1].permute([second.index(axis) for axis in (*batch, d, out[-1])])


def _without_ellipsis(equation: str, dims: int) -> str:
    """Replace "..." by letters; `dims`: axes of the first operand."""
    if "..." not in equation:
        return equation
    free = [letter for letter in string.ascii_letters if letter not in equation]
    count = dims - len(equation.partition(",")[0].replace("...", ""))
    return equation.replace("...", "".join(free[:count]))


def _is_parameter(x: Tensor) -> bool:
    return isinstance(x, nn.Parameter) or isinstance(getattr(x, "_base", None), nn.Parameter)


def _tensors(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, list | tuple):
        return [tensor for item in x if isinstance(item, Tensor | list | tuple) for tensor in _tensors(item)]
    return []


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


# Tables


def _reports(capture: Callable[..., CapturedCall | None]) -> Callable[[Function, Any, Any], Any]:
    """Return the handler of an attention function: `capture` takes its arguments."""

    def handler(func: Function, args: Any, kwargs: Any) -> Any:
        with inside_attention():
            output = func(*args, **kwargs)
        module, frame = observed_module()
        if module is not None:

            def captured() -> CapturedCall | None:
                call = capture(*args, **kwargs)
                return None if call is None else located(call, module, frame)

            report(module, captured)
        return output

    return handler


_CALLS: dict[str, Callable[[Function, Any, Any], Any]] = {
    "scaled_dot_product_attention": _reports(lambda *args, **kwargs: capture_sdpa(SDPACall(*args, **kwargs))),
    "flex_attention": _reports(capture_flex),
    "multi_head_attention_forward": _reports(capture_multihead_function),
}


def _table() -> dict[str, Rule]:
    rules: dict[str, Rule] = {}
    for names, rule in (
        ("matmul __rmatmul__ bmm mm einsum baddbmm", _product),
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
        ("transpose swapaxes swapdims permute", _permute),
        (
            "cat concat stack pad gather take_along_dim index_select narrow select chunk split unbind",
            _unfollowed,
        ),
        (
            "expand expand_as repeat repeat_interleave roll flip as_strided unfold movedim tril triu",
            _unfollowed,
        ),
        ("__setitem__ copy minimum min scatter scatter_add masked_scatter index_put index_add", _unfollowed),
        ("linear conv2d rsub __rsub__ neg exp log pow relu leaky_relu sigmoid diagonal", _unfollowed),
    ):
        for name in names.split():
            rules[name] = rule
            if not name.startswith("__"):
                rules[f"{name}_"] = rule
    return rules


_RULES = _table()
