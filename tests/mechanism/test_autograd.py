"""Derivatives of every order and kind, and everything else torch does to a function: batching, autocast,
fake tensors, compiling, exporting, copying, checkpointing.

One table of cases serves almost all of it. The laws are of the form "done by torch's transformation equals
done by hand": vmap is a loop, forward mode is the numerical derivative, a compiled call is the eager one.
"""

import copy
import io
import math
import os
import pickle
import shutil
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.gradcheck import GradcheckError
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import regard
from regard.mechanism import fused
from tests.cases import looped
from tests.recorder import Largest

# torch loads forward-mode rules and inductor through torch.jit, which warns
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

SLOW = pytest.mark.slow  # one of many that take a second or more each: they compile

B, H, Q, K, D, E = 2, 2, 3, 4, 5, 7
close = torch.testing.assert_close


class Case(NamedTuple):
    """Differentiable inputs, and the call that takes them."""

    inputs: tuple[Tensor, ...]
    call: Callable[..., Tensor]


class OwnSoftmax(regard.Normalizer):
    """A custom normalizer equal to softmax."""

    def tau(self, scores: Tensor) -> Tensor:
        return torch.logsumexp(scores, -1, keepdim=True)

    def phi(self, x: Tensor) -> Tensor:
        return x.exp()

    def slope(self, x: Tensor) -> Tensor:
        return x.exp()


class OwnCubes(regard.Normalizer):
    """A custom normalizer whose rows do not sum to one."""

    sums_to_one = False

    def tau(self, scores: Tensor) -> Tensor:
        return torch.zeros_like(scores[..., :1])

    def phi(self, x: Tensor) -> Tensor:
        return x**3

    def slope(self, x: Tensor) -> Tensor:
        return 3 * x**2


class OwnWithANumber(OwnCubes):
    """A custom normalizer that holds a tensor but is not a module."""

    def __init__(self, number: Tensor) -> None:
        self.number = number

    def phi(self, x: Tensor) -> Tensor:
        return self.number * x

    def slope(self, x: Tensor) -> Tensor:
        return self.number * torch.ones_like(x)


class OwnLearned(nn.Module, regard.Normalizer):
    """A custom normalizer with a parameter."""

    sums_to_one = False

    def __init__(self) -> None:
        super().__init__()
        self.power = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def tau(self, scores: Tensor) -> Tensor:
        return torch.zeros_like(scores[..., :1])

    def phi(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x * self.power)

    def slope(self, x: Tensor) -> Tensor:
        phi = self.phi(x)
        return self.power * phi * (1 - phi)


class Attention(nn.Module):
    """A module around one call, for torch.func.functional_call."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.parts = nn.ModuleList(part for part in options.values() if isinstance(part, nn.Module))
        self.options = options

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return regard.attention(query, key, value, **self.options)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def qkv(*lead: int, heads: int = H) -> tuple[Tensor, Tensor, Tensor]:
    lead = lead or (B,)
    return draw(*lead, heads, Q, D), draw(*lead, H, K, D), draw(*lead, H, K, E)


def plain(**options: Any) -> Callable[[], Case]:
    """A case whose only inputs are query, key and value."""
    return lambda: Case(qkv(), lambda q, k, v: regard.attention(q, k, v, **options))


def learned(name: str, build: Callable[[], nn.Module], heads: int = H, **options: Any) -> Callable[[], Case]:
    """A case whose inputs include the parameters of a module, passed as this option."""

    def make() -> Case:
        module = Attention(**{name: build().double()}, **options)
        names = [name for name, _ in module.named_parameters()]

        def call(q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor) -> Tensor:
            replaced = dict(zip(names, parameters, strict=True))
            return torch.func.functional_call(module, replaced, (q, k, v))

        return Case((*qkv(heads=heads), *(p.detach() for p in module.parameters())), call)

    return make


def dropped(**options: Any) -> Callable[[], Case]:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(5)
        return regard.attention(q, k, v, dropout=0.4, **options)

    return lambda: Case(qkv(), call)


def everything(q: Tensor, k: Tensor, v: Tensor, dense: Tensor, line: Tensor, sink: Tensor) -> Tensor:
    return regard.attention(
        q,
        k,
        v,
        score=regard.ScaledDot(0.8, softcap=3.0),
        mask=(regard.Causal() & regard.Padding([K, 2])) | regard.Prefix(1),
        bias=[dense, regard.ClippedRelativeBias(line), regard.ALiBi(2 * H)],
        normalize=regard.Softmax1(sink),
    )


SOME_KEYS = torch.tensor([[True, False, True, True], [False, True, True, False], [True, True, False, True]])

CASES: dict[str, Callable[[], Case]] = {
    # scores
    "Dot": plain(score=regard.Dot()),
    "ScaledDot": plain(),
    "ScaledDot, softcap": plain(score=regard.ScaledDot(1.3, softcap=2.0), mask=regard.Causal()),
    "Cosine": plain(score=regard.Cosine(3.0), mask=regard.Causal()),
    "Gaussian": plain(score=regard.Gaussian(1.7), mask=regard.Causal()),
    "General": learned("score", lambda: regard.General(D, D), mask=regard.Causal()),
    "Additive": learned("score", lambda: regard.Additive(D, D, 6), mask=regard.Causal()),
    "Concat": learned("score", lambda: regard.Concat(D, D, 6)),
    "Concat of width 1": learned("score", lambda: regard.Concat(D, D), mask=regard.Causal()),
    "a function": plain(score=lambda q, k: (q @ k.mT).sin(), mask=regard.Causal()),
    # normalizers
    "Softmax(0.5)": plain(normalize=regard.Softmax(0.5), mask=regard.Causal()),
    "Softmax1": plain(normalize=regard.Softmax1(0.3), mask=regard.Causal()),
    "Sink": learned("normalize", lambda: regard.Sink(H, 0.2), mask=regard.Causal()),
    "a sink for all heads": lambda: Case(
        (*qkv(), draw(1)), lambda q, k, v, s: regard.attention(q, k, v, normalize=regard.Softmax1(s))
    ),
    "Sparsemax": plain(normalize=regard.Sparsemax(), mask=regard.Causal()),
    "Entmax15": plain(normalize=regard.Entmax15(), mask=regard.Causal()),
    "Entmax(1.3)": plain(normalize=regard.Entmax(1.3)),
    "Entmax(3)": plain(normalize=regard.Entmax(3.0)),
    "Mean": plain(normalize=regard.Mean(), mask=regard.Causal()),
    "Relu": plain(normalize=regard.Relu(), mask=regard.Causal()),
    "Sigmoid": plain(normalize=regard.Sigmoid(), mask=regard.Causal()),
    "Sigmoid(-1)": plain(normalize=regard.Sigmoid(-1.0)),
    "Hard": plain(normalize=regard.Hard(), mask=regard.Causal()),
    "own softmax": plain(normalize=OwnSoftmax(), mask=regard.Causal()),
    "own cubes": plain(normalize=OwnCubes(), mask=regard.Causal()),
    "own, learned": learned("normalize", OwnLearned, mask=regard.Causal()),
    # masks
    "Window": plain(mask=regard.Window(2)),
    "Window on both sides": plain(mask=regard.Window(left=1, right=1), normalize=regard.Sparsemax()),
    "Padding": plain(mask=regard.Padding([3, 1])),
    "Padding at the left": plain(mask=regard.Padding([3, 1], side="left")),
    "Documents": plain(mask=regard.Documents([2, 1], [1, 3])),
    "Documents, causal": plain(mask=regard.Documents([2, 1], [2, 2], within=regard.Causal())),
    "Prefix": plain(mask=regard.Prefix(2)),
    "top-left": plain(mask=regard.Causal(align="start")),
    "a tensor for a mask": plain(mask=SOME_KEYS),
    "both": plain(mask=regard.Causal() & SOME_KEYS & regard.Padding([4, 3])),
    "either": plain(mask=regard.Causal(align="start") | regard.Padding([1, 2])),
    "no visible keys": plain(mask=regard.Padding([0, 4])),
    # biases
    "dense bias": lambda: Case(
        (*qkv(), draw(H, Q, K)), lambda q, k, v, b: regard.attention(q, k, v, bias=b, mask=regard.Causal())
    ),
    "bias per key": lambda: Case(
        (*qkv(), draw(K)), lambda q, k, v, b: regard.attention(q, k, v, bias=b, normalize=regard.Sigmoid())
    ),
    "relative bias": lambda: Case(
        (*qkv(), draw(H, 5)),
        lambda q, k, v, b: regard.attention(
            q, k, v, bias=regard.ClippedRelativeBias(b), mask=regard.Causal()
        ),
    ),
    "ALiBi": plain(bias=regard.ALiBi(H)),
    "T5Bias": learned("bias", lambda: regard.T5Bias(H, buckets=4, max_distance=3), mask=regard.Causal()),
    # dropout
    "dropout": dropped(),
    "dropout, Entmax15, causal": dropped(normalize=regard.Entmax15(), mask=regard.Causal()),
    # shapes
    "shared heads": lambda: Case(
        qkv(heads=2 * H), lambda q, k, v: regard.attention(q, k, v, mask=regard.Causal())
    ),
    "shared heads, Additive": learned("score", lambda: regard.Additive(D, D, 6), heads=2 * H),
    "no batch, no heads": lambda: Case(
        tuple(t[0, 0] for t in qkv()), lambda q, k, v: regard.attention(q, k, v, mask=regard.Causal())
    ),
    "broadcast batch": lambda: Case(
        (draw(3, 1, H, Q, D), draw(B, H, K, D), draw(1, H, K, E)),
        lambda q, k, v: regard.attention(q, k, v, mask=regard.Causal()),
    ),
    "everything": lambda: Case(
        (*qkv(heads=2 * H), draw(2 * H, Q, K), draw(2 * H, 5), draw(2 * H)), everything
    ),
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(30)


def make(name: str) -> Case:
    """A case whose inputs require gradients."""
    case = CASES[name]()
    return case._replace(inputs=tuple(t.requires_grad_() for t in case.inputs))


def detached(case: Case) -> Case:
    return case._replace(inputs=tuple(t.detach() for t in case.inputs))


def cotangent(output: Tensor) -> Tensor:
    """A fixed direction in which gradients are compared."""
    numbers = torch.arange(output.numel(), dtype=output.dtype, device=output.device)
    return numbers.remainder(7).sub(2.5).reshape(output.shape)


def gradients(call: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The output, and the gradient of every input; zeros for None."""
    output = call(*inputs)
    grads = torch.autograd.grad(output, inputs, cotangent(output), allow_unused=True)
    return [output, *(torch.zeros_like(t) if g is None else g for g, t in zip(grads, inputs, strict=True))]


