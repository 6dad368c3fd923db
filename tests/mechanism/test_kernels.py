"""The kernels with threads, forks, memory limits, instruction sets, and torch's transforms."""

import itertools
import json
import math
import os
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map

import regard
from regard.mechanism import fused
from regard.mechanism.call.arguments import Call, Layout, prepare
from regard.mechanism.call.problem import Problem, ProblemConfig, empty_results
from regard.mechanism.kernels import beam_search
from regard.mechanism.normalizers import Softmax
from regard.mechanism.scores import Prepared, ScaledDot
from tests.cases import NORMALIZERS, Case, Shape, crossed, instruction_set, leaves, looped, upstream
from tests.fresh import run_fresh
from tests.recorder import Largest

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not fused.available(), reason=fused.DESCRIPTION),
]

PLAIN = ["softmax", "softmax1", "sigmoid", "relu", "mean", "sparsemax", "entmax15"]  # one per kernel
close = torch.testing.assert_close


def numbers(*shape: int, seed: int = 0, **options: Any) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), **options)


def everything(case: Case, **more: Any) -> list[Tensor]:
    """Return output, gradients and statistics of the weights."""
    inputs = case.tensors(torch.float32, requires_grad=True)
    options = {**case.options(torch.float32), **more}
    quiet = regard.attention(*(x.detach() for x in inputs), **options)
    output, weights = regard.attend(*inputs, **options)
    grads = torch.autograd.grad(output, (*inputs, *leaves(options)), upstream(output), materialize_grads=True)
    looks = looking(weights.detach())
    return [quiet.detach(), output.detach(), *grads, *looks]


@torch.no_grad()
def looking(weights: regard.Weights) -> list[Tensor]:
    *_, queries, keys = weights.shape
    actual = [weights.dense(), weights.entropy(), weights.received(), *weights.topk(3), weights.pool(3, 3)]
    return [*actual, weights @ numbers(keys, 2), weights.T @ numbers(queries, 2)]


