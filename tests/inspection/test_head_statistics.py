"""Head statistics: labels for idealized heads, and measures that match their definitions."""

import math

import numpy as np
import pytest
import torch

import regard
from regard.inspection import head_statistics
from tests.cases import looped

N = 12


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
def test_labels_of_self_attention(weights, label):
    (head,) = head_statistics(weights)
    assert head.label == label


@pytest.mark.parametrize("tokens", [3, 4, 5, 6, 8, 20])
def test_causal_uniform_weights_are_no_sink(tokens):
    (uniform,) = head_statistics(regard.attend(*[torch.zeros(tokens, 1)] * 3, mask=regard.Causal())[1])
    assert uniform.label != "first token"
    (sink,) = head_statistics(first_column(tokens))
    assert sink.label == "first token"


@pytest.mark.parametrize(
    ("weights", "label"),
    [
        (torch.eye(N), "diagonal"),
        (torch.eye(N).repeat_interleave(2, 1) / 2, "diagonal"),
        (torch.eye(N).flip(0), "mixed"),
        (torch.full((N, 2 * N), 0.5 / N), "broad"),
    ],
)
def test_labels_of_cross_attention(weights, label):
    (head,) = head_statistics(weights, cross=True)
    assert head.label == label


@pytest.mark.parametrize("size", [(40, 40), (600, 600)])
@pytest.mark.parametrize("mask", [None, regard.Causal()])
@pytest.mark.parametrize("normalize", [regard.Softmax(), regard.Sparsemax()])
def test_measures_equal_their_definitions(size, mask, normalize):
    generator = torch.Generator().manual_seed(0)
    query, key = (3 * torch.randn(2, n, 8, generator=generator) for n in size)
    weights = regard.attend(query, key, key, mask=mask, normalize=normalize)[1]
    matrices = weights.dense().double()
    n = len(matrices[0])
    distances = (torch.arange(n)[:, None] - torch.arange(n)).abs()
    for lazy, dense, matrix in zip(
        head_statistics(weights), head_statistics(weights.dense()), matrices, strict=True
    ):
        entropy = torch.special.entr(matrix).sum(-1).mean()
        expected = {
            "previous": matrix.diagonal(-1).mean(),
            "next": matrix.diagonal(1).mean(),
            "same": matrix.diagonal().mean(),
            "first": matrix[:, 0].mean(),
            "entropy": entropy,
            "normalized_entropy": entropy / math.log(n),
            "distance": (matrix * distances).sum() / n,
            "sink": (matrix[:, 0] > 0.3).double().mean(),
            "dormant": (matrix[:, 0] > 0.9).double().mean(),
        }
        if mask is not None and n > 136:
            behind = torch.arange(n)[:, None] - torch.arange(n)
            near = ((behind >= 0) & (behind < 64)) | (torch.arange(n) < 4)
            expected["streaming"] = (matrix * near).sum() / n
        for head in (lazy, dense):
            assert head.measures.keys() == expected.keys()
            for name, value in expected.items():
                assert head.measures[name] == pytest.approx(float(value), abs=1e-4, rel=1e-4), name


@pytest.mark.parametrize("mask", [regard.Causal(), None, regard.Causal() & regard.Padding([37, 50])])
@pytest.mark.parametrize("groups", [1, 2])
def test_measures_of_tokens_equal_their_definitions(mask, groups):
    generator = torch.Generator().manual_seed(0)
    n, ids = 50, torch.randint(0, 9, (2, 50), generator=generator)
    query, key = (2 * torch.randn(2, h, n, 8, generator=generator) for h in (2 * groups, groups))
    weights = regard.attend(query, key, key, mask=mask)[1]
    matrix = weights.dense().double()
    names = ("duplicate", "induction", "copying", "retrieval")
    expected = {name: np.zeros((2 * groups, 2)) for name in names}

    def count(name, head, value):
        expected[name][head] += (value, 1)

    for text in range(2):
        for row in range(n):
            same = [j for j in range(row) if ids[text, j] == ids[text, row]]
            copied = [j for j in range(row + 1) if row + 1 < n and ids[text, j] == ids[text, row + 1]]
            for head, weight in enumerate(matrix[text, :, row]):
                if same:
                    count("duplicate", head, weight[same].sum())
                    count("induction", head, weight[[j + 1 for j in same]].sum())
                if copied:
                    count("copying", head, weight[copied].sum())
                    count("retrieval", head, float(int(weight.argmax()) in copied))
    for heads in (head_statistics(weights, ids=ids), head_statistics(weights.dense(), ids=ids)):
        for number, head in enumerate(heads):
            for name, values in expected.items():
                total, rows = values[number]
                assert head.measures[name] == pytest.approx(total / rows, abs=1e-5), name


