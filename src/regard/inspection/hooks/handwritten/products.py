"""Products that begin a chain (query and key) and products that end it (weights and values)."""

import string
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor, nn

from regard.inspection.hooks.handwritten.merged_heads import adjacent_axis
from regard.inspection.hooks.handwritten.operations import UNKNOWN, Node, Operation, Softmaxed, SoftmaxedAxis
from regard.inspection.hooks.handwritten.scores import Scores

# products to which a bias is added, and the names of their factors
_ADDING = {
    "baddbmm": ("batch1", "batch2"),
    "baddbmm_": ("batch1", "batch2"),
    "addmm": ("mat1", "mat2"),
    "addmm_": ("mat1", "mat2"),
}


def product(operation: Operation) -> Node | None:
    """The rule for products: the output contains scores if neither factor is a parameter."""
    name, args = operation.name, operation.args
    if name == "cdist" or _mixes_heads(operation):
        return UNKNOWN
    if name == "einsum":
        factors = _einsum_factors(operation)
        if factors is None:
            return UNKNOWN if _is_outer(operation) else None
    elif name in _ADDING:
        factors = operation.argument(1, _ADDING[name][0]), operation.argument(2, _ADDING[name][1])
    elif name == "__rmatmul__":
        factors = args[1], args[0]
    else:
        factors = args[0], operation.argument(1, "mat2", operation.kwargs.get("other"))
    if factors is None or any(not isinstance(x, Tensor) or x.dim() < 2 for x in factors):
        return None
    query, key = factors[0], factors[1].transpose(-1, -2)
    if is_parameter(key) or not query.is_floating_point():
        return None
    scores = Scores.of(query, key)
    if name == "einsum":
        scores = replace(scores, head_axis=_einsum_head_axis(operation))
    if name in _ADDING:
        alpha, beta = operation.kwargs.get("alpha", 1), operation.kwargs.get("beta", 1)
        scaled = scores.scaled(float(alpha))
        bias = operation.argument(0, "input")
        return scaled.plus(bias, float(beta)) or UNKNOWN if scaled and beta else scaled
    return scores if scores.shape == tuple(operation.output.shape) else UNKNOWN


def _einsum_factors(operation: Operation) -> tuple[Tensor, Tensor] | None:
    """Return the factors (…, q, d) and (…, d, k) of an einsum with the output (…, q, k)."""
    einsum = _Einsum.of(operation)
    if einsum is None:
        return None
    first, second, out, operands = einsum
    if len(out) < 2 or len(set(first)) != len(first) or len(set(second)) != len(second):
        return None
    if out[-2] in second and out[-1] in first:
        first, second, operands = second, first, (operands[1], operands[0])
    batch, contracted = out[:-2], [axis for axis in first if axis in second and axis not in out]
    if not contracted or any(is_parameter(x) for x in operands):
        return None
    for axes, own in ((first, out[-2]), (second, out[-1])):
        if not {own, *contracted} <= set(axes) <= {*batch, own, *contracted}:
            return None
    query = _arranged(operands[0], first, [*batch, out[-2]], contracted)
    return query, _arranged(operands[1], second, [*batch, out[-1]], contracted).mT


def _einsum_head_axis(operation: Operation) -> int | None:
    """Return the output axis adjacent to the feature axis in the memory layout of the first factor."""
    einsum = _Einsum.of(operation)
    assert einsum is not None
    axes, query = einsum.first, einsum.operands[0]
    lead = [axis for axis in einsum.output[:-2] if axis in axes]
    features = next(i for i in reversed(range(len(axes))) if axes[i] not in einsum.output)
    heads = adjacent_axis(query, [axes.index(axis) for axis in lead], features)
    return None if heads is None else einsum.output.index(axes[heads])


def _arranged(x: Tensor, axes: str, lead: list[str], contracted: list[str]) -> Tensor:
    """Permute x to (*lead, features). Missing axes get size 1, and contracted axes are merged."""
    x = x.permute([axes.index(axis) for axis in (*lead, *contracted) if axis in axes])
    for position, axis in enumerate(lead):
        if axis not in axes:
            x = x.unsqueeze(position)
    return x.flatten(len(lead))


