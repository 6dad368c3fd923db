"""Normalizers: φ, φ' and τ, the laws of weights, and a comparison with the `entmax` package."""

import inspect
import math
from collections.abc import Callable
from unittest.mock import Mock, patch

import entmax
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import regard
from regard import (
    Dot,
    Entmax,
    Entmax15,
    Hard,
    Mean,
    Normalizer,
    Relu,
    Sigmoid,
    Sink,
    Softmax,
    Softmax1,
    Sparsemax,
)
from regard.mechanism import autograd, fused, normalizers
from regard.mechanism.normalizers import from_text, to_text
from tests.cases import looped
from tests.custom import Squares, Unnormalized

implementations = pytest.mark.parametrize("implementation", ["reference", "tiled"])


def weights_of(rows: Tensor, normalize: Normalizer, implementation: str | None = None) -> Tensor:
    """Return the operator's weights for these scores, (…, q, k), −inf = masked."""
    query = torch.zeros(*rows.shape[:-1], 1, dtype=rows.dtype)
    key = torch.zeros(*rows.shape[:-2], rows.shape[-1], 1, dtype=rows.dtype)
    options = {"score": Dot(), "bias": rows, "normalize": normalize, "implementation": implementation}
    return regard.attend(query, key, key, **options)[1].dense()


