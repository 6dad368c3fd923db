"""The fused kernels: a problem handed to C++, which holds no more than a tile of scores at a time.

Same contract as `tiled`. The kernels say whether all that they found is finite; if not, some input is
NaN or infinite, and the answer is None: the problem is then solved again with care, by `tiled`.
"""

import importlib
import math
import os
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import ArgumentError, DTypeError
from regard.mechanism.call.problem import Problem, kind
from regard.mechanism.normalizers import (
    Entmax,
    Entmax15,
    Mean,
    Normalizer,
    Relu,
    Sigmoid,
    Softmax,
    Softmax1,
    Sparsemax,
)
from regard.mechanism.tiled import empty, heads_inside

# As in kernels/problem.h and kernels/module.cpp.
_FAMILIES = {"dot": 0, "tanh": 1, "relu": 2}
NORMALIZERS: dict[type[Normalizer], int | dict[float, int]] = {  # Entmax by its alpha
    Softmax: 0,
    Softmax1: 0,
    Sigmoid: 1,
    Relu: 2,
    Mean: 3,
    Sparsemax: 4,
    Entmax15: 5,
    Entmax: {2.0: 4, 1.5: 5},
}
_TYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.int64: 4, torch.bool: 5}
SLOTS = {
    name: slot
    for slot, name in enumerate(
        [
            "query",
            "key",
            "value",
            "vector",
            "sink",
            "seed",
            "row",
            "head",
            "tau",
            "output",
            "grad",
            "found",
            "found_keys",
            "d_query",
            "d_key",
            "d_value",
            "d_vector",
            "d_sink",
        ]
    )
}
_DROPS = {"add": 0, "relu": 1, "relu_back": 2}
_BIAS, _LINE, _START, _STOP, _ALLOWED, _D_BIAS, _D_LINE = range(100, 800, 100)  # where several begin
_MOST_TERMS, _MOST_AXES = 4, 11
for _name, _first, _most in (
    ("bias", _BIAS, 4),
    ("line", _LINE, 2),
    ("start", _START, _MOST_TERMS),
    ("stop", _STOP, _MOST_TERMS),
    ("allowed", _ALLOWED, _MOST_TERMS),
    ("d_bias", _D_BIAS, 4),
    ("d_line", _D_LINE, 2),
):
    SLOTS |= {f"{_name}{i}": _first + i for i in range(_most)}
_HEADER = 16  # numbers before the first tensor, beside the lead
Tensors = Sequence[tuple[int, Tensor]]  # with their slots
REAL = {torch.float32, torch.bfloat16, torch.float16}
_SEGMENTS = 8  # pieces of work, backward, if there are enough rows: a fixed number, whatever the threads
_ROWS = 256  # of a segment, at least


def _load() -> tuple[ModuleType | None, str]:
    """The compiled kernels, or why there are none."""
    asked = os.environ.get("REGARD_ISA")
    try:
        kernels = importlib.import_module("regard.mechanism._kernels")
    except ImportError as error:
        reason = f"the kernels are not there ({error}); install regard where there is a C++ compiler"
        if asked:
            raise ArgumentError(f"the environment variable REGARD_ISA is {asked!r}, but {reason}.") from None
        return None, reason
    if asked:
        if asked not in kernels.available():
            raise ArgumentError(
                f"the environment variable REGARD_ISA is {asked!r}; this machine and this build run "
                f"{', '.join(kernels.available())}."
            )
        kernels.use(asked)
    return kernels, f"C++ kernels for {asked or kernels.available()[0]}"


_KERNELS, ABOUT = _load()


def available() -> bool:
    """Whether there are kernels at all."""
    return _KERNELS is not None


def few_rows() -> int:
    """Up to how many rows of a key head the kernels add up scores along the width: FEW in kernels/block.h."""
    return 0 if _KERNELS is None else 1 if _KERNELS.lanes() == 4 else 3


