"""Fast path to the kernels for common calls.

The kernels finish a small call in a few microseconds; preparing a general call takes much longer. Common
calls, (b, h, n, d) or (h, n, d) with a dot product, a built-in mask and no bias, are therefore encoded
directly, and the encoding is cached. All other calls take the general path, with the same results.
"""

from collections.abc import Hashable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from regard.mechanism import autograd, fused
from regard.mechanism.call.arguments import Call, prepare
from regard.mechanism.call.layout import Layout
from regard.mechanism.fused import SLOTS, FastCall
from regard.mechanism.mask_algebra import CallShape, Mask
from regard.mechanism.masks import Causal, Documents, Padding, Window
from regard.mechanism.scores import Dot, ScaledDot
from regard.mechanism.torch_state import plain_cpu

_TENSOR_TYPES = {Tensor, nn.Parameter}
_MASKS = {type(None), Causal, Window, Documents, Padding}  # immutable and hashable
_CACHE: dict[Hashable, tuple[FastCall, list[int]]] = {}  # encoded calls, except for the addresses
_CACHE_SIZE = 256  # calls
_MAX_CACHED_ROWS = 4096  # masked calls with more queries are not cached: their intervals are too large
_QUERY, _KEY, _VALUE, _OUTPUT, _GRAD, _D_QUERY, _D_KEY, _D_VALUE = (
    SLOTS.get(name, 0) for name in ("query", "key", "value", "output", "grad", "d_query", "d_key", "d_value")
)


def attention(
    query: Tensor, key: Tensor, value: Tensor, call: Call, *, need_tau: bool
) -> tuple[Tensor, Tensor | None] | None:
    """Return the differentiable output, and τ if needed; None if the fast path does not apply.

    It does not apply to uncommon calls, and to calls whose output is not finite.
    """
    score, normalize, mask = call.score, call.normalize, call.mask
    if (
        type(query) not in _TENSOR_TYPES
        or type(key) not in _TENSOR_TYPES
        or type(value) not in _TENSOR_TYPES
        or type(mask) not in _MASKS
        or type(score) not in (ScaledDot, Dot)
        or type(normalize) not in fused.NORMALIZERS
        or call.bias is not None
        or type(call.dropout) not in (float, int)
        or call.dropout
        or call.generator is not None
        or torch.compiler.is_compiling()
        or not plain_cpu(query, key, value)
        or (type(mask) in (Padding, Documents) and mask.cache_key is None)  # type: ignore[union-attr]
    ):
        return None
    shapes = (query.shape, query.stride(), key.shape, key.stride(), value.shape, value.stride())
    cache_key = (shapes, query.dtype, key.dtype, value.dtype, score, normalize, mask)
    cached = _CACHE.get(cache_key)
    if cached is None:
        fast_call = _describe(query, key, value, call)
        if fast_call is None:
            return None
        per_query = ((_QUERY, query), (_OUTPUT, _empty_output(query, value)))
        per_key = ((_KEY, key), (_VALUE, value))
        cached = fast_call, fused.encode(fast_call, per_query, per_key, _empty_tau(fast_call))
        if len(_CACHE) >= _CACHE_SIZE:
            _CACHE.clear()
        if mask is None or query.shape[-2] <= _MAX_CACHED_ROWS:
            _CACHE[cache_key] = cached
    requires_grad = torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
    )
    if requires_grad and query.dtype is not torch.float32:
        return None
    fast_call, numbers = cached[0], cached[1].copy()
    output, tau = _empty_output(query, value), _empty_tau(fast_call) if need_tau or requires_grad else None
    offsets = fused.address_offsets(fast_call, 5)
    for offset, tensor in zip(offsets, (query, output, key, value, tau), strict=True):
        numbers[offset] = 0 if tensor is None else tensor.data_ptr()
    if not fused.run("forward", numbers, fast_call):
        return None
    if not requires_grad:
        return output if query.dtype is torch.float32 else output.to(query.dtype), tau
    # `apply` ends up here, but first spends time on default arguments
    apply = super(torch.autograd.Function, _FastAttention).apply
    return apply((output, tau), fast_call, call, query, key, value)  # type: ignore[no-untyped-call]


