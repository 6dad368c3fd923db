"""Batches: each pair once an epoch, within the budget, in an order that depends on the seed alone."""

from collections import Counter
from itertools import islice
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import ArgumentError
from regard.translation.data.batches import Batch, Batches, InMemoryPairs
from regard.translation.data.encoded import EncodedCorpus
from regard.translation.tokens import END, MARKS, START, UNKNOWN

sides = st.lists(st.integers(MARKS, 50), max_size=13)
corpora = st.lists(st.tuples(sides, sides), min_size=1, max_size=60)
budgets = st.integers(1, 80)
seeds = st.integers(0, 2**32 - 1)


def of_lengths(*lengths: tuple[int, int]) -> InMemoryPairs:
    """Pairs of these lengths, no two pieces alike."""
    return InMemoryPairs([(list(range(5, 5 + s)), list(range(105, 105 + t))) for s, t in lengths])


@given(pairs=corpora, budget=budgets, seed=seeds, epoch=st.integers(0, 5))
def test_each_pair_is_in_one_batch_of_an_epoch(pairs, budget, seed, epoch) -> None:
    batches = Batches(InMemoryPairs(pairs), budget, seed).epoch(epoch)
    assert sorted(place for batch in batches for place in batch.tolist()) == list(range(len(pairs)))
    assert all(len(batch) for batch in batches)


@given(pairs=corpora, budget=budgets, seed=seeds)
def test_a_batch_keeps_to_its_budget_unless_it_is_one_pair(pairs, budget, seed) -> None:
    batches = Batches(InMemoryPairs(pairs), budget, seed)
    for places in batches.epoch(0):
        batch = batches.get(places, 0)
        assert batch.size <= budget or len(places) == 1
        assert batch.size == len(batch.source.tokens) + batch.labels
        assert batch.labels == sum(len(pairs[place][1]) + 1 for place in places)


@given(pairs=corpora, budget=budgets, seed=seeds, step=st.integers(0, 90))
def test_a_later_start_gives_what_would_have_come(pairs, budget, seed, step) -> None:
    batches = Batches(InMemoryPairs(pairs), budget, seed)
    all_of_them = list(islice(batches.from_step(0), step + 20))
    later = list(islice(batches.from_step(step), 20))
    assert [(epoch, place, batch.tolist()) for epoch, place, batch in later] == [
        (epoch, place, batch.tolist()) for epoch, place, batch in all_of_them[step:]
    ]


