"""Biases: the papers' rules pair by pair, and relative biases compared with dense matrices."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import regard
from regard import ALiBi, ClippedRelativeBias, RelativeBias, T5Bias
from regard.mechanism.biases import expand_line, sum_diagonals
from tests import naive
from tests.cases import crossed, looped, tiles_of

few = settings(max_examples=40)
SIZES = [(5, 5), (3, 7), (7, 3), (1, 6)]


def matrix(queries: int, keys: int, at: Callable[[int], float]) -> Tensor:
    """Return the bias of each pair, by its distance key − query; the last query is at the last key."""
    rows = [[at(j - (i + keys - queries)) for j in range(keys)] for i in range(queries)]
    return torch.tensor(rows, dtype=torch.float64).reshape(queries, keys)


def plain(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """Compute softmax(query · key / √d + bias) · value without regard."""
    scores = query @ key.mT / math.sqrt(query.shape[-1]) + bias
    return scores.softmax(-1) @ value


def inputs(*lead: int, queries: int, keys: int, width: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(7)
    shapes = ((*lead, queries, width), (*lead, keys, width), (*lead, keys, 3))
    query, key, value = (torch.randn(s, generator=make, dtype=torch.float64) for s in shapes)
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_()


# ALiBi


def test_alibi_slopes_that_the_paper_prints():
    """Press et al. 2022, section 3, and their code if the number of heads is not a power of two."""
    for heads in (1, 2, 4, 8, 12, 16, 31):
        expected = [naive.slope(head, heads) for head in range(heads)]
        torch.testing.assert_close(ALiBi(heads).slopes, torch.tensor(expected))
    assert ALiBi(8).slopes.tolist() == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    torch.testing.assert_close(ALiBi(16).slopes, 2.0 ** -(torch.arange(1, 17) / 2))


@given(st.integers(1, 70))
@few
def test_alibi_has_one_slope_per_head(heads):
    slopes = ALiBi(heads).slopes.tolist()
    assert len(slopes) == len(set(slopes)) == heads
    assert all(0 < slope < 1 for slope in slopes)


@looped(("queries", "keys"), SIZES)
def test_alibi_falls_with_the_distance(queries, keys):
    bias = ALiBi(3)
    expected = torch.stack([matrix(queries, keys, lambda r, m=m: -m * abs(r)) for m in bias.slopes.tolist()])
    torch.testing.assert_close(bias.dense(queries, keys).double(), expected)


def test_alibi_has_no_parameters_and_no_state():
    assert not list(ALiBi(4).parameters())
    assert not ALiBi(4).state_dict()
    assert repr(ALiBi(4)) == "ALiBi(heads=4)"


# T5


@looped("bidirectional", [True, False])
@looped(
    ("buckets", "reach"), [(32, 128), (32, 64), (16, 100), (64, 256), (8, 20), (4, 300), (10, 40), (15, 50)]
)
def test_t5_buckets_pair_by_pair(buckets, reach, bidirectional):
    distances = list(range(-300, 301))
    expected = [naive.bucket(d, buckets, reach, bidirectional) for d in distances]
    actual = T5Bias(2, buckets, reach, bidirectional).bucket(torch.tensor(distances)).tolist()
    wrong = {d: (f, e) for d, f, e in zip(distances, actual, expected, strict=True) if f != e}
    assert not wrong, "distance: (found, expected)"


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_buckets_are_all_used_and_grow_outwards(bidirectional):
    bias = T5Bias(2, bidirectional=bidirectional)
    actual = bias.bucket(torch.arange(-300, 301))
    used = set(range(32)) - {16} if bidirectional else set(range(32))  # 16 would be a positive distance of 0
    assert set(actual.tolist()) == used
    assert (actual[:301].diff() <= 0).all()
    assert (actual[301:].diff() >= 0).all()
    if not bidirectional:
        assert (actual[300:] == 0).all()


@looped("bidirectional", [True, False])
@looped(("queries", "keys"), SIZES)
def test_t5_looks_up_its_table(queries, keys, bidirectional):
    bias = T5Bias(3, 8, 20, bidirectional)
    table = bias.table.tolist()
    expected = torch.stack(
        [
            matrix(queries, keys, lambda r, h=h: table[naive.bucket(r, 8, 20, bidirectional)][h])
            for h in range(3)
        ]
    )
    torch.testing.assert_close(bias.dense(queries, keys).double(), expected)


def test_t5_table_is_learned_and_saved():
    bias = T5Bias(heads=2, buckets=8, max_distance=20)
    assert list(bias.state_dict()) == ["table"]
    assert bias.table.shape == (8, 2)  # as in Hugging Face: buckets × heads
    assert repr(bias) == "T5Bias(heads=2, buckets=8, max_distance=20)"


def test_repr_of_t5_shows_the_direction():
    assert repr(T5Bias(2, bidirectional=False)) != repr(T5Bias(2))


# Relative


@given(st.integers(0, 3), st.integers(0, 8), st.integers(0, 8), st.booleans())
@few
def test_distances_are_clipped(reach, queries, keys, per_head):
    vector = torch.randn((2, 2 * reach + 1) if per_head else (2 * reach + 1,), dtype=torch.float64)
    actual = ClippedRelativeBias(vector).dense(queries, keys)
    for head, line in enumerate(vector if per_head else [vector]):
        expected = matrix(queries, keys, lambda r, line=line: float(line[max(-reach, min(r, reach)) + reach]))
        assert torch.equal(actual[head] if per_head else actual, expected)


def test_relative_keeps_a_parameter_as_one():
    learned = nn.Parameter(torch.zeros(3))
    assert list(ClippedRelativeBias(learned).parameters()) == [learned]
    assert not list(ClippedRelativeBias(torch.zeros(3)).parameters())
    assert list(ClippedRelativeBias(torch.zeros(3)).state_dict()) == ["vector"]
    assert repr(ClippedRelativeBias(torch.zeros(2, 5))) == "ClippedRelativeBias(vector=(2, 5))"


# Lines and matrices


@given(st.integers(0, 7), st.integers(0, 7))
@few
def test_spread_puts_the_line_on_the_diagonals(queries, keys):
    line = torch.randn(2, max(queries + keys - 1, 0))
    actual = expand_line(line, queries, keys)
    assert actual.shape == (2, queries, keys)
    for i in range(queries):
        for j in range(keys):
            assert torch.equal(actual[:, i, j], line[:, j - i + queries - 1])


@given(st.integers(0, 7), st.integers(0, 7))
@few
def test_sum_diagonals_is_the_transpose_of_expand_line(queries, keys):
    """⟨expand_line(line), matrix⟩ = ⟨line, sum_diagonals(matrix)⟩, for all lines and matrices."""
    line = torch.randn(2, max(queries + keys - 1, 0), dtype=torch.float64)
    other = torch.randn(2, queries, keys, dtype=torch.float64)
    gathered = sum_diagonals(other)
    assert gathered.shape == line.shape
    torch.testing.assert_close((expand_line(line, queries, keys) * other).sum(), (line * gathered).sum())


def test_the_dot_product_test_can_fail():
    line, other = torch.randn(6, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(
            (expand_line(line, 3, 4) * other).sum(), (line * sum_diagonals(other.flip(0))).sum()
        )


@looped(
    "bias",
    [ALiBi(2), T5Bias(2, 8, 20), ClippedRelativeBias(torch.randn(2, 5)), ClippedRelativeBias(torch.randn(5))],
    ids=str,
)
@looped(("queries", "keys"), [*SIZES, (0, 4), (4, 0), (0, 0)])
def test_dense_is_the_line_spread_out(bias, queries, keys):
    line = bias.line(queries, keys, "cpu")
    assert line.shape[-1] == max(queries + keys - 1, 0)
    assert torch.equal(bias.dense(queries, keys), expand_line(line, queries, keys))


# Attention with biases


class Parabola(RelativeBias):
    """A custom bias: −c · distance², with a learned c per head."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.steepness = nn.Parameter(torch.linspace(0.1, 0.4, heads))

    def forward(self, distance: Tensor) -> Tensor:
        return -self.steepness[:, None] * distance.square()


