"""Linear layers for inference: int8 weights, and products that the kernels compute faster than torch."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.errors import ArgumentError, DTypeError, ShapeError
from regard.mechanism.kernels import layer_kernels
from regard.models.layers.int8_packing import COLUMNS, pack_int8

_MIN_ROWS, MAX_ROWS = 2, 8  # outside this range, torch's matrix product is as fast


class Int8Linear(nn.Module):
    """A linear layer with int8 weights, for inference on the CPU. Created by `quantize`.

    linear: the layer to convert, or any object with a `weight` (n, m) and a `bias`.

    The weights of each output have their own scale. Each row of the input is quantized with its own scale to
    as many bits as a 32-bit sum allows (at most 16). Nearly all of the error therefore comes from the
    weights, and the result of a row does not depend on the rest of the batch.

    >>> import torch
    >>> from regard.models.layers.linear import Int8Linear
    >>> layer, x = torch.nn.Linear(64, 32), torch.randn(5, 64)
    >>> with torch.no_grad():
    ...     error = Int8Linear(layer)(x) - layer(x)
    >>> bool(error.abs().max() < 0.02)
    True
    """

    packed: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, bias = linear.weight.detach(), linear.bias
        self.out_features, self.in_features = weight.shape
        packed, scales = map(torch.from_numpy, pack_int8(weight.float().contiguous().numpy()))
        self.register_buffer("packed", packed)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", None if bias is None else _pad(bias.detach().float()))
        self.eval()

    @property
    def weight(self) -> Tensor:
        """The weights as float32, (n, m); computed on each access."""
        blocks, pairs = self.packed.shape[:2]
        weight = self.packed.transpose(1, 2).reshape(blocks * COLUMNS, 2 * pairs) * self.scales[:, None]
        return weight[: self.out_features, : self.in_features]

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: (…, m) → (…, n)."""
        return self.columns(x, 0, self.out_features)

    def columns(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Compute only the outputs from `start` to `stop`."""
        if torch.is_autocast_enabled("cpu"):  # an earlier layer may have returned another dtype
            x = x.float()
        self._check(x)
        if start % COLUMNS:
            return self(x)[..., start:stop].contiguous()
        first, last = start // COLUMNS, -(-stop // COLUMNS)
        bias = None if self.bias is None else self.bias[start:]
        return layer_kernels.linear(x, self.packed[first:last], self.scales[start:], bias, stop - start)

    def _check(self, x: Tensor) -> None:
        if not layer_kernels.supports_linear(x):
            raise _unsupported(x)
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ShapeError(
                f"Int8Linear got an input of shape {tuple(x.shape)}; the last axis must have "
                f"size {self.in_features}."
            )
        if self.scales.dtype is not torch.float32 or self.scales.device.type != "cpu":
            raise DTypeError(
                f"A layer with int8 weights was converted to {self.scales.dtype} on "
                f"{self.scales.device.type!r}; its scales must stay in float32 on the CPU. Quantize the "
                "float32 model again."
            )

    def train(self, mode: bool = True) -> "Int8Linear":
        """Raise an error for mode=True: int8 weights have no gradients."""
        if mode:
            raise ArgumentError(
                "This model is quantized to int8, for inference only. Train the float32 model, then quantize "
                "it."
            )
        return super().train(mode)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


def project(x: Tensor, layer: nn.Linear | Int8Linear, start: int, stop: int) -> Tensor:
    """Compute only the outputs from `start` to `stop` of a linear layer."""
    if isinstance(layer, Int8Linear):
        return layer.columns(x, start, stop)
    return F.linear(x, layer.weight[start:stop], None if layer.bias is None else layer.bias[start:stop])


class LinearForward:
    """The `forward` of a linear layer that uses the kernels where they are faster than torch.

    `layer_kernels.prefers_linear` decides: on some CPUs, in float32 and without gradients. A copy of the
    layer has a copy of this object, which uses the copied weights.

    layer: an `nn.Linear`, or another layer with a weight of shape (in, out), such as transformers' Conv1D.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer, self.forward, self.transposed = layer, layer.forward, type(layer) is not nn.Linear

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        weight: Any = self.layer.weight
        bias: Any = self.layer.bias
        transposed = self.transposed
        if len(args) == 1 and layer_kernels.prefers_linear(args[0], weight, bias, transposed=transposed):
            columns = weight.shape[1 if transposed else 0]
            return layer_kernels.linear(args[0], weight, None, bias, columns, transposed=transposed)
        return self.forward(*args, **kwargs)


def replace_linear(module: nn.Module, *transposed: type[nn.Module]) -> None:
    """Replace the `forward` of all linear layers in a module, except those that already have their own.

    transposed: types of further linear layers, whose weights have the shape (in, out).

    >>> import torch
    >>> from regard.models.layers.linear import replace_linear
    >>> model, x = torch.nn.Sequential(torch.nn.Linear(16, 3)), torch.randn(5, 16)
    >>> before = model(x)
    >>> replace_linear(model)
    >>> with torch.no_grad():
    ...     torch.allclose(model(x), before, atol=1e-6)
    True
    """
    for layer in module.modules():
        if type(layer) in (nn.Linear, *transposed) and "forward" not in vars(layer):
            layer.forward = LinearForward(layer)


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute F.linear(x, weight, bias) for contiguous float32 tensors.

    This is faster than torch if x (n, m) has few rows. The results differ from torch's by rounding only.
    """
    if not _MIN_ROWS <= len(x) <= MAX_ROWS:
        return F.linear(x, weight, bias)
    return layer_kernels.linear(x, weight, None, bias, len(weight))


def _pad(x: Tensor) -> Tensor:
    return F.pad(x, (0, -len(x) % COLUMNS)).contiguous()


def _unsupported(x: Tensor) -> Exception:
    if x.requires_grad:
        return ArgumentError(
            "A layer with int8 weights has no gradients; call it under torch.no_grad(), or use float32."
        )
    return DTypeError(
        f"A layer with int8 weights got an input of dtype {x.dtype} on {x.device.type!r}; it needs "
        "float32 on the CPU."
    )
