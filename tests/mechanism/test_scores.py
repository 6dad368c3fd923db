"""Scores: each formula written out by hand, pair by pair, and its derivatives."""

import copy

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import Additive, Concat, Cosine, Dot, Gaussian, General, ScaledDot, Score
from regard.mechanism.scores import Prepared
from tests import naive

QUERIES, KEYS, WIDTH, KEY_WIDTH = 3, 5, 7, 11


def inputs(*lead: int, key_width: int = WIDTH, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(seed)
    shapes = ((*lead, QUERIES, WIDTH), (*lead, KEYS, key_width), (*lead, KEYS, 2))
    query, key, value = (torch.randn(s, generator=make, dtype=torch.float64) for s in shapes)
    return query, key, value


def scores_of(score, query: Tensor, key: Tensor, **options) -> Tensor:
    """Return the scores that the operator used."""
    value = key[..., :1]
    return regard.attend(query, key, value, score=score, **options)[1].scores()


def by_hand(score, query: Tensor, key: Tensor) -> Tensor:
    """Compute the papers' formulas, one pair at a time."""
    pair = naive.pair_score(score)
    rows = [[pair(q, k) for k in key.double().numpy()] for q in query.double().numpy()]
    return torch.tensor(rows, dtype=query.dtype)


LEARNED = {
    "General": lambda: General(WIDTH, WIDTH),
    "General softcap": lambda: General(WIDTH, WIDTH, softcap=0.8),
    "Additive": lambda: Additive(WIDTH, WIDTH),
    "Additive width": lambda: Additive(WIDTH, WIDTH, width=4),
    "Concat": lambda: Concat(WIDTH, WIDTH),
    "Concat width": lambda: Concat(WIDTH, WIDTH, width=4),
}


def make(name: str) -> Score:
    torch.manual_seed(3)
    return LEARNED[name]().double()


implementations = pytest.mark.parametrize("implementation", ["reference", "tiled"])


# Widths


def test_additive_defaults_to_the_key_width():
    assert Additive(WIDTH, KEY_WIDTH).vector.shape == (KEY_WIDTH,)
    assert Additive(WIDTH, KEY_WIDTH, width=13).query_map.shape == (13, WIDTH)
    assert Additive(WIDTH, KEY_WIDTH, width=13).key_map.shape == (13, KEY_WIDTH)


def test_vectors_without_features_score_zero():
    query, key, value = torch.zeros(3, 0), torch.zeros(5, 0), torch.randn(5, 2)
    for score in (Dot(), ScaledDot(), Cosine(), Gaussian()):
        torch.testing.assert_close(
            regard.attention(query, key, value, score=score), value.mean(0).expand(3, 2)
        )


# Softcap


@pytest.mark.parametrize("kind", [Dot, ScaledDot, Cosine, lambda softcap: General(WIDTH, WIDTH, softcap)])
def test_softcap_bounds_scores_and_keeps_small_ones(kind):
    query, key, _ = (t.float() for t in inputs())
    torch.manual_seed(0)
    capped = kind(softcap=0.25)
    torch.manual_seed(0)
    free = kind(softcap=None)
    assert scores_of(capped, query * 1e6, key).abs().max() <= 0.25
    if not isinstance(free, Cosine):
        small = query * 1e-3
        actual, expected = scores_of(capped, small, key), scores_of(free, small, key)
        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-4)


def test_biases_are_added_after_the_softcap():
    query, key, _ = inputs()
    bias = torch.full((QUERIES, KEYS), 100.0, dtype=torch.float64)
    actual = scores_of(Dot(softcap=1.0), query, key, bias=bias)
    torch.testing.assert_close(actual, by_hand(Dot(softcap=1.0), query, key) + 100)


# Cosine


def test_a_zero_vector_has_cosine_zero():
    query, key, value = (t.clone() for t in inputs())
    query[1], key[2] = 0, 0
    actual = scores_of(Cosine(), query, key)
    assert (actual[1] == 0).all()
    assert (actual[:, 2] == 0).all()
    assert torch.isfinite(actual).all()
    torch.testing.assert_close(
        regard.attention(query, key, value, score=Cosine())[1], value.mean(0), msg="equal keys"
    )


