"""Lazy weights in code written for tensors: equal to the dense result, and lazy wherever possible."""

import copy
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import regard
from regard.mechanism.weights import tensor_like
from tests.cases import looped

B, H, Q, K, D = 2, 3, 5, 7, 11  # a different prime for every axis, to detect swapped axes


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def make(
    *lead: int, dtype: torch.dtype = torch.float32, requires_grad: bool = False, **options: Any
) -> regard.Weights:
    query, key = (randn(*lead, n, D).to(dtype).requires_grad_(requires_grad) for n in (Q, K))
    options.setdefault("mask", regard.Causal())
    return regard.attend(query, key, randn(*lead, K, D).to(dtype), **options)[1]


def heads(*lead: int, **options: Any) -> regard.Weights:
    return make(*(lead or (B, H)), **options)


VARIANTS: dict[str, Callable[[], regard.Weights]] = {
    "batch": lambda: make(B, H),
    "one head": lambda: make(),
    "float64": lambda: make(B, H, dtype=torch.float64),
    "gradient": lambda: make(B, H, requires_grad=True),
    "mean": lambda: make(B, H).mean("heads"),
    "negative": lambda: make(B, H, normalize=regard.Mean()),
    "hidden rows": lambda: make(B, H, mask=regard.Padding([0, 4])),
    "sparse": lambda: make(B, H, normalize=regard.Sparsemax()),
}


def as_tensor(x: Any) -> Any:
    return x.dense() if isinstance(x, tensor_like.TensorLike) else x


def same(actual: Any, expected: Any) -> None:
    if isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for a, b in zip(actual, expected, strict=True):
            same(a, b)
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(as_tensor(actual), expected)
    else:
        assert actual == expected


# Operations without the dense matrix

ROWS, COLUMNS = randn(4, Q), randn(K, 4)

LAZY: dict[str, Callable[[Any], Any]] = {
    "sum": lambda w: w.sum(),
    "sum keys": lambda w: w.sum(-1),
    "sum queries": lambda w: w.sum(dim=-2),
    "sum both": lambda w: w.sum((-1, -2), keepdim=True),
    "sum axis": lambda w: w.sum(axis=-1),
    "torch.sum": lambda w: torch.sum(w, -1, keepdim=True),
    "mean": lambda w: w.mean(),
    "mean keys": lambda w: w.mean(-1, keepdim=True),
    "mean first and last": lambda w: w.mean((0, -1)),
    "torch.mean": lambda w: torch.mean(w, dim=-2),
    "max": lambda w: w.max(),
    "max keys": lambda w: w.max(-1).values,
    "max queries": lambda w: w.max(dim=-2, keepdim=True).values,
    "torch.amax": lambda w: torch.amax(w, (-1, -2)),
    "largest at argmax": lambda w: as_tensor(w).flatten()[w.argmax()],
    "largest at argmax keys": lambda w: as_tensor(w).gather(-1, w.argmax(-1, keepdim=True)),
    "largest at argmax queries": lambda w: as_tensor(w).gather(-2, w.argmax(-2).unsqueeze(-2)),
    "topk": lambda w: w.topk(4).values,
    "topk indices": lambda w: as_tensor(w).gather(-1, w.topk(K).indices),
    "topk distinct": lambda w: w.topk(K).indices.sort(-1).values,
    "topk queries": lambda w: torch.topk(w, 3, dim=-2).values,
    "topk queries indices": lambda w: as_tensor(w).gather(-2, torch.topk(w, Q, dim=-2).indices),
    "torch.matmul": lambda w: torch.matmul(w, COLUMNS.to(w.dtype)),
    "@": lambda w: w @ COLUMNS.to(w.dtype),
    "@ vector": lambda w: w @ COLUMNS[:, 0].to(w.dtype),
    "tensor @": lambda w: ROWS.to(w.dtype) @ w,
    "vector @": lambda w: ROWS[0].to(w.dtype) @ w,
    "torch.matmul right": lambda w: torch.matmul(ROWS.to(w.dtype), w),
    "transpose": lambda w: w.transpose(-1, -2) @ ROWS.mT.to(w.dtype),
    "tensor @ mT": lambda w: COLUMNS.mT.to(w.dtype) @ w.mT,
    "row": lambda w: w[..., 1, :],
    "column": lambda w: w[..., 3],
    "columns": lambda w: w[..., 1:6:2],
    "transposed row": lambda w: w.mT[..., 2, :],
    "select": lambda w: w.select(0, 1),
    "iteration": lambda w: next(iter(w)),
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data.real,
    "clone": lambda w: w.clone(),
    "cpu": lambda w: w.cpu().contiguous(),
    "to": lambda w: w.to("cpu", w.dtype),
    "tensor.to": lambda w: torch.ones(2, dtype=torch.float16).to(w),
    "shape": lambda w: [w.shape, w.ndim, w.dim(), w.size(), w.size(-1), w.size(dim=0), len(w)],
    "strides": lambda w: [w.is_contiguous(), w.stride(), w.stride(-2)],
    "memory": lambda w: [w.numel(), w.nelement(), w.nbytes, w.itemsize, w.element_size()],
    "torch.numel": lambda w: [torch.numel(w), torch.is_floating_point(w), w.is_complex()],
    "device": lambda w: [w.device, w.is_cuda, w.is_cpu, w.is_sparse, w.is_quantized, w.is_meta, w.layout],
    "dtype": lambda w: [w.dtype, w.requires_grad, w.is_leaf],
}


