"""The short way to the kernels, for plain calls.

A small call takes the kernels a few microseconds, and making it ready in general many more. So what most
calls look like, (b, h, n, d) or (h, n, d) with a dot product, a mask that follows from positions and no bias,
is written down for the kernels at once. Everything else takes the general way, with the same results.
"""

from collections.abc import Hashable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from regard.mechanism import autograd, fused
from regard.mechanism.call.arguments import Call, prepare
from regard.mechanism.call.layout import Layout
from regard.mechanism.fused import SLOTS, Plain
from regard.mechanism.mask_algebra import CallShape, Mask
from regard.mechanism.masks import Causal, Documents, Padding, Window
from regard.mechanism.scores import Dot, ScaledDot
from regard.mechanism.torch_state import quiet

_PLAIN = {Tensor, nn.Parameter}
_MASKS = {type(None), Causal, Window, Documents, Padding}  # equal ones are the same for ever
_WRITTEN: dict[Hashable, tuple[Plain, list[int]]] = {}  # calls in numbers, all but the addresses
_MOST, _SHORT = 256, 4096  # calls that are kept, and rows of those with a mask
_QUERY, _KEY, _VALUE, _OUTPUT, _GRAD = (SLOTS[name] for name in ("query", "key", "value", "output", "grad"))
_D_QUERY, _D_KEY, _D_VALUE = (SLOTS[name] for name in ("d_query", "d_key", "d_value"))


def attention(
    query: Tensor, key: Tensor, value: Tensor, call: Call, *, weighed: bool
) -> tuple[Tensor, Tensor | None] | None:
    """The output, differentiable, and if it is `weighed` or differentiated τ.

    None for a call that is not plain, or whose output is not finite.
    """
    score, normalize, mask = call.score, call.normalize, call.mask
    if (
        type(query) not in _PLAIN
        or type(key) not in _PLAIN
        or type(value) not in _PLAIN
        or type(mask) not in _MASKS
        or type(score) not in (ScaledDot, Dot)
        or type(normalize) not in fused.NORMALIZERS
        or call.bias is not None
        or type(call.dropout) not in (float, int)
        or call.dropout
        or call.generator is not None
        or torch.compiler.is_compiling()
        or not quiet(query, key, value)
        or (type(mask) in (Padding, Documents) and mask.compared is None)  # type: ignore[union-attr]
    ):
        return None
    shapes = (query.shape, query.stride(), key.shape, key.stride(), value.shape, value.stride())
    known = (shapes, query.dtype, key.dtype, value.dtype, score, normalize, mask)
    found = _WRITTEN.get(known)
    if found is None:
        plain = _read(query, key, value, call)
        if plain is None:
            return None
        per_query = ((_QUERY, query), (_OUTPUT, _room(query, value)))
        per_key = ((_KEY, key), (_VALUE, value))
        found = plain, fused.describe(plain, per_query, per_key, _statistic(plain))
        if len(_WRITTEN) >= _MOST:
            _WRITTEN.clear()
        if mask is None or query.shape[-2] <= _SHORT:  # intervals are held with it
            _WRITTEN[known] = found
    differentiated = torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
    )
    if differentiated and query.dtype is not torch.float32:
        return None
    plain, numbers = found[0], found[1].copy()
    output, tau = _room(query, value), _statistic(plain) if weighed or differentiated else None
    for at, tensor in zip(fused.places(plain, 5), (query, output, key, value, tau), strict=True):
        numbers[at] = 0 if tensor is None else tensor.data_ptr()
    if not fused.run("forward", numbers, plain):
        return None
    if not differentiated:
        return output if query.dtype is torch.float32 else output.to(query.dtype), tau
    # what `apply` calls in the end; it would look for default arguments first, which takes longer
    run = super(torch.autograd.Function, _Short).apply
    return run((output, tau), plain, call, query, key, value)  # type: ignore[no-untyped-call]