MAKE = {
    "ALiBi": lambda: ALiBi(2),
    "T5Bias": lambda: T5Bias(2, 8, 20),
    "T5 to the left": lambda: T5Bias(2, 8, 20, bidirectional=False),
    "ClippedRelativeBias": lambda: ClippedRelativeBias(nn.Parameter(torch.linspace(-1, 1, 10).reshape(2, 5))),
    "Relative for all heads": lambda: ClippedRelativeBias(nn.Parameter(torch.tensor([0.5, -1.0, 2.0]))),
    "custom": lambda: Parabola(2),
}


@crossed(bias=MAKE, size=[str(size) for size in SIZES], implementation=["reference", "tiled 7", "tiled 64"])
def test_a_relative_bias_equals_its_matrix(bias, size, implementation):
    bias, (queries, keys) = MAKE[bias]().double(), eval(size)
    query, key, value = inputs(3, 2, queries=queries, keys=keys)
    learned = [query, key, value, *bias.parameters()]
    grad = torch.randn(3, 2, queries, 3, dtype=torch.float64)
    expected = plain(query, key, value, bias.dense(queries, keys))
    expected_grads = torch.autograd.grad(expected, learned, grad)

    name, _, size = implementation.partition(" ")
    with tiles_of(int(size or 1)):
        actual = regard.attention(query, key, value, bias=bias, implementation=name)
        grads = torch.autograd.grad(actual, learned, grad)
        dense = regard.attention(query, key, value, bias=bias.dense(queries, keys), implementation=name)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(dense, expected)
    torch.testing.assert_close(grads, expected_grads)


