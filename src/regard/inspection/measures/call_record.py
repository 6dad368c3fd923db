"""Values, output projections and gradients of recorded attention calls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, StaleError

# names of the output projection: torch, regard, Llama, GPT-2, GPT-NeoX, T5, DistilBERT, timm, diffusers, …
_NAMES = (
    "out_proj",
    "o_proj",
    "c_proj",
    "dense",
    "o",
    "out_lin",
    "proj",
    "to_out",
    "wo",
    "out",
    "output",
    "fc_out",
)


class AttentionOutput(NamedTuple):
    """The output of an attention call.

    heads: function from the gradient of the output to the gradient of the heads, (…, h, q, e).
    width: total number of features of all heads.
    """

    tensor: Tensor
    heads: Callable[[Tensor], Tensor]
    width: int

    @classmethod
    def of_heads(cls, output: Tensor) -> "AttentionOutput":
        """Return the record of an output whose heads are not merged, (…, h, q, e)."""
        heads = output.shape[-3] if output.dim() > 2 else 1
        return cls(output, lambda gradient: gradient, heads * output.shape[-1])


class OutputProjection(NamedTuple):
    """The weight (m, h · e) that maps the merged heads to the output, and its version counter."""

    weight: Tensor
    version: int | None
    layer: str

    def per_head(self, heads: int, head_width: int) -> Tensor:
        """Return the weight of each head, (h, m, e)."""
        if self.version is not None and self.weight._version != self.version:
            raise StaleError(
                f"{self.layer}: the output projection was modified after the model ran. Compute norms before "
                "changing the model's parameters."
            )
        return self.weight.unflatten(-1, (heads, head_width)).transpose(0, 1)


@dataclass
class CallRecord:
    """Values and gradients of one call, as recorded by `watch(values=True, gradients=True)`.

    value: (…, g, k, e). projection: the output projection; None if none was recognized. watched:
    whether gradients were requested. gradient: gradient of the heads' output, (…, h, q, e), summed over
    backward passes.
    """

    value: Tensor
    layer: str
    heads: Sequence[int] | None = None
    projection: OutputProjection | None = None
    watched: bool = False
    differentiable: bool = False
    gradient: Tensor | None = None
    generated: bool = False  # recorded in `generate`, which computes no gradients

    def watch(self, output: AttentionOutput) -> None:
        """Accumulate the gradient of the output in each backward pass."""
        self.watched, self.differentiable = True, output.tensor.requires_grad
        if not self.differentiable:
            return

        def on_gradient(gradient: Tensor) -> None:
            with torch.no_grad():
                heads = output.heads(gradient.detach())
                if self.heads is not None:
                    heads = heads[..., list(self.heads), :, :]
                self.gradient = heads.clone() if self.gradient is None else self.gradient + heads

        tensor = output.tensor
        output = output._replace(tensor=tensor.detach())  # the hook must not keep the graph alive
        tensor.register_hook(on_gradient)

    def to(self, device: torch.device | str) -> "CallRecord":
        """Return the record on another device."""
        projection = self.projection
        if projection is not None:
            projection = projection._replace(weight=projection.weight.to(device), version=None)
        gradient = None if self.gradient is None else self.gradient.to(device)
        return CallRecord(
            self.value.to(device),
            self.layer,
            self.heads,
            projection,
            self.watched,
            self.differentiable,
            gradient,
            self.generated,
        )


def output_projection(model: nn.Module, name: str, width: int) -> OutputProjection | None:
    """Find the linear layer that is applied to the merged heads of an attention module.

    Searches the module for a child with a common name, then its parent if the module has no parameters, then
    the module's sibling `output`, as in BERT. Returns None if there is no such layer.

    width: total number of features of the merged heads.

    >>> import torch
    >>> from regard.inspection.measures.call_record import output_projection
    >>> layer = torch.nn.MultiheadAttention(8, 2)
    >>> output_projection(layer, "", 8).weight.shape
    torch.Size([8, 8])
    """
    module = model.get_submodule(name)
    candidates = [getattr(module, child, None) for child in _NAMES]
    if name:
        parent = model.get_submodule(name.rpartition(".")[0])
        if next(module.parameters(), None) is None:  # the projections belong to its parent
            candidates += [getattr(parent, child, None) for child in _NAMES]
        candidates.append(getattr(getattr(parent, "output", None), "dense", None))
    for candidate in candidates:
        if isinstance(candidate, nn.Sequential | nn.ModuleList) and len(candidate):
            candidate = candidate[0]
        weight = getattr(candidate, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            continue
        if type(candidate).__name__ == "Conv1D":  # its weight is the transpose of a linear layer's
            weight = weight.mT
        if weight.shape[-1] == width:
            weight = weight.detach()
            return OutputProjection(weight, None if weight.is_inference() else weight._version, name)
    return None


class NoValues(NamedTuple):
    """Placeholder for the record of a call whose values could not be traced."""

    layer: str

    def to(self, device: torch.device | str) -> "NoValues":
        """Return the record itself, which has no tensors."""
        return self


def require_record(record: CallRecord | NoValues | None, name: str, function: str, option: str) -> CallRecord:
    """Return the record of a layer; raise if it does not exist."""
    if isinstance(record, NoValues):
        raise ArgumentError(
            f"{function}: the values of {repr(name) if name else 'the model'} could not be traced: its "
            "weights are not multiplied by a tensor with one value vector per key. Exclude it: watch(model, "
            "layers=…)."
        )
    if record is None:
        raise ArgumentError(
            f"{function}: {repr(name) if name else 'the model'} was recorded without values. Use "
            f"watch(model, {option}=True). Recordings loaded from a folder have no values."
        )
    return record
