import itertools
import random
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from regard._util.text import pluralize
from regard.errors import ArgumentError, ShapeError
from regard.translation.alignment import hmm, lexical_aligner, lexicon
from regard.translation.alignment.aer import error_rate
from regard.translation.alignment.alignment import Alignment
from regard.translation.alignment.lexical_aligner import LexicalAligner
from regard.translation.alignment.lexical_alignment import LexicalAlignment
from regard.translation.alignment.links import Links, SymmetrizationMethod
from regard.translation.data.bible import bible


def shuffled(n: int, words: int = 30, seed: int = 0) -> tuple[list[tuple[str, str]], list[Links]]:
    """Return sentences translated word by word, then shuffled."""
    rng = random.Random(seed)
    pairs, links = [], []
    for _ in range(n):
        source = rng.sample(range(words), rng.randint(2, 7))
        order = rng.sample(range(len(source)), len(source))
        pairs.append((" ".join(f"{w}a" for w in source), " ".join(f"{source[i]}b" for i in order)))
        links.append(frozenset((i, position) for position, i in enumerate(order)))
    return pairs, links


def probabilities(pairs: list[tuple[str, str]]) -> list[np.ndarray]:
    """Return posteriors (target words × source words): the mean of both directions."""
    return [(item.forward + item.backward) / 2 for item in LexicalAligner.learn(pairs).align(pairs)]


def test_a_lexicon_is_learned():
    pairs, links = shuffled(200)
    aligner = LexicalAligner.learn(pairs)
    rates = error_rate(aligner.links(pairs), links)
    assert rates.precision == 1
    assert rates.recall > 0.95
    unseen, unseen_links = shuffled(50, seed=1)
    assert error_rate(aligner.links(unseen, "union"), unseen_links).aer < 0.03


def test_repeated_words_are_aligned_by_their_neighbors():
    """The jumps decide which of several equal words a word belongs to; the lexicon cannot."""
    rng = random.Random(0)
    sentences = [rng.sample(range(20), 4) for _ in range(60)]
    pairs = [(" ".join(f"the {w}a" for w in s), " ".join(f"die {w}b" for w in s)) for s in sentences]
    gold = [frozenset((i, i) for i in range(8))] * len(pairs)
    aligner = LexicalAligner.learn(pairs)
    equal_jumps = [np.full_like(jumps, 1 / len(jumps)) for jumps in aligner.jumps]
    without = LexicalAligner(aligner.lexicon, aligner.null, equal_jumps)
    assert error_rate(without.links(pairs, "union"), gold).aer > 0.1
    assert error_rate(aligner.links(pairs, "union"), gold).aer < 0.05


def test_posteriors_are_probabilities():
    pairs, _ = shuffled(20)
    for (source, target), weights in zip(pairs, probabilities(pairs), strict=True):
        assert weights.shape == (len(target.split()), len(source.split()))
        assert (weights >= 0).all()
        assert (weights <= 1 + 1e-9).all()


@pytest.mark.parametrize(("n", "length"), [(1, 1), (3, 2), (2, 3), (4, 3)])
def test_forward_backward_equals_the_sum_over_all_paths(n, length):
    rng = np.random.default_rng(n)
    cells, null = rng.random((n, 2, length)), rng.random((n, 2))
    cells[-1, 1], null[-1, 1] = 0, 1  # the second sentence is one word shorter
    jumps = rng.random((length + 1, length))  # the first row is the jump from the start
    jumps /= jumps.sum(1, keepdims=True)
    weights, jumped, log_probabilities = hmm.forward_backward(cells, null, jumps)
    assert jumped.shape == jumps.shape
    expected_jumps = np.zeros_like(jumps)
    for b in range(2):
        expected, total, path_jumps = np.zeros((n, length)), 0.0, np.zeros_like(jumps)
        for path in itertools.product(range(length + 1), repeat=n):  # the last one is null
            row, probability, steps = 0, 1.0, []
            for j, to in enumerate(path):
                if to == length:
                    probability *= null[j, b]
                else:
                    probability *= jumps[row, to] * cells[j, b, to]
                    steps.append((row, to))
                    row = to + 1
            total += probability
            for j, to in enumerate(path):
                expected[j, to % length] += probability * (to < length)
            for step in steps:
                path_jumps[step] += probability
        np.testing.assert_allclose(weights[:, b], expected / total)
        np.testing.assert_allclose(np.exp(log_probabilities[b]), total)
        expected_jumps += path_jumps / total
    np.testing.assert_allclose(jumped, expected_jumps)


