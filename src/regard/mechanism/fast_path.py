"""Cache of prepared calls, checked before dispatch.

The kernels finish a small call in a few microseconds; preparing it takes much longer. A call whose score,
mask and normalizer are immutable is therefore prepared once, and its encoding for the kernels is cached. The
next call with the same score, mask, normalizer, shapes and strides only fills in five addresses.
"""

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.mechanism import autograd, dispatch, fused
from regard.mechanism.call.arguments import Call, Layout, check_inputs, prepare
from regard.mechanism.call.problem import Problem, empty_results
from regard.mechanism.masks import Causal, Documents, Padding, Window
from regard.mechanism.normalizers import BUILT_IN_TYPES
from regard.mechanism.scores import Dot, ScaledDot
from regard.mechanism.torch_state import plain_cpu

_TENSOR_TYPES = {Tensor, nn.Parameter}
_MASKS = {type(None), Causal, Window, Documents, Padding}  # immutable and hashable
_INPUTS = ("query", "key", "value")
_MAX_CACHED_ROWS = 4096  # masked calls with more queries are not cached: their intervals are too large
_CACHE_SIZE = 256  # calls
_CACHE: dict[Hashable, "_PreparedCall | None"] = {}  # None: the call takes the general path


class _PreparedCall(NamedTuple):
    """A call in the kernels' encoding, except for the addresses of its inputs and results."""

    forward: fused.Encoded
    output_shape: tuple[int, ...]
    output_stride: tuple[int, ...]
    tau_shape: tuple[int, ...]
    simple_backward: bool  # gradients need no segments, padding or sums over broadcast axes
    backward: dict[Hashable, fused.Encoded]  # keyed by required gradients and strides


def attention(
    query: Tensor, key: Tensor, value: Tensor, call: Call, *, need_tau: bool
) -> tuple[Tensor, Tensor | None] | None:
    """Return the differentiable output, and τ if needed, or None if the caller must take the general path.

    The general path is necessary if the call cannot be cached or its output is not finite.
    """
    mask = call.mask
    if (
        type(query) not in _TENSOR_TYPES
        or type(key) not in _TENSOR_TYPES
        or type(value) not in _TENSOR_TYPES
        or type(mask) not in _MASKS
        or type(call.score) not in (ScaledDot, Dot)
        or type(call.normalize) not in BUILT_IN_TYPES
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
    cache_key = (shapes, query.dtype, key.dtype, value.dtype, call.score, call.normalize, mask)
    try:
        prepared = _CACHE[cache_key]
    except KeyError:
        prepared = _prepare(query, key, value, call)
        if len(_CACHE) >= _CACHE_SIZE:
            _CACHE.clear()
        if mask is None or query.shape[-2] <= _MAX_CACHED_ROWS:
            _CACHE[cache_key] = prepared
    if prepared is None:
        return None
    requires_grad = torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
    )
    if requires_grad and query.dtype is not torch.float32:
        return None
    output = torch.empty_strided(prepared.output_shape, prepared.output_stride, dtype=torch.float32)
    tau = None
    if need_tau or requires_grad:
        tau = torch.empty(prepared.tau_shape, dtype=torch.float32, device="cpu")
    if not prepared.forward.run("forward", (query, key, value, output, tau)):
        return None
    if not requires_grad:
        return output if query.dtype is torch.float32 else output.to(query.dtype), tau
    # skips the overhead of `apply`, which binds default arguments before it calls this
    apply = super(torch.autograd.Function, _FastAttention).apply
    return apply((output, tau), prepared, call, query, key, value)  # type: ignore[no-untyped-call]


