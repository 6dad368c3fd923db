"""What a model does not know is copied: everything once, and nothing else is lost."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.translation.tokens import UNKNOWN, Segmentation
from regard.translation.unknown_words import left_out, letters, place

WORDS = st.lists(st.booleans(), min_size=1, max_size=8)  # of a source: whether each is unknown


def source(unknown: list[bool]) -> Segmentation:
    """Words of one piece each."""
    words = [f"Ω{i}" if one else f"known{i}" for i, one in enumerate(unknown)]
    ids = [UNKNOWN if one else 9 for one in unknown]
    surfaces = {i: words[i] for i, one in enumerate(unknown) if one}
    return Segmentation(words, ids, words, list(range(len(words))), surfaces)


@given(WORDS, st.integers(0, 6), st.booleans(), st.randoms(use_true_random=False))
def test_all_unknown_words_come_through_once(unknown, targets, weighed, random):
    cut = source(unknown)
    written = [f"target{i}" for i in range(targets)]
    weights = torch.rand(targets, len(unknown), generator=torch.Generator().manual_seed(random.randrange(99)))
    missing = left_out(cut, set())
    found = place(written, cut, missing, weights if weighed else None)
    assert [word.text for word in found if word.own is not None] == written
    assert [word.own for word in found if word.own is not None] == list(range(targets))
    assert sorted(word.text for word in found if word.copied is not None) == sorted(cut.unknown.values())
    assert all(word.text == cut.words[word.copied] for word in found if word.copied is not None)


@given(WORDS, st.lists(st.booleans(), max_size=8), st.sampled_from(["words", "bpe"]), st.integers(0, 99))
def test_marks_take_unknown_pieces_as_long_as_there_are_some(unknown, marks, kind, seed):
    cut = source(unknown)
    ids = [UNKNOWN if mark else 9 for mark in marks]
    weights = torch.rand(len(ids), len(unknown), generator=torch.Generator().manual_seed(seed))
    found = letters(ids, cut, weights, kind)
    assert len(found.used) == min(sum(marks), len(cut.unknown))
    assert found.used <= set(cut.unknown)
    assert set(found.at) <= {place for place, mark in enumerate(marks) if mark}
    if kind == "words":
        assert len(found.at) == sum(marks)
    assert not set(left_out(cut, found.used)) & found.used


@given(WORDS)
def test_the_strongest_link_is_kept(unknown):
    cut = source(unknown)
    if not cut.unknown:
        return
    strongest = max(cut.unknown)
    weights = torch.full((2, len(unknown)), 0.1)
    weights[1, strongest] = 0.9
    assert letters([UNKNOWN, UNKNOWN], cut, weights, "bpe").at[1] == cut.unknown[strongest]


def test_words_that_stand_together_stay_in_order():
    cut = source([False, True, True, True])
    weights = torch.tensor([[0.9, 0.0, 0.0, 0.1], [0.2, 0.3, 0.3, 0.2]])
    found = place(["a", "b"], cut, [1, 2, 3], weights)
    assert [word.text for word in found] == ["a", "Ω1", "Ω2", "Ω3", "b"]


def test_the_punctuation_around_a_word_stays_away():
    cut = Segmentation(["(Ωx),"], [5, UNKNOWN, 6, 7], ["(", "Ω", "x", "),"], [0, 0, 0, 0], {1: "Ω"})
    assert [word.text for word in place([], cut, [0], None)] == ["Ωx"]


def test_control_characters_alone_are_nothing():
    assert left_out(Segmentation(["\x07"], [UNKNOWN], ["\x07"], [0], {0: "\x07"}), set()) == []