def test_batches_are_irrelevant(monkeypatch):
    pairs, _ = shuffled(40)
    one_batch = probabilities(pairs)
    monkeypatch.setattr(hmm, "_BATCH_CELLS", 50)
    monkeypatch.setattr(lexical_aligner, "_CHUNK_CELLS", 200)
    for small, large in zip(probabilities(pairs), one_batch, strict=True):
        np.testing.assert_allclose(small, large, rtol=1e-6, atol=1e-12)


def test_directions_are_symmetric():
    pairs, _ = shuffled(40)
    swapped = [(target, source) for source, target in pairs]
    for forward, backward in zip(probabilities(pairs), probabilities(swapped), strict=True):
        np.testing.assert_allclose(forward, backward.T, rtol=1e-6, atol=1e-12)


def test_case_and_accents_are_ignored():
    pairs, links = shuffled(100)
    aligner = LexicalAligner.learn([(s.replace("a", "é"), t) for s, t in pairs])
    assert error_rate(aligner.links([(s.replace("a", "E"), t) for s, t in pairs]), links).precision == 1


def test_rare_forms_share_statistics_with_their_stem():
    rng = random.Random(0)
    stems, letters = ["".join(rng.choices("abcdefghij", k=5)) for _ in range(25)], "klmnopqrstuvwxyz"
    pairs, links = [], []
    for _ in range(100):
        words = rng.sample(range(25), 6)
        order = rng.sample(range(6), 6)
        source = (stems[word] + "".join(rng.choices(letters, k=3)) for word in words)  # each form once
        pairs.append((" ".join(source), " ".join(f"{words[i]}" for i in order)))
        links.append(frozenset((i, position) for position, i in enumerate(order)))
    assert error_rate(LexicalAligner.learn(pairs).links(pairs), links).aer < 0.1


def test_endings_predict_words(monkeypatch):
    """Each verb occurs once; only its ending tells which pronoun it contains."""
    rng = random.Random(0)
    endings = {"ousin": "they", "omenn": "we", "eteee": "you", "artin": "she"}
    pairs, links = [], []
    for _ in range(80):
        verbs = [("".join(rng.choices("bcdfghjk", k=6)), *rng.choice(list(endings.items()))) for _ in "12"]
        order = rng.sample(range(2), 2)
        source = " ".join(stem + ending for stem, ending, _ in verbs)
        pairs.append((source, " ".join(verbs[i][2] for i in order)))
        links.append(frozenset((i, position) for position, i in enumerate(order)))
    assert error_rate(LexicalAligner.learn(pairs).links(pairs, "union"), links).aer < 0.15
    monkeypatch.setattr(lexicon, "_ENDING", 0)
    assert error_rate(LexicalAligner.learn(pairs).links(pairs, "union"), links).aer > 0.3


def test_agreement_is_between_the_product_and_certainty():
    """If both directions are certain, so is the agreement; else it is between the product and the larger."""
    forward, backward = np.array([1, 0, 1, 0.99, 0, 0.3]), np.array([1, 1, 0, 0.5, 0, 0.2])
    agreement = lexical_aligner._agreement(forward, backward)
    assert agreement[[0, 1, 2, 4]].tolist() == [1, 0, 0, 0]
    assert (agreement >= forward * backward).all()
    assert agreement[3] > 0.99 * 0.5
    np.testing.assert_array_equal(agreement, lexical_aligner._agreement(backward, forward))
    assert (agreement <= np.maximum(forward, backward)).all()


def test_words_that_are_rarely_linked_attract_fewer_words(monkeypatch):
    pairs, _ = shuffled(150)
    rng = random.Random(0)
    aligner = LexicalAligner.learn([(f"{source} {rng.choice('xy')}", target) for source, target in pairs])
    (attracted,) = aligner.align([("x", "unseen")])
    monkeypatch.setattr(lexicon, "_FERTILITY", 0)
    (without,) = aligner.align([("x", "unseen")])
    assert attracted.forward[0, 0] < without.forward[0, 0]