@looped("bias", [None, "dense", "relative"])
@looped("mask", [None, regard.Causal(), regard.Padding([30, 41], side="left")])
@looped("cross", [False, True])
@looped("softcap", [None, 3.0])
def test_measures_of_the_kernels_equal_those_of_dense_weights(bias, mask, cross, softcap):
    """Measures from one pass of the kernels equal measures from the whole matrix."""
    generator = torch.Generator().manual_seed(0)
    query, key = (3 * torch.randn(2, h, 41, 8, generator=generator) for h in (4, 2))
    options = {"mask": mask, "score": regard.ScaledDot(softcap=softcap)}
    if bias == "dense":
        options["bias"] = torch.randn(4, 41, 41, generator=generator)
    elif bias == "relative":
        options["bias"] = regard.ClippedRelativeBias(torch.randn(4, 33, generator=generator))
    weights, ids = regard.attend(query, key, key, **options)[1], torch.randint(0, 9, (2, 41))
    if mask is not None and not isinstance(mask, regard.Causal):  # dense weights have no first visible key
        weights, ids = weights.batch(1), ids[1:]
    assert_equal_to_dense(weights, ids, cross=cross)


def assert_equal_to_dense(weights, ids, **options):
    dense = head_statistics(weights.dense(), ids=ids, **options)
    for lazy, expected in zip(head_statistics(weights, ids=ids, **options), dense, strict=True):
        assert lazy.label == expected.label
        assert lazy.measures == pytest.approx(expected.measures, abs=2e-5, rel=1e-5, nan_ok=True)


