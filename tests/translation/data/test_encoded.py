"""Ids on disk: they come back as they were, are not held in memory, and broken files are refused."""

import hashlib
import os
import random
import resource
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import ArgumentError
from regard.translation.data.encoded import EncodedCorpus, _About

PAIRS = [([5, 6, 2], [1, 7, 2]), ([], [1, 2]), ([4], [])]


def listed(store: EncodedCorpus) -> list[tuple[list[int], list[int]]]:
    return [(source.tolist(), target.tolist()) for source, target in store]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One for all examples of a test."""
    return tmp_path_factory.mktemp("store")


@pytest.mark.parametrize(
    ("vocabulary", "kind"), [(2**16, np.uint16), (2**16 + 1, np.uint32), (2**31, np.uint32)]
)
@given(data=st.data())
def test_what_is_written_is_read_again(vocabulary, kind, data, folder):
    ids = st.lists(st.integers(0, vocabulary - 1), max_size=7)
    pairs = data.draw(st.lists(st.tuples(ids, ids), max_size=11))
    written = EncodedCorpus.write(folder / "ids", iter(pairs), vocabulary=vocabulary)
    for store in (written, EncodedCorpus.open(folder / "ids")):
        assert listed(store) == pairs
        assert store.sizes.tolist() == [[len(source), len(target)] for source, target in pairs]
        assert (len(store), store.vocabulary) == (len(pairs), vocabulary)
        assert all(side.dtype == kind for pair in store for side in pair)


def test_many_pairs_are_written_in_chunks(tmp_path):
    pairs = [([n % 97] * (n % 5), [n % 89] * (n % 3)) for n in range(3000)]
    store = EncodedCorpus.write(tmp_path / "ids", pairs, vocabulary=97)
    assert listed(store) == pairs


def test_it_is_read_as_a_list_is(tmp_path):
    store = EncodedCorpus.write(tmp_path / "ids", PAIRS, vocabulary=8)
    assert store[-1].source.tolist() == [4]
    assert [pair.target.tolist() for pair in store[1:]] == [[1, 2], []]
    assert store[np.int64(0)].source.tolist() == [5, 6, 2]
    for place in (3, -4):
        with pytest.raises(IndexError):
            store[place]
    with pytest.raises(TypeError):
        store["0"]
    with pytest.raises(ValueError, match="read-only"):
        store[0].source[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        store.sizes[0] = 1
    assert repr(store) == f"Store({str(tmp_path / 'ids')!r}: 3 pairs, 9 ids)"


def test_sizes_can_be_added_and_subtracted(tmp_path):
    store = EncodedCorpus.write(tmp_path / "ids", PAIRS, vocabulary=8)
    assert (store.sizes - 1).tolist() == [[2, 2], [-1, 1], [0, -1]]
    assert store.sizes.dtype == np.int64


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    def pairs(size: int) -> Iterator[tuple[list[int], list[int]]]:
        return (([n % 100] * 50, [n % 100] * 50) for n in range(size))

    peaks = []
    for chunks in (2, 12):
        tracemalloc.start()
        store = EncodedCorpus.write(tmp_path / f"{chunks}", pairs(1024 * chunks), vocabulary=100)
        EncodedCorpus.open(tmp_path / f"{chunks}")[1024 * chunks - 1]
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(store) == 1024 * chunks
    assert peaks[1] < 1.2 * peaks[0]


@pytest.mark.parametrize("wrong", [8, -1, 70_000])
def test_an_id_outside_the_vocabulary_is_named(wrong, tmp_path):
    pairs = [([1], [2])] * 2000 + [([3], [4, wrong])]
    with pytest.raises(
        ArgumentError, match=rf"pair 2,000 has the id {wrong} and the vocabulary 8; ids are 0 to 7"
    ):
        EncodedCorpus.write(tmp_path / "ids", pairs, vocabulary=8)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ArgumentError, match="vocabulary=0"):
        EncodedCorpus.write(tmp_path / "ids", [], vocabulary=0)


def test_what_fails_half_way_leaves_the_old_file_alone(tmp_path):
    def broken() -> Iterator[tuple[list[int], list[int]]]:
        yield from PAIRS
        raise KeyboardInterrupt

    EncodedCorpus.write(tmp_path / "ids", PAIRS, vocabulary=8)
    with pytest.raises(KeyboardInterrupt):
        EncodedCorpus.write(tmp_path / "ids", broken(), vocabulary=8)
    assert listed(EncodedCorpus.open(tmp_path / "ids")) == PAIRS
    assert [path.name for path in tmp_path.iterdir()] == ["ids"]


def test_an_open_store_survives_its_replacement(tmp_path):
    store = EncodedCorpus.write(tmp_path / "ids", PAIRS, vocabulary=8)
    EncodedCorpus.write(tmp_path / "ids", PAIRS[:1], vocabulary=8)
    assert listed(store) == PAIRS


def test_a_full_disk_names_the_file_and_leaves_the_old_one_alone(tmp_path):
    EncodedCorpus.write(tmp_path / "ids", PAIRS, vocabulary=8)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(OSError, match="ids'") as caught:
            EncodedCorpus.write(tmp_path / "ids", [([1] * 100, [1] * 100)] * 5000, vocabulary=8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.filename == str(tmp_path / "ids")
    assert listed(EncodedCorpus.open(tmp_path / "ids")) == PAIRS
    assert [path.name for path in tmp_path.iterdir()] == ["ids"]


@pytest.mark.parametrize("change", ["cut", "longer"])
@pytest.mark.parametrize("by", [1, 8, 24, 50])
def test_a_file_of_another_size_is_refused(change, by, tmp_path):
    path = EncodedCorpus.write(tmp_path / "ids", PAIRS, vocabulary=8).path
    content = path.read_bytes()
    path.write_bytes(content[:-by] if change == "cut" else content + bytes(by))
    with pytest.raises(ArgumentError, match="it was cut off or changed: write it anew"):
        EncodedCorpus.open(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80",
        b"one\ttwo\n" * 1000,
        b"{}",
        b"[1]",
        b'{"format": "regard store 2", "pairs": []}',
        b'{"format": "regard store 2", "pairs": "x", "ids": 0, "vocabulary": 1}',
        b'{"format": "regard store 3", "pairs": 0, "ids": 0, "vocabulary": 1}'.ljust(4096),
    ],
)
def test_a_foreign_file_is_refused(content, tmp_path):
    (tmp_path / "ids").write_bytes(content)
    with pytest.raises(ArgumentError, match="is no store of ids that this version"):
        EncodedCorpus.open(tmp_path / "ids")


def test_a_header_with_impossible_numbers_is_refused(tmp_path):
    header = b'{"format": "regard store 2", "pairs": -1, "ids": 12, "vocabulary": 1}'
    (tmp_path / "ids").write_bytes(header.ljust(4096))
    with pytest.raises(ArgumentError, match="it was cut off or changed"):
        EncodedCorpus.open(tmp_path / "ids")


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(ArgumentError, match="there is no file"):
        EncodedCorpus.open(tmp_path / "none")
    with pytest.raises(ArgumentError, match="is a folder; pass a regular file"):
        EncodedCorpus.open(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArgumentError, match=r"is a named pipe \(FIFO\); pass a regular file"):
        EncodedCorpus.open(tmp_path / "pipe")
    with pytest.raises(IsADirectoryError, match="is a folder; pass a file path"):
        EncodedCorpus.write(tmp_path, PAIRS, vocabulary=8)


def test_every_flipped_bit_is_noticed(tmp_path):
    path = EncodedCorpus.write(tmp_path / "ids", PAIRS, vocabulary=8).path
    content = path.read_bytes()
    header = len(content[:4096].rstrip()) + 2
    places = [*range(8 * header), *range(8 * 4096, 8 * len(content))]  # all but most of the blanks
    for bit in [*random.Random(0).sample(places, 500), *range(8 * 4000, 8 * 4001)]:
        harmed = bytearray(content)
        harmed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(harmed)
        with pytest.raises(ArgumentError):
            EncodedCorpus.open(path)
    path.write_bytes(content)
    assert listed(EncodedCorpus.open(path)) == PAIRS


@pytest.mark.parametrize(
    ("at", "value", "why"),
    [
        (4096 + 24, 1, "records that do not follow"),  # where the first pair starts
        (4096 + 24 + 8, -3, "records that do not follow"),  # how many ids its source has
        (4096 + 24 + 64, 5, "has 9 ids, and its records 14"),  # of the last pair's target
        (4096, 2**40 + 8, "ids outside of its vocabulary of 8"),
    ],
)
def test_a_valid_checksum_does_not_make_wrong_numbers_right(at, value, why, tmp_path):
    path = EncodedCorpus.write(tmp_path / "ids", PAIRS, vocabulary=8).path
    content = bytearray(path.read_bytes())
    content[at : at + 8] = value.to_bytes(8, "little", signed=True)
    digest = hashlib.sha256(content[4096:]).hexdigest()
    path.write_bytes(_About(3, 9, 8).header(digest) + content[4096:])
    with pytest.raises(ArgumentError, match=why):
        EncodedCorpus.open(path)
