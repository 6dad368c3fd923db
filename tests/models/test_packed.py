"""Packed and padded batches."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard.models import Packed, pack
from regard.models.packed import ModelInput, as_packed, as_padded, reorder, reversed_order, token_mask
from tests.cases import looped

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = st.lists(st.integers(0, 99), max_size=5)
SENTENCES = st.lists(TOKENS, max_size=6)
FULL = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=5), min_size=1, max_size=6)


def numbered(batch: Packed, *rest: int) -> Tensor:
    """Return distinct values."""
    shape = (len(batch.tokens), *rest)
    return torch.arange(batch.tokens.numel() * torch.Size(rest).numel(), dtype=torch.float32).reshape(shape)


# Laws


@given(SENTENCES)
def test_packing_keeps_sentences_in_order(sentences: list[list[int]]) -> None:
    batch = Packed.of(sentences)
    assert [part.tolist() for part in batch.split(batch.tokens)] == sentences
    assert batch.tokens.tolist() == [token for sentence in sentences for token in sentence]
    assert len(batch) == len(sentences)


@given(SENTENCES)
def test_sentences_and_positions_of_tokens(sentences: list[list[int]]) -> None:
    batch = Packed.of(sentences)
    expected = [(number, place) for number, one in enumerate(sentences) for place in range(len(one))]
    assert list(zip(batch.sentences.tolist(), batch.positions.tolist(), strict=True)) == expected
    assert batch.tokens.tolist() == [sentences[number][place] for number, place in expected]


@given(SENTENCES, st.integers(0, 3))
def test_packing_undoes_padding(sentences: list[list[int]], more: int) -> None:
    batch = Packed.of(sentences)
    padded = batch.pad(batch.tokens, value=-1)
    assert padded.shape == (len(sentences), max(map(len, sentences), default=0))
    assert [[token for token in row if token >= 0] for row in padded.tolist()] == sentences
    wider = torch.nn.functional.pad(padded, (0, more), value=7)  # padding content is irrelevant
    repacked = pack(wider, batch.lengths)
    assert torch.equal(repacked.tokens, batch.tokens)
    assert torch.equal(token_mask(padded, batch.lengths), padded >= 0)


@given(FULL, st.sampled_from([(), (3,), (2, 3)]))
def test_features_are_padded(sentences: list[list[int]], rest: tuple[int, ...]) -> None:
    batch = Packed.of(sentences)
    x = numbered(batch, *rest)
    padded = batch.pad(x, value=-1)
    for row, one in zip(padded, batch.split(x), strict=True):
        assert torch.equal(row[: len(one)], one)
        assert bool((row[len(one) :] == -1).all())


def test_pad_has_gradients() -> None:
    batch = Packed.of([[5, 6, 7], [8], [9, 9]])
    x = numbered(batch, 2).requires_grad_()
    (batch.pad(x) * 3).sum().backward()
    assert x.grad is not None
    assert bool((x.grad == 3).all())


@given(FULL)
def test_inputs_and_labels(sentences: list[list[int]]) -> None:
    batch = Packed.of(sentences)
    inputs, outputs = batch.inputs(), batch.labels()
    assert [part.tolist() for part in inputs.split(inputs.tokens)] == [one[:-1] for one in sentences]
    assert [part.tolist() for part in outputs.split(outputs.tokens)] == [one[1:] for one in sentences]
    assert batch.tokens[batch.ends()].tolist() == [one[-1] for one in sentences]


@given(SENTENCES, st.sampled_from([None, regard.Causal(), regard.Window(2)]))
def test_mask_restricts_tokens_to_their_sentence(sentences: list[list[int]], within: Any) -> None:
    batch = Packed.of(sentences)
    n = len(batch.tokens)
    if not n:
        return
    seen, places = (
        batch.mask(within).dense(n, n),
        list(zip(batch.sentences.tolist(), batch.positions.tolist(), strict=True)),
    )
    for i, (own, here) in enumerate(places):
        for j, (other, there) in enumerate(places):
            allowed = within is None or 0 <= here - there <= (n if within == regard.Causal() else 1)
            assert bool(seen[i, j]) == (own == other and allowed)


@given(SENTENCES)
def test_per_token_repeats_sentence_values(sentences: list[list[int]]) -> None:
    batch = Packed.of(sentences)
    said = batch.per_token(batch.lengths[:, None] * torch.tensor([1, 10]))
    assert said.tolist() == [[len(one), 10 * len(one)] for one in sentences for _ in one]


def test_split_gives_sentences() -> None:
    batch = Packed.of([[1, 2], [3], [4, 5, 6]])
    for (first, _), (second, place) in pairwise(
        zip(batch.sentences.tolist(), batch.positions.tolist(), strict=True)
    ):
        assert second == first or (second == first + 1 and place == 0)


def test_padded_batch_without_lengths_has_no_padding() -> None:
    tokens = torch.ones(2, 3, dtype=torch.long)
    assert ModelInput.of(tokens).mask is None
    mask = ModelInput.of(tokens, torch.tensor([3, 1])).mask
    assert isinstance(mask, regard.Padding)
    assert mask.lengths.tolist() == [3, 1]
    assert as_padded(tokens)[1].tolist() == as_packed(tokens).lengths.tolist() == [3, 3]


@given(FULL)
def test_conversion_between_packed_and_padded(sentences: list[list[int]]) -> None:
    batch = Packed.of(sentences)
    tokens, lengths = as_padded(batch)
    assert as_padded(tokens, lengths)[0] is tokens
    assert torch.equal(as_packed(tokens, lengths).tokens, batch.tokens)
    assert as_packed(batch) is batch


@given(FULL)
def test_reversing_twice_is_the_identity(sentences: list[list[int]]) -> None:
    batch = Packed.of(sentences)
    padded, lengths = as_padded(batch)
    order = reversed_order(padded, lengths)
    turned = padded.gather(1, order)
    assert [row[:n].tolist() for row, n in zip(turned, lengths, strict=True)] == [x[::-1] for x in sentences]
    x = padded[..., None].float()
    assert torch.equal(reorder(reorder(x, order), order), x)
    assert torch.equal(
        reversed_order(padded), reversed_order(padded, torch.full_like(lengths, padded.shape[1]))
    )


# Unusual types and batches


def test_empty_batches_and_sentences() -> None:
    assert Packed.of([]).tokens.dtype is torch.long
    assert Packed.of([]).pad(Packed.of([]).tokens).shape == (0, 0)
    assert Packed.of([[], []]).pad(torch.zeros(0, 3)).shape == (2, 0, 3)
    assert Packed.of([]).inputs().tokens.shape == (0,)
    assert Packed.of([[], [5]]).positions.tolist() == [0]


def test_sentences_may_be_any_sequence() -> None:
    import numpy as np

    for sentences in (((5, 6), (7,)), [np.array([5, 6]), np.array([7])], [torch.tensor([5, 6]), range(7, 8)]):
        assert Packed.of(sentences).tokens.tolist() == [5, 6, 7]


def test_small_integer_dtypes() -> None:
    batch = Packed(torch.tensor([5, 6, 7], dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32))
    assert batch.positions.tolist() == [0, 0, 1]
    assert batch.labels().tokens.tolist() == [7]


def test_meta_device_shapes() -> None:
    tokens, lengths = (torch.zeros(n, dtype=torch.long, device="meta") for n in (7, 3))
    batch = Packed(tokens, lengths)
    assert batch.positions.shape == batch.sentences.shape == (7,)
    assert batch.inputs().tokens.shape == batch.labels().tokens.shape == (4,)
    assert batch.positions.is_meta


def test_packed_equality_is_identity() -> None:
    """Tensors have no single truth value."""
    batch = Packed.of([[5, 6], [7]])
    assert batch == batch
    assert batch != Packed.of([[5, 6], [7]])
    assert batch in {batch}


# Invalid arguments


def long(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.long)


@looped(
    ("make", "error", "message"),
    [
        (
            lambda: Packed(long(1, 2, 3), long(1, 1)),
            regard.ShapeError,
            "3 tokens and lengths that sum to 2",
        ),
        (lambda: Packed(long(1, 2), long(3, -1)), regard.ArgumentError, "length of -1"),
        (lambda: Packed(long(1, 2)[None], long(2)), regard.ShapeError, r"tokens of shape \(1, 2\)"),
        (lambda: Packed(long(1, 2), torch.tensor(2)), regard.ShapeError, r"lengths of shape \(\)"),
        (lambda: Packed([1, 2], [2]), regard.DTypeError, "tokens of type list"),
        (lambda: Packed(long(1, 2), [2]), regard.DTypeError, "lengths of type list"),
        (lambda: Packed(torch.ones(2), long(2)), regard.DTypeError, "tokens of dtype torch.float32"),
        (lambda: Packed(long(1, 2), torch.tensor([2.0])), regard.DTypeError, "lengths of dtype torch.float"),
        (lambda: Packed.of([[1.5, 2]]), regard.DTypeError, "lists of integers"),
        (lambda: Packed.of([[True]]), regard.DTypeError, "lists of integers"),
        (lambda: Packed.of([1, 2]), regard.DTypeError, "lists of integers"),
        (lambda: Packed.of(["ab"]), regard.DTypeError, "lists of integers"),
        (lambda: Packed.of([[2**70]]), regard.DTypeError, "lists of integers"),
        (lambda: Packed.of([[1], [], [2]]).inputs(), regard.ArgumentError, "Sentence 1 has no tokens"),
        (lambda: Packed.of([[1], [2], []]).labels(), regard.ArgumentError, "Sentence 2 has no tokens"),
        (lambda: pack(long(1, 2), long(2)), regard.ShapeError, r"shape \(2,\) and lengths \(1,\)"),
        (lambda: pack(long(1, 2)[None], long(1, 1)), regard.ShapeError, r"\(1, 2\) and lengths \(2,\)"),
        (
            lambda: pack(long(1, 2)[None], long(3)),
            regard.ShapeError,
            "length is 3, but the rows have 2 tokens",
        ),
        (lambda: pack(long(1, 2)[None], long(-1)), regard.ShapeError, "length is -1"),
        (lambda: pack(long(1, 2)[None], [2]), regard.DTypeError, "lengths of type list"),
    ],
)
def test_invalid_batches(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
