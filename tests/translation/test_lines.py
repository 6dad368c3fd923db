"""Lines that are too long are cut into runs: nothing is lost, and sentences stay whole where they can."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.translation.lines import Line, runs
from regard.translation.tokens import Cut

WORDS = st.lists(st.tuples(st.integers(1, 9), st.sampled_from(["", ".", ",", "!»"])), max_size=60)


def cut(words: list[tuple[int, str]]) -> Cut:
    """Words of so many pieces, with these ends."""
    of = [number for number, (pieces, _) in enumerate(words) for _ in range(pieces)]
    return Cut([f"w{end}" for _, end in words], of, ["p"] * len(of), of, {})


@given(WORDS, st.integers(1, 30))
def test_runs_are_all_of_a_line_in_order_and_short_enough(words, longest):
    given_ = cut(words)
    found = runs(given_, longest)
    assert [at for first, stop in found for at in range(first, stop)] == list(range(len(given_.ids)))
    assert all(0 < stop - first <= longest for first, stop in found)


@given(WORDS, st.integers(9, 30))
def test_words_are_not_cut_if_they_fit(words, longest):
    given_ = cut(words)
    of = given_.word_of
    assert all(of[stop - 1] != of[stop] for _, stop in runs(given_, longest)[:-1])


@given(WORDS, st.integers(1, 30))
def test_a_line_that_fits_is_one_run(words, longest):
    given_ = cut(words)
    if 0 < len(given_.ids) <= longest:
        assert runs(given_, longest) == [(0, len(given_.ids))]


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
    assert runs(cut([(1, end) for end in ends]), longest=4)[0] == (0, stop)


def test_nothing_has_no_runs():
    assert Line.of(" ", cut([]), 5).runs == []
