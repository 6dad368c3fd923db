"""Fused implementation: C++ kernels that compute the scores tile by tile.

This module has the same interface as `tiled`, except that a function returns None if its result is not
finite. The caller then recomputes the result with `tiled`, which is NaN-safe.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import DTypeError
from regard.mechanism.call.problem import Problem, empty_in_order, empty_results, kind
from regard.mechanism.kernels.dtypes import TYPES
from regard.mechanism.kernels.library import DESCRIPTION as DESCRIPTION
from regard.mechanism.kernels.library import KERNELS, MATCHES, NORMALIZERS, SCORES, SLOTS
from regard.mechanism.normalizers import BUILT_IN_TYPES, Normalizer, Sigmoid, Softmax
from regard.mechanism.torch_state import probes

_COUNTED = {"dense biases": "bias", "relative biases": "line", "mask terms": "start"}
_LIMITS = {name: sum(kind(slot) == part for slot in SLOTS) for name, part in _COUNTED.items()}
_MAX_AXES = 11
FLOAT_TYPES = {torch.float32, torch.bfloat16, torch.float16}
_MAX_SEGMENTS = 8  # maximum number of parallel parts in the backward pass, for any number of threads
_MIN_SEGMENT_ROWS = 256


def available() -> bool:
    """Whether the kernels are compiled and loaded."""
    return KERNELS is not None


def lanes() -> int:
    """Return the number of float32 values in a SIMD vector of the current instruction set."""
    return KERNELS.lanes()


def few_rows(problem: Problem) -> int:
    """Return the maximum number of rows per key head for which the kernels vectorize over the width."""
    return KERNELS.few_rows(problem.config.queries == 1) if KERNELS is not None else 0


def unsupported(problem: Problem) -> str | None:
    """Return the reason why the kernels do not support this problem, or None if they do."""
    query, config = problem["query"], problem.config
    if not available():
        return DESCRIPTION
    if _kernel_name(config.normalize) is None:
        return f"{type(config.normalize).__name__} has no kernel"
    if query.dtype not in FLOAT_TYPES:
        return f"{str(query.dtype).removeprefix('torch.')} has no kernel"
    if query.device.type != "cpu":
        return f"there are no kernels for {query.device.type}"
    if torch.compiler.is_compiling():  # sizes are symbolic; the operator checks them when it runs
        return None
    for name, limit in _LIMITS.items():
        number = config.terms if name == "mask terms" else len(problem.all(_COUNTED[name]))
        if number > limit:
            return f"the call has {number} {name}, but the kernels support at most {limit}"
    if query.dim() > _MAX_AXES:
        return f"the call has {query.dim() - 1} axes, but the kernels support at most {_MAX_AXES - 1}"
    if max(problem.keys, problem.queries) >= 2**31:
        return "the kernels support fewer than 2^31 tokens"
    if any(t.is_neg() for t in problem.tensors.values()):
        return "a tensor is lazily negated"
    return None


def forward(problem: Problem) -> tuple[Tensor, Tensor] | None:
    """Return the output (…, g, r, q, e) and τ (…, g, r, q, 2), or None if they are not finite."""
    output, tau = empty_results(problem)
    finite = _call("forward", problem, {"output": output, "tau": tau})
    return (output, tau) if finite else None


def compute_tau(problem: Problem) -> Tensor | None:
    """Return τ without computing the output, or None if it is not finite."""
    tau = problem["query"].new_empty(*problem.lead(), problem.queries, 2)
    return tau if _call("forward", _without_value(problem), {"tau": tau}) else None


def backward(
    problem: Problem, tau: Tensor, output: Tensor, grad: Tensor, wanted: set[str]
) -> dict[str, Tensor] | None:
    """Return the gradients of the tensors named in `wanted`, or None if they are not finite."""
    shared = _shared_biases(problem, wanted)
    if shared:
        return _backward_by_index(problem, tau, output, grad, wanted, shared)
    output = output if output.stride(-1) == 1 else output.contiguous()
    lead = problem.lead()
    *units, per_group = lead
    rows = per_group * problem.queries
    segments = _segments(math.prod(units), rows)
    buffers = {name: _grad_buffer(problem, name, lead, segments) for name in wanted}
    extra: dict[str, Tensor | _GradBuffer] = {
        "tau": tau,
        "output": output,
        "grad": grad,
        **{f"d_{name}": b for name, b in buffers.items()},
    }
    if not _call("backward", problem, extra, segments=segments):
        return None
    grads = {}
    for name, buffer in buffers.items():
        part = buffer.tensor
        if buffer.segment_stride is not None:
            part = part.sum(0) if segments > 1 else part[0]
        if name in ("key", "value", "vector"):
            part = part[..., : problem[name].shape[-1]]  # drop the padding to whole SIMD vectors
        grads[name] = part.sum_to_size(problem[name].shape) if part.shape != problem[name].shape else part
    return grads


def weights(problem: Problem, tau: Tensor) -> Tensor | None:
    """Return dense weights (…, g, r, q, k), or None if they are not finite."""
    result = tau.new_zeros(*problem.lead(), problem.queries, problem.keys)
    return result if _call("weights", _without_value(problem), {"tau": tau, "result": result}) else None


def entropy(problem: Problem, tau: Tensor) -> Tensor | None:
    """Return the entropy of each row, (…, g, r, q, 1), or None if the weights are not finite."""
    result = tau.new_empty(*problem.lead(), problem.queries, 1)
    return result if _call("entropy", _without_value(problem), {"tau": tau, "result": result}) else None


def topk(problem: Problem, tau: Tensor, k: int) -> tuple[Tensor, Tensor] | None:
    """Return each row's k largest weights and their keys, (…, g, r, q, k), or None if they are not finite."""
    values = tau.new_empty(*problem.lead(), problem.queries, k)
    keys = torch.empty_like(values, dtype=torch.int64)
    extra = {"tau": tau, "result": values, "indices": keys}
    return (values, keys) if _call("topk", _without_value(problem), extra, k=k) else None


