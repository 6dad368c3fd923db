from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import ArgumentError
from regard.translation.alignment.aer import GoldAlignment, error_rate, read_gold, read_pharaoh
from regard.translation.alignment.links import Links, reverse_links, symmetrize, to_pharaoh

DATA = Path(__file__).parents[4] / "shared" / "data" / "align-roen"
LINKS = st.frozensets(st.tuples(st.integers(0, 6), st.integers(0, 4)), max_size=12)


def test_published_error_rate():
    if not DATA.exists():
        pytest.skip(f"{DATA} does not exist")
    predicted, gold = (
        read_pharaoh(DATA / "roen.awesome-align.out"),
        read_gold(DATA / "roen.gold", index_base=1),
    )
    assert len(predicted) == len(gold) == 248
    assert f"{100 * error_rate(predicted, gold).aer:.1f}" == "20.7"
    assert error_rate(predicted, read_gold(DATA / "roen.gold", index_base=0)).aer > 0.5  # the base matters


def test_error_rate_of_a_hand_worked_example():
    gold = [
        GoldAlignment(frozenset({(0, 0), (1, 1)}), frozenset({(2, 1)})),
        GoldAlignment(frozenset({(0, 0)})),
    ]
    predicted = [{(0, 0), (2, 1), (2, 2)}, set[tuple[int, int]]()]
    aer, precision, recall = error_rate(predicted, gold)  # |A| = 3, |S| = 3, |A ∩ S| = 1, |A ∩ P| = 2
    assert (aer, precision, recall) == pytest.approx((1 - 3 / 6, 2 / 3, 1 / 3))


@given(LINKS, LINKS, LINKS)
def test_only_links_between_sure_and_possible_have_no_error(a, s, p):
    rates = error_rate([a], [GoldAlignment(s, p)])
    assert (rates.aer == 0) == (s <= a <= (s | p))
    assert (rates.precision == 1) == (a <= (s | p))
    assert (rates.recall == 1) == (s <= a)
    assert error_rate([a], [s]) == error_rate([a], [GoldAlignment(s)])
    if a and s:
        assert error_rate([a], [s]).aer == pytest.approx(1 - 2 * len(a & s) / (len(a) + len(s)))


def test_error_rate_of_different_numbers_of_sentences():
    with pytest.raises(ArgumentError, match="links for 2 sentence pairs and gold links for 1"):
        error_rate([frozenset(), frozenset()], [GoldAlignment(frozenset())])


@given(st.lists(LINKS, max_size=5))
def test_links_round_trip_through_files(tmp_path_factory, links):
    path = tmp_path_factory.mktemp("links") / "links.txt"
    path.write_text("".join(f"{to_pharaoh(pair)}\n" for pair in links))
    assert read_pharaoh(path) == links
    assert read_gold(path) == [GoldAlignment(pair) for pair in links]
    path.write_text("".join(" ".join(f"{s + 1}p{t + 1}" for s, t in pair) + "\r\n" for pair in links))
    assert read_gold(path, index_base=1) == [GoldAlignment(frozenset(), pair) for pair in links]


