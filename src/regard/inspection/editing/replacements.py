"""Interventions on attention heads, and the attention calls they change."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from regard._util.text import type_name
from regard.errors import DTypeError, ShapeError
from regard.inspection.layers import head_numbers
from regard.mechanism.masks.algebra import Mask, as_mask
from regard.mechanism.operator import Options, attend, attention
from regard.mechanism.scores import Dot
from regard.mechanism.weights.weights import Weights


class Inputs(NamedTuple):
    """Arguments for repeating a call with `regard.attention`, without dropout.

    mask_bias: the part of options["bias"] that encodes a mask.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    options: Options
    mask_bias: Tensor | None = None


@dataclass(frozen=True)
class AttentionCall:
    """One attention call: output (…, h, q, e), value (…, g, k, e), and a function that returns its inputs.

    layer: name of the layer. first_query, first_key: positions of the first query and key in the sequence;
    nonzero while a model generates with a cache. hidden: a mask that hides the query-key pairs blocked by
    outer edits, or None.
    """

    output: Tensor
    value: Tensor
    inputs: Callable[[], Inputs]
    layer: str = ""
    first_query: int = 0
    first_key: int = 0
    hidden: Mask | None = None

    @property
    def heads(self) -> int:
        return self.output.shape[-3]

    def recompute(self, *, value: Tensor | None = None) -> Tensor:
        """Recompute the output without the hidden pairs, in linear memory; `value` replaces `self.value`."""
        inputs = self.inputs()
        value = inputs.value if value is None else value
        return attention(inputs.query, inputs.key, value, **self._options(inputs))

    def weights(self) -> Tensor:
        """Return the dense weights, (…, h, q, k)."""
        return self.lazy_weights().dense()

    def lazy_weights(self) -> Weights:
        """Return the lazy weights, (…, h, q, k)."""
        inputs = self.inputs()
        return attend(*inputs[:3], **self._options(inputs))[1]

    def uniform(self) -> Tensor:
        """Return the output with uniform weights on the keys that the mask allows, (…, h, q, e)."""
        inputs = self.inputs()
        query, key = (x.new_zeros(*x.shape[:-1], 1) for x in inputs[:2])
        mask = self._options(inputs)["mask"]
        return attention(query, key, inputs.value, score=Dot(), mask=mask, bias=inputs.mask_bias)

    def _options(self, inputs: Inputs) -> Options:
        mask = inputs.options.get("mask")
        if self.hidden is not None:
            mask = self.hidden if mask is None else as_mask(mask) & self.hidden
        return {**inputs.options, "mask": mask}


class Intervention(ABC):
    """Base class for interventions. Subclasses compute the new output of the heads selected by `edit`.

    >>> import torch, regard
    >>> class Half(regard.inspection.editing.replacements.Intervention):
    ...     def __call__(self, call, heads):
    ...         return call.output[..., heads, :, :] / 2
    >>> layer, x = regard.models.MultiHeadAttention(8, 2), torch.randn(3, 8)
    >>> with regard.edit(layer, 0, [1], Half()):
    ...     output = layer(x)
    """

    @abstractmethod
    def __call__(self, call: AttentionCall, heads: list[int]) -> Tensor:
        """Return the new output of the given heads, (…, len(heads), q, e)."""

    def apply(self, call: AttentionCall, heads: list[int]) -> AttentionCall:
        """Return the call with the new output of the given heads."""
        output = call.output.clone()
        output[..., heads, :, :] = self(call, heads).to(output.dtype)
        return replace(call, output=output)


@dataclass(frozen=True)
class ZeroAblation(Intervention):
    """Set the output of the heads to zero.

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
    """Replace the output of each head with its mean over batch and positions, including padding.

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
    """Make the weights of the heads uniform over the keys that the mask allows.

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
    """Apply a shape-preserving function to the output of the heads, (…, heads, q, e).

    >>> import torch, regard
    >>> layer = regard.models.SelfAttention()
    >>> with regard.edit(layer, 0, None, regard.ReplaceOutput(lambda output: output * 2)):
    ...     layer(torch.eye(2)).sum()
    tensor(4.)
    """

    function: Callable[[Tensor], Tensor]

    def __call__(self, call: AttentionCall, heads: list[int]) -> Tensor:
        return _apply(self, self.function, call.output[..., heads, :, :])


@dataclass(frozen=True)
class ReplaceWeights(Intervention):
    """Apply a shape-preserving function to the dense weights of the heads, (…, heads, q, k).

    >>> import torch, regard
    >>> layer, first = regard.models.SelfAttention(), torch.tensor([1.0, 0.0])
    >>> with regard.edit(layer, 0, None, regard.ReplaceWeights(lambda weights: first.expand_as(weights))):
    ...     layer(torch.eye(2))
    tensor([[1., 0.],
            [1., 0.]])
    """

    function: Callable[[Tensor], Tensor]

    def __call__(self, call: AttentionCall, heads: list[int]) -> Tensor:
        weights = _apply(self, self.function, call.weights()[..., heads, :, :])
        per_group = call.output.shape[-3] // call.value.shape[-3]  # query heads per value head
        return weights.to(call.value.dtype) @ call.value[..., [head // per_group for head in heads], :, :]


def _apply(intervention: Intervention, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    result = function(x)
    if not isinstance(result, Tensor) or result.shape != x.shape:
        returned = tuple(result.shape) if isinstance(result, Tensor) else type_name(result)
        raise ShapeError(
            f"The function passed to {type(intervention).__name__} received shape {tuple(x.shape)} and "
            f"returned {returned}; the shapes must be equal."
        )
    return result


def intervene(call: AttentionCall, heads: Sequence[int] | None, intervention: Intervention) -> AttentionCall:
    """Apply an intervention to some heads, or to all if `heads` is None."""
    count = call.heads
    selected = list(range(count)) if heads is None else head_numbers("edit", heads, count)
    return intervention.apply(call, selected)


def as_heads(heads: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """Return head numbers as a tuple; None for all heads."""
    if heads is None:
        return None
    numbers = (heads,) if isinstance(heads, int) else tuple(heads)
    for head in numbers:
        if isinstance(head, bool) or not isinstance(head, int):
            raise DTypeError(
                f"edit(heads=…) got {head!r}; pass a number, a list of numbers, or None for all."
            )
    return numbers
