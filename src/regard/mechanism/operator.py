"""The attention operator.

scores  = score(query, key)                    … h q k
weights = normalize(mask(scores + bias))       … h q k
output  = weights · value                      … h q e

The kernels finish a small call in a few microseconds; preparing it takes much longer. A call whose score,
mask and normalizer are immutable is therefore prepared once, and its encoding for the kernels is cached. The
next call with the same score, mask, normalizer, shapes and strides only fills in the addresses. In float32,
the kernels look up the encoding themselves (kernels/calls.h), with the same checks as `_run_cached`.
"""

import threading
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Never, Unpack

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from regard.mechanism import autograd, dispatch, fused, reference
from regard.mechanism.autocast import autocast_off, autocasts
from regard.mechanism.call import keyword_hints
from regard.mechanism.call.arguments import (
    Bias,
    Call,
    Layout,
    check_arguments,
    check_shapes,
    prepare,
)
from regard.mechanism.call.arguments import Options as Options
from regard.mechanism.call.problem import Problem, empty_results
from regard.mechanism.call.quantized_call import run as run_quantized
from regard.mechanism.masks.algebra import Mask
from regard.mechanism.masks.by_length import Documents, Padding
from regard.mechanism.masks.by_position import Causal, Window
from regard.mechanism.normalizers import BUILT_IN_TYPES, Normalizer, Sink, Softmax
from regard.mechanism.quantized import Quantized, dequantize
from regard.mechanism.scores import Dot, ScaledDot, Score, ScoreFunction
from regard.mechanism.torch_state import plain_cpu
from regard.mechanism.weights.weights import Weights

_TENSOR_TYPES = {Tensor, nn.Parameter}
_MASKS = {type(None), Causal, Window, Documents, Padding}  # immutable and hashable
_INPUTS = ("query", "key", "value")
_RESULTS = ("output", "tau", "kept_weights")
_MAX_CACHED_ROWS = 4096  # masked calls with more queries are not cached: their intervals are too large
_CACHE_SIZE = 256  # maximum number of cached calls
_CALLS = fused.cached_calls(Weights)  # the kernels' own cache of the float32 calls in `_CACHE`, or None


class _Cache(dict[Hashable, "_PreparedCall | None"]):
    """Cache of prepared calls, with None for calls that must take the general path."""

    def clear(self) -> None:
        super().clear()
        if _CALLS is not None:
            _CALLS.clear()


_CACHE = _Cache()


class _Observer(threading.local):
    """Functions that intercept the attention calls of the current thread.

    Each function is called with query, key, value and options, and returns output and weights, or None if it
    does not handle the call.
    """

    functions: tuple[Callable[[Tensor, Any, Any, Options], tuple[Tensor, Weights] | None], ...] = ()

    def run(self, *call: Any) -> tuple[Tensor, Weights] | None:
        """Return the result of the first function that handles the call."""
        return next((result for run in self.functions if (result := run(*call)) is not None), None)


OBSERVER = _Observer()


