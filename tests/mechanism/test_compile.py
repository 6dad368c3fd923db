"""torch.compile, the custom operators, and torch.export."""

import io
import os
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import regard
from regard.mechanism import fused
from tests.custom import OwnSoftmax
from tests.mechanism.functions import (
    CASES,
    DISTINCT,
    DOUBLE,
    HALF,
    READERS,
    SLOW,
    Attention,
    B,
    Case,
    D,
    E,
    H,
    K,
    Q,
    close,
    draw,
    gradients,
    make,
    qkv,
)


def compiled(
    call: Callable[..., Any], backend: Any = "aot_eager", fullgraph: bool = True, **options: Any
) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(call, backend=backend, fullgraph=fullgraph, **options)


# Cases that run in `make test`; the others are slow.
COMPILED = {"Gaussian", "everything"}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if name in COMPILED and dtype is torch.float32 else SLOW)
        for name in CASES
        for dtype in (torch.float32, torch.float64)
        if "dropout" not in name and (dtype is torch.float32 or name in DISTINCT)
    ],
)
def test_a_compiled_call_equals_the_eager_one(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]()
    inputs = tuple(t.to(dtype).requires_grad_() for t in case.inputs)
    close(gradients(compiled(case.call), inputs), gradients(case.call, inputs))


def autocast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=HALF):
        return regard.attention(q, k, v, mask=regard.Causal())


def checkpointed(*args: Tensor) -> Tensor:
    return checkpoint(lambda *a: regard.attention(*a, mask=regard.Causal()), *args, use_reentrant=False)


def attention(**options: Any) -> Callable[..., Tensor]:
    return lambda q, k, v: regard.attention(q, k, v, **options)


def look(read: str) -> Callable[..., Tensor]:
    return lambda q, k, v: READERS[read](regard.attend(q[0], k[0], v[0], mask=regard.Causal())[1])


def masked(build: Callable[..., Any], *lengths: list[int]) -> Callable[..., Tensor]:
    """Create the mask from tensors inside the compiled function."""
    tensors = [torch.tensor(n) for n in lengths]
    return lambda q, k, v: regard.attention(q, k, v, mask=build(*tensors))


def strided(change: Callable[[int], Tensor]) -> tuple[Tensor, ...]:
    return tuple(change(n) for n in (Q, K, K))


# Operations inside a compiled function, and their inputs.
INSIDE: dict[str, tuple[Callable[..., Tensor], Callable[[], tuple[Tensor, ...]]]] = {
    # objects created inside the function
    "Documents of tensors": (
        masked(lambda m, n: regard.Documents(m, n, within=regard.Causal()), [1, 2], [3, 1]),
        qkv,
    ),
    "numbers": (
        attention(
            score=regard.ScaledDot(0.3, softcap=2.0), mask=regard.Window(2), normalize=regard.Entmax(1.7)
        ),
        qkv,
    ),
    "Padding of a list": (lambda q, k, v: regard.attention(q, k, v, mask=regard.Padding([1, 2])), qkv),
    # unusual inputs
    "no keys": (
        attention(mask=regard.Causal(align="start")),
        lambda: (draw(B, H, Q, D), draw(B, H, 0, D), draw(B, H, 0, E)),
    ),
    "transposed": (
        attention(score=regard.Dot(), mask=regard.Causal()),
        lambda: strided(lambda n: draw(B, n, H, D).transpose(1, 2)),
    ),
    # surrounding contexts
    "autocast": (autocast, lambda: tuple(t.float() for t in qkv())),
    "checkpoint": (checkpointed, qkv),
    "read top": (look("top"), qkv),
    "slow: read dense": (look("dense"), qkv),
    "slow: read row": (look("row"), qkv),
    "slow: read entropy": (look("entropy"), qkv),
    "slow: read scores": (look("scores"), qkv),
    "slow: read mean": (look("mean"), qkv),
    "slow: Padding of a tensor": (masked(regard.Padding, [1, 3]), qkv),
    "slow: Documents of lists": (
        lambda q, k, v: regard.attention(q, k, v, mask=regard.Documents([1, 2], [2, 2])),
        qkv,
    ),
    "slow: self_attention": (lambda q, k, v: regard.self_attention(k, mask=regard.Causal()), qkv),
    "slow: reference": (attention(implementation="reference"), qkv),
    "slow: no queries": (attention(), lambda: (draw(B, H, 0, D), *qkv()[1:])),
    "slow: no batch": (attention(), lambda: tuple(t[:0] for t in qkv())),
    "slow: no features": (attention(), lambda: (draw(B, H, Q, 0), draw(B, H, K, 0), draw(B, H, K, E))),
    "slow: expanded": (attention(), lambda: strided(lambda n: draw(1, 1, n, D).expand(B, H, n, D))),
    "slow: every second": (attention(), lambda: strided(lambda n: draw(B, H, 2 * n, 2 * D)[..., ::2, ::2])),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[SLOW] * name.startswith("slow")) for name in INSIDE]
)
def test_a_compiled_function_equals_the_eager_one(name: str) -> None:
    call, build = INSIDE[name]
    inputs = tuple(t.detach().requires_grad_() for t in build())
    actual = gradients(compiled(call), inputs)
    assert actual[0].dtype is (HALF if name == "autocast" else DOUBLE)
    close(actual, gradients(call, inputs))


