import itertools
import random
from importlib.util import find_spec

import numpy as np
import pytest

from regard.errors import ArgumentError
from regard.translation.alignment import lexical_aligner
from regard.translation.alignment.aer import error_rate
from regard.translation.alignment.lexical_aligner import LexicalAligner
from regard.translation.data.bible import bible
from regard.translation.data.links import Links, SymmetrizationMethod


def shuffled(n: int, words: int = 30, seed: int = 0) -> tuple[list[tuple[str, str]], list[Links]]:
    """Sentences whose words are translated one by one, and then stand in another order."""
    chance = random.Random(seed)
    pairs, links = [], []
    for _ in range(n):
        source = chance.sample(range(words), chance.randint(2, 7))
        order = chance.sample(range(len(source)), len(source))
        pairs.append((" ".join(f"{w}a" for w in source), " ".join(f"{source[i]}b" for i in order)))
        links.append(frozenset((i, place) for place, i in enumerate(order)))
    return pairs, links


def probabilities(pairs: list[tuple[str, str]]) -> list[np.ndarray]:
    """Of each link (target words × source words): the mean of both directions."""
    forward, backward = LexicalAligner.learn(pairs)._posteriors(pairs)
    return [(first + second) / 2 for first, second in zip(forward, backward, strict=True)]


def test_a_lexicon_is_found() -> None:
    pairs, links = shuffled(200)
    learned = LexicalAligner.learn(pairs)
    found = error_rate(learned.links(pairs), links)
    assert found.precision == 1
    assert found.recall > 0.95
    unseen, their_links = shuffled(50, seed=1)
    assert error_rate(learned.links(unseen, "union"), their_links).aer < 0.03


def test_words_move_together() -> None:
    """Of several equal words, each belongs to the one whose neighbours it is near."""
    chance = random.Random(0)
    some = [chance.sample(range(20), 4) for _ in range(60)]
    pairs = [(" ".join(f"the {w}a" for w in s), " ".join(f"die {w}b" for w in s)) for s in some]
    gold = [frozenset((i, i) for i in range(8))] * len(pairs)
    assert error_rate(LexicalAligner.learn(pairs, moving=0).links(pairs, "union"), gold).aer > 0.1
    assert error_rate(LexicalAligner.learn(pairs).links(pairs, "union"), gold).aer < 0.05


def test_weights_are_probabilities() -> None:
    pairs, _ = shuffled(20)
    for (source, target), weights in zip(pairs, probabilities(pairs), strict=True):
        assert weights.shape == (len(target.split()), len(source.split()))
        assert (weights >= 0).all()
        assert (weights <= 1 + 1e-9).all()


@pytest.mark.parametrize(("n", "length"), [(1, 1), (3, 2), (2, 3), (4, 3)])
def test_forward_and_backward_equal_all_paths(n: int, length: int) -> None:
    chance = np.random.default_rng(n)
    cells, none = chance.random((n, 2, length)), chance.random((n, 2))
    cells[-1, 1], none[-1, 1] = 0, 1  # the second sentence is one word shorter
    moves = chance.random((length, length))
    moves /= moves.sum(1, keepdims=True)
    weights, made = lexical_aligner._forward_backward(cells, none, moves)
    assert made.shape == (length, length)
    expected_moves = np.zeros_like(moves)
    for b in range(2):
        expected, total, moved = np.zeros((n, length)), 0.0, np.zeros_like(moves)
        for first in range(length):
            for path in itertools.product(range(length + 1), repeat=n):  # the last is: no word
                place, chances, steps = first, 1 / length, []
                for j, to in enumerate(path):
                    if to == length:
                        chances *= none[j, b]
                    else:
                        chances *= moves[place, to] * cells[j, b, to]
                        steps.append((place, to))
                        place = to
                total += chances
                for j, to in enumerate(path):
                    expected[j, to % length] += chances * (to < length)
                for step in steps:
                    moved[step] += chances
        np.testing.assert_allclose(weights[:, b], expected / total)
        expected_moves += moved / total
    np.testing.assert_allclose(made, expected_moves)


def test_batches_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs, _ = shuffled(40)
    whole = probabilities(pairs)
    monkeypatch.setattr(lexical_aligner, "_BATCH_CELLS", 50)
    for some, all_at_once in zip(probabilities(pairs), whole, strict=True):
        np.testing.assert_allclose(some, all_at_once, rtol=1e-6, atol=1e-12)


def test_directions_are_alike() -> None:
    pairs, _ = shuffled(40)
    back = [(target, source) for source, target in pairs]
    there, here = probabilities(pairs), probabilities(back)
    for one, other in zip(there, here, strict=True):
        np.testing.assert_allclose(one, other.T, rtol=1e-6, atol=1e-12)


def test_case_and_accents_do_not_count() -> None:
    pairs, links = shuffled(100)
    learned = LexicalAligner.learn([(s.replace("a", "é"), t) for s, t in pairs])
    assert error_rate(learned.links([(s.replace("a", "E"), t) for s, t in pairs]), links).precision == 1


def test_rare_forms_lean_on_others_with_the_same_stem() -> None:
    chance = random.Random(0)
    stems, letters = ["".join(chance.choices("abcdefghij", k=5)) for _ in range(25)], "klmnopqrstuvwxyz"
    pairs, links = [], []
    for _ in range(100):
        words = chance.sample(range(25), 6)
        order = chance.sample(range(6), 6)
        source = (stems[word] + "".join(chance.choices(letters, k=3)) for word in words)  # each form once
        pairs.append((" ".join(source), " ".join(f"{words[i]}" for i in order)))
        links.append(frozenset((i, place) for place, i in enumerate(order)))
    assert error_rate(LexicalAligner.learn(pairs).links(pairs), links).aer < 0.1


def test_empty_sides_and_unknown_words() -> None:
    pairs, _ = shuffled(30)
    learned = LexicalAligner.learn([*pairs, ("", "1b 2b"), ("1a", "")])
    odd = [("", ""), ("", "1b"), ("1a", " "), ("new", "neu"), ("1a new", "neu 1b"), ("\u0301 1a", "1b")]
    links = learned.links(odd)
    assert links[:3] == [frozenset()] * 3
    assert (0, 1) in links[4]
    assert (1, 0) in links[5]  # a word of accents alone is still a word
    long = "1a " * 100, "1b " * 120
    assert learned._posteriors([long])[0][0].shape == (120, 100)  # longer than all that it learned from
    assert learned.links([]) == []


@pytest.mark.parametrize("pairs", [[], [("", "a")], [("a", " "), ("", "b")]])
def test_text_without_words_is_refused(pairs: list[tuple[str, str]]) -> None:
    with pytest.raises(ArgumentError, match=f"no words to link in {len(pairs)} sentence pairs"):
        LexicalAligner.learn(pairs)


def test_mark_in_greek_and_english() -> None:
    if find_spec("bible_alignments") is None:
        pytest.skip("the package bible-alignments is not installed")
    verses = bible([41])
    pairs, gold = (
        [verse.pair for verse in verses],
        [verse.without_punctuation(verse.links) for verse in verses],
    )
    learned = LexicalAligner.learn(pairs)
    rates = {}
    hows: list[SymmetrizationMethod] = ["intersection", "grow-diag-final-and"]
    for how in hows:
        links = zip(verses, learned.links(pairs, how), strict=True)
        rates[how] = error_rate([verse.without_punctuation(some) for verse, some in links], gold)
    assert rates["intersection"].precision > 0.8
    assert (
        rates["grow-diag-final-and"].aer < 0.4
    )  # the diagonal: 0.74; eflomal with seven times the text: 0.33
