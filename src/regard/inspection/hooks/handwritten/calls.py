"""Express attention in plain tensor operations as a call to `regard.attention`, for interventions."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.inspection.editing.replacements import Inputs
from regard.inspection.hooks.handwritten.merged_heads import join_heads, split_heads
from regard.inspection.hooks.handwritten.operations import Operation, Softmaxed
from regard.inspection.hooks.handwritten.products import values
from regard.inspection.hooks.tracing import (
    checked_heads,
    has_swapped_heads,
    head_count,
    values_in,
    with_heads,
)
from regard.mechanism.operator import Options
from regard.mechanism.scores import Dot
from regard.mechanism.torch_state import transformed


@dataclass(frozen=True)
class HandwrittenCall:
    """A product of weights (…, h, q, k) and values (…, h, k, e).

    output: (…, h, q, e). merge: converts an output of this shape to the shape of the model's own product.
    """

    weights: Tensor
    value: Tensor
    output: Tensor
    merge: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, operation: Operation, node: Softmaxed, module: nn.Module, layer: str) -> "HandwrittenCall":
        """Parse a product; raise if its heads or values are not recognized."""
        if transformed():
            raise ArgumentError(
                f"edit cannot change {layer or 'the model'} inside a torch.func transform (vmap, grad, …): "
                "its attention is written in plain tensor operations. Run the model without the transform."
            )
        weights, node = _operand(operation, node), checked_heads(node, head_count(module))
        if node.heads_first is not None:
            weights = split_heads(weights, node.heads_first.heads)
        else:
            weights = with_heads(weights, head_count(module))
        factor = None if has_swapped_heads(node, head_count(module)) else values(operation, node)
        size, queries = weights.shape[:-2], weights.shape[-2]
        value = None if factor is None else values_in(size, queries, node, factor)
        if factor is None or value is None or weights.dim() < 3:
            raise ArgumentError(
                f"edit cannot change {layer or 'the model'}: its weights of shape "
                f"{tuple(node.weights.shape)} are not multiplied by one tensor of values per head. Write the "
                "product as weights @ value, (…, heads, queries, keys) times (…, heads, keys, width)."
            )
        total = weights.detach().float().sum(-1)
        if not bool(((total - 1).abs() < 1e-2).logical_or(total == 0).all()):
            raise ArgumentError(
                f"edit cannot change {layer or 'the model'}: its weights are multiplied or masked after the "
                f"softmax, so row sums are {float(total.min()):.3g} to {float(total.max()):.3g} instead of "
                "1. Change its output with a forward hook."
            )
        lead, width = node.weights.shape[:-2], value.shape[-1]
        merge, output = factor.merge, factor.heads(operation.output)
        if node.heads_first is not None:
            output = split_heads(output, node.heads_first.heads)
            return cls(weights, value, output, lambda x: merge(join_heads(x)))
        output = output.reshape(*size, queries, width)
        return cls(weights, value, output, lambda x: merge(x.reshape(*lead, queries, width)))

    def inputs(self) -> Inputs:
        """Return the arguments with which `regard.attention` repeats the call: softmax(log w) = w."""
        query = self.weights.new_zeros(*self.weights.shape[:-1], 1)
        key = self.weights.new_zeros(*self.value.shape[:-1], 1)
        visible = self.weights.detach() > 0
        bias = torch.where(visible, self.weights, 1.0).log()
        options = Options(score=Dot(), mask=visible, bias=bias, dropout=0.0)
        return Inputs(query, key, self.value, options)


def _operand(operation: Operation, node: Softmaxed) -> Tensor:
    """Return the weights with their autograd graph, unless dropout has changed them."""
    for operand, other in zip(operation.operands, operation.nodes, strict=True):
        weights = operand.mT if node.order == "transposed" else operand
        same_shape = isinstance(other, Softmaxed) and weights.shape == node.weights.shape
        if same_shape and torch.equal(weights, node.weights):
            return weights
    return node.weights