def sums(problem: Problem, tau: Tensor) -> Tensor | None:
    """Return sums over sets of keys, (…, g, r, q, 4 + s + 2m), or None if the weights are not finite.

    The problem contains four additional tensors, whose key positions refer to the full problem:

    center: (…, q, 1), a key position for each row.
    span: (…, q, 2s), start and stop of s intervals of keys.
    token: (…, q, 2m), where m = `MATCHES`: m pairs of a token and the end of the keys to compare with it.
    key_token: (…, k, m), the token of each key.

    The columns are Σ w, the entropy, Σ w |key − center| and the largest weight; then Σ w over each span;
    then, for each match, Σ w and the largest weight over the keys with the same token.
    """
    columns = 4 + problem["span"].shape[-1] // 2 + (2 * MATCHES if problem.get("token") is not None else 0)
    result = tau.new_empty(*problem.lead(), problem.queries, columns)
    extra, spans = {"tau": tau, "result": result}, problem["span"].shape[-1] // 2
    return result if _call("sums", _without_value(problem), extra, k=spans) else None


def product(problem: Problem, x: Tensor) -> Tensor | None:
    """Return weights · x, (…, g, r, k, e) → (…, g, r, q, e), or None if it is not finite."""
    single = _split_groups(problem)
    result = forward(single.with_tensors({**single.tensors, "value": x.unsqueeze(-3)}))
    return None if result is None else result[0].squeeze(-3)


def transposed_product(problem: Problem, tau: Tensor, x: Tensor) -> Tensor | None:
    """Return weightsᵀ · x, (…, g, r, q, e) → (…, g, r, k, e), or None if it is not finite."""
    single = _split_groups(problem)
    value = x.new_empty(1, 1).expand(*single.lead(), problem.keys, x.shape[-1])
    single = single.with_tensors({**single.tensors, "value": value})
    grad = x.unsqueeze(-3)
    grads = backward(single, tau.unsqueeze(-3), grad, grad, {"value"})
    return None if grads is None else grads["value"].squeeze(-3)


def _split_groups(problem: Problem) -> Problem:
    """Give each query head its own key head, with the same keys."""
    return _without_value(problem).map(lambda _, tensor: tensor.unsqueeze(-3))


def _without_value(problem: Problem) -> Problem:
    """Remove value and τ, but keep all leading axes by expanding query."""
    query = problem["query"].expand(*problem.lead(), -1, -1)
    return problem.with_tensors({**problem.tensors, "query": query}).without("value", "value_scale", "tau")


class _GradBuffer(NamedTuple):
    """Buffer for a gradient. If `segment_stride` is set, the first axis contains segments to be summed."""

    tensor: Tensor
    segment_stride: int | None = None


