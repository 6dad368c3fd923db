"""Every part of lazy weights equals the same part of the dense matrix."""

import functools
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import regard
from tests import naive
from tests.cases import TABLE, Case, crossed, looped
from tests.fuzz import oracle
from tests.mechanism.weights.calls import (
    FEW,
    B,
    Call,
    D,
    E,
    G,
    K,
    Q,
    attend,
    close,
    entropy,
    few,
    many_tiles,
    pooled,
    randn,
)

CALLS = [Call(case) for case in TABLE[::8]]
CALLS += [Call(Case(mask="causal", bias="alibi"), dtype) for dtype in (torch.float32, torch.float16)]


def factor(matrix: Any) -> Tensor:
    return randn(matrix.shape[-1], 3).to(matrix.dtype)


# Reads: the lazy result, and the same from the dense matrix.
LOOKS: dict[str, tuple[Callable[[regard.Weights], Tensor], Callable[[Tensor], Tensor]]] = {
    "dense": (lambda w: w.dense(), lambda x: x),
    "row": (lambda w: w[..., 3, :], lambda x: x[..., 3, :]),
    "column": (lambda w: w[..., 1:4, 2], lambda x: x[..., 1:4, 2]),
    "picked": (lambda w: w[..., [3, 1], [2, 2]], lambda x: x[..., [3, 1], [2, 2]]),
    "rows": (lambda w: w.rows(slice(1, 4)).dense(), lambda x: x[..., 1:4, :]),
    "rows by index": (lambda w: w.rows(torch.tensor([3, 0])).dense(), lambda x: x[..., [3, 0], :]),
    "entropy": (lambda w: w.entropy(), entropy),
    "received": (lambda w: w.received(), lambda x: x.sum(-2)),
    "pool": (lambda w: w.pool(2, 3), lambda x: pooled(x, 2, 3)),
    "top": (lambda w: w.topk(2).values, lambda x: x.topk(2).values),
    "product": (lambda w: w @ factor(w), lambda x: x @ factor(x)),
    "product, vector": (lambda w: w @ factor(w)[:, 0], lambda x: x @ factor(x)[:, 0]),
    "transposed": (lambda w: w.T @ randn(Q, 3).to(w.dtype), lambda x: x.mT @ randn(Q, 3).to(x)),
}
OF_HEADS = {
    "head": (lambda w: w.heads([1, 0]).dense(), lambda x: x[..., [1, 0], :, :]),
    "mean": (lambda w: w.mean("heads").dense(), lambda x: x.mean(-3)),
    "row of the mean": (lambda w: w.mean("heads")[..., 1, :], lambda x: x.mean(-3)[..., 1, :]),
    "entropy of the mean": (lambda w: w.mean("heads").entropy(), lambda x: entropy(x.mean(-3))),
    "received by the mean": (lambda w: w.mean("heads").received(), lambda x: x.mean(-3).sum(-2)),
    "pool of the mean": (lambda w: w.mean("heads").pool(2, 3), lambda x: pooled(x.mean(-3), 2, 3)),
    "product of the mean": (lambda w: w.mean("heads") @ factor(w), lambda x: x.mean(-3) @ factor(x)),
    "mean of some heads": (
        lambda w: w.heads([0, 1]).mean("heads").dense(),
        lambda x: x[..., :2, :, :].mean(-3),
    ),
}


def looks(call: Call) -> dict[str, Any]:
    """Return the reads that this call supports, except topk, which has its own check because of ties."""
    several = call.lead and call.lead[-1] > 1
    return {name: look for name, look in {**LOOKS, **(OF_HEADS if several else {})}.items() if name != "top"}


# The full matrix


@pytest.mark.sampled(2)
@many_tiles
@few
def test_every_read_equals_the_formulas(call):
    weights, dense = call.weights(), call.formulas()[1]
    assert weights.shape == dense.shape
    for name, (lazily, densely) in looks(call).items():
        try:
            close(lazily(weights), densely(dense), call.dtype)
        except AssertionError as error:
            raise AssertionError(name) from error


