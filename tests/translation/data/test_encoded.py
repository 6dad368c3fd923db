"""Encoded corpora: ids round-trip, memory stays bounded, and damaged files are rejected."""

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
from regard.translation.data.encoded import EncodedCorpus, _Header

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


def test_many_pairs_are_written_in_chunks(tmp_path):
    pairs = [([n % 97] * (n % 5), [n % 89] * (n % 3)) for n in range(3000)]
    corpus = EncodedCorpus.write(tmp_path / "ids", pairs, vocabulary=97)
    assert to_lists(corpus) == pairs


def test_indexing_works_as_for_lists(tmp_path):
    corpus = EncodedCorpus.write(tmp_path / "ids", PAIRS, vocabulary=8)
    assert corpus[-1].source.tolist() == [4]
    assert [pair.target.tolist() for pair in corpus[1:]] == [[1, 2], []]
    assert corpus[np.int64(0)].source.tolist() == [5, 6, 2]
    for index in (3, -4):
        with pytest.raises(IndexError):
            corpus[index]
    with pytest.raises(TypeError):
        corpus["0"]
    with pytest.raises(ValueError, match="read-only"):
        corpus[0].source[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        corpus.sizes[0] = 1
    assert repr(corpus) == f"EncodedCorpus({str(tmp_path / 'ids')!r}: 3 pairs, 9 ids)"


def test_sizes_are_signed(tmp_path):
    corpus = EncodedCorpus.write(tmp_path / "ids", PAIRS, vocabulary=8)
    assert (corpus.sizes - 1).tolist() == [[2, 2], [-1, 1], [0, -1]]
    assert corpus.sizes.dtype == np.int64


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    def pairs(size: int) -> Iterator[tuple[list[int], list[int]]]:
        return (([n % 100] * 50, [n % 100] * 50) for n in range(size))

    peaks = []
    for chunks in (2, 12):
        tracemalloc.start()
        corpus = EncodedCorpus.write(tmp_path / f"{chunks}", pairs(1024 * chunks), vocabulary=100)
        EncodedCorpus(tmp_path / f"{chunks}")[1024 * chunks - 1]
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(corpus) == 1024 * chunks
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
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(OSError, match="ids'") as caught:
            EncodedCorpus.write(tmp_path / "ids", [([1] * 100, [1] * 100)] * 5000, vocabulary=8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.filename == str(tmp_path / "ids")
    assert to_lists(EncodedCorpus(tmp_path / "ids")) == PAIRS
    assert [path.name for path in tmp_path.iterdir()] == ["ids"]


@pytest.mark.parametrize("change", ["cut", "longer"])
@pytest.mark.parametrize("by", [1, 8, 24, 50])
def test_a_file_of_another_size_is_rejected(change, by, tmp_path):
    path = EncodedCorpus.write(tmp_path / "ids", PAIRS, vocabulary=8).path
    content = path.read_bytes()
    path.write_bytes(content[:-by] if change == "cut" else content + bytes(by))
    with pytest.raises(ArgumentError, match=r"it was truncated or modified\. Write it again"):
        EncodedCorpus(path)


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
def test_other_files_are_rejected(content, tmp_path):
    (tmp_path / "ids").write_bytes(content)
    with pytest.raises(ArgumentError, match="is not an encoded corpus that this version"):
        EncodedCorpus(tmp_path / "ids")


def test_a_header_with_impossible_numbers_is_rejected(tmp_path):
    header = b'{"format": "regard store 2", "pairs": -1, "ids": 12, "vocabulary": 1}'
    (tmp_path / "ids").write_bytes(header.ljust(4096))
    with pytest.raises(ArgumentError, match="it was truncated or modified"):
        EncodedCorpus(tmp_path / "ids")


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
    bits = [*range(8 * header), *range(8 * 4096, 8 * len(content))]  # except most of the padding
    for bit in [*random.Random(0).sample(bits, 500), *range(8 * 4000, 8 * 4001)]:
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(ArgumentError):
            EncodedCorpus(path)
    path.write_bytes(content)
    assert to_lists(EncodedCorpus(path)) == PAIRS


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