def same_bits(one: list[Tensor], other: list[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(one, other, strict=True)):
        assert torch.equal(a, b), i


# Bitwise reproducibility

WHOLE = Shape((3, 4, 150, 20), (3, 2, 170, 20), (3, 2, 170, 9))
PROJECTED = Shape((3, 4, 150, 3), (3, 2, 170, 3), (3, 2, 170, 9))
LONGER = Shape((2, 600, 20), (1, 170, 20), (1, 170, 9))  # several segments in backward
DECODE = Shape((4, 2, 20), (2, 4000, 20), (2, 4000, 9))  # split keys
THREADED = {
    "many heads": Case("grouped", "scaled dot", "softmax", "causal", "relative", sizes=WHOLE),
    "masked": Case("grouped", "scaled dot", "softmax1", "union", "dense", sizes=WHOLE),
    "additive": Case("grouped", "scaled dot", "softmax", "documents", "dense of keys", sizes=PROJECTED),
    "sigmoid": Case("grouped", "softcap", "sigmoid", "tensor", "two lines", sizes=WHOLE),
    "sparsemax": Case("grouped", "scaled dot", "sparsemax", "causal", "alibi", sizes=WHOLE),
    "entmax15": Case("grouped", "scaled dot", "entmax15", "no mask", "no bias", sizes=LONGER),
    "segments": Case("grouped", "scaled dot", "softmax", "no mask", "two lines", sizes=LONGER),
    "decoding": Case("grouped", "scaled dot", "softmax", "no mask", "no bias", sizes=DECODE),
    "decoding with a sink": Case("grouped", "scaled dot", "learned sink", "padding", "alibi", sizes=DECODE),
}


class Projected(nn.Module, regard.Score):
    """vᵀ tanh(query + key) for given projections.

    `Additive` computes W query and U key, and their gradients, with torch's matrix product, which on some
    processors rounds differently for different numbers of threads. Here, the projections are inputs.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(numbers(width))

    def prepare(self, query: Tensor, key: Tensor) -> Prepared:
        return Prepared(query, key, "tanh", self.vector)


def own_score(name: str) -> dict[str, Any]:
    """Return a score that is used for the thread tests but is not in the table of cases."""
    return {"score": Projected(PROJECTED.query[-1])} if name == "additive" else {}


@pytest.mark.parametrize("name", THREADED)
@pytest.mark.sampled(2)
def test_neither_threads_nor_repetition_change_a_bit(name):
    score = own_score(name)
    for more in (score, {"dropout": 0.2, **score}):

        def run(threads: int, more: dict[str, Any] = more) -> list[Tensor]:
            torch.set_num_threads(threads)
            torch.manual_seed(1)
            # torch's sums are small enough for one thread
            return everything(THREADED[name], **more)

        first = run(1)
        for threads in (2, 3, 2, 1):
            same_bits(first, run(threads))


@looped("normalize", PLAIN)
def test_a_row_does_not_depend_on_other_sequences(normalize):
    for queries, keys in ((70, 150), (1, 3000)):
        options = {"normalize": NORMALIZERS[normalize](WHOLE, None), "mask": regard.Causal()}
        inputs = [numbers(3, 2, n, 20, seed=n) for n in (queries, keys, keys)]
        others = [torch.cat([x[:1] * 7, x[1:2], -x[2:]]) for x in inputs]
        actual = []
        for three in (inputs, others):
            leaf = [x.clone().requires_grad_() for x in three]
            output = regard.attention(*leaf, **options)
            grads = torch.autograd.grad(output, leaf, upstream(output))
            actual.append([regard.attention(*three, **options)[1], output[1], *(grad[1] for grad in grads)])
        same_bits(*actual)


def test_a_row_does_not_depend_on_later_tokens():
    x = numbers(2, 300, 20)
    y = torch.cat([x[:, :130], x[:, 130:] * -3], 1)
    one, other = (regard.attention(z, z, z, mask=regard.Causal())[:, :130] for z in (x, y))
    assert torch.equal(one, other)


def test_python_threads_may_call_at_once():
    cases = [THREADED["many heads"], THREADED["sparsemax"], THREADED["decoding"]] * 2
    torch.set_num_threads(2)
    wanted = [everything(case) for case in cases]
    with ThreadPoolExecutor(len(cases)) as pool:
        for _ in range(3):
            for one, other in zip(wanted, pool.map(everything, cases), strict=True):
                same_bits(one, other)


# Processes


FORK = """
import os, sys, time, torch, regard
torch.set_num_threads(2)
x = torch.randn(16, 128, 8)
def work():
    y = x.clone().requires_grad_()
    output, weights = regard.attend(y, y, y, mask=regard.Causal())
    output.sum().backward()
    with torch.no_grad():
        one = regard.attention(x[:1, :1], x[:1], x[:1])
        return [output.detach(), y.grad, weights.detach().entropy(), one]
before = work()
child = os.fork()
if child == 0:
    again = work()
    os._exit(0 if all(torch.equal(a, b) for a, b in zip(before, again)) else 7)
until = time.monotonic() + 30
while time.monotonic() < until:
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid:
        print("child", os.waitstatus_to_exitcode(status))
        break
    time.sleep(0.01)
else:
    os.kill(child, 9)
    print("child never ended")
print("parent", all(torch.equal(a, b) for a, b in zip(before, work())))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_computes_and_ends():
    done = run_fresh(FORK)
    assert done.stdout.splitlines() == ["child 0", "parent True"], done.stderr


@pytest.mark.parametrize(
    ("setting", "expected"), [("3", 3), ("3,2", 3), (" 3 ", 3), ("0", None), ("٣", None), ("9" * 30, None)]
)
def test_threads_without_torch_are_those_of_openmp(setting, expected, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    default = beam_search.count_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", setting)
    assert beam_search.count_threads() == (expected or default)


MEMORY = """
import json, sys, torch, regard
torch.set_num_threads(1)
def most():  # peak memory of this process
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
heads, tokens, implementation, normalize = json.loads(sys.argv[1])
options = {"implementation": implementation, "mask": regard.Causal()}
options["normalize"] = getattr(regard, normalize)()
def work(heads, tokens):
    x, y, z = (torch.randn(heads, tokens, 16, requires_grad=True) for _ in range(3))
    line = torch.zeros(heads, 33, requires_grad=True)
    output, weights = regard.attend(x, y, z, bias=regard.ClippedRelativeBias(line), **options)
    output.sum().backward()
    with torch.no_grad():
        weights = weights.detach()
        weights.entropy(), weights.topk(4), weights.received(), weights @ torch.ones(tokens, 2)
work(2, 8)
before = most()
work(heads, tokens)
print(most() - before)
"""


def memory(*arguments: Any) -> int:
    program = MEMORY.replace("sys.argv[1]", repr(json.dumps(arguments)))
    done = run_fresh(program, timeout=300)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


LIMITED = """
import resource, torch, regard
from regard.mechanism import fused
torch.set_num_threads(2)
normal = torch.Generator().manual_seed(0)
def numbers(*shape):
    return torch.randn(shape, generator=normal)
def held():
    with open("/proc/self/statm") as sizes:
        return int(sizes.read().split()[0]) * resource.getpagesize()
def limit(room):
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY if room is None else held() + room, -1))
{setup}
wanted, sizes = work(), []
rooms = (0, 1, 4, 16, 24, 32, 40, 48, 64, 128, 256)
for turn in range(3):
    for room in (*rooms[:: 3 if turn else 1], None):
        limit(None if room is None else room << 20)
        try:
            found = work()
            answer = "right" if all(map(torch.equal, found, wanted)) else "wrong"
        except (MemoryError, RuntimeError) as error:
            found, answer = None, f"{{type(error).__name__}}: {{error}}"
        limit(None)
        print(answer.splitlines()[0])
    sizes.append(held())
# memory cached by malloc varies by 17 to 30 MB per iteration: one small leak is not visible
print("kept" if sizes[2] - max(sizes[:2]) < 64 << 20 else f"leaked: {{sizes}}")
"""
SPARSE = """
query, key, value = (numbers(n, 4).requires_grad_() for n in (64, 400_000, 400_000))
output, weights = regard.attend(query, key, value, normalize=regard.Sparsemax())
weights = weights.detach()
"""
EXHAUSTED = {
    "forward": SPARSE
    + "work = torch.no_grad()(lambda: [regard.attention(query, key, value, normalize=regard.Sparsemax())])",
    "backward": SPARSE
    + "work = lambda: torch.autograd.grad(output, (query, key, value), output, retain_graph=True)",
    "entropy": SPARSE + "work = lambda: [weights.entropy()]\nwork()",
    "top": """
key = numbers(700_000, 4)
weights = regard.attend(numbers(1, 4), key, key, mask=regard.Padding(9))[1]
work = lambda: weights.topk(700_000)
work()
""",
    "weights": """
weights = regard.attend(numbers(4, 2_000_000), numbers(30, 2_000_000), numbers(30, 4))[1]
work = lambda: [weights.dense()]
""",
    "wide": """
x = numbers(4, 5_000_000)
work = lambda: [regard.attention(x, x[:3], x[:3, :4])]
""",
    "split keys": """
query, key, value = numbers(1, 4), numbers(9_000, 4), numbers(9_000, 1).expand(-1, 40_000)
work = lambda: [regard.attention(query, key, value)]
""",
}


linux = pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc/self/statm")


@linux
@pytest.mark.parametrize("name", EXHAUSTED)
@pytest.mark.sampled(2)
def test_memory_that_does_not_suffice_is_an_exception(name):
    done = run_fresh(LIMITED.format(setup=EXHAUSTED[name]), timeout=300)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr[-2000:])
    *answers, last = done.stdout.splitlines()
    assert "wrong" not in answers
    assert answers[-1] == "right", answers
    refused = [answer for answer in answers if answer.startswith("MemoryError: the attention kernels")]
    # entropy needs no more memory for more keys; torch allocates the result of topk
    assert refused or name in ("entropy", "top"), answers
    assert all(re.search(r"allocate [\d.]+ MB .*torch.set_num_threads.*tiled", answer) for answer in refused)
    assert last == "kept"


THREADLESS = """
import resource, torch, regard
from regard.mechanism.kernels import layer_kernels
x = torch.randn(8, 64, 16)
y = torch.randn(1 << 17)
def work():
    found = regard.attend(x, x, x, normalize=regard.Softmax())
    dropped = layer_kernels.dropout("add", y, y, probability=0.5, seed=3, dtype=y.dtype)
    return [found[0], found[1].entropy(), dropped]
torch.set_num_threads(1)
wanted = work()
with open("/proc/self/statm") as sizes:
    held = int(sizes.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + (6 << 20), -1))  # less than the stack of a thread
torch.set_num_threads(3)
found = work()
torch.set_num_threads(1)  # torch aborts the process if it cannot start a thread
print(all(map(torch.equal, found, wanted)))
"""


@linux
def test_threads_that_cannot_be_started_are_done_without():
    done = run_fresh(THREADLESS)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr[-2000:]


@linux
@pytest.mark.parametrize("normalize", ["Softmax", "Sigmoid", "Entmax15"])
def test_memory_is_linear(normalize):
    heads, tokens = 4, 4096
    inputs = heads * tokens * 16 * 4  # bytes per input; a call has about a dozen such tensors
    assert memory(heads, tokens, "fused", normalize) < 30 * inputs < heads * tokens * tokens * 4 / 8


def test_quadratic_memory_is_detected():
    assert memory(1, 1024, "reference", "Softmax") > 1024 * 1024 * 4


def test_the_gradient_of_a_dense_bias_is_held_once():
    # the segments of the backward pass share one gradient
    query, key = (numbers(2, 2048, 4).requires_grad_() for _ in range(2))
    bias = torch.zeros(2, 2048, 128, requires_grad=True)
    output = regard.attention(query, key[:, :128], key[:, :128], bias=bias)
    with Largest() as largest:
        output.sum().backward()
    assert largest.elements <= bias.numel(), largest.by


# Instruction sets

KERNELS = fused.KERNELS
ISAS = KERNELS.available() if KERNELS is not None else []


def test_every_feature_that_a_build_may_use_is_looked_for():
    text = (Path(__file__).parents[2] / "kernels" / "CMakeLists.txt").read_text()
    for isa in ISAS:
        flags = re.search(rf"set\(FLAGS_{isa} ([^)]*)\)", text)
        wanted = re.findall(r"-m([a-z0-9-]+)(?=\s|$)", flags[1] if flags else "")
        assert fused.KERNELS.features(isa) == [name.replace("-", "_") for name in wanted], isa
    with pytest.raises(ValueError, match="mmx"):
        fused.KERNELS.features("mmx")


class Described(NamedTuple):
    numbers: list[int]
    factors: tuple[float, ...]
    held: list[Tensor]  # keeps the tensors alive whose addresses are in `numbers`


def described() -> Described:
    """Return an encoded call."""
    x = numbers(1, 2, 3, 4)
    call = Call(ScaledDot(), None, None, Softmax(), 0.0, None)
    problem = prepare(x, x, x, Layout.of(x, x, x), call)
    output, tau = empty_results(problem)
    encoded = fused.encode(problem, {"output": output, "tau": tau})
    return Described(encoded.numbers, encoded.factors, [x, output, tau])


def test_a_truncated_encoding_is_rejected():
    call = described()
    assert fused.KERNELS.forward(call.numbers, call.factors, 1)
    size = 4 + 2 * 5  # numbers per tensor
    whole = {len(call.numbers) - size * i for i in range(6)}  # encodings without the last tensors
    for count in set(range(len(call.numbers))) - whole:
        with pytest.raises(IndexError, match="too early"):
            fused.KERNELS.forward(call.numbers[:count], call.factors, 1)
    for factors in (call.factors[:-1], (*call.factors, 1.0), ()):
        with pytest.raises(IndexError, match="five factors"):
            fused.KERNELS.forward(call.numbers, factors, 1)
    for wrong in (None, 3, ["a"], [1.5]):
        with pytest.raises(TypeError):
            fused.KERNELS.forward(wrong, call.factors, 1)


@looped(
    ("at", "number"),
    [(0, 0), (0, 11), (0, -1), (1, -2), (5, 2**50), (10, 3), (11, 6), (11, -1), (16, 5), (17, 3), (18, 5)],
)
def test_out_of_range_numbers_are_rejected(at, number):
    call = described()
    call.numbers[at] = number
    with pytest.raises((ValueError, IndexError)):
        fused.KERNELS.forward(call.numbers, call.factors, 1)


def test_tensors_of_the_wrong_dtype_are_rejected():
    call = described()
    first, size = 1 + 3 + 15, 4 + 2 * 5
    for tensor in range(5):  # query, key, value, output, tau
        at = first + tensor * size
        for kind in range(-1, 8):
            if kind in ((1,) if tensor == 4 else (1, 2, 3)):
                continue
            changed = call.numbers.copy()
            changed[at + 1] = kind
            with pytest.raises(ValueError, match=r"type|scales"):
                fused.KERNELS.forward(changed, call.factors, 1)
        changed = call.numbers.copy()
        changed[at] = 999
        with pytest.raises(IndexError, match="kind"):
            fused.KERNELS.forward(changed, call.factors, 1)


def test_an_unsupported_dtype_is_named_in_the_error():
    x = numbers(1, 1, 3, 4)
    config = ProblemConfig(regard.Softmax(), terms=1, queries=3)
    start = torch.zeros(1, 1, 3, 1, dtype=torch.int32)
    for tensors, name in (
        ({"query": x, "key": x, "value": x, "start0": start}, "start0"),
        ({"query": x, "key": x.double(), "value": x}, "key"),
    ):
        with pytest.raises(regard.DTypeError, match=f"{name} has dtype torch.*the kernels support float32"):
            fused.forward(Problem(config, tensors))


def test_a_wrong_instruction_set_fails_loudly():
    done = run_fresh("import regard", REGARD_ISA="mmx")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert all(part in last for part in ("ArgumentError", "REGARD_ISA is 'mmx'", *ISAS))


def test_the_requested_instruction_set_is_used():
    program = (
        "import torch, regard\n"
        "x = torch.eye(3)\n"
        "explanation = regard.explain(x, x, x)\n"
        "print(explanation.implementation, explanation.reasons[0])\n"
    )
    for isa in ISAS[-1:]:
        done = run_fresh(program, REGARD_ISA=isa, REGARD_IMPLEMENTATION="")
        assert re.match(rf"fused .*\b{isa}\b", done.stdout), done.stdout + done.stderr


def test_instruction_sets_differ_by_roundings_only():
    def compute(name: str, case: Case) -> list[Tensor]:
        options = {"dropout": 0.1, "generator": torch.Generator().manual_seed(1), **own_score(name)}
        return everything(case, **options)

    actual = {}
    for isa in ISAS:
        with instruction_set(isa):
            actual[isa] = {name: compute(name, case) for name, case in THREADED.items()}
    for one, other in itertools.pairwise(ISAS):
        for name in THREADED:
            for i, (a, b) in enumerate(zip(actual[one][name], actual[other][name], strict=True)):
                if a.is_floating_point():  # keys of equal weight may be in either order
                    close(a, b, rtol=1e-4, atol=1e-4, msg=lambda text, at=(name, i): f"{at}\n{text}")
        outputs = ([actual[isa][name][1] for name in THREADED] for isa in (one, other))
        # these differ in bfloat16 and int8 only
        if not {one, other} <= {"amx", "emulated_amx", "avx512", "avx512bf16"}:
            assert not all(map(torch.equal, *outputs))  # otherwise both instruction sets run the same code


def test_a_cached_call_runs_with_another_instruction_set():
    # width 4 fits the vectors of `generic`; wider vectors need padded gradients
    inputs = [torch.randn(2, 3, length, 4, requires_grad=True) for length in (6, 9, 9)]
    gradients = []
    for isa in (*ISAS, *ISAS):
        with instruction_set(isa):
            output = regard.attention(*inputs)
            gradients.append(torch.autograd.grad(output, inputs, upstream(output)))
        output = regard.attention(*inputs)
        with instruction_set(isa):
            gradients.append(torch.autograd.grad(output, inputs, upstream(output)))
    for other in gradients[1:]:
        for a, b in zip(gradients[0], other, strict=True):
            close(a, b, rtol=1e-5, atol=1e-5)


UNBUILT = """
import sys
sys.modules["regard.mechanism._kernels"] = None
import torch, regard
x = torch.randn(2, 5, 4, requires_grad=True)
explanation = regard.explain(x, x, x)
print(explanation.implementation, explanation.reasons[0], sep=": ")
output, weights = regard.attend(x, x, x, mask=regard.Causal())
output.sum().backward()
assert x.grad.isfinite().all() and weights.detach().entropy().shape == (2, 5)
again = regard.attention(x, x, x, mask=regard.Causal(), implementation="reference")
assert torch.allclose(output, again, atol=1e-6)
with torch.no_grad():
    regard.attention(x, x, x)
    regard.scaled_dot_product_attention(x, x, x)
for call in (regard.attention, regard.attend, regard.explain):
    try:
        call(x, x, x, implementation="fused")
    except regard.ArgumentError as error:
        print(error)
"""


def test_without_kernels_everything_works_in_tiles():
    done = run_fresh(UNBUILT, REGARD_ISA="", REGARD_IMPLEMENTATION="")
    assert done.returncode == 0, done.stderr
    first, *refusals = done.stdout.splitlines()
    assert re.match("tiled: .*the kernels are not available", first)
    assert len(refusals) == 3
    assert all(re.match("implementation is 'fused'.*C\\+\\+ compiler", refusal) for refusal in refusals)


@pytest.mark.parametrize("name", ["REGARD_ISA", "REGARD_IMPLEMENTATION"])
def test_missing_requested_kernels_raise(name):
    asked = {"REGARD_ISA": "generic", "REGARD_IMPLEMENTATION": "fused"}[name]
    others = {"REGARD_ISA": "", "REGARD_IMPLEMENTATION": ""}
    program = (
        "import sys\nsys.modules['regard.mechanism._kernels'] = None\n"
        "import torch, regard\nx = torch.eye(3)\nregard.attention(x, x, x)\n"
    )
    done = run_fresh(program, **{**others, name: asked})
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert all(part in last for part in ("ArgumentError", asked, "C++ compiler"))


def test_the_environment_forces_the_kernels():
    x = numbers(2, 5, 4, dtype=torch.float64)
    program = (
        "import torch, regard\n"
        "x = torch.eye(3)\n"
        "for y, more in ((x, {}), (x, {'normalize': regard.Hard()}), (x.double(), {})):\n"
        "    print(regard.explain(y, y, y, **more).implementation)\n"
    )
    done = run_fresh(program, REGARD_IMPLEMENTATION="fused")
    assert done.stdout.split() == ["fused", "tiled", "tiled"], done.stderr
    assert regard.explain(x, x, x, implementation="fused").implementation == "tiled"


# Large strides

FAR = 2**30  # in numbers: three tensors this far apart span 2³¹


def far(axis: int, seed: int) -> Tensor:
    """Return a tensor (3, 3, 18) whose sequences (axis 0) or rows have huge strides, mostly untouched."""
    room = torch.empty(2 * FAR + 200, dtype=torch.float32)
    x = room.as_strided((3, 3, 18), (FAR, 18, 1) if axis == 0 else (18, FAR, 1), seed)
    return x.copy_(numbers(3, 3, 18, seed=seed))


@looped("axis", [0, 1], ids=["sequences", "rows"])
@looped("normalize", ["softmax", "mean", "entmax15"])
def test_offsets_need_more_than_32_bits(normalize, axis):
    options = {"normalize": NORMALIZERS[normalize](WHOLE, None)}
    try:
        inputs = [far(axis, seed) for seed in (5, 6, 7)]
    except RuntimeError:
        pytest.skip("this system does not overcommit memory")
    near = [x.contiguous() for x in inputs]
    for implementation in ("reference", "tiled", "fused", None):
        close(
            regard.attention(*inputs, implementation=implementation, **options),
            regard.attention(*near, **options),
        )
    actual = []
    for three in (inputs, near):
        leaf = [x.detach().requires_grad_() for x in three]
        output, weights = regard.attend(*leaf, **options)
        grads = torch.autograd.grad(output, leaf, upstream(output))
        actual.append([output.detach(), *grads, *looking(weights.detach())])
    same_bits(*actual)


# torch transforms

SMALL: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "causal": lambda: {"mask": regard.Causal()},
    "additive": lambda: {"score": regard.Additive(5, 5, width=6)},
    "softcap": lambda: {"score": regard.Dot(softcap=2.0), "mask": regard.Window(3)},
    "sparsemax": lambda: {"normalize": regard.Sparsemax(), "mask": regard.Padding(5)},
    "entmax15": lambda: {"normalize": regard.Entmax15()},
    "sink": lambda: {"normalize": regard.Sink(6), "bias": regard.T5Bias(6, buckets=8, max_distance=16)},
    "relative": lambda: {"bias": regard.ALiBi(6), "mask": regard.Documents([1, 3], [3, 4])},
}