@pytest.mark.sampled(2)
@many_tiles
@looped("call", CALLS, ids=str, sampled=2)
def test_weights_times_value_is_the_output(call):
    output, weights = call.attend()
    value = naive.repeated(call.inputs()[2], call.case.shapes.heads)
    torch.testing.assert_close((weights @ value).to(output.dtype), output)
    torch.testing.assert_close((weights @ call.inputs()[2]).to(output.dtype), output)  # key heads


@pytest.mark.sampled(2)
@many_tiles
@looped("call", [Call(dropout=0.4), *(Call(c.case, c.dtype, dropout=0.4) for c in FEW)], ids=str)
def test_with_dropout_the_weights_are_those_that_were_used(call):
    output, weights = call.attend()
    weights, dense, before = weights.detach(), weights.detach().dense(), call.formulas()[1]
    value = naive.repeated(call.inputs()[2], call.case.shapes.heads)
    torch.testing.assert_close((weights @ value).to(output.dtype), output.detach())
    close(dense, torch.where(dense == 0, 0.0, before / 0.6), call.dtype)
    assert 0 < (dense == 0).double().mean() < 1
    part = weights.pool(99, 99, within=(slice(1, 4), slice(2, 6)))
    torch.testing.assert_close(part, dense[..., 1:4, 2:6])
    if call.lead:
        head = call.lead[-1] - 1
        torch.testing.assert_close(weights.heads(head).dense(), dense[..., head, :, :])
        torch.testing.assert_close(weights[..., [3, 1], 2], dense[..., [3, 1], 2])


@looped("call", CALLS, ids=str, sampled=2)
def test_scores_equal_the_formulas(call):
    close(call.weights().scores(), call.formulas()[0], call.dtype)


def test_attributes_match_those_of_a_tensor():
    weights = Call(dtype=torch.float32).weights()
    assert weights.shape == weights.size() == torch.Size([B, G, Q, K])
    assert (weights.size(-1), weights.numel(), len(weights)) == (K, B * G * Q * K, B)
    assert weights.ndim == weights.dim() == 4
    assert (weights.dtype, weights.device) == (torch.float32, torch.device("cpu"))
    assert [head.shape for head in weights] == [(G, Q, K)] * B


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_have_weights_of_float32(dtype):
    weights = Call(dtype=dtype).weights()
    assert weights.dtype is weights.dense().dtype is weights.entropy().dtype is torch.float32


def test_repr_shows_the_call_and_its_memory():
    x = torch.zeros(1000, 4)
    weights = regard.attend(x, x, x, normalize=regard.Entmax(1.3), mask=regard.Causal())[1]
    text = "Weights(1000 × 1000, float32: ScaledDot, Entmax(alpha=1.3); holds 32.0 kB, dense 4.0 MB)"
    assert repr(weights) == text
    assert repr(weights.T) == f"transpose of {text}"
    assert "mean over heads" in repr(attend().mean("heads"))
    assert "Additive" in repr(attend(score="additive"))


# Parts

LAZY: dict[str, Callable[[], regard.Weights]] = {
    "averaged": lambda: attend(mask="causal").mean("heads"),
    "one of the heads": lambda: attend("grouped", mask="padding").heads(4),
    "some of the heads": lambda: attend("grouped", mask="padding").heads([4, 0, 1]),
    "dropout": lambda: Call(Case("grouped", mask="padding", bias="alibi"), dropout=0.4).weights(),
    "plain": lambda: attend("no heads"),
    "crossed": lambda: attend("broadcasting batch"),
    "one key head": lambda: attend("one key head"),
    "many values": lambda: attend("broadcasting heads"),
}


