"""Compare reads of lazy weights with the oracle's matrix and with each other."""

import contextlib
import gc
import math
import pickle
import tempfile
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import regard
from tests.fuzz import compare
from tests.fuzz.case import Case, Failure
from tests.fuzz.draw import Call
from tests.fuzz.targets.operator import IMPLEMENTATIONS

STRICT = 5e-6  # two reads of the same weights by the kernels


class Reading(NamedTuple):
    """Lazy weights, their dense matrix in float64, the visible keys, and the allowed difference.

    under: the context in which they are read.
    """

    weights: regard.Weights
    dense: Tensor
    visible: Tensor
    error: float
    under: str


def run(case: Case) -> None:
    torch.set_num_threads(case.random.choice((1, 1, 1, 2)))
    call = Call(case, magnitudes=(1, 1, 1, 1, 100, 2500, 10_000))
    name = case.random.choice(IMPLEMENTATIONS)
    exact = compare.expected(call)
    inputs, options = call.inputs(), call.options()
    if case.chance(0.2):
        inputs[0].requires_grad_()
    alive = weakref.ref(inputs[2])
    output, weights = regard.attend(*inputs, **options, mask=call.mask, implementation=name)
    case.note(f"implementation {name}, requires_grad {inputs[0].requires_grad}")
    compare.check("output", output, exact.output, exact.output_error, "attend")
    differentiated = output.requires_grad
    del output
    with context(case) as under:
        dense = weights.dense()
        compare.check("dense()", dense, exact.weights, exact.weights_error, f"under {under}")
        error, visible = _error(call, name, exact), exact.scores != -math.inf
        reading = Reading(weights, dense.detach().double(), visible, error, under)
        _rows_sum(call, reading)
        for _ in range(4):
            read = case.random.choice(READS)
            case.note(read.__name__)
            read(case, reading)
        _scores(call, reading, exact)
    if not differentiated:
        del inputs[2]
        gc.collect()
        if alive() is not None:
            raise Failure("weights keep value alive after they were read")
    _change_inputs(case, inputs, reading)


@contextlib.contextmanager
def context(case: Case) -> Iterator[str]:
    """Return a context around a read that must not change the result."""
    name = case.random.choice(("nothing", "no_grad", "inference_mode", "autocast", "default dtype"))
    case.note(f"read under {name}")
    manager: Any = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    }.get(name, contextlib.nullcontext)()
    before = torch.get_default_dtype()
    try:
        if name == "default dtype":
            torch.set_default_dtype(torch.float64)
        with manager:
            yield name
    finally:
        torch.set_default_dtype(before)


def _error(call: Call, name: str | None, exact: compare.Expected) -> float:
    """Return how far two reads of one weight may differ: the kernels always round a row in the same way."""
    largest = float(exact.weights.abs().max()) if exact.weights.numel() else 0.0
    kernels = (
        name in (None, "fused")
        and call.dtype is not torch.float64
        and call.score in ("scaled dot", "dot", "scale", "softcap")
        and call.normalize
        in ("softmax", "temperature", "sparsemax", "entmax15", "entmax 1.3", "sigmoid", "relu")
        and len(call.bias) < 2
        and "(" not in str(type(call.mask))
        and not (hasattr(call.mask, "first"))
    )
    if kernels:
        return STRICT * max(largest, 1.0)
    return math.inf if exact.weights_error is None else 2 * exact.weights_error + STRICT * largest


def _rows_sum(call: Call, reading: Reading) -> None:
    """Check that rows sum to one for normalizers that guarantee it, however large the scores are."""
    sums = call.normalize.startswith(("softmax", "temperature", "entmax", "sparsemax", "hard"))
    if not sums or call.normalize == "softmax1":
        return
    total = reading.dense.sum(-1)[reading.visible.any(-1)]
    steep = call.normalize in ("entmax 2.5", "entmax 4")  # the slope of φ at zero is infinite
    if not bool(((total - 1).abs() < (2e-2 if steep else 1e-4)).all()):
        worst = total[(total - 1).abs().nan_to_num(math.inf).argmax()]
        raise Failure(
            f"under {reading.under}: a row of dense() does not sum to one", f"but to {float(worst):.6g}"
        )


