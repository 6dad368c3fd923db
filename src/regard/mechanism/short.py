"""The short way to the kernels, for plain calls.

A small call takes the kernels a few microseconds, and making it ready in general many more. So what most
calls look like, (b, h, n, d) or (h, n, d) with a dot product, a mask that follows from positions and no bias,
is written down for the kernels at once. Everything else takes the general way, with the same results.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from regard.mechanism import derivatives, fused
from regard.mechanism.concrete import forward_mode
from regard.mechanism.layout import Layout
from regard.mechanism.masking import Scene
from regard.mechanism.masks import Causal, Rule, Window
from regard.mechanism.normalizers import Sigmoid, Softmax
from regard.mechanism.prepare import Call, prepare
from regard.mechanism.scores import Dot, ScaledDot

_PLAIN = {Tensor, nn.Parameter}


def attention(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor] | None:
    """The output and τ, differentiable; None for a call that is not plain, or whose output is not finite."""
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))):
        return _solve(query, key, value, call)
    if query.dtype is not torch.float32:
        return None
    found = _solve(query, key, value, call)
    # what `apply` calls in the end, without a search for default arguments that takes longer than a small call
    return (
        None
        if found is None
        else super(torch.autograd.Function, _Short).apply(found, call, query, key, value)
    )  # type: ignore[misc]


class _Short(torch.autograd.Function):
    """A result that has been found already, and its gradient."""

    @staticmethod
    def forward(
        ctx: Any, found: tuple[Tensor, Tensor], call: Call, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.call = call
        ctx.save_for_backward(query, key, value, *found)
        ctx.mark_non_differentiable(found[1])
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 5
        *inputs, output, tau = ctx.saved_tensors
        layout = Layout.of(*inputs)
        problem = prepare(*inputs, layout, ctx.call).with_rules(fused=True)
        needed = zip(("query", "key", "value"), ctx.needs_input_grad[2:], strict=True)
        wanted = tuple(name for name, need in needed if need)
        found = derivatives.gradients(problem, tau, layout.per_query(output), layout.per_query(grad), wanted)
        parts = (found.get(name) for name in ("query", "key", "value"))
        shaped = (
            part if part is None else part.reshape(x.shape) for part, x in zip(parts, inputs, strict=True)
        )
        return None, None, *shaped


def _solve(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor] | None:
    """The output and τ of a plain call."""
    score, normalize, mask = call.score, call.normalize, call.mask
    if (
        type(query) not in _PLAIN
        or type(key) not in _PLAIN
        or type(value) not in _PLAIN
        or (mask is not None and type(mask) is not Causal and type(mask) is not Window)
        or type(score) not in (ScaledDot, Dot)
        or score.softcap is not None  # type: ignore[union-attr]
        or call.bias is not None
        or call.dropout
        or call.generator is not None
        or torch.compiler.is_compiling()
        or not _quiet(query, key, value)
        or fused.refusal(normalize, query.dtype, query.device) is not None
        or normalize.sink() is not None
    ):
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
        or not query.numel()
        or not value.numel()
        or not key.numel()
        or shape[-3] % key_shape[-3]
        or not query.dtype == key.dtype == value.dtype
        or not query.device == key.device == value.device
    ):
        return None
    heads, queries, width = shape[-3:]
    groups, keys, value_width = key_shape[-3], key_shape[-2], value_shape[-1]
    batch, each = shape[:-3], heads // groups
    strides = query.stride()
    # as everywhere: heads inside the tokens where the query has them so
    inside = heads > 1 and heads * strides[-3] <= strides[-2]
    sizes = (*batch, queries, heads, value_width) if inside else (*batch, heads, queries, value_width)
    output = torch.empty(sizes, dtype=torch.float32)
    output = output.transpose(-3, -2) if inside else output
    tau = torch.empty((*batch, groups, each, queries, 2), dtype=torch.float32)
    start, stop = (None, None) if mask is None else _interval(mask, queries, keys)
    scale = score.scale if type(score) is ScaledDot else 1.0
    finite = fused.call_plainly(
        (*batch, groups, each),
        (queries, keys, width, value_width),
        normalize,
        (
            width**-0.5 if scale is None else scale,
            1 / normalize.temperature if type(normalize) is Softmax else 1.0,
            0.0,
            normalize.bias or 0.0 if type(normalize) is Sigmoid else 0.0,
            1.0,
        ),
        (query, key, value, output, tau, start, stop),
    )
    if not finite:
        return None
    return output if query.dtype is torch.float32 else output.to(query.dtype), tau


def _quiet(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether nobody transforms, traces, converts or watches."""
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or forward_mode()
        or torch.is_autocast_enabled("cpu")
        or query.is_neg()
        or key.is_neg()
        or value.is_neg()
        or torch._C._functorch.is_legacy_batchedtensor(query)
        or torch._C._functorch.is_legacy_batchedtensor(key)
        or torch._C._functorch.is_legacy_batchedtensor(value)
    )


@lru_cache(maxsize=16)
def _interval(mask: Rule, queries: int, keys: int) -> tuple[Tensor | None, Tensor | None]:
    """First key and the one after the last, for each row: the same for every call of these sizes."""
    with torch.inference_mode(False):
        ((start, stop, _),) = mask.terms(Scene((), queries, keys, torch.device("cpu")))
    return start, stop
