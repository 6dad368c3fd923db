"""Recognize attention in plain tensor operations: query · keyᵀ, scale, masks and biases, softmax, · value.

Each tensor of such a chain has a node: `Scores` as long as every operation has a rule, `UNKNOWN` otherwise,
and `Softmaxed` after the softmax. A product with a `Softmaxed` tensor is an attention call. If the output
of a softmax outside a chain is multiplied by activations, it is pooling with learned scores.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from regard.inspection.hooks.handwritten.merged_heads import MERGING, merged_heads
from regard.inspection.hooks.handwritten.operations import (
    UNKNOWN,
    Node,
    Operation,
    Softmaxed,
    SoftmaxedAxis,
    version_of,
)
from regard.inspection.hooks.handwritten.products import has_one_query, is_parameter, product, weights_of
from regard.inspection.hooks.handwritten.rules import ARRANGING, RULES, Rule, softmax
from regard.inspection.hooks.handwritten.scores import Scores
from regard.inspection.hooks.token_tracker import TokenTracker, tensors


class Chains:
    """Tracks the attention chains of one thread, from query · keyᵀ to weights · value.

    on_attention: called with each product of weights and values; returns the output to use.
    on_softmax: called with False after a softmax outside of a chain, and with True if its output is used for
        pooling.
    """

    def __init__(
        self,
        on_attention: Callable[[Operation, Softmaxed], Any],
        on_softmax: Callable[[bool], None] | None = None,
    ) -> None:
        self._on_attention, self._on_softmax = on_attention, on_softmax
        self._nodes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # tensor → node, version
        self._softmaxes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # softmax outputs outside chains
        self._merged: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # (h·b, n, e) → MergedHeads
        self.tokens: TokenTracker | None = None  # set while a model with windows is observed

    def call(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a torch function, set the node of its output, and return the output."""
        output = self._call(name, func, args, kwargs)
        if name in MERGING:
            heads = merged_heads(name, args, kwargs, output)
            if heads is not None:
                self._merged[output] = heads
        return output

    def _call(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        rule = RULES.get(name)
        if rule is None or not (self._nodes or self._softmaxes or rule in (product, softmax)):
            return func(*args, **kwargs)
        operands = tensors(args) + tensors(tuple(kwargs.values()))
        nodes = [self._node(operand) for operand in operands]
        output = func(*args, **kwargs)
        if rule is product or any(node is not None for node in nodes):
            with torch.no_grad():
                output = self._follow(Operation(name, args, kwargs, operands, nodes, output), rule)
        elif rule is softmax and self._on_softmax is not None:
            self._on_softmax(False)
            self._softmaxes[output] = True
        if self._softmaxes and self._on_softmax is not None:
            self._follow_pooling(rule, operands, output)
        return output

    def _node(self, x: Tensor) -> Node | None:
        node, version = self._nodes.get(x, (None, 0))
        if node is None or version == version_of(x):
            return node
        return Softmaxed(None, x.detach()) if isinstance(node, Softmaxed) else UNKNOWN  # x was modified

    def _follow(self, operation: Operation, rule: Rule) -> Any:
        """Set the node of an operation's output, and return the output, which `on_attention` may replace."""
        if rule is product:
            weights = next(filter(None, (_weights(operation, node) for node in operation.nodes)), None)
            if weights is not None:
                heads = next(filter(None, map(self._merged.get, operation.operands)), None)
                if heads is not None and weights.weights.dim() == 3:
                    weights = replace(weights, heads_first=heads)
                return self._on_attention(operation, weights)
        try:
            node = rule(operation)
        except (RuntimeError, ValueError, TypeError, IndexError):  # no rule supports this form of the call
            node = None if rule is product else operation.unfollowed()
        if rule is softmax and not isinstance(node, Softmaxed) and self._on_softmax is not None:
            self._on_softmax(False)  # a SoftmaxedAxis becomes attention only if a product contracts its axis
        if self.tokens is not None and isinstance(node, Scores) and operation.name == "matmul":
            node = replace(node, tokens=self.tokens.pair(*operation.operands[:2], transposed=True))
        outputs = operation.args[0] if operation.name == "__setitem__" else operation.output
        for output in tensors(outputs):
            if node is not None and output.is_floating_point():
                self._nodes[output] = node, version_of(output)
            else:
                self._nodes.pop(output, None)
        return operation.output

    def _follow_pooling(self, rule: Rule, operands: list[Tensor], output: Any) -> None:
        """Detect pooling: a product with the output of a softmax that is not part of a chain."""
        assert self._on_softmax is not None
        if not any(operand in self._softmaxes for operand in operands):
            return
        if rule is product:
            # with a parameter, the product is a sum of learned vectors, as in mixtures of experts
            if not any(map(is_parameter, operands)):
                self._on_softmax(True)
        elif rule in ARRANGING and isinstance(output, Tensor):
            self._softmaxes[output] = True

    def clear(self) -> None:
        """Forget all tensors."""
        self._nodes.clear()
        self._softmaxes.clear()
        self._merged.clear()
        if self.tokens is not None:
            self.tokens.clear()


def _weights(operation: Operation, node: Node | None) -> Softmaxed | None:
    """Return the attention weights of a factor with this node, or None."""
    if isinstance(node, SoftmaxedAxis):
        weights = weights_of(operation, node)
        return None if weights is None else Softmaxed(None, weights, "other", node.output)
    if not isinstance(node, Softmaxed):
        return None
    if has_one_query(operation, node):
        return Softmaxed(None, node.weights.unsqueeze(1), "other", node.weights)
    return node
