"""Autocast: results in its dtype, sums in float32, and gradients that do not depend on it."""

import math

import pytest
import torch
from torch import Tensor

import regard
from tests.cases import looped
from tests.mechanism.functions import CASES, DOUBLE, HALF, SINGLE, D, close, qkv


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
    # a sum of ones in bfloat16 stops at 256
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
