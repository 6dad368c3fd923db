"""Lazy weights: every part equals that part of the dense matrix that the operator used."""

import contextlib
import copy
import functools
import gc
import itertools
import json
import math
import os
import pickle
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

import regard
from regard.mechanism import tiled
from regard.mechanism.weights.io import checksum
from tests import naive
from tests.cases import looped

B, G, Q, K, D, E = 2, 3, 5, 7, 11, 13  # a different prime for every axis, to detect swapped axes

# Arguments of a call, each with its formula.


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def distances(query: Tensor, key: Tensor) -> Tensor:
    """A custom score function."""
    return -(query.unsqueeze(-2) - key.unsqueeze(-3)).abs().sum(-1)


@functools.cache
def module(kind: type, *sizes: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return kind(*sizes).double()


SCORES: dict[str, Any] = {
    "Dot": regard.Dot(),
    "ScaledDot": regard.ScaledDot(),
    "scale": regard.ScaledDot(scale=0.7),
    "softcap": regard.Dot(softcap=2.0),
    "Cosine": regard.Cosine(scale=3.0),
    "Gaussian": regard.Gaussian(2.0),
    "General": module(regard.General, D, D),
    "Additive": module(regard.Additive, D, D, 17),
    "Concat": module(regard.Concat, D, D, 17),
    "function": distances,
}

ROW, KEY = torch.arange(Q)[:, None], torch.arange(K)
PLACE = ROW + K - Q  # the last query is at the last key
ROUGH = randn(G, Q, K) > 0.3
LENGTHS = torch.tensor([0, 4])[:, None, None, None]

MASKS: dict[str, tuple[Any, Tensor]] = {
    "none": (None, torch.ones(Q, K, dtype=torch.bool)),
    "Causal": (regard.Causal(), KEY <= PLACE),
    "Causal start": (regard.Causal(align="start"), KEY <= ROW),
    "Window": (regard.Window(2), (KEY <= PLACE) & (KEY > PLACE - 2)),
    "Window sides": (regard.Window(left=1, right=2), (KEY >= PLACE - 1) & (KEY <= PLACE + 2)),
    "Prefix": (regard.Prefix(4), (KEY <= PLACE) | (KEY < 4)),
    "Padding": (regard.Padding([0, 4]), LENGTHS > KEY),  # all keys of the first sequence are masked
    "Padding left": (regard.Padding([0, 4], side="left"), KEY >= K - LENGTHS),
    "Documents": (regard.Documents([2, 3], [4, 3]), (ROW < 2) == (KEY < 4)),
    "dense": (ROUGH, ROUGH),
    "two terms": (
        regard.Window(2) | regard.Padding([0, 4]),
        (KEY <= PLACE) & (KEY > PLACE - 2) | (LENGTHS > KEY),
    ),
    "meeting": (regard.Causal() & ROUGH, (KEY <= PLACE) & ROUGH),
}


def relative(heads: int) -> regard.ClippedRelativeBias:
    return regard.ClippedRelativeBias(randn(heads, 7))


def alibi(heads: int) -> Tensor:
    slopes = torch.tensor({3: [2**-4, 2**-8, 2**-2], 6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]}[heads])
    return -slopes[:, None, None] * (KEY - PLACE).abs()


BIASES: dict[str, Callable[[int], tuple[Any, Tensor | float]]] = {
    "none": lambda heads: (None, 0.0),
    "dense": lambda heads: (randn(heads, Q, K),) * 2,
    "per key": lambda heads: (randn(1, K),) * 2,
    "-inf": lambda heads: (torch.where(ROUGH[0], 0.5, -math.inf).double(),) * 2,
    "ClippedRelativeBias": lambda heads: (
        relative(heads),
        relative(heads).vector[:, (KEY - PLACE).clamp(-3, 3) + 3],
    ),
    "ALiBi": lambda heads: (regard.ALiBi(heads), alibi(heads)),
    "T5Bias": lambda heads: (
        t5 := module(regard.T5Bias, heads),
        t5.table[t5.bucket(KEY - PLACE)].movedim(-1, 0),
    ),
    "several": lambda heads: (
        [regard.ALiBi(heads), randn(Q, 1), relative(heads)],
        alibi(heads) + randn(Q, 1) + relative(heads).vector[:, (KEY - PLACE).clamp(-3, 3) + 3],
    ),
}


NORMALIZERS: dict[str, Callable[[int], Any]] = {
    "Softmax": lambda heads: regard.Softmax(),
    "temperature": lambda heads: regard.Softmax(0.3),
    "Softmax1": lambda heads: regard.Softmax1(),
    "sinks": lambda heads: regard.Softmax1(randn(6)[:heads]),
    "Sink": lambda heads: regard.Sink(heads, 0.7),
    "Sparsemax": lambda heads: regard.Sparsemax(),
    "Entmax15": lambda heads: regard.Entmax15(),
    "Entmax": lambda heads: regard.Entmax(1.3),
    "Entmax 3": lambda heads: regard.Entmax(3.0),
    "Mean": lambda heads: regard.Mean(),
    "Relu": lambda heads: regard.Relu(),
    "Sigmoid": lambda heads: regard.Sigmoid(),
    "Sigmoid bias": lambda heads: regard.Sigmoid(-1.0),
    "Hard": lambda heads: regard.Hard(),
}

LAYOUTS = {  # the leading axes of query, key and value
    "plain": ((), (), ()),
    "heads": ((G,), (G,), (G,)),
    "batch": ((B, G), (B, G), (B, G)),
    "deep": ((B, 3, G), (B, 3, G), (B, 3, G)),
    "grouped": ((B, 2 * G), (B, G), (B, G)),
    "one key head": ((B, G), (B, 1), (B, 1)),
    "one query": ((), (B, G), (B, G)),
    "one key": ((B, G), (), (G,)),
    "crossed": ((B, 1, G), (1, 3, G), (3, 1)),
    "many values": ((G,), (G,), (B, G)),
    "ones": ((1, 1), (1, 1), (1, 1)),
}


@dataclass(frozen=True)
class Case:
    """A call of `attend`, and its weights by the dense formulas, from the visible keys."""

    score: str = "ScaledDot"
    mask: str = "none"
    bias: str = "none"
    normalize: str = "Softmax"
    layout: str = "batch"
    dtype: torch.dtype = torch.float64
    dropout: float = 0.0
    implementation: str | None = None

    def __str__(self) -> str:
        words = (getattr(self, name) for name, plain in vars(Case()).items() if getattr(self, name) != plain)
        return ", ".join(str(word).removeprefix("torch.") for word in words) or "default"

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = LAYOUTS[self.layout]
        sizes = (*query, Q, D), (*key, K, D), (*value, K, E)
        return tuple(randn(*size).to(self.dtype) for size in sizes)  # type: ignore[return-value]

    @property
    def lead(self) -> tuple[int, ...]:
        query, key, value = LAYOUTS[self.layout]
        return (B, 2 * G) if self.layout == "grouped" else torch.broadcast_shapes(query, key, value)

    @property
    def heads(self) -> int:
        return self.lead[-1] if self.lead else 1

    def each(self, x: Tensor) -> Tensor:
        """Key or value, repeated for each query head."""
        return x.repeat_interleave(2, -3) if self.layout == "grouped" else x

    def options(self) -> dict[str, Any]:
        return {
            "score": SCORES[self.score],
            "mask": MASKS[self.mask][0],
            "bias": BIASES[self.bias](self.heads)[0],
            "normalize": NORMALIZERS[self.normalize](self.heads),
            "dropout": self.dropout,
            "implementation": self.implementation,
            "generator": torch.Generator().manual_seed(3),
        }

    def attend(self) -> tuple[Tensor, regard.Weights]:
        return regard.attend(*self.tensors(), **self.options())

    def weights(self) -> regard.Weights:
        return self.attend()[1]

    def visible(self) -> Tensor:
        bias = torch.as_tensor(BIASES[self.bias](self.heads)[1])
        return (MASKS[self.mask][1] & (bias != -math.inf)).expand(*self.lead, Q, K)

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        bias = BIASES[self.bias](self.heads)[1]
        scores = naive.eager_score(SCORES[self.score], query, self.each(key)) + bias
        return scores.expand(*self.lead, Q, K)

    def formula(self, query: Tensor, key: Tensor) -> Tensor:
        normalize = NORMALIZERS[self.normalize](self.heads)
        return naive.eager_weights(normalize, self.scores(query, key), self.visible())

    @functools.cache  # noqa: B019 (there are few of them)
    def dense(self) -> Tensor:
        query, key, _ = self.tensors()
        return self.formula(query.double(), key.double()).detach()