def test_the_intersection_leaves_out_links_with_a_low_score():
    pairs, _ = shuffled(60)
    for alignment in LexicalAligner.learn(pairs).align(pairs):
        assert alignment.min_score > 0
        forward, backward = alignment.candidates()
        confident = alignment.links(threshold=alignment.min_score)
        assert alignment.links("intersection") == forward & backward & confident
        assert replace(alignment, min_score=0).links("intersection") == forward & backward


def two_directions(forward: list[list[float]], backward: list[list[float]]) -> LexicalAlignment:
    """Return an alignment with the given probabilities (target words × source words)."""
    words = tuple("abcdef"[: len(forward[0])]), tuple("uvwxyz"[: len(forward)])
    return LexicalAlignment(*words, np.array(forward), np.array(backward), 0.0)


def test_scores_multiply_the_odds_of_both_directions():
    """Even odds leave the other direction's odds as they are, and opposite odds cancel."""
    alignment = two_directions([[0.5, 0.8, 0.8, 0.8]], [[0.8, 0.5, 0.2, 0.8]])
    np.testing.assert_allclose(alignment.weights, [[0.8, 0.8, 0.5, 16 / 17]], rtol=0.01)
    swapped = two_directions(alignment.backward.T.tolist(), alignment.forward.T.tolist())
    np.testing.assert_allclose(swapped.weights, alignment.weights.T)


def test_no_direction_is_trusted_completely():
    """A direction cannot overrule the other one by being certain, and no score is 0 or 1."""
    alignment = two_directions([[1, 1, 0]], [[1, 0, 0]])
    scores = alignment.weights[0]
    assert 0.99 < scores[0] < 1
    assert scores[1] == pytest.approx(0.5)
    assert 0 < scores[2] < 0.01


def test_a_word_with_two_translations_keeps_both():
    """The backward direction must divide the word's probability; the forward direction is certain of both."""
    alignment = replace(two_directions([[0.99], [0.99]], [[0.5], [0.49]]), min_score=0.9)
    assert alignment.links("intersection") == {(0, 0), (0, 1)}


def test_links_that_the_other_direction_makes_very_unlikely_are_left_out():
    alignment = two_directions([[0.6, 0, 0], [0, 0.6, 0]], [[0.7, 0, 0], [0, 0, 0.6]])
    forward, backward = alignment.best_links()
    assert forward == {(0, 0), (1, 1)}
    assert backward == {(0, 0), (2, 1)}
    assert alignment.candidates() == ({(0, 0)}, {(0, 0)})
    assert alignment.links("union") == {(0, 0)}


def test_rows_sum_to_at_most_one():
    pairs, _ = shuffled(40)
    for alignment in LexicalAligner.learn(pairs).align([*pairs, ("1a new", "2b neu 1b")]):
        assert alignment.forward.sum(1).max() <= 1 + 1e-9
        assert alignment.backward.sum(0).max() <= 1 + 1e-9


def test_empty_sides_and_unknown_words():
    pairs, _ = shuffled(30)
    aligner = LexicalAligner.learn([*pairs, ("", "1b 2b"), ("1a", "")])
    unusual = [("", ""), ("", "1b"), ("1a", " "), ("new", "neu"), ("1a new", "neu 1b"), ("\u0301 1a", "1b")]
    links = aligner.links(unusual)
    assert links[:3] == [frozenset()] * 3
    assert (0, 1) in links[4]
    assert (1, 0) in links[5]  # a word that consists of accents is still a word
    long = "1a " * 100, "1b " * 120
    assert aligner.align([long])[0].forward.shape == (120, 100)  # longer than in training
    assert aligner.links([]) == []


@pytest.mark.parametrize("pairs", [[], [("", "a")], [("a", " "), ("", "b")]])
def test_pairs_without_words_are_rejected(pairs):
    message = f"Got {pluralize(len(pairs), 'sentence pair')}; at least one must have words on both sides"
    with pytest.raises(ArgumentError, match=message):
        LexicalAligner.learn(pairs)