def test_measures_of_unusual_weights_equal_those_of_dense_weights():
    """Covers equal tokens, dense masks, additive scores, negative weights, one query, queries > keys."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 40, (2, 101), generator=generator)
    ids[:, ::2] = 10**12
    x = 2 * torch.randn(2, 3, 101, 8, generator=generator)
    for options in (
        {"mask": torch.rand(2, 1, 101, 101, generator=generator) < 0.7},
        {"score": regard.Additive(8, 8)},
        {"normalize": regard.Mean()},
        {"normalize": regard.Sigmoid()},
        {"normalize": regard.Softmax1(torch.zeros(3))},
        {"score": regard.ScaledDot(scale=300.0)},
    ):
        weights = regard.attend(x, x, x, **options)[1].detach()
        assert_equal_to_dense(weights, ids)
    assert_equal_to_dense(regard.attend(x[..., -1:, :], x, x)[1], ids)
    assert_equal_to_dense(regard.attend(x, x[..., :90, :], x[..., :90, :])[1], ids[:, :90])
    assert_equal_to_dense(regard.attend(x[0, 0], x[0, 0], x[0, 0], mask=regard.Causal())[1], ids[:1])


@pytest.mark.parametrize("streaming", [False, True])
def test_the_first_key_of_padded_texts(streaming):
    """Each text in a left-padded batch has the same measures as alone."""
    n = 200 if streaming else 20
    x = 2 * torch.randn(2, 3, n, 8, generator=torch.Generator().manual_seed(0))
    mask = regard.Causal() & regard.Padding([n - 7, n], side="left")
    heads = head_statistics(regard.attend(x, x, x, mask=mask)[1])
    short = head_statistics(regard.attend(*[x[0, :, 7:]] * 3, mask=regard.Causal())[1])
    whole = head_statistics(regard.attend(*[x[1]] * 3, mask=regard.Causal())[1])
    for head, first, second in zip(heads, short, whole, strict=True):
        for name in ("first", "sink", *(["streaming"] if streaming else [])):
            expected = ((n - 7) * first.measures[name] + n * second.measures[name]) / (2 * n - 7)
            assert head.measures[name] == pytest.approx(expected, abs=1e-5)


def test_labels_of_repeated_tokens():
    ids = torch.arange(6).repeat(2)[None]
    weights = torch.eye(12)
    weights[6:] = torch.eye(12)[1:7]  # the token after the earlier occurrence
    (head,) = head_statistics(weights, ids=ids)
    assert head.measures["induction"] == 1.0
    weights[6:] = torch.eye(12)[:6]
    (head,) = head_statistics(weights, ids=ids)
    assert (head.label, head.measures["duplicate"]) == ("duplicate token", 1.0)


def test_measures_of_cross_attention():
    weights = torch.rand(6, 9, generator=torch.Generator().manual_seed(0)).softmax(-1)
    (head,) = head_statistics(weights, cross=True)
    centers = (np.arange(6) + 0.5) * 1.5 - 0.5
    distances = np.abs(np.arange(9) - centers[:, None])
    assert head.measures["distance"] == pytest.approx((weights.numpy() * distances).sum() / 6, rel=1e-4)
    near = distances <= 1
    assert head.measures["diagonal"] == pytest.approx((weights.numpy() * near).sum() / 6, rel=1e-4)


def test_queries_of_a_cache_are_aligned_to_the_last_keys():
    """The last query is at the last key: measures of the last rows equal a call with only these rows."""
    weights = torch.rand(20, 20, generator=torch.Generator().manual_seed(0)).tril()
    rows = weights[-4:]
    (head,) = head_statistics(rows)
    expected = [float(weights.diagonal(offset)[-4:].mean()) for offset in (-1, 0)]
    assert [head.measures["previous"], head.measures["same"]] == pytest.approx(expected)


@pytest.mark.parametrize("shape", [(2, 0, 0), (2, 0, 3), (2, 3, 0)])
def test_empty_weights_are_labeled_empty(shape):
    assert [head.label for head in head_statistics(torch.zeros(shape))] == ["empty", "empty"]


def test_fully_masked_weights_have_no_measures():
    x = torch.zeros(2, 3, 4)
    heads = head_statistics(regard.attend(x, x, x, mask=torch.zeros(3, 3, dtype=torch.bool))[1])
    assert [(head.label, head.to_dict()["measures"]) for head in heads] == [("mixed", {})] * 2


def test_measures_in_json_are_finite():
    (head,) = head_statistics(torch.full((3, 3), math.nan))
    assert all(math.isfinite(value) for value in head.to_dict()["measures"].values())
    query = torch.randn(1, 4, 2) * 9
    (head,) = head_statistics(
        regard.attend(query, query, query, normalize=regard.Mean())[1]
    )  # negative weights
    assert head.to_dict()["measures"]
    assert all(math.isfinite(value) for value in head.to_dict()["measures"].values())


def test_lazy_windows_measure_as_dense_ones():
    torch.manual_seed(0)
    x, ids = torch.randn(2, 150, 4), torch.randint(0, 100, (1, 150))
    for mask in (regard.Window(left=3, right=0), regard.Window(left=4, right=1)):
        for dtype in (torch.float32, torch.float64):  # the kernels, and blocks of keys
            weights = regard.attend(*[x.to(dtype)] * 3, mask=mask)[1]
            lazy, dense = (head_statistics(w, ids=ids) for w in (weights, weights.dense()))
            for a, b in zip(lazy, dense, strict=True):
                assert a.measures["first"] > 0
                names = set(a.measures) & set(b.measures)
                assert {n: a.measures[n] for n in names} == pytest.approx(
                    {n: b.measures[n] for n in names}, abs=1e-5, nan_ok=True
                )


def test_more_queries_than_keys():
    x = torch.randn(2, 9, 4, dtype=torch.float64)
    weights = regard.attend(x, x[:, :2], x[:, :2])[1]
    assert len(head_statistics(weights, ids=torch.tensor([[3, 3]]))) == 2