def inputs_of(dtype: torch.dtype = torch.float32, *, inside: bool = False, seed: int = 3) -> list[Tensor]:
    """Return query, key and value with grouped heads, optionally stored token by token."""
    shapes = ((2, 6, 4, 5), (2, 3, 7, 5), (2, 3, 7, 9))
    actual = [numbers(*shape, seed=seed + i) for i, shape in enumerate(shapes)]
    if inside:
        actual = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in actual]
    return [x.to(dtype).requires_grad_() for x in actual]


Attention = Callable[..., Tensor]


def second_derivatives(call: Attention, inputs: list[Tensor]) -> Any:
    output = call(*inputs)
    first = torch.autograd.grad(output, inputs, upstream(output), create_graph=True)
    return torch.autograd.grad(sum(x.square().sum() for x in first), inputs)


def forward_derivatives(call: Attention, inputs: list[Tensor]) -> Any:
    inputs = [x.detach() for x in inputs]
    directions = [x.detach() for x in inputs_of(inputs[0].dtype, seed=9)]
    with fwAD.dual_level():
        dual = [fwAD.make_dual(x, y) for x, y in zip(inputs, directions, strict=True)]
        tangent = fwAD.unpack_dual(call(*dual)).tangent
    return tangent, torch.func.jvp(call, tuple(inputs), tuple(directions))[1]