def test_a_single_vector_works_without_heads():
    query, key, value = inputs(queries=5, keys=7)
    for bias in (ALiBi(1), T5Bias(1), ClippedRelativeBias(torch.randn(5))):
        expected = plain(query, key, value, bias.dense(5, 7).double().reshape(5, 7))
        torch.testing.assert_close(regard.attention(query, key, value, bias=bias), expected)


def test_a_vector_that_is_not_a_parameter_can_require_grad():
    vector = torch.randn(5, dtype=torch.float64, requires_grad=True)
    query, key, value = inputs(queries=5, keys=7)
    bias = ClippedRelativeBias(vector)
    actual = torch.autograd.grad(regard.attention(query, key, value, bias=bias).square().sum(), vector)
    dense = torch.autograd.grad(plain(query, key, value, bias.dense(5, 7)).square().sum(), vector)
    torch.testing.assert_close(actual, dense)


@looped(
    "shape",
    [(), (1,), (7,), (5, 1), (1, 7), (5, 7), (2, 1, 1), (2, 5, 7), (3, 1, 1, 7), (1, 2, 5, 1), (3, 2, 5, 7)],
)
@looped("implementation", ["reference", "tiled"])
def test_a_dense_bias_broadcasts_and_its_gradient_is_summed(shape, implementation):
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    query, key, value = inputs(3, 2, queries=5, keys=7)
    expected = plain(query, key, value, bias)
    with tiles_of(9):
        actual = regard.attention(query, key, value, bias=bias, implementation=implementation)
        (grad,) = torch.autograd.grad(actual.square().sum(), bias)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(grad, torch.autograd.grad(expected.square().sum(), bias)[0])
    assert grad.shape == bias.shape


def test_the_comparison_can_fail():
    """A bias that counts distances from the other end differs."""

    class FromTheStart(T5Bias):
        def line(self, queries, keys, device):
            return self(torch.arange(max(queries + keys - 1, 0)) - (queries - 1))

    torch.manual_seed(0)
    wrong = FromTheStart(2, 8, 20).double()
    right = T5Bias(2, 8, 20).double()
    right.load_state_dict(wrong.state_dict())
    query, key, value = inputs(3, 2, queries=3, keys=7)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(
            regard.attention(query, key, value, bias=wrong), plain(query, key, value, right.dense(3, 7))
        )


def test_a_relative_bias_in_half_precision():
    query, key, value = (t.detach().to(torch.bfloat16) for t in inputs(3, 2, queries=5, keys=7))
    bias = T5Bias(2, 8, 20)
    expected = plain(query.float(), key.float(), value.float(), bias.dense(5, 7))
    actual = regard.attention(query, key, value, bias=bias)
    assert actual.dtype is torch.bfloat16
    torch.testing.assert_close(actual.float(), expected, atol=0.02, rtol=0.02)