@pytest.mark.parametrize(
    "options",
    [
        {"bias": regard.ALiBi(H), "normalize": regard.Sink(H).double()},
        *(
            pytest.param(options, marks=SLOW)
            for options in (
                {},
                {"mask": regard.Causal(), "normalize": regard.Entmax15()},
                {"normalize": OwnSoftmax()},
            )
        ),
    ],
    ids=["Sink", "plain", "Entmax15", "own"],
)
def test_compiled_dropout_draws_the_same_numbers(options: dict[str, Any]) -> None:
    inputs = tuple(t.requires_grad_() for t in qkv())

    def call(*args: Tensor) -> Tensor:
        return regard.attention(*args, dropout=0.4, **options)

    results = []
    for function in (call, compiled(call)):
        torch.manual_seed(9)
        results.append([*gradients(function, inputs), *gradients(function, inputs)])
    close(*results)
    assert not torch.equal(results[1][0], results[1][4])  # the second call drops other weights


@pytest.mark.parametrize(
    ("build", "most"),
    [
        (lambda i: regard.Padding(torch.tensor([i, 4])), 1),
        pytest.param(
            lambda i: regard.Documents(torch.tensor([1, 2]), torch.tensor([i, 4 - i])), 1, marks=SLOW
        ),
        pytest.param(lambda i: regard.Causal() & (torch.arange(K) != i), 1, marks=SLOW),
        (lambda i: regard.Window(1 + i), 2),
        pytest.param(lambda i: regard.Prefix(i), 2, marks=SLOW),
    ],
    ids=["Padding", "Documents", "tensor", "Window", "Prefix"],
)
def test_masks_as_arguments_of_a_compiled_function(build: Callable[[int], Any], most: int) -> None:
    args = qkv()
    import torch._dynamo.testing

    counter = torch._dynamo.testing.CompileCounter()
    call = compiled(lambda q, k, v, mask: regard.attention(q, k, v, mask=mask), counter)
    for number in range(4):
        close(call(*args, build(number)), regard.attention(*args, mask=build(number)))
    assert counter.frame_count <= most


@pytest.mark.parametrize("mode", [torch.no_grad, pytest.param(torch.inference_mode, marks=SLOW)])
def test_compiles_without_gradients(mode: Any) -> None:
    with mode():
        args = tuple(t.clone() for t in qkv())
        close(
            compiled(lambda *a: regard.attention(*a, mask=regard.Causal()))(*args),
            regard.attention(*args, mask=regard.Causal()),
        )


def test_a_compiled_function_returns_lazy_weights() -> None:
    args = qkv()
    output, weights = compiled(lambda *a: regard.attend(*a, mask=regard.Causal()))(*args)
    expected, same = regard.attend(*args, mask=regard.Causal())
    close(output, expected)
    close(weights.dense(), same.dense())
    close(weights.entropy(), same.entropy())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(
            lambda q, k, v: regard.attention(q, k, v, mask=regard.Causal() & (k[0, :, 0] > 0)), marks=SLOW
        ),
        lambda q, k, v: regard.attention(q, k, v, mask=(k[0, :, 0] > 0) | regard.Causal()),
        pytest.param(lambda q, k, v: regard.attend(q, k, v)[1] @ v, marks=SLOW),
        lambda q, k, v: regard.attend(q, k, v)[1].T @ q,
        pytest.param(lambda q, k, v: regard.attend(q, k, v)[1].received(), marks=SLOW),
    ],
    ids=["mask & tensor", "tensor | mask", "weights @ tensor", "weights.T @ tensor", "received"],
)
def test_operators_between_regards_objects_and_tensors_compile(call: Any) -> None:
    # dynamo treats any operator with a tensor operand as torch's own and breaks the graph
    args = tuple(t[0] for t in qkv())
    close(compiled(call, fullgraph=False)(*args), call(*args))


@pytest.mark.slow
@pytest.mark.parametrize(
    "transform",
    [
        pytest.param(
            lambda q: torch.func.grad(lambda x: regard.attention(x, x, x).square().sum())(q), marks=SLOW
        ),
        pytest.param(lambda q: torch.vmap(lambda x: regard.attention(x, x, x))(q), marks=SLOW),
        pytest.param(
            lambda q: torch.func.jvp(lambda x: regard.attention(x, x, x), (q,), (q,))[1], marks=SLOW
        ),
        lambda q: torch.vmap(torch.func.grad(lambda x: regard.attention(x, x, x).square().sum()))(q),
    ],
    ids=["grad", "vmap", "jvp", "vmap of grad"],
)
def test_transformations_compile(transform: Callable[[Tensor], Tensor]) -> None:
    query = qkv()[0]
    close(compiled(transform)(query), transform(query))