class _FastAttention(torch.autograd.Function):
    """Attach the backward pass to a result that is already computed."""

    @staticmethod
    def forward(
        ctx: Any, result: tuple[Tensor, Tensor], fast_call: FastCall, call: Call, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.fast_call, ctx.call = fast_call, call
        ctx.save_for_backward(*inputs, *result)
        ctx.mark_non_differentiable(result[1])
        ctx.set_materialize_grads(False)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 6
        query, key, value, output, tau = ctx.saved_tensors
        needed = ctx.needs_input_grad[3:]
        output = output if output.stride(-1) == 1 else output.contiguous()
        grads = None
        if (
            not torch.is_grad_enabled()
            and type(grad) is Tensor
            and grad.dtype is torch.float32
            and plain_cpu(grad)
            and fused.is_single_segment(ctx.fast_call)
        ):
            inputs = zip((_D_QUERY, _D_KEY, _D_VALUE), (query, key, value), needed, strict=True)
            buffers = [(slot, _empty(*x.shape)) if need else None for slot, x, need in inputs]
            per_query = [(_QUERY, query), (_OUTPUT, output), (_GRAD, grad), *filter(None, buffers[:1])]
            per_key = [(_KEY, key), (_VALUE, value), *filter(None, buffers[1:])]
            if fused.encode_and_run("backward", ctx.fast_call, per_query, per_key, tau):
                grads = [None if buffer is None else buffer[1] for buffer in buffers]
        if grads is None:
            grads = _general_gradients(ctx.call, (query, key, value), needed, output, tau, grad)
        return None, None, None, *grads


def _general_gradients(
    call: Call,
    inputs: tuple[Tensor, Tensor, Tensor],
    needed: tuple[bool, ...],
    output: Tensor,
    tau: Tensor,
    grad: Tensor,
) -> list[Tensor | None]:
    """Gradients by the general path: twice differentiable, NaN-safe, for any width."""
    names = ("query", "key", "value")
    layout = Layout.of(*inputs)
    problem = prepare(*inputs, layout, call).with_config(fused=True)
    wanted = tuple(name for name, need in zip(names, needed, strict=True) if need)
    output, grad = (x.reshape(*tau.shape[:-1], x.shape[-1]) for x in (output, grad))  # … h q e -> … g r q e
    grads = autograd.gradients(problem, tau, output, grad, wanted)
    return [
        grads[name].reshape(x.shape) if name in grads else None for name, x in zip(names, inputs, strict=True)
    ]


def _describe(query: Tensor, key: Tensor, value: Tensor, call: Call) -> FastCall | None:
    """Describe a call for the kernels; None if the fast path does not apply."""
    score, normalize, mask = call.score, call.normalize, call.mask
    unsupported = fused.unsupported_reason(normalize, query.dtype, query.device) is not None
    if unsupported or score.softcap is not None or normalize.sink() is not None:  # type: ignore[union-attr]
        return None
    shape, key_shape, value_shape = query.shape, key.shape, value.shape
    axes = len(shape)
    if (
        not 3 <= axes <= 4
        or len(key_shape) != axes
        or len(value_shape) != axes
        or key_shape[:-1] != value_shape[:-1]
        or key_shape[-1] != shape[-1]
        or key_shape[:-3] != shape[:-3]
        or 0 in shape
        or 0 in key_shape
        or 0 in value_shape
        or max(shape[-2], key_shape[-2]) >= 2**31
        or shape[-3] % key_shape[-3]
        or not query.dtype == key.dtype == value.dtype
    ):
        return None
    groups, keys, width = key_shape[-3:]
    if type(mask) is Padding and (axes == 3 or mask.axes > 1):
        return None  # per-head lengths
    lead = (*shape[:-3], groups, shape[-3] // groups)
    interval = _interval if shape[-2] <= _MAX_CACHED_ROWS else _interval.__wrapped__  # not cached
    start, stop = interval(mask, (*shape[:-2],), shape[-2], keys)
    scale = score.scale if type(score) is ScaledDot else 1.0
    normalizer, counts, sharpness, bias = fused.encode_normalizer(normalize)
    return FastCall(
        lead,
        (shape[-2], keys, width, value_shape[-1]),
        normalizer,
        counts,
        (width**-0.5 if scale is None else scale, sharpness, 0.0, bias, 1.0),
        start,
        stop,
    )


def _empty_output(query: Tensor, value: Tensor) -> Tensor:
    """Allocate the output, with the query's memory order of heads and tokens."""
    if value.shape[-1] == query.shape[-1]:
        output = torch.empty_like(query, dtype=torch.float32)
        if output.stride(-1) == 1:
            return output
    *batch, heads, queries, _ = query.shape
    strides, width = query.stride(), value.shape[-1]
    if heads > 1 and heads * strides[-3] <= strides[-2]:
        return _empty(*batch, queries, heads, width).transpose(-3, -2)
    return _empty(*batch, heads, queries, width)


def _empty_tau(fast_call: FastCall) -> Tensor:
    return _empty(*fast_call.lead, fast_call.sizes[0], 2)


def _empty(*sizes: int) -> Tensor:
    return torch.empty(sizes, dtype=torch.float32, device="cpu")


@lru_cache(maxsize=16)
def _interval(
    mask: Mask | None, lead: tuple[int, ...], queries: int, keys: int
) -> tuple[Tensor | None, Tensor | None]:
    """First visible key of each row and one past the last, … g r q 1."""
    if mask is None:
        return None, None
    with torch.inference_mode(False):
        ((start, stop, _),) = mask.terms(CallShape(lead, queries, keys, torch.device("cpu")))
    sides = (None if side is None else side.long() for side in (start, stop))
    first, last = (None if side is None else _with_axes(side, len(lead) + 3) for side in sides)
    return first, last


def _with_axes(side: Tensor, axes: int) -> Tensor:
    """q 1 -> … 1 1 q 1, or, for a batch, b 1 1 1 -> b 1 1 1 1."""
    return side.unsqueeze(1) if side.dim() > 2 else side[(None,) * (axes - 2)]