def _grad_buffer(problem: Problem, name: str, lead: tuple[int, ...], segments: int) -> _GradBuffer:
    query, (*units, _) = problem["query"], lead
    if name == "query":
        return _GradBuffer(empty_in_order((*lead, problem.queries, query.shape[-1]), query))
    if name == "sink":
        return _GradBuffer(query.new_empty(*lead, problem.queries, 1))
    width_of_vector = lanes()
    if name in ("key", "value", "vector"):
        tokens = 1 if name == "vector" else problem.keys
        width = -(-problem[name].shape[-1] // width_of_vector) * width_of_vector
        buffer = empty_in_order((*units, 1, tokens, width), problem[name], segments=(segments,))
        return _GradBuffer(buffer, buffer.stride(0))
    # zeros, because the kernels do not write masked pairs
    if kind(name) == "bias" and _is_dense(problem, name):
        # segments have disjoint rows, so they can share one buffer
        return _GradBuffer(query.new_zeros(*lead, *problem[name].shape[-2:]))
    buffer = query.new_zeros(segments, *lead, *problem[name].shape[-2:])
    return _GradBuffer(buffer, buffer.stride(0))


def _is_dense(problem: Problem, name: str) -> bool:
    return problem[name].shape[-2] > 1 and problem[name].shape[-1] > 1


def _shared_biases(problem: Problem, wanted: set[str]) -> list[int]:
    """Return the leading axes along which a dense bias that needs a gradient is shared."""
    dense = [problem[name] for name in wanted if name.startswith("bias") and _is_dense(problem, name)]
    lead = problem.lead() if dense else ()
    return [axis for axis, size in enumerate(lead) if size > 1 and any(t.shape[axis] == 1 for t in dense)]


def _backward_by_index(
    problem: Problem, tau: Tensor, output: Tensor, grad: Tensor, wanted: set[str], axes: list[int]
) -> dict[str, Tensor] | None:
    """Run the backward pass for each index along the shared axes, to store each shared gradient only once."""
    grads = {name: torch.zeros_like(problem[name]) for name in wanted}
    for chosen in itertools.product(*(range(problem.lead()[axis]) for axis in axes)):
        index = dict(zip(axes, chosen, strict=True))
        part = problem.with_tensors({name: t[_narrow(t, index)] for name, t in problem.tensors.items()})
        part_tau, part_output, part_grad = (x[_narrow(x, index)] for x in (tau, output, grad))
        part_grads = backward(part, part_tau, part_output, part_grad, wanted)
        if part_grads is None:
            return None
        for name, x in part_grads.items():
            grads[name][_narrow(grads[name], index)] += x
    return grads


def _narrow(tensor: Tensor, index: dict[int, int]) -> tuple[slice, ...]:
    return tuple(
        slice(index[axis], index[axis] + 1) if axis in index and size > 1 else slice(None)
        for axis, size in enumerate(tensor.shape)
    )


class Encoded(NamedTuple):
    """A call encoded as integers and floats, in the order that kernels/module.cpp expects."""

    numbers: list[int]
    factors: tuple[float, ...]

    def run(self, kernel: str) -> bool:
        """Run a kernel; return whether the result is finite."""
        return getattr(KERNELS, kernel)(self.numbers, self.factors, torch.get_num_threads())


class Prepared:
    """A call that the kernels have decoded once. Each run takes new tensors of the same shapes and strides.

    names: the tensors that `forward` and `backward` will receive, in this order.
    """

    def __init__(self, encoded: Encoded, names: Sequence[str], kept: Sequence[Tensor]) -> None:
        self.handle = KERNELS.Prepared(encoded.numbers, encoded.factors, [SLOTS[name] for name in names])
        self._forward, self._backward = self.handle.forward, self.handle.backward
        self._kept = kept  # keeps alive the tensors whose addresses are part of the call

    def forward(self, *tensors: Tensor | None) -> bool:
        """Compute the output; return whether it is finite."""
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        return bool(self._forward(addresses, torch.get_num_threads()))

    def backward(self, *tensors: Tensor) -> bool:
        """Compute the gradients; return whether they are finite."""
        return bool(self._backward([tensor.data_ptr() for tensor in tensors], torch.get_num_threads()))


def cached_calls(weights: type) -> Any:
    """Return an empty cache of prepared calls in the kernels, or None if this is not supported.

    weights: the class of lazy weights, whose instances the kernels create.
    """
    state = probes() if available() else None
    if state is not None:
        with suppress(ValueError):  # torch uses an incompatible version of DLPack
            return KERNELS.Calls(state | {"weights": weights})
    return None


def prepare_call(problem: Problem, extra: Mapping[str, Tensor], names: Sequence[str]) -> Prepared:
    """Encode a problem and the tensors for its results, for repeated runs.

    names: the tensors that each run receives.
    """
    kept = [tensor for name, tensor in (*problem.tensors.items(), *extra.items()) if name not in names]
    return Prepared(encode(problem, extra), names, kept)


def encode(
    problem: Problem,
    extra: Mapping[str, "Tensor | _GradBuffer"],
    *,
    segments: int = 1,
    k: int = 0,
) -> Encoded:
    """Encode a problem and the tensors for its results."""
    config, lead = problem.config, problem.lead()
    value = problem.get("value")
    normalizer, counts, sharpness, bias = _encode_normalizer(config.normalize)
    numbers = [
        *(len(lead), *lead),
        *(problem.queries, problem.keys, problem["query"].shape[-1], 0 if value is None else value.shape[-1]),
        *(config.queries, problem.first_key),
        *(SCORES[config.family], normalizer, counts),
        *(int(config.dropout * 2**32), segments, k),
        *(len(problem.all("bias")), len(problem.all("line")), config.terms),
    ]
    for name, item in (*problem.tensors.items(), *extra.items()):
        tensor, segment_stride = item if isinstance(item, _GradBuffer) else (item, None)
        axis = int(segment_stride is not None)
        numbers += (SLOTS[name], _type(name, tensor), segment_stride or 0, tensor.data_ptr())
        numbers += (*tensor.shape[axis:], *tensor.stride()[axis:])
    factors = (config.scale, sharpness, config.softcap or 0.0, bias, 1 / (1 - config.dropout))
    return Encoded(numbers, factors)


def _call(
    kernel: str,
    problem: Problem,
    extra: Mapping[str, "Tensor | _GradBuffer"],
    segments: int = 1,
    k: int = 0,
) -> bool:
    """Encode a problem and run a kernel on it; return whether the result is finite."""
    if not problem.queries or 0 in problem.lead():
        return _zero_grads(extra)
    return encode(problem, extra, segments=segments, k=k).run(kernel)


def _type(name: str, tensor: Tensor) -> int:
    """Return the numeric code of a tensor's dtype."""
    number = TYPES.get(tensor.dtype)
    if number is None:
        supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in TYPES)
        raise DTypeError(f"{name} has dtype {tensor.dtype}; the kernels support {supported}.")
    return number


