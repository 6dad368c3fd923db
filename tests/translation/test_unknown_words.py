"""Unknown words are copied once each, and nothing else is lost."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.translation.tokens import UNKNOWN, Segmentation
from regard.translation.unknown_words import insert_words, replace_unknown, untranslated_words

WORDS = st.lists(st.booleans(), min_size=1, max_size=8)  # whether each source word is unknown


def source(unknown: list[bool]) -> Segmentation:
    """Return words of one token each."""
    words = [f"Ω{i}" if is_unknown else f"known{i}" for i, is_unknown in enumerate(unknown)]
    ids = [UNKNOWN if is_unknown else 9 for is_unknown in unknown]
    surfaces = {i: words[i] for i, is_unknown in enumerate(unknown) if is_unknown}
    return Segmentation(words, ids, words, list(range(len(words))), surfaces)


@given(WORDS, st.integers(0, 6), st.booleans(), st.randoms(use_true_random=False))
def test_all_unknown_words_are_copied_once(unknown, targets, has_weights, random):
    segmentation = source(unknown)
    written = [f"target{i}" for i in range(targets)]
    weights = torch.rand(targets, len(unknown), generator=torch.Generator().manual_seed(random.randrange(99)))
    missing = dict.fromkeys(untranslated_words(segmentation, set()), ())
    target_words = insert_words(written, segmentation, missing, weights if has_weights else None)
    assert [word.text for word in target_words if word.position is not None] == written
    assert [word.position for word in target_words if word.position is not None] == list(range(targets))
    assert sorted(word.text for word in target_words if word.copied is not None) == sorted(
        segmentation.unknown.values()
    )
    assert all(
        word.text == segmentation.words[word.copied] for word in target_words if word.copied is not None
    )


@given(WORDS, st.lists(st.booleans(), max_size=8), st.sampled_from(["words", "bpe"]), st.integers(0, 99))
def test_unknown_target_tokens_are_replaced_by_unknown_source_tokens(unknown, marks, kind, seed):
    segmentation = source(unknown)
    ids = [UNKNOWN if mark else 9 for mark in marks]
    weights = torch.rand(len(ids), len(unknown), generator=torch.Generator().manual_seed(seed))
    replacements = replace_unknown(ids, segmentation, weights, kind)
    assert len(replacements.copied) == min(sum(marks), len(segmentation.unknown))
    assert replacements.copied <= set(segmentation.unknown)
    assert set(replacements.texts) <= {position for position, mark in enumerate(marks) if mark}
    if kind == "words":
        assert len(replacements.texts) == sum(marks)
    assert not set(untranslated_words(segmentation, replacements.copied)) & replacements.copied


@given(WORDS)
def test_the_largest_weight_wins(unknown):
    segmentation = source(unknown)
    if not segmentation.unknown:
        return
    strongest = max(segmentation.unknown)
    weights = torch.full((2, len(unknown)), 0.1)
    weights[1, strongest] = 0.9
    assert (
        replace_unknown([UNKNOWN, UNKNOWN], segmentation, weights, "bpe").texts[1]
        == segmentation.unknown[strongest]
    )


def copied(weights: list[list[float]]) -> list[int]:
    """Copy unknown words to unknown tokens; return the copied word of each token."""
    segmentation = source([True] * len(weights[0]))
    pairs = replace_unknown([UNKNOWN] * len(weights), segmentation, torch.tensor(weights), "bpe").pairs
    return [word for _, word in sorted(pairs)]


def test_copies_keep_their_order_unless_the_weights_clearly_differ():
    assert copied([[0.1, 0.3], [0.3, 0.1]]) == [0, 1]
    assert copied([[0.0, 0.9], [0.1, 0.2]]) == [0, 1]  # both attend to the second word
    assert copied([[0.1, 0.8], [0.8, 0.1]]) == [1, 0]
    assert copied([[0, 0, 0.9], [0.9, 0, 0], [0, 0.9, 0]]) == [2, 0, 1]
    assert copied([[0.1, 0.1, 0.9], [0, 0.9, 0.1], [0, 0, 0]]) == [0, 1, 2]  # the last attends to none
    assert copied([[0, 0, 0.9], [0, 0.9, 0]]) == [2, 1]  # the first word is not copied
    assert copied([[0.1, 0.2, 0.2], [0.2, 0.3, 0.4]]) == [1, 2]
    assert copied([[0.2, 0.1], [0.1, 0.3], [0.1, 0.2]]) == [0, 1]


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 99))
def test_matches_are_clear_or_in_order(targets, sources, seed):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(targets, sources, generator=generator)
    uncertain = copied((weights / 5).tolist())
    assert uncertain == sorted(uncertain)
    if targets <= sources:
        clear = torch.randperm(sources, generator=generator)[:targets]
        assert copied((weights / 5).scatter(1, clear[:, None], 1).tolist()) == clear.tolist()


def test_inserted_copies_keep_their_order_unless_the_weights_clearly_differ():
    segmentation = source([False, True, False, True])
    for weight, text in ((0.3, "a Ω1 Ω3 b"), (0.9, "a Ω3 b Ω1")):
        weights = torch.tensor([[0.1, 0, 0.9, 0], [0, 0, 0, 2], [weight, 0, 0, 0]])
        target_words = insert_words(["a", "Ω3", "b"], segmentation, {1: ()}, weights, {1: 3})
        assert " ".join(word.text for word in target_words) == text
    adjacent = source([False, True, True, True])
    weights = torch.tensor([[0.3, 0, 0, 0], [0.1, 0, 0, 0], [0, 0, 0, 2]])
    target_words = insert_words(["a", "b", "Ω3"], adjacent, {1: (), 2: ()}, weights, {2: 3})
    assert [word.text for word in target_words] == ["a", "b", "Ω1", "Ω2", "Ω3"]


def test_adjacent_words_keep_their_order():
    segmentation = source([False, True, True, True])
    weights = torch.tensor([[0.9, 0.0, 0.0, 0.1], [0.2, 0.3, 0.3, 0.2]])
    target_words = insert_words(["a", "b"], segmentation, dict.fromkeys([1, 2, 3], ()), weights)
    assert [word.text for word in target_words] == ["a", "Ω1", "Ω2", "Ω3", "b"]


def test_final_punctuation_follows_the_copies():
    segmentation = Segmentation(
        ["um", "Ω1", "Ω2", "bellt."], [9, UNKNOWN, UNKNOWN, 9], list("abcd"), [0, 1, 2, 3], {}
    )
    for words, missing, copies, text in (
        (["barks."], [1, 2], {}, "barks Ω1 Ω2."),
        (["barks", "Ω1."], [2], {1: 1}, "barks Ω1 Ω2."),  # the model copied a word and ended the sentence
        (["barks.", "Ω1", "Ω2"], [], {1: 1, 2: 2}, "barks Ω1 Ω2."),
        (["barks", "Ω1", "Ω2."], [], {1: 1, 2: 2}, "barks Ω1 Ω2."),
    ):
        weights = torch.full((len(words), 4), 0.1)
        weights[-1, :2] = 1
        target_words = insert_words(words, segmentation, dict.fromkeys(missing, ()), weights, copies)
        assert " ".join(word.text for word in target_words) == text
    after = Segmentation(["er", "bellt.", "Ω"], [9, 9, UNKNOWN], list("abc"), [0, 1, 2], {2: "Ω"})
    target_words = insert_words(["he", "barks."], after, {2: ()}, torch.eye(3)[:2])
    assert " ".join(word.text for word in target_words) == "he barks. Ω"  # as in the source
    number = Segmentation(["in", "Nr.", "5."], [9, 9, UNKNOWN], list("abc"), [0, 1, 2], {2: "5"})
    target_words = insert_words(["at", "number."], number, {2: ()}, torch.eye(3)[:2])
    assert " ".join(word.text for word in target_words) == "at number 5."  # an abbreviation


def test_punctuation_around_a_word_is_not_copied():
    segmentation = Segmentation(["(Ωx),"], [5, UNKNOWN, 6, 7], ["(", "Ω", "x", "),"], [0, 0, 0, 0], {1: "Ω"})
    assert [word.text for word in insert_words([], segmentation, {0: ()}, None)] == ["Ωx"]


def test_equal_words_replace_different_target_words():
    tokens = ["Ω", "abc", "und", "Ω", "abc"]
    segmentation = Segmentation(
        ["Ωabc", "und", "Ωabc"], [UNKNOWN, 5, 6, UNKNOWN, 5], tokens, [0, 0, 1, 2, 2], {0: "Ω", 3: "Ω"}
    )
    for words, text in (
        (["abc", "and", "abc"], "Ωabc and Ωabc"),
        (["abc", "and"], "Ωabc and Ωabc"),
    ):
        target_words = insert_words(words, segmentation, {0: (), 2: ()}, None)
        assert " ".join(word.text for word in target_words) == text
    target_words = insert_words(["abc"], segmentation, {0: ()}, None, {0: 2})  # "abc" is a copy
    assert " ".join(word.text for word in target_words) == "Ωabc abc"


def test_a_word_of_control_characters_is_ignored():
    assert untranslated_words(Segmentation(["\x07"], [UNKNOWN], ["\x07"], [0], {0: "\x07"}), set()) == []