class _Short(torch.autograd.Function):
    """A result that has been found already, and its gradient."""

    @staticmethod
    def forward(
        ctx: Any, found: tuple[Tensor, Tensor], plain: Plain, call: Call, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.plain, ctx.call = plain, call
        ctx.save_for_backward(*inputs, *found)
        ctx.mark_non_differentiable(found[1])
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 6
        query, key, value, output, tau = ctx.saved_tensors
        needed = ctx.needs_input_grad[3:]
        output = output if output.stride(-1) == 1 else output.contiguous()
        found = None
        if (
            not torch.is_grad_enabled()
            and type(grad) is Tensor
            and grad.dtype is torch.float32
            and quiet(grad)
            and fused.undivided(ctx.plain)
        ):
            inputs = zip((_D_QUERY, _D_KEY, _D_VALUE), (query, key, value), needed, strict=True)
            rooms = [(slot, _empty(*x.shape)) if need else None for slot, x, need in inputs]
            per_query = [(_QUERY, query), (_OUTPUT, output), (_GRAD, grad), *filter(None, rooms[:1])]
            per_key = [(_KEY, key), (_VALUE, value), *filter(None, rooms[1:])]
            if fused.plainly("backward", ctx.plain, per_query, per_key, tau):
                found = [None if room is None else room[1] for room in rooms]
        if found is None:
            found = _generally(ctx.call, (query, key, value), needed, output, tau, grad)
        return None, None, None, *found


def _generally(
    call: Call,
    inputs: tuple[Tensor, Tensor, Tensor],
    needed: tuple[bool, ...],
    output: Tensor,
    tau: Tensor,
    grad: Tensor,
) -> list[Tensor | None]:
    """The gradients the general way: differentiable again, with care for what is not finite, of any width."""
    names = ("query", "key", "value")
    layout = Layout.of(*inputs)
    problem = prepare(*inputs, layout, call).with_rules(fused=True)
    wanted = tuple(name for name, need in zip(names, needed, strict=True) if need)
    output, grad = (x.reshape(*tau.shape[:-1], x.shape[-1]) for x in (output, grad))  # … h q e -> … g r q e
    found = autograd.gradients(problem, tau, output, grad, wanted)
    return [
        found[name].reshape(x.shape) if name in found else None for name, x in zip(names, inputs, strict=True)
    ]


def _read(query: Tensor, key: Tensor, value: Tensor, call: Call) -> Plain | None:
    """A plain call in numbers, or None for one that is not plain."""
    score, normalize, mask = call.score, call.normalize, call.mask
    refused = fused.refusal(normalize, query.dtype, query.device) is not None
    if refused or score.softcap is not None or normalize.sink() is not None:  # type: ignore[union-attr]
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
        return None  # lengths for each head
    lead = (*shape[:-3], groups, shape[-3] // groups)
    interval = _interval if shape[-2] <= _SHORT else _interval.__wrapped__  # long ones are not kept
    start, stop = interval(mask, (*shape[:-2],), shape[-2], keys)
    scale = score.scale if type(score) is ScaledDot else 1.0
    normalizer, counts, sharpness, bias = fused.plain_normalizer(normalize)
    return Plain(
        lead,
        (shape[-2], keys, width, value_shape[-1]),
        normalizer,
        counts,
        (width**-0.5 if scale is None else scale, sharpness, 0.0, bias, 1.0),
        start,
        stop,
    )


def _room(query: Tensor, value: Tensor) -> Tensor:
    """Room for the output: as everywhere, heads inside the tokens where the query has them so."""
    if value.shape[-1] == query.shape[-1]:
        room = torch.empty_like(query, dtype=torch.float32)
        if room.stride(-1) == 1:
            return room
    *batch, heads, queries, _ = query.shape
    steps, width = query.stride(), value.shape[-1]
    if heads > 1 and heads * steps[-3] <= steps[-2]:
        return _empty(*batch, queries, heads, width).transpose(-3, -2)
    return _empty(*batch, heads, queries, width)


def _statistic(plain: Plain) -> Tensor:
    """Room for τ."""
    return _empty(*plain.lead, plain.sizes[0], 2)


def _empty(*sizes: int) -> Tensor:
    return torch.empty(sizes, dtype=torch.float32, device="cpu")


@lru_cache(maxsize=16)
def _interval(
    mask: Mask | None, lead: tuple[int, ...], queries: int, keys: int
) -> tuple[Tensor | None, Tensor | None]:
    """First key and the one after the last, … g r q 1: the same for every call of these sizes."""
    if mask is None:
        return None, None
    with torch.inference_mode(False):
        ((start, stop, _),) = mask.terms(CallShape(lead, queries, keys, torch.device("cpu")))
    sides = (None if side is None else side.long() for side in (start, stop))
    first, last = (None if side is None else _with_axes(side, len(lead) + 3) for side in sides)
    return first, last


def _with_axes(side: Tensor, axes: int) -> Tensor:
    """q 1 -> … 1 1 q 1, or of a batch b 1 1 1 -> b 1 1 1 1."""
    return side.unsqueeze(1) if side.dim() > 2 else side[(None,) * (axes - 2)]