@st.composite
def indices(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    """Draw indices for a tensor of this shape, sometimes out of range."""
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
    weights = LAZY[name]()
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


@looped(
    "index",
    [
        *(np.s_[0, 2, 3], np.s_[1, 2, 4, 6], np.s_[..., 2], np.s_[-1, ..., 1:4:2, :], np.s_[:, None, 1]),
        *(np.s_[[1, 0]], np.s_[[[0, 1]], [2]], np.s_[0:0], np.s_[:, :, :, 9:], np.s_[torch.tensor(1)]),
        *(np.s_[np.int64(1), np.array([1, 2])], True, (), ..., np.s_[:, [0, 2], 1:3, [4, 4]]),
        # out of range
        *(5, -3, (0, 3), (0, 0, 0, 7), (0, 0, 0, 0, 0), [0, 2], torch.tensor([-3]), torch.ones(3).bool()),
    ],
    ids=str,
)
def test_typical_indices(index):
    weights = attend(mask="causal")
    expected, actual = outcome(weights.dense(), index), outcome(weights, index)
    if isinstance(expected, Exception):
        assert isinstance(expected, IndexError)
        assert isinstance(actual, IndexError)
    else:
        close(actual, expected)


def test_a_boolean_matrix_as_an_index():
    weights = attend("no heads")
    dense = weights.dense()
    close(weights[dense > 0.2], dense[dense > 0.2])


@pytest.mark.sampled(2)
@many_tiles
@looped(
    "call",
    [
        Call(Case(normalize="sinks", mask="tensor", bias="alibi")),
        Call(Case("grouped", normalize="sinks", mask="union", bias="several")),
        Call(Case("grouped", mask="padding"), dropout=0.3),
        Call(Case("one key head", normalize="entmax15")),
        Call(Case("broadcasting heads", bias="relative")),
    ],
    ids=str,
)
def test_some_heads_are_those_of_the_dense_matrix(call):
    weights = call.weights()
    for index in (2, -1, [2, 0], [-1, 1, 1], [], slice(2), slice(2, 0), range(2)):
        some, dense = weights.heads(index), weights.dense()[..., index, :, :]
        close(some.dense(), dense)
        assert some.shape == dense.shape
        close(some.received(), dense.sum(-2))
        close(some @ randn(K, 3), dense @ randn(K, 3))
        close(some.scores(), weights.scores()[..., index, :, :])


def test_one_head_of_a_batch():
    weights, dense = attend(), attend().dense()
    for index in (np.int64(1), torch.tensor(1)):
        close(weights.heads(index).dense(), dense[:, 1])
    head = weights.heads(1)
    close(head[1, 2], dense[1, 1, 2])
    close(head[[1, 0], 2], dense[[1, 0], 1, 2])
    for refused in (lambda: head.heads(0), lambda: head.mean("heads")):
        with pytest.raises(regard.ArgumentError, match="heads"):
            refused()
    for index in (G, -G - 1, [0, G]):
        with pytest.raises(IndexError):
            weights.heads(index)


@looped("call", CALLS, ids=str, sampled=2)
def test_one_sequence_of_a_batch_equals_the_dense_one(call):
    weights = call.weights()
    if weights.ndim - 2 - weights.has_heads < 1:
        with pytest.raises(regard.ArgumentError, match="already belong to one sequence"):
            weights.batch(0)
        return
    dense = weights.dense()
    for index in (0, -1):
        one = weights.batch(index)
        close(one.dense(), dense[index], call.dtype)
        close(one.received(), weights.received()[index], call.dtype)
        close(one.pool(2, 2), weights.pool(2, 2)[index], call.dtype)
    with pytest.raises(IndexError, match="out of range"):
        weights.batch(len(weights))


@pytest.mark.parametrize("joined", [False, True])
def test_one_sequence_or_head_does_not_keep_the_others_alive(joined):
    """Query and key may be views of one tensor."""
    x = torch.randn(11, 3, 50, 14)
    query, key = (x[..., :7], x[..., 7:]) if joined else (x, x)
    weights = regard.attend(query, key, key, mask=regard.Padding(torch.arange(11) + 20))[1]
    for one, parts in ((weights.batch(1), 11), (weights.heads(1), 3), (weights.heads(1).batch(1), 33)):
        # one head copies query and key, which may have shared memory
        assert one.held <= 2 * weights.held / parts + 8 * 11
        assert len(pickle.dumps(one)) <= 2 * weights.held / parts + 4000
    assert weights.batch(1).held <= weights.held / 11
    close(pickle.loads(pickle.dumps(weights.batch(1))).dense(), weights.dense()[1])


def test_a_batch_of_one_sequence_is_not_copied():
    x = torch.randn(1, 3, 5, 7)
    weights = regard.attend(x, x, x)[1]
    assert weights.batch(0).problem["query"].data_ptr() == x.data_ptr()
    assert weights[0:0].shape == (0, 3, 5, 5)


@many_tiles
@few
def test_tiles_and_selected_parts_cover_the_matrix(call):
    weights = call.weights()
    dense = weights.dense()
    actual = torch.zeros(*weights.problem_lead, *weights.shape[-2:], dtype=weights.dtype)
    for tile, block in weights.tiles():
        actual[(*tile.lead, ..., tile.rows, tile.keys)] = block
    close(actual.reshape(weights.shape), dense, call.dtype)
    lead = [slice(0, 1)] * len(call.lead)
    part = weights.part(lead, slice(2, 3))
    close(part.dense(), dense[(*lead, ..., slice(2, 3), slice(None))], call.dtype)


def test_the_problem_holds_the_inputs_of_the_call():
    query, key, value = Call().inputs()
    problem = regard.attend(query, key, value, score=regard.Dot())[1].problem
    assert torch.equal(problem["query"].reshape(query.shape), query)
    assert problem.config.family == "dot"
    assert "value" not in problem.tensors


def test_a_mean_is_taken_once_and_over_the_heads():
    weights = attend()
    mean = weights.mean("heads")
    assert (weights.is_head_mean, mean.is_head_mean, mean.problem_lead) == (False, True, (B,))
    for refused in (
        lambda: weights.mean("batch"),
        lambda: mean.mean("heads"),
        lambda: mean.heads(0),
        lambda: mean.scores(),
        lambda: attend("no heads").mean("heads"),
    ):
        with pytest.raises(regard.ArgumentError, match="heads"):
            refused()


# Reductions


def check_top(top: regard.TopK, dense: Tensor) -> None:
    """Check that each row has its largest weights in order, with their keys; ties may be in any order."""
    values, keys = top
    assert values.dtype == dense.dtype
    assert keys.dtype is torch.long
    torch.testing.assert_close(values, dense.topk(keys.shape[-1]).values)
    torch.testing.assert_close(values, dense.gather(-1, keys))  # raises for an index that is not a key
    assert (keys.sort(-1).values.diff(dim=-1) > 0).all()  # no key is listed twice


@pytest.mark.sampled(2)
@many_tiles
@looped("call", [*FEW, Call(Case(normalize="mean", mask="causal"))], ids=str)
def test_topk_and_argmax_are_the_largest_weights(call):
    weights = call.weights()
    dense = weights.dense()
    for n in (1, 3, dense.shape[-1]):
        top = weights.topk(n)
        assert top.indices.shape == (*weights.shape[:-1], n)
        check_top(top, dense)
    if call.lead:
        check_top(weights.mean("heads").topk(3), dense.mean(-3))
    keys = weights.argmax(-1)
    assert torch.equal(dense.gather(-1, keys[..., None])[..., 0], dense.amax(-1))


@looped(
    "spoil",
    [
        lambda top: top._replace(values=top.values.flip(-1)),
        lambda top: top._replace(indices=top.indices.roll(1, -2)),
        lambda top: top._replace(indices=top.indices[..., :1].expand(top.indices.shape)),
        lambda top: top._replace(values=top.values + (top.values == 0)),
    ],
)
def test_a_wrong_topk_is_detected(spoil):
    call = Call(Case(mask="window"))
    weights = call.weights()
    with pytest.raises((AssertionError, RuntimeError)):
        check_top(spoil(weights.topk(4)), weights.dense())


@pytest.mark.parametrize("value", [(2, K, 3), (5, 1, 1, K, 3), (K, 3)], ids=str)
def test_value_may_have_more_axes_than_key(value):
    query, key, value = torch.randn(3, 2, Q, 7), torch.randn(3, 1, K, 7), torch.randn(value)
    output, weights = regard.attend(query, key, value)
    reference = regard.attend(query, key, value, implementation="reference")[1].dense()
    torch.testing.assert_close(weights.dense(), reference)
    torch.testing.assert_close(weights[..., 0, :], reference[..., 0, :])
    assert weights.shape[:-2] == output.shape[:-2]


def test_entropy_of_one_key_and_of_equal_keys():
    zeros = torch.zeros(4, 2)
    causal = regard.attend(zeros, zeros, zeros, mask=regard.Causal())[1].entropy()
    torch.testing.assert_close(causal, torch.tensor([1.0, 2.0, 3.0, 4.0]).log())


PARTS = [
    (slice(None), slice(None)),
    (slice(1, 4), slice(2, 6)),
    (slice(-2, None), slice(0, 1)),
    (slice(3, 4), slice(None)),
    (slice(0, 99), slice(-99, 5)),
]


@pytest.mark.sampled(2)
@many_tiles
@few
def test_pool_is_the_mean_of_the_blocks_of_any_part(call):
    weights = call.weights()
    dense = weights.dense()
    for rows, columns in ((1, 1), (5, 7), (4, 1), (99, 4)):
        close(weights.pool(rows, columns), pooled(dense, rows, columns), call.dtype)
    for rows, keys in PARTS:
        for size in ((1, 1), (2, 3), (99, 99)):
            actual = weights.pool(*size, within=(rows, keys))
            close(actual, pooled(dense[..., rows, keys], *size), call.dtype)


@pytest.mark.parametrize(
    "heads", [lambda w: w.mean("heads"), lambda w: w.heads(1), lambda w: w.heads([2, 0])]
)
def test_pool_of_a_part_of_some_heads(heads):
    weights = heads(attend())
    close(weights.pool(2, 2, within=(slice(1, 4), slice(2, 6))), pooled(weights.dense()[..., 1:4, 2:6], 2, 2))


@looped("dtype", [torch.float32, torch.bfloat16, torch.float64])
@looped(
    "options",
    [
        {"mask": regard.Causal()},
        {"mask": regard.Window(9), "normalize": regard.Entmax15()},
        {"normalize": regard.Sigmoid()},
        {"normalize": regard.Softmax1(), "bias": regard.ALiBi(heads=4)},
        {"score": regard.Gaussian(3.0), "normalize": regard.Sparsemax()},
    ],
)
@looped("heads", [lambda w: w, lambda w: w.mean("heads")])
def test_pool_of_wide_bands(dtype, options, heads):
    """Blocks of many rows are summed without creating their weights."""
    query, key = randn(B, 4, 131, D).to(dtype), randn(B, 2, 157, D).to(dtype)
    weights = heads(regard.attend(query, key, key, **options)[1])
    dense = weights.dense().double()
    rtol = 1e-2 if dtype is torch.bfloat16 else 1e-4
    for size, part in (((3, 5), (slice(None), slice(None))), ((2, 4), (slice(20, 120), slice(11, 150)))):
        actual = weights.pool(*size, within=part).double()
        torch.testing.assert_close(actual, pooled(dense[..., *part], *size), atol=1e-6, rtol=rtol)


def test_pool_of_an_empty_part_is_empty():
    weights, nothing = attend(), randn(0, D)
    assert weights.pool(2, 3, within=(slice(2, 2), slice(0, 4))).shape[-2:] == (0, 3)
    assert weights.pool(2, 3, within=(slice(4, 2), slice(6, 6))).shape[-2:] == (0, 0)
    assert regard.attend(nothing, randn(K, D), randn(K, D))[1].pool(2, 3).shape == (0, 3)
    assert regard.attend(randn(Q, D), nothing, nothing)[1].pool(2, 3).shape == (2, 0)


def test_pool_of_a_part_next_to_a_broken_key():
    """A row that attends to a NaN key is NaN everywhere, even in parts that exclude that key."""
    query, key = randn(Q, D).float(), randn(K, D).float()
    key[0] = math.nan
    weights = regard.attend(query, key, key, mask=regard.Causal())[1]
    part = weights.pool(9, 9, within=(slice(2, 4), slice(1, 3)))
    torch.testing.assert_close(part, weights.dense()[2:4, 1:3], equal_nan=True)


@looped(
    ("size", "part", "message"),
    [
        *(((2, 2), part, "without steps") for part in (slice(0, 4, 2), 3, None)),
        *((size, slice(None), "at least 1") for size in ((0, 3), (3, 0), (-1, 3))),
    ],
)
def test_pool_rejects_parts_with_steps_and_no_blocks(size, part, message):
    with pytest.raises(regard.ArgumentError, match=message):
        attend().pool(*size, within=(slice(None), part))


# Products


@many_tiles
@pytest.mark.parametrize("name", ["heads", "broadcasting batch", "one key head"])
def test_products_broadcast_over_the_leading_axes(name):
    weights = attend(name, mask="padding")
    dense = weights.dense()
    *batch, heads = weights.shape[:-2]
    for lead in ((), (1,), (heads,), (1, 1), (batch[-1], 1), (1, heads), (batch[-1], heads)):
        x, y = randn(*lead, K, 3), randn(*lead, Q, 3)
        close(weights @ x, dense @ x)
        close(weights.T @ y, dense.mT @ y)


def test_products_take_factors_of_any_dtype_and_stride():
    weights = Call(dtype=torch.float32).weights()
    close(weights @ torch.ones(K, dtype=torch.long), weights.dense().sum(-1), torch.float32)
    assert (weights @ randn(K, 3)).dtype is torch.float32
    weights, dense = attend(), attend().dense()
    for x in (randn(K, 1), randn(K, 0), randn(3, K).mT):
        close(weights @ x, dense @ x)
    close(weights.T @ randn(Q, 0), dense.mT @ randn(Q, 0))


WRONG = [(), (Q,), (K + 1, 3), (0, 3), (1, 3), (2, K, 3), (B + 1, 1, K, 3), (5, B, G, K, 3), (1, B, G, K, 3)]
WRONG_TRANSPOSED = [(), (K,), (Q + 1, 3), (2, Q, 3), (1, B, G, Q, 3)]


def test_a_factor_that_does_not_fit_is_rejected():
    weights = attend()
    for matrix, tokens, sizes in ((weights, K, WRONG), (weights.T, Q, WRONG_TRANSPOSED)):
        for size in sizes:
            with pytest.raises(regard.ShapeError, match=str(tokens)):
                matrix @ torch.ones(size)
        for x, name in ((np.ones(K), "ndarray"), ([1.0] * K, "list"), (2.0, "float"), (None, "None")):
            with pytest.raises(regard.DTypeError, match=name):
                matrix @ x


def test_the_transpose_is_the_transpose():
    weights = attend(mask="causal")
    assert weights.T.shape == weights.mT.shape == (B, G, K, Q)
    assert torch.equal(weights.T.dense(), weights.dense().mT)
    assert weights.T.T is weights


@many_tiles
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_zero_weights_ignore_their_values(poison):
    for weights in (attend(mask="causal"), attend(score="dot", normalize="sparsemax")):
        dense, x = weights.dense(), randn(K, 3)
        touched = dense[..., -1] != 0
        assert touched.any()
        assert not touched.all()
        expected = dense @ x.index_fill(0, torch.tensor(K - 1), 0.0)
        x[K - 1] = poison
        actual = weights @ x
        assert not actual[touched].isfinite().any()
        close(actual[~touched], expected[~touched])
    weights, y = attend(mask="causal"), randn(Q, 3)
    expected = weights.dense().mT @ y
    y[0] = math.nan
    actual = weights.T @ y
    assert actual[..., :3, :].isnan().all()
    close(actual[..., 3:, :], expected[..., 3:, :])


@many_tiles
def test_nan_in_a_hidden_key_does_not_leak():
    query, key, value = Call().inputs()
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

DIFFERENTIABLE = [
    Case(mask="causal"),
    Case("grouped", normalize="sinks", mask="union", bias="alibi"),
    Case("grouped", "additive", "entmax15", "padding"),
    Case(score="softcap", normalize="sparsemax", mask="causal"),
    Case("one key head", "gaussian", "sigmoid"),
    Case(score="function", normalize="relu", bias="dense"),
]


def with_gradients(case: Case) -> tuple[regard.Weights, Tensor, Tensor, Tensor]:
    """Return weights with differentiable query and key, and their dense formula."""
    query, key, value = case.tensors(requires_grad=True)
    options = case.options()
    weights = regard.attend(query, key, value, **options)[1]
    options["seen"] = Call(case).visible()
    del options["mask"]
    return weights, query, key, oracle.attention(query, key, value, **options).weights


def gradients(result: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(result, inputs, randn(*result.shape), retain_graph=True)


@many_tiles
@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=lambda case: case.name)
@pytest.mark.sampled(2)
def test_gradients_are_those_of_the_dense_formula(case):
    weights, query, key, dense = with_gradients(case)
    for lazily, densely in {**LOOKS, **OF_HEADS}.values():
        for actual, expected in zip(
            gradients(lazily(weights), query, key), gradients(densely(dense), query, key), strict=True
        ):
            close(actual, expected)


def test_gradients_of_parts():
    weights, query, _, dense = with_gradients(Case())
    close(gradients(weights.batch(1).dense(), query)[0], gradients(dense[1], query)[0])
    part = slice(1, 4), slice(2, 6)
    pool = pooled(dense[..., *part], 2, 2)
    close(gradients(weights.pool(2, 2, within=part), query)[0], gradients(pool, query)[0])
    with pytest.raises(AssertionError):  # a wrong gradient is detected
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
    case = Case(score="additive", normalize="learned sink", bias="t5")
    options = case.options()
    weights = regard.attend(*case.tensors(), **options)[1]
    leaves = [p for option in ("score", "normalize", "bias") for p in options[option].parameters()]
    assert len(leaves) == 5
    assert all(grad.abs().sum() > 0 for grad in gradients(weights.dense(), *leaves))


def test_products_are_differentiable_in_the_other_factor():
    weights = attend(mask="causal")
    x, y = randn(K, 3).requires_grad_(), randn(Q, 3).requires_grad_()
    close(gradients(weights @ x, x)[0], gradients(weights.dense() @ x, x)[0])
    close(gradients(weights.T @ y, y)[0], gradients(weights.dense().mT @ y, y)[0])


def test_detached_weights_have_no_gradient():
    weights, *_ = with_gradients(Case(mask="causal", bias="relative"))
    assert weights.dense().requires_grad
    still = weights.detach()
    assert not still.dense().requires_grad
    close(still.dense(), weights.dense())
    with torch.no_grad():
        assert not weights.dense().requires_grad
        close(weights.dense(), still.dense())


# Empty tensors


@crossed(
    sizes=[(0, K, D, G), (Q, 0, D, G), (0, 0, D, G), (Q, K, 0, G), (Q, K, D, 0)],
    mask=[None, regard.Causal()],
    normalize=[regard.Softmax(), regard.Entmax15(), regard.Softmax1()],
    dropout=[0.0, 0.3],
)
def test_zero_sizes(sizes, mask, normalize, dropout, tmp_path):
    queries, keys, width, heads = sizes
    query, key = randn(B, heads, queries, width), randn(B, heads, keys, width)
    options = {"mask": mask, "normalize": normalize, "dropout": dropout}
    weights = regard.attend(query, key, randn(B, heads, keys, E), **options)[1]
    dense = weights.dense()
    assert dense.shape == weights.shape == weights.scores().shape == (B, heads, queries, keys)
    assert weights.topk(min(3, keys)).indices.shape == (B, heads, queries, min(3, keys))
    assert weights.entropy().shape == (B, heads, queries)
    if keys:
        assert weights.argmax(-1).shape == (B, heads, queries)
    else:
        with pytest.raises(IndexError, match="no maximum along axis -1"):
            weights.argmax(-1)
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


@looped("dtype", [torch.float32, torch.float64])  # on the kernels, and on tiles
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
