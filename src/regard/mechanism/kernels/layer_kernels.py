"""Kernels for layers and decoding: dropout, linear layers, top-k tokens and decoding steps.

These functions do not check their arguments; the layers that call them do.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.mechanism import torch_state
from regard.mechanism.kernels.dtypes import TYPES
from regard.mechanism.kernels.library import KERNELS, NORMALIZERS, SLOTS

_DROPOUT_KINDS = {"add": 0, "relu": 1, "relu_back": 2}
_DROPOUT_TYPES = (torch.float32, torch.bfloat16)
_FLOAT32, _INT64 = TYPES.get(torch.float32, 0), TYPES.get(torch.int64, 0)
_SOFTMAX = NORMALIZERS.get("softmax", 0)
_LANES: int = 1 if KERNELS is None else KERNELS.lanes()
_MIN_ROWS, _MIN_ROWS_TRANSPOSED = 2, 64  # with fewer rows, torch's product is as fast
_PLAIN_TYPES = (Tensor, nn.Parameter)
_PREFERS_LINEAR: bool = KERNELS is not None and KERNELS.prefers_linear()


def supports_dropout(*tensors: Tensor) -> bool:
    """Whether the dropout kernels support the given tensors, which must have the same shape."""
    return KERNELS is not None and all(
        t.dtype in _DROPOUT_TYPES and t.device.type == "cpu" and t.is_contiguous() and not t.is_neg()
        for t in tensors
    )


def dropout(
    kind: str, x: Tensor | None, y: Tensor, *, probability: float, seed: int, dtype: torch.dtype
) -> Tensor:
    """Apply elementwise dropout, fused with a residual addition or ReLU; return a tensor of the given dtype.

    kind: one of the operations listed in kernels/dropout.h.
    """
    out = torch.empty_like(y, dtype=dtype)
    KERNELS.dropout(
        _DROPOUT_KINDS[kind],
        *((0, False) if t is None else (t.data_ptr(), t.dtype is torch.bfloat16) for t in (x, y, out)),
        y.numel(),
        seed & 0xFFFFFFFF,
        seed >> 32,
        int(probability * 2**32),
        1 / (1 - probability),
        torch.get_num_threads(),
    )
    return out


def supports_linear(x: Tensor) -> bool:
    """Whether the linear kernels support the input x. They compute no gradients."""
    return (
        KERNELS is not None
        and x.dtype is torch.float32
        and x.device.type == "cpu"
        and not (torch.is_grad_enabled() and x.requires_grad)
    )


def prefers_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool = False) -> bool:
    """Whether `linear` should compute a product instead of torch: it is faster and supports the call.

    Gradients, compilation, autocast and tensor subclasses, for example, need torch's product.
    transposed: whether the weight is (m, n) instead of (n, m).
    """
    if not _PREFERS_LINEAR or torch.compiler.is_compiling():
        return False
    tensors = (x, weight) if bias is None else (x, weight, bias)
    gradients = torch.is_grad_enabled()
    for t in tensors:
        if type(t) not in _PLAIN_TYPES or t.dtype is not torch.float32 or (gradients and t.requires_grad):
            return False
    depth, columns = weight.shape if transposed else weight.shape[::-1]
    min_rows = _MIN_ROWS_TRANSPOSED if transposed else _MIN_ROWS
    return (
        x.shape[-1:] == (depth,)
        and depth > 0
        and depth % _LANES == 0
        and x.numel() >= min_rows * depth
        and weight.is_contiguous()
        and (bias is None or (bias.shape == (columns,) and bias.is_contiguous()))
        and torch_state.plain_cpu(*tensors)
    )


def linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    columns: int,
    *,
    transposed: bool = False,
) -> Tensor:
    """Compute x · weightᵀ + bias: (…, m) → (…, columns), for inputs that `supports_linear` accepts.

    weight: float32 (columns, m) or, if transposed, (m, columns), contiguous; or, with scales, int8 in the
        layout of kernels/linear.h.
    """
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], columns)
    if out.numel():
        KERNELS.linear(
            x.data_ptr(),
            weight.data_ptr(),
            0 if scales is None else scales.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            out.numel() // columns,
            x.shape[-1],
            columns,
            transposed,
            torch.get_num_threads(),
        )
    return out


def best_tokens(logits: Tensor, k: int, *, first: int) -> tuple[Tensor, Tensor]:
    """Return the log probabilities and the tokens of each row's k largest logits: (n, V) → two (n, k).

    logits: float32, on the CPU. Tokens below `first` count toward the softmax but are not returned.
    """
    logits = logits.contiguous()
    values = logits.new_empty(len(logits), k)
    tokens = torch.empty_like(values, dtype=torch.int64)
    if values.numel():
        addresses = (logits.data_ptr(), values.data_ptr(), tokens.data_ptr())
        KERNELS.best(*addresses, len(logits), logits.shape[1], first, k, torch.get_num_threads())
    return values, tokens


class Strided(NamedTuple):
    """A tensor in a decoding step: its address, and its strides along batch, g, r, rows and columns."""

    address: int
    strides: tuple[int, int, int, int, int]


def decode(
    sizes: tuple[int, int, int, int, int, int],
    tensors: Mapping[str, Strided],
    scale: float,
    stop: Tensor | None = None,
) -> bool:
    """Run scaled dot-product attention with softmax in float32; return whether the result is finite.

    This skips the checks of `attention`, which take longer than a small decoding step.

    sizes: batch, key heads g, query heads per key head r, queries, keys, head width.
    tensors: "query", "key", "value" and "output".
    stop: number of visible keys per batch row, int64.
    """
    batch, groups, per_group, queries, keys, width = sizes
    numbers = [3, batch, groups, per_group, queries, keys, width, width, queries, 0, 0, _SOFTMAX]
    numbers += (0, 0, 1, 0, 0, 0, 0 if stop is None else 1)
    shapes = {
        "query": (per_group, queries),
        "output": (per_group, queries),
        "key": (1, keys),
        "value": (1, keys),
    }
    for name, (address, strides) in tensors.items():
        numbers += (SLOTS[name], _FLOAT32, 0, address, batch, groups, *shapes[name], width, *strides)
    if stop is not None:
        numbers += (SLOTS["stop0"], _INT64, 0, stop.data_ptr(), batch, 1, 1, 1, 1, 1, 1, 1, 1, 1)
    return KERNELS.forward(numbers, (scale, 1.0, 0.0, 0.0, 1.0), torch.get_num_threads())


def decode_step(numbers: list[int], eps: float) -> bool:
    """Run a decoding step of a Transformer (kernels/decoder_step.h); return whether the result is finite."""
    return KERNELS.step(numbers, eps, torch.get_num_threads())
