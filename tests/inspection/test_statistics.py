"""What heads do: each label on a head that does nothing else, and measures equal to their definitions."""

import math

import numpy as np
import pytest
import torch

import regard
from regard.app.view_model import LayerView
from regard.inspection.statistics import tell

N = 12


def of(weights, kind="self") -> list:
    return tell(LayerView("attention", "layer 0", kind, weights))


def first_column(n: int) -> torch.Tensor:
    return torch.eye(n)[torch.zeros(n, dtype=torch.long)]


@pytest.mark.parametrize(
    ("weights", "label"),
    [
        (torch.eye(N).roll(1, 0), "previous token"),
        (torch.eye(N).roll(-1, 0), "next token"),
        (torch.eye(N), "same token"),
        (first_column(N), "first token"),
        (torch.full((N, N), 1 / N), "broad"),
        (torch.eye(N).roll(5, 0), "mixed"),
        (torch.ones(1, 1), "same token"),
        (torch.full((2, 2), 0.5), "broad"),
        (torch.zeros(N, N), "mixed"),
    ],
)
def test_a_head_that_does_one_thing(weights, label):
    (told,) = of(weights)
    assert told.label == label


@pytest.mark.parametrize(
    ("weights", "label"),
    [
        (torch.eye(N), "diagonal"),
        (torch.eye(N).repeat_interleave(2, 1) / 2, "diagonal"),
        (torch.eye(N).flip(0), "mixed"),
        (torch.full((N, 2 * N), 0.5 / N), "broad"),
    ],
)
def test_a_head_across_two_texts(weights, label):
    (told,) = of(weights, "cross")
    assert told.label == label


@pytest.mark.parametrize("size", [(40, 40), (600, 600)])
@pytest.mark.parametrize("mask", [None, regard.Causal()])
@pytest.mark.parametrize("normalize", [regard.Softmax(), regard.Sparsemax()])
def test_measures_are_as_defined(size, mask, normalize):
    generator = torch.Generator().manual_seed(0)
    query, key = (3 * torch.randn(2, n, 8, generator=generator) for n in size)
    weights = regard.attend(query, key, key, mask=mask, normalize=normalize)[1]
    dense = weights.dense().double()
    n = len(dense[0])
    distances = (torch.arange(n)[:, None] - torch.arange(n)).abs()
    for lazy, plain, matrix in zip(of(weights), of(weights.dense()), dense, strict=True):
        expected = {
            "previous": matrix.diagonal(-1).mean(),
            "next": matrix.diagonal(1).mean(),
            "same": matrix.diagonal().mean(),
            "first": matrix[2:, 0].mean(),
            "broad": torch.special.entr(matrix).sum(-1).mean() / math.log(n),
            "distance": (matrix * distances).sum() / n,
        }
        for told in (lazy, plain):
            assert told.measures.keys() == expected.keys()
            for name, value in expected.items():
                assert told.measures[name] == pytest.approx(float(value), abs=1e-4, rel=1e-4), name


def test_measures_across_two_texts():
    weights = torch.rand(6, 9, generator=torch.Generator().manual_seed(0)).softmax(-1)
    (told,) = of(weights, "cross")
    centre = (np.arange(6) + 0.5) * 1.5 - 0.5
    away = np.abs(np.arange(9) - centre[:, None])
    assert told.measures["distance"] == pytest.approx((weights.numpy() * away).sum() / 6, rel=1e-4)
    assert told.measures["diagonal"] == pytest.approx((weights.numpy() * (away <= 1)).sum() / 6, rel=1e-4)


@pytest.mark.parametrize("shape", [(2, 0, 0), (2, 0, 3), (2, 3, 0)])
def test_nothing_is_told_of_nothing(shape):
    assert [told.label for told in of(torch.zeros(shape))] == ["empty", "empty"]


def test_measures_are_numbers():
    (told,) = of(torch.full((3, 3), math.nan))
    assert all(math.isfinite(value) for value in told.to_dict()["measures"].values())
    query = torch.randn(1, 4, 2) * 9
    (told,) = of(regard.attend(query, query, query, normalize=regard.Mean())[1])  # negative weights
    assert all(math.isfinite(value) for value in told.to_dict()["measures"].values())
