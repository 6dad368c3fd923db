"""Fused implementation: C++ kernels that hold one tile of scores at a time.

This module has the same interface as `tiled`, except that a function returns None if its result is not
finite. The caller then recomputes the result with `tiled`, which is NaN-safe.
"""

import importlib
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import ArgumentError, DTypeError
from regard.mechanism.call.problem import Problem, empty_in_order, empty_results, kind
from regard.mechanism.normalizers import BUILT_IN_TYPES, Normalizer, Sigmoid, Softmax

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
    "boolean": torch.bool,
    "int8": torch.int8,
}
_DROPOUT_KINDS = {"add": 0, "relu": 1, "relu_back": 2}
_COUNTED = {"dense biases": "bias", "relative biases": "line", "mask terms": "start"}
_MAX_AXES = 11
FLOAT_TYPES = {torch.float32, torch.bfloat16, torch.float16}
_MAX_SEGMENTS = 8  # parallel parts of the backward pass, independent of the thread count
_MIN_SEGMENT_ROWS = 256


def _load() -> tuple[Any, str]:
    """Return the compiled kernels and their description, or None and a reason if they are missing."""
    isa = os.environ.get("REGARD_ISA")
    try:
        kernels = importlib.import_module("regard.mechanism._kernels")
    except ImportError as error:
        reason = f"the kernels are not available ({error}); install a C++ compiler and reinstall regard"
        if isa:
            raise ArgumentError(f"the environment variable REGARD_ISA is {isa!r}, but {reason}.") from None
        return None, reason
    if isa:
        if isa not in kernels.available():
            raise ArgumentError(
                f"the environment variable REGARD_ISA is {isa!r}; this machine and build support "
                f"{', '.join(kernels.available())}."
            )
        kernels.use(isa)
    return kernels, f"C++ kernels for {isa or kernels.available()[0]}"


_KERNELS, DESCRIPTION = _load()
# Numeric codes of tensors, scores, normalizers and dtypes, from kernels/abi.h; empty without kernels.
SLOTS: dict[str, int] = getattr(_KERNELS, "SLOTS", {})
_LIMITS = {name: sum(kind(slot) == part for slot in SLOTS) for name, part in _COUNTED.items()}
MATCHES: int = getattr(_KERNELS, "MATCHES", 0)  # number of token matches in `sums`
_SCORES: dict[str, int] = getattr(_KERNELS, "SCORES", {})
_NORMALIZERS: dict[str | None, int] = getattr(_KERNELS, "NORMALIZERS", {})
_TYPES = {_DTYPES[name]: i for name, i in getattr(_KERNELS, "TYPES", {}).items() if name in _DTYPES}

_FLOAT32, _INT64 = _TYPES.get(torch.float32, 0), _TYPES.get(torch.int64, 0)
_SOFTMAX = _NORMALIZERS.get("softmax", 0)


def available() -> bool:
    """Whether the kernels are compiled and loaded."""
    return _KERNELS is not None


def few_rows() -> int:
    """Return the maximum number of rows per key head for which the kernels vectorize over the width.

    The value is the constant FEW in kernels/block.h.
    """
    return 0 if _KERNELS is None else 1 if _KERNELS.lanes() == 4 else 3


def unsupported(problem: Problem) -> str | None:
    """Return the reason why the kernels do not support this problem, or None if they do."""
    query, config = problem["query"], problem.config
    if _KERNELS is None:
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
    """Return the k largest weights of each row and their keys, (…, g, r, q, k), or None if not finite."""
    values = tau.new_empty(*problem.lead(), problem.queries, k)
    keys = torch.empty_like(values, dtype=torch.int64)
    extra = {"tau": tau, "result": values, "indices": keys}
    return (values, keys) if _call("topk", _without_value(problem), extra, k=k) else None