@pytest.fixture
def no_dense(monkeypatch):
    """Fail if the dense matrix is created implicitly."""
    monkeypatch.setattr(tensor_like, "MAX_DENSE_BYTES", 0)


@pytest.mark.usefixtures("no_dense")
@looped("variant", VARIANTS)
@looped("name", LAZY)
def test_lazy_answers_equal_the_dense_ones(variant, name):
    weights = VARIANTS[variant]()
    same(LAZY[name](weights), LAZY[name](weights.dense()))


@pytest.mark.usefixtures("no_dense")
@looped(
    "name",
    [name for name in LAZY if name.startswith(("sum", "mean", "max", "topk q", "@", "tensor @", "col"))],
)
def test_lazy_answers_have_the_gradients_of_the_dense_ones(name):
    query, key, value = (randn(B, H, n, D).double().requires_grad_() for n in (Q, K, K))
    weights = regard.attend(query, key, value, mask=regard.Causal())[1]
    gradients = []
    for matrix in (weights, weights.dense()):
        result = LAZY[name](matrix)
        factor = torch.linspace(-1, 2, result.numel(), dtype=result.dtype).reshape(result.shape)
        if result.is_floating_point():
            gradients.append(torch.autograd.grad((result * factor).sum(), (query, key)))
    same(gradients[0], gradients[1])


@pytest.mark.usefixtures("no_dense")
def test_leading_axes_can_be_removed_and_inserted():
    weights = make(1, H)
    for change in (
        lambda w: w.squeeze(0),
        lambda w: w.squeeze(),
        lambda w: torch.squeeze(w, 0),
        lambda w: w.unsqueeze(0),
        lambda w: w.squeeze(0).unsqueeze(0).unsqueeze(1),
        lambda w: w.select(1, -1),
        lambda w: w.select(1, 2).select(0, 0),
        lambda w: w.select(1, 2).unsqueeze(1),
        lambda w: w.unbind(1)[2],
    ):
        result = change(weights)
        assert isinstance(result, regard.Weights)
        same(result, change(weights.dense()))
        same(result.sum(-1), change(weights.dense()).sum(-1))
        same(result[0], change(weights.dense())[0])
    same(make(B, 1).squeeze(1), make(B, 1).dense().squeeze(1))
    assert isinstance(make(B, 1).squeeze(1), regard.Weights)


def test_the_middle_axis_of_three_can_be_selected():
    query, key, value = (randn(B, 13, H, n, D) for n in (Q, K, K))
    weights = regard.attend(query, key, value)[1]
    same(weights.select(1, 11), weights.dense().select(1, 11))
    assert weights.select(1, 11).has_heads


@pytest.mark.usefixtures("no_dense")
def test_the_mean_over_heads_stays_lazy():
    weights = heads()
    for mean in (weights.mean(1), weights.mean(dim=-3), torch.mean(weights, 1), weights.mean("heads")):
        assert isinstance(mean, regard.Weights)
        same(mean, weights.dense().mean(1))


# Operations on the dense matrix