LOW = (torch.float32, torch.bfloat16, torch.float16)
CASES = [
    Case(),
    *(Case(score=name, mask="Causal") for name in SCORES),
    *(Case(mask=name) for name in MASKS),
    *(Case(bias=name, mask="two terms") for name in BIASES),
    *(Case(normalize=name) for name in NORMALIZERS),
    *(Case(normalize=name, mask="Padding", bias="dense") for name in NORMALIZERS),
    *(Case(layout=name) for name in LAYOUTS),
    *(Case(dtype=dtype, mask="Causal", bias="ALiBi") for dtype in LOW),
    Case(layout="grouped", score="Additive", mask="Padding", bias="ALiBi", normalize="Entmax15"),
    Case(layout="grouped", score="Gaussian", mask="two terms", bias="several", normalize="sinks"),
    Case(layout="grouped", score="Concat", mask="Window", bias="ClippedRelativeBias", normalize="Sigmoid"),
    Case(layout="plain", score="Cosine", mask="Documents", normalize="Relu"),
    Case(layout="one key head", score="function", mask="Padding", normalize="Sparsemax"),
    Case(implementation="reference", mask="meeting", bias="T5Bias", normalize="Entmax"),
]
CASES = list(dict.fromkeys(CASES))
# small tiles, for results computed from the matrix
FEW = [
    Case(layout="plain"),
    Case(mask="Causal"),
    Case(mask="two terms", bias="ALiBi", normalize="sinks", layout="grouped"),
    Case(mask="Padding", score="Additive", normalize="Entmax15", layout="grouped"),
    Case(mask="dense", normalize="Sparsemax"),
    Case(bias="-inf", normalize="Sigmoid"),
    Case(layout="crossed", score="Dot", normalize="Relu"),
    Case(layout="many values", mask="Window"),
    Case(dtype=torch.bfloat16, mask="Causal"),
]


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype = torch.float64) -> None:
    """Equal shape and value, up to rounding in float64 or float32."""
    precision = 1e-10 if dtype is torch.float64 else 2e-5
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual.to(expected), expected, rtol=precision, atol=precision)


def grad_ready(case: Case) -> tuple[regard.Weights, Tensor, Tensor, Tensor]:
    """Weights with differentiable query and key, and their dense formula."""
    query, key, value = case.tensors()
    query, key = query.requires_grad_(), key.requires_grad_()
    return regard.attend(query, key, value, **case.options())[1], query, key, case.formula(query, key)


@pytest.fixture(params=[30, 2**20], ids=["many tiles", "one tile"])
def tile(request, monkeypatch):
    monkeypatch.setattr(tiled, "TILE", request.param)


many_tiles = pytest.mark.usefixtures("tile")
cases = looped("case", CASES, ids=str)
few = looped("case", FEW, ids=str)

# The full matrix


@many_tiles
@cases
def test_dense_equals_the_formulas(case):
    weights = case.weights()
    close(weights.dense(), case.dense(), case.dtype)
    assert weights.shape == (*case.lead, Q, K)


@many_tiles
@cases
def test_weights_times_value_is_the_output(case):
    output, weights = case.attend()
    actual = weights @ case.each(case.tensors()[2])
    torch.testing.assert_close(actual.to(output.dtype), output)


@many_tiles
@looped("case", [Case(dropout=0.4), *(Case(**{**vars(c), "dropout": 0.4}) for c in FEW)], ids=str)
def test_with_dropout_the_weights_are_those_that_were_used(case):
    output, weights = case.attend()
    dense, before = weights.dense(), case.dense()
    torch.testing.assert_close((weights @ case.each(case.tensors()[2])).to(output.dtype), output)
    close(dense, torch.where(dense == 0, 0.0, before / 0.6), case.dtype)
    assert 0 < (dense == 0).double().mean() < 1
    if case.lead:
        head = case.heads - 1
        torch.testing.assert_close(weights.heads(head).dense(), dense[..., head, :, :])
        torch.testing.assert_close(weights[..., [3, 1], 2], dense[..., [3, 1], 2])


@cases
def test_scores_equal_the_formulas(case):
    query, key, _ = case.tensors()
    expected = case.scores(query.double(), key.double()).masked_fill(~case.visible(), -math.inf)
    close(case.weights().scores(), expected, case.dtype)


@few
def test_results_do_not_depend_on_the_tiles(case, monkeypatch):
    def look() -> list[Tensor]:
        weights = case.weights()
        x, y = randn(K, 3).to(weights.dtype), randn(Q, 3).to(weights.dtype)
        return [
            weights.dense(),
            weights[..., 1:4, 2],
            weights.entropy(),
            weights.received(),
            weights.pool(2, 3),
            weights @ x,
            weights.T @ y,
            weights.topk(2).values,
        ]

    whole = look()
    for size in (1, 7, 100) if case in FEW[:2] else (7,):
        with monkeypatch.context() as patch:
            patch.setattr(tiled, "TILE", size)
            for actual, expected in zip(look(), whole, strict=True):
                torch.testing.assert_close(actual, expected)


def test_attributes_match_those_of_a_tensor():
    weights = Case(dtype=torch.float32).weights()
    assert weights.shape == weights.size() == torch.Size([B, G, Q, K])
    assert weights.size(-1) == K
    assert weights.ndim == weights.dim() == 4
    assert weights.numel() == B * G * Q * K
    assert len(weights) == B
    assert weights.dtype is torch.float32
    assert weights.device == torch.device("cpu")
    assert [head.shape for head in weights] == [(G, Q, K)] * B


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_have_weights_of_float32(dtype):
    weights = Case(dtype=dtype).weights()
    assert weights.dtype is weights.dense().dtype is weights.entropy().dtype is torch.float32


def test_repr_shows_the_call_and_its_memory():
    x = torch.zeros(1000, 4)
    weights = regard.attend(x, x, x, normalize=regard.Entmax(1.3), mask=regard.Causal())[1]
    text = "Weights(1000 × 1000, float32: ScaledDot, Entmax(alpha=1.3); holds 32.0 kB, dense 4.0 MB)"
    assert repr(weights) == text
    assert repr(weights.T) == f"transpose of {text}"
    assert "mean over heads" in repr(Case().weights().mean("heads"))
    assert "Additive" in repr(Case(score="Additive").weights())


# Parts


def lazy(name: str) -> regard.Weights:
    if name == "averaged":
        return Case(mask="Causal").weights().mean("heads")
    if name == "one of the heads":
        return Case(mask="Padding", layout="grouped").weights().heads(4)
    if name == "some of the heads":
        return Case(mask="Padding", layout="grouped").weights().heads([4, 0, 1])
    if name == "dropout":
        return Case(mask="Padding", layout="grouped", bias="ALiBi", dropout=0.4).weights()
    return Case(layout=name).weights()


LAZY = [
    "averaged",
    "one of the heads",
    "some of the heads",
    "dropout",
    "plain",
    "crossed",
    "ones",
    "many values",
]