def _is_outer(operation: Operation) -> bool:
    """Return whether an einsum compares two activations that each contribute an axis to the output."""
    einsum = _Einsum.of(operation)
    if einsum is None or any(is_parameter(x) for x in einsum.operands):
        return False
    first, second, out = set(einsum.first), set(einsum.second), set(einsum.output)
    return bool(first & second - out and (first - second) & out and (second - first) & out)


def _mixes_heads(operation: Operation) -> bool:
    """Return whether scores are multiplied by a parameter that mixes heads but not queries or keys."""
    parameter = any(is_parameter(x) for x in operation.operands)
    scores = next((x for x, node in zip(operation.operands, operation.nodes, strict=True) if node), None)
    if not parameter or scores is None or operation.name != "einsum":
        return False
    return scores.dim() > 2 and operation.output.shape[-2:] == scores.shape[-2:]


def weights_of(operation: Operation, node: SoftmaxedAxis) -> Tensor | None:
    """Return the weights (…, q, k) of a product that contracts the axis of the softmax, or None.

    >>> import torch
    >>> from regard.inspection.hooks.handwritten.operations import Operation, SoftmaxedAxis
    >>> from regard.inspection.hooks.handwritten.products import weights_of
    >>> weights, value = torch.ones(2, 5, 7, 3) / 7, torch.zeros(2, 7, 3, 4)  # b q k h, b k h e
    >>> args, node = ("bqkh,bkhe->bqhe", weights, value), SoftmaxedAxis(weights, 2)
    >>> call = Operation("einsum", args, {}, [weights, value], [node, None], torch.einsum(*args))
    >>> weights_of(call, node).shape
    torch.Size([2, 3, 5, 7])
    """
    if operation.name != "einsum":  # valueᵀ · weightsᵀ
        second = operation.nodes[-1] is node and operation.name in ("matmul", "bmm", "mm")
        return node.output.mT if second and node.axis == node.output.dim() - 2 else None
    einsum = _Einsum.of(operation)
    if einsum is None:
        return None
    is_first = operation.nodes[0] is node
    axes, other = (einsum.first, einsum.second) if is_first else (einsum.second, einsum.first)
    if len(axes) != node.output.dim():
        return None
    key, queries = axes[node.axis], [axis for axis in axes if axis in einsum.output and axis not in other]
    if len(queries) != 1 or key in einsum.output or key not in other:
        return None
    lead = [axis for axis in axes if axis not in (key, *queries)]
    return node.output.permute([axes.index(axis) for axis in (*lead, *queries, key)])


def has_one_query(operation: Operation, node: Softmaxed) -> bool:
    """Return whether an einsum multiplies weights (b, k) by the values of each text: "bk,bkd->bd"."""
    einsum = _Einsum.of(operation) if operation.name == "einsum" and node.weights.dim() == 2 else None
    if einsum is None:
        return False
    is_first = operation.nodes[0] is node
    axes, other = (einsum.first, einsum.second) if is_first else (einsum.second, einsum.first)
    return len(axes) == 2 and axes[0] in other and axes[0] in einsum.output


class _Einsum(NamedTuple):
    """The axes of both operands and of the output, and the operands."""

    first: str
    second: str
    output: str
    operands: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, operation: Operation) -> "_Einsum | None":
        """Parse an einsum of two operands with an explicit output."""
        equation, *rest = operation.args
        operands = list(rest[0]) if len(rest) == 1 and isinstance(rest[0], list | tuple) else rest
        if not isinstance(equation, str) or len(operands) != 2 or "->" not in equation:
            return None
        axes, _, output = _without_ellipsis(equation.replace(" ", ""), operands[0].dim()).partition("->")
        first, second = axes.split(",")
        return cls(first, second, output, (operands[0], operands[1]))