# Forward mode and higher derivatives


# One of each formula, of each way to hide keys and of each bias; the others differ in numbers only.
DISTINCT = {
    *("ScaledDot, softcap", "Gaussian", "Cosine", "Additive", "Concat", "a function", "Sink", "Sparsemax"),
    *("Entmax(1.3)", "Relu", "Sigmoid", "own, learned", "Documents, causal", "either", "no visible keys"),
    *(
        "relative bias",
        "T5Bias",
        "dropout, Entmax15, causal",
        "shared heads",
        "broadcast batch",
        "everything",
    ),
}


def distinct(names: Iterable[str], step: int = 1) -> list[Any]:
    """Parameters of a test; those of cases that are much like another are slow."""
    quick = [name for name in CASES if name in DISTINCT][::-step]
    return [pytest.param(name, marks=() if name in quick else SLOW) for name in names]


@pytest.mark.parametrize("name", distinct(CASES))
@pytest.mark.sampled(3)
def test_first_derivatives_of_both_modes_are_the_numerical_ones(name: str) -> None:
    case = make(name)
    assert gradcheck(case.call, case.inputs, fast_mode=True, check_forward_ad=True)


@pytest.mark.parametrize("name", distinct(CASES, step=2))
@pytest.mark.sampled(3)
def test_second_derivatives_of_both_modes_are_the_numerical_ones(name: str) -> None:
    case = make(name)
    # torch's checker of forward over reverse fails if a gradient does not depend on its inputs
    assert gradgradcheck(case.call, case.inputs, fast_mode=True, check_fwd_over_rev=name != "Hard")


def test_gradcheck_can_fail() -> None:
    class Wrong(OwnCubes):
        def slope(self, x: Tensor) -> Tensor:
            return 2 * x**2

    inputs = tuple(t.requires_grad_() for t in qkv())
    with pytest.raises(GradcheckError):
        gradcheck(lambda *a: regard.attention(*a, normalize=Wrong()), inputs, fast_mode=True)


@pytest.mark.parametrize("implementation", ["reference", "tiled"])
def test_dual_numbers(implementation: str) -> None:
    query, key, value = qkv()
    direction = torch.randn_like(query)
    step = 1e-6

    def call(q: Tensor) -> Tensor:
        return regard.attention(q, key, value, mask=regard.Causal(), implementation=implementation)

    with fwAD.dual_level():
        output, tangent = fwAD.unpack_dual(call(fwAD.make_dual(query, direction)))
    close(output, call(query))
    assert tangent is not None
    numerical = (call(query + step * direction) - call(query - step * direction)) / (2 * step)
    close(tangent, numerical, rtol=1e-6, atol=1e-8)


def test_a_query_without_tangent_has_none() -> None:
    query, key, value = qkv()
    with fwAD.dual_level():
        dual = fwAD.make_dual(value, torch.ones_like(value))
        tangent = fwAD.unpack_dual(regard.attention(query, key, dual)).tangent
        assert fwAD.unpack_dual(regard.attention(query, key, value)).tangent is None
    close(tangent, torch.ones_like(tangent))  # rows sum to one


@pytest.mark.parametrize("name", ["ScaledDot", "Entmax15", "Sigmoid", "Additive", "shared heads"])
@pytest.mark.sampled(2)
def test_jacobians_agree(name: str) -> None:
    case = detached(make(name))
    for place in range(len(case.inputs)):
        backward = torch.func.jacrev(case.call, place)(*case.inputs)
        close(torch.func.jacfwd(case.call, place)(*case.inputs), backward)

        def alone(x: Tensor, place: int = place) -> Tensor:
            return case.call(*case.inputs[:place], x, *case.inputs[place + 1 :])

        close(torch.autograd.functional.jacobian(alone, case.inputs[place]), backward)


@pytest.mark.parametrize(
    "name",
    [
        *("ScaledDot", "Entmax(1.3)", "Gaussian"),
        *(pytest.param(name, marks=SLOW) for name in ("Softmax1", "Sparsemax", "Sigmoid")),
    ],
)
def test_hessians_agree(name: str) -> None:
    case = detached(make(name))
    query = case.inputs[0]

    def loss(q: Tensor) -> Tensor:
        return case.call(q, *case.inputs[1:]).square().sum()

    expected = torch.autograd.functional.hessian(loss, query)
    close(torch.func.hessian(loss)(query), expected)
    close(torch.func.jacrev(torch.func.jacrev(loss))(query), expected)
    close(torch.func.jacfwd(torch.func.jacfwd(loss))(query), expected)


@pytest.mark.parametrize(
    "normalize",
    [regard.Softmax(), regard.Softmax1(), regard.Sparsemax(), regard.Entmax15(), regard.Sigmoid()],
)
@pytest.mark.sampled(3)
def test_third_derivatives(normalize: regard.Normalizer) -> None:
    x, keys = draw(1, 3), draw(4, 3)

    def loss(x: Tensor) -> Tensor:
        return regard.attention(x, keys, keys, normalize=normalize).pow(3).sum()

    rev, fwd = torch.func.jacrev, torch.func.jacfwd
    expected = rev(rev(rev(loss)))(x)
    close(fwd(fwd(fwd(loss)))(x), expected)
    close(fwd(rev(fwd(loss)))(x), expected)
    if normalize == regard.Softmax():

        def by_hand(x: Tensor) -> Tensor:
            return (torch.softmax(x @ keys.T / math.sqrt(3), -1) @ keys).pow(3).sum()

        close(expected, rev(rev(rev(by_hand)))(x))