@st.composite
def indices(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    """Indices for a tensor of this shape, sometimes out of range."""
    kinds = ["number", "slice", "slice"]
    if draw(st.booleans()):
        kinds += ["list", "tensor", "array", "mask", "none"]
    parts: list[Any] = []
    axis = 0
    for kind in draw(st.lists(st.sampled_from(kinds), max_size=len(shape) + 1)):
        size = shape[axis] if axis < len(shape) else 1
        rarely = draw(st.integers(0, 29)) == 29
        number = st.integers(-size - 2, size + 1) if rarely else st.integers(-size, size - 1)
        axis += kind != "none"
        if kind == "none":
            parts.append(None)
        elif kind == "number":
            parts.append(draw(number))
        elif kind == "slice":
            bound = st.none() | st.integers(-size - 1, size + 1)
            step = st.integers(-1, 0) if rarely else st.none() | st.integers(1, 3)
            parts.append(slice(draw(bound), draw(bound), draw(step)))
        elif kind == "mask":  # over one axis or several
            axes = shape[axis - 1 : axis + draw(st.integers(0, 1))] if axis <= len(shape) else (2,)
            seen = draw(st.lists(st.booleans(), min_size=math.prod(axes), max_size=math.prod(axes)))
            parts.append(torch.tensor(seen).reshape(axes))
            axis += len(axes) - 1
        else:
            sizes = (3,) if kind == "list" else draw(st.sampled_from([(), (1,), (3,), (2, 1), (2, 3), (0,)]))
            numbers = draw(st.lists(number, min_size=math.prod(sizes), max_size=math.prod(sizes)))
            tensor = torch.tensor(numbers, dtype=torch.long).reshape(sizes)
            parts.append({"list": tensor.tolist(), "tensor": tensor, "array": tensor.numpy()}[kind])
    if draw(st.booleans()):
        parts.insert(draw(st.integers(0, len(parts))), ...)
    return parts[0] if len(parts) == 1 and draw(st.booleans()) else tuple(parts)


def outcome(x: Any, index: Any) -> Tensor | Exception:
    try:
        return x[index]
    except Exception as error:
        return error


@functools.cache
def with_dense(name: str) -> tuple[regard.Weights, Tensor]:
    weights = lazy(name)
    return weights, weights.dense()


@pytest.mark.parametrize("name", LAZY)
@given(data=st.data())
def test_indexing_is_that_of_a_tensor(name, data):
    weights, dense = with_dense(name)
    index = data.draw(indices(tuple(weights.shape)))
    expected, actual = outcome(dense, index), outcome(weights, index)
    if isinstance(expected, Exception):
        assert isinstance(actual, type(expected)), (actual, expected)
    else:
        assert isinstance(actual, Tensor), actual
        close(actual, expected)


INDICES = [
    np.s_[0, 2, 3],
    np.s_[1, 2, 4, 6],
    np.s_[..., 2],
    np.s_[-1, ..., 1:4:2, :],
    np.s_[:, None, 1],
    np.s_[[1, 0]],
    np.s_[[[0, 1]], [2]],
    np.s_[0:0],
    np.s_[:, :, :, 9:],
    np.s_[np.int64(1), np.array([1, 2])],
    np.s_[torch.tensor(1)],
    np.s_[True],
    np.s_[()],
    np.s_[...],
    np.s_[:, [0, 2], 1:3, [4, 4]],
]


@looped("index", INDICES, ids=str)
def test_typical_indices(index):
    weights = Case(mask="Causal").weights()
    close(weights[index], weights.dense()[index])


def test_a_boolean_matrix_as_an_index():
    weights = Case(layout="plain").weights()
    dense = weights.dense()
    close(weights[dense > 0.2], dense[dense > 0.2])


@looped(
    "index",
    [
        5,
        -3,
        (0, 3),
        (0, 0, 0, 7),
        (0, 0, 0, 0, 0),
        [0, 2],
        torch.tensor([-3]),
        torch.ones(3).bool(),
    ],
    ids=str,
)
def test_out_of_range_indices_raise_as_for_a_tensor(index):
    weights = Case().weights()
    with pytest.raises(IndexError):
        weights.dense()[index]
    with pytest.raises(IndexError):
        weights[index]


@many_tiles
@looped(
    "case",
    [
        Case(layout="heads", mask="dense", bias="ALiBi", normalize="sinks"),
        Case(mask="Padding", bias="dense", score="Additive"),
        Case(layout="grouped", mask="two terms", bias="several", normalize="sinks"),
        Case(layout="grouped", mask="Padding", dropout=0.3),
        Case(layout="one key", normalize="Entmax15"),
        Case(layout="many values", bias="ClippedRelativeBias"),
    ],
    ids=str,
)
def test_some_heads_are_those_of_the_dense_matrix(case):
    weights = case.weights()
    for index in (0, 2, -1, [0], [2, 0], [-1, 1, 1], [], slice(2), slice(None), slice(2, 0), range(2)):
        some, dense = weights.heads(index), weights.dense()[..., index, :, :]
        close(some.dense(), dense)
        assert some.shape == dense.shape
        close(some.received(), dense.sum(-2))
        close(some @ randn(K, 3), dense @ randn(K, 3))
        close(some.scores(), weights.scores()[..., index, :, :])


def test_one_head_can_be_selected_by_any_integer():
    weights = Case().weights()
    for index in (np.int64(1), torch.tensor(1)):
        close(weights.heads(index).dense(), weights.dense()[:, 1])


def test_one_head_of_a_batch_can_be_indexed():
    weights = Case().weights()
    close(weights.heads(1)[1, 2], weights.dense()[1, 1, 2])
    close(weights.heads(1)[[1, 0], 2], weights.dense()[[1, 0], 1, 2])


@cases
def test_one_sequence_of_a_batch_equals_the_dense_one(case):
    weights = case.weights()
    if weights.ndim - 2 - weights.has_heads < 1:
        with pytest.raises(regard.ArgumentError, match="already belong to one sequence"):
            weights.batch(0)
        return
    dense = weights.dense()
    for index in (0, -1):
        one = weights.batch(index)
        close(one.dense(), dense[index], case.dtype)
        close(one.received(), weights.received()[index], case.dtype)
        close(one.pool(2, 2), weights.pool(2, 2)[index], case.dtype)
    with pytest.raises(IndexError, match="out of range"):
        weights.batch(len(weights))


@pytest.mark.parametrize("joined", [False, True])
def test_one_sequence_or_head_does_not_keep_the_others_alive(joined):
    """Also if query and key are views of one tensor."""
    x = torch.randn(11, 3, 50, 14)
    query, key = (x[..., :7], x[..., 7:]) if joined else (x, x)
    weights = regard.attend(query, key, key, mask=regard.Padding(torch.arange(11) + 20))[1]
    for one, parts in ((weights.batch(1), 11), (weights.heads(1), 3), (weights.heads(1).batch(1), 33)):
        # a head copies query and key, which may have shared memory
        assert one.held <= 2 * weights.held / parts + 8 * 11
        assert len(pickle.dumps(one)) <= 2 * weights.held / parts + 4000
    assert weights.batch(1).held <= weights.held / 11
    close(pickle.loads(pickle.dumps(weights.batch(1))).dense(), weights.dense()[1])


def test_a_batch_of_one_sequence_is_not_copied():
    x = torch.randn(1, 3, 5, 7)
    weights = regard.attend(x, x, x)[1]
    assert weights.batch(0).problem["query"].data_ptr() == x.data_ptr()


def test_one_sequence_of_a_batch_has_its_gradient():
    x, y = (torch.randn(3, 2, 5, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for key in (x, x.detach(), y):
        weights = regard.attend(x, key, key)[1]
        scale = torch.randn(2, 5, 5, dtype=torch.float64)
        actual = torch.autograd.grad((weights.batch(1).dense() * scale).sum(), x)[0]
        wanted = torch.autograd.grad((weights.dense()[1] * scale).sum(), x)[0]
        torch.testing.assert_close(actual, wanted)


def test_one_head_of_a_batch_has_no_heads_axis():
    head = Case().weights().heads(1)
    with pytest.raises(regard.ArgumentError, match="heads"):
        head.heads(0)
    with pytest.raises(regard.ArgumentError, match="heads"):
        head.mean("heads")


def test_a_batch_of_one_can_be_sliced_to_empty():
    assert Case(layout="ones").weights()[0:0].shape == (0, 1, Q, K)


def test_an_out_of_range_head_is_an_index_error():
    for index in (G, -G - 1, [0, G]):
        with pytest.raises(IndexError):
            Case().weights().heads(index)


@many_tiles
@few
def test_selected_rows_and_leading_indices_equal_the_dense_ones(case):
    weights, dense = case.weights(), case.weights().dense()
    close(weights.rows(slice(1, 4)).dense(), dense[..., 1:4, :], case.dtype)
    close(weights.rows(torch.tensor([3, 0])).dense(), dense[..., [3, 0], :], case.dtype)
    lead = [slice(0, 1)] * len(case.lead)
    part = weights.part(lead, slice(2, 3))
    close(part.dense(), dense[(*lead, ..., slice(2, 3), slice(None))], case.dtype)


@many_tiles
@few
def test_tiles_cover_the_matrix(case):
    weights = case.weights()
    actual = torch.zeros(*weights.problem_lead, *weights.shape[-2:], dtype=weights.dtype)
    for tile, block in weights.tiles():
        actual[(*tile.lead, ..., tile.rows, tile.keys)] = block
    close(actual.reshape(weights.shape), weights.dense(), case.dtype)


def test_the_mean_over_heads_is_marked():
    weights = Case().weights()
    assert not weights.is_head_mean
    assert weights.mean("heads").is_head_mean
    assert weights.mean("heads").problem_lead == (B,)


def test_the_problem_holds_the_inputs_of_the_call():
    query, key, value = Case().tensors()
    problem = regard.attend(query, key, value, score=regard.Dot())[1].problem
    assert torch.equal(problem["query"].reshape(query.shape), query)
    assert problem.config.family == "dot"
    assert "value" not in problem.tensors


@many_tiles
@few
def test_the_mean_over_heads_equals_that_of_the_dense_matrix(case):
    weights = case.weights()
    if not case.lead:
        with pytest.raises(regard.ArgumentError, match="heads"):
            weights.mean("heads")
        return
    mean, dense = weights.mean("heads"), weights.dense().mean(-3)
    close(mean.dense(), dense, case.dtype)
    assert mean.shape == dense.shape
    close(mean[..., 1, :], dense[..., 1, :], case.dtype)
    close(mean.received(), dense.sum(-2), case.dtype)
    close(mean.entropy(), entropy(dense), case.dtype)
    close(mean.pool(2, 3), pooled(dense, 2, 3), case.dtype)
    close(mean @ randn(K, 3).to(dense), dense @ randn(K, 3).to(dense), case.dtype)
    check_top(mean.topk(3), dense)
    close(weights.heads([0, 1]).mean("heads").dense(), weights.dense()[..., :2, :, :].mean(-3), case.dtype)


def test_a_mean_is_taken_once_and_over_the_heads():
    weights = Case().weights()
    for refused in (
        lambda: weights.mean("batch"),
        lambda: weights.mean("heads").mean("heads"),
        lambda: weights.mean("heads").heads(0),
        lambda: weights.mean("heads").scores(),
    ):
        with pytest.raises(regard.ArgumentError, match="heads"):
            refused()


# Reductions


def check_top(top: regard.TopK, dense: Tensor) -> None:
    """Each row has the largest weights in order and their keys, as in `torch.topk`; ties in any order."""
    values, keys = top
    assert values.dtype == dense.dtype
    assert keys.dtype is torch.long
    torch.testing.assert_close(values, dense.topk(keys.shape[-1]).values)
    torch.testing.assert_close(values, dense.gather(-1, keys))  # raises for an index that is not a key
    assert (keys.sort(-1).values.diff(dim=-1) > 0).all()  # no key is listed twice


@many_tiles
@few
def test_topk_returns_the_largest_weights_in_order(case):
    weights = case.weights()
    for n in (1, 3, K):
        top = weights.topk(n)
        assert top.indices.shape == (*weights.shape[:-1], n)
        check_top(top, weights.dense())


def test_topk_ranks_negative_weights():
    case = Case(normalize="Mean", mask="Causal")
    weights = case.weights()
    assert (weights.dense() < 0).any()
    check_top(weights.topk(4), weights.dense())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda top: top._replace(values=top.values.flip(-1)),
        lambda top: top._replace(indices=top.indices.roll(1, -2)),
        lambda top: top._replace(indices=top.indices[..., :1].expand(top.indices.shape)),
        lambda top: top._replace(values=top.values + (top.values == 0)),
    ],
)
def test_a_wrong_topk_is_detected(spoil):
    case = Case(mask="Window")
    weights = case.weights()
    with pytest.raises((AssertionError, RuntimeError)):
        check_top(spoil(weights.topk(3)), weights.dense())


@pytest.mark.parametrize("k", [0, K + 1])
def test_topk_rejects_more_entries_than_keys_and_none(k):
    with pytest.raises(regard.ArgumentError, match=rf"k={k} .* {K} keys.*min\(k, weights.shape\[-1\]\)"):
        Case().weights().topk(k)


@pytest.mark.parametrize("value", [(2, K, 3), (5, 1, 1, K, 3), (K, 3)], ids=str)
def test_value_may_have_more_axes_than_key(value):
    query, key, value = torch.randn(3, 2, Q, 7), torch.randn(3, 1, K, 7), torch.randn(value)
    output, weights = regard.attend(query, key, value)
    reference = regard.attend(query, key, value, implementation="reference")[1].dense()
    torch.testing.assert_close(weights.dense(), reference)
    torch.testing.assert_close(weights[..., 0, :], reference[..., 0, :])
    assert weights.shape[:-2] == output.shape[:-2]


def test_topk_without_keys_is_empty():
    weights = regard.attend(torch.ones(2, 3), torch.ones(0, 3), torch.ones(0, 3))[1]
    assert weights.topk(0).indices.shape == (2, 0)
    with pytest.raises(IndexError, match="no maximum along axis -1"):
        weights.argmax(-1)


@many_tiles
@few
def test_argmax_is_the_key_of_the_largest_weight(case):
    weights = case.weights()
    dense, keys = weights.dense(), weights.argmax(-1)
    assert torch.equal(dense.gather(-1, keys[..., None])[..., 0], dense.max(-1).values)


def entropy(dense: Tensor) -> Tensor:
    return -(dense * torch.where(dense > 0, dense, 1.0).log()).sum(-1)


@many_tiles
@few
def test_entropy_is_that_of_the_rows(case):
    weights = case.weights()
    dense = weights.dense()
    close(weights.entropy(), entropy(dense), case.dtype)


def test_entropy_of_one_key_and_of_equal_keys():
    zeros = torch.zeros(4, 2)
    causal = regard.attend(zeros, zeros, zeros, mask=regard.Causal())[1].entropy()
    torch.testing.assert_close(causal, torch.tensor([1.0, 2.0, 3.0, 4.0]).log())


@many_tiles
@few
def test_received_is_the_sum_of_the_columns(case):
    weights = case.weights()
    close(weights.received(), weights.dense().sum(-2), case.dtype)


def pooled(dense: Tensor, rows: int, columns: int) -> Tensor:
    """The mean of each block; block sizes differ by at most one."""

    def edges(size: int, parts: int) -> list[tuple[int, int]]:
        parts = min(parts, size)
        return [(i * size // parts, (i + 1) * size // parts) for i in range(parts)]

    result = [
        [dense[..., a:b, c:d].mean((-2, -1)) for c, d in edges(dense.shape[-1], columns)]
        for a, b in edges(dense.shape[-2], rows)
    ]
    return torch.stack([torch.stack(row, -1) for row in result], -2)


@many_tiles
@few
def test_pool_is_the_mean_of_the_blocks(case):
    weights = case.weights()
    dense = weights.dense()
    for rows, columns in ((1, 1), (2, 3), (5, 7), (4, 1), (99, 4), (99, 99)):
        close(weights.pool(rows, columns), pooled(dense, rows, columns), case.dtype)


def test_pool_into_equal_blocks():
    query, key = randn(6, D), randn(8, D)
    weights = regard.attend(query, key, key, mask=regard.Causal())[1]
    close(weights.pool(3, 2), weights.dense().reshape(3, 2, 2, 4).mean((1, 3)))


PARTS = [
    (slice(None), slice(None)),
    (slice(1, 4), slice(2, 6)),
    (slice(-2, None), slice(0, 1)),
    (slice(3, 4), slice(None)),
    (slice(0, 99), slice(-99, 5)),
]


@many_tiles
@few
def test_pool_of_a_part_equals_the_dense_pool(case):
    weights = case.weights()
    dense = weights.dense()
    for rows, keys in PARTS:
        for size in ((1, 1), (2, 3), (99, 99)):
            actual = weights.pool(*size, within=(rows, keys))
            close(actual, pooled(dense[..., rows, keys], *size), case.dtype)


@pytest.mark.parametrize(
    "heads", [lambda w: w.mean("heads"), lambda w: w.heads(1), lambda w: w.heads([2, 0])]
)
def test_pool_of_a_part_of_some_heads(heads):
    weights = heads(Case().weights())
    close(weights.pool(2, 2, within=(slice(1, 4), slice(2, 6))), pooled(weights.dense()[..., 1:4, 2:6], 2, 2))


@looped("dtype", [torch.float32, torch.bfloat16, torch.float64])
@looped(
    "options",
    [
        {},
        {"mask": regard.Causal()},
        {"mask": regard.Window(9), "normalize": regard.Entmax15()},
        {"normalize": regard.Sigmoid()},
        {"normalize": regard.Softmax1()},
        {"bias": regard.ALiBi(heads=4)},
        {"score": regard.Gaussian(3.0), "normalize": regard.Sparsemax()},
    ],
)
@looped("heads", [lambda w: w, lambda w: w.mean("heads")])
def test_pool_of_wide_bands(dtype, options, heads):
    """Blocks of many rows are summed without materializing their weights."""
    query, key = randn(B, 4, 131, D).to(dtype), randn(B, 2, 157, D).to(dtype)
    weights = heads(regard.attend(query, key, key, **options)[1])
    dense = weights.dense().double()
    for size, part in (((3, 5), (slice(None), slice(None))), ((2, 4), (slice(20, 120), slice(11, 150)))):
        actual = weights.pool(*size, within=part).double()
        torch.testing.assert_close(
            actual,
            pooled(dense[..., *part], *size),
            atol=1e-6,
            rtol=1e-2 if dtype is torch.bfloat16 else 1e-4,
        )


def test_pool_of_an_empty_part_is_empty():
    weights = Case().weights()
    assert weights.pool(2, 3, within=(slice(2, 2), slice(0, 4))).shape[-2:] == (0, 3)
    assert weights.pool(2, 3, within=(slice(4, 2), slice(6, 6))).shape[-2:] == (0, 0)


def test_pool_of_a_part_next_to_a_broken_key():
    """A row that sees a NaN is NaN everywhere, even in parts without that key."""
    query, key = randn(Q, D).float(), randn(K, D).float()
    key[0] = math.nan
    weights = regard.attend(query, key, key, mask=regard.Causal())[1]
    part = weights.pool(9, 9, within=(slice(2, 4), slice(1, 3)))
    torch.testing.assert_close(part, weights.dense()[2:4, 1:3], equal_nan=True)


@pytest.mark.parametrize("part", [slice(0, 4, 2), 3, None])
def test_pool_takes_a_part_as_slices(part):
    with pytest.raises(regard.ArgumentError, match="without steps"):
        Case().weights().pool(2, 2, within=(slice(None), part))


def test_pool_of_a_part_can_be_differentiated():
    query = randn(Q, D).requires_grad_()
    key = randn(K, D)
    part = slice(1, 4), slice(2, 6)
    (actual,) = torch.autograd.grad(
        regard.attend(query, key, key)[1].pool(2, 2, within=part).square().sum(), query
    )
    dense = (query @ key.mT / math.sqrt(D)).softmax(-1)
    (expected,) = torch.autograd.grad(pooled(dense[part], 2, 2).square().sum(), query)
    close(actual, expected)


@pytest.mark.parametrize("size", [(0, 3), (3, 0), (-1, 3)])
def test_pool_needs_a_row_and_a_column(size):
    with pytest.raises(regard.ArgumentError, match="at least 1"):
        Case().weights().pool(*size)


# Products


@many_tiles
@pytest.mark.parametrize(
    "case", [Case(mask="Padding"), Case(layout="one query"), Case(layout="one key")], ids=str
)
def test_products_broadcast_over_the_leading_axes(case):
    weights = case.weights()
    dense = weights.dense()
    for lead in ((), (1,), (G,), (1, 1), (B, 1), (1, G), (B, G)):
        x, y = randn(*lead, K, 3), randn(*lead, Q, 3)
        close(weights @ x, dense @ x)
        close(weights.T @ y, dense.mT @ y)


@many_tiles
@few
def test_products_with_vectors_and_matrices(case):
    weights = case.weights()
    dense = weights.dense()
    for x in (randn(K), randn(K, 3), randn(K, 1), randn(K, 0), randn(3, K).mT):
        close(weights @ x.to(dense), dense @ x.to(dense), case.dtype)
    for y in (randn(Q), randn(Q, 3), randn(Q, 0)):
        close(weights.T @ y.to(dense), dense.mT @ y.to(dense), case.dtype)


def test_products_take_other_dtypes():
    weights = Case(dtype=torch.float32).weights()
    ones = torch.ones(K, dtype=torch.long)
    close(weights @ ones, weights.dense().sum(-1), torch.float32)
    assert (weights @ randn(K, 3)).dtype is torch.float32


WRONG = [(), (Q,), (K + 1, 3), (0, 3), (1, 3), (2, K, 3), (B + 1, 1, K, 3), (5, B, G, K, 3), (1, B, G, K, 3)]


@looped("size", WRONG, ids=str)
def test_a_product_that_does_not_fit_is_a_shape_error(size):
    with pytest.raises(regard.ShapeError, match=str(K)):
        Case().weights() @ torch.ones(size)


@looped("size", [(), (K,), (Q + 1, 3), (2, Q, 3), (1, B, G, Q, 3)], ids=str)
def test_a_transposed_product_that_does_not_fit_is_a_shape_error(size):
    with pytest.raises(regard.ShapeError, match=str(Q)):
        Case().weights().T @ torch.ones(size)


@pytest.mark.parametrize(
    ("x", "name"),
    [(np.ones(K), "ndarray"), ([1.0] * K, "list"), (2.0, "float"), (None, "None")],
)
def test_a_factor_that_is_not_a_tensor_is_rejected(x, name):
    for operator in (Case().weights(), Case().weights().T):
        with pytest.raises(regard.DTypeError, match=name):
            operator @ x


def test_the_transpose_is_the_transpose():
    weights = Case(mask="Causal").weights()
    assert weights.T.shape == weights.mT.shape == (B, G, K, Q)
    assert torch.equal(weights.T.dense(), weights.dense().mT)
    assert weights.T.T is weights


@many_tiles
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_zero_weights_ignore_their_values(poison):
    for weights in (Case(mask="Causal").weights(), Case(normalize="Sparsemax", score="Dot").weights()):
        dense, x = weights.dense(), randn(K, 3)
        touched = dense[..., -1] != 0
        assert not touched.all()
        assert touched.any()
        expected = dense @ x.index_fill(0, torch.tensor(K - 1), 0.0)
        x[K - 1] = poison
        actual = weights @ x
        assert not actual[touched].isfinite().any()
        close(actual[~touched], expected[~touched])


@many_tiles
def test_zero_weights_ignore_their_values_in_the_transpose():
    weights = Case(mask="Causal").weights()
    y = randn(Q, 3)
    expected = weights.dense().mT @ y
    y[0] = math.nan
    actual = weights.T @ y
    assert actual[..., :3, :].isnan().all()
    close(actual[..., 3:, :], expected[..., 3:, :])


@many_tiles
def test_nan_in_a_hidden_key_does_not_leak():
    query, key, value = Case().tensors()
    mask = regard.Causal() & regard.Padding([4, 5])
    clean = regard.attend(query, key, value, mask=mask)[1]
    key = key.clone()
    key[:, :, 5:] = math.nan
    weights = regard.attend(query, key, value, mask=mask)[1]
    close(weights.dense(), clean.dense())
    close(weights.entropy(), clean.entropy())
    close(weights.pool(2, 2), clean.pool(2, 2))
    assert torch.equal(weights.topk(3).indices, clean.topk(3).indices)


# Derivatives

LOOKS: dict[str, tuple[Callable[[regard.Weights], Tensor], Callable[[Tensor], Tensor]]] = {
    "dense": (lambda weights: weights.dense(), lambda dense: dense),
    "row": (lambda weights: weights[..., 3, :], lambda dense: dense[..., 3, :]),
    "picked": (lambda weights: weights[..., [3, 1], [2, 2]], lambda dense: dense[..., [3, 1], [2, 2]]),
    "head": (lambda weights: weights.heads([1, 0]).dense(), lambda dense: dense[..., [1, 0], :, :]),
    "mean": (lambda weights: weights.mean("heads").dense(), lambda dense: dense.mean(-3)),
    "entropy": (lambda weights: weights.entropy(), lambda dense: entropy(dense)),
    "received": (lambda weights: weights.received(), lambda dense: dense.sum(-2)),
    "pool": (lambda weights: weights.pool(2, 3), lambda dense: pooled(dense, 2, 3)),
    "top": (lambda weights: weights.topk(2).values, lambda dense: dense.topk(2).values),
    "product": (lambda weights: weights @ randn(K, 3), lambda dense: dense @ randn(K, 3)),
    "transposed": (lambda weights: weights.T @ randn(Q, 3), lambda dense: dense.mT @ randn(Q, 3)),
}
DIFFERENTIABLE = [
    Case(mask="Causal"),
    Case(mask="two terms", bias="ALiBi", normalize="sinks", layout="grouped"),
    Case(mask="Padding", score="Additive", normalize="Entmax15", layout="grouped"),
    Case(mask="Causal", score="softcap", normalize="Sparsemax"),
    Case(score="Gaussian", normalize="Sigmoid", layout="one key"),
    Case(score="function", normalize="Relu", bias="dense"),
]


def gradients(result: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(result, inputs, randn(*result.shape), retain_graph=True)


@many_tiles
@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=str)
@pytest.mark.sampled(2)
def test_gradients_are_those_of_the_dense_formula(case):
    weights, query, key, dense = grad_ready(case)
    for lazily, densely in LOOKS.values():
        actual, expected = gradients(lazily(weights), query, key), gradients(densely(dense), query, key)
        close(actual[0], expected[0])
        close(actual[1], expected[1])


def test_a_wrong_gradient_is_detected():
    weights, query, _, dense = grad_ready(Case(mask="Causal"))
    with pytest.raises(AssertionError):
        close(gradients(weights.dense(), query)[0], gradients(dense * 1.001, query)[0])


@pytest.mark.parametrize("options", [{"dropout": 0.5}, {"score": regard.Dot()}], ids=["dropped", "underflow"])
def test_the_gradient_of_entropy_is_finite_where_weights_are_zero(options):
    query, key = (100 * randn(Q, D)).requires_grad_(), randn(K, D)
    if "dropout" in options:
        options = {**options, "generator": torch.Generator().manual_seed(0), "score": regard.ScaledDot(0.01)}
    weights = regard.attend(query, key, key, **options)[1]
    assert (weights.dense() == 0).any()
    assert weights.entropy().isfinite().all()
    assert torch.autograd.grad(weights.entropy().sum(), query)[0].isfinite().all()


def test_parameters_receive_gradients_through_the_weights():
    sink, bias, score = regard.Sink(G).double(), module(regard.T5Bias, G), module(regard.Additive, D, D, 17)
    query, key, value = Case().tensors()
    weights = regard.attend(query, key, value, score=score, bias=bias, normalize=sink)[1]
    leaves = [sink.score, bias.table, score.query_map, score.key_map, score.vector]
    assert all(grad.abs().sum() > 0 for grad in gradients(weights.dense(), *leaves))


def test_products_are_differentiable_in_the_other_factor():
    weights = Case(mask="Causal").weights()
    x, y = randn(K, 3).requires_grad_(), randn(Q, 3).requires_grad_()
    close(gradients(weights @ x, x)[0], gradients(weights.dense() @ x, x)[0])
    close(gradients(weights.T @ y, y)[0], gradients(weights.dense().mT @ y, y)[0])


def test_detached_weights_have_no_gradient():
    weights, *_ = grad_ready(Case(mask="Causal", bias="ClippedRelativeBias"))
    assert weights.dense().requires_grad
    still = weights.detach()
    assert not still.dense().requires_grad
    close(still.dense(), weights.dense())
    with torch.no_grad():
        assert not weights.dense().requires_grad
        close(weights.dense(), still.dense())


# Saving

KEPT = [
    *(Case(normalize=name, mask="Causal") for name in NORMALIZERS),
    *(Case(score=name) for name in SCORES),
    *(Case(mask=name) for name in MASKS),
    *(Case(bias=name) for name in BIASES),
    *(Case(layout=name) for name in LAYOUTS),
    *(Case(dtype=dtype) for dtype in LOW),
    Case(layout="grouped", mask="two terms", bias="several", normalize="sinks", dropout=0.3),
    Case(layout="grouped", score="Additive", mask="Padding", dropout=0.3),
]
kept = looped("case", list(dict.fromkeys(KEPT)), ids=str)


def same(actual: regard.Weights, weights: regard.Weights) -> None:
    """Bitwise equal, without gradients: with them, τ is rounded differently."""
    weights = weights.detach()
    assert actual.shape == weights.shape
    assert actual.dtype is weights.dtype
    assert torch.equal(actual.detach().dense(), weights.dense())
    assert torch.equal(actual.detach().topk(3).indices, weights.topk(3).indices)


@kept
def test_saved_weights_come_back(case, tmp_path):
    weights = case.weights()
    path = weights.save(tmp_path / "weights.safetensors")
    assert path == tmp_path / "weights.safetensors"
    same(regard.Weights.load(path), weights)
    same(regard.Weights.load(str(path)), weights)


@looped(
    "part",
    [
        lambda weights: weights.mean("heads"),
        lambda weights: weights.heads(4),
        lambda weights: weights.heads([4, 0]),
        lambda weights: weights.heads(slice(1, 5)).mean("heads"),
        lambda weights: weights.detach(),
    ],
    ids=["mean", "head", "heads", "mean of heads", "detached"],
)
@looped("dropout", [0.0, 0.3])
def test_saved_parts_come_back(part, dropout, tmp_path):
    weights = part(Case(layout="grouped", bias="ALiBi", mask="Padding", dropout=dropout).weights())
    same(regard.Weights.load(weights.save(tmp_path / "part")), weights)
    same(copy.deepcopy(weights), weights)
    same(pickle.loads(pickle.dumps(weights)), weights)


def test_loaded_weights_call_themselves_the_same(tmp_path):
    for name in NORMALIZERS:
        weights = Case(normalize=name, layout="grouped", dtype=torch.float32).weights().detach()
        again = regard.Weights.load(weights.save(tmp_path / "weights"))
        assert repr(again).split(";")[0] == repr(weights).split(";")[0]


def test_self_attention_with_a_plain_dot_can_be_saved(tmp_path):
    x = randn(Q, D)  # query and key are one tensor
    weights = regard.attend(x, x, x, score=regard.Dot())[1]
    same(regard.Weights.load(weights.save(tmp_path / "weights")), weights)


def test_a_slice_of_something_large_is_saved_small(tmp_path):
    large = torch.zeros(1000, 64, D)
    weights = regard.attend(large[0], large[1], large[1], score=regard.Dot())[1]
    assert weights.save(tmp_path / "weights").stat().st_size < 20_000


def test_weights_that_require_gradients_can_be_saved(tmp_path):
    weights, *_ = grad_ready(Case())
    same(regard.Weights.load(weights.save(tmp_path / "weights")), weights.detach())


def test_save_makes_the_folders_it_needs(tmp_path):
    assert Case().weights().save(tmp_path / "a" / "b" / "weights").is_file()


def test_save_respects_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        path = Case().weights().save(tmp_path / "weights")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


class Squares(regard.Normalizer):
    sums_to_one = False

    def tau(self, scores):
        return torch.zeros_like(scores[..., :1])

    def phi(self, x):
        return x.clamp(min=0) ** 2

    def slope(self, x):
        return 2 * x.clamp(min=0)


def test_weights_of_ones_own_normalizer_are_lazy_too_but_cannot_be_saved(tmp_path):
    query, key, value = Case().tensors()
    weights = regard.attend(query, key, value, normalize=Squares())[1]
    close(weights.dense(), (query @ key.mT / math.sqrt(D)).relu() ** 2)
    with pytest.raises(regard.ArgumentError, match="Squares"):
        weights.save(tmp_path / "weights")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", ["replace", "fsync", "chmod"])
@pytest.mark.parametrize(
    "failure", [OSError("the disk is full"), KeyboardInterrupt()], ids=["full", "interrupted"]
)
def test_a_failed_save_keeps_the_old_file(step, failure, tmp_path, monkeypatch):
    path = Case().weights().save(tmp_path / "weights")
    before = path.read_bytes()

    def fail(*args: Any, **options: Any) -> None:
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with pytest.raises(type(failure)):
            Case(mask="Causal").weights().save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_path_that_cannot_be_written_is_an_os_error(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "weights", tmp_path / "folder"):
        with pytest.raises(OSError, match=str(tmp_path)):
            Case().weights().save(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        regard.Weights.load(tmp_path / "nothing")


class Trap:
    """An object whose unpickling runs code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_no_pickle_is_ever_opened(tmp_path):
    pickle.loads(pickle.dumps(Trap(tmp_path / "proof")))
    assert (tmp_path / "proof").exists()  # the trap works
    (tmp_path / "pickle").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    torch.save(Trap(tmp_path / "sprung"), tmp_path / "torch")
    for name in ("pickle", "torch"):
        with pytest.raises(regard.ArgumentError, match=name):
            regard.Weights.load(tmp_path / name)
    assert not (tmp_path / "sprung").exists()


def test_files_that_hold_no_weights_are_rejected(tmp_path):
    whole = Case().weights().save(tmp_path / "whole").read_bytes()
    contents = {"empty": b"", "text": b"weights", "short": whole[:4], "header": whole[:40], "cut": whole[:-9]}
    contents |= {"longer": whole + b"more", "noise": b"\xff" * 100, "spoilt": b"\xff" + whole[1:]}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(regard.ArgumentError, match=name):
            regard.Weights.load(tmp_path / name)


def test_safetensors_files_of_others_are_rejected(tmp_path):
    for name, metadata in {"none": None, "other": {"format": "pt"}, "no json": {"regard": "hello"}}.items():
        save_file({"query": torch.ones(2, 3)}, tmp_path / name, metadata)
        with pytest.raises(regard.ArgumentError, match=name):
            regard.Weights.load(tmp_path / name)


def metadata_of(path: Path) -> dict[str, Any]:
    """The metadata of a saved file."""
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return json.loads(header["__metadata__"]["regard"])


def sign_and_save(text: Any, tensors: dict[str, Tensor], path: Path) -> None:
    """Write a file with a valid checksum: inconsistent content must be rejected all the same."""
    if isinstance(text, dict):
        rest = {name: part for name, part in text.items() if name != "checksum"}
        text = {**rest, "checksum": checksum(tensors, tensors.__getitem__, json.dumps(rest))}
    save_file(tensors, path, {"regard": json.dumps(text)})


def with_call(text: dict[str, Any], index: int, field: str) -> dict[str, Any]:
    """Replace a field of the call: normalizer, family, scale, softcap, dropout, terms or names."""
    fields = text["call"].split("|")
    fields[index] = field
    return {**text, "call": "|".join(fields)}


INVALID_METADATA: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda text: [text],
    "a number": lambda text: 5,
    "a later format": lambda text: {**text, "format": "weights 9"},
    "an older format": lambda text: {**text, "format": "weights 3"},
    "no lead": lambda text: {name: part for name, part in text.items() if name != "lead"},
    "no rows_per_key_head": lambda text: {n: part for n, part in text.items() if n != "rows_per_key_head"},
    "another lead": lambda text: {**text, "lead": [3, 3]},
    "unknown key": lambda text: {**text, "color": "blue"},
    "no call": lambda text: {name: part for name, part in text.items() if name != "call"},
    "short call": lambda text: {**text, "call": text["call"].partition("|")[2]},
    "no normalizer": lambda text: with_call(text, 0, ""),
    "unknown normalizer": lambda text: with_call(text, 0, "Strange 0x1p+0"),
    "too many numbers": lambda text: with_call(text, 0, "Hard 0x1p+0"),
    "invalid number": lambda text: with_call(text, 0, "Entmax soft"),
    "unknown family": lambda text: with_call(text, 1, "cousin"),
    "invalid terms": lambda text: with_call(text, 5, "many"),
    "other tensors": lambda text: with_call(text, 6, "query,key"),
}


@looped("how", INVALID_METADATA)
def test_inconsistent_metadata_is_rejected(how, tmp_path):
    path = Case(mask="Causal").weights().save(tmp_path / "weights")
    sign_and_save(INVALID_METADATA[how](metadata_of(path)), load_file(path), tmp_path / "spoilt")
    with pytest.raises(regard.ArgumentError) as refused:
        regard.Weights.load(tmp_path / "spoilt")
    assert "does not match its checksum" not in str(refused.value)


def test_older_formats_are_reported_as_old(tmp_path):
    path = Case(mask="Causal").weights().save(tmp_path / "weights")
    for old in ("weights 1", "weights 2", "weights 3"):
        sign_and_save({**metadata_of(path), "format": old}, load_file(path), tmp_path / "old")
        with pytest.raises(
            regard.ArgumentError, match=f"{old}.*older version of regard; save the weights again"
        ):
            regard.Weights.load(tmp_path / "old")


@pytest.mark.parametrize("missing", ["query", "key", "stop0"])
def test_a_file_with_a_missing_tensor_is_rejected(missing, tmp_path):
    path = Case(mask="Causal").weights().save(tmp_path / "weights")
    tensors = {name: tensor for name, tensor in load_file(path).items() if name != missing}
    sign_and_save(metadata_of(path), tensors, tmp_path / "spoilt")
    with pytest.raises(regard.ArgumentError) as refused:
        regard.Weights.load(tmp_path / "spoilt")
    assert "does not match its checksum" not in str(refused.value)


@kept
def test_copies_and_pickles_are_the_same_weights(case):
    weights = case.weights()
    for again in (copy.deepcopy(weights), copy.copy(weights), pickle.loads(pickle.dumps(weights))):
        same(again, weights)


@pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "not a leaf"])
def test_copies_of_weights_that_require_gradients(leaf):
    query, key, value = (t.requires_grad_() for t in Case().tensors())
    sinks = randn(G).requires_grad_()
    if not leaf:
        query, key, sinks = query * 1, key * 1, sinks * 1
    options = {"score": regard.Dot(), "normalize": regard.Softmax1(sinks), "bias": relative(G)}
    weights = regard.attend(query, key, value, **options)[1]
    for again in (copy.deepcopy(weights), pickle.loads(pickle.dumps(weights))):
        same(again, weights)
        assert not again.dense().requires_grad


def test_a_copy_outlives_the_tensors_it_was_made_of():
    query, key, value = Case(score="Dot").tensors()
    weights = regard.attend(query, key, value, score=regard.Dot())[1]
    dense, again = weights.dense(), copy.deepcopy(weights)
    key.zero_()
    query.zero_()
    assert torch.equal(again.dense(), dense)


def test_as_numpy():
    weights, *_ = grad_ready(Case(mask="Causal"))
    dense = weights.dense().detach()
    for array in (weights.numpy(), np.asarray(weights), np.array(weights, copy=True)):
        assert array.dtype == np.float64
        assert np.array_equal(array, dense)
    assert np.asarray(weights, dtype=np.float32).dtype == np.float32
    assert Case(dtype=torch.bfloat16).weights().numpy().dtype == np.float32


def test_to_a_device():
    weights = Case(mask="Causal", bias="ALiBi", dropout=0.3).weights()
    same(weights.to("cpu"), weights)
    same(weights.to(torch.device("cpu")), weights)
    assert weights.to("meta").device.type == "meta"
    assert weights.to("meta").shape == weights.shape


# Inputs modified in place

OPERATIONS: dict[str, Callable[[regard.Weights], Any]] = {
    "dense": lambda weights: weights.dense(),
    "numpy": lambda weights: np.asarray(weights),
    "row": lambda weights: weights[..., 0, :],
    "picked": lambda weights: weights[..., [0], :],
    "scores": lambda weights: weights.scores(),
    "topk": lambda weights: weights.topk(1),
    "argmax": lambda weights: weights.argmax(-1),
    "entropy": lambda weights: weights.entropy(),
    "received": lambda weights: weights.received(),
    "pool": lambda weights: weights.pool(2, 2),
    "rows": lambda weights: weights.rows(slice(1)),
    "part": lambda weights: weights.part([slice(1), slice(1)]),
    "tiles": lambda weights: list(weights.tiles()),
    "check_inputs": lambda weights: weights.check_inputs(),
    "product": lambda weights: weights @ randn(K),
    "transposed": lambda weights: weights.T @ randn(Q),
    "heads": lambda weights: weights.heads(0),
    "mean": lambda weights: weights.mean("heads"),
    "detach": lambda weights: weights.detach(),
    "to": lambda weights: weights.to("cpu"),
    "save": lambda weights: weights.save(os.devnull),
    "deepcopy": lambda weights: copy.deepcopy(weights),
    "pickle": lambda weights: pickle.dumps(weights),
}


@looped("operation", OPERATIONS)
@looped("changed", ["query", "key"])
def test_changed_tensors_are_detected(operation, changed):
    query, key, value = Case().tensors()
    weights = regard.attend(query, key, value, score=regard.Dot())[1]
    {"query": query, "key": key}[changed].mul_(2)
    with pytest.raises(regard.StaleError, match=changed):
        OPERATIONS[operation](weights)
    assert weights.shape == (B, G, Q, K)  # the shape is still available
    assert repr(weights)


HELD = [
    *(Case(score=name) for name in SCORES),
    *(Case(dtype=dtype, score="Dot") for dtype in LOW),
    *(Case(layout=name, score="Dot") for name in LAYOUTS),
    Case(mask="dense"),
    Case(bias="dense"),
    Case(bias="ClippedRelativeBias"),
    Case(normalize="sinks"),
]


@looped("part", ["all", "detached", "heads"])
@looped("case", HELD, ids=str)
def test_weights_are_never_silently_wrong(case, part):
    query, key, value = case.tensors()
    options = case.options()
    if isinstance(options["mask"], Tensor):
        options["mask"] = options["mask"].clone()
    inputs = {"query": query, "key": key, "mask": options["mask"], "bias": options["bias"]}
    weights = regard.attend(query, key, value, **options)[1]
    dense = weights.dense()
    if part == "detached":
        weights = weights.detach()
    elif part == "heads" and case.lead:
        weights = weights.heads(slice(None))
    held = [t for t in inputs.values() if isinstance(t, Tensor)]
    if case.bias == "ClippedRelativeBias":
        held.append(options["bias"].vector)
    if case.normalize == "sinks":
        held.append(options["normalize"].score)
    for tensor in held:
        tensor.zero_()
    with contextlib.suppress(regard.StaleError):
        close(weights.dense(), dense)


def test_changes_elsewhere_do_not_matter():
    query, key, value = Case(score="Dot").tensors()
    options = {"score": regard.Dot(), "mask": ROUGH.clone(), "bias": randn(Q, K)}
    output, weights = regard.attend(query, key, value, **options)
    dense = weights.dense()
    value.zero_()
    output.zero_()
    for seen in (
        weights.dense(),
        weights.scores(),
        weights.topk(2).values,
        weights.received(),
        weights[0, 0],
    ):
        seen.zero_()
    weights.numpy().fill(0)
    assert torch.equal(weights.dense(), dense)


def test_an_optimizer_step_is_detected():
    sink = regard.Sink(G)
    query, key, value = Case(dtype=torch.float32).tensors()
    weights = regard.attend(query, key, value, normalize=sink)[1]
    with torch.no_grad():
        sink.score.add_(1)
    with pytest.raises(regard.StaleError, match="sink"):
        weights.dense()


@pytest.mark.parametrize("score", ["Dot", "ScaledDot", "Additive"])
def test_inference_mode(score, tmp_path):
    case = Case(mask="Causal", bias="ALiBi", score=score)
    expected = case.dense()
    with torch.inference_mode():
        inside = regard.attend(*(t.clone() for t in case.tensors()), **case.options())[1]
        close(inside.dense(), expected)
        close(inside.heads([1]).dense(), expected[:, [1]])
        close(case.weights()[0, 1], expected[0, 1])
        outside = case.weights()
    for weights in (inside, outside):
        close(weights.dense(), expected)
        close(weights[0, 1, 2], expected[0, 1, 2])
        close(weights.mean("heads").entropy(), entropy(expected.mean(1)))
        same(copy.deepcopy(weights), weights)
        same(regard.Weights.load(weights.save(tmp_path / "weights")), weights)
        x = randn(K, 3).requires_grad_()
        close(gradients(weights @ x, x)[0], gradients(expected @ x, x)[0])
    with torch.inference_mode():
        before = Case(mask="Causal").weights()
        close(before.heads(0).dense(), Case(mask="Causal").dense()[:, 0])


# Empty tensors

EMPTY = [(0, K, D, G), (Q, 0, D, G), (0, 0, D, G), (Q, K, 0, G), (Q, K, D, 0)]


@looped(("queries", "keys", "width", "heads"), EMPTY)
@looped("mask", [None, regard.Causal()], ids=repr)
@looped("normalize", [regard.Softmax(), regard.Entmax15(), regard.Softmax1()], ids=repr)
@looped("dropout", [0.0, 0.3])
def test_zero_sizes(queries, keys, width, heads, mask, normalize, dropout, tmp_path):
    query, key = randn(B, heads, queries, width), randn(B, heads, keys, width)
    weights = regard.attend(
        query, key, randn(B, heads, keys, E), mask=mask, normalize=normalize, dropout=dropout
    )[1]
    dense = weights.dense()
    assert dense.shape == weights.shape == (B, heads, queries, keys)
    assert weights.scores().shape == dense.shape
    if keys:
        assert weights.topk(min(3, keys)).indices.shape == (B, heads, queries, min(3, keys))
        assert weights.argmax(-1).shape == (B, heads, queries)
    assert weights.entropy().shape == (B, heads, queries)
    close(weights.received(), dense.sum(-2))
    close(weights @ randn(keys, 3), dense @ randn(keys, 3))
    close(weights.T @ randn(queries, 3), dense.mT @ randn(queries, 3))
    assert weights[0, ..., -1:].shape == dense[0, ..., -1:].shape
    assert weights[[1, 0]].shape == dense.shape
    assert weights.mean("heads").dense().shape == (B, queries, keys)
    assert torch.equal(regard.Weights.load(weights.save(tmp_path / "weights")).dense(), dense)
    assert weights.numpy().shape == dense.shape
    assert repr(weights)


def test_empty_batches_work():
    weights = regard.attend(randn(0, G, Q, D), randn(0, G, K, D), randn(0, G, K, E))[1]
    assert weights.dense().shape == weights[:, [0, 1, 2]].shape == (0, G, Q, K)
    assert weights.pool(2, 3).shape == (0, G, 2, 3)
    assert weights.received().shape == (0, G, K)


def test_pool_of_an_empty_matrix_is_empty():
    nothing = randn(0, D)
    assert regard.attend(nothing, randn(K, D), randn(K, D))[1].pool(2, 3).shape == (0, 3)
    assert regard.attend(randn(Q, D), nothing, nothing)[1].pool(2, 3).shape == (2, 0)


@looped("dtype", [torch.float32, torch.float64])  # by the kernels, and by tiles
@looped(
    "normalize",
    [regard.Softmax(2.0), regard.Softmax1(), regard.Sparsemax(), regard.Entmax15(), regard.Sigmoid()],
)
def test_weights_follow_from_scores_and_tau(normalize: regard.Normalizer, dtype: torch.dtype):
    query, key = randn(B, G, Q, D).to(dtype), randn(B, G, K, D).to(dtype)
    weights = regard.attend(query, key, key, normalize=normalize)[1]
    assert weights.tau.shape == (B, G, Q)
    again = normalize.phi(weights.scores() - weights.tau[..., None])
    torch.testing.assert_close(again, weights.dense(), rtol=1e-5, atol=1e-6)
    assert torch.equal(weights.heads(1).tau, weights.tau[:, 1])
    with pytest.raises(regard.ArgumentError, match="has no τ"):
        _ = weights.mean("heads").tau


def test_memory_is_linear_in_the_length():
    short, long = (
        regard.attend(x, x, x, mask=regard.Causal())[1].held
        for x in (torch.randn(64, 8), torch.randn(128, 8))
    )
    assert long == 2 * short


# Memory

WAYS: dict[str, dict[str, Any]] = {
    "fast path": {},
    "fast path, masked": {"mask": regard.Padding(torch.tensor([4, 5]))},
    "general path": {"bias": torch.zeros(5, 5)},
    "tiled": {"implementation": "tiled"},
    "reference": {"implementation": "reference"},
}
CUTS: dict[str, Callable[[regard.Weights], Any]] = {
    "before a look": lambda weights: weights,
    "after a look": lambda weights: (weights.detach().topk(1), weights)[1],
    "heads": lambda weights: weights.heads([0, 2]),
    "batch": lambda weights: weights.batch(1),
    "mean": lambda weights: weights.mean("heads"),
    "detach": lambda weights: weights.detach(),
    "to": lambda weights: weights.to("cpu"),
    "transpose": lambda weights: weights.T,
    "copy": copy.deepcopy,
}


class Node(torch.autograd.Function):
    """An autograd node that is identified by the tensor it holds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mark: Any) -> Tensor:
        ctx.mark = mark
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * 2, None


class Mark:
    """An object that is watched."""


def test_weights_release_value_and_its_graph() -> None:
    gone, kept = {}, []
    for way, part in itertools.product(WAYS, CUTS):
        leaf, mark = torch.randn(2, 3, 5, 8, requires_grad=True), Mark()
        query, key = leaf.detach() + 1, leaf.detach() + 2
        value = Node.apply(leaf, mark)
        weights = regard.attend(query, key, value, **WAYS[way])[1]
        gone[way, part] = weakref.ref(mark), weakref.ref(value)
        kept.append(CUTS[part](weights))
    del value, mark, weights, leaf
    gc.collect()
    assert all(part is not None for part in kept)
    alive = [name for name, refs in gone.items() if any(ref() is not None for ref in refs)]
    assert not alive


def storages() -> dict[int, int]:
    """The sizes of the tensors that are alive, except those that were frozen."""
    gc.collect()
    tensors = (x for x in gc.get_objects() if type(x) is Tensor and x.layout is torch.strided)
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage.nbytes() for storage in found}


def test_held_counts_all_memory_kept_alive() -> None:
    """When everything else is deleted, the remaining tensors are those that `held` counts."""
    for way, dtype in itertools.product(WAYS, (torch.float32, torch.bfloat16)):
        x = torch.randn(2, 3, 5, 8, dtype=dtype)
        regard.attend(x, x, x, **WAYS[way])[1].topk(1)  # fill the caches
    old = storages()
    gc.freeze()
    for way, dtype in itertools.product(WAYS, (torch.float32, torch.bfloat16)):
        before = old | storages()
        query, key, value = (torch.randn(2, 3, 5, 8).to(dtype) for _ in range(3))
        weights = regard.attend(query, key, value, **WAYS[way])[1]
        weights.topk(1)
        del query, key, value
        after = storages()
        cached = {t.untyped_storage()._cdata: t.untyped_storage() for t in weights.problem.tensors.values()}
        shared = sum(storage.nbytes() for name, storage in cached.items() if name in before)
        new = sum(size for name, size in after.items() if name not in before)
        assert weights.held - shared == new, (way, dtype)


# Grad modes and autocast

READS: dict[str, Callable[[regard.Weights], Tensor]] = {
    "dense": lambda weights: weights.dense(),
    "scores": lambda weights: weights.scores(),
    "tau": lambda weights: weights.tau,
    "row": lambda weights: weights[:, :, 3],
    "pairs": lambda weights: weights[0, 0, [1, 2], [3, 4]],
    "boolean": lambda weights: weights[torch.tensor([True, False], device="cpu")],
    "top": lambda weights: weights.topk(3).values,
    "all in order": lambda weights: weights.topk(40).values,
    "aligned": lambda weights: weights.argmax(-1),
    "entropy": lambda weights: weights.entropy(),
    "received": lambda weights: weights.received(),
    "pool": lambda weights: weights.pool(4, 4),
    "pool of a part": lambda weights: weights.pool(2, 5, within=(slice(3, 9), slice(4, 30))),
    "product": lambda weights: weights @ FACTOR,
    "transposed": lambda weights: weights.T @ FACTOR,
    "mean": lambda weights: weights.mean("heads").dense(),
    "heads": lambda weights: weights.heads([1, 2]).dense(),
    "batch": lambda weights: weights.batch(1).dense(),
    "rollout": lambda weights: regard.rollout([weights, weights], queries=[1, 2]),
    "mean rollout": lambda weights: regard.rollout([weights, weights]),
    "numpy": lambda weights: torch.from_numpy(weights.numpy()),
    "copy": lambda weights: copy.deepcopy(weights).dense(),
}
FACTOR = torch.randn(40, 3, generator=torch.Generator().manual_seed(3))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Any:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "default float64": lambda: default_dtype(torch.float64),
    "default bfloat16": lambda: default_dtype(torch.bfloat16),
    "default device": lambda: torch.device("meta"),
    "deterministic": deterministic,
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
}
READ: dict[str, dict[str, Any]] = {
    "fused": {},
    "causal": {"mask": regard.Causal()},
    "biased": {"bias": regard.ALiBi(4), "mask": torch.ones(40, 40, dtype=torch.bool).tril()},
    "tiled": {"implementation": "tiled"},
    "reference": {"implementation": "reference", "normalize": regard.Entmax(1.3)},
    "sigmoid": {"normalize": regard.Sigmoid(), "implementation": "tiled"},
}


def read_from() -> tuple[Tensor, Tensor, Tensor]:
    x, y = (torch.randn(2, 4, 40, 16, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
    return x, y, y


@functools.cache
def expected_reads(options: str) -> dict[str, Tensor]:
    weights = regard.attend(*read_from(), **READ[options])[1]
    return {name: read(weights) for name, read in READS.items()}


@pytest.mark.parametrize("mode", MODES)
@looped("options", READ)
@pytest.mark.sampled(2)
def test_results_do_not_depend_on_the_grad_mode_of_the_read(options: str, mode: str) -> None:
    expected = expected_reads(options)
    weights = regard.attend(*read_from(), **READ[options])[1]
    with MODES[mode]():
        inside = {name: read(weights) for name, read in READS.items()}
    for name, seen in inside.items():
        assert (seen.dtype, seen.device) == (expected[name].dtype, expected[name].device), name
        assert torch.equal(seen, expected[name]), name
    assert torch.equal(weights.dense(), expected["dense"])  # nor on the mode of an earlier read


@pytest.mark.parametrize("options", READ)
def test_weights_that_were_made_under_autocast(options: str) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights = regard.attend(*read_from(), **READ[options])[1]
        inside = {name: read(weights) for name, read in READS.items()}
    rounded = regard.attend(*(t.bfloat16() for t in read_from()), **READ[options])[1]
    for name, read in READS.items():
        assert torch.equal(inside[name], read(weights)), name
        torch.testing.assert_close(inside[name], read(rounded), rtol=1e-6, atol=1e-6)


@looped("mode", ["autocast", "inference", "no_grad"])
@looped("implementation", [None, "tiled", "reference"])
def test_a_first_read_in_another_mode_keeps_the_graph(implementation: str | None, mode: str) -> None:
    x = torch.randn(2, 4, 40, 16, requires_grad=True)

    def gradient(weights: regard.Weights) -> Tensor:
        return torch.autograd.grad(weights.dense().square().sum(), x)[0]

    weights = regard.attend(x, x, x, implementation=implementation)[1]
    with MODES[mode]():
        weights.topk(2)
        weights.pool(3, 3)
    expected = gradient(regard.attend(x, x, x, implementation=implementation)[1])
    assert torch.equal(gradient(weights), expected)


def test_inputs_modified_before_the_first_read_are_detected() -> None:
    """On the fast path, where nothing has been prepared yet."""
    for name in ("query", "key"):
        tensors = {name: torch.randn(2, 3, 5, 8) for name in ("query", "key", "value")}
        weights = regard.attend(**tensors)[1]
        tensors["value"].zero_()
        expected = regard.attend(**tensors)[1].dense()
        assert torch.equal(regard.attend(**tensors)[1].dense(), expected)
        tensors[name].zero_()
        with pytest.raises(regard.StaleError, match=name):
            weights.dense()


def test_no_flipped_bit_of_a_file_goes_unnoticed(tmp_path: Path) -> None:
    x = torch.randn(7, 5)
    weights = regard.attend(x, x, x, mask=regard.Causal())[1]
    content = weights.save(tmp_path / "w").read_bytes()
    rng = np.random.default_rng(0)
    for at in rng.choice(len(content) * 8, 300, replace=False).tolist():
        damaged = bytearray(content)
        damaged[at // 8] ^= 1 << at % 8
        (tmp_path / "damaged").write_bytes(damaged)
        try:
            again = regard.Weights.load(tmp_path / "damaged")
        except regard.ArgumentError:
            continue
        assert torch.equal(again.dense(), weights.dense())  # white space of the header
