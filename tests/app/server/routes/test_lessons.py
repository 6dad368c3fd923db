"""Lookup, order and positions: the properties that the page demonstrates."""

import math
from typing import get_args

import pytest
import torch

from regard.app.server.routes.lessons import (
    LookupRequest,
    MaskName,
    NormalizerName,
    OrderRequest,
    PositionsRequest,
    ScoreName,
    lookup,
    order,
    positions,
)
from regard.errors import ArgumentError, ShapeError
from regard.models.layers.positions.sinusoidal import SinusoidalPositions
from tests.cases import looped

QUERY = [[1.0, 0.0, 0.5], [0.0, 2.0, -1.0]]
KEY = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.5, 0.5, 0.5], [-1.0, 0.2, 0.3], [0.3, 0.3, -0.4]]
VALUE = [[10.0], [20.0], [30.0], [40.0], [50.0]]
SUMS_TO_ONE = {"softmax", "sparsemax", "entmax15", "hard"}

# the formula of each normalizer
PHI = {
    "softmax": lambda s, tau, n: (s - tau).exp(),
    "softmax1": lambda s, tau, n: (s - tau).exp(),
    "sparsemax": lambda s, tau, n: (s - tau).clamp(min=0),
    "entmax15": lambda s, tau, n: ((s - tau) / 2).clamp(min=0) ** 2,
    "hard": lambda s, tau, n: (s == tau).double(),
    "mean": lambda s, tau, n: s / n,
    "sigmoid": lambda s, tau, n: 1 / (1 + (tau - s).exp()),
    "relu": lambda s, tau, n: s.clamp(min=0) / n,
}
SCORES = {
    "dot": lambda q, k: q @ k,
    "scaled": lambda q, k: q @ k / math.sqrt(len(q)),
    "cosine": lambda q, k: q @ k / (q.norm() * k.norm()),
    "gaussian": lambda q, k: -((q - k) ** 2).sum() / 2,
    "additive": lambda q, k: (q + k).tanh().sum(),
}


@looped("score", get_args(ScoreName))
def test_scores_follow_their_formula(score):
    result = lookup(LookupRequest(query=QUERY, key=KEY, value=VALUE, score=score))
    query, key = torch.tensor(QUERY, dtype=torch.float64), torch.tensor(KEY, dtype=torch.float64)
    expected = [[float(SCORES[score](q, k)) for k in key] for q in query]
    assert torch.allclose(torch.tensor(result.scores), torch.tensor(expected), atol=1e-9)


@looped("normalize", get_args(NormalizerName))
@looped("mask", get_args(MaskName))
@looped("temperature", [1.0, 0.3])
def test_weights_and_output_follow_from_the_scores(normalize, mask, temperature):
    """The displayed formulas give the displayed numbers."""
    payload = LookupRequest(
        query=QUERY, key=KEY, value=VALUE, normalize=normalize, mask=mask, window=1, temperature=temperature
    )
    result = lookup(payload)
    scores, masked = torch.tensor(result.scores, dtype=torch.float64), torch.tensor(result.masked)
    tau, weights = (torch.tensor(x, dtype=torch.float64) for x in (result.tau, result.weights))
    tau, seen = tau[:, None], (~masked).sum(-1, keepdim=True)
    expected = PHI[normalize](scores / temperature, tau, seen).masked_fill(masked, 0)
    assert torch.allclose(weights, expected, atol=1e-12)
    output = weights @ torch.tensor(VALUE, dtype=torch.float64)
    assert torch.allclose(torch.tensor(result.output, dtype=torch.float64), output)
    if normalize in SUMS_TO_ONE:
        assert torch.allclose(weights.sum(-1), torch.ones(2, dtype=torch.float64))