def _without_ellipsis(equation: str, dims: int) -> str:
    """Replace "..." with letters. dims: number of axes of the first operand."""
    if "..." not in equation:
        return equation
    free = [letter for letter in string.ascii_letters if letter not in equation]
    count = dims - len(equation.partition(",")[0].replace("...", ""))
    return equation.replace("...", "".join(free[:count]))


def is_parameter(x: Tensor) -> bool:
    return isinstance(x, nn.Parameter) or isinstance(getattr(x, "_base", None), nn.Parameter)


# Values


class Values(NamedTuple):
    """The values and the output of a product with weights (*lead, q, k).

    value: (*lead, k, e); its axes in `lead` may have size 1.
    heads: function from the output, or its gradient, to (*lead, q, e). merge: the inverse function.
    """

    value: Tensor
    output: Tensor
    heads: Callable[[Tensor], Tensor]
    merge: Callable[[Tensor], Tensor]


def values(operation: Operation, node: Softmaxed) -> Values | None:
    """Return the values of a product with weights, or None if their axes cannot be matched.

    >>> import torch
    >>> from regard.inspection.hooks.handwritten.operations import Operation, Softmaxed
    >>> from regard.inspection.hooks.handwritten.products import values
    >>> weights, value = torch.ones(2, 5, 7) / 7, torch.zeros(2, 7, 3)
    >>> node = Softmaxed(None, weights)
    >>> call = Operation("bmm", (weights, value), {}, [weights, value], [node, None], weights @ value)
    >>> values(call, node).value.shape
    torch.Size([2, 7, 3])
    """
    if node.order == "other" or not isinstance(operation.output, Tensor):
        return None
    try:
        find_values = _einsum_values if operation.name == "einsum" else _matmul_values
        return find_values(operation, node)
    except (RuntimeError, ValueError, TypeError, IndexError):  # no rule supports this form of the call
        return None


def _matmul_values(operation: Operation, node: Softmaxed) -> Values | None:
    """Return the values of a matrix product: weights · value, or valueᵀ · weightsᵀ if transposed."""
    if operation.name not in ("matmul", "__matmul__", "__rmatmul__", "bmm", "mm"):
        return None
    first, second = operation.args[0], operation.argument(1, "mat2", operation.kwargs.get("other"))
    if operation.name == "__rmatmul__":
        first, second = second, first
    transposed = node.order == "transposed"
    weights, value = (second.mT, first.mT) if transposed else (first, second)
    if weights.shape != node.weights.shape or value.shape[-2] != weights.shape[-1]:
        return None
    lead = node.weights.shape[:-2]
    if value.dim() - 2 > len(lead):
        return None
    value = value[(None,) * (len(lead) + 2 - value.dim())]
    rearrange = _transpose if transposed else _identity
    return Values(value, operation.output, rearrange, rearrange)


def _identity(x: Tensor) -> Tensor:
    return x


def _transpose(x: Tensor) -> Tensor:
    return x.mT


def _einsum_values(operation: Operation, node: Softmaxed) -> Values | None:
    einsum = _Einsum.of(operation)
    if einsum is None:
        return None
    is_first = operation.nodes[0] is node
    axes, other = (einsum.first, einsum.second) if is_first else (einsum.second, einsum.first)
    weights, value = einsum.operands if is_first else einsum.operands[::-1]
    if node.order == "transposed":
        axes, weights = axes[:-2] + axes[-1] + axes[-2], weights.mT
    lead, query, key = axes[:-2], axes[-2], axes[-1]
    features = set(other) - set(axes)
    if weights.shape != node.weights.shape or len(features) != 1 or key not in other or query in other:
        return None
    (feature,) = features
    out = [*lead, query, feature]
    if sorted(einsum.output) != sorted(out) or len(set(out)) != len(out):
        return None
    value = value.permute([other.index(axis) for axis in (*lead, key, feature) if axis in other])
    for position, axis in enumerate(lead):
        if axis not in other:
            value = value.unsqueeze(position)
    order = [einsum.output.index(axis) for axis in out]
    inverse = [out.index(axis) for axis in einsum.output]
    return Values(value, operation.output, lambda x: x.permute(order), lambda x: x.permute(inverse))