def attention(
    query: Tensor,
    key: Tensor | Quantized,
    value: Tensor | Quantized,
    *positional: Never,
    score: Score | ScoreFunction = ScaledDot(),  # noqa: B008 (a frozen value)
    mask: Mask | Tensor | None = None,
    bias: Bias | None = None,
    normalize: Normalizer | Sink = Softmax(),  # noqa: B008
    dropout: float = 0.0,
    generator: torch.Generator | None = None,
    implementation: str | None = None,
    **unknown: Never,
) -> Tensor:
    """Compute attention: (…, h, q, d), (…, g, k, d), (…, g, k, e) → (…, h, q, e).

    Leading axes broadcast; the last leading axis is the heads axis. With grouped-query attention, h is a
    multiple of g, and consecutive query heads share a key head.

    query, key, value: floating-point tensors with the same dtype. key and value can be `Quantized`.
    score: a score, or any function (query, key) → (…, q, k). A function computes a dense matrix.
    mask: a mask, or a boolean tensor (True = may attend).
    bias: a tensor that broadcasts to (…, h, q, k), a relative bias, or a list of these; added to the scores.
    normalize: normalizer that turns scores into weights.
    dropout: dropout probability for the weights, applied in every call; pass 0 for evaluation.
    generator: random number generator for dropout; default: torch's global generator.
    implementation: "reference", "tiled" or "fused"; default: chosen for each call; see `explain`. The
        environment variable REGARD_IMPLEMENTATION sets the default.

    >>> import torch, regard
    >>> query, key, value = torch.randn(2, 8, 5, 16), torch.randn(2, 4, 7, 16), torch.randn(2, 4, 7, 3)
    >>> regard.attention(query, key, value, mask=regard.Causal(), normalize=regard.Entmax(1.5)).shape
    torch.Size([2, 8, 5, 3])
    """
    if positional or unknown:
        keyword_hints.raise_unexpected("attention", positional, unknown)
    if OBSERVER.functions:
        options = Options(
            score=score, mask=mask, bias=bias, normalize=normalize, dropout=dropout, generator=generator,
            implementation=implementation,
        )  # fmt: skip
        if (observed := OBSERVER.run(query, key, value, options)) is not None:
            return observed[0]
    ready = None
    if bias is None and generator is None and implementation is None and _kernels_decide(dropout):
        ready = _CALLS.run(query, key, value, score, mask, normalize, False)
        if type(ready) is Tensor:
            return ready
    call = Call(score, mask, bias, normalize, dropout, generator)
    return _run(query, key, value, call, implementation, ready, need_tau=False).output


def attend(
    query: Tensor,
    key: Tensor | Quantized,
    value: Tensor | Quantized,
    *positional: Never,
    score: Score | ScoreFunction = ScaledDot(),  # noqa: B008
    mask: Mask | Tensor | None = None,
    bias: Bias | None = None,
    normalize: Normalizer | Sink = Softmax(),  # noqa: B008
    dropout: float = 0.0,
    generator: torch.Generator | None = None,
    implementation: str | None = None,
    **unknown: Never,
) -> tuple[Tensor, Weights]:
    """Compute attention and return the output and the lazy weights after dropout, (…, h, q, k).

    Takes the same arguments as `attention`: query, key and value, and the keywords score, mask, bias,
    normalize, dropout, generator and implementation.

    >>> import torch, regard
    >>> x = torch.eye(3)
    >>> output, weights = regard.attend(x, x, x, mask=regard.Causal())
    >>> weights[2]
    tensor([0.2645, 0.2645, 0.4711])
    >>> torch.allclose(weights @ x, output)
    True
    """
    if positional or unknown:
        keyword_hints.raise_unexpected("attend", positional, unknown)
    if OBSERVER.functions:
        options = Options(
            score=score, mask=mask, bias=bias, normalize=normalize, dropout=dropout, generator=generator,
            implementation=implementation,
        )  # fmt: skip
        if (observed := OBSERVER.run(query, key, value, options)) is not None:
            return observed
    ready = None
    if bias is None and generator is None and implementation is None and _kernels_decide(dropout):
        ready = _CALLS.run(query, key, value, score, mask, normalize, True)
        if ready is not None and len(ready) == 2:  # no gradients are needed
            return ready
    call = Call(score, mask, bias, normalize, dropout, generator)
    output, tau, fused_tau, problem, cached = _run(
        query, key, value, call, implementation, ready, need_tau=True
    )
    if problem is not None:
        weights = Weights(problem.without("value"), tau, output.shape[:-2], tau_from_kernels=fused_tau)
        return output, weights
    assert cached is not None
    assert tau is not None
    assert isinstance(key, Tensor)  # calls with a quantized key are not cached if τ is needed
    return output, Weights.of_cached_call(cached.weights, tau, query, key, cached.lead)


def self_attention(x: Tensor, *positional: Never, **options: Unpack[Options]) -> Tensor:
    """Compute self-attention, with x as query, key and value.

    options: keyword arguments of `attention`.

    >>> import torch, regard
    >>> regard.self_attention(torch.randn(5, 4), mask=regard.Causal()).shape
    torch.Size([5, 4])
    """
    return attention(x, x, x, *positional, **options)


