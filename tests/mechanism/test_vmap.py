"""torch.vmap equals a loop, over any input and any axis."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from tests.cases import looped
from tests.mechanism.functions import (
    CASES,
    DISTINCT,
    SLOW,
    SOME_KEYS,
    Attention,
    D,
    E,
    H,
    K,
    Q,
    close,
    detached,
    draw,
    gradients,
    make,
    qkv,
)


def loop(call: Callable[..., Tensor], in_dims: tuple[int | None, ...], *args: Tensor) -> Tensor:
    """Compute the definition of vmap."""
    (size,) = {arg.shape[at] for arg, at in zip(args, in_dims, strict=True) if at is not None}
    return torch.stack(
        [
            call(*(a if at is None else a.select(at, i) for a, at in zip(args, in_dims, strict=True)))
            for i in range(size)
        ]
    )


EACH_INPUT = [(name, place) for name in CASES for place in range(len(CASES[name]().inputs))]


@looped(("name", "place"), EACH_INPUT, sampled=2)
def test_vmap_over_one_input_equals_a_loop(name: str, place: int) -> None:
    case = detached(make(name))
    args = list(case.inputs)
    args[place] = torch.stack([args[place], 0.5 * args[place] + 0.1, -args[place]])
    in_dims = tuple(0 if i == place else None for i in range(len(args)))
    actual = torch.vmap(case.call, in_dims, randomness="same")(*args)
    close(actual, loop(case.call, in_dims, *args))


@pytest.mark.parametrize(
    ("name", "place"), [pytest.param(*pair, marks=() if pair[0] in DISTINCT else SLOW) for pair in EACH_INPUT]
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
    """torch.func.stack_module_state: several modules' parameters in one call."""
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