def mapped(in_dims: tuple[int | None, ...]) -> Callable[[Attention, list[Tensor]], Any]:
    """Return a function that computes outputs and per-sample gradients by vmap."""

    def run(call: Attention, inputs: list[Tensor]) -> Any:
        args = [x.detach() if at == 0 else x[0].detach() for x, at in zip(inputs, in_dims, strict=True)]
        gradient = torch.func.grad(lambda *args: call(*args).square().sum(), argnums=(0, 1, 2))
        return torch.vmap(call, in_dims)(*args), torch.vmap(gradient, in_dims)(*args)

    return run


TRANSFORMS: dict[str, Callable[[Attention, list[Tensor]], Any]] = {
    "second derivatives": second_derivatives,
    "forward mode": forward_derivatives,
    "vmap": mapped((0, 0, 0)),
    "vmap, one key": mapped((0, None, 0)),
    "vmap, one query": mapped((None, 0, None)),
}


@crossed(2, name=SMALL, transform=TRANSFORMS)
def test_transforms_of_the_kernels_agree_with_those_of_float64(name, transform):
    """test_autograd.py tests the transforms in float64."""
    results = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        options = SMALL[name]()
        for option in options.values():
            if isinstance(option, nn.Module):
                option.to(dtype)
        results.append(TRANSFORMS[transform](partial(regard.attention, **options), inputs_of(dtype)))
    actual, expected = results
    close(actual, tree_map(Tensor.float, expected), rtol=1e-4, atol=1e-4)