class _Result(NamedTuple):
    output: Tensor
    tau: Tensor | None
    fused_tau: bool  # whether the kernels computed τ
    problem: Problem | None  # None for a cached call
    cached: "_PreparedCall | None" = None  # None for a call that is not cached


def _kernels_decide(dropout: float) -> bool:
    """Whether the kernels may look up a call in their cache. Callers have checked all other arguments."""
    return (
        type(dropout) is float
        and dropout == 0
        and _CALLS is not None
        and dispatch.FROM_ENVIRONMENT in (None, "fused")
        and not is_compiling()
    )


def _run(
    query: Tensor,
    key: Tensor | Quantized,
    value: Tensor | Quantized,
    call: Call,
    implementation: str | None,
    ready: tuple[Tensor, Tensor, "_PreparedCall", bool, Tensor | None] | None,
    *,
    need_tau: bool,
) -> _Result:
    """Run a cached call, or prepare the call, select an implementation and run it.

    ready: output, τ, the cached call, whether gradients are needed, and the kept weights, if the kernels
        found the call in their cache; otherwise None.
    """
    if ready is not None:
        return _differentiable(*ready, call, query, key, value)  # type: ignore[arg-type]
    if implementation is None and dispatch.FROM_ENVIRONMENT in (None, "fused"):
        # `_run_cached` returns None for quantized tensors
        result = _run_cached(query, key, value, call, need_tau=need_tau)  # type: ignore[arg-type]
        if result is not None:
            return result
    if isinstance(key, Quantized) or isinstance(value, Quantized):
        check_arguments(query, key, value, call)
        if (implementation or dispatch.FROM_ENVIRONMENT or "fused") == "fused":
            quantized = run_quantized(query, key, value, call, need_tau=need_tau)
            if quantized is not None:
                return _Result(quantized.output, quantized.tau, True, quantized.problem)
        key, value = dequantize(key), dequantize(value)
    device = query.device.type if isinstance(query, Tensor) else "cpu"
    if autocasts(device):
        query, key, value = (_autocast(tensor) for tensor in (query, key, value))
    with autocast_off(device):
        check_arguments(query, key, value, call)
        layout = Layout.of(query, key, value)
        problem = prepare(query, key, value, layout, call)
        chosen, _ = dispatch.choose(problem, implementation)
        if chosen == "reference":
            output, tau = reference.attention(problem.nan_checked())
            fused_tau = False
        else:
            problem = problem.with_config(fused=chosen == "fused")
            output, tau, fused_tau = autograd.run(problem)
        return _Result(layout.merge(output).to(query.dtype), tau.detach(), fused_tau, problem)


