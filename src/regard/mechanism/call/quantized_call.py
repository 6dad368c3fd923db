"""Run calls with quantized keys or values on the kernels, which read int8 in place.

`run` returns None if the kernels cannot compute a call. The caller then dequantizes key and value, because
the general path supports only floating-point tensors.
"""

from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.mechanism import fused
from regard.mechanism.call.arguments import Call, Layout, as_biases, prepare
from regard.mechanism.call.problem import Problem, empty_results
from regard.mechanism.masks.by_length import Documents, Padding
from regard.mechanism.masks.by_position import Causal, Window
from regard.mechanism.normalizers import BUILT_IN_TYPES, Softmax1
from regard.mechanism.quantized import Quantized
from regard.mechanism.scores import Dot, ScaledDot
from regard.mechanism.torch_state import plain_cpu

_NAMES = ("query", "key", "value", "key_scale", "value_scale", "output", "tau")
_MASKS = {type(None), Causal, Window, Documents, Padding}  # immutable and hashable
_MAX_CACHED_ROWS = 64
_CACHE_SIZE = 256
_CACHE: dict[Hashable, "_PreparedCall | None"] = {}  # None: the call cannot be cached


class QuantizedResult(NamedTuple):
    """The output and, if τ is needed, τ and the prepared call without value."""

    output: Tensor
    tau: Tensor | None
    problem: Problem | None


def run(
    query: Tensor, key: Tensor | Quantized, value: Tensor | Quantized, call: Call, *, need_tau: bool
) -> QuantizedResult | None:
    """Run a checked call on the kernels; return None if it is unsupported or its result is not finite."""
    if unsupported(query, key, value, call) is not None:
        return None
    if not need_tau:
        prepared = _prepared_call(query, key, value, call)
        if prepared is not None:
            output = prepared(query, key, value)
            return None if output is None else QuantizedResult(output, None, None)
    problem, layout = build_problem(query, key, value, call)
    if fused.unsupported(problem) is not None or _is_empty(problem):
        return None
    result = fused.forward(problem)
    if result is None:
        return None
    output, tau = result
    output = layout.merge(output).to(query.dtype)
    return QuantizedResult(output, tau, problem.without("value", "value_scale"))


def unsupported(query: Tensor, key: Tensor | Quantized, value: Tensor | Quantized, call: Call) -> str | None:
    """Return the reason why quantized tensors must be dequantized for a call, or None."""
    if torch.compiler.is_compiling():
        return "torch.compile traces torch operations"
    if query.dtype is torch.float64:
        return "float64 has no kernel"
    if type(call.score) not in (ScaledDot, Dot):
        return "only Dot and ScaledDot support int8 keys"
    tensors = _tensors(query, key, value)
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return f"there are no kernels for {query.device.type}"
    if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors) or not plain_cpu(*tensors):
        return "a transform, tracing or autocast is active, or a tensor is an instance of a subclass"
    if torch.is_grad_enabled() and _requires_grad(query, key, value, call):
        return "a gradient is needed"
    return None


def _requires_grad(query: Tensor, key: Tensor | Quantized, value: Tensor | Quantized, call: Call) -> bool:
    tensors = [x.scale if isinstance(x, Quantized) else x for x in (query, key, value)]
    modules = [x for x in (*as_biases(call.bias), call.normalize) if isinstance(x, nn.Module)]
    tensors += [bias for bias in as_biases(call.bias) if isinstance(bias, Tensor)]
    tensors += [parameter for module in modules for parameter in module.parameters()]
    if isinstance(call.normalize, Softmax1) and isinstance(call.normalize.score, Tensor):
        tensors.append(call.normalize.score)
    return any(tensor.requires_grad for tensor in tensors)