@pytest.mark.parametrize("name", ["ScaledDot", "Entmax15", "relative bias", "Additive", "everything"])
def test_many_cotangents_at_once(name: str) -> None:
    """torch.autograd.grad(..., is_grads_batched=True), as used by vectorized Jacobians."""
    case = make(name)
    output = case.call(*case.inputs)
    directions = torch.stack([cotangent(output), torch.ones_like(output), torch.zeros_like(output)])
    actual = torch.autograd.grad(output, case.inputs, directions, is_grads_batched=True, retain_graph=True)
    for number, direction in enumerate(directions):
        expected = torch.autograd.grad(output, case.inputs, direction, retain_graph=True)
        close([g[number] for g in actual], list(expected))


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch's own, of its constants
@pytest.mark.parametrize("name", [pytest.param("ScaledDot", marks=SLOW), "everything"])
def test_linearize(name: str) -> None:
    """torch.func.linearize traces the forward-mode derivative once, to be applied to many tangents."""
    case = detached(make(name))
    output, derivative = torch.func.linearize(case.call, *case.inputs)
    close(output, case.call(*case.inputs))
    for _ in range(2):
        tangents = tuple(torch.randn_like(t) for t in case.inputs)
        close(derivative(*tangents), torch.func.jvp(case.call, case.inputs, tangents)[1])


TRACES = [("ScaledDot", "fake"), ("Padding", "real")]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=SLOW)])
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=() if (name, mode) in TRACES else SLOW)
        for name in ("ScaledDot", "Padding", "Entmax15")
        for mode in ("real", "fake", "symbolic")
    ],
)
def test_traces_are_good_for_other_values(name: str, mode: str, dtype: torch.dtype) -> None:
    case = detached(make(name))
    query, *others = (t.to(dtype) for t in case.inputs)

    def gradient(query: Tensor) -> Tensor:
        query = query.detach().requires_grad_()
        return torch.autograd.grad(case.call(query, *others).square().sum(), query)[0]

    for function in (lambda q: case.call(q, *others), gradient):
        trace = make_fx(function, tracing_mode=mode, _allow_non_fake_inputs=True)(query)
        for other in (query, 1 - 2 * query):
            close(trace(other), function(other))


def test_gradient_of_a_gradient_of_some_inputs() -> None:
    case = make("ScaledDot")
    (first,) = torch.autograd.grad(case.call(*case.inputs).square().sum(), case.inputs[:1], create_graph=True)
    second = torch.autograd.grad(first.square().sum(), case.inputs[1:], create_graph=True)
    third = torch.autograd.grad(sum(g.square().sum() for g in second), case.inputs)
    assert all(g.isfinite().all() for g in third)


# Lazy weights under forward mode and vmap

READERS: dict[str, Callable[[regard.Weights], Tensor]] = {
    "dense": lambda w: w.dense(),
    "row": lambda w: w[0, 1],
    "entropy": lambda w: w.entropy(),
    "received": lambda w: w.received(),
    "top": lambda w: w.topk(2).values,
    "pool": lambda w: w.pool(2, 2),
    "mean": lambda w: w.mean("heads").dense(),
    "product": lambda w: w @ torch.ones(K, 2, dtype=torch.float64).cumsum(0),
    "transposed product": lambda w: w.T @ torch.ones(Q, 2, dtype=torch.float64).cumsum(0),
    "scores": lambda w: w.scores(),
}


@pytest.mark.parametrize("normalize", [regard.Softmax(), regard.Sparsemax(), regard.Sigmoid()], ids=repr)
@pytest.mark.parametrize("read", READERS)
@pytest.mark.sampled(4)
def test_forward_mode_through_lazy_weights(read: str, normalize: regard.Normalizer) -> None:
    if read == "entropy" and normalize == regard.Sparsemax():
        pytest.skip("the entropy has an infinite slope where a weight is 0")
    query, key, value = (t[0] for t in qkv())
    direction = torch.randn_like(query)

    def call(q: Tensor) -> Tensor:
        return READERS[read](regard.attend(q, key, value, normalize=normalize)[1])

    step = 1e-6
    numerical = (call(query + step * direction) - call(query - step * direction)) / (2 * step)
    query.requires_grad_()
    backward = torch.autograd.functional.jvp(call, query, direction)[1]  # by two backward passes
    close(backward, numerical, rtol=1e-5, atol=1e-7)
    close(torch.func.jvp(call, (query.detach(),), (direction,))[1], numerical, rtol=1e-5, atol=1e-7)


@looped("read", [name for name in READERS if name != "scores"])
def test_vmap_through_lazy_weights(read: str) -> None:
    query, key, value = (t[0] for t in qkv())
    several = torch.stack([query, query + 1, 2 * query])

    def call(q: Tensor) -> Tensor:
        return READERS[read](regard.attend(q, key, value, mask=regard.Causal())[1])

    close(torch.vmap(call)(several), torch.stack([call(q) for q in several]))


# vmap


def loop(call: Callable[..., Tensor], in_dims: tuple[int | None, ...], *args: Tensor) -> Tensor:
    """The definition of vmap."""
    (size,) = {arg.shape[at] for arg, at in zip(args, in_dims, strict=True) if at is not None}
    return torch.stack(
        [
            call(*(a if at is None else a.select(at, i) for a, at in zip(args, in_dims, strict=True)))
            for i in range(size)
        ]
    )


EACH_INPUT = [(name, place) for name in CASES for place in range(len(CASES[name]().inputs))]


@looped(("name", "place"), EACH_INPUT)
def test_vmap_over_one_input_equals_a_loop(name: str, place: int) -> None:
    case = detached(make(name))
    args = list(case.inputs)
    args[place] = torch.stack([args[place], 0.5 * args[place] + 0.1, -args[place]])
    in_dims = tuple(0 if i == place else None for i in range(len(args)))
    actual = torch.vmap(case.call, in_dims, randomness="same")(*args)
    close(actual, loop(case.call, in_dims, *args))


@pytest.mark.parametrize(
    ("name", "place"),
    [pytest.param(*pair, marks=() if pair[0] in DISTINCT else SLOW) for pair in EACH_INPUT],
)
@pytest.mark.sampled(3)
def test_gradients_of_each_sample(name: str, place: int) -> None:
    """vmap(grad): one input is per sample, and every sample has its own gradients."""
    case = detached(make(name))
    args = list(case.inputs)
    args[place] = torch.stack([args[place], 0.5 * args[place] + 0.1])
    in_dims = tuple(0 if i == place else None for i in range(len(args)))

    def loss(*args: Tensor) -> Tensor:
        return case.call(*args).square().sum()

    every = tuple(range(len(args)))
    actual = torch.vmap(torch.func.grad(loss, every), in_dims, randomness="same")(*args)
    for number in range(2):
        one = [a[number] if i == place else a for i, a in enumerate(args)]
        leaves = [a.clone().requires_grad_() for a in one]
        expected = torch.autograd.grad(loss(*leaves), leaves, allow_unused=True, materialize_grads=True)
        close([g[number] for g in actual], list(expected))


@looped("in_dims", [(0, 0, 0), (1, 2, 3), (-1, 0, 1), (2, None, 0), (None, -2, None), (4, 4, 4)], ids=str)
def test_vmap_along_any_axis(in_dims: tuple[int | None, ...]) -> None:
    args = [
        t if at is None else torch.stack([t, t + 1, 2 * t], at) for t, at in zip(qkv(), in_dims, strict=True)
    ]

    def call(*args: Tensor) -> Tensor:
        return regard.attention(*args, mask=regard.Causal(), normalize=regard.Entmax15())

    close(torch.vmap(call, in_dims)(*args), loop(call, in_dims, *args))
    close(torch.vmap(call, in_dims, out_dims=-1)(*args), loop(call, in_dims, *args).movedim(0, -1))
    close(torch.vmap(call, in_dims, chunk_size=2)(*args), loop(call, in_dims, *args))


def test_vmap_inside_vmap() -> None:
    query, key, value = draw(3, 2, H, Q, D), draw(2, H, K, D), draw(H, K, E)

    def inner(q: Tensor, k: Tensor) -> Tensor:
        return regard.attention(q, k, value, mask=regard.Window(2))

    aligned = torch.vmap(torch.vmap(inner), (0, None))(query, key)
    close(aligned, regard.attention(query, key, value, mask=regard.Window(2)))
    crossed = torch.vmap(lambda q: torch.vmap(lambda k: inner(q, k))(key))(query[:, 0])
    close(crossed, torch.stack([torch.stack([inner(q, k) for k in key]) for q in query[:, 0]]))


