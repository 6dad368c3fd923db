"""Batches: each pair once per epoch, within the budget, in an order that depends only on the seed."""

from collections import Counter
from itertools import islice

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import ArgumentError
from regard.translation.data.batches import Batch, Batches, InMemoryPairs
from regard.translation.data.encoded import EncodedCorpus
from regard.translation.tokens import END, SPECIAL_TOKENS, START, UNKNOWN

sides = st.lists(st.integers(SPECIAL_TOKENS, 50), max_size=13)
corpora = st.lists(st.tuples(sides, sides), min_size=1, max_size=60)
budgets = st.integers(1, 80)
seeds = st.integers(0, 2**32 - 1)


def of_lengths(*lengths: tuple[int, int]) -> InMemoryPairs:
    """Return pairs of these lengths, with distinct tokens."""
    return InMemoryPairs([(list(range(5, 5 + s)), list(range(105, 105 + t))) for s, t in lengths])


@given(pairs=corpora, budget=budgets, seed=seeds, epoch=st.integers(0, 5))
def test_an_epoch_has_each_pair_once_within_the_budget_in_an_order_given_by_the_seed(
    pairs, budget, seed, epoch
):
    batches = Batches(InMemoryPairs(pairs), budget, seed)
    indices = [batch.tolist() for batch in batches.epoch(epoch)]
    assert sorted(index for batch in indices for index in batch) == list(range(len(pairs)))
    for batch_indices in indices:
        batch = batches.get(batch_indices, epoch)
        assert batch.size <= budget or len(batch_indices) == 1
        assert batch.size == len(batch.source.tokens) + batch.labels
        assert batch.labels == sum(len(pairs[index][1]) + 1 for index in batch_indices)
    numpy.random.seed(len(pairs))
    torch.manual_seed(budget)
    assert indices == [batch.tolist() for batch in Batches(InMemoryPairs(pairs), budget, seed).epoch(epoch)]


@given(pairs=corpora, budget=budgets, seed=seeds, step=st.integers(0, 90))
def test_a_later_start_continues_the_same_sequence(pairs, budget, seed, step):
    batches = Batches(InMemoryPairs(pairs), budget, seed)
    expected, later = (list(islice(batches.from_step(start), step - start + 20)) for start in (0, step))
    assert [(epoch, batch.tolist()) for epoch, batch in later] == [
        (epoch, batch.tolist()) for epoch, batch in expected[step:]
    ]