def refusal(normalize: Normalizer, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the kernels cannot serve such calls, or None if they can."""
    if _KERNELS is None:
        return ABOUT
    if _kernel_of(normalize) is None:
        return f"{type(normalize).__name__} has no kernel"
    if dtype not in REAL:
        return f"{str(dtype).removeprefix('torch.')} has no kernel"
    if device.type != "cpu":
        return f"there are no kernels for {device.type}"
    return None


def fits(problem: Problem) -> bool:
    """Whether the kernels can solve this problem: its kind, its sizes, its numbers of everything."""
    query, tensors = problem["query"], problem.tensors
    return (
        _KERNELS is not None
        and _kernel_of(problem.rules.normalize) is not None
        and query.dtype in REAL
        and query.device.type == "cpu"
        and query.dim() <= _MOST_AXES
        and problem.rules.terms <= _MOST_TERMS
        and max(problem.keys, problem.queries) < 2**31
        and tensors.keys() <= SLOTS.keys()
        and not any(t.is_neg() for t in tensors.values())
    )


def forward(problem: Problem) -> tuple[Tensor, Tensor] | None:
    """The output (…, g, r, q, e) and the row statistic τ (…, g, r, q, 2); None if they are not finite."""
    output, tau = empty(problem)
    finite = _call("forward", problem, {"output": output, "tau": tau})
    return (output, tau) if finite else None


def fit(problem: Problem) -> Tensor | None:
    """τ alone."""
    tau = problem["query"].new_empty(*problem.lead(), problem.queries, 2)
    return tau if _call("forward", _bare(problem), {"tau": tau}) else None


def backward(
    problem: Problem, tau: Tensor, output: Tensor, grad: Tensor, wanted: set[str]
) -> dict[str, Tensor] | None:
    """The gradients of the wanted tensors, given that of the output; None if they are not finite."""
    shared = _shared_biases(problem, wanted)
    if shared:
        return _in_turn(problem, tau, output, grad, wanted, shared)
    output = output if output.stride(-1) == 1 else output.contiguous()
    lead = problem.lead()
    *units, per_group = lead
    rows = per_group * problem.queries
    segments = _segments(math.prod(units), rows)
    rooms = {name: _room(problem, name, lead, segments) for name in wanted}
    more = {"tau": tau, "output": output, "grad": grad, **{f"d_{name}": room for name, room in rooms.items()}}
    if not _call("backward", problem, more, segments=segments):
        return None
    found = {}
    for name, room in rooms.items():
        part = room.tensor
        if room.segment is not None:
            part = part.sum(0) if segments > 1 else part[0]
        if name in ("key", "value", "vector"):
            part = part[..., : problem[name].shape[-1]]  # without what pads it to whole vectors
        found[name] = part.sum_to_size(problem[name].shape) if part.shape != problem[name].shape else part
    return found


def weights(problem: Problem, tau: Tensor) -> Tensor | None:
    """The weights themselves, dense: (…, g, r, q, k); None if they are not finite."""
    found = tau.new_zeros(*problem.lead(), problem.queries, problem.keys)
    return found if _call("weights", _bare(problem), {"tau": tau, "found": found}) else None


def entropy(problem: Problem, tau: Tensor) -> Tensor | None:
    """−Σ w log w of each row: (…, g, r, q, 1); None if the weights are not finite."""
    found = tau.new_empty(*problem.lead(), problem.queries, 1)
    return found if _call("entropy", _bare(problem), {"tau": tau, "found": found}) else None


def topk(problem: Problem, tau: Tensor, k: int) -> tuple[Tensor, Tensor] | None:
    """The largest weights of each row, and their keys: (…, g, r, q, k); None if they are not finite."""
    values = tau.new_empty(*problem.lead(), problem.queries, k)
    keys = torch.empty_like(values, dtype=torch.int64)
    more = {"tau": tau, "found": values, "found_keys": keys}
    return (values, keys) if _call("top", _bare(problem), more, most=k) else None


def product(problem: Problem, x: Tensor) -> Tensor | None:
    """weights · x, (…, g, r, k, e) → (…, g, r, q, e); None if it is not finite."""
    apart = _heads_apart(problem)
    found = forward(apart.with_tensors({**apart.tensors, "value": x.unsqueeze(-3)}))
    return None if found is None else found[0].squeeze(-3)


def transposed_product(problem: Problem, tau: Tensor, x: Tensor) -> Tensor | None:
    """weightsᵀ · x, (…, g, r, q, e) → (…, g, r, k, e); None if it is not finite."""
    apart = _heads_apart(problem)
    value = x.new_empty(1, 1).expand(*apart.lead(), problem.keys, x.shape[-1])
    apart = apart.with_tensors({**apart.tensors, "value": value})
    grad = x.unsqueeze(-3)
    found = backward(apart, tau.unsqueeze(-3), grad, grad, {"value"})
    return None if found is None else found["value"].squeeze(-3)


def _heads_apart(problem: Problem) -> Problem:
    """The query heads of a key head on their own, each with the same keys."""
    return _bare(problem).map(lambda _, tensor: tensor.unsqueeze(-3))


def _bare(problem: Problem) -> Problem:
    """Without value and τ, but with all leading axes, which may have been theirs alone."""
    query = problem["query"].expand(*problem.lead(), -1, -1)
    return problem.with_tensors({**problem.tensors, "query": query}).without("value", "tau")


def peak(threads: int) -> float:
    """FLOP per second that this machine reaches with multiplications and additions alone."""
    if _KERNELS is None:
        raise ImportError(ABOUT)
    return _KERNELS.peak(threads)


def drops(*tensors: Tensor) -> bool:
    """Whether the kernels can drop from these tensors of one shape."""
    return _KERNELS is not None and all(
        t.dtype is torch.float32 and t.device.type == "cpu" and t.is_contiguous() for t in tensors
    )


def drop(kind: str, x: Tensor | None, y: Tensor, *, dropout: float, seed: int) -> Tensor:
    """Layers' dropout in one pass: kernels/dropout.h has the kinds."""
    out, address = torch.empty_like(y), 0 if x is None else x.data_ptr()
    _KERNELS.dropout(  # type: ignore[union-attr]
        _DROPS[kind],
        address,
        y.data_ptr(),
        out.data_ptr(),
        y.numel(),
        seed & 0xFFFFFFFF,
        seed >> 32,
        int(dropout * 2**32),
        1 / (1 - dropout),
        torch.get_num_threads(),
    )
    return out


class _Room(NamedTuple):
    """Where the kernels put a gradient; with an axis in front for the segments that add to it."""

    tensor: Tensor
    segment: int | None = None


def _room(problem: Problem, name: str, lead: tuple[int, ...], segments: int) -> _Room:
    query, (*units, _) = problem["query"], lead
    if name == "query":
        return _Room(_laid_out((), (*lead, problem.queries, query.shape[-1]), query))
    if name == "sink":
        return _Room(query.new_empty(*lead, problem.queries, 1))
    lanes = _KERNELS.lanes()  # type: ignore[union-attr]
    if name in ("key", "value", "vector"):
        tokens = 1 if name == "vector" else problem.keys
        width = -(-problem[name].shape[-1] // lanes) * lanes
        found = _laid_out((segments,), (*units, 1, tokens, width), problem[name])
        return _Room(found, found.stride(0))
    # biases: what no row sees stays zero; and no two segments have a row in common
    if kind(name) == "bias" and _dense(problem, name):
        return _Room(query.new_zeros(*lead, *problem[name].shape[-2:]))
    found = query.new_zeros(segments, *lead, *problem[name].shape[-2:])
    return _Room(found, found.stride(0))


def _laid_out(segments: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Room whose heads are inside the tokens where those of `like` are: then autograd need not copy it."""
    *batch, groups, per_group, tokens, width = shape
    if heads_inside(like):
        return like.new_empty(*segments, *batch, tokens, groups, per_group, width).movedim(-4, -2)
    return like.new_empty(*segments, *shape)


def _dense(problem: Problem, name: str) -> bool:
    return problem[name].shape[-2] > 1 and problem[name].shape[-1] > 1


def _shared_biases(problem: Problem, wanted: set[str]) -> list[int]:
    """The leading axes along which a dense bias that wants a gradient is the same."""
    dense = [problem[name] for name in wanted if name.startswith("bias") and _dense(problem, name)]
    lead = problem.lead() if dense else ()
    return [axis for axis, size in enumerate(lead) if size > 1 and any(t.shape[axis] == 1 for t in dense)]


def _in_turn(
    problem: Problem, tau: Tensor, output: Tensor, grad: Tensor, wanted: set[str], axes: list[int]
) -> dict[str, Tensor] | None:
    """The gradients one index of the shared axes after the other, so that the shared bias is held once."""
    grads = {name: torch.zeros_like(problem[name]) for name in wanted}
    for index in _indices(problem.lead(), axes):
        part = problem.with_tensors({name: t[_narrow(t, index)] for name, t in problem.tensors.items()})
        row, out, up = (x[_narrow(x, index)] for x in (tau, output, grad))
        found = backward(part, row, out, up, wanted)
        if found is None:
            return None
        for name, more in found.items():
            grads[name][_narrow(grads[name], index)] += more
    return grads


def _indices(lead: tuple[int, ...], axes: list[int]) -> Iterator[dict[int, int]]:
    for flat in range(math.prod(lead[axis] for axis in axes)):
        index = {}
        for axis in reversed(axes):
            flat, index[axis] = divmod(flat, lead[axis])
        yield index


def _narrow(tensor: Tensor, index: dict[int, int]) -> tuple[slice, ...]:
    return tuple(
        slice(index[axis], index[axis] + 1) if axis in index and size > 1 else slice(None)
        for axis, size in enumerate(tensor.shape)
    )


def _call(kernel: str, problem: Problem, more: dict[str, Any], segments: int = 1, most: int = 0) -> bool:
    """Write a problem down as numbers, and run a kernel on it."""
    rules, tensors, lead = problem.rules, problem.tensors, problem.lead()
    normalize, value = rules.normalize, tensors.get("value")
    queries, width = tensors["query"].shape[-2:]
    if not queries or 0 in lead:
        return _nothing(more)
    described: list[int] = []
    biases = lines = 0
    for name, tensor in tensors.items():
        slot = SLOTS[name]
        biases += _BIAS <= slot < _LINE
        lines += _LINE <= slot < _START
        described += (slot, _type(name, tensor), 0, tensor.data_ptr(), *tensor.shape, *tensor.stride())
    for name, room in more.items():
        if type(room) is _Room:
            tensor, axis = room.tensor, int(room.segment is not None)
            described += (SLOTS[name], _type(name, tensor), room.segment or 0, tensor.data_ptr())
            described += (*tensor.shape[axis:], *tensor.stride()[axis:])
        else:
            described += (SLOTS[name], _type(name, room), 0, room.data_ptr(), *room.shape, *room.stride())
    normalizer, counts, sharpness, bias = plain_normalizer(normalize)
    sizes = (queries, problem.keys, width, 0 if value is None else value.shape[-1])
    whole, rest = (rules.queries, problem.first_key), (int(rules.dropout * 2**32), segments, most)
    kinds = (_FAMILIES[rules.family], normalizer, counts)
    numbers = _header(lead, sizes, whole, kinds, rest, (biases, lines, rules.terms))
    factors = (rules.scale, sharpness, rules.softcap or 0.0, bias, 1 / (1 - rules.dropout))
    return getattr(_KERNELS, kernel)(numbers + described, factors, torch.get_num_threads())


def _type(name: str, tensor: Tensor) -> int:
    """The number of a tensor's dtype."""
    found = _TYPES.get(tensor.dtype)
    if found is None:
        readable = ", ".join(str(dtype).removeprefix("torch.") for dtype in _TYPES)
        raise DTypeError(f"{name} is of {tensor.dtype}; the kernels read {readable}.")
    return found


def _header(
    lead: tuple[int, ...],
    sizes: tuple[int, int, int, int],  # queries, keys, width, width of a value
    whole: tuple[int, int],  # queries of the whole call, and the first key
    kinds: tuple[int, int, bool],  # family, normalizer, whether it counts the keys
    rest: tuple[int, int, int],  # dropout's threshold, segments, the most that `top` keeps
    counts: tuple[int, int, int],  # biases, lines, terms of the mask
) -> list[int]:
    """What stands before the tensors, in the order in which kernels/module.cpp reads it."""
    return [len(lead), *lead, *sizes, *whole, *kinds, *rest, *counts]


class Plain(NamedTuple):
    """A plain call in numbers: lead (b, g, r) or (g, r), four sizes, and what else the kernels must know."""

    lead: tuple[int, ...]
    sizes: tuple[int, int, int, int]  # queries, keys, width, width of a value
    normalizer: int
    counts: bool
    factors: tuple[float, ...]
    start: Tensor | None
    stop: Tensor | None


def plainly(kernel: str, plain: Plain, per_query: Tensors, per_key: Tensors, tau: Tensor) -> bool:
    """A kernel for tensors as a plain call has them: (…, g · r, n, ·) per query, and (…, g, n, ·) per key."""
    return run(kernel, describe(plain, per_query, per_key, tau), plain)


def run(kernel: str, numbers: list[int], plain: Plain) -> bool:
    """A kernel for a plain call that has been written down."""
    return getattr(_KERNELS, kernel)(numbers, plain.factors, torch.get_num_threads())


def places(plain: Plain, count: int) -> range:
    """Where the addresses of the first tensors stand in what `describe` writes."""
    axes = len(plain.lead)
    size = 4 + 2 * (axes + 2)
    return range(axes + _HEADER + 3, axes + _HEADER + 3 + count * size, size)


def describe(plain: Plain, per_query: Tensors, per_key: Tensors, tau: Tensor) -> list[int]:
    """A plain call in numbers: its sizes, then each tensor."""
    lead, sizes, start, stop = plain.lead, plain.sizes, plain.start, plain.stop
    masked = start is not None or stop is not None
    kinds = (_FAMILIES["dot"], plain.normalizer, plain.counts)
    numbers = _header(lead, sizes, (sizes[0], 0), kinds, (0, 1, 0), (0, 0, masked))
    *batch, groups, each = lead
    for slot, tensor in per_query:
        *outer, head, row, column = tensor.stride()
        numbers += (slot, _type("a tensor", tensor), 0, tensor.data_ptr(), *lead, *tensor.shape[-2:])
        numbers += (*outer, head * each, head, row, column)
    for slot, tensor in per_key:
        *outer, head, row, column = tensor.stride()
        numbers += (
            slot,
            _type("a tensor", tensor),
            0,
            tensor.data_ptr(),
            *batch,
            groups,
            1,
            *tensor.shape[-2:],
        )
        numbers += (*outer, head, 0, row, column)
    numbers += (SLOTS["tau"], _type("tau", tau), 0, tau.data_ptr(), *tau.shape, *tau.stride())
    for slot, side in ((_START, start), (_STOP, stop)):
        if side is not None:
            numbers += (slot, _type("the mask", side), 0, side.data_ptr(), *side.shape, *side.stride())
    return numbers


def plain_normalizer(normalize: Normalizer) -> tuple[int, bool, float, float]:
    """Which it is for the kernels, whether it counts the keys, and its two numbers."""
    sharpness = 1 / normalize.temperature if type(normalize) is Softmax else 1.0
    bias = normalize.bias if type(normalize) is Sigmoid else 0.0
    kernel = _kernel_of(normalize)
    assert kernel is not None
    return kernel, bias is None, sharpness, bias or 0.0


def _kernel_of(normalize: Normalizer) -> int | None:
    """The number of a normalizer's kernel; two of the α-entmax family have one."""
    kernel = NORMALIZERS.get(type(normalize))
    if isinstance(kernel, dict):
        assert isinstance(normalize, Entmax)
        return kernel.get(normalize.alpha)
    return kernel


def undivided(plain: Plain) -> bool:
    """Whether backward needs neither segments nor padding."""
    *units, each = plain.lead
    queries, _, width, value_width = plain.sizes
    lanes = _KERNELS.lanes()  # type: ignore[union-attr]
    return width % lanes == value_width % lanes == 0 and _segments(math.prod(units), each * queries) == 1


def _segments(units: int, rows: int) -> int:
    return max(min(_SEGMENTS // max(units, 1), rows // _ROWS), 1)


def _nothing(more: dict[str, Any]) -> bool:
    """No rows: what is summed over them is zero."""
    for room in more.values():
        if isinstance(room, _Room):
            room.tensor.zero_()
    return True