@looped(
    ("build", "several"),
    [
        (lambda m: m, torch.stack([SOME_KEYS, ~SOME_KEYS])),
        (regard.Padding, torch.tensor([[1, 4], [0, 2]])),
        (lambda m: regard.Padding(m, side="left"), torch.tensor([[1, 4], [0, 2]])),
        (lambda m: regard.Documents([1, 2], m), torch.tensor([[1, 3], [4, 0]])),
        (lambda m: regard.Documents([1, 2], m, within=regard.Causal()), torch.tensor([[1, 3], [2, 2]])),
        (lambda m: regard.Causal() & m, torch.stack([SOME_KEYS, ~SOME_KEYS])),
    ],
    ids=["tensor", "Padding", "Padding at the left", "Documents", "Documents, causal", "both"],
)
def test_vmap_over_masks(build: Callable[[Tensor], Any], several: Tensor) -> None:
    query, key, value = qkv()

    def call(mask: Tensor) -> Tensor:
        return regard.attention(query, key, value, mask=build(mask))

    close(torch.vmap(call)(several), torch.stack([call(mask) for mask in several]))


def test_gradients_through_vmap() -> None:
    case = make("everything")
    args = (torch.stack([case.inputs[0], case.inputs[0] + 1]).detach().requires_grad_(), *case.inputs[1:])
    in_dims = (0, *[None] * (len(args) - 1))
    mapped = gradients(lambda *a: torch.vmap(case.call, in_dims)(*a), args)
    close(mapped, gradients(lambda *a: loop(case.call, in_dims, *a), args))


def test_vmap_with_the_same_dropout_equals_a_loop_with_one_seed() -> None:
    query, key, value = qkv()
    several = torch.stack([query, query + 1, query - 1])

    def call(q: Tensor) -> Tensor:
        return regard.attention(q, key, value, dropout=0.5)

    torch.manual_seed(1)
    actual = torch.vmap(call, randomness="same")(several)
    for output, q in zip(actual, several, strict=True):
        torch.manual_seed(1)
        close(output, call(q))


@pytest.mark.parametrize("place", range(3))
def test_vmap_with_different_dropout(place: int) -> None:
    args = list(qkv())
    in_dims = tuple(0 if i == place else None for i in range(3))
    args[place] = args[place].expand(4, *args[place].shape)

    def call(*args: Tensor) -> Tensor:
        return regard.attention(*args, dropout=0.5)

    actual = torch.vmap(call, in_dims, randomness="different")(*args)
    assert len({tuple(output.flatten().tolist()) for output in actual}) == 4
    grads = torch.vmap(torch.func.grad(lambda *a: call(*a).sum(), place), in_dims, randomness="different")(
        *args
    )
    assert len({tuple(grad.flatten().tolist()) for grad in grads}) == 4


def test_vmap_rejects_dropout_without_a_randomness_mode() -> None:
    query, key, value = qkv()
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(lambda q: regard.attention(q, key, value, dropout=0.5))(query[None])


def test_an_ensemble_of_modules() -> None:
    """torch.func.stack_module_state: several modules' parameters, one call."""
    for name, build in {
        "score": lambda: regard.Additive(D, D, 6),
        "bias": lambda: regard.T5Bias(H, 8, 5),
        "normalize": lambda: regard.Sink(H, 0.3),
    }.items():
        modules = [Attention(**{name: build().double()}) for _ in range(3)]
        for module in modules:
            for parameter in module.parameters():
                nn.init.normal_(parameter)
        state = torch.func.stack_module_state(modules)
        args = qkv()

        def call(parameters: Any, buffers: Any, module: nn.Module = modules[0], args: Any = args) -> Tensor:
            return torch.func.functional_call(module, (parameters, buffers), args)

        close(torch.vmap(call)(*state), torch.stack([module(*args) for module in modules]))


# Gradients only where needed, and no duplicate saved tensors


@looped("place", range(6))
def test_only_inputs_that_require_grad_get_gradients(place: int) -> None:
    case = CASES["everything"]()
    inputs = tuple(t.detach().clone().requires_grad_(i == place) for i, t in enumerate(case.inputs))
    output = case.call(*inputs)
    output.backward(cotangent(output))
    assert [t.grad is not None for t in inputs] == [i == place for i in range(6)]
    everything_else = gradients(case.call, tuple(t.detach().clone().requires_grad_() for t in inputs))
    close(inputs[place].grad, everything_else[1 + place])


def test_no_graph_where_none_is_wanted() -> None:
    case = make("ScaledDot")
    with torch.no_grad():
        assert not case.call(*case.inputs).requires_grad
    with torch.inference_mode():
        output = case.call(*case.inputs)
        assert output.is_inference()
    close(output.clone(), case.call(*case.inputs).detach())
    assert not case.call(*detached(case).inputs).requires_grad


def test_inference_tensors_are_valid_inputs() -> None:
    args = qkv()
    with torch.inference_mode():
        kept = [t.clone() for t in args]
    close(regard.attention(*kept, mask=regard.Causal()), regard.attention(*args, mask=regard.Causal()))
    weights = regard.attend(*kept)[1]
    close(weights.dense().sum(-1), torch.ones(B, H, Q, dtype=torch.float64))


def test_the_graph_is_used_once_unless_retained() -> None:
    case = make("ScaledDot")
    output = case.call(*case.inputs).sum()
    output.backward(retain_graph=True)
    output.backward()
    with pytest.raises(RuntimeError, match="second time"):
        output.backward()
    once = torch.autograd.grad(case.call(*case.inputs).sum(), case.inputs)
    close([t.grad for t in case.inputs], [2 * g for g in once])


@pytest.mark.parametrize("place", [1, 2])
def test_inputs_modified_before_backward_are_detected(place: int) -> None:
    case = make("ScaledDot")
    inputs = [t.clone() for t in case.inputs]
    output = case.call(*inputs)
    inputs[place].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