def build_problem(
    query: Tensor, key: Tensor | Quantized, value: Tensor | Quantized, call: Call
) -> tuple[Problem, Layout]:
    """Prepare a call without dequantizing its int8 keys and values."""
    layout = Layout.of(query, key, value)
    with torch.inference_mode(False), torch.no_grad():  # cached intervals must not be inference tensors
        problem = prepare(query.detach(), _stand_in(key), _stand_in(value), layout, call)
    tensors = dict(problem.tensors)
    for name, x in (("key", key), ("value", value)):
        if isinstance(x, Quantized):
            tensors |= {name: layout.per_key(x.values), f"{name}_scale": layout.per_key(x.scale)}
    return problem.with_tensors(tensors).with_config(fused=True), layout


def _stand_in(x: Tensor | Quantized) -> Tensor:
    """Return a tensor with the shape of x. It takes no memory if x is quantized."""
    return torch.zeros(()).expand(x.shape) if isinstance(x, Quantized) else x.detach()


class _PreparedCall(NamedTuple):
    """A call that the kernels have decoded, except for the addresses of its inputs and output."""

    call: fused.Prepared
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __call__(self, query: Tensor, key: Tensor | Quantized, value: Tensor | Quantized) -> Tensor | None:
        """Return the output, or None if it is not finite."""
        output = torch.empty_strided(self.shape, self.stride, dtype=torch.float32)
        (key_data, key_scale), (value_data, value_scale) = _data(key), _data(value)
        scales = [scale for scale in (key_scale, value_scale) if scale is not None]
        finite = self.call.forward(query, key_data, value_data, *scales, output, None)
        return output if finite else None


def _prepared_call(
    query: Tensor, key: Tensor | Quantized, value: Tensor | Quantized, call: Call
) -> _PreparedCall | None:
    """Return the prepared call from the cache, or None if the call cannot be cached."""
    mask = call.mask
    if (
        type(mask) not in _MASKS
        or type(call.normalize) not in BUILT_IN_TYPES
        or call.bias is not None
        or call.dropout
        or query.dtype is not torch.float32
        or query.shape[-2] > _MAX_CACHED_ROWS
        or (type(mask) in (Padding, Documents) and mask.cache_key is None)  # type: ignore[union-attr]
    ):
        return None
    layouts = tuple((x.dtype, x.shape, x.stride()) for x in _tensors(query, key, value))
    cache_key = (layouts, call.score, call.normalize, mask)
    try:
        return _CACHE[cache_key]
    except KeyError:
        prepared = _prepare(query, key, value, call)
        if len(_CACHE) >= _CACHE_SIZE:
            _CACHE.clear()
        _CACHE[cache_key] = prepared
        return prepared


def _prepare(
    query: Tensor, key: Tensor | Quantized, value: Tensor | Quantized, call: Call
) -> _PreparedCall | None:
    problem, layout = build_problem(query, key, value, call)
    if fused.unsupported(problem) is not None or _is_empty(problem) or "sink" in problem.tensors:
        return None
    inputs = (query, _data(key)[0], _data(value)[0])
    if any(problem[name].data_ptr() != x.data_ptr() for name, x in zip(_NAMES, inputs, strict=False)):
        return None  # the encoding would contain the address of a copy
    output, tau = empty_results(problem)
    merged = layout.merge(output)
    if merged.data_ptr() != output.data_ptr():
        return None
    names = [name for name in _NAMES if name in problem.tensors or name in ("output", "tau")]
    call_ = fused.prepare_call(problem, {"output": output, "tau": tau}, names)
    return _PreparedCall(call_, tuple(merged.shape), merged.stride())


def _data(x: Tensor | Quantized) -> tuple[Tensor, Tensor | None]:
    return (x.values, x.scale) if isinstance(x, Quantized) else (x, None)


def _tensors(*inputs: Tensor | Quantized) -> list[Tensor]:
    return [tensor for x in inputs for tensor in _data(x) if tensor is not None]


def _is_empty(problem: Problem) -> bool:
    return 0 in (*problem.lead(), problem.queries, problem.keys)