def _kernel_name(normalize: Normalizer) -> str | None:
    return normalize._kernel if type(normalize) in BUILT_IN_TYPES else None


def _encode_normalizer(normalize: Normalizer) -> tuple[int, bool, float, float]:
    """Return the normalizer's code, whether it counts keys, its inverse temperature and its bias."""
    sharpness = 1 / normalize.temperature if type(normalize) is Softmax else 1.0
    bias = normalize.bias if type(normalize) is Sigmoid else 0.0
    return NORMALIZERS[_kernel_name(normalize)], bias is None, sharpness, bias or 0.0


def kept_weights_shape(problem: Problem) -> tuple[int, ...] | None:
    """Return a shape with the size of the weights to keep for the backward pass, or None to recompute them.

    The weights of short sequences are kept if they need at most twice as much memory as the keys: reading
    stored weights is faster than recomputing them.
    """
    *_, per_group = problem.lead()
    width, queries = lanes(), problem.queries
    plain = type(problem.config.normalize) is Softmax and not problem.config.softcap
    short = few_rows(problem) < queries <= KERNELS.tile_keys() and 1 < problem.keys <= KERNELS.tile_keys()
    rows = -(-queries // width) * width
    key = problem["key"]
    expanded = any(n > 1 and step == 0 for n, step in zip(key.shape, key.stride(), strict=True))
    masked = problem.get("start0") is not None
    if plain and short and per_group == 1 and not masked and not expanded and rows <= 2 * key.shape[-1]:
        return (*problem.lead(), problem.keys, rows)
    return None


def is_single_segment(problem: Problem) -> bool:
    """Whether the backward pass needs neither segments nor padding."""
    *units, per_group = problem.lead()
    widths = problem["query"].shape[-1], problem["value"].shape[-1]
    aligned = not any(width % lanes() for width in widths)
    return aligned and _segments(math.prod(units), per_group * problem.queries) == 1


def _segments(units: int, rows: int) -> int:
    return max(min(_MAX_SEGMENTS // max(units, 1), rows // _MIN_SEGMENT_ROWS), 1)


def _zero_grads(extra: Mapping[str, "Tensor | _GradBuffer"]) -> bool:
    """Set all gradients to zero, for a problem without rows."""
    for value in extra.values():
        if isinstance(value, _GradBuffer):
            value.tensor.zero_()
    return True