class Saved:
    """The storages that autograd saves for backward."""

    def __init__(self, call: Callable[[], Tensor]) -> None:
        self.sizes: dict[int, int] = {}
        with saved_tensors_hooks(self._note, lambda tensor: tensor):
            self.output = call()

    def _note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self.sizes[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        return tensor


@looped(
    "options",
    [
        {},
        {"mask": regard.Causal()},
        {"mask": regard.Padding([200, 100]) | regard.Window(9)},
        {"score": regard.Gaussian()},
        {"score": regard.ScaledDot(softcap=3.0)},
        {"normalize": regard.Entmax15()},
        {"normalize": OwnSoftmax()},
        {"bias": regard.ALiBi(H)},
        {"bias": regard.T5Bias(H)},
        {"dropout": 0.3},
        {"normalize": regard.Sink(H)},
    ],
    ids=lambda options: ", ".join(f"{k}={v}" for k, v in options.items()).split("\n")[0] or "plain",
)
def test_memory_saved_for_backward_is_linear(options: dict[str, Any]) -> None:
    n, d = 256, 8
    inputs = [torch.randn(B, H, n, d, requires_grad=True) for _ in range(3)]
    saved = Saved(lambda: regard.attention(*inputs, **options))
    kept = sum(saved.sizes.values())
    assert kept <= 5 * inputs[0].numel() + 16 * B * H * n  # the scores would be 32 times an input
    saved.output.sum().backward()


def test_inputs_are_saved_without_copies() -> None:
    inputs = [torch.randn(B, H, 64, 8, requires_grad=True) for _ in range(3)]
    saved = Saved(lambda: regard.attention(*inputs, score=regard.Dot()))
    mine = {t.untyped_storage().data_ptr() for t in inputs}
    assert mine <= set(saved.sizes)
    rows = B * H * 64
    assert sum(size for at, size in saved.sizes.items() if at not in mine) <= rows * (8 + 2)  # output and τ


LONG = 2048


@looped(
    "work",
    [
        lambda x: regard.attention(x, x, x),
        lambda x: regard.attention(x.requires_grad_(), x, x, mask=regard.Causal()).sum().backward(),
        lambda x: regard.scaled_dot_product_attention(x.requires_grad_(), x, x).sum().backward(),
        lambda x: torch.vmap(lambda y: regard.attention(y, x, x))(x[None]),
        lambda x: torch.func.grad(lambda y: regard.attention(y, y, y).sum())(x),
        lambda x: torch.func.vjp(lambda y: regard.attention(y, y, y), x)[1](x),
        lambda x: torch.vmap(torch.func.grad(lambda y: regard.attention(y, x, x).sum()))(x[None]),
        lambda x: regard.attend(x, x, x)[1].entropy(),
    ],
    ids=["forward", "backward", "sdpa", "vmap", "func.grad", "func.vjp", "vmap of grad", "entropy"],
)
def test_no_quadratic_tensor(work: Callable[[Tensor], Any]) -> None:
    x = torch.randn(LONG, 4)
    with Largest() as largest:
        work(x)
    assert LONG < largest.elements < LONG * LONG / 2


def test_a_quadratic_tensor_is_detected() -> None:
    x = torch.randn(LONG, 4)
    with Largest() as largest:
        regard.attention(x, x, x, implementation="reference")
    assert largest.elements >= LONG * LONG


# Learned numbers get a gradient or are rejected, never silently ignored


@looped(
    "build",
    [
        lambda p: {"score": regard.ScaledDot(p)},
        lambda p: {"score": regard.Cosine(p)},
        lambda p: {"score": regard.Gaussian(p)},
        lambda p: {"normalize": regard.Softmax1(p)},
        lambda p: {"score": regard.Dot(softcap=p)},
        lambda p: {"normalize": regard.Softmax(p)},
        lambda p: {"normalize": regard.Sigmoid(p)},
        lambda p: {"normalize": regard.Entmax(p)},
        lambda p: {"normalize": OwnWithANumber(p)},
    ],
    ids=["scale", "Cosine", "sigma", "sink", "softcap", "temperature", "Sigmoid's bias", "alpha", "own"],
)
def test_a_tensor_for_a_number(build: Callable[[Tensor], dict[str, Any]]) -> None:
    number = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    inputs = tuple(t.requires_grad_() for t in qkv())
    try:
        output = regard.attention(*inputs, **build(number))
    except TypeError:
        return
    assert torch.autograd.grad(output.sum(), number, allow_unused=True)[0] is not None
    assert gradcheck(lambda p, *a: regard.attention(*a, **build(p)), (number, *inputs), fast_mode=True)


# Hooks, checkpoints and other autograd features


def test_hooks() -> None:
    case = make("ScaledDot")
    expected = torch.autograd.grad(case.call(*case.inputs).sum(), case.inputs)
    seen = []
    case.inputs[0].register_hook(lambda grad: seen.append(grad))
    output = case.call(*case.inputs)
    output.register_hook(lambda grad: 2 * grad)
    output.sum().backward()
    close([t.grad for t in case.inputs], [2 * g for g in expected])
    close(seen, [2 * expected[0]])


def test_saved_tensors_can_be_moved_away() -> None:
    case = make("everything")
    with torch.autograd.graph.save_on_cpu():
        output = case.call(*case.inputs)
    actual = torch.autograd.grad(output, case.inputs, cotangent(output))
    close([output, *actual], gradients(case.call, case.inputs))


def test_anomaly_mode_accepts_rows_without_keys() -> None:
    case = make("no visible keys")
    with pytest.warns(UserWarning, match="Anomaly Detection"):
        context = torch.autograd.detect_anomaly(check_nan=True)
    with context:
        output = case.call(*case.inputs)
        grads = torch.autograd.grad(output.sum(), case.inputs)
    assert (output[0] == 0).all()
    assert all((g[0] == 0).all() for g in grads)


@looped("reentrant", [False, True])
@looped(
    "options",
    [
        {},
        {"dropout": 0.5},
        {"mask": regard.Causal(), "normalize": regard.Entmax15(), "dropout": 0.3},
        {"implementation": "reference", "dropout": 0.5},
    ],
    ids=str,
)
def test_checkpointing(reentrant: bool, options: dict[str, Any]) -> None:
    inputs = tuple(t.requires_grad_() for t in qkv())

    def call(*args: Tensor) -> Tensor:
        return regard.attention(*args, **options)

    results = []
    for through in (call, lambda *args: checkpoint(call, *args, use_reentrant=reentrant)):
        for tensor in inputs:
            tensor.grad = None
        torch.manual_seed(3)
        output = through(*inputs)
        output.square().sum().backward()
        results.append([output, *(t.grad for t in inputs)])
    close(*results)


def test_deterministic_algorithms() -> None:
    case = make("everything")
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (gradients(case.call, case.inputs) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    close(first, gradients(case.call, case.inputs))


# Autocast

HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64


@looped(
    ("given", "result"),
    [
        ((SINGLE, SINGLE, SINGLE), HALF),
        ((HALF, HALF, HALF), HALF),
        ((torch.float16, SINGLE, HALF), HALF),
        ((SINGLE, HALF, SINGLE), HALF),
        ((DOUBLE, DOUBLE, DOUBLE), DOUBLE),
    ],
    ids=str,
)
def test_autocast(given: tuple[torch.dtype, ...], result: torch.dtype) -> None:
    args = [t.to(dtype).requires_grad_() for t, dtype in zip(qkv(), given, strict=True)]
    with torch.autocast("cpu", dtype=HALF):
        output = regard.attention(*args, mask=regard.Causal())
    assert output.dtype is result
    grads = torch.autograd.grad(output.sum(), args)
    assert tuple(g.dtype for g in grads) == given
    exact = [t.detach().double().requires_grad_() for t in args]
    expected = regard.attention(*exact, mask=regard.Causal())
    close(output.double(), expected, rtol=3e-2, atol=3e-2)
    for actual, true in zip(grads, torch.autograd.grad(expected.sum(), exact), strict=True):
        close(actual.double(), true, rtol=5e-2, atol=5e-2)


def test_mixed_dtypes_are_rejected_outside_autocast() -> None:
    query, key, value = qkv()
    with pytest.raises(regard.DTypeError):
        regard.attention(query.float(), key.bfloat16(), value.float())
    with torch.autocast("cpu", dtype=HALF, enabled=False), pytest.raises(regard.DTypeError):
        regard.attention(query.float(), key.bfloat16(), value.float())


@looped("name", ["General", "Additive", "Concat", "Sink", "T5Bias", "relative bias", "dense bias"])
def test_autocast_keeps_the_dtype_of_parameters(name: str) -> None:
    case = CASES[name]()
    inputs = tuple(t.float().requires_grad_() for t in case.inputs)
    with torch.autocast("cpu", dtype=HALF):
        output = case.call(*inputs)
    assert output.dtype is HALF
    grads = torch.autograd.grad(output.sum(), inputs)
    assert all(g.dtype is SINGLE for g in grads)
    close(output.float(), case.call(*inputs), rtol=5e-2, atol=5e-2)


def test_sums_are_made_in_single_precision_under_autocast() -> None:
    # in bfloat16 a sum of ones stops at 256
    value = torch.ones(4096, 1)
    with torch.autocast("cpu", dtype=HALF):
        output, weights = regard.attend(torch.zeros(1, 8), torch.zeros(4096, 8), value)
    assert output.item() == 1
    assert weights.dtype is SINGLE
    close(weights.dense(), torch.full((1, 4096), 1 / 4096))


@looped("of", ["output", "dense", "product"])
@looped("twice", [False, True], ids=["first", "second"])
@looped("implementation", [None, "tiled", "reference"])
@looped("normalize", [regard.Softmax(), regard.Entmax(1.3)], ids=repr)
def test_gradients_do_not_depend_on_autocast_during_backward(
    normalize: regard.Normalizer, implementation: str | None, twice: bool, of: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 4, 40, 16, generator=generator) for _ in range(3)]

    def grads(forward: bool, backward: bool) -> list[Tensor]:
        args = [t.clone().requires_grad_() for t in inputs]
        with torch.autocast("cpu", dtype=HALF, enabled=forward):
            output, weights = regard.attend(*args, normalize=normalize, implementation=implementation)
        with torch.autocast("cpu", dtype=HALF, enabled=backward):
            result = {
                "output": lambda: output.float(),
                "dense": weights.dense,
                "product": lambda: weights @ args[2],
            }[of]()
            wanted = args[:2]
            actual = torch.autograd.grad(result.square().sum(), wanted, create_graph=twice)
            if twice:
                actual = torch.autograd.grad(sum(g.square().sum() for g in actual), wanted)
        return list(actual)

    for forward in (False, True):
        for inside, outside in zip(grads(forward, True), grads(forward, False), strict=True):
            assert torch.equal(inside, outside)


@pytest.mark.parametrize("implementation", [None, "tiled"])
def test_batched_gradients_do_not_depend_on_autocast(implementation: str | None) -> None:
    args = [torch.randn(2, 4, 20, 16, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    args = [t.requires_grad_() for t in args]
    output = regard.attention(*args, implementation=implementation)
    grads = torch.randn(3, *output.shape, generator=torch.Generator().manual_seed(7))

    pull = torch.func.vjp(
        lambda *inputs: regard.attention(*inputs, implementation=implementation), *(t.detach() for t in args)
    )[1]

    def batched() -> tuple[Tensor, ...]:
        return torch.autograd.grad(output, args, grads, is_grads_batched=True, retain_graph=True)

    def mapped() -> tuple[Tensor, ...]:
        return torch.func.vmap(pull)(grads)

    for derive in (batched, mapped):
        with torch.autocast("cpu", dtype=HALF):
            inside = derive()
        assert all(map(torch.equal, inside, derive()))


def test_a_score_function_under_autocast() -> None:
    args = [t.float() for t in qkv()]
    with torch.autocast("cpu", dtype=HALF):
        output = regard.attention(*args, score=lambda q, k: q @ k.mT / math.sqrt(D))
    assert output.dtype is HALF
    close(output.float(), regard.attention(*args), rtol=3e-2, atol=3e-2)


# Tensors without values


ON_THE_CPU = ("a tensor for a mask", "both", "ALiBi", "everything", "Concat of width 1")  # hold tensors


@pytest.mark.parametrize("name", distinct(name for name in CASES if name not in ON_THE_CPU))
@pytest.mark.sampled(4)
def test_meta_tensors(name: str) -> None:
    case = CASES[name]()
    inputs = tuple(t.to("meta").requires_grad_() for t in case.inputs)
    actual, expected = gradients(case.call, inputs), gradients(case.call, make(name).inputs)
    assert all(t.is_meta for t in actual)
    assert [(t.shape, t.dtype) for t in actual] == [(t.shape, t.dtype) for t in expected]


@looped(
    "build",
    [
        lambda: {"bias": regard.ALiBi(H).to("meta")},
        lambda: {"score": regard.Concat(D, D).to("meta")},
        lambda: {"mask": regard.Causal() & SOME_KEYS.to("meta")},
        lambda: {"mask": regard.Documents([1, 2], torch.tensor([2, 2], device="meta"))},
        lambda: {"normalize": regard.Sink(H).to("meta")},
    ],
    ids=["ALiBi", "Concat", "mask", "Documents", "Sink"],
)
def test_modules_and_masks_on_meta(build: Callable[[], dict[str, Any]]) -> None:
    inputs = tuple(t.to("meta").requires_grad_() for t in qkv())
    actual = gradients(lambda *a: regard.attention(*a, **build()), inputs)
    assert [t.shape for t in actual[1:]] == [t.shape for t in inputs]


def test_a_mask_on_another_device_is_rejected() -> None:
    args = tuple(t.to("meta") for t in qkv())
    with pytest.raises(regard.DeviceError):
        regard.attention(*args, mask=SOME_KEYS)


@pytest.mark.parametrize("device", ["meta", "fake"])
def test_a_million_tokens_without_values_are_not_computed(device: str) -> None:
    with FakeTensorMode() if device == "fake" else torch.device("meta"):
        x = torch.empty(8, 2**20, 64, requires_grad=True)
        output = regard.attention(x, x, x, mask=regard.Causal(), bias=regard.ALiBi(8), dropout=0.1)
        output.sum().backward()
    assert output.shape == x.grad.shape == x.shape


@pytest.mark.parametrize("name", distinct(CASES, step=2))
@pytest.mark.sampled(3)
def test_fake_tensors(name: str) -> None:
    """Outputs and gradients have the right shape for inputs without values."""
    case = CASES[name]()
    expected = gradients(case.call, make(name).inputs)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        inputs = tuple(mode.from_tensor(t).requires_grad_() for t in case.inputs)
        actual = gradients(case.call, inputs)
    assert [(t.shape, t.dtype) for t in actual] == [(t.shape, t.dtype) for t in expected]


@looped(
    "build",
    [
        lambda n: regard.Padding(n[:B]),
        lambda n: regard.Padding(n[:B], side="left"),
        lambda n: regard.Documents(n, n),
        lambda n: regard.Documents(n, n, within=regard.Causal()),
        lambda n: regard.Causal() & regard.Padding(n[:B]),
        lambda n: regard.Window(2) | (n[:K] > 2),
    ],
    ids=["Padding", "Padding at the left", "Documents", "Documents, causal", "both", "either"],
)
def test_masks_of_fake_lengths(build: Callable[[Tensor], Any]) -> None:
    with FakeTensorMode():
        args = [torch.empty(B, H, n, D, requires_grad=True) for n in (Q, K, K)]
        mask = build(torch.empty(6, dtype=torch.long))
        output = regard.attention(*args, mask=mask)
        output.sum().backward()
        assert output.shape == (B, H, Q, D)
        assert all(t.grad.shape == t.shape for t in args)


def test_a_mask_of_fake_lengths_prints_itself() -> None:
    with FakeTensorMode():
        lengths = torch.empty(2, dtype=torch.long)
        assert "Padding" in repr(regard.Padding(lengths))
        assert "Documents" in repr(regard.Documents(lengths))


@looped("read", READERS)
@looped("device", ["meta", "fake"])
def test_lazy_weights_without_values(read: str, device: str) -> None:
    with FakeTensorMode() if device == "fake" else torch.device("meta"):
        args = [torch.empty(H, n, D, dtype=torch.float64) for n in (Q, K, K)]
        actual = READERS[read](regard.attend(*args, mask=regard.Causal())[1])
    expected = READERS[read](regard.attend(*(torch.zeros(t.shape, dtype=DOUBLE) for t in args))[1])
    assert actual.shape == expected.shape
    assert repr(regard.attend(*args)[1]) if device == "meta" else True


# torch.compile


def compiled(
    call: Callable[..., Any], backend: Any = "aot_eager", fullgraph: bool = True, **options: Any
) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(call, backend=backend, fullgraph=fullgraph, **options)


COMPILED = {
    *("Gaussian", "Additive", "Entmax(1.3)", "own softmax", "Documents, causal", "everything"),
}


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=SLOW)])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in COMPILED else SLOW) for name in CASES if "dropout" not in name],
)
@pytest.mark.sampled(2)
def test_a_compiled_call_equals_the_eager_one(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]()
    inputs = tuple(t.to(dtype).requires_grad_() for t in case.inputs)
    close(gradients(compiled(case.call), inputs), gradients(case.call, inputs))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=SLOW),
        pytest.param({"mask": regard.Causal(), "normalize": regard.Entmax15()}, marks=SLOW),
        {"bias": regard.ALiBi(H), "normalize": regard.Sink(H).double()},
        pytest.param({"normalize": OwnSoftmax()}, marks=SLOW),
    ],
    ids=["plain", "Entmax15", "Sink", "own"],
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
    assert not torch.equal(results[1][0], results[1][4])  # the second call drops others