def test_every_epoch_and_seed_has_its_own_order():
    pairs = of_lengths(*[(3, 5)] * 97)
    orders = [
        [index for batch in Batches(pairs, 30, seed).epoch(epoch) for index in batch.tolist()]
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_sentences_of_a_batch_have_similar_lengths():
    random = numpy.random.default_rng(0)
    pairs = of_lengths(*[(n, n) for n in random.integers(1, 60, 2000).tolist()])
    spread = [numpy.ptp(pairs.sizes[batch, 1]) for batch in Batches(pairs, 600).epoch(0)]
    assert numpy.mean(spread) < 6  # 59 without sorting


def test_a_batch_has_start_and_end_tokens():
    batch = Batch.of([([5, 6], [7, 8, 9]), ([], [10])])
    assert batch.source.tokens.tolist() == [5, 6, END, END]
    assert batch.source.lengths.tolist() == [3, 1]
    assert batch.target.tokens.tolist() == [START, 7, 8, 9, END, START, 10, END]
    assert batch.target.lengths.tolist() == [5, 3]
    assert (batch.labels, batch.size) == (6, 10)
    moved = batch.to(torch.device("meta"))
    assert {x.device.type for side in moved[:2] for x in (side.tokens, side.lengths)} == {"meta"}


def test_batches_contain_the_links_of_their_pairs(tmp_path):
    pairs = [([5] * n, [6] * n) for n in range(1, 6)]
    links = [(list(range(n)), [n - 1] * n) for n in range(1, 6)]
    for kept in (InMemoryPairs(links), EncodedCorpus.write(tmp_path / "links.ids", links, vocabulary=10)):
        batch = Batches(InMemoryPairs(pairs), 50, links=kept).get(numpy.array([2, 0]), 0)
        assert [links.tolist() for links in batch.links] == [[[0, 2], [1, 2], [2, 2]], [[0, 0]]]


@pytest.mark.parametrize(
    ("links", "reason"),
    [
        (([0, 3], [0, 1]), "they refer to tokens beyond its 3 source and 2 target tokens"),
        (([0, 1], [0, 2]), "they refer to tokens beyond its 3 source and 2 target tokens"),
        (([0, 1], [0]), "2 source and 1 target positions"),
        (([], [0]), "0 source and 1 target positions"),
    ],
)
def test_corrupted_links_are_rejected(links, reason):
    batches = Batches(InMemoryPairs([([5] * 3, [6] * 2)]), 50, links=InMemoryPairs([links]))
    with pytest.raises(ArgumentError, match=f"links of pair 0 are corrupted: {reason}"):
        batches.get([0], 0)


def test_pairs_on_disk_give_the_same_batches(tmp_path):
    pairs = [([5] * n, [6] * (n % 7 + 1)) for n in range(1, 30)]
    memory = Batches(InMemoryPairs(pairs), 50)
    disk = Batches(EncodedCorpus.write(tmp_path / "pairs.ids", pairs, vocabulary=10), 50)
    assert [batch.tolist() for batch in disk.epoch(1)] == [batch.tolist() for batch in memory.epoch(1)]
    for batches in (disk, memory):
        batch = batches.get([3, 11, 7], 0)
        assert batch.source.lengths.tolist() == [5, 13, 9]
        assert batch.target.lengths.tolist() == [4 % 7 + 3, 12 % 7 + 3, 8 % 7 + 3]


@pytest.mark.parametrize("shared", [True, False])
def test_tokens_are_replaced_on_both_sides_at_the_given_rate(shared):
    pairs = [([5, 6, 10 + n], [10 + n, 8]) for n in range(2000)]
    batches = Batches(InMemoryPairs(pairs), unknown_rate=0.3, shared=shared)
    batch = batches.get(range(2000), 4)
    sides = [side.split(side.tokens) for side in (batch.source, batch.target)]
    unknown = [[UNKNOWN in sentence.tolist() for sentence in side] for side in sides]
    assert unknown[0] == unknown[1]
    assert 0.25 < numpy.mean(unknown[0]) < 0.35
    for index, replaced in enumerate(unknown[0]):
        source, target = (side[index].tolist() for side in sides)
        if not replaced:
            wanted = [5, 6, 10 + index, END], [START, 10 + index, 8, END]
        elif shared:  # the token that occurs on both sides
            wanted = [5, 6, UNKNOWN, END], [START, UNKNOWN, 8, END]
        else:  # the same id is a different token there
            wanted = [5, 6, 10 + index, UNKNOWN, END], [START, 10 + index, 8, UNKNOWN, END]
        assert (source, target) == wanted


@given(pairs=corpora, seed=seeds, epoch=st.integers(0, 3))
def test_at_most_one_token_is_replaced_or_added(pairs, seed, epoch):
    batches = Batches(InMemoryPairs(pairs), seed=seed, unknown_rate=0.5)
    before = [(list(source), list(target)) for source, target in pairs]
    batch = batches.get(range(len(pairs)), epoch)
    again = batches.get(range(len(pairs)), epoch)
    assert torch.equal(batch.source.tokens, again.source.tokens)
    assert torch.equal(batch.target.tokens, again.target.tokens)
    assert pairs == before  # unchanged
    for index, pair in enumerate(pairs):
        for side, sentence in zip(batch[:2], pair, strict=True):
            shown = Counter(side.split(side.tokens)[index].tolist())
            lost = Counter(sentence) - shown
            assert shown[UNKNOWN] <= 1
            assert sum(lost.values()) <= shown[UNKNOWN]


def test_each_epoch_replaces_other_tokens():
    batches = Batches(InMemoryPairs([([5, 6, 7], [7, 6, 5])] * 50), unknown_rate=0.5)
    seen = {tuple(batches.get(range(50), epoch).source.tokens.tolist()) for epoch in range(5)}
    assert len(seen) == 5


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"batch_tokens": 0}, "batch_tokens=0; it must be at least 1"),
        ({"unknown_rate": 1.0}, "unknown_rate=1.0; it must be at least 0 and below 1"),
        ({"unknown_rate": -0.1}, "unknown_rate=-0.1"),
    ],
)
def test_invalid_arguments_are_rejected(wrong, why):
    with pytest.raises(ArgumentError, match=why):
        Batches(of_lengths((2, 3)), **wrong)
    with pytest.raises(ArgumentError, match="requires at least one pair, got 0"):
        Batches(InMemoryPairs([]))