def test_errors_name_themselves_through_a_compiled_function() -> None:
    call = compiled(regard.attention, fullgraph=False)
    with pytest.raises(regard.ShapeError, match="query has 4 features and key has 5"):
        call(draw(3, 4), draw(3, 5), draw(3, 5))


LENGTHS = [(6, 8), (7, 9), (17, 8), (33, 40)]


def check_dynamic(call: Callable[..., Tensor], extra: Any = lambda q, k: ()) -> None:
    """Check that changing lengths cause no recompilation after the first call."""
    import torch._dynamo.testing

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    function = compiled(call, counter, dynamic=True)
    first = None
    for queries, keys in LENGTHS:
        inputs = (draw(2, 3, queries, D), draw(2, 3, keys, D), draw(2, 3, keys, 4))
        more = extra(queries, keys)
        inputs = tuple(t.requires_grad_() for t in inputs)
        close(
            gradients(lambda *a, m=more: function(*a, *m), inputs),
            gradients(lambda *a, m=more: call(*a, *m), inputs),
        )
        first = first or counter.frame_count  # dynamo may restart within the first call
    assert counter.frame_count == first


@SLOW
def test_recompilation_is_detected() -> None:
    with pytest.raises(AssertionError):
        check_dynamic(lambda q, k, v: regard.attention(q, k, v) * (2 if q.shape[-2] > k.shape[-2] else 1))


NONE = lambda q, k: ()  # noqa: E731
DYNAMIC: dict[str, tuple[Callable[..., Tensor], Callable[[int, int], tuple[Tensor, ...]]]] = {
    "Causal, ALiBi": (attention(mask=regard.Causal(), bias=regard.ALiBi(3)), NONE),
    "plain": (attention(), NONE),
    "Padding": (
        lambda q, k, v, n: regard.attention(q, k, v, mask=regard.Padding(n)),
        lambda q, k: (torch.tensor([k, k - 2]),),
    ),
    "Window": (attention(mask=regard.Window(3)), NONE),
    "either": (attention(mask=regard.Prefix(3) | regard.Window(2)), NONE),
    "Entmax": (attention(normalize=regard.Entmax(1.5)), NONE),
    "Sigmoid": (attention(normalize=regard.Sigmoid()), NONE),
    "own": (attention(normalize=OwnSoftmax()), NONE),
    "Cosine": (attention(score=regard.Cosine()), NONE),
    "Gaussian": (attention(score=regard.Gaussian()), NONE),
    "Documents": (
        lambda q, k, v, m, n: regard.attention(q, k, v, mask=regard.Documents(m, n)),
        lambda q, k: (torch.tensor([q - 2, 2]), torch.tensor([k - 3, 3])),
    ),
    "tensor": (lambda q, k, v, m: regard.attention(q, k, v, mask=m), lambda q, k: (torch.rand(q, k) > 0.3,)),
    "bias": (lambda q, k, v, b: regard.attention(q, k, v, bias=b), lambda q, k: (draw(q, k),)),
    "sdpa": (lambda q, k, v: regard.scaled_dot_product_attention(q, k, v, is_causal=True), NONE),
}


@pytest.mark.parametrize("name", ["Causal, ALiBi", *(pytest.param(n, marks=SLOW) for n in [*DYNAMIC][1:])])
def test_changing_lengths_do_not_compile_again(name: str) -> None:
    check_dynamic(*DYNAMIC[name])


NEEDS_A_COMPILER = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "c++")) is None, reason="inductor needs a C++ compiler"
)


@SLOW
@NEEDS_A_COMPILER
@pytest.mark.parametrize("name", [name for name in CASES if name in DISTINCT and "dropout" not in name])
def test_inductor(name: str) -> None:
    case = CASES[name]()
    for dtype in (torch.float32, torch.float64) if name == "everything" else (torch.float64,):
        inputs = tuple(t.detach().to(dtype).requires_grad_() for t in case.inputs)
        tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {}
        actual, expected = gradients(compiled(case.call, "inductor"), inputs), gradients(case.call, inputs)
        close(actual, expected, **tolerance)


@SLOW
@NEEDS_A_COMPILER
def test_inductor_trains_the_same() -> None:
    losses = []
    for through in (lambda m: m, lambda m: compiled(m, "inductor")):
        torch.manual_seed(8)
        module = Attention(score=regard.Additive(D, D, 6), normalize=regard.Sink(H), mask=regard.Causal())
        function, args = through(module), tuple(t.float() for t in qkv())
        optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
        for _ in range(5):
            optimizer.zero_grad()
            loss = function(*args).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.detach())
    close(*losses)