def test_masks_and_low_temperature():
    causal = lookup(LookupRequest(query=QUERY, key=KEY, value=VALUE, mask="causal"))
    assert causal.masked == [[False] * 4 + [True], [False] * 5]  # the last query attends to the last key
    window = lookup(LookupRequest(query=KEY, key=KEY, value=VALUE, mask="window", window=1))
    assert window.masked[2] == [True, False, False, False, True]
    cold = lookup(LookupRequest(query=QUERY, key=KEY, value=VALUE, temperature=0.001))
    hard = lookup(LookupRequest(query=QUERY, key=KEY, value=VALUE, normalize="hard"))
    assert torch.allclose(torch.tensor(cold.weights), torch.tensor(hard.weights), atol=1e-6)
    assert "0.001" in cold.formula.normalize


@looped(
    ("query", "key", "value", "message"),
    [
        ([[1, 2]], [[1, 2], [1]], [[1], [1]], "key: row 0 has 2 numbers and row 1 has 1"),
        ([[1, 2]], [[1]], [[1]], "2 features"),
        ([[1]], [[1], [2]], [[1]], "1"),
    ],
)
@looped("score", ["scaled", "additive"])
def test_tables_of_wrong_shape_are_refused(query, key, value, message, score):
    with pytest.raises(ShapeError, match=message):
        lookup(LookupRequest(query=query, key=key, value=value, score=score))


SENTENCE, SHUFFLED = "the dog bites the old man", [5, 3, 4, 2, 0, 1]


def test_without_positions_outputs_only_change_their_order():
    """Attention treats its keys as a set: reordering the words only reorders the outputs."""
    result = order(OrderRequest(sentence=SENTENCE, order=SHUFFLED))
    assert max(result.change) < 1e-12
    assert result.shuffled == ["man", "the", "old", "bites", "the", "dog"]
    before, after = torch.tensor(result.before), torch.tensor(result.after)
    assert torch.allclose(before[SHUFFLED], after)
    first, second = torch.tensor(result.weights_before), torch.tensor(result.weights_after)
    assert torch.allclose(first[SHUFFLED][:, SHUFFLED], second)
    assert torch.allclose(before[0], before[3])  # the same word twice


@looped("kind", ["sinusoidal", "learned", "rotary", "alibi", "t5"])
def test_with_positions_outputs_depend_on_order(kind):
    result = order(OrderRequest(sentence=SENTENCE, order=SHUFFLED, positions=kind))
    assert max(result.change) > 1e-3
    same = order(OrderRequest(sentence=SENTENCE, order=list(range(6)), positions=kind))
    assert max(same.change) == 0
    assert not torch.allclose(torch.tensor(same.before)[0], torch.tensor(same.before)[3])


def test_the_seed_determines_the_result_and_order_must_be_a_permutation():
    first, again, other = (
        order(OrderRequest(sentence=SENTENCE, order=SHUFFLED, positions="t5", seed=seed))
        for seed in (7, 7, 8)
    )
    assert first == again != other
    for wrong in ([0, 1], [0, 0, 1, 2, 3, 4], [1, 2, 3, 4, 5, 6]):
        with pytest.raises(ArgumentError, match="6 words; list the index of each word once"):
            order(OrderRequest(sentence=SENTENCE, order=wrong))


def test_encodings_have_the_requested_size_and_equal_the_models():
    shapes = {"sinusoidal": (11, 6), "learned": (11, 6), "rotary": (11, 3), "alibi": (6, 21), "t5": (6, 21)}
    for kind, shape in shapes.items():
        result = positions(PositionsRequest(kind=kind, length=11, width=6))
        assert torch.tensor(result.values).shape == shape
        assert (result.rows, result.start) == (("head", -10) if shape[0] == 6 else ("position", 0))
    result = positions(PositionsRequest(length=5, width=4))
    assert torch.allclose(torch.tensor(result.values), SinusoidalPositions(4)(torch.arange(5)), atol=1e-5)
    alibi = torch.tensor(positions(PositionsRequest(kind="alibi", length=5, width=2)).values)
    assert alibi[0].tolist() == [-0.25, -0.1875, -0.125, -0.0625, 0, -0.0625, -0.125, -0.1875, -0.25]
