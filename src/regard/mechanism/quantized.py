"""Quantized keys and values: int8, with one scale per token and head."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Never

import torch
from torch import Tensor

from regard._util.checks import check_dense
from regard._util.text import type_name
from regard.errors import DeviceError, DTypeError, ShapeError

_LARGEST = 127  # the range is symmetric: −128 is not used
_TINY = 1e-30  # vectors whose largest magnitude is smaller become zeros: their scale would be subnormal
_CURE = (
    "only regard.attention and regard.attend support quantized keys and values. Call "
    'model.set_attn_implementation("regard"), or pass x.dequantize().'
)


@dataclass(frozen=True, eq=False)
class Quantized:
    """Keys or values (…, tokens, features) in int8, with one scale per token and head: values · scale.

    `attention` and `attend` accept it as key and value, and the kernels read the int8 values in place. The
    output and the weights equal those of the dequantized tensors, up to rounding. To create one, use
    `quantize`.

    Only the kernels avoid a dequantized copy, and they compute no gradients for quantized calls. A call that
    needs gradients, or runs on another implementation, dequantizes key and value first; `explain` states the
    reason.

    values: int8 (…, tokens, features).
    scale: (…, tokens, 1), in float32, or in float64 if dtype is float64.
    dtype: the dtype of `dequantize()`, which must be the dtype of the query.

    >>> import torch, regard
    >>> query, key, value = torch.randn(8, 1, 64), torch.randn(8, 100, 64), torch.randn(8, 100, 64)
    >>> key, value = regard.quantize(key), regard.quantize(value)
    >>> output, weights = regard.attend(query, key, value)
    >>> dequantized = regard.attention(query, key.dequantize(), value.dequantize())
    >>> torch.allclose(output, dequantized, atol=1e-5)
    True
    """

    values: Tensor
    scale: Tensor
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name, tensor in (("values", self.values), ("scale", self.scale)):
            if not isinstance(tensor, Tensor):
                raise DTypeError(f"Quantized got {name} of type {type(tensor).__name__}; pass a tensor.")
            check_dense(name, tensor)
        expected = _scale_dtype(self.dtype)
        if self.values.dtype is not torch.int8 or self.scale.dtype is not expected:
            raise DTypeError(
                f"Quantized got values of dtype {self.values.dtype} and a scale of dtype {self.scale.dtype}; "
                f"for dtype={self.dtype}, they must be torch.int8 and {expected}. Use regard.quantize(x)."
            )
        if self.values.dim() < 2 or self.scale.shape != (*self.values.shape[:-1], 1):
            raise ShapeError(
                f"Quantized got values of shape {tuple(self.values.shape)} and a scale of shape "
                f"{tuple(self.scale.shape)}; they must be (…, tokens, features) and (…, tokens, 1)."
            )
        if self.values.device != self.scale.device:
            raise DeviceError(
                f"Quantized got values on {self.values.device} and a scale on {self.scale.device}; "
                "they must be on the same device."
            )

    def dequantize(self) -> Tensor:
        """Return values · scale, with dtype `dtype`.

        >>> import torch, regard
        >>> regard.quantize(torch.tensor([[127.0, 0.4], [0.0, 2.0]])).dequantize()
        tensor([[127.,   0.],
                [  0.,   2.]])
        """
        return (self.values.to(self.scale.dtype) * self.scale).to(self.dtype)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Quantized":
        """Apply a function to both values and scale. The function may change any axis except the last.

        >>> import torch, regard
        >>> regard.quantize(torch.randn(8, 100, 64)).map(lambda x: x.flip(0)).shape
        torch.Size([8, 100, 64])
        """
        return Quantized(change(self.values), change(self.scale), self.dtype)

    @property
    def shape(self) -> torch.Size:
        """Shape of the values, (…, tokens, features)."""
        return self.values.shape

    @property
    def device(self) -> torch.device:
        """Device of values and scale."""
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Memory used by values and scale, in bytes: about a quarter of the size in float32.

        >>> import torch, regard
        >>> x = torch.randn(8, 100, 64)
        >>> regard.quantize(x).nbytes / x.nbytes
        0.265625
        """
        return self.values.nbytes + self.scale.nbytes

    def __getitem__(self, index: Any) -> "Quantized":
        """Select along any axis except the last: x[:, :10] has the first 10 tokens."""
        result = self.map(lambda part: part[index])
        if result.shape[-1] != self.shape[-1]:
            raise ShapeError(
                f"The index selects features: the last axis would change from {self.shape[-1]} to "
                f"{result.shape[-1]}. Select along other axes, or index x.dequantize()."
            )
        return result

    def clone(self) -> "Quantized":
        """Return a copy.

        >>> import torch, regard
        >>> regard.quantize(torch.randn(5, 4)).clone()
        Quantized(shape=(5, 4), dtype=torch.float32)
        """
        return self.map(Tensor.clone)

    def dim(self) -> int:
        """Return the number of axes."""
        return self.values.dim()

    def numel(self) -> int:
        """Return the number of elements."""
        return self.values.numel()

    def is_floating_point(self) -> bool:
        """Return True: the dequantized values are floating point."""
        return True

    def __repr__(self) -> str:
        return f"Quantized(shape={tuple(self.shape)}, dtype={self.dtype})"

    # Other operations would need the dequantized tensor. Models that do not use regard's attention fail here.

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Never:
        raise DTypeError(f"{getattr(function, '__name__', function)} got a Quantized tensor; {_CURE}")

    def __getattr__(self, name: str) -> Never:
        cure = f": {_CURE}" if hasattr(Tensor, name) else "."
        raise AttributeError(f"'Quantized' object has no attribute {name!r}{cure}")


