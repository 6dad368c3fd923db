"""Lines that are too long are cut into parts: nothing is lost, and sentences stay whole where they can."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.translation.sentence_splitter import Line, Part
from regard.translation.tokens import Segmentation

WORDS = st.lists(st.tuples(st.integers(1, 9), st.sampled_from(["", ".", ",", "!»"])), max_size=60)


def cut(words: list[tuple[int, str]]) -> Segmentation:
    """Words of so many pieces, with these ends."""
    of = [number for number, (pieces, _) in enumerate(words) for _ in range(pieces)]
    unknown = dict.fromkeys(range(0, len(of), 3), "Ω")
    return Segmentation([f"w{end}" for _, end in words], of, ["p"] * len(of), of, unknown)


def parts(cut_: Segmentation, longest: int) -> list[Part]:
    return Line.of("", cut_, longest).parts


@given(WORDS, st.integers(1, 30))
def test_parts_are_all_of_a_line_in_order_and_short_enough(words, longest):
    whole = cut(words)
    found = parts(whole, longest)
    assert [one for part in found for one in part.cut.ids] == whole.ids
    assert [part.word + word for part in found for word in part.cut.word_of] == whole.word_of
    assert all(0 < len(part.cut.ids) <= longest for part in found)
    assert {
        (part.word + part.cut.word_of[at], shown) for part in found for at, shown in part.cut.unknown.items()
    } == {(whole.word_of[at], shown) for at, shown in whole.unknown.items()}


@given(WORDS, st.integers(9, 30))
def test_words_are_not_cut_if_they_fit(words, longest):
    whole = cut(words)
    assert [word for part in parts(whole, longest) for word in part.cut.words] == whole.words


@given(st.integers(1, 40), st.integers(1, 9))
def test_of_a_word_that_is_too_long_each_part_has_its_letters(length, longest):
    letters = [chr(ord("a") + i % 26) for i in range(length)]
    whole = Segmentation(["".join(letters)], [7] * length, letters, [0] * length, {})
    assert "".join(part.cut.text for part in parts(whole, longest)) == whole.text


@given(WORDS, st.integers(1, 30))
def test_a_line_that_fits_is_one_part(words, longest):
    whole = cut(words)
    if 0 < len(whole.ids) <= longest:
        assert parts(whole, longest) == [Part(0, whole)]


@pytest.mark.parametrize(
    ("ends", "stop"),
    [
        ([".", "", ",", "", "", ""], 1),  # the end of a sentence rather than a pause
        (["", ",", "", "", "", ""], 2),  # a pause rather than nothing
        (["", "", "", "", "", ""], 4),
        (["?", "", ".", "", "", ""], 3),  # the last of several
        (["", "", ".”)", "", "", ""], 3),
    ],
)
def test_where_a_line_is_cut(ends, stop):
    assert len(parts(cut([(1, end) for end in ends]), longest=4)[0].cut.ids) == stop


def test_nothing_has_no_parts():
    assert parts(cut([]), 5) == []