def test_a_zero_vector_has_a_finite_gradient():
    query, key, value = (t.clone() for t in inputs())
    query[1], key[2] = 0, 0
    leaves = [t.requires_grad_() for t in (query, key, value)]
    regard.attention(*leaves, score=Cosine()).square().sum().backward()
    assert all(torch.isfinite(t.grad).all() for t in leaves)


def test_the_gradient_at_a_zero_vector_is_bounded():
    """A padding row of zeros must not dominate the norm in gradient clipping."""
    query, key, value = (t.clone() for t in inputs())
    query[1] = 0
    query.requires_grad_()
    regard.attention(query, key, value, score=Cosine()).square().sum().backward()
    assert query.grad.abs().max() < 1e6


@pytest.mark.parametrize("scale", [1e-15, 1e-9, 1e-3, 1e3, 1e9, 1e15])
def test_cosine_does_not_depend_on_the_length(scale):
    query, key, _ = (t.float() for t in inputs())
    torch.testing.assert_close(scores_of(Cosine(), query * scale, key), scores_of(Cosine(), query, key))
    torch.testing.assert_close(scores_of(Cosine(), query, key * scale), scores_of(Cosine(), query, key))


# Gaussian


def test_gaussian_attention_is_nadaraya_watson_regression():
    x, at = torch.linspace(0, 6, 20)[:, None], torch.linspace(0, 6, 7)[:, None]
    y = torch.sin(x)
    kernel = torch.exp(-((at - x.T) ** 2) / (2 * 0.5**2))
    expected = kernel @ y / kernel.sum(-1, keepdim=True)
    torch.testing.assert_close(regard.attention(at, x, y, score=Gaussian(sigma=0.5)), expected)


def test_a_tiny_sigma_is_rejected_or_finite():
    query, key, value = inputs()
    try:
        output = regard.attention(query, key, value, score=Gaussian(sigma=1e-200))
    except regard.ArgumentError:
        return
    assert torch.isfinite(output).all()


# Concat and Additive


def test_concat_of_width_one_is_the_formula_of_the_paper():
    """Wang et al. 2018, "concatenation": relu(wᵀ [θ(x); φ(y)])."""
    score = Concat(WIDTH, KEY_WIDTH).double()
    query, key, _ = inputs(key_width=KEY_WIDTH)
    w = torch.cat([score.query_map, score.key_map], -1)[0]
    for i in range(QUERIES):
        for j in range(KEYS):
            expected = torch.relu(w @ torch.cat([query[i], key[j]]))
            torch.testing.assert_close(scores_of(score, query, key)[i, j], expected)
    assert len(list(score.parameters())) == 2  # only wᵀ
    assert (scores_of(score, query, key) >= 0).all()


def test_concat_of_several_units_learns_how_to_add_them():
    names = [name for name, _ in Concat(WIDTH, KEY_WIDTH, width=4).named_parameters()]
    assert sorted(names) == ["key_map", "mixture", "query_map"]


# Parameters


@pytest.mark.parametrize("name", LEARNED)
def test_a_score_is_saved_and_copied_whole(name):
    score, (query, key, _) = make(name), inputs()
    expected = scores_of(score, query, key)
    again = make(name)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    again.load_state_dict(score.state_dict())
    torch.testing.assert_close(scores_of(again, query, key), expected)
    torch.testing.assert_close(scores_of(copy.deepcopy(score), query, key), expected)