def sums(problem: Problem, tau: Tensor) -> Tensor | None:
    """Return sums over sets of keys, (…, g, r, q, 4 + s + 2m), or None if the weights are not finite.

    The problem has further tensors, whose positions are those of the full problem: center (…, q, 1); span
    (…, q, 2s), start and stop of s intervals of keys; and, for m = `MATCHES`, token (…, q, 2m), each a token
    and the first key that does not count, and key_token (…, k, m). The columns are: Σ w, the entropy,
    Σ w |key − center|, the largest weight; Σ w over each span; and for each match, Σ w and the largest weight
    over the keys with the same token.
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
    """Make each query head its own group, with the same keys."""
    return _without_value(problem).map(lambda _, tensor: tensor.unsqueeze(-3))


def _without_value(problem: Problem) -> Problem:
    """Remove value and τ, but keep all leading axes by expanding query."""
    query = problem["query"].expand(*problem.lead(), -1, -1)
    return problem.with_tensors({**problem.tensors, "query": query}).without("value", "value_scale", "tau")


def peak_flops(threads: int) -> float:
    """Measure the peak multiply-add throughput of this machine, in FLOP/s."""
    if _KERNELS is None:
        raise ImportError(DESCRIPTION)
    return _KERNELS.peak(threads)


def supports_dropout(*tensors: Tensor) -> bool:
    """Whether the dropout kernels support these tensors, which must have the same shape."""
    return _KERNELS is not None and all(
        t.dtype is torch.float32 and t.device.type == "cpu" and t.is_contiguous() for t in tensors
    )


def dropout(kind: str, x: Tensor | None, y: Tensor, *, probability: float, seed: int) -> Tensor:
    """Apply elementwise dropout, fused with a residual addition or ReLU.

    kind: one of the values listed in kernels/dropout.h."""
    out, address = torch.empty_like(y), 0 if x is None else x.data_ptr()
    _KERNELS.dropout(
        _DROPOUT_KINDS[kind],
        address,
        y.data_ptr(),
        out.data_ptr(),
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
        _KERNELS is not None
        and x.dtype is torch.float32
        and x.device.type == "cpu"
        and not (torch.is_grad_enabled() and x.requires_grad)
    )


def linear(x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, columns: int) -> Tensor:
    """Compute x · weightᵀ + bias: (…, m) → (…, columns), for inputs that `supports_linear` accepts.

    weight: float32 (columns, m), contiguous; or, with scales, int8 in the layout of kernels/linear.h.
    """
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], columns)
    if out.numel():
        _KERNELS.linear(
            x.data_ptr(),
            weight.data_ptr(),
            0 if scales is None else scales.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            out.numel() // columns,
            x.shape[-1],
            columns,
            torch.get_num_threads(),
        )
    return out


def best_tokens(logits: Tensor, k: int, *, first: int) -> tuple[Tensor, Tensor]:
    """Return the log probabilities and tokens of the k largest logits of each row: (n, V) → (n, k), twice.

    logits: float32, on the CPU. Tokens below `first` count in the sum but are not returned.
    """
    logits = logits.contiguous()
    values = logits.new_empty(len(logits), k)
    tokens = torch.empty_like(values, dtype=torch.int64)
    if values.numel():
        addresses = (logits.data_ptr(), values.data_ptr(), tokens.data_ptr())
        _KERNELS.best(*addresses, len(logits), logits.shape[1], first, k, torch.get_num_threads())
    return values, tokens


class Strided(NamedTuple):
    """A tensor of a decoding step: its address, and its strides along batch, g, r, rows and columns."""

    address: int
    strides: tuple[int, int, int, int, int]


def decode(
    sizes: tuple[int, int, int, int, int, int],
    tensors: Mapping[str, Strided],
    scale: float,
    stop: Tensor | None = None,
) -> bool:
    """Run scaled dot-product attention with softmax in float32; return whether the result is finite.

    This skips the checks of `attention`, whose time exceeds that of a small decoding step.

    sizes: batch, key heads g, query heads per key head r, queries, keys, head width.
    tensors: "query", "key", "value" and "output". stop: number of visible keys per batch row, int64.
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
    return _KERNELS.forward(numbers, (scale, 1.0, 0.0, 0.0, 1.0), torch.get_num_threads())