@pytest.mark.parametrize(
    ("line", "base", "message"),
    [
        ("0-0 1:2", 0, "line 2: '1:2' is not a link. Write .*0p1"),
        ("0-0 1-2-0.5", 0, "line 2: '1-2-0.5' is not a link"),
        ("1-1 0-2", 1, "line 2: '0-2' refers to word 0, but index_base=1 counts from 1. Use index_base=0"),
        ("1--1", 0, "line 2: '1--1' is not a link"),
        ("٣-1", 0, "is not a link"),
        ("1-" + 20 * "9", 0, "is not a link"),
        (b"\xff-1", 0, "line 2: not UTF-8"),
        ("1-1", 2, "index_base=2; it must be 0 or 1"),
    ],
)
def test_invalid_links_are_rejected(tmp_path, line, base, message):
    path = tmp_path / "gold"
    path.write_bytes(b"1-1\n" + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    with pytest.raises(ArgumentError, match=message):
        read_gold(path, index_base=base)


def test_pharaoh_files(tmp_path):
    path = tmp_path / "links"
    for content, links in (
        (
            b"\n0-1\n\n",
            [frozenset(), frozenset({(0, 1)}), frozenset()],
        ),  # empty lines are pairs without links
        (b"\xef\xbb\xbf0-1\r\n\r\n1-0", [frozenset({(0, 1)}), frozenset(), frozenset({(1, 0)})]),  # Windows
        (b"", []),
    ):
        path.write_bytes(content)
        assert read_pharaoh(path) == links
    path.write_text("0p0\n")  # only in gold files
    with pytest.raises(ArgumentError, match="line 1: '0p0' is not a link"):
        read_pharaoh(path)


# Symmetrization


def naive_symal(forward: Links, backward: Links) -> Links:
    """Moses' symal, from its description: a matrix of 0, 1 (backward), −1 (forward) and 2 (in the result)."""
    size = 9
    state = [[0] * size for _ in range(size)]  # target × source
    for source, target in forward:
        state[target][source] = -1
    for source, target in backward:
        state[target][source] = 2 if state[target][source] == -1 else 1
    union = {(t, s) for t in range(size) for s in range(size) if state[t][s]}
    current = {(t, s) for t, s in union if state[t][s] == 2}

    def covered(t: int, s: int) -> tuple[bool, bool]:
        return any(row == t for row, _ in current), any(column == s for _, column in current)

    steps = [(-1, 0), (0, -1), (1, 0), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1)]
    added = True
    while added:
        added, last = False, (-1, -1)
        while later := [point for point in sorted(current) if point > last]:  # an iterator over a sorted set
            last = later[0]
            for down, along in steps:
                point = last[0] + down, last[1] + along
                if point in union and covered(*point) != (True, True):
                    current.add(point)
                    added = True
    for kind in (-1, 1):
        for point in sorted(union):
            if state[point[0]][point[1]] == kind and covered(*point) == (False, False):
                current.add(point)
    return frozenset((s, t) for t, s in current)


@given(LINKS, LINKS)
def test_grow_diag_final_and_equals_moses(forward, backward):
    assert symmetrize(forward, backward) == naive_symal(forward, backward)


@given(LINKS, LINKS)
def test_grow_diag_final_and_is_between_intersection_and_union(forward, backward):
    both, either = (symmetrize(forward, backward, how) for how in ("intersection", "union"))
    assert both <= symmetrize(forward, backward) <= either
    assert symmetrize(forward, forward) == forward
    assert reverse_links(reverse_links(forward)) == forward


def test_grow_diag_final_and_of_a_hand_worked_example():
    # source 0 1 2 3 4, target 0 1 2 3 4 5
    forward = frozenset({(0, 0), (1, 1), (1, 2), (4, 4), (3, 5)})
    backward = frozenset({(0, 0), (1, 1), (2, 1), (3, 5), (4, 3)})
    # intersection: 0-0 1-1 3-5; neighbors: 1-2 (target 2 is free), 2-1 (source 2 is free), 4-4 (next to 3-5,
    # both are free); then 4-3, next to 4-4 (target 3 is free)
    grown = {(0, 0), (1, 1), (3, 5), (1, 2), (2, 1), (4, 4), (4, 3)}
    assert symmetrize(forward, backward) == grown
    far = frozenset({(6, 8)})  # not a neighbor, and both words are free
    assert symmetrize(forward | far, backward) == grown | far
    half = frozenset({(0, 8)})  # not a neighbor, and source 0 has a link: "final-and" drops it
    assert symmetrize(forward | half, backward) == grown


def test_unknown_methods_are_rejected():
    with pytest.raises(
        ArgumentError, match=r"method 'gdfa'. Choose from intersection, union, grow-diag, grow-diag-final-and"
    ):
        symmetrize(frozenset(), frozenset(), "gdfa")