def test_the_names_in_a_state_dict():
    assert set(General(2, 3).state_dict()) == {"weight"}
    assert set(Additive(2, 3).state_dict()) == {"query_map", "key_map", "vector"}
    assert set(Concat(2, 3).state_dict()) == {"query_map", "key_map"}
    assert set(Concat(2, 3, width=2).state_dict()) == {"query_map", "key_map", "mixture"}


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_parameters_of_another_precision_serve_any_call(name, dtype):
    score = make(name).float()
    query, key, value = (t.to(dtype) for t in inputs())
    output = regard.attention(query, key, value, score=score)
    assert output.dtype is dtype
    expected = by_hand(score, query.float(), key.float()).softmax(-1) @ value.float()
    torch.testing.assert_close(output.float(), expected, atol=2e-2, rtol=2e-2)


def test_a_score_moves_and_trains_inside_a_model():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.score = Additive(WIDTH, WIDTH)

        def forward(self, x):
            return regard.attention(x, x, x, score=self.score)

    model = Model()
    assert len(list(model.parameters())) == 3
    step = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    model(torch.randn(4, WIDTH)).square().sum().backward()
    step.step()
    assert all(not torch.equal(before[name], now) for name, now in model.state_dict().items())


# Functions


def test_a_function_may_return_less_than_all_axes():
    query, key, value = inputs(2, 3)
    table = torch.randn(QUERIES, KEYS, dtype=torch.float64)
    actual = regard.attention(query, key, value, score=lambda q, k: table)
    torch.testing.assert_close(actual, table.softmax(-1) @ value)


def test_a_score_function_receives_the_original_tensors():
    seen = []

    def score(query, key):
        seen.append((query.dtype, query.shape, key.shape))
        return query @ key.mT

    query, key, value = (t.to(torch.bfloat16) for t in inputs(2, 3))
    assert regard.attention(query, key, value, score=score).dtype is torch.bfloat16
    assert seen == [(torch.bfloat16, query.shape, key.shape)]


class Network(nn.Module):
    """A score that is a network: an nn.Module, but not a regard score."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(2 * WIDTH, 4)
        self.last = nn.Linear(4, 1, bias=False)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        q, k = query.unsqueeze(-2), key.unsqueeze(-3)
        pair = torch.cat(
            [q.expand(*q.shape[:-2], k.shape[-2], -1), k.expand(*k.shape[:-3], q.shape[-3], -1, -1)], -1
        )
        return self.last(torch.tanh(self.hidden(pair))).squeeze(-1)


@implementations
def test_a_module_is_a_score_and_learns(implementation):
    torch.manual_seed(0)
    score, (query, key, value) = Network().double(), inputs(2, 3)
    learned = list(score.parameters())
    actual = regard.attention(query, key, value, score=score, implementation=implementation)
    expected = score(query, key).softmax(-1) @ value
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(
        torch.autograd.grad(actual.square().sum(), learned),
        torch.autograd.grad(expected.square().sum(), learned),
    )


def test_a_score_of_ones_own_without_a_dense_matrix():
    class Half(Score):
        def prepare(self, query, key):
            return Prepared(query / 2, key, softcap=3.0)

    query, key, _ = inputs()
    torch.testing.assert_close(scores_of(Half(), query, key), 3 * torch.tanh(query @ key.mT / 6))


# Text form


def test_how_scores_are_written():
    assert repr(Dot()) == "Dot(softcap=None)"
    assert repr(ScaledDot(scale=0.5)) == "ScaledDot(scale=0.5, softcap=None)"
    assert repr(Cosine()) == "Cosine(scale=1.0, softcap=None)"
    assert repr(Gaussian(2.0)) == "Gaussian(sigma=2.0)"
    assert repr(General(3, 5)) == "General(3, 5)"
    assert repr(Additive(3, 5)) == "Additive(3, 5, width=5)"
    assert repr(Concat(3, 5)) == "Concat(3, 5, width=1)"


def test_repr_of_general_shows_the_softcap():
    assert "softcap=2.0" in repr(General(3, 5, softcap=2.0))


def test_scores_without_parameters_are_values():
    assert Dot() == Dot() != Dot(softcap=1.0)
    assert len({Dot(), Dot(), ScaledDot(), Cosine(), Gaussian(), Gaussian(2.0)}) == 5