def _autocast(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.dtype is torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


class _PreparedCall(NamedTuple):
    """A call that the kernels have decoded, except for the addresses of its inputs and results."""

    call: fused.Prepared
    output_shape: tuple[int, ...]
    output_stride: tuple[int, ...]
    tau_shape: tuple[int, ...]
    kept_shape: tuple[int, ...] | None  # shape of the weights that are kept for the backward pass
    simple_backward: bool  # gradients need no segments, padding or sums over broadcast axes
    lanes: int  # vector width for which `kept_shape` and `simple_backward` were determined
    backward: dict[Hashable, fused.Prepared]  # keyed by required gradients and strides
    weights: Problem  # query and key, which differ in each call, are placeholders
    lead: tuple[int, ...]  # leading axes of output and weights


def _run_cached(query: Tensor, key: Tensor, value: Tensor, call: Call, *, need_tau: bool) -> _Result | None:
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
        or is_compiling()
        or not plain_cpu(query, key, value)
        or (type(mask) in (Padding, Documents) and mask.cache_key is None)  # type: ignore[union-attr]
    ):
        return None
    shapes = (query.shape, query.stride(), key.shape, key.stride(), value.shape, value.stride())
    normalize = call.normalize
    # the key includes the type, as in the kernels, because Entmax(1.5) == Entmax15()
    settings = (call.score, type(normalize), normalize, mask)
    cache_key = (shapes, query.dtype, key.dtype, value.dtype, *settings)
    try:
        prepared = _CACHE[cache_key]
    except KeyError:
        prepared = _prepare(query, key, value, call)
        if len(_CACHE) >= _CACHE_SIZE:
            _CACHE.clear()
        if mask is None or query.shape[-2] <= _MAX_CACHED_ROWS:
            _CACHE[cache_key] = prepared
            if _CALLS is not None and prepared is not None and query.dtype is torch.float32:
                _add_to_kernels(query, key, value, call, prepared)
    if prepared is None:
        return None
    requires_grad = torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
    )
    if requires_grad and query.dtype is not torch.float32:
        return None
    shape, stride = prepared.output_shape, prepared.output_stride
    output = torch.empty_strided(shape, stride, dtype=query.dtype, device="cpu")
    tau = None
    if need_tau or requires_grad:
        tau = torch.empty(prepared.tau_shape, dtype=torch.float32, device="cpu")
    kept_weights = None
    if requires_grad and prepared.kept_shape is not None and prepared.lanes == fused.lanes():
        kept_weights = torch.empty(prepared.kept_shape, dtype=torch.float32, device="cpu")
    if not prepared.call.forward(query, key, value, output, tau, kept_weights):
        return None
    return _differentiable(output, tau, prepared, requires_grad, kept_weights, call, query, key, value)