def quantize(x: Tensor) -> Quantized:
    """Quantize keys or values (…, tokens, features) to int8, with one scale per token and head.

    The scale of a token is its largest magnitude / 127, so the rounding error of a feature is at most half
    the scale. A token that contains NaN or inf is NaN after `dequantize`. The result has no gradient.

    >>> import torch, regard
    >>> x = regard.quantize(torch.tensor([[1.0, -0.5], [0.0, 0.0]]))
    >>> x.values
    tensor([[127, -64],
            [  0,   0]], dtype=torch.int8)
    >>> x.scale
    tensor([[0.0079],
            [0.0000]])
    """
    if not isinstance(x, Tensor):
        raise DTypeError(f"quantize got {type_name(x)}; pass a tensor.")
    check_dense("x", x)
    if x.dim() < 2:
        raise ShapeError(
            f"quantize got shape {tuple(x.shape)}; it needs at least 2 axes, (tokens, features). "
            "For a single vector, pass x[None]."
        )
    if not x.is_floating_point():
        raise DTypeError(f"quantize got dtype {x.dtype}; it must be floating point. Use x.float().")
    with torch.no_grad():
        real = x.detach().to(_scale_dtype(x.dtype))
        size = real.abs() if real.shape[-1] else real.new_zeros(*real.shape[:-1], 1)
        largest = size.amax(-1, keepdim=True)
        limit = torch.finfo(real.dtype).max / _LARGEST * (1 - 1e-6)  # 127 · scale must not overflow
        usable = (largest >= _TINY) & (largest < torch.inf)
        factor = torch.where(usable, _LARGEST / largest, 0.0)
        # NaN · 0 is NaN, which cannot be converted to an integer
        values = (real * factor).nan_to_num_(0.0).round_().to(torch.int8)
        scale = torch.where(
            largest < _TINY, 0.0, torch.where(usable, (largest / _LARGEST).clamp(max=limit), torch.nan)
        )
    return Quantized(values, scale, x.dtype)


def dequantize(x: Tensor | Quantized) -> Tensor:
    """Convert a `Quantized` tensor to floating point; return other tensors unchanged."""
    return x.dequantize() if isinstance(x, Quantized) else x


def _scale_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32
