"""Rules for the torch functions between query · keyᵀ and the weights: each returns the node of the output."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.inspection.hooks.handwritten.operations import (
    UNKNOWN,
    Exponentials,
    Node,
    Operation,
    Softmaxed,
    SoftmaxedAxis,
)
from regard.inspection.hooks.handwritten.products import product
from regard.inspection.hooks.handwritten.scores import Scores
from regard.inspection.hooks.token_tracker import rule_table
from regard.mechanism.torch_state import concrete

_CHECKED_ROWS = 4  # number of rows in which lazy weights are compared with the model's
_TOLERANCE = 1e-5

Rule = Callable[[Operation], Node | None]


def _changes(change: Callable[[Scores, Operation], Scores | None]) -> Rule:
    """Return the rule for an operation that changes the values of scores."""

    def rule(operation: Operation) -> Node | None:
        node = operation.node
        if isinstance(node, Exponentials):
            return _normalized(node, operation.output)
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
    """The rule for casts, copies and dropout."""
    return operation.node if operation.nodes[0] else None  # in x.type_as(weights), x has no node


def _replace_nan(operation: Operation) -> Node | None:
    """The rule for nan_to_num, which replaces the NaN weights of rows without visible keys."""
    node = operation.node
    changed = isinstance(node, Softmaxed) and concrete(node.weights) and bool(node.weights.isnan().any())
    return operation.unfollowed() if changed else _same(operation)


def _exp(operation: Operation) -> Node | None:
    node = operation.node
    if isinstance(node, Exponentials) and node.logarithm:
        return _weights(node.scores, operation.output)
    if not _is_scored(node):
        return operation.unfollowed()
    return Exponentials(node if isinstance(node, Scores) else None)


def _log_softmax(operation: Operation) -> Node | None:
    node, dim = operation.node, operation.argument(1, "dim")
    if not _is_scored(node) or dim not in (-1, operation.output.dim() - 1):
        return operation.unfollowed()
    return Exponentials(node if isinstance(node, Scores) else None, logarithm=True)


def _is_scored(node: Node) -> bool:
    return isinstance(node, Scores) or node is UNKNOWN


def _normalized(node: Exponentials, output: Tensor) -> Node | None:
    """Return the weights if exponentials were divided by their sum."""
    total = output.detach().sum(-1) if concrete(output) else output.new_zeros(1)
    sums_to_one = not node.logarithm and bool(((total - 1).abs() <= 1e-3).all())
    if sums_to_one:
        return _weights(node.scores, output)
    return UNKNOWN if node.logarithm else Exponentials(None)  # such as exponentials times a mask


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
    if isinstance(node, Softmaxed) and node.weights.dim() == 2 and list(shape) == _one_query(node.weights):
        return replace(node, scores=None, weights=node.weights.unsqueeze(1), origin=None)
    return replace(node, order="other") if isinstance(node, Softmaxed) else node


def _one_query(weights: Tensor) -> list[int]:
    """Return the shape b 1 k for weights b k, which have one query per text."""
    return [weights.shape[0], 1, weights.shape[1]]


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
    """The rule for layers that mix heads: as with dropout, the weights before the layer are recorded."""
    node = operation.node
    return replace(node, order="other") if isinstance(node, Softmaxed) else UNKNOWN


def softmax(operation: Operation) -> Node | None:
    """Return the node of a softmax; its weights are lazy only if the scores reproduce them."""
    dim = operation.argument(1, "dim")
    output = operation.output
    if isinstance(operation.node, Softmaxed | SoftmaxedAxis) or dim is None:
        return None
    if dim not in (-1, output.dim() - 1):
        return SoftmaxedAxis(output.detach(), dim % output.dim())
    return _weights(operation.node if isinstance(operation.node, Scores) else None, output)


def _weights(scores: Scores | None, output: Tensor) -> Softmaxed:
    tokens = None if scores is None else scores.tokens
    if scores is not None and not _reproduces(scores, output):
        scores = None
    return Softmaxed(scores, output.detach(), tokens=tokens)


def _reproduces(scores: Scores, weights: Tensor) -> bool:
    """Return whether the lazy weights equal the model's own weights in a few rows."""
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


RULES: dict[str, Rule] = rule_table(
    ("matmul __rmatmul__ bmm mm einsum baddbmm addmm cdist", product),
    ("softmax _softmax", softmax),
    ("log_softmax", _log_softmax),
    ("exp", _exp),
    ("nan_to_num", _replace_nan),
    ("mul multiply __rmul__", _changes(_scale)),
    ("div divide true_divide", _changes(_divide)),
    ("add __radd__", _changes(_add)),
    ("sub subtract", _changes(_subtract)),
    ("masked_fill", _changes(_fill)),
    ("where", _changes(_where)),
    ("clamp clamp_min clip max maximum", _changes(_clamp)),
    ("tanh", _changes(lambda scores, _: scores.tanh())),
    ("float half bfloat16 double to type type_as contiguous clone detach dropout", _same),
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
    ("rsub __rsub__ neg log pow relu leaky_relu sigmoid diagonal", _unfollowed),
    ("abs sign square sqrt log1p softplus logsigmoid cumsum __rpow__ __rtruediv__", _unfollowed),
    ("linear conv1d conv2d", _mix),
)
ARRANGING = (_same, _reshape, _permute)  # rules of functions that keep the values of a tensor
