"""Lazy weights match the dense tensor for equal values, missing axes and NumPy operands."""

import copy

import numpy as np
import pytest
import torch

import regard
from tests.cases import looped


def some_weights(*shape: int) -> regard.Weights:
    *lead, queries, keys = shape
    key = torch.randn(*lead, keys, 4)
    return regard.attend(torch.randn(*lead, queries, 4), key, key)[1]


def equal_weights(requires_grad: bool) -> regard.Weights:
    x = torch.zeros(2, 7, 4, requires_grad=requires_grad)
    return regard.attend(x, x, x)[1]


@looped("dim", [-1, -2])
@looped("requires_grad", [False, True])
def test_the_first_of_equal_weights_is_the_maximum(dim: int, requires_grad: bool) -> None:
    weights = equal_weights(requires_grad)
    dense = weights.dense()
    assert torch.equal(weights.argmax(dim), dense.argmax(dim))
    assert torch.equal(weights.max(dim).indices, dense.max(dim).indices)
    mean = weights.mean("heads")
    assert torch.equal(mean.argmax(dim), mean.dense().argmax(dim))


def test_a_copy_keeps_its_gradient() -> None:
    x = torch.randn(3, 5, 4, requires_grad=True)
    weights = regard.attend(x, x, x)[1]
    (copied,) = torch.autograd.grad(copy.copy(weights).dense()[..., 0].sum(), x)
    (original,) = torch.autograd.grad(weights.dense()[..., 0].sum(), x)
    assert torch.equal(copied, original)
    assert original.abs().sum() > 0


@pytest.mark.parametrize("number", [np.float32(2), np.float64(2), np.int64(2)])
def test_numbers_of_numpy_keep_the_gradient(number: np.generic) -> None:
    x = torch.randn(5, 4, requires_grad=True)
    weights = regard.attend(x, x, x)[1]
    for product in (weights * number, number * weights):
        assert isinstance(product, torch.Tensor)
        assert product.requires_grad
        assert torch.equal(product, weights.dense() * 2)


def test_arrays_of_numpy_give_arrays() -> None:
    weights = some_weights(3, 5)
    array = np.arange(5, dtype=np.float32)
    for ours, theirs in (
        (weights + array, weights.numpy() + array),
        (array - weights, array - weights.numpy()),
        (array[:3] @ weights, array[:3] @ weights.numpy()),
        (array @ weights.T, array @ weights.numpy().T),
    ):
        assert isinstance(ours, np.ndarray)
        np.testing.assert_array_equal(ours, theirs)


def test_squeeze_of_no_axes_removes_none() -> None:
    weights = some_weights(1, 1, 1, 5)
    assert weights.squeeze(()).shape == weights.dense().squeeze(()).shape == (1, 1, 1, 5)


def test_functions_write_to_out() -> None:
    weights = some_weights(3, 5)
    out, vector = torch.empty(3), torch.randn(5)
    assert torch.sum(weights, -1, out=out) is out
    torch.testing.assert_close(out, weights.dense().sum(-1))
    assert torch.matmul(weights, vector, out=out) is out
    torch.testing.assert_close(torch.matmul(weights, other=vector), out)


def test_membership_and_conversion() -> None:
    weights = some_weights(2, 1, 1)
    assert 1.0 in weights
    assert 0.5 not in weights
    assert int(some_weights(1, 1)) == 1
    assert some_weights(2, 3, 5).mH.shape == (2, 5, 3)
    assert some_weights(2, 0, 5).stride() == torch.empty(2, 0, 5).stride()


def test_masked_rows_have_the_first_key_as_maximum() -> None:
    mask = torch.zeros(4, 6, dtype=torch.bool)
    mask[1:, 3:] = True
    query = torch.randn(4, 2, requires_grad=True)
    weights = regard.attend(query, torch.randn(6, 2), torch.randn(6, 2), mask=mask)[1]
    assert torch.equal(weights.argmax(-1), weights.dense().argmax(-1))
