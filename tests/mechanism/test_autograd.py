"""Derivatives of every order and kind, in both modes, and the tensors saved for backward."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor
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
    READERS,
    SLOW,
    B,
    H,
    Q,
    close,
    cotangent,
    detached,
    distinct,
    draw,
    gradients,
    make,
    qkv,
)
from tests.recorder import Largest

# Forward mode and higher derivatives


@pytest.mark.parametrize("name", distinct(CASES))
@pytest.mark.sampled(3)
def test_first_derivatives_of_both_modes_are_the_numerical_ones(name: str) -> None:
    case = make(name)
    assert gradcheck(case.call, case.inputs, fast_mode=True, check_forward_ad=True)


@pytest.mark.parametrize("name", distinct(CASES, step=2))
@pytest.mark.sampled(3)
def test_second_derivatives_of_both_modes_are_the_numerical_ones(name: str) -> None:
    case = make(name)
    # torch's forward-over-reverse check fails if a gradient does not depend on its inputs
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


@pytest.mark.sampled(3)
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


@looped("name", ["ScaledDot", "Entmax15", "relative bias", "Additive", "everything"])
def test_many_cotangents_at_once(name: str) -> None:
    """Vectorized Jacobians use torch.autograd.grad(..., is_grads_batched=True)."""
    case = make(name)
    output = case.call(*case.inputs)
    directions = torch.stack([cotangent(output), torch.ones_like(output), torch.zeros_like(output)])
    actual = torch.autograd.grad(output, case.inputs, directions, is_grads_batched=True, retain_graph=True)
    for number, direction in enumerate(directions):
        expected = torch.autograd.grad(output, case.inputs, direction, retain_graph=True)
        close([g[number] for g in actual], list(expected))


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch's own constants
@pytest.mark.parametrize("name", [pytest.param("ScaledDot", marks=SLOW), "everything"])
def test_linearize(name: str) -> None:
    """torch.func.linearize traces the forward-mode derivative once, then applies it to many tangents."""
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
    backward = torch.autograd.functional.jvp(call, query, direction)[1]  # computed by two backward passes
    close(backward, numerical, rtol=1e-5, atol=1e-7)
    close(torch.func.jvp(call, (query.detach(),), (direction,))[1], numerical, rtol=1e-5, atol=1e-7)


@looped("read", [name for name in READERS if name != "scores"])
def test_vmap_through_lazy_weights(read: str) -> None:
    query, key, value = (t[0] for t in qkv())
    several = torch.stack([query, query + 1, 2 * query])

    def call(q: Tensor) -> Tensor:
        return READERS[read](regard.attend(q, key, value, mask=regard.Causal())[1])

    close(torch.vmap(call)(several), torch.stack([call(q) for q in several]))


# Unneeded gradients and saved tensors


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
    """Records the storages that autograd saves for backward."""

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
    ],
    ids=["forward", "backward", "sdpa", "vmap", "func.grad", "func.vjp", "vmap of grad"],
)
def test_no_quadratic_tensor(work: Callable[[Tensor], Any]) -> None:
    x = torch.randn(LONG, 4)
    with Largest() as largest:
        work(x)
    assert LONG < largest.elements < LONG * LONG / 2


# Learned parameters


class OwnWithANumber(Unnormalized):
    """A custom normalizer that has a tensor attribute but is not a module."""

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


def test_rows_sum_to_one_in_the_backward_pass_of_a_lazily_negated_gradient():
    """torch computes this backward pass. Because torch rounds scores differently, τ must be recomputed."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(7, 64, generator=generator).mul(100) for _ in range(3))
    output = regard.attention(query, key, value.requires_grad_(), normalize=regard.Softmax(10.0))
    (grad,) = torch.autograd.grad(output, value, torch._neg_view(torch.ones_like(output)))
    torch.testing.assert_close(grad.sum(-2), torch.full((64,), -7.0), rtol=2e-6, atol=0)
