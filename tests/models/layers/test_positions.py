"""Properties of the position encodings."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard.models import (
    LearnedPositions,
    MultiHeadAttention,
    Packed,
    PositionEncoding,
    RotaryPositions,
    SinusoidalPositions,
    Stack,
    TransformerConfig,
)
from regard.models.layers.positions import KINDS
from tests.models.exact import close, normal

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = TransformerConfig(width=12, heads=3, layers=2, dropout=0.0, max_positions=11)


@pytest.fixture
def wide() -> Iterator[None]:
    """Use float64 by default."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def stack(kind: Any, **options: Any) -> Stack:
    torch.manual_seed(0)
    return Stack(replace(CONFIG, positions=kind), **options).double()


# Attention without positions


def shuffled(encoder: Stack, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the output for permuted tokens, and the permuted output."""
    x, order = normal(2, 7, 12), torch.tensor([3, 0, 6, 2, 5, 1, 4])
    return encoder(x[:, order], **options), encoder(x, **options)[:, order]


@pytest.mark.parametrize("options", [{}, {"norm": "rms", "norm_first": False}, {"activation": "swiglu"}])
def test_without_positions_an_encoder_is_equivariant(options: dict[str, Any]) -> None:
    encoder = Stack(replace(CONFIG, positions="none", **options)).double()
    close(*shuffled(encoder))


@pytest.mark.parametrize("kind", KINDS)
def test_with_positions_it_is_not_equivariant(kind: str) -> None:
    actual, expected = shuffled(stack(kind))
    assert (actual - expected).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_permuting_tokens_with_their_positions_is_equivariant(kind: str) -> None:
    """Positions come from the argument, not the index; only biases use the index."""
    encoder, x, order = stack(kind), normal(2, 7, 12), torch.tensor([3, 0, 6, 2, 5, 1, 4])
    actual = encoder(x[:, order], positions=torch.arange(7)[order])
    if kind in ("alibi", "t5"):
        assert (actual - encoder(x)[:, order]).abs().max() > 1e-3
    else:
        close(actual, encoder(x)[:, order])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
def test_only_learned_positions_are_limited(kind: str, causal: bool) -> None:
    model, x = stack(kind, causal=causal), normal(1, 60, 12)
    mask = regard.Causal() if causal else None
    model(x[:, :11], mask=mask).sum().backward()
    if kind == "learned":
        with pytest.raises(
            regard.ArgumentError, match=r"Position 59 is out of range: LearnedPositions has 11\. Shorten"
        ):
            model(x, mask=mask)
    else:
        actual = model(x, mask=mask)
        assert bool(torch.isfinite(actual).all())
        if causal:  # later tokens do not affect earlier ones
            close(actual[:, :11], model(x[:, :11], mask=mask))


# Sinusoidal


@pytest.mark.parametrize("width", [1, 2, 5, 8])
def test_sinusoidal_formula(width: int) -> None:
    positions = [0, 1, 7, 100_003]
    actual = SinusoidalPositions(width)(torch.tensor(positions))
    for row, position in zip(actual, positions, strict=True):
        for place in range(width):
            angle = position / 10_000 ** (2 * (place // 2) / width)
            expected = math.cos(angle) if place % 2 else math.sin(angle)
            assert row[place].item() == pytest.approx(expected, abs=1e-6)


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_shift_is_a_linear_map(position: int, further: int) -> None:
    """PE(p + k) = M PE(p), where M depends only on k: each feature pair rotates by k times its frequency."""
    here, there = SinusoidalPositions(8)(torch.tensor([position, position + further])).double()
    frequencies = 10_000 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    matrix = torch.block_diag(
        *(
            torch.tensor([[math.cos(a), math.sin(a)], [-math.sin(a), math.cos(a)]])
            for a in (further * frequencies).tolist()
        )
    ).double()
    close(matrix @ here, there, within=1e-6)


@pytest.mark.parametrize("kind", [SinusoidalPositions, RotaryPositions])
def test_distant_positions_differ(kind: Any, wide: None) -> None:
    """float32 angles would be equal for some positions above a million."""
    actual = kind(8)(torch.tensor([10**7, 10**7 + 1]))
    actual = torch.cat(actual, -1) if isinstance(actual, tuple) else actual
    assert (actual[0] - actual[1]).abs().max() > 0.5


# Learned


def test_learned_positions_have_separate_gradients() -> None:
    positions = LearnedPositions(7, 5)
    positions(torch.tensor([[0, 3], [3, 4]])).sum().backward()
    assert positions.vectors.grad is not None
    assert positions.vectors.grad[:, 0].tolist() == [1, 0, 0, 2, 1, 0, 0]


@pytest.mark.parametrize(("position", "fits"), [(0, True), (6, True), (7, False), (-1, False)])
def test_learned_positions_out_of_range(position: int, fits: bool) -> None:
    learned = LearnedPositions(7, 5)
    if fits:
        assert torch.equal(learned(torch.tensor([position]))[0], learned.vectors[position])
    else:
        with pytest.raises(
            regard.ArgumentError, match=f"Position {position} is out of range: LearnedPositions has 7"
        ):
            learned(torch.tensor([position]))


def test_empty_positions() -> None:
    assert LearnedPositions(7, 5)(torch.zeros(0, dtype=torch.long)).shape == (0, 5)
    assert SinusoidalPositions(5)(torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0, 5)
    assert RotaryPositions(4)(torch.zeros(0, dtype=torch.long))(normal(3, 0, 4)).shape == (3, 0, 4)


# Rotary


def test_rotary_multiplies_complex_numbers(wide: None) -> None:
    """Features i and i + d/2 form a complex number, multiplied by e^(i p θ)."""
    x, positions = normal(3, 5, 8), torch.tensor([0, 1, 5, 100, 7])
    theta = 10_000 ** (-torch.arange(0, 8, 2) / 8)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.exp(1j * positions[:, None] * theta)
    close(RotaryPositions(8)(positions)(x), torch.cat([turned.real, turned.imag], -1))


@given(st.integers(0, 100_000), st.integers(0, 50), st.integers(0, 50))
def test_rotary_score_depends_on_distance_only(offset: int, one: int, other: int) -> None:
    rotary, query, key = RotaryPositions(6), normal(1, 1, 6), normal(1, 1, 6, seed=1)

    def score(first: int, second: int) -> Tensor:
        turns = rotary(torch.tensor([first])), rotary(torch.tensor([second]))
        return (turns[0](query) * turns[1](key)).sum()

    close(score(one, other), score(one + offset, other + offset), within=1e-5)


def test_distance_matters() -> None:
    layer, x, rotary = MultiHeadAttention(12, 3), normal(2, 5, 12).float(), RotaryPositions(4)
    here, shifted, spread = (
        layer(x, rotation=rotary(p)) for p in (torch.arange(5), torch.arange(5) + 77, 2 * torch.arange(5))
    )
    close(here, shifted, within=1e-4)
    assert (here - spread).abs().max() > 1e-3


def test_rotary_preserves_norms_and_position_zero() -> None:
    x = normal(3, 5, 8)
    turned = RotaryPositions(8)(torch.arange(5))(x)
    close(turned.norm(dim=-1), x.norm(dim=-1), within=1e-6)
    assert torch.equal(turned[:, 0], x[:, 0])


def test_features_beyond_the_rotary_width_are_unchanged() -> None:
    x = normal(3, 5, 7)
    turned = RotaryPositions(4)(torch.arange(5))(x)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    close(turned[..., :4], RotaryPositions(4)(torch.arange(5))(x[..., :4]))


def test_rotary_positions_per_sequence() -> None:
    x, positions = normal(2, 3, 5, 4), torch.tensor([[0, 1, 2, 3, 4], [7, 3, 3, 0, 9]])
    actual = RotaryPositions(4)(positions)(x)
    for one, place, turned in zip(x, positions, actual, strict=True):
        assert torch.equal(RotaryPositions(4)(place)(one), turned)


# T5


def test_t5_direction() -> None:
    """A decoder uses all buckets for keys on the left."""
    buckets = {}
    for causal in (False, True):
        positions = stack("t5", causal=causal).positions
        assert isinstance(positions, regard.T5Bias)
        buckets[causal] = positions.bucket(torch.arange(-40, 41))
    left = {causal: set(actual[:41].tolist()) for causal, actual in buckets.items()}
    right = {causal: set(actual[41:].tolist()) for causal, actual in buckets.items()}
    assert not left[False] & right[False]
    assert len(left[True]) > len(left[False])
    assert len(right[True]) == 1


# Custom encodings


class Ramp(PositionEncoding):
    def encode(self, x: Tensor, positions: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return x + positions[..., None] / 10, {"bias": regard.ALiBi(3)}


def test_stack_applies_any_encoding() -> None:
    """The changed input and the attention options equal the same values passed by hand."""
    encoder, plain, x = stack("none"), stack("alibi"), normal(2, 7, 12)
    encoder.positions = Ramp()
    close(encoder(x), plain(x + torch.arange(7)[:, None] / 10))
    with pytest.raises(regard.ArgumentError, match=r"Ramp has nothing to draw; implement tables\(length\)"):
        encoder.positions.tables(3)


# Packed sentences


@pytest.mark.parametrize("kind", [*KINDS, "none"])
@pytest.mark.parametrize("causal", [False, True])
def test_positions_restart_with_every_sentence(kind: str, causal: bool) -> None:
    model, batch = stack(kind, causal=causal), Packed.of([[5] * 3, [5], [], [5] * 7])
    rule, x = regard.Causal() if causal else None, normal(11, 12)
    actual = model(x, mask=batch.mask(rule), positions=batch.positions)
    for one, output in zip(batch.split(x), batch.split(actual), strict=True):
        close(output, model(one, mask=rule))


# Invalid arguments


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: SinusoidalPositions(0), regard.ArgumentError, "width=0"),
        (lambda: SinusoidalPositions(4, base=1.0), regard.ArgumentError, "base=1.0"),
        (lambda: LearnedPositions(0, 4), regard.ArgumentError, "max_positions=0"),
        (lambda: LearnedPositions(4, 0), regard.ArgumentError, "width=0"),
        (lambda: RotaryPositions(5), regard.ArgumentError, "width=5; it rotates pairs"),
        (lambda: RotaryPositions(0), regard.ArgumentError, "width=0"),
        (lambda: RotaryPositions(4, base=0.5), regard.ArgumentError, "base=0.5"),
        (lambda: RotaryPositions(6)(torch.arange(5))(normal(5, 4)), regard.ShapeError, r"needs \(…, 5, 6\)"),
        (lambda: RotaryPositions(4)(torch.arange(5))(normal(3, 4)), regard.ShapeError, r"needs \(…, 5, 4\)"),
    ],
)
def test_invalid_positions(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_positions_repr() -> None:
    assert [repr(p) for p in (SinusoidalPositions(5), LearnedPositions(7, 5), RotaryPositions(4))] == [
        "SinusoidalPositions(5)",
        "LearnedPositions(7, 5)",
        "RotaryPositions(4)",
    ]