DENSE: dict[str, Callable[[Any], Any]] = {
    "arithmetic": lambda w: 2 * w - w / 3 + w**2 - (1 - w) // 0.3 + abs(-w),
    "with a tensor": lambda w: torch.ones(K) * w + w * torch.ones(K),
    "comparison": lambda w: [w > 0.5, w == w, w != 0, w <= 0.1],
    "torch.stack": lambda w: torch.stack([w, w]),
    "torch.cat": lambda w: torch.cat((w, w), 1),
    "torch.einsum": lambda w: torch.einsum("bhqk->bqk", w),
    "softmax": lambda w: torch.nn.functional.softmax(w, -1),
    "where": lambda w: torch.where(w > 0.2, w, 0.0),
    "permute": lambda w: w.permute(0, 2, 3, 1),
    "reshape": lambda w: w.reshape(B * H, -1),
    "flatten": lambda w: w.flatten(0, 1),
    "diagonal": lambda w: w.diagonal(dim1=-2, dim2=-1),
    "cumsum": lambda w: w.cumsum(-1),
    "mean of the batch": lambda w: w.mean(0),
    "mean keepdim": lambda w: w.mean(1, keepdim=True),
    "sum of heads": lambda w: w.sum(1),
    "sum dtype": lambda w: w.sum(-1, dtype=torch.float64),
    "min": lambda w: w.min(-1),
    "smallest": lambda w: w.topk(2, largest=False).values,
    "topk of heads": lambda w: w.topk(2, dim=1).values,
    "max of heads": lambda w: w.max(1).values,
    "max with a tensor": lambda w: w.max(torch.tensor(0.3)),
    "double": lambda w: w.double(),
    "half": lambda w: w.half(),
    "to": lambda w: w.to(torch.float64),
    "tolist": lambda w: w.tolist(),
    "item": lambda w: w[0, 0, 0, 0].item(),
    "axis inserted": lambda w: w[:, None],
    "array": lambda w: torch.from_numpy(np.asarray(w)),
    "as_tensor": lambda w: [torch.as_tensor(w), torch.from_dlpack(w)],
    "from_dlpack": lambda w: torch.from_numpy(np.from_dlpack(w)),
    "unbind keys": lambda w: w.unbind(-1),
    "squeeze": lambda w: w[..., :1].squeeze(-1),
    "zeros_like": lambda w: torch.zeros_like(w),
    "boolean index": lambda w: w[w > 0.3],
    "keyword": lambda w: torch.mul(input=w, other=2.0),
    "as operand": lambda w: torch.ones(B, H, 2, Q) @ (w @ torch.eye(K)),
    "weights @ weights": lambda w: w.mT @ w,
}


@looped("name", DENSE)
def test_other_functions_use_the_dense_matrix(name):
    weights = heads()
    same(DENSE[name](weights), DENSE[name](weights.dense()))


def test_numpy_functions():
    weights, dense = heads(), heads().numpy()
    assert np.allclose(np.mean(weights, axis=1), dense.mean(1))
    assert np.allclose(np.sum(weights), dense.sum())
    assert np.allclose(np.einsum("bhqk->qk", weights), dense.sum((0, 1)))


def test_gradients_pass_through_the_dense_matrix():
    weights = make(B, H, dtype=torch.float64, requires_grad=True)
    inputs = [weights.problem["query"], weights.problem["key"]]
    for function in (lambda w: torch.stack([w, w * 2]).square().sum(), lambda w: w.cumsum(-1).square().sum()):
        actual, expected = (torch.autograd.grad(function(w), inputs) for w in (weights, weights.dense()))
        same(actual, expected)


# Size limits


@pytest.fixture(scope="module")
def long() -> regard.Weights:
    x = torch.randn(16_411, 2)
    return regard.attend(x, x, x, mask=regard.Window(300))[1]


@pytest.mark.parametrize(
    "function",
    [
        lambda w: torch.stack([w, w]),
        lambda w: w * 2,
        lambda w: w.tolist(),
        lambda w: np.asarray(w),
        lambda w: w.numpy(),
        lambda w: w.permute(1, 0),
        lambda w: w.double(),
        lambda w: w == 0,
        lambda w: w.T.cumsum(-1),
    ],
)
def test_a_dense_matrix_beyond_the_limit_is_refused(function, long):
    with pytest.raises(regard.ArgumentError, match=r"1\.1 GB, more than the limit.*topk.*dense\(\)"):
        function(long)


def test_the_limit_can_be_chosen():
    weights = heads()
    with pytest.raises(regard.ArgumentError, match="limit"):
        weights.to_dense(max_bytes=weights.nbytes - 1)
    same(weights.to_dense(max_bytes=weights.nbytes), weights.dense())