def test_fake_tensors_stay_fake():
    with FakeTensorMode() as mode:
        inputs = [mode.from_tensor(x.detach()) for x in inputs_of()]
        for name in ("plain", "causal", "softcap", "entmax15"):  # the other masks contain real tensors
            output = regard.attention(*inputs, **SMALL[name]())
            assert type(output) is FakeTensor
            assert output.shape == (2, 6, 4, 9)
    assert regard.attention(*(x.detach().to("meta") for x in inputs_of())).is_meta


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True], ids=["heads outside", "heads inside"])
@pytest.mark.parametrize("name", ["plain", "sink"])
def test_a_call_compiled_to_machine_code_equals_the_eager_one(name, inside):
    # compiled code relies on the declared strides
    torch.compiler.reset()
    matrix, inputs, options = numbers(5, 5).requires_grad_(), inputs_of(inside=inside), SMALL[name]()

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return regard.attention(query @ matrix, key @ matrix, value * 2, **options).relu()

    def derived(call: Attention) -> list[Tensor]:
        output = call(*inputs)
        return [output, *torch.autograd.grad(output, inputs, upstream(output))]

    close(derived(torch.compile(call, fullgraph=True)), derived(call))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_script_serves_for_other_numbers():
    inputs, others = ([x.detach() for x in inputs_of(seed=seed)] for seed in (3, 9))
    script = torch.jit.trace(lambda *args: regard.attention(*args, mask=regard.Causal()), inputs)
    close(script(*others), regard.attention(*others, mask=regard.Causal()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_a_part_of_the_inputs(dtype):
    # each call alone equals the batched result
    bias, sink = (numbers(*shape, dtype=dtype).requires_grad_() for shape in ((6, 4, 7), (6,)))
    options = {"bias": bias, "normalize": regard.Softmax1(sink)}
    leaf = [*inputs_of(dtype), bias, sink]
    output = regard.attention(*leaf[:3], **options)
    every = torch.autograd.grad(output, leaf, upstream(output))
    for i in range(len(leaf)):
        for j, x in enumerate(leaf):
            x.requires_grad_(i == j)
        output = regard.attention(*leaf[:3], **options)
        close(torch.autograd.grad(output, leaf[i], upstream(output))[0], every[i], rtol=1e-5, atol=1e-6)


def test_a_gradient_with_negative_strides():
    query, key, value = inputs_of()
    output = regard.attention(query, key, value)
    minus = torch._neg_view(upstream(output))
    one = torch.autograd.grad(output, (query, key, value), minus, retain_graph=True)
    close(one, torch.autograd.grad(output, (query, key, value), -upstream(output)))


@pytest.mark.parametrize("normalize", [regard.Softmax(), regard.Sigmoid(), regard.Entmax15()], ids=repr)
def test_saved_tensors_may_come_back_with_other_strides(normalize):
    # widths that fill whole vectors, for which backward calls are cached; more than a tile of keys
    shapes = {"query": (2, 3, 30, 32), "key": (2, 3, 200, 32), "value": (2, 3, 200, 16)}
    saved = {**shapes, "output": (2, 3, 30, 16), "tau": (2, 3, 1, 30, 2), "none": ()}

    def back(changed: str) -> tuple[Tensor, ...]:
        def unpack(x: Tensor) -> Tensor:
            if tuple(x.shape) == saved[changed]:
                return x.transpose(1, -2).contiguous().transpose(1, -2)
            return x.mT.contiguous().mT if changed == "all" else x

        inputs = [numbers(*shape, seed=sum(shape)).requires_grad_() for shape in shapes.values()]
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), unpack):
            output = regard.attention(*inputs, normalize=normalize)
        return torch.autograd.grad(output, inputs, upstream(output))

    expected = back("none")
    saved["all"] = ()
    for changed in saved:
        close(back(changed), expected, msg=lambda text, changed=changed: f"{changed}: {text}")


def test_sizes_of_a_call_are_counted_in_heads_not_in_rows():
    # one query in eight heads is a block of eight rows, as are four queries in two heads
    x = numbers(1, 8, 1, 16)
    key, value = numbers(1, 1, 40, 16), numbers(1, 1, 40, 5)
    wanted = regard.attention(x.squeeze(2)[0], key[0, 0], value[0, 0])
    close(regard.attention(x, key, value)[0, :, 0], wanted)
    close(regard.attention(x.view(1, 2, 4, 16), key, value).reshape(8, 5), wanted)
    assert math.prod(wanted.shape) == 40