@pytest.mark.parametrize(
    ("call", "extra"),
    [
        pytest.param(
            lambda q, k, v, n: regard.attention(q, k, v, mask=regard.Padding(n)),
            (torch.tensor([1, 3]),),
            marks=SLOW,
        ),
        (
            lambda q, k, v, m, n: regard.attention(
                q, k, v, mask=regard.Documents(m, n, within=regard.Causal())
            ),
            (torch.tensor([1, 2]), torch.tensor([3, 1])),
        ),
        (
            lambda q, k, v: regard.attention(
                q,
                k,
                v,
                score=regard.ScaledDot(0.3, softcap=2.0),
                mask=regard.Window(2),
                normalize=regard.Entmax(1.7),
            ),
            (),
        ),
        (lambda q, k, v: regard.attention(q, k, v, mask=regard.Padding([1, 2])), ()),
        pytest.param(
            lambda q, k, v: regard.attention(q, k, v, mask=regard.Documents([1, 2], [2, 2])), (), marks=SLOW
        ),
        pytest.param(lambda q, k, v: regard.self_attention(k, mask=regard.Causal()), (), marks=SLOW),
        pytest.param(lambda q, k, v: regard.attention(q, k, v, implementation="reference"), (), marks=SLOW),
    ],
    ids=["Padding", "Documents", "numbers", "list", "lists", "self_attention", "reference"],
)
def test_objects_can_be_created_in_a_compiled_function(call: Callable[..., Tensor], extra: Any) -> None:
    inputs = tuple(t.requires_grad_() for t in qkv())
    actual = gradients(compiled(lambda *args: call(*args, *extra)), inputs)
    close(actual, gradients(lambda *args: call(*args, *extra), inputs))


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
    counter = CompileCounter()
    call = compiled(lambda q, k, v, mask: regard.attention(q, k, v, mask=mask), counter)
    for number in range(4):
        close(call(*args, build(number)), regard.attention(*args, mask=build(number)))
    assert counter.frame_count <= most


