"""Long lines are split into parts: nothing is lost, and sentences stay whole if possible."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.translation.long_lines import Part, split_tokens
from regard.translation.tokens import Segmentation

WORDS = st.lists(st.tuples(st.integers(1, 9), st.sampled_from(["", ".", ",", "!»"])), max_size=60)


def segmented(words: list[tuple[int, str]]) -> Segmentation:
    """Return words with the given numbers of tokens and the given endings."""
    word_of = [number for number, (pieces, _) in enumerate(words) for _ in range(pieces)]
    unknown = dict.fromkeys(range(0, len(word_of), 3), "Ω")
    return Segmentation([f"w{end}" for _, end in words], word_of, ["p"] * len(word_of), word_of, unknown)


def parts(segmentation: Segmentation, max_tokens: int) -> list[Part]:
    return split_tokens(segmentation, max_tokens)


@given(WORDS, st.integers(1, 30))
def test_parts_cover_a_line_in_order_and_are_short_enough(words, max_tokens):
    line = segmented(words)
    line_parts = parts(line, max_tokens)
    assert [token for part in line_parts for token in part.segmentation.ids] == line.ids
    words_of = [part.first_word + word for part in line_parts for word in part.segmentation.word_of]
    assert words_of == line.word_of
    assert all(0 < len(part.segmentation.ids) <= max_tokens for part in line_parts)
    assert {
        (part.first_word + part.segmentation.word_of[at], shown)
        for part in line_parts
        for at, shown in part.segmentation.unknown.items()
    } == {(line.word_of[at], shown) for at, shown in line.unknown.items()}


@given(WORDS, st.integers(9, 30))
def test_words_that_fit_are_not_split(words, max_tokens):
    line = segmented(words)
    assert [word for part in parts(line, max_tokens) for word in part.segmentation.words] == line.words


@given(st.integers(1, 40), st.integers(1, 9))
def test_each_part_of_a_long_word_has_its_characters(length, max_tokens):
    letters = [chr(ord("a") + i % 26) for i in range(length)]
    line = Segmentation(["".join(letters)], [7] * length, letters, [0] * length, {})
    assert "".join(part.segmentation.text for part in parts(line, max_tokens)) == line.text


@given(WORDS, st.integers(1, 30))
def test_a_line_that_fits_is_one_part(words, max_tokens):
    line = segmented(words)
    if len(line.ids) <= max_tokens:
        assert parts(line, max_tokens) == [Part(0, line)] * bool(line.ids)


@pytest.mark.parametrize(
    ("ends", "stop"),
    [
        ([".", "", ",", "", "", ""], 1),  # a sentence end rather than a pause
        (["", ",", "", "", "", ""], 2),  # a pause rather than nothing
        (["", "", "", "", "", ""], 4),
        (["?", "", ".", "", "", ""], 3),  # the last of several
        (["", "", ".”)", "", "", ""], 3),
    ],
)
def test_where_a_line_is_split(ends, stop):
    assert len(parts(segmented([(1, end) for end in ends]), max_tokens=4)[0].segmentation.ids) == stop
