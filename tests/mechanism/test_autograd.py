"""Derivatives of every order and kind, vmap, saved tensors, autocast, and tensors without values."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.gradcheck import GradcheckError
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import regard
from tests.cases import looped
from tests.custom import OwnCubes, OwnSoftmax, Unnormalized
from tests.mechanism.functions import (
    CASES,
    DOUBLE,
    HALF,
    READERS,
    SINGLE,
    SLOW,
    SOME_KEYS,
    Attention,
    B,
    D,
    E,
    H,
    K,
    Q,
    close,
    cotangent,
    detached,
    draw,
    gradients,
    make,
    qkv,
)
from tests.recorder import Largest

# torch loads forward-mode rules and inductor through torch.jit, which warns
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(30)


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


class OwnWithANumber(Unnormalized):
    """A custom normalizer that holds a tensor but is not a module."""

    def __init__(self, number: Tensor) -> None:
        self.number = number

    def phi(self, x: Tensor) -> Tensor:
        return self.number * x

    def slope(self, x: Tensor) -> Tensor:
        return self.number * torch.ones_like(x)


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


def test_rows_sum_to_one_in_the_backward_pass_of_a_lazily_negated_gradient():
    """The kernels do not read it. torch rounds scores differently, so its backward pass needs its own τ."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(7, 64, generator=generator).mul(100) for _ in range(3))
    output = regard.attention(query, key, value.requires_grad_(), normalize=regard.Softmax(10.0))
    (grad,) = torch.autograd.grad(output, value, torch._neg_view(torch.ones_like(output)))
    torch.testing.assert_close(grad.sum(-2), torch.full((64,), -7.0), rtol=2e-6, atol=0)