@pytest.mark.parametrize(
    "shape", ["no keys", *(pytest.param(s, marks=SLOW) for s in ("no queries", "no batch", "no features"))]
)
def test_empty_inputs_compile(shape: str) -> None:
    query, key, value = qkv()
    args = {
        "no queries": (query[..., :0, :], key, value),
        "no keys": (query, key[..., :0, :], value[..., :0, :]),
        "no batch": (query[:0], key[:0], value[:0]),
        "no features": (query[..., :0], key[..., :0], value),
    }[shape]
    inputs = tuple(t.clone().requires_grad_() for t in args)

    def call(*args: Tensor) -> Tensor:
        return regard.attention(*args, mask=regard.Causal(align="start"))

    close(gradients(compiled(call), inputs), gradients(call, inputs))


@pytest.mark.parametrize(
    "layout", ["transposed", *(pytest.param(x, marks=SLOW) for x in ("expanded", "every second"))]
)
def test_strided_inputs_compile(layout: str) -> None:
    query, key, value = {
        "transposed": lambda: [draw(B, n, H, D).transpose(1, 2) for n in (Q, K, K)],
        "expanded": lambda: [draw(1, 1, n, D).expand(B, H, n, D) for n in (Q, K, K)],
        "every second": lambda: [draw(B, H, 2 * n, 2 * D)[..., ::2, ::2] for n in (Q, K, K)],
    }[layout]()
    inputs = tuple(t.requires_grad_() for t in (query, key, value))

    def call(*args: Tensor) -> Tensor:
        return regard.attention(*args, score=regard.Dot(), mask=regard.Causal())

    close(gradients(compiled(call), inputs), gradients(call, inputs))


def test_autocast_compiles() -> None:
    inputs = tuple(t.float().requires_grad_() for t in qkv())

    def call(*args: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=HALF):
            return regard.attention(*args, mask=regard.Causal())

    actual = gradients(compiled(call), inputs)
    assert actual[0].dtype is HALF
    close(actual, gradients(call, inputs))


@pytest.mark.parametrize("mode", [torch.no_grad, pytest.param(torch.inference_mode, marks=SLOW)])
def test_compiles_without_gradients(mode: Any) -> None:
    with mode():
        args = tuple(t.clone() for t in qkv())
        close(
            compiled(lambda *a: regard.attention(*a, mask=regard.Causal()))(*args),
            regard.attention(*args, mask=regard.Causal()),
        )


@pytest.mark.parametrize(
    "read", ["top", *(pytest.param(r, marks=SLOW) for r in ("dense", "row", "entropy", "scores", "mean"))]
)
def test_lazy_weights_inside_a_compiled_function(read: str) -> None:
    args = tuple(t[0] for t in qkv())

    def call(*args: Tensor) -> tuple[Tensor, Tensor]:
        output, weights = regard.attend(*args, mask=regard.Causal())
        return output, READERS[read](weights)

    close(compiled(call)(*args), call(*args))


def test_a_compiled_function_returns_lazy_weights() -> None:
    args = qkv()
    output, weights = compiled(lambda *a: regard.attend(*a, mask=regard.Causal()))(*args)
    expected, same = regard.attend(*args, mask=regard.Causal())
    close(output, expected)
    close(weights.dense(), same.dense())
    close(weights.entropy(), same.entropy())


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


def test_checkpointing_compiles() -> None:
    inputs = tuple(t.requires_grad_() for t in qkv())

    def call(*args: Tensor) -> Tensor:
        return checkpoint(lambda *a: regard.attention(*a, mask=regard.Causal()), *args, use_reentrant=False)

    close(gradients(compiled(call), inputs), gradients(call, inputs))


def test_errors_name_themselves_through_a_compiled_function() -> None:
    call = compiled(regard.attention, fullgraph=False)
    with pytest.raises(regard.ShapeError, match="query has 4 features and key has 5"):
        call(draw(3, 4), draw(3, 5), draw(3, 5))


LENGTHS = [(6, 8), (7, 9), (17, 8), (33, 40)]


def check_dynamic(call: Callable[..., Tensor], backward: bool = True, extra: Any = lambda q, k: ()) -> None:
    """Changing lengths cause no recompilation after the first call."""
    counter = CompileCounterWithBackend("aot_eager")
    function = compiled(call, counter, dynamic=True)
    first = None
    for queries, keys in LENGTHS:
        inputs = (draw(2, 3, queries, D), draw(2, 3, keys, D), draw(2, 3, keys, 4))
        more = extra(queries, keys)
        inputs = tuple(t.requires_grad_(backward) for t in inputs)
        if backward:
            close(
                gradients(lambda *a, m=more: function(*a, *m), inputs),
                gradients(lambda *a, m=more: call(*a, *m), inputs),
            )
        else:
            close(function(*inputs, *more), call(*inputs, *more))
        first = first or counter.frame_count  # dynamo may start over within the first call
    assert counter.frame_count == first


def test_changing_lengths_do_not_compile_again() -> None:
    check_dynamic(lambda q, k, v: regard.attention(q, k, v, mask=regard.Causal(), bias=regard.ALiBi(3)))


@SLOW
def test_changing_lengths_and_padding_do_not_compile_again() -> None:
    check_dynamic(
        lambda q, k, v, n: regard.attention(q, k, v, mask=regard.Padding(n)),
        backward=False,
        extra=lambda q, k: (torch.tensor([k, k - 2]),),
    )


@SLOW
def test_recompilation_is_detected() -> None:
    with pytest.raises(AssertionError):
        check_dynamic(
            lambda q, k, v: regard.attention(q, k, v) * (2 if q.shape[-2] > k.shape[-2] else 1),
            backward=False,
        )


@SLOW
@pytest.mark.parametrize(
    ("call", "extra"),
    [
        (lambda q, k, v: regard.attention(q, k, v), lambda q, k: ()),
        (lambda q, k, v: regard.attention(q, k, v, mask=regard.Window(3)), lambda q, k: ()),
        (
            lambda q, k, v: regard.attention(q, k, v, mask=regard.Prefix(3) | regard.Window(2)),
            lambda q, k: (),
        ),
        (lambda q, k, v: regard.attention(q, k, v, normalize=regard.Entmax(1.5)), lambda q, k: ()),
        (lambda q, k, v: regard.attention(q, k, v, normalize=regard.Sigmoid()), lambda q, k: ()),
        (lambda q, k, v: regard.attention(q, k, v, normalize=OwnSoftmax()), lambda q, k: ()),
        (lambda q, k, v: regard.attention(q, k, v, score=regard.Cosine()), lambda q, k: ()),
        (lambda q, k, v: regard.attention(q, k, v, score=regard.Gaussian()), lambda q, k: ()),
        (
            lambda q, k, v, m, n: regard.attention(q, k, v, mask=regard.Documents(m, n)),
            lambda q, k: (torch.tensor([q - 2, 2]), torch.tensor([k - 3, 3])),
        ),
        (lambda q, k, v, m: regard.attention(q, k, v, mask=m), lambda q, k: (torch.rand(q, k) > 0.3,)),
        (lambda q, k, v, b: regard.attention(q, k, v, bias=b), lambda q, k: (draw(q, k),)),
        (lambda q, k, v: regard.scaled_dot_product_attention(q, k, v, is_causal=True), lambda q, k: ()),
    ],
    ids=[
        "plain",
        "Window",
        "either",
        "Entmax",
        "Sigmoid",
        "own",
        "Cosine",
        "Gaussian",
        "Documents",
        "tensor",
        "bias",
        "sdpa",
    ],
)
def test_changing_lengths_of_every_kind_do_not_compile_again(call: Any, extra: Any) -> None:
    check_dynamic(call, extra=extra)


