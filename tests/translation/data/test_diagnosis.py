"""Warnings about corpora: each mistake is found, and good corpora cause none."""

import random
from itertools import pairwise
from pathlib import Path

import pytest

from regard.translation.data.builtin import embedded_corpus
from regard.translation.data.diagnosis import diagnose
from regard.translation.data.formats import read_pairs
from regard.translation.data.pairs import Pair
from regard.translation.data.statistics import CorpusStatistics

DATA = Path(__file__).parents[4] / "shared/data"


def statistics(pairs) -> CorpusStatistics:
    result = CorpusStatistics()
    for _ in result.observe(pairs):
        pass
    return result


@pytest.fixture(scope="module")
def corpus():
    return embedded_corpus("en", "de", size=600).train


def test_a_good_corpus_gives_no_warning(corpus):
    assert diagnose(statistics(corpus), corpus[:50]) == []
    assert diagnose(statistics([Pair(target, source) for source, target in corpus])) == []
    for size in (0, 1, 99, 120):
        assert diagnose(statistics(corpus[:size])) == []


def test_each_mistake_is_found(corpus):
    swapped = [Pair(target, source) for source, target in corpus]
    targets = [pair.target for pair in corpus]
    shuffled = random.Random(0).sample(targets, len(targets))
    unrelated = [Pair(pair.source, text) for pair, text in zip(corpus, shuffled, strict=True)]
    moved = [Pair(pair.source, following.target) for pair, following in pairwise(corpus[300:])]
    extended = [
        Pair(pair.source, f"{following.source} {pair.source}") for pair, following in pairwise(corpus)
    ]
    for pairs, dev, message in [
        (unrelated, (), "look unrelated"),
        ([*corpus[:300], *moved], (), "From about pair 3"),
        ([*corpus[:500], *swapped[:30]], (), "languages swapped"),
        ([*corpus[:300], *swapped[300:]], (), "languages swapped"),
        (
            [pairs[i % 2] for i, pairs in enumerate(zip(corpus[:150], swapped, strict=False))],
            (),
            "languages swapped",
        ),
        ([*moved[:200], *corpus[:300]], (), "Up to about pair"),
        ([*corpus[:200], *moved, *corpus[200:300]], (), "Between about pair"),
        ([*corpus[:500], *moved[-80:]], (), "From about pair"),
        (corpus, swapped[:50], "validation set looks like the target"),
        ([Pair(pair.source, pair.source) for pair in corpus], (), "same text on both sides"),
        ([*corpus, *corpus], (), "are duplicates"),
        ([Pair(pair.source, pair.target.encode().decode("latin1")) for pair in corpus], (), "garbled"),
        ([*corpus, *([Pair("a date", "это дата")] * 60)], (), "Cyrillic script, the others in Latin"),
        (extended, (), "same language"),
    ]:
        warnings = diagnose(statistics(pairs), dev)
        assert any(message in warning for warning in warnings), (message, warnings)


@pytest.mark.parametrize("encoding", ["latin1", "cp1252", "cp850", "mac_roman", "cp1251", "ascii"])
def test_wrong_encodings_are_found(corpus, encoding):
    assert any("ü" in pair.target for pair in corpus)
    read = [pair.target.encode().decode(encoding, "replace") for pair in corpus]
    lost = [pair.target.encode("ascii", "replace").decode() for pair in corpus]
    for targets in (read, lost):
        pairs = [Pair(pair.source, text) for pair, text in zip(corpus, targets, strict=True)]
        assert any("garbled" in warning for warning in diagnose(statistics(pairs)))


@pytest.mark.parametrize("coded", [2, 3, 5])
def test_similar_languages_do_not_look_swapped(corpus, coded):
    """A word in every `coded` words differs between the two sides."""

    def translate(word: str) -> str:
        return f"q{word}" if sum(word.encode()) % coded == 0 else word

    pairs = [Pair(text, " ".join(map(translate, text.split()))) for text, _ in corpus]
    assert not any("swapped" in warning for warning in diagnose(statistics(pairs)))


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="needs the folder shared/data")
def test_real_corpora_give_no_warning():
    multi30k = DATA / "multi30k"
    for source, target in [("de", "en"), ("en", "de"), ("fr", "en")]:
        pairs = list(read_pairs(multi30k / f"train.{source}", multi30k / f"train.{target}"))
        for size in (150, 3000, len(pairs)):
            assert diagnose(statistics(pairs[:size]), pairs[:100]) == []
    assert diagnose(statistics(read_pairs(DATA / "tatoeba/train.en-de.tsv"))) == []


def test_a_sample_is_ordered_and_numbered_as_in_the_corpus():
    result = statistics([Pair(str(n), str(n)) for n in range(1, 5001)])
    numbers = [number for number, _ in result.sample]
    assert len(numbers) == 2000
    assert numbers == sorted(set(numbers))
    assert all(pair.source == str(number) for number, pair in result.sample)
    assert abs(sum(numbers) / 2000 - 2500) < 150
