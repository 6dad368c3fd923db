"""Encoded corpora: ids round-trip, memory stays bounded, and corrupted files are rejected."""

import hashlib
import os
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import ArgumentError
from regard.translation.data.encoded import EncodedCorpus, _Header
from tests.translation.folders import check_flipped_bits, no_file_larger_than

PAIRS = [([5, 6, 2], [1, 7, 2]), ([], [1, 2]), ([4], [])]


def to_lists(corpus: EncodedCorpus) -> list[tuple[list[int], list[int]]]:
    return [(source.tolist(), target.tolist()) for source, target in corpus]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One folder for all examples of a test."""
    return tmp_path_factory.mktemp("corpus")


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(2**16, np.uint16), (2**16 + 1, np.uint32), (2**31, np.uint32)]
)
@given(data=st.data())
def test_write_and_read(vocabulary, dtype, data, folder):
    ids = st.lists(st.integers(0, vocabulary - 1), max_size=7)
    pairs = data.draw(st.lists(st.tuples(ids, ids), max_size=11))
    written = EncodedCorpus.write(folder / "ids", iter(pairs), vocabulary=vocabulary)
    for corpus in (written, EncodedCorpus(folder / "ids")):
        assert to_lists(corpus) == pairs
        assert corpus.sizes.tolist() == [[len(source), len(target)] for source, target in pairs]
        assert (len(corpus), corpus.vocabulary) == (len(pairs), vocabulary)
        assert all(side.dtype == dtype for pair in corpus for side in pair)


def test_indexing_works_as_for_lists(tmp_path):
    corpus = EncodedCorpus.write(tmp_path / "ids", PAIRS, vocabulary=8)
    assert corpus[-1].source.tolist() == [4]
    assert [pair.target.tolist() for pair in corpus[1:]] == [[1, 2], []]
    assert corpus[np.int64(0)].source.tolist() == [5, 6, 2]
    for index, error in ((3, IndexError), (-4, IndexError), ("0", TypeError)):
        with pytest.raises(error):
            corpus[index]
    for array in (corpus[0].source, corpus.sizes):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    assert repr(corpus) == f"EncodedCorpus({str(tmp_path / 'ids')!r}: 3 pairs, 9 ids)"
    assert (corpus.sizes - 1).tolist() == [[2, 2], [-1, 1], [0, -1]]  # signed


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """Pairs are written in chunks."""
    peaks = []
    for n in (2 * 1024, 12 * 1024):
        pairs = (([i % 100] * (i % 99), [i % 97] * 50) for i in range(n))
        tracemalloc.start()
        corpus = EncodedCorpus.write(tmp_path / f"{n}", pairs, vocabulary=100)
        assert [side.tolist() for side in corpus[n - 1]] == [
            [(n - 1) % 100] * ((n - 1) % 99),
            [(n - 1) % 97] * 50,
        ]
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(corpus) == n
    assert peaks[1] < 1.2 * peaks[0]


@pytest.mark.parametrize("wrong", [8, -1, 70_000])
def test_an_id_outside_the_vocabulary_is_reported(wrong, tmp_path):
    pairs = [([1], [2])] * 2000 + [([3], [4, wrong])]
    with pytest.raises(
        ArgumentError, match=rf"Pair 2,000 contains id {wrong}, which is out of range for a vocabulary of 8\."
    ):
        EncodedCorpus.write(tmp_path / "ids", pairs, vocabulary=8)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ArgumentError, match="vocabulary=0"):
        EncodedCorpus.write(tmp_path / "ids", [], vocabulary=0)


def test_a_failed_write_keeps_the_old_file(tmp_path):
    def broken() -> Iterator[tuple[list[int], list[int]]]:
        yield from PAIRS
        raise KeyboardInterrupt

    EncodedCorpus.write(tmp_path / "ids", PAIRS, vocabulary=8)
    with pytest.raises(KeyboardInterrupt):
        EncodedCorpus.write(tmp_path / "ids", broken(), vocabulary=8)
    assert to_lists(EncodedCorpus(tmp_path / "ids")) == PAIRS
    assert [path.name for path in tmp_path.iterdir()] == ["ids"]


def test_an_open_corpus_survives_its_replacement(tmp_path):
    corpus = EncodedCorpus.write(tmp_path / "ids", PAIRS, vocabulary=8)
    EncodedCorpus.write(tmp_path / "ids", PAIRS[:1], vocabulary=8)
    assert to_lists(corpus) == PAIRS


def test_a_full_disk_names_the_file_and_keeps_the_old_one(tmp_path):
    EncodedCorpus.write(tmp_path / "ids", PAIRS, vocabulary=8)
    with no_file_larger_than(8192), pytest.raises(OSError, match="ids'") as caught:
        EncodedCorpus.write(tmp_path / "ids", [([1] * 100, [1] * 100)] * 5000, vocabulary=8)
    assert caught.value.filename == str(tmp_path / "ids")
    assert to_lists(EncodedCorpus(tmp_path / "ids")) == PAIRS
    assert [path.name for path in tmp_path.iterdir()] == ["ids"]


HEADER = b'{"format": "regard store %d", "pairs": %s, "ids": 12, "vocabulary": 1}'


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *((lambda content, by=by: content[:-by], "it was truncated or modified. Write") for by in (1, 8, 50)),
        *((lambda content, by=by: content + bytes(by), "it was truncated or modified") for by in (1, 24)),
        (lambda content: (HEADER % (2, b"-1")).ljust(4096), "it was truncated or modified"),
        *(
            (lambda content, other=other: other, "is not an encoded corpus that this version")
            for other in (
                b"",
                b"\x80",
                b"one\ttwo\n" * 1000,
                b"{}",
                b"[1]",
                b'{"format": "regard store 2", "pairs": []}',
            )
        ),
        (lambda content: HEADER % (2, b'"x"'), "is not an encoded corpus that this version"),
        (lambda content: (HEADER % (3, b"0")).ljust(4096), "is not an encoded corpus that this version"),
    ],
)
def test_other_and_truncated_files_are_rejected(change, message, tmp_path):
    path = EncodedCorpus.write(tmp_path / "ids", PAIRS, vocabulary=8).path
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ArgumentError, match=message):
        EncodedCorpus(path)


def test_a_missing_file_and_a_folder_are_rejected(tmp_path):
    with pytest.raises(ArgumentError, match="No such file"):
        EncodedCorpus(tmp_path / "none")
    with pytest.raises(ArgumentError, match="is a folder; pass a regular file"):
        EncodedCorpus(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArgumentError, match=r"is a named pipe \(FIFO\); pass a regular file"):
        EncodedCorpus(tmp_path / "pipe")
    with pytest.raises(IsADirectoryError, match="is a folder; pass a file path"):
        EncodedCorpus.write(tmp_path, PAIRS, vocabulary=8)


def test_every_flipped_bit_is_detected(tmp_path):
    path = EncodedCorpus.write(tmp_path / "ids", PAIRS, vocabulary=8).path
    content = path.read_bytes()
    header = len(content[:4096].rstrip()) + 2
    bits = [*range(8 * header), *range(8 * 4096, 8 * len(content))]  # excluding most of the padding
    bits = [*random.Random(0).sample(bits, 500), *range(8 * 4000, 8 * 4001)]
    check_flipped_bits([path], lambda: EncodedCorpus(path), "ids", bits)


@pytest.mark.parametrize(
    ("at", "value", "why"),
    [
        (4096 + 24, 1, "records that are not contiguous"),  # offset of the first pair
        (4096 + 24 + 8, -3, "records that are not contiguous"),  # its source length
        (4096 + 24 + 64, 5, "has 9 ids, but its records need 14"),  # target length of the last pair
        (4096, 2**40 + 8, "ids outside its vocabulary of 8"),
    ],
)
def test_forged_content_with_a_valid_checksum_is_rejected(at, value, why, tmp_path):
    path = EncodedCorpus.write(tmp_path / "ids", PAIRS, vocabulary=8).path
    content = bytearray(path.read_bytes())
    content[at : at + 8] = value.to_bytes(8, "little", signed=True)
    digest = hashlib.sha256(content[4096:]).hexdigest()
    path.write_bytes(_Header(3, 9, 8).to_bytes(digest) + content[4096:])
    with pytest.raises(ArgumentError, match=why):
        EncodedCorpus(path)