def _prepare(query: Tensor, key: Tensor, value: Tensor, call: Call) -> _PreparedCall | None:
    """Check a call, prepare it and encode it. Returns None if the call cannot be cached."""
    check_inputs(query, key, value)
    problem, layout = _problem(query, key, value, call)
    if dispatch.choose(problem)[0] != "fused" or 0 in (*problem.lead(), problem.queries, problem.keys):
        return None
    addresses = [problem[name].data_ptr() for name in _INPUTS]
    if "sink" in problem.tensors or addresses != [x.data_ptr() for x in (query, key, value)]:
        return None  # the encoding would contain the address of a copy
    output, tau = empty_results(problem)
    merged = layout.merge(output)
    if merged.data_ptr() != output.data_ptr():
        return None
    *units, per_group = problem.lead()
    whole = problem["query"].shape[-3] == per_group and all(
        problem[name].shape[:-3] == tuple(units) for name in _INPUTS
    )
    return _PreparedCall(
        fused.encode(problem, {"output": output, "tau": tau}, addresses=(*_INPUTS, "output", "tau")),
        tuple(merged.shape),
        merged.stride(),
        tuple(tau.shape),
        whole and fused.is_single_segment(problem),
        {},
    )


def _problem(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Problem, Layout]:
    layout = Layout.of(query, key, value)
    with torch.inference_mode(False), torch.no_grad():  # cached intervals must not be inference tensors
        return prepare(query, key, value, layout, call, keep_dtype=True), layout


class _FastAttention(torch.autograd.Function):
    """Attach the backward pass to an output that is already computed."""

    @staticmethod
    def forward(
        ctx: Any, result: tuple[Tensor, Tensor], prepared: _PreparedCall, call: Call, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.prepared, ctx.call = prepared, call
        ctx.save_for_backward(*inputs, *result)
        ctx.mark_non_differentiable(result[1])
        ctx.set_materialize_grads(False)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 6
        query, key, value, output, tau = ctx.saved_tensors
        wanted = tuple(name for name, need in zip(_INPUTS, ctx.needs_input_grad[3:], strict=True) if need)
        grads = None
        if (
            ctx.prepared.simple_backward
            and not torch.is_grad_enabled()
            and type(grad) is Tensor
            and grad.dtype is torch.float32
            and plain_cpu(grad)
        ):
            output = output if output.stride(-1) == 1 else output.contiguous()
            saved = {"query": query, "key": key, "value": value, "tau": tau, "output": output, "grad": grad}
            grads = _kernel_gradients(ctx.prepared, ctx.call, saved, wanted)
        if grads is None:
            grads = _general_gradients(ctx.call, query, key, value, output, tau, grad, wanted)
        return None, None, None, *(grads.get(name) for name in _INPUTS)


def _kernel_gradients(
    prepared: _PreparedCall, call: Call, saved: dict[str, Tensor], wanted: tuple[str, ...]
) -> dict[str, Tensor] | None:
    """Compute the gradients with one kernel call. Returns None if they are not finite."""
    grads = {name: torch.empty(saved[name].shape, dtype=torch.float32, device="cpu") for name in wanted}
    # hooks on saved tensors can change the strides of any of them
    cache_key = (wanted, *(x.stride() for x in saved.values()))
    encoded = prepared.backward.get(cache_key)
    if encoded is None:
        problem, layout = _problem(saved["query"], saved["key"], saved["value"], call)
        split = {"query": layout.per_query, "key": layout.per_key, "value": layout.per_key}
        results = {f"d_{name}": split[name](grad) for name, grad in grads.items()}
        extra = {name: layout.per_query(saved[name]) for name in ("output", "grad")}
        encoded = prepared.backward[cache_key] = fused.encode(
            problem, {"tau": saved["tau"], **extra, **results}, addresses=(*saved, *results)
        )
    return grads if encoded.run("backward", (*saved.values(), *grads.values())) else None


def _general_gradients(
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    tau: Tensor,
    grad: Tensor,
    wanted: tuple[str, ...],
) -> dict[str, Tensor]:
    """Compute the gradients on the general path, which is differentiable, NaN-safe and supports any width."""
    problem = prepare(query, key, value, Layout.of(query, key, value), call).with_config(fused=True)
    output, grad = (x.reshape(*tau.shape[:-1], x.shape[-1]) for x in (output, grad))  # … h q e -> … g r q e
    grads = autograd.gradients(problem, tau, output, grad, wanted)
    shapes = {"query": query.shape, "key": key.shape, "value": value.shape}
    return {name: grads[name].reshape(shapes[name]) for name in wanted}