@given(pairs=corpora, budget=budgets, seed=seeds)
def test_the_order_depends_on_the_seed_alone(pairs, budget, seed) -> None:
    numpy.random.seed(len(pairs))
    torch.manual_seed(budget)
    first = [batch.tolist() for batch in Batches(InMemoryPairs(pairs), budget, seed).epoch(3)]
    numpy.random.seed(0)
    assert first == [batch.tolist() for batch in Batches(InMemoryPairs(pairs), budget, seed).epoch(3)]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    pairs = of_lengths(*[(3, 5)] * 97)
    orders = [
        [place for batch in Batches(pairs, 30, seed).epoch(epoch) for place in batch.tolist()]
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_sentences_of_a_batch_have_like_lengths() -> None:
    random = numpy.random.default_rng(0)
    pairs = of_lengths(*[(n, n) for n in random.integers(1, 60, 2000).tolist()])
    spread = [numpy.ptp(pairs.sizes[batch, 1]) for batch in Batches(pairs, 600).epoch(0)]
    assert numpy.mean(spread) < 6  # 59 if they came as they are


def test_a_batch_has_its_marks() -> None:
    batch = Batch.of([([5, 6], [7, 8, 9]), ([], [10])])
    assert batch.source.tokens.tolist() == [5, 6, END, END]
    assert batch.source.lengths.tolist() == [3, 1]
    assert batch.target.tokens.tolist() == [START, 7, 8, 9, END, START, 10, END]
    assert batch.target.lengths.tolist() == [5, 3]
    assert (batch.labels, batch.size) == (6, 10)
    moved = batch.to(torch.device("meta"))
    assert (
        {side.tokens.device.type for side in moved[:2]}
        == {side.lengths.device.type for side in moved[:2]}
        == {"meta"}
    )


def test_links_come_with_their_pairs(tmp_path: Path) -> None:
    """Of each (source token, target token)."""
    pairs = [([5] * n, [6] * n) for n in range(1, 6)]
    links = [(list(range(n)), [n - 1] * n) for n in range(1, 6)]
    for kept in (InMemoryPairs(links), EncodedCorpus.write(tmp_path / "links.ids", links, vocabulary=10)):
        batch = Batches(InMemoryPairs(pairs), 50, links=kept).get(numpy.array([2, 0]), 0)
        assert [some.tolist() for some in batch.links] == [[[0, 2], [1, 2], [2, 2]], [[0, 0]]]


@pytest.mark.parametrize("links", [([0, 3], [0, 1]), ([0, 1], [0, 2]), ([0, 1], [0]), ([], [0])])
def test_links_that_point_nowhere_are_refused(links: tuple[list[int], list[int]]) -> None:
    batches = Batches(InMemoryPairs([([5] * 3, [6] * 2)]), 50, links=InMemoryPairs([links]))
    with pytest.raises(ArgumentError, match=r"links of pair 0 are damaged: .* its 3 source and 2 target"):
        batches.get([0], 0)


def test_pairs_on_disk_give_the_same_batches(tmp_path: Path) -> None:
    pairs = [([5] * n, [6] * (n % 7 + 1)) for n in range(1, 30)]
    store = EncodedCorpus.write(tmp_path / "pairs.ids", pairs, vocabulary=10)
    places = [3, 11, 7]
    for kept in (Batches(store, 50), Batches(InMemoryPairs(pairs), 50)):
        assert [batch.tolist() for batch in kept.epoch(1)] == [
            batch.tolist() for batch in Batches(InMemoryPairs(pairs), 50).epoch(1)
        ]
        batch = kept.get(places, 0)
        assert batch.source.lengths.tolist() == [5, 13, 9]
        assert batch.target.lengths.tolist() == [4 % 7 + 3, 12 % 7 + 3, 8 % 7 + 3]


@pytest.mark.parametrize("shared", [True, False])
def test_pieces_are_hidden_on_both_sides_at_the_asked_rate(shared: bool) -> None:
    pairs = [([5, 6, 10 + n], [10 + n, 8]) for n in range(2000)]
    batches = Batches(InMemoryPairs(pairs), unknown=0.3, shared=shared)
    batch = batches.get(range(2000), 4)
    sides = [side.split(side.tokens) for side in (batch.source, batch.target)]
    hidden = [[UNKNOWN in sentence.tolist() for sentence in side] for side in sides]
    assert hidden[0] == hidden[1]
    assert 0.25 < numpy.mean(hidden[0]) < 0.35
    for place, found in enumerate(hidden[0]):
        source, target = (side[place].tolist() for side in sides)
        if not found:
            wanted = [5, 6, 10 + place, END], [START, 10 + place, 8, END]
        elif shared:  # the piece that stands on both sides
            wanted = [5, 6, UNKNOWN, END], [START, UNKNOWN, 8, END]
        else:  # the same number is another piece there
            wanted = [5, 6, 10 + place, UNKNOWN, END], [START, 10 + place, 8, UNKNOWN, END]
        assert (source, target) == wanted


@given(pairs=corpora, seed=seeds, epoch=st.integers(0, 3))
def test_what_is_hidden_is_one_piece_more_or_one_piece_less(pairs, seed, epoch) -> None:
    batches = Batches(InMemoryPairs(pairs), seed=seed, unknown=0.5)
    before = [(list(source), list(target)) for source, target in pairs]
    batch = batches.get(range(len(pairs)), epoch)
    again = batches.get(range(len(pairs)), epoch)
    assert torch.equal(batch.source.tokens, again.source.tokens)
    assert torch.equal(batch.target.tokens, again.target.tokens)
    assert pairs == before  # the pairs themselves are as they were
    for place, pair in enumerate(pairs):
        for side, sentence in zip(batch[:2], pair, strict=True):
            shown = Counter(side.split(side.tokens)[place].tolist())
            lost = Counter(sentence) - shown
            assert shown[UNKNOWN] <= 1
            assert sum(lost.values()) <= shown[UNKNOWN]


def test_other_epochs_hide_other_pieces() -> None:
    batches = Batches(InMemoryPairs([([5, 6, 7], [7, 6, 5])] * 50), unknown=0.5)
    seen = {tuple(batches.get(range(50), epoch).source.tokens.tolist()) for epoch in range(5)}
    assert len(seen) == 5


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"tokens": 0}, "tokens=0; it must be at least 1"),
        ({"unknown": 1.0}, "unknown=1.0; it must be at least 0 and below 1"),
        ({"unknown": -0.1}, "unknown=-0.1"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, float], why: str) -> None:
    with pytest.raises(ArgumentError, match=why):
        Batches(of_lengths((2, 3)), **wrong)
    with pytest.raises(ArgumentError, match="no pairs"):
        Batches(InMemoryPairs([]))