def test_long_weights_are_reduced_in_linear_memory(long):
    assert torch.allclose(long.sum(-1), torch.ones(16_411))
    assert math.isclose(float(long.mean()), 1 / 16_411, rel_tol=1e-4)
    assert long[..., 5].count_nonzero() == 300
    assert (long.topk(2, dim=-2).indices[:, 7] - 7).abs().max() < 300


# Unsupported operations


@looped(
    "change",
    [
        lambda w: w.mul_(2),
        lambda w: w.requires_grad_(),
        lambda w: torch.relu_(w),
        lambda w: operator.setitem(w, (0, 0), 1.0),
        lambda w: torch.add(torch.ones(K), 1, out=w),
    ],
)
def test_weights_cannot_be_modified(change):
    with pytest.raises(regard.ArgumentError, match="cannot be modified"):
        change(heads())


def test_a_tensor_can_be_modified_by_weights():
    x, weights = torch.ones(B, H, Q, K), heads()
    x += weights
    same(x, 1 + weights.dense())


@pytest.mark.parametrize("name", ["grad", "retain_grad", "register_hook"])
def test_weights_say_that_they_have_no_gradient(name):
    weights = heads(requires_grad=True)
    with pytest.raises(AttributeError, match="no gradient"):
        getattr(weights, name)
    assert not hasattr(weights, name)


def test_unknown_attributes_are_attribute_errors():
    for name in ("nonsense", "_private", "grad_fn"):
        with pytest.raises(AttributeError, match=name):
            getattr(heads(), name)


def test_attributes_do_not_compute_anything(monkeypatch):
    weights = heads()
    monkeypatch.setattr(regard.Weights, "dense", None)
    for name in dir(Tensor):
        if not name.startswith("_") and not name.endswith("_"):
            hasattr(weights, name)


def test_truth_hash_and_copies():
    weights = heads()
    with pytest.raises(regard.ArgumentError, match="ambiguous"):
        bool(weights)
    assert len({weights, heads()}) == 2
    assert (weights == None) is False  # noqa: E711
    same(copy.deepcopy(weights), weights.dense())
    one = regard.attend(torch.ones(1, 2), torch.ones(1, 2), torch.ones(1, 2))[1]
    assert bool(one)
    assert float(one) == one.item() == 1.0


@pytest.mark.parametrize("k", [0, K + 1])
def test_topk_beyond_the_axis_is_refused(k):
    with pytest.raises(regard.ArgumentError, match=rf"k={k} .* {K} keys.*min\(k, weights.shape\[-1\]\)"):
        heads().topk(k)
    with pytest.raises(regard.ArgumentError, match=f"k={Q + 1} for weights with {Q} queries"):
        heads().topk(Q + 1, -2)


def test_axes_out_of_range():
    for refused in (
        lambda w: w.sum(4),
        lambda w: w.mean((0, -5)),
        lambda w: w.topk(1, 7),
        lambda w: w.select(9, 0),
    ):
        with pytest.raises(IndexError, match="out of range"):
            refused(heads())


# Many keys: the kernels' topk, with fewer visible keys than k in many rows


@looped("k", [1, 5, 64, 65])
@looped("mask", [regard.Causal(), regard.Window(3), regard.Padding([3, 0, 97]), None], ids=repr)
def test_topk_fills_rows_with_masked_keys(k, mask):
    x = randn(3, 2, 97, 8)
    weights = regard.attend(x, x, x, mask=mask)[1]
    dense, (values, indices) = weights.dense(), weights.topk(k)
    assert torch.equal(values, dense.topk(k).values)
    assert torch.equal(values, dense.gather(-1, indices))
    assert (indices.sort(-1).values.diff(dim=-1) > 0).all()


# Columns


@looped("mask", [regard.Causal(), None, regard.Window(9)], ids=repr)
@looped("score", [regard.ScaledDot(), regard.Dot(softcap=3.0)], ids=repr)
def test_a_column_has_the_bits_of_the_whole(mask, score):
    x = 9 * randn(2, 3, 97, 8)
    weights = regard.attend(x, x, x, mask=mask, score=score)[1]
    dense = weights.dense()
    for index in (0, 50, -1, slice(3, 40, 7), slice(90, None)):
        assert torch.equal(weights[..., index], dense[..., index])
    assert torch.equal(weights[:, 1:, 20:33, 5], dense[:, 1:, 20:33, 5])
    assert torch.equal(weights[..., [3, 7]], dense[..., [3, 7]])