def _scores(call: Call, reading: Reading, exact: compare.Expected) -> None:
    scores = reading.weights.scores().detach().double()
    if not torch.equal(scores == -math.inf, ~reading.visible):
        raise Failure("scores() masks other keys")
    seen = reading.visible
    kind = f"under {reading.under}"
    compare.check("scores()", scores[seen], exact.scores[seen], exact.scores_error, kind)
    if call.normalize == "softmax" and call.shape.keys:
        rows = seen.any(-1)
        tau = reading.weights.tau.detach().double()
        compare.check("tau", tau[rows], exact.scores.logsumexp(-1)[rows], exact.scores_error + 1e-5, kind)


# Reads


def _agree(what: str, reading: Reading, found: Tensor, wanted: Tensor, times: float = 1.0) -> None:
    compare.check(what, found, wanted, times * reading.error, f"two reads under {reading.under} differ")


def row(case: Case, reading: Reading) -> None:
    """Check that a single row equals that row of the full matrix."""
    queries = reading.dense.shape[-2]
    if queries:
        i = case.random.randrange(-queries, queries)
        _agree("a row", reading, reading.weights[..., i, :], reading.dense[..., i, :])


def part(case: Case, reading: Reading) -> None:
    index = tuple(_slice(case, size) for size in reading.dense.shape)
    index = index[case.random.randrange(len(index)) :] if case.chance(0.3) else index
    index = (..., *index) if len(index) < reading.dense.dim() else index
    _agree("a part", reading, reading.weights[index], reading.dense[index])


def _slice(case: Case, size: int) -> slice:
    first, last = sorted(case.random.randint(0, size) for _ in range(2))
    return slice(first, last, case.random.choice((None, 1, 2, 3)))


def numbers(case: Case, reading: Reading) -> None:
    """Check integer-array indices."""
    queries, keys = reading.dense.shape[-2:]
    if not reading.dense.numel():
        return
    count = case.random.randint(1, 5)
    i = torch.tensor([case.random.randrange(queries) for _ in range(count)])
    j = torch.tensor([case.random.randrange(keys) for _ in range(count)])
    index = case.random.choice(((..., i, j), (..., i, slice(None)), (..., j), (..., i[:, None], j)))
    _agree("a fancy index", reading, reading.weights[index], reading.dense[index])


def top(case: Case, reading: Reading) -> None:
    n = case.random.choice((1, 2, 5, 70))
    n = min(n, reading.dense.shape[-1])
    values, keys = reading.weights.topk(n)
    best = reading.dense.topk(n, -1).values
    if keys.numel() and (keys.sort(-1).values.diff(dim=-1) == 0).any():
        raise Failure("topk() lists a key twice")
    _agree("topk().values", reading, values, best)
    _agree("the weights at topk().indices", reading, reading.dense.gather(-1, keys), best, 2)


def aligned(case: Case, reading: Reading) -> None:
    if not reading.dense.numel():
        return
    keys = reading.weights.argmax(-1)
    chosen = reading.dense.gather(-1, keys[..., None])[..., 0]
    _agree("the weight at argmax(-1)", reading, chosen, reading.dense.amax(-1), 2)


def entropy(case: Case, reading: Reading) -> None:
    wanted = torch.special.entr(reading.dense).sum(-1)
    finite = wanted.isfinite()
    found = reading.weights.entropy()
    if not torch.equal(found.isfinite(), finite):
        raise Failure("entropy() is finite at other places")
    _agree("entropy()", reading, found[finite], wanted[finite], 20 * reading.dense.shape[-1])


def received(case: Case, reading: Reading) -> None:
    _agree(
        "received()", reading, reading.weights.received(), reading.dense.sum(-2), reading.dense.shape[-2] + 1
    )