def test_too_long_sentences_are_rejected(monkeypatch):
    """The hidden Markov model needs memory for the square of the length, even if the other side is short."""
    aligner = LexicalAligner.learn([("ein Hund", "a dog")])
    monkeypatch.setattr(lexical_aligner, "_MAX_WORDS", 3)
    assert [item.forward.shape for item in aligner.align([("a b c", "d"), ("a b c d", "")])] == [
        (1, 3),
        (0, 4),
    ]
    for function in (LexicalAligner.learn, aligner.align):
        with pytest.raises(ArgumentError, match="has 1 source and 4 target words; at most 3 per side"):
            function([("a", "b c d e")])


def test_mark_in_greek_and_english():
    if find_spec("bible_alignments") is None:
        pytest.skip("the package bible-alignments is not installed")
    verses = bible([41])
    pairs, gold = (
        [verse.pair for verse in verses],
        [verse.without_punctuation(verse.links) for verse in verses],
    )
    aligner = LexicalAligner.learn(pairs)
    rates = {}
    methods: list[SymmetrizationMethod] = ["intersection", "grow-diag-final-and"]
    for method in methods:
        verse_links = zip(verses, aligner.links(pairs, method), strict=True)
        words_only = [verse.without_punctuation(links) for verse, links in verse_links]
        rates[method] = error_rate(words_only, gold)
    assert rates["intersection"].precision > 0.8
    # the diagonal has 0.74; eflomal with seven times as much text has 0.33
    assert rates["grow-diag-final-and"].aer < 0.4


def attention(lexical: LexicalAlignment, seed: int = 0) -> tuple[Alignment, Alignment]:
    """Return random weights of two models for the same pair; a tenth of each row is on the end token."""
    generator = torch.Generator().manual_seed(seed)
    source, target = lexical.source_words, lexical.target_words
    forward = 0.9 * torch.rand(len(target), len(source), generator=generator).softmax(-1)
    backward = 0.9 * torch.rand(len(source), len(target), generator=generator).softmax(-1)
    return Alignment(source, target, forward), Alignment(target, source, backward)


def test_a_combination_is_between_the_aligner_and_the_models():
    pairs, _ = shuffled(50)
    for lexical in LexicalAligner.learn(pairs).align(pairs[:5]):
        forward, backward = attention(lexical)
        alone, models = lexical.combine(forward, backward, 0), lexical.combine(forward, backward, 1)
        np.testing.assert_allclose(alone.forward, lexical.forward, atol=1e-4)
        np.testing.assert_allclose(alone.backward, lexical.backward, atol=1e-4)
        np.testing.assert_allclose(models.forward, forward.weights, atol=1e-4)
        np.testing.assert_allclose(models.backward, backward.weights.T, atol=1e-4)
        both = lexical.combine(forward, backward)
        assert both.forward.sum(1).max() <= 1
        assert both.backward.sum(0).max() <= 1
        assert both.score == lexical.score


def test_swapping_source_and_target_swaps_a_combination():
    pairs, _ = shuffled(50)
    lexical = LexicalAligner.learn(pairs).align(pairs[:1])[0]
    forward, backward = attention(lexical)
    swapped = LexicalAlignment(
        lexical.target_words, lexical.source_words, lexical.backward.T, lexical.forward.T, lexical.score
    ).combine(backward, forward)
    both = lexical.combine(forward, backward)
    np.testing.assert_allclose(swapped.forward, both.backward.T)
    np.testing.assert_allclose(swapped.backward, both.forward.T)


def test_combinations_of_empty_sentences_and_wrong_sizes():
    aligner = LexicalAligner.learn([("a b", "c d e")])
    for pair in (("", ""), ("a", ""), ("", "c")):
        (lexical,) = aligner.align([pair])
        assert lexical.combine(*attention(lexical)).links() == frozenset()
    (lexical,) = aligner.align([("a b", "c d e")])
    forward, backward = attention(lexical)
    with pytest.raises(ShapeError, match=r"forward weights of shape \(2, 3\); the pair has 3 target words"):
        lexical.combine(backward, forward)
    with pytest.raises(ArgumentError, match="weight"):
        lexical.combine(forward, backward, 1.5)