def _differentiable(
    output: Tensor,
    tau: Tensor | None,
    prepared: "_PreparedCall",
    requires_grad: bool,
    kept_weights: Tensor | None,
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> _Result:
    """Return the result of a cached call, with its backward pass if gradients are required."""
    if requires_grad:
        # avoids the overhead of `_FastAttention.apply`, which first binds default arguments
        apply = super(torch.autograd.Function, _FastAttention).apply
        results = (output, tau), kept_weights
        output, tau = apply(*results, prepared, call, query, key, value)  # type: ignore[no-untyped-call]
    return _Result(output, tau, True, None, prepared)


def _add_to_kernels(query: Tensor, key: Tensor, value: Tensor, call: Call, prepared: _PreparedCall) -> None:
    """Add a float32 call to the kernels' own cache."""
    tau_stride = torch.empty(prepared.tau_shape, device="meta").stride()
    kept = prepared.kept_shape
    kept_stride = None if kept is None else torch.empty(kept, device="meta").stride()
    shapes = (
        prepared.output_shape,
        prepared.output_stride,
        prepared.tau_shape,
        tau_stride,
        kept,
        kept_stride,
    )
    parts = (call.score, call.mask, call.normalize)
    _CALLS.add(query, key, value, *parts, prepared.call.handle, prepared, shapes)


def _prepare(query: Tensor, key: Tensor, value: Tensor, call: Call) -> _PreparedCall | None:
    """Check a call, prepare it and encode it. Returns None if the call cannot be cached."""
    check_shapes(query, key, value)  # `_run_cached` has checked all other arguments
    problem, layout = _problem(query, key, value, call)
    # only the last of `dispatch.RULES` can apply to plain tensors and built-in normalizers
    if fused.unsupported(problem) is not None or 0 in (*problem.lead(), problem.queries, problem.keys):
        return None
    addresses = [problem[name].data_ptr() for name in _INPUTS]
    if "sink" in problem.tensors or addresses != [x.data_ptr() for x in (query, key, value)]:
        return None  # the encoding would contain the address of the sink or of a copy
    output, tau = empty_results(problem, keep_dtype=True)
    merged = layout.merge(output)
    if merged.data_ptr() != output.data_ptr():
        return None
    *units, per_group = problem.lead()
    whole = problem["query"].shape[-3] == per_group and all(
        problem[name].shape[:-3] == tuple(units) for name in _INPUTS
    )
    shapes = {n: torch.empty(problem[n].shape, dtype=torch.float32, device="meta") for n in ("query", "key")}
    simple_backward = whole and fused.is_single_segment(problem)
    results = {"output": output, "tau": tau}
    kept_shape = fused.kept_weights_shape(problem) if simple_backward else None
    if kept_shape is not None:
        results["kept_weights"] = torch.empty(kept_shape)
    return _PreparedCall(
        fused.prepare_call(problem, results, (*_INPUTS, *_RESULTS)),
        tuple(merged.shape),
        merged.stride(),
        tuple(tau.shape),
        kept_shape,
        simple_backward,
        fused.lanes(),
        {},
        problem.with_config(fused=True).with_tensors({**problem.tensors, **shapes}).without("value"),
        tuple(merged.shape[:-2]),
    )


def _problem(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Problem, Layout]:
    layout = Layout.of(query, key, value)
    with torch.inference_mode(False), torch.no_grad():  # cached intervals must not be inference tensors
        return prepare(query, key, value, layout, call, keep_dtype=True), layout


class _FastAttention(torch.autograd.Function):
    """Attach the backward pass to an output that is already computed."""

    @staticmethod
    def forward(
        ctx: Any,
        result: tuple[Tensor, Tensor],
        kept_weights: Tensor | None,
        prepared: _PreparedCall,
        call: Call,
        *inputs: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.prepared, ctx.call = prepared, call
        ctx.save_for_backward(*inputs, *result, kept_weights)
        ctx.mark_non_differentiable(result[1])
        ctx.set_materialize_grads(False)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 7
        query, key, value, output, tau, kept = ctx.saved_tensors
        wanted = tuple(name for name, need in zip(_INPUTS, ctx.needs_input_grad[4:], strict=True) if need)
        grads = None
        if (
            ctx.prepared.simple_backward
            and ctx.prepared.lanes == fused.lanes()
            and not torch.is_grad_enabled()
            and type(grad) is Tensor
            and grad.dtype is torch.float32
            and plain_cpu(grad)
        ):
            output = output if output.stride(-1) == 1 else output.contiguous()
            saved = {"query": query, "key": key, "value": value, "tau": tau, "output": output, "grad": grad}
            # saved-tensor hooks may have replaced the weights
            if (
                kept is not None
                and kept.dtype is torch.float32
                and kept.shape == ctx.prepared.kept_shape
                and kept.is_contiguous()
            ):
                saved["kept_weights"] = kept
            grads = _kernel_gradients(ctx.prepared, ctx.call, saved, wanted)
        if grads is None:
            grads = _general_gradients(ctx.call, query, key, value, output, tau, grad, wanted)
        return None, None, None, None, *(grads.get(name) for name in _INPUTS)


def _kernel_gradients(
    prepared: _PreparedCall, call: Call, saved: dict[str, Tensor], wanted: tuple[str, ...]
) -> dict[str, Tensor] | None:
    """Compute the gradients with one kernel call. Returns None if they are not finite."""
    grads = {name: torch.empty(saved[name].shape, dtype=torch.float32, device="cpu") for name in wanted}
    # saved-tensor hooks may have replaced tensors, so the shapes are part of the key
    cache_key = (wanted, *((x.shape, x.stride(), x.dtype) for x in saved.values()))
    backward = prepared.backward.get(cache_key)
    if backward is None:
        if len(prepared.backward) >= _CACHE_SIZE:
            prepared.backward.clear()
        problem, layout = _problem(saved["query"], saved["key"], saved["value"], call)
        split = {"query": layout.per_query, "key": layout.per_key, "value": layout.per_key}
        results = {f"d_{name}": split[name](grad) for name, grad in grads.items()}
        extra = {name: layout.per_query(saved[name]) for name in ("output", "grad")}
        extra |= {name: saved[name] for name in ("tau", "kept_weights") if name in saved}
        backward = prepared.backward[cache_key] = fused.prepare_call(
            problem, {**extra, **results}, (*saved, *results)
        )
    return grads if backward.backward(*saved.values(), *grads.values()) else None


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