def pool(case: Case, reading: Reading) -> None:
    within = None
    dense = reading.dense
    if case.chance(0.7):
        within = _part_of(case, dense.shape[-2]), _part_of(case, dense.shape[-1])
        dense = dense[..., within[0], within[1]]
    if not dense.numel():
        return
    rows, columns = (case.random.choice((1, 2, 3, 8)) for _ in range(2))
    found = reading.weights.pool(rows, columns, within=within)
    rows, columns = min(rows, dense.shape[-2]), min(columns, dense.shape[-1])
    if dense.shape[-2] % rows or dense.shape[-1] % columns:  # blocks of unequal sizes: only check the mean
        if not bool(torch.isfinite(found).all()):
            raise Failure("pool() is not finite")
        return
    wanted = dense.unflatten(-1, (columns, -1)).mean(-1).unflatten(-2, (rows, -1)).mean(-2)
    _agree("pool()" if within is None else "pool(within=)", reading, found, wanted)


def _part_of(case: Case, size: int) -> slice:
    first, last = sorted(case.random.randint(0, size) for _ in range(2))
    return slice(first, last) if last > first else slice(None)


def product(case: Case, reading: Reading) -> None:
    queries, keys = reading.dense.shape[-2:]
    transposed = case.chance(0.5)
    x = case.randn(
        queries if transposed else keys, *case.random.choice(((), (3,))), dtype=reading.weights.dtype
    )
    wanted = (reading.dense.mT if transposed else reading.dense) @ x.double()
    found = reading.weights.T @ x if transposed else reading.weights @ x
    if reading.weights.dtype is found.dtype:
        _agree("W.T @ x" if transposed else "W @ x", reading, found, wanted, 4.0 * max(len(x), 1))
    else:
        raise Failure("a product is of another dtype", f"{found.dtype}, not {reading.weights.dtype}")


def smaller(case: Case, reading: Reading) -> None:
    """Check the weights of some heads, of one sequence, and the mean over heads."""
    weights, dense = reading.weights, reading.dense
    if dense.dim() < 3:
        return
    heads = dense.shape[-3]
    if case.chance(0.3) and dense.dim() > 3 and dense.shape[0]:
        i = case.random.randrange(dense.shape[0])
        _agree("batch()", reading, weights.batch(i).dense(), dense[i])
    elif case.chance(0.5):
        i = case.random.randrange(heads)
        chosen = weights.heads([i, 0])
        _agree("heads()", reading, chosen.dense(), dense[..., [i, 0], :, :])
        _agree("heads(i)", reading, weights.heads(i).dense(), dense[..., i, :, :])
    else:
        _agree("mean('heads')", reading, weights.mean("heads").dense(), dense.mean(-3))


def again(case: Case, reading: Reading) -> None:
    """Check copies: saved and loaded, pickled, detached, converted to an array."""
    weights = reading.weights
    match case.random.choice(("save", "pickle", "detach", "numpy", "text")):
        case "save":
            with tempfile.TemporaryDirectory() as folder:
                copy = regard.Weights.load(weights.save(f"{folder}/w.safetensors"))
                _agree("a saved copy", reading, copy.dense(), reading.dense)
        case "pickle":
            _agree("a pickled copy", reading, pickle.loads(pickle.dumps(weights)).dense(), reading.dense)
        case "detach":
            _agree("a detached copy", reading, weights.detach().dense(), reading.dense)
        case "numpy":
            _agree("numpy()", reading, torch.from_numpy(weights.numpy()), reading.dense)
        case "text":
            if not repr(weights) or weights.held < 0 or weights.shape != reading.dense.shape:
                raise Failure("repr, held or shape is wrong")


READS: list[Callable[[Case, Reading], None]] = [
    row,
    part,
    numbers,
    top,
    aligned,
    entropy,
    received,
    pool,
    pool,
    product,
    smaller,
    again,
]


def _change_inputs(case: Case, inputs: list[Tensor], reading: Reading) -> None:
    """Change inputs in place; later reads raise an error or return the old weights."""
    x = inputs[case.random.randrange(2)]
    with torch.no_grad():
        x.mul_(-2).add_(1)
    try:
        found = reading.weights.dense()
    except regard.RegardError:
        return
    _agree("dense() after a change of query or key", reading, found, reading.dense)
