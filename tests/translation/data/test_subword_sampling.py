"""Subword regularization keeps the text; samples depend only on seed, epoch and pair."""

import numpy
import torch

from regard.translation.data.batches import Batches, InMemoryPairs
from regard.translation.data.subword_sampling import SubwordSampler
from regard.translation.tokens import END, START, UNKNOWN, Tokenizer, TokenizerPair

LINES = ["der kleine Hund schläft heute", "eine große Katze lacht morgen", "kleine Hunde bellen heute"] * 5
TOKENIZER = Tokenizer.learn(LINES, size=60)
IDS = [TOKENIZER.encode(line) for line in LINES]


def batches(rate: float, links=None) -> Batches:
    pairs = InMemoryPairs([(ids, ids) for ids in IDS])
    samplers = SubwordSampler.create_pair(TokenizerPair(TOKENIZER, TOKENIZER), rate)
    return Batches(pairs, 200, seed=3, links=links, samplers=samplers)


def test_samples_keep_the_text_and_differ_by_epoch():
    at = numpy.arange(len(IDS))
    epochs = [batches(0.5).get(at, epoch).source for epoch in range(3)]
    for source in epochs:
        texts = [TOKENIZER.decode(ids.tolist()).text for ids in source.split(source.tokens)]
        assert texts == LINES
    assert len({tuple(source.tokens.tolist()) for source in epochs}) == 3
    again = batches(0.5).get(at, 1).source
    assert again.tokens.tolist() == epochs[1].tokens.tolist()


def test_rate_zero_and_one():
    at = numpy.arange(len(IDS))
    plain = Batches(InMemoryPairs([(ids, ids) for ids in IDS]), 200, seed=3)
    assert batches(0.0).get(at, 0).source.tokens.tolist() == plain.get(at, 0).source.tokens.tolist()
    sampled = batches(1.0).get(at, 0).source.tokens
    assert len(sampled) > len(plain.get(at, 0).source.tokens)


def test_special_and_unknown_tokens_are_kept():
    sampler, random = SubwordSampler(TOKENIZER, 1.0), numpy.random.default_rng(0)
    ids = [START, *IDS[0], UNKNOWN, UNKNOWN, *IDS[1], END]
    for _ in range(20):
        sample = sampler.sample(ids, random)
        assert [token for token in sample if token < 4] == [START, UNKNOWN, UNKNOWN, END]


def test_links_connect_the_same_words():
    """Word n of the source is linked to word n of the target, before and after sampling."""

    def word_of(ids):
        starts = [TOKENIZER.scored_pieces()[token][0].startswith("▁") for token in ids]
        return numpy.cumsum(starts) - 1

    def diagonal(ids):
        words = word_of(ids)
        return sorted((i, j) for i, a in enumerate(words) for j, b in enumerate(words) if a == b)

    links = InMemoryPairs([tuple(zip(*diagonal(ids), strict=True)) for ids in IDS])
    batch = batches(0.7, links).get(numpy.arange(len(IDS)), 0)
    sides = [side.split(side.tokens) for side in (batch.source, batch.target)]
    for source, target, linked in zip(*sides, batch.links, strict=True):
        source_words, target_words = word_of(source.tolist()[:-1]), word_of(target.tolist()[1:-1])
        expected = {(i, j) for i, a in enumerate(source_words) for j, b in enumerate(target_words) if a == b}
        assert {tuple(link) for link in linked.tolist()} == expected
        assert linked.dtype == torch.long
