"""What can be done to the heads of an attention: changes, as values, and the call that they change."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import ArgumentError, DTypeError, ShapeError


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention: output (…, h, q, e), value (…, g, k, e), and what is made when needed."""

    output: Tensor
    value: Tensor
    weights: Callable[[], Tensor]  # dense, … h q k
    uniform: Callable[[], Tensor]  # the output of equal weights, … h q e


class Intervention(ABC):
    """Base of what `edit` does to heads: their new output, from the call that they took part in.

    >>> import torch, regard
    >>> class Half(regard.inspection.replacements.Intervention):
    ...     def __call__(self, call, heads):
    ...         return call.output[..., heads, :, :] / 2
    >>> layer, x = regard.models.MultiHeadAttention(8, 2), torch.randn(3, 8)
    >>> with regard.edit(layer, 0, [1], Half()):
    ...     output = layer(x)
    """

    @abstractmethod
    def __call__(self, call: AttentionCall, heads: list[int]) -> Tensor:
        """The new output of these heads, (…, len(heads), q, e)."""


@dataclass(frozen=True)
class ZeroAblation(Intervention):
    """The heads say nothing: an output of zero.

    >>> import torch, regard
    >>> layer = regard.models.SelfAttention()
    >>> with regard.edit(layer, 0, None, regard.ZeroAblation()):
    ...     layer(torch.eye(2))
    tensor([[0., 0.],
            [0., 0.]])
    """

    def __call__(self, call: AttentionCall, heads: list[int]) -> Tensor:
        return torch.zeros_like(call.output[..., heads, :, :])


@dataclass(frozen=True)
class MeanAblation(Intervention):
    """The heads say the same everywhere: their mean output over batch and positions, padding included.

    >>> import torch, regard
    >>> layer = regard.models.SelfAttention()
    >>> with regard.edit(layer, 0, None, regard.MeanAblation()):
    ...     layer(torch.eye(2))
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]])
    """

    def __call__(self, call: AttentionCall, heads: list[int]) -> Tensor:
        output = call.output[..., heads, :, :]
        batch = list(range(output.dim() - 3))
        return output.mean([*batch, -2], keepdim=True).expand_as(output)


@dataclass(frozen=True)
class UniformAttention(Intervention):
    """The heads look at all that they may see alike.

    >>> import torch, regard
    >>> layer = regard.models.SelfAttention()
    >>> with regard.edit(layer, 0, None, regard.UniformAttention()):
    ...     layer(torch.eye(2), mask=regard.Causal())
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])
    """

    def __call__(self, call: AttentionCall, heads: list[int]) -> Tensor:
        return call.uniform()[..., heads, :, :]


@dataclass(frozen=True)
class ReplaceOutput(Intervention):
    """The heads' output becomes what a function makes of it, (…, heads, q, e) → the same shape.

    >>> import torch, regard
    >>> layer = regard.models.SelfAttention()
    >>> with regard.edit(layer, 0, None, regard.ReplaceOutput(lambda output: output * 2)):
    ...     layer(torch.eye(2)).sum()
    tensor(4.)
    """

    function: Callable[[Tensor], Tensor]

    def __call__(self, call: AttentionCall, heads: list[int]) -> Tensor:
        return _same_shape(self, self.function, call.output[..., heads, :, :])


@dataclass(frozen=True)
class ReplaceWeights(Intervention):
    """The heads' weights become what a function makes of them, dense, (…, heads, q, k) → the same shape.

    >>> import torch, regard
    >>> layer, first = regard.models.SelfAttention(), torch.tensor([1.0, 0.0])
    >>> with regard.edit(layer, 0, None, regard.ReplaceWeights(lambda weights: first.expand_as(weights))):
    ...     layer(torch.eye(2))
    tensor([[1., 0.],
            [1., 0.]])
    """

    function: Callable[[Tensor], Tensor]

    def __call__(self, call: AttentionCall, heads: list[int]) -> Tensor:
        weights = _same_shape(self, self.function, call.weights()[..., heads, :, :])
        each = call.output.shape[-3] // call.value.shape[-3]  # heads that share a value
        return weights.to(call.value.dtype) @ call.value[..., [head // each for head in heads], :, :]


def _same_shape(change: Intervention, function: Callable[[Tensor], Tensor], given: Tensor) -> Tensor:
    found = function(given)
    if not isinstance(found, Tensor) or found.shape != given.shape:
        got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ShapeError(
            f"the function of {type(change).__name__} got {tuple(given.shape)} and returned {got}; "
            "it must return a tensor of the shape that it got."
        )
    return found


def changed(call: AttentionCall, heads: Sequence[int] | None, change: Intervention) -> AttentionCall:
    """The call with other outputs of some heads; those of the others stay as they are."""
    count = call.output.shape[-3]
    chosen = list(range(count)) if heads is None else [_head(head, count) for head in heads]
    output = call.output.clone()
    output[..., chosen, :, :] = change(call, chosen).to(output.dtype)
    return AttentionCall(output, call.value, call.weights, call.uniform)


def _head(head: int, count: int) -> int:
    if not -count <= head < count:
        raise ArgumentError(f"edit got head {head}, and the layer has {count} heads; they count from 0.")
    return head % count


def as_heads(heads: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """Numbers of heads; None for all of them."""
    if heads is None:
        return None
    found = (heads,) if isinstance(heads, int) else tuple(heads)
    wrong = [head for head in found if isinstance(head, bool) or not isinstance(head, int)]
    if wrong:
        raise DTypeError(f"edit got the head {wrong[0]!r}; heads are numbers: 3, [0, 5], or None for all.")
    return found
