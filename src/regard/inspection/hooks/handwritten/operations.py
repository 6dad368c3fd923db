"""Operations on the tensors in a chain from query · keyᵀ to the weights, and the nodes of the chain."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from regard.inspection.hooks.handwritten.merged_heads import MergedHeads
from regard.inspection.hooks.handwritten.scores import Scores
from regard.inspection.hooks.token_tracker import Tokens
from regard.mechanism.torch_state import transformed

UNKNOWN = "unknown"  # node of scores that were computed by operations without a rule


@dataclass(frozen=True)
class Softmaxed:
    """Attention weights, and the scores that reproduce them, if known.

    The tensor of the node may be a rearranged or padded copy of the weights.
    order: "transposed" if its queries and keys are swapped, "other" if it is rearranged in another way.
    origin: the output of the softmax, if the weights have been changed since.
    tokens: as in `Scores`.
    others: weights of other softmaxes that were subtracted, as in differential attention.
    heads_first: the heads, if the first axis may be h·b instead of b·h.
    """

    scores: Scores | None
    weights: Tensor
    order: Literal["same", "transposed", "other"] = "same"
    origin: Tensor | None = None
    tokens: tuple[Tokens, Tokens] | None = None
    others: "tuple[Softmaxed, ...]" = ()
    heads_first: MergedHeads | None = None

    def copies(self) -> list[Tensor]:
        """Return the weights, and the output of the softmax if it has the same shape."""
        if self.origin is None or self.origin.shape != self.weights.shape:
            return [self.weights]
        return [self.weights, self.origin]

    def unchanged(self) -> "Softmaxed":
        """Return a node for the original output of the softmax."""
        if self.origin is None:
            return replace(self, order="other")
        return replace(self, scores=None, weights=self.origin, order="other", origin=None)


@dataclass(frozen=True)
class SoftmaxedAxis:
    """A softmax of scores over an axis other than the last: attention if a product contracts this axis."""

    output: Tensor
    axis: int


@dataclass(frozen=True)
class Exponentials:
    """Either exp(scores), before rows are normalized, or log softmax(scores): the logarithm of weights.

    scores: None if they were computed by operations without a rule.
    """

    scores: Scores | None
    logarithm: bool = False


Node = Scores | Softmaxed | SoftmaxedAxis | Exponentials | str


@dataclass(frozen=True)
class Operation:
    """A call to a torch function with at least one tensor that has a node."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: list[Tensor]
    nodes: list[Node | None]  # nodes of the operands
    output: Any

    @property
    def node(self) -> Node:
        """The most informative node of the operands: weights, otherwise known scores, otherwise `UNKNOWN`."""
        for kind in (Softmaxed, SoftmaxedAxis, Exponentials, Scores, str):
            for node in self.nodes:
                if isinstance(node, kind):
                    return node
        raise ValueError("none of the operands is tracked")

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def unfollowed(self) -> Node | None:
        """Return the node for the output of an operation without a rule."""
        softmaxed = [node for node in self.nodes if isinstance(node, Softmaxed)]
        if not softmaxed:
            return UNKNOWN
        node, output = softmaxed[0], self.output
        if isinstance(output, Tensor) and node.order != "other":
            weights = output.detach().mT if node.order == "transposed" else output.detach()
            # the operation masked or shortened the weights; negative weights cannot be stored
            if weights.shape[:-1] == node.weights.shape[:-1] and not _any_negative(weights):
                return Softmaxed(
                    None, weights, node.order, node.weights if node.origin is None else node.origin
                )
        others = tuple(other.unchanged() for other in softmaxed[1:] if other is not node)
        return (
            replace(node.unchanged(), others=node.others + others) if others else replace(node, order="other")
        )

    def adds_scores(self) -> bool:
        """Return whether both operands are scores; lazy weights would store one of them as a dense bias."""
        other = [
            x for x, node in zip(self.operands, self.nodes, strict=True) if node and node is not self.node
        ]
        return any(x.numel() == self.output.numel() for x in other)

    def other(self) -> Any:
        """Return the other operand of a binary operation."""
        return self.args[1] if self.args[0] is self.scored() else self.args[0]

    def scored(self) -> Tensor:
        """Return the operand whose node is `node`."""
        return next(x for x, node in zip(self.operands, self.nodes, strict=True) if node is self.node)


def _any_negative(x: Tensor) -> bool:
    return not x.is_meta and not transformed() and bool((x < 0).any())


def version_of(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version
