"""Scores, masks, normalizers and biases can be copied, pickled, saved and converted."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import regard
from tests.cases import looped
from tests.mechanism.functions import DOUBLE, HALF, SOME_KEYS, D, H, close, draw, qkv

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
def test_a_copy_computes_the_same(name: str, way: str) -> None:
    option, build = VALUES[name]
    value, args = build(), qkv()
    other = COPIES[way](value)
    assert type(other) is type(value)
    assert repr(other) == repr(value)
    actual, expected = (regard.attention(*args, **{option: v}) for v in (other, value))
    assert torch.equal(actual, expected)


@looped("name", MODULES)
def test_deep_copies_train_independently(name: str) -> None:
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