def row(*scores: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor([scores], dtype=dtype)


SUM_TO_ONE = [
    Softmax(),
    Softmax(temperature=0.3),
    Softmax(temperature=7.0),
    Sparsemax(),
    Entmax15(),
    Entmax(1.5),
    Entmax(2.0),
    Entmax(1.1),
    Entmax(1.3),
    Entmax(1.75),
    Entmax(2.5),
    Entmax(4.0),
    Hard(),
]
OTHERS = [Softmax1(), Softmax1(1.5), Mean(), Relu(), Sigmoid(), Sigmoid(bias=0.5)]
ALL = SUM_TO_ONE + OTHERS
every = looped("normalize", ALL)
summing = looped("normalize", SUM_TO_ONE)


def rows(*, bound: float = 50.0) -> st.SearchStrategy[Tensor]:
    """Draw several rows of scores: small and large, with ties, and with −inf where a key is masked."""
    plain = st.floats(-bound, bound, width=32)
    tied = st.sampled_from([-1.0, 0.0, 0.0, 0.5, 1.0])
    number = plain | tied | st.just(-math.inf)
    sizes = st.tuples(st.integers(1, 4), st.integers(1, 6))
    return sizes.flatmap(
        lambda size: st.lists(number, min_size=math.prod(size), max_size=math.prod(size)).map(
            lambda scores: torch.tensor(scores, dtype=torch.float64).reshape(size)
        )
    )


def close(actual: Tensor, expected: Tensor, normalize: Normalizer, times: float = 1) -> None:
    atol = times * tolerance(normalize)
    torch.testing.assert_close(actual, expected, atol=atol, rtol=1e-9, msg=lambda m: f"{normalize!r}: {m}")


def tolerance(normalize: Normalizer) -> float:
    """Return the attainable accuracy of a weight. For α > 2, φ' is infinite at the edge of the support: a
    one-bit error in x becomes its 1 / (α − 1)-th power there."""
    alpha = normalize.alpha if isinstance(normalize, Entmax) else 1.0
    return 1e-9 if alpha <= 2 else 100 * 2.0 ** (-52 / (alpha - 1))


# φ, φ' and τ


@every
def test_the_slope_is_the_derivative_of_phi(normalize):
    x = torch.linspace(-3, 3, 61, dtype=torch.float64) + 0.0123  # avoids the kink at 0
    h = 1e-6
    numeric = (normalize.phi(x + h) - normalize.phi(x - h)) / (2 * h)
    torch.testing.assert_close(normalize.slope(x), numeric, atol=1e-7, rtol=1e-6)


def test_finite_differences_can_fail():
    class Wrong(Softmax):
        def slope(self, x):
            return self.phi(x) * 1.001

    with pytest.raises(AssertionError):
        test_the_slope_is_the_derivative_of_phi.__wrapped__(Wrong())


@given(rows())
def test_tau_solves_the_row_sum(scores):
    """Σ φ(scores − τ) = 1 in rows whose maximum is 0."""
    top = scores.amax(-1, keepdim=True)
    scores = torch.where(top == -math.inf, 0.0, scores - top)
    visible = scores != -math.inf
    for normalize in SUM_TO_ONE:
        x = scores - normalize.tau(scores)
        phi = torch.where(visible, normalize.phi(torch.where(visible, x, 0.0)), 0.0)
        divisor = normalize.divisor(x, visible)
        total = (phi if divisor is None else phi / divisor).sum(-1)
        close(total, torch.ones_like(total), normalize, times=6)


def test_phi_and_tau_by_their_formulas():
    scores = row(0.3, -0.2, 0.0, -1.4)
    n = scores.shape[-1]
    formulas: list[tuple[Normalizer, Tensor]] = [
        (Softmax(), scores.exp() / scores.exp().sum()),
        (Softmax(2.0), (scores / 2).exp() / (scores / 2).exp().sum()),
        (Softmax1(), scores.exp() / (1 + scores.exp().sum())),
        (Softmax1(0.7), scores.exp() / (math.exp(0.7) + scores.exp().sum())),
        (Mean(), scores / n),
        (Relu(), scores.clamp(min=0) / n),
        (Sigmoid(), 1 / (1 + (-(scores - math.log(n))).exp())),
        (Sigmoid(bias=0.5), 1 / (1 + (-(scores + 0.5)).exp())),
        (Hard(), row(1, 0, 0, 0)),
    ]
    for normalize, expected in formulas:
        torch.testing.assert_close(weights_of(scores, normalize), expected)


def test_the_count_is_of_keys_in_sight():
    """n is the number of visible keys, not of all keys."""
    scores, hidden = row(1.0, 2.0), row(1.0, -math.inf, 2.0, -math.inf)
    for normalize in (Mean(), Relu(), Sigmoid()):
        assert torch.equal(weights_of(hidden, normalize)[:, [0, 2]], weights_of(scores, normalize))


# Laws


@given(rows(), st.floats(-60, 60))
def test_rows_with_a_sink_sum_to_one_minus_the_sink(scores, sink):
    total = weights_of(scores, Softmax1(sink)).sum(-1)
    left = torch.nn.functional.pad(scores, (0, 1), value=sink).softmax(-1)[:, :-1].sum(-1)
    torch.testing.assert_close(total, left)


@given(rows(), st.data())
def test_rows_are_shares_ordered_by_score(scores, data):
    """Rows sum to one and are ordered by score; equal scores have equal weights; key order is irrelevant."""
    permuted = data.draw(st.permutations(range(scores.shape[-1])))
    visible = (scores != -math.inf).any(-1).double()
    ordered, order = scores.sort(-1)
    seen = ordered[:, :-1] != -math.inf  # with Mean, visible keys may have negative weights
    for normalize in ALL:
        weights = weights_of(scores, normalize)
        close(weights_of(scores[:, permuted], normalize), weights[:, permuted], normalize)
        step = weights.gather(-1, order).diff(dim=-1)
        assert (step[seen] >= 0).all(), normalize
        assert (step[seen & (ordered[:, 1:] == ordered[:, :-1])] == 0).all(), normalize
        if normalize in SUM_TO_ONE:
            close(weights.sum(-1), visible, normalize, times=6)
        assert (weights >= 0).all() or isinstance(normalize, Mean), normalize
        assert (weights <= 1 + 1e-12).all() or isinstance(normalize, Mean | Relu), normalize


@given(rows(bound=4), st.sampled_from([-(2.0**20), -3.0, 2.0, 2.0**20]))
def test_weights_are_invariant_to_a_row_offset(scores, offset):
    scores = (scores * 2**10).round() / 2**10  # makes the sum exact and keeps ties
    for normalize in SUM_TO_ONE:
        close(weights_of(scores + offset, normalize), weights_of(scores, normalize), normalize)


def test_the_laws_can_fail():
    """Rows that sum to slightly more than one are detected."""

    class Loud(Softmax):
        def tau(self, scores):
            return super().tau(scores) - 1e-6

    with pytest.raises(AssertionError, match="temperature"):
        close(weights_of(row(0.5, -1.0, 0.0), Loud()).sum(-1), torch.ones(1, dtype=torch.float64), Loud())


@summing
@looped("score", [-1e30, -50.0, 0.0, 1e-30, 50.0, 1e30])
def test_a_single_key_gets_everything(normalize, score):
    assert weights_of(row(score), normalize).tolist() == [[1.0]]
    assert weights_of(row(score, -math.inf), normalize).tolist() == [[1.0, 0.0]]


@every
@looped("dtype", [torch.float32, torch.float64], ids=str)
@looped(
    "scores",
    [
        (1e4, -1e4, 0.0),
        (-1e4, -1e4 - 1, -1e4 + 0.5),
        (3e38, -3e38, 0.0),
        (-3e38, -3e38, -3e38),
        (1e30, 1e30, -math.inf),
        (1e-40, -1e-40, 0.0),
    ],
)
def test_huge_scores_stay_finite(normalize, dtype, scores):
    scores = row(*scores, dtype=dtype).requires_grad_()
    weights = weights_of(scores, normalize)
    assert torch.isfinite(weights).all()
    if normalize.sums_to_one and not isinstance(normalize, Softmax1):
        assert weights.sum().item() == pytest.approx(1, abs=1e-5)
    value = torch.tensor([[0.1], [0.2], [0.3]], dtype=dtype)
    zeros = torch.zeros(3, 1, dtype=dtype)
    output = regard.attention(zeros[:1], zeros, value, bias=scores, normalize=normalize)
    output.sum().backward()
    assert torch.isfinite(output).all()
    assert torch.isfinite(scores.grad).all()


# Sparsemax and Entmax, compared with the authors' package

PECULIAR = {
    "ties": row(1, 1, 1, 0, 0),
    "all equal": row(2, 2, 2, 2),
    "ties at the edge": row(1, 0, 0, -1, -1),
    "one wins": row(100, 0, -5),
    "large offset": row(1000.25, 1000, 999.5, 990),
    "tiny differences": row(1e-9, 0, -1e-9),
    "extreme": row(1e30, -1e30, 0),
    "one key": row(3),
}


def theirs(alpha: float) -> Callable[[Tensor], Tensor]:
    if alpha == 1.5:
        return lambda x: entmax.entmax15(x, dim=-1)
    if alpha == 2:
        return lambda x: entmax.sparsemax(x, dim=-1)
    return lambda x: entmax.entmax_bisect(x, alpha=alpha, dim=-1, n_iter=100)


def ours(alpha: float) -> Normalizer:
    return {1.5: Entmax15(), 2.0: Sparsemax()}.get(alpha, Entmax(alpha))


alphas = pytest.mark.parametrize("alpha", [1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 5.0])


@pytest.mark.sampled(3)
@alphas
@implementations
@looped("spread", [0.1, 1.0, 10.0])
def test_entmax_agrees_with_the_package(alpha, spread, implementation):
    """Weights and gradients agree on random rows."""
    make = torch.Generator().manual_seed(1)
    scores = spread * torch.randn(20, 13, generator=make, dtype=torch.float64)
    actual = scores.clone().requires_grad_()
    weights = weights_of(scores, ours(alpha), implementation)
    atol = max(1e-9, tolerance(ours(alpha)))
    torch.testing.assert_close(weights, theirs(alpha)(scores), atol=atol, rtol=1e-7)
    if alpha > 2:  # φ' is infinite at the edge, where implementations disagree
        return
    value = torch.randn(13, 2, generator=make, dtype=torch.float64)
    expected = scores.clone().requires_grad_()
    (theirs(alpha)(expected) @ value).square().sum().backward()
    zeros = torch.zeros(20, 1, dtype=torch.float64)
    options = {"score": Dot(), "normalize": ours(alpha), "implementation": implementation}
    regard.attention(zeros, zeros[:13], value, bias=actual, **options).square().sum().backward()
    torch.testing.assert_close(actual.grad, expected.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.sampled(2)
@alphas
@looped("name", PECULIAR)
def test_entmax_agrees_with_the_package_on_peculiar_rows(alpha, name):
    scores = PECULIAR[name]
    if name == "extreme" and alpha not in (1.5, 2.0):
        return  # the package's bisection overflows
    atol = max(1e-7, tolerance(ours(alpha)))
    torch.testing.assert_close(weights_of(scores, ours(alpha)), theirs(alpha)(scores), atol=atol, rtol=1e-6)


def test_the_comparison_with_the_package_can_fail():
    scores = torch.randn(20, 13, dtype=torch.float64)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(
            weights_of(scores, Entmax(1.51)), theirs(1.5)(scores), atol=1e-4, rtol=1e-4
        )


def test_sparsemax_is_the_nearest_point_of_the_simplex():
    scores = torch.randn(1, 6, dtype=torch.float64)
    nearest = (weights_of(scores, Sparsemax()) - scores).square().sum()
    others = torch.distributions.Dirichlet(torch.ones(6, dtype=torch.float64)).sample((500,))
    assert ((others - scores).square().sum(-1) >= nearest).all()


def accepted(alpha: float) -> Normalizer | None:
    """Return `Entmax(alpha)`; an alpha too close to a limit may be rejected instead of giving a wrong sum."""
    try:
        return Entmax(alpha)
    except regard.ArgumentError:
        assert not 1.02 < alpha < 8, "an alpha in common use"
        return None


def test_entmax_with_alpha_near_one_tends_to_softmax():
    scores = torch.randn(5, 9, dtype=torch.float64)
    gaps = [gap for gap in (0.3, 0.1, 0.03, 1e-2, 1e-3, 1e-4) if accepted(1 + gap)]
    errors = [(weights_of(scores, Entmax(1 + gap)) - scores.softmax(-1)).abs().max().item() for gap in gaps]
    assert all(error < 5 * gap for gap, error in zip(gaps, errors, strict=True))
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("gap", [0.1, 0.03, 1e-2, 1e-3, 1e-4, 1e-5])
def test_entmax_with_alpha_near_one_still_sums_to_one_in_float32(gap):
    normalize = accepted(1 + gap)
    if normalize is not None:
        total = weights_of(torch.randn(5, 9), normalize).sum(-1)
        torch.testing.assert_close(total, torch.ones(5), atol=1e-4, rtol=0)


@pytest.mark.parametrize("alpha", [5.0, 7.5, 20.0, 100.0, 1000.0])
def test_entmax_with_a_large_alpha_tends_to_hard(alpha):
    """If (α − 1) times the margin of the best key is at least 1, Entmax equals `Hard`."""
    normalize, scores = accepted(alpha), row(0.3, 1.0, -2.0, 0.74)
    if normalize is not None:
        torch.testing.assert_close(
            weights_of(scores, normalize), weights_of(scores, Hard()), atol=1e-6, rtol=0
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("alpha", "keys"),
    [(3.0, 1000), (5.0, 1000), (7.5, 10), (7.5, 1000), (10.0, 100), (10.0, 1000), (50.0, 10), (1000.0, 2)],
)
def test_equal_scores_give_equal_weights_for_any_alpha(alpha, keys, dtype):
    """Zero queries, as in padding or at initialization, give equal scores."""
    normalize = accepted(alpha)
    if normalize is not None:
        weights = weights_of(torch.zeros(1, keys, dtype=dtype), normalize)
        torch.testing.assert_close(weights.sum().item(), 1.0, atol=1e-4, rtol=0)
        torch.testing.assert_close(weights, torch.full((1, keys), 1 / keys, dtype=dtype))


def test_entmax_is_sparser_with_a_larger_alpha():
    scores = torch.randn(50, 20, dtype=torch.float64)
    seen = [(weights_of(scores, Entmax(a)) > 0).sum().item() for a in (1.05, 1.5, 2.0, 3.0, 6.0)]
    assert seen == sorted(seen, reverse=True)
    assert seen[0] == 1000 or seen[0] > seen[-1]


# Softmax and its temperature


@given(rows(), st.floats(1e-3, 1e3))
def test_temperature_divides_the_scores(scores, temperature):
    expected = (scores / temperature).softmax(-1).nan_to_num()  # zeros in rows without visible keys
    torch.testing.assert_close(weights_of(scores, Softmax(temperature)), expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("temperature", [1e-46, 1e-30, 1e30, 3e38, math.inf])
def test_an_extreme_temperature_is_rejected_or_valid(temperature, dtype):
    scores = row(0.3, 1.0, -2.0, 1.0, dtype=dtype).expand(1, 4).repeat(1, 50)
    try:
        weights = weights_of(scores, Softmax(temperature))
    except regard.ArgumentError:
        return
    assert torch.isfinite(weights).all()
    assert weights.sum().item() == pytest.approx(1, abs=1e-4)


# Sinks


@given(rows())
def test_a_very_low_sink_has_no_effect(scores):
    expected = weights_of(scores, Softmax())
    for sink in (-1e3, -1e30, -math.inf):
        torch.testing.assert_close(weights_of(scores, Softmax1(sink)), expected)


def test_an_infinite_sink_is_rejected_or_takes_everything():
    try:
        weights = weights_of(row(1.0, 2.0), Softmax1(math.inf))
    except regard.ArgumentError:
        return
    assert weights.tolist() == [[0.0, 0.0]]


def test_a_sink_has_the_precision_of_the_call():
    weights = weights_of(row(0.0), Softmax1(0.1))
    assert weights.item() == pytest.approx(1 / (1 + math.exp(0.1)), rel=1e-14)


def test_a_scalar_sink_applies_to_all_heads():
    x = torch.randn(2, 3, 5, 4)
    expected = regard.attention(x, x, x, normalize=Softmax1(torch.full((3,), 0.7)))
    torch.testing.assert_close(regard.attention(x, x, x, normalize=Softmax1(0.7)), expected)
    torch.testing.assert_close(regard.attention(x, x, x, normalize=Softmax1(torch.tensor(0.7))), expected)


def test_a_learned_sink_is_a_module():
    sink = Sink(heads=3, start=-1.0)
    assert [(name, p.tolist()) for name, p in sink.named_parameters()] == [("score", [-1.0, -1.0, -1.0])]
    assert isinstance(sink(), Softmax1)
    assert repr(sink) == "Sink(heads=3)"


def test_a_row_without_keys_gives_its_sink_no_gradient():
    normalize = Sink(heads=1)
    x = torch.randn(1, 3, 4)
    regard.attention(x, x, x, mask=regard.Padding(0), normalize=normalize).sum().backward()
    assert normalize.score.grad.tolist() == [0.0]


# Text form


@pytest.mark.parametrize(
    ("special", "general"), [(Sparsemax(), Entmax(2.0)), (Entmax15(), Entmax(1.5))], ids=repr
)
def test_aliases_equal_their_entmax(special, general):
    assert special == general
    assert general == special
    assert hash(special) == hash(general)
    assert len({special, general}) == 1
    assert special != Entmax(1.7)
    assert (special.alpha, repr(special)) == (general.alpha, f"{type(special).__name__}()")
    assert from_text(to_text(special)) == from_text(to_text(general)) == special
    x = torch.randn(2, 3, 5, 8)
    assert regard.explain(x, x, x, normalize=special) == regard.explain(x, x, x, normalize=general)
    path = autograd if fused.available() else Mock()  # there is no fast path without kernels
    with patch.object(path, "run", side_effect=AssertionError("general path")):
        outputs = [regard.attention(x, x, x, normalize=normalize) for normalize in (special, general)]
    assert torch.equal(*outputs)


def test_a_subclass_of_entmax_is_another_normalizer():
    class Mine(Entmax):
        pass

    assert Mine(1.5) == Mine(1.5)
    assert Mine(1.5) != Entmax(1.5)
    assert Entmax15() != Mine(1.5)
    assert Entmax(1.5) != Softmax()


@given(
    st.floats(1e-30, 1e30).map(Softmax)
    | st.floats(1.02, 8).map(Entmax)
    | st.floats(allow_nan=False, allow_infinity=False).map(Sigmoid)
    | st.sampled_from([Softmax(), Sparsemax(), Entmax15(), Mean(), Relu(), Sigmoid(), Hard()])
)
def test_text_form_is_exact(normalize):
    again = from_text(to_text(normalize))
    assert type(again) is type(normalize)
    assert again == normalize
    assert to_text(again) == to_text(normalize)


@pytest.mark.parametrize("name", [name for name in normalizers.BUILT_IN if name != "Softmax1"])
def test_the_text_form_has_every_number(name):
    """Otherwise, saved weights and compiled graphs would use the default."""
    kind = normalizers.BUILT_IN[name]
    numbers = [1.25 + i / 8 for i in range(len(inspect.signature(kind).parameters))]
    assert to_text(kind(*numbers)) == " ".join([name, *(number.hex() for number in numbers)])
    assert from_text(to_text(kind(*numbers))) == kind(*numbers)


def test_a_sinks_score_is_not_spelled():
    """The score may be a tensor, which is stored separately."""
    assert to_text(Softmax1(3.0)) == "Softmax1"
    assert isinstance(from_text("Softmax1"), Softmax1)


def test_custom_normalizers_have_no_text_form():
    class Mine(Softmax):
        pass

    impostor = type("Softmax", (Softmax,), {})
    assert to_text(Mine()) is None
    assert to_text(impostor()) is None


@pytest.mark.parametrize("text", ["Softplus", "", "softmax 0x1p+0", "Sink"])
def test_unknown_text_forms_are_rejected(text):
    with pytest.raises(regard.ArgumentError, match="unknown normalizer"):
        from_text(text)


# Custom normalizers


class Cubes(Normalizer):
    """max(s − τ, 0)³, τ by bisection: Entmax(4/3) up to scaling."""

    def tau(self, scores):
        low, high = torch.full_like(scores[..., :1], -1.0), torch.zeros_like(scores[..., :1])
        for _ in range(60):
            middle = (low + high) / 2
            above = self.phi(scores - middle).sum(-1, keepdim=True) >= 1
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        return low

    def phi(self, x):
        return x.clamp(min=0) ** 3

    def slope(self, x):
        return 3 * x.clamp(min=0) ** 2


@implementations
@pytest.mark.parametrize("normalize", [Squares(), Cubes()], ids=["Squares", "Cubes"])
def test_ones_own_normalizer_needs_phi_slope_and_tau(normalize, implementation):
    make = torch.Generator().manual_seed(4)
    query, key, value = (
        torch.randn(2, n, 3, generator=make, dtype=torch.float64, requires_grad=True) for n in (3, 4, 4)
    )
    mask = regard.Causal()
    weights = regard.attend(query, key, value, normalize=normalize, mask=mask)[1]
    scores = weights.scores()
    if isinstance(normalize, Squares):
        expected = scores.clamp(min=0) ** 2
    else:
        expected = weights_of(scores * 3, Entmax(4 / 3))  # ((α − 1) 3 s)^3 = s^3
    torch.testing.assert_close(weights.dense(), expected)
    assert torch.autograd.gradcheck(
        lambda *x: regard.attention(*x, normalize=normalize, mask=mask, implementation=implementation),
        (query, key, value),
        fast_mode=True,
    )


def test_ones_own_normalizer_may_learn():
    """The temperature is a parameter whose gradient equals that of softmax(s / t)."""

    class LearnedScale(nn.Module, Normalizer):
        def __init__(self):
            super().__init__()
            self.temperature = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

        def tau(self, scores):
            return self.temperature * torch.logsumexp(scores / self.temperature, -1, keepdim=True)

        def phi(self, x):
            return torch.exp(x / self.temperature)

        def slope(self, x):
            return self.phi(x) / self.temperature

    normalize = LearnedScale()
    query, key, value = torch.randn(3, 2, 5, 4, dtype=torch.float64).unbind()
    actual = regard.attention(query, key, value, normalize=normalize)
    expected = (query @ key.mT / 2 / normalize.temperature).softmax(-1) @ value
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(
        torch.autograd.grad(actual.square().sum(), normalize.temperature),
        torch.autograd.grad(expected.square().sum(), normalize.temperature),
    )


class Squareplus(Unnormalized):
    """(x + √(x² + 4)) / 2, a smooth relu: NaN at −inf, where it must not be evaluated."""

    def phi(self, x):
        return (x + (x.square() + 4).sqrt()) / 2

    def slope(self, x):
        return (1 + x / (x.square() + 4).sqrt()) / 2


class SharedSquareplus(Squareplus):
    """Squareplus with rows that sum to one."""

    sums_to_one = True

    def tau(self, scores):
        low, high = (torch.full_like(scores[..., :1], bound) for bound in (-1e4, 1e4))
        visible = scores != -math.inf
        for _ in range(80):
            middle = (low + high) / 2
            total = torch.where(visible, self.phi(torch.where(visible, scores - middle, 0.0)), 0.0).sum(
                -1, True
            )
            low, high = torch.where(total >= 1, middle, low), torch.where(total >= 1, high, middle)
        return low


@implementations
@pytest.mark.parametrize("normalize", [Squareplus(), SharedSquareplus()], ids=["Squareplus", "shared"])
def test_custom_phi_is_ignored_for_masked_keys(normalize, implementation):
    make = torch.Generator().manual_seed(6)
    query, key, value = (
        torch.randn(n, 3, generator=make, dtype=torch.float64, requires_grad=True) for n in (3, 5, 5)
    )
    options = {"normalize": normalize, "implementation": implementation}
    actual = regard.attention(query, key, value, mask=regard.Padding(2), **options)
    expected = regard.attention(query, key[:2], value[:2], **options)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(
        torch.autograd.grad(actual.square().sum(), [query, key, value]),
        torch.autograd.grad(expected.square().sum(), [query, key, value]),
    )


def test_an_incomplete_normalizer_names_the_missing_method():
    class Half(Normalizer):
        def tau(self, scores):
            return scores[..., :1]

    x = torch.randn(3, 2)
    with pytest.raises(NotImplementedError, match=r"Half must implement phi"):
        regard.attention(x, x, x, normalize=Half())


@pytest.mark.parametrize(
    "normalize",
    [Sparsemax(), *(pytest.param(Entmax(alpha), marks=pytest.mark.slow) for alpha in (1.7, 2.5))],
    ids=str,
)
def test_equal_scores_of_very_many_keys_sum_to_one(normalize):
    """Newton's first step overshoots because of rounding, but τ must still converge."""
    key = torch.zeros(2_000_000, 1)
    weights = regard.attend(key[:1], key, key, normalize=normalize, implementation="tiled")[1]
    assert abs(float(weights.dense().sum()) - 1) < 1e-3


@pytest.mark.parametrize("alpha", [1.3, 2.0, 2.5, 4.0])
def test_rows_sum_to_one_with_autograd(alpha):
    torch.manual_seed(0)
    query, key = (torch.randn(4, 50, 8) * 3).requires_grad_(), torch.randn(4, 50, 8)
    options = {"normalize": regard.Entmax(alpha), "implementation": "reference"}
    recorded = regard.attend(query, key, key, **options)[1].dense().detach()
    plain = regard.attend(query.detach(), key, key, **options)[1].dense()
    assert torch.allclose(recorded, plain, atol=1e-6)