def decode_step(numbers: list[int], eps: float) -> bool:
    """Run a decoding step of a Transformer (kernels/step.h); return whether the result is finite."""
    return _KERNELS.step(numbers, eps, torch.get_num_threads())


class _GradBuffer(NamedTuple):
    """Buffer for a gradient. If `segment_stride` is set, the first axis must be summed over segments."""

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
    # biases start at zero, because masked pairs are not written; segments have disjoint rows
    if kind(name) == "bias" and _is_dense(problem, name):
        return _GradBuffer(query.new_zeros(*lead, *problem[name].shape[-2:]))
    buffer = query.new_zeros(segments, *lead, *problem[name].shape[-2:])
    return _GradBuffer(buffer, buffer.stride(0))


def _is_dense(problem: Problem, name: str) -> bool:
    return problem[name].shape[-2] > 1 and problem[name].shape[-1] > 1


def _shared_biases(problem: Problem, wanted: set[str]) -> list[int]:
    """Return the leading axes along which a dense bias is shared, if it needs a gradient."""
    dense = [problem[name] for name in wanted if name.startswith("bias") and _is_dense(problem, name)]
    lead = problem.lead() if dense else ()
    return [axis for axis, size in enumerate(lead) if size > 1 and any(t.shape[axis] == 1 for t in dense)]


def _backward_by_index(
    problem: Problem, tau: Tensor, output: Tensor, grad: Tensor, wanted: set[str], axes: list[int]
) -> dict[str, Tensor] | None:
    """Run the backward pass for one index of the shared axes at a time, to store a shared gradient once."""
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
        return getattr(_KERNELS, kernel)(self.numbers, self.factors, torch.get_num_threads())


class Prepared:
    """An encoded call that the kernels have read. Each run takes tensors of the same shapes and strides.

    names: the tensors that `forward` and `backward` will receive, in this order.
    """

    def __init__(self, encoded: Encoded, names: Sequence[str], kept: Sequence[Tensor]) -> None:
        handle = _KERNELS.Prepared(encoded.numbers, encoded.factors, [SLOTS[name] for name in names])
        self._forward, self._backward = handle.forward, handle.backward
        self._kept = kept  # tensors whose addresses are part of the call

    def forward(self, *tensors: Tensor | None) -> bool:
        """Compute the output; return whether it is finite."""
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        return bool(self._forward(addresses, torch.get_num_threads()))

    def backward(self, *tensors: Tensor) -> bool:
        """Compute the gradients; return whether they are finite."""
        return bool(self._backward([tensor.data_ptr() for tensor in tensors], torch.get_num_threads()))


def prepare_call(problem: Problem, extra: Mapping[str, Tensor], names: Sequence[str]) -> Prepared:
    """Encode a problem and the tensors for its results once. names: the tensors that each run receives."""
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
        *(_SCORES[config.family], normalizer, counts),
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
    number = _TYPES.get(tensor.dtype)
    if number is None:
        supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in _TYPES)
        raise DTypeError(f"{name} has dtype {tensor.dtype}; the kernels support {supported}.")
    return number


def _kernel_name(normalize: Normalizer) -> str | None:
    return normalize._kernel if type(normalize) in BUILT_IN_TYPES else None


def _encode_normalizer(normalize: Normalizer) -> tuple[int, bool, float, float]:
    """Return the normalizer's code, whether it counts keys, its inverse temperature and its bias."""
    sharpness = 1 / normalize.temperature if type(normalize) is Softmax else 1.0
    bias = normalize.bias if type(normalize) is Sigmoid else 0.0
    return _NORMALIZERS[_kernel_name(normalize)], bias is None, sharpness, bias or 0.0


def lanes() -> int:
    """Return the number of floats in a vector of the current instruction set."""
    return _KERNELS.lanes()


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
