"""Rollout of vectors equals the product of the layers' matrices (Abnar & Zuidema 2020, eq. 1)."""

import numpy as np
import pytest
import torch
from torch import Tensor

import regard
from regard.mechanism import tiled
from tests.cases import looped, rotated

B, H, N, D = 2, 3, 7, 5

LEADS = {"plain": (), "heads": (H,), "batch": (B, H), "deep": (2, B, H)}
NORMALIZERS = [regard.Softmax(), regard.Entmax15(), regard.Softmax1(), regard.Sigmoid()]


def layers(lead: tuple[int, ...], count: int = 4, dtype: torch.dtype = torch.float64) -> list[regard.Weights]:
    """Return layers with different masks and normalizers."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for number in range(count):
        query, key = (torch.randn(*lead, N, D, generator=generator, dtype=torch.float64) for _ in "qk")
        mask = regard.Causal() if number % 2 else None
        options = {"mask": mask, "normalize": NORMALIZERS[number % len(NORMALIZERS)]}
        made.append(regard.attend(query.to(dtype), key.to(dtype), key.to(dtype), **options)[1])
    return made


def product(stack: list[regard.Weights], residual: float = 0.5) -> Tensor:
    """Return the last layer's matrix times … times the first's, each mixed with the identity."""
    whole = torch.eye(N, dtype=torch.float64)
    for weights in stack:
        dense = weights.dense().double()
        mean = dense.mean(-3) if dense.dim() > 2 else dense
        whole = (residual * torch.eye(N, dtype=torch.float64) + (1 - residual) * mean) @ whole
    return whole


TILES = {"many tiles": 30, "one tile": 2**20}


@rotated(lead=LEADS, residual=["1.0", "0.5", "0.0", "0.9"], tile=TILES)
def test_rollout_is_the_product_of_the_matrices(lead, residual, tile, monkeypatch):
    monkeypatch.setattr(tiled, "TILE", TILES[tile])
    stack, residual = layers(LEADS[lead]), float(residual)
    whole = product(stack, residual)
    batch = LEADS[lead][:-1]
    stack = tuple(stack)
    for queries, expected in {
        0: whole[..., 0, :],
        N - 1: whole[..., N - 1, :],
        -1: whole[..., -1, :],
        (2,): whole[..., [2], :],
        (4, 0, 4, -2): whole[..., [4, 0, 4, -2], :],
        range(N): whole,
        None: whole.mean(-2),
    }.items():
        actual = regard.rollout(stack, queries, residual=residual)
        assert actual.shape == expected.shape
        assert actual.shape[: len(batch)] == batch
        torch.testing.assert_close(actual, expected)


def test_a_wrong_layer_order_is_detected():
    stack = layers((H,))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(regard.rollout(stack, 3), product(stack[::-1])[3])


def test_residual_one_is_the_identity():
    actual = regard.rollout(layers((H,)), range(N), residual=1.0)
    assert torch.equal(actual, torch.eye(N, dtype=torch.float64))


def test_one_layer_without_residual_is_the_head_mean():
    (only,) = layers((B, H), count=1)
    torch.testing.assert_close(regard.rollout([only], list(range(N)), residual=0.0), only.dense().mean(-3))


def test_row_sums_of_one_are_preserved():
    x = torch.randn(H, N, D, dtype=torch.float64)
    stack = [regard.attend(x, x, x, mask=regard.Causal(), normalize=regard.Sparsemax())[1]] * 5
    actual = regard.rollout(stack, range(N))
    torch.testing.assert_close(actual.sum(-1), torch.ones(N, dtype=torch.float64))
    assert actual.triu(1).count_nonzero() == 0  # a product of causal layers is causal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_layers(dtype):
    stack = layers((H,), dtype=dtype)
    actual = regard.rollout(stack, [1, 5])
    assert actual.dtype is torch.float32
    torch.testing.assert_close(actual.double(), product(stack)[[1, 5]], rtol=1e-5, atol=1e-6)


def test_grouped_heads():
    query, key = torch.randn(B, 6, N, D, dtype=torch.float64), torch.randn(B, 3, N, D, dtype=torch.float64)
    stack = [regard.attend(query, key, key, bias=regard.ALiBi(6))[1] for _ in range(2)]
    torch.testing.assert_close(regard.rollout(stack, 3), product(stack)[..., 3, :])


def test_gradients_flow_through_all_layers():
    query = torch.randn(2, H, N, D, dtype=torch.float64, requires_grad=True)
    stack = [regard.attend(each, each, each)[1] for each in query]
    direction = torch.randn(N, dtype=torch.float64)
    (actual,) = torch.autograd.grad(regard.rollout(stack, 2) @ direction, query, retain_graph=True)
    (expected,) = torch.autograd.grad(product(stack)[2] @ direction, query)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("lead", ["heads", "batch"])
def test_averaged_layers_are_taken_as_they_are(lead):
    stack = layers(LEADS[lead])
    actual = regard.rollout([weights.mean("heads") for weights in stack], 3)
    torch.testing.assert_close(actual, product(stack)[..., 3, :])


@pytest.mark.parametrize("lead", ["heads", "batch"])
def test_one_head_of_each_layer(lead):
    stack = layers(LEADS[lead])
    expected = torch.eye(N, dtype=torch.float64)
    for weights in stack:
        head = weights.dense()[..., 1, :, :]
        expected = (torch.eye(N, dtype=torch.float64) / 2 + head / 2) @ expected
    actual = regard.rollout([weights.heads(1) for weights in stack], 3)
    torch.testing.assert_close(actual, expected[..., 3, :])


@pytest.mark.parametrize("queries", [torch.tensor([4, 0]), np.array([4, 0])], ids=["tensor", "array"])
def test_queries_in_a_tensor_or_an_array(queries):
    stack = layers((H,))
    torch.testing.assert_close(regard.rollout(stack, queries), product(stack)[[4, 0]])


@looped(
    ("options", "message"),
    [
        *(({"queries": queries}, "rollout got query") for queries in (N, -N - 1, 100, [0, N])),
        *(({"residual": residual}, str(residual)) for residual in (-0.1, 1.1, float("nan"))),
        ({"layers": []}, "at least one"),
    ],
)
def test_invalid_arguments_are_rejected(options, message):
    with pytest.raises(regard.ArgumentError, match=message):
        regard.rollout(**{"layers": layers((H,))} | options)


def test_layers_of_different_sizes_are_rejected():
    x, y = torch.randn(H, N, D), torch.randn(H, N + 1, D)
    square, larger = regard.attend(x, x, x)[1], regard.attend(y, y, y)[1]
    for stack in ([regard.attend(x, y, y)[1]], [square, larger], [square, regard.attend(y, x, x)[1]]):
        with pytest.raises(regard.ShapeError, match=f"{N + 1}.*{N}|{N}.*{N + 1}"):
            regard.rollout(stack)


def test_no_tokens_and_no_queries():
    x = torch.zeros(H, 0, D)
    assert regard.rollout([regard.attend(x, x, x)[1]]).shape == (0,)
    assert regard.rollout(layers((B, H)), []).shape == (B, 0, N)