NEEDS_A_COMPILER = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "c++")) is None, reason="inductor needs a C++ compiler"
)


@SLOW
@NEEDS_A_COMPILER
@pytest.mark.parametrize("name", [name for name in CASES if "dropout" not in name])
def test_inductor_on_every_case(name: str) -> None:
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
    """The arguments that a compiled graph passes to regard::attention."""
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
    """The forward operator with these tensors, and the backward operator of its result."""
    forward, backward = torch.ops.regard.attention.default, torch.ops.regard.attention_backward.default
    still = [t.detach() for t in tensors]  # not copied: strides count
    output, tau = forward(still, rules, wanted)
    of_backward = (still, tau, output, torch.randn_like(output), rules, wanted)
    for operator, arguments in ((forward, (tensors, rules, wanted)), (backward, of_backward)):
        assert set(opcheck(operator, arguments).values()) == {"SUCCESS"}


@pytest.mark.parametrize(("name", "dtype", "inside"), OPERATORS)
def test_opcheck(name: str, dtype: torch.dtype, inside: bool) -> None:
    case = CASES[name]()
    inputs = [t.to(dtype) for t in case.inputs]
    if inside:  # heads inside tokens, as after a projection
        inputs[:3] = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs[:3]]
    case = case._replace(inputs=tuple(t.requires_grad_() for t in inputs))
    tensors, rules, wanted = operator_arguments(case)
    assert rules.startswith("1|") == (dtype is torch.float32 and fused.available())  # for the kernels
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


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning")  # of torch.export.save
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


# Copies

VALUES: dict[str, tuple[str, Callable[[], Any]]] = {
    "Dot": ("score", lambda: regard.Dot(softcap=3.0)),
    "ScaledDot": ("score", lambda: regard.ScaledDot(0.3)),
    "Cosine": ("score", lambda: regard.Cosine(2.0)),
    "Gaussian": ("score", lambda: regard.Gaussian(0.5)),
    "General": ("score", lambda: regard.General(D, D).double()),
    "Additive": ("score", lambda: regard.Additive(D, D, 6).double()),
    "Concat": ("score", lambda: regard.Concat(D, D, 6).double()),
    "Concat of width 1": ("score", lambda: regard.Concat(D, D).double()),
    "Causal": ("mask", lambda: regard.Causal(align="start")),
    "Window": ("mask", lambda: regard.Window(left=1, right=None)),
    "Prefix": ("mask", lambda: regard.Prefix(2)),
    "Padding": ("mask", lambda: regard.Padding([1, 3], side="left")),
    "Documents": ("mask", lambda: regard.Documents([1, 2], [3, 1], within=regard.Causal())),
    "and": ("mask", lambda: regard.Causal() & SOME_KEYS),
    "or": ("mask", lambda: regard.Causal() | regard.Padding([1, 2])),
    "Softmax": ("normalize", lambda: regard.Softmax(0.5)),
    "Softmax1": ("normalize", lambda: regard.Softmax1(0.5)),
    "Softmax1 of a tensor": ("normalize", lambda: regard.Softmax1(torch.tensor([0.5, -1.0]))),
    "Sink": ("normalize", lambda: regard.Sink(H, 0.4).double()),
    "Sparsemax": ("normalize", regard.Sparsemax),
    "Entmax15": ("normalize", regard.Entmax15),
    "Entmax": ("normalize", lambda: regard.Entmax(1.3)),
    "Mean": ("normalize", regard.Mean),
    "Relu": ("normalize", regard.Relu),
    "Sigmoid": ("normalize", lambda: regard.Sigmoid(-2.0)),
    "Hard": ("normalize", regard.Hard),
    "ClippedRelativeBias": (
        "bias",
        lambda: regard.ClippedRelativeBias(torch.arange(10.0, dtype=DOUBLE).reshape(2, 5)),
    ),
    "Relative, learned": ("bias", lambda: regard.ClippedRelativeBias(nn.Parameter(draw(2, 5)))),
    "ALiBi": ("bias", lambda: regard.ALiBi(H)),
    "T5Bias": ("bias", lambda: regard.T5Bias(H).double()),
}
MODULES = [name for name, (_, build) in VALUES.items() if isinstance(build(), nn.Module)]
COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
}


def test_every_public_value_is_copied_here() -> None:
    kinds = (regard.Score, regard.Mask, regard.Normalizer, regard.RelativeBias, regard.Sink)
    bases = {regard.Score, regard.Mask, regard.Normalizer, regard.RelativeBias, regard.Rule}
    public = {
        value
        for value in vars(regard).values()
        if isinstance(value, type) and issubclass(value, kinds) and value not in bases
    }
    assert public <= {type(build()) for _, build in VALUES.values()}


@looped("way", COPIES)
@looped("name", VALUES)
def test_a_copy_does_the_same(name: str, way: str) -> None:
    option, build = VALUES[name]
    value, args = build(), qkv()
    other = COPIES[way](value)
    assert type(other) is type(value)
    assert repr(other) == repr(value)
    actual, expected = (regard.attention(*args, **{option: v}) for v in (other, value))
    assert torch.equal(actual, expected)


@looped("name", MODULES)
def test_deep_copies_learn_on_their_own(name: str) -> None:
    option, build = VALUES[name]
    module, args = build(), qkv()
    other = copy.deepcopy(module)
    expected = regard.attention(*args, **{option: module}).detach()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter))
    assert torch.equal(regard.attention(*args, **{option: module}), expected)
    if any(True for _ in other.parameters()):
        assert not torch.equal(regard.attention(*args, **{option: other}), expected)


@looped("name", MODULES)
def test_state_survives_a_file(name: str) -> None:
    option, build = VALUES[name]
    module, other, args = build(), build(), qkv()
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(*(regard.attention(*args, **{option: m}) for m in (module, other)))


@looped("name", MODULES)
def test_modules_change_their_dtype(name: str) -> None:
    option, build = VALUES[name]
    module = build()
    args = [t.bfloat16() for t in qkv()]
    low = regard.attention(*args, **{option: copy.deepcopy(module).bfloat16()})
    assert low.dtype is HALF
    close(low.double(), regard.attention(*(t.double() for t in args), **{option: module}), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_lazy_weights_are_copied_without_their_graph(way: str) -> None:
    inputs = tuple(t.requires_grad_() for t in qkv())
    weights = regard.attend(*inputs, mask=regard.Causal(), normalize=regard.Entmax15(), dropout=0.2)[1]
    other = COPIES[way](weights)
    close(other.dense(), weights.dense().detach())
    assert other.shape == weights.shape
    assert weights.dense().requires_grad
    assert not other.dense().requires_grad


def test_rows_sum_to_one_in_the_backward_pass_of_a_lazily_negated_gradient():
    """The kernels do not read it. torch rounds scores differently, so its backward pass needs its own τ."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(7, 64, generator=generator).mul(100) for _ in range(3))
    output = regard.attention(query, key, value.requires_grad_(), normalize=regard.Softmax(10.0))
    (grad,) = torch.autograd.grad(output, value, torch._neg_view(torch.ones_like(output)))
    torch.testing.assert_close(grad.sum(-2), torch.full((64,), -7.0), rtol=2e-6, atol=0)
