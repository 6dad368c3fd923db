"""A table of functions of differentiable inputs, for the tests of torch's transformations.

Each law states that a transformation in torch equals the same computation by hand: vmap equals a loop,
forward mode the numerical derivative, and a compiled call the eager one.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import regard
from tests.custom import OwnCubes, OwnSoftmax, Unnormalized

SLOW = pytest.mark.slow  # cases that compile, which takes a second or more each

B, H, Q, K, D, E = 2, 2, 3, 4, 5, 7
HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64
close = torch.testing.assert_close


class Case(NamedTuple):
    """Differentiable inputs, and the call that takes them."""

    inputs: tuple[Tensor, ...]
    call: Callable[..., Tensor]


class OwnLearned(nn.Module, Unnormalized):
    """A custom normalizer with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.power = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

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
    """Return a case whose only inputs are query, key and value."""
    return lambda: Case(qkv(), lambda q, k, v: regard.attention(q, k, v, **options))


def learned(name: str, build: Callable[[], nn.Module], heads: int = H, **options: Any) -> Callable[[], Case]:
    """Return a case whose inputs include the parameters of a module, passed as this option."""

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


def make(name: str) -> Case:
    """Return a case whose inputs require gradients."""
    case = CASES[name]()
    return case._replace(inputs=tuple(t.requires_grad_() for t in case.inputs))


def detached(case: Case) -> Case:
    return case._replace(inputs=tuple(t.detach() for t in case.inputs))


def cotangent(output: Tensor) -> Tensor:
    """Return a fixed direction in which gradients are compared."""
    numbers = torch.arange(output.numel(), dtype=output.dtype, device=output.device)
    return numbers.remainder(7).sub(2.5).reshape(output.shape)


def gradients(call: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the output, and the gradient of every input; zeros for None."""
    output = call(*inputs)
    grads = torch.autograd.grad(output, inputs, cotangent(output), allow_unused=True)
    return [output, *(torch.zeros_like(t) if g is None else g for g, t in zip(grads, inputs, strict=True))]


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


# One case for each formula, each kind of mask and each bias; the others differ only in numbers.
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
    """Return the parameters of a test; cases that resemble another one are marked slow."""
    quick = [name for name in CASES if name in DISTINCT][::-step]
    return [pytest.param(name, marks=() if name in quick else SLOW) for name in names]