# The custom operators, and torch.export


def operator_arguments(case: Case) -> tuple[Any, ...]:
    """Return the arguments that a compiled graph passes to regard::attention."""
    caught: list[Any] = []

    class Catch(torch.fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if str(target).startswith("regard.attention"):
                caught.append((*args, *kwargs.values()))
            return super().call_function(target, args, kwargs)

    compiled(case.call, lambda graph, _: Catch(graph).run)(*case.inputs)
    ((tensors, rules, wanted),) = caught
    leaves = [t.detach().clone().requires_grad_(want) for t, want in zip(tensors, wanted, strict=True)]
    return leaves, rules, wanted


OPERATORS = [
    pytest.param(name, dtype, inside, marks=() if i in (3, 4) else SLOW)
    for i, (name, dtype, inside) in enumerate(
        (name, dtype, inside)
        for name in ("Additive", "everything", "Sparsemax", "Gaussian", "either", "Documents, causal")
        for dtype in (torch.float32, torch.float64)
        for inside in (True, False)
    )
]


def opcheck_both(tensors: list[Tensor], rules: str, wanted: Any) -> None:
    """Check the forward operator with these tensors, and the backward operator of its result."""
    forward, backward = torch.ops.regard.attention.default, torch.ops.regard.attention_backward.default
    still = [t.detach() for t in tensors]  # not copied: strides matter
    output, tau = forward(still, rules, wanted)
    of_backward = (still, tau, output, torch.randn_like(output), rules, wanted)
    for operator, arguments in ((forward, (tensors, rules, wanted)), (backward, of_backward)):
        assert set(opcheck(operator, arguments).values()) == {"SUCCESS"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "dtype", "inside"), OPERATORS)
def test_opcheck(name: str, dtype: torch.dtype, inside: bool) -> None:
    case = CASES[name]()
    inputs = [t.to(dtype) for t in case.inputs]
    if inside:  # heads inside tokens, as after a projection
        inputs[:3] = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs[:3]]
    case = case._replace(inputs=tuple(t.requires_grad_() for t in inputs))
    tensors, rules, wanted = operator_arguments(case)
    assert rules.startswith("1|") == (dtype is torch.float32 and fused.available())  # run by the kernels
    opcheck_both(tensors, rules, wanted)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, marks=SLOW) for layout in ("transposed", "expanded", "the same tensor thrice")],
)
def test_opcheck_of_strided_tensors(layout: str) -> None:
    (query, key, value), rules, wanted = operator_arguments(make("Dot"))
    tensors = {
        "transposed": [t.detach().mT.contiguous().mT for t in (query, key, value)],
        "expanded": [query.detach(), key.detach()[:1].expand(key.shape), value.detach()],
        "the same tensor thrice": [query.detach()] * 3,
    }[layout]
    opcheck_both(tensors, rules, wanted)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask": regard.Causal(), "bias": regard.ALiBi(H)},
        {"score": regard.Additive(D, D, 6).double(), "normalize": regard.Entmax15()},
        {"normalize": regard.Sink(H).double(), "mask": regard.Documents([1, 2], [3, 1])},
        {"normalize": OwnSoftmax()},
    ],
    ids=["plain", "ALiBi", "Additive", "Sink", "own"],
)
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=SLOW)])
def test_export(options: dict[str, Any], strict: bool) -> None:
    module, args = Attention(**options), qkv()
    exported = torch.export.export(module, args, strict=strict)
    others = qkv()
    close(exported.module()(*others), module(*others))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning")  # from torch.export.save
def test_exported_programs_take_other_lengths_and_can_be_saved() -> None:
    module = Attention(mask=regard.Causal(), bias=regard.ALiBi(H))
    q, k = torch.export.Dim("q", min=2, max=99), torch.export.Dim("k", min=2, max=99)
    exported = torch.export.export(module, qkv(), dynamic_shapes=({2: q}, {2: k}, {2: k}))
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    longer = draw(B, H, 11, D), draw(B, H, 13, D), draw(B, H, 13, E)
    for program in (exported, torch.export.load(file), exported.run_decompositions()):
        close(program.module()(*longer), module(*longer))


@pytest.mark.parametrize("asked", [False, True])
def test_exported_programs_have_gradients(asked: bool) -> None:
    """The exported program does not depend on whether the example inputs require gradients."""
    example = tuple(t.requires_grad_(asked) for t in qkv())
    module = Attention(mask=regard.Causal())
    program = torch.export.export(module, example).module()
    inputs = tuple(t.requires_grad_() for t in qkv())
    close(gradients(program, inputs), gradients(module, inputs))
