"""Sentence pairs as token ids in a memory-mapped file, so a corpus can be larger than memory.

File layout, all numbers little-endian:

    header    4096 bytes: JSON with the checksum of the rest, padded with spaces
    ids       first source, first target, second source, …
    records   three int64 per pair: offset of its ids, source length, target length
"""

import hashlib
import json
import mmap
import operator
import os
import tempfile
from collections.abc import Iterable, Sequence
from io import BufferedReader
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from regard._util.checks import check_int
from regard._util.files import open_atomic, open_regular
from regard.errors import ArgumentError

_FORMAT = "regard store 2"
_HEADER = 4096  # bytes: one page
_RECORD = 24  # bytes
_CHUNK = 1024  # pairs to write at a time
_BLOCK = 1 << 20  # bytes, records or ids to read at a time

_CURE = "Write it again with EncodedCorpus.write."

IdArray = NDArray[np.integer[Any]]


class IdPair(NamedTuple):
    """Token ids of a sentence and its translation, as read-only views of the file."""

    source: IdArray
    target: IdArray


class EncodedCorpus(Sequence[IdPair]):
    """Sentence pairs as token ids, memory-mapped from a file.

    path: a file written by `EncodedCorpus.write`. Opening reads it once to verify its checksum.

    >>> import tempfile
    >>> from regard.translation.data.encoded import EncodedCorpus
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pairs = [([5, 2], [1, 7, 2]), ([2], [1, 2])]
    ...     corpus = EncodedCorpus.write(f"{folder}/train.ids", pairs, vocabulary=8)
    >>> len(corpus)
    2
    >>> source, target = corpus[0]
    >>> source.tolist(), target.tolist()
    ([5, 2], [1, 7, 2])
    >>> corpus.sizes.tolist()
    [[2, 3], [1, 2]]
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            opened = open_regular(path)
        except FileNotFoundError:
            raise ArgumentError(
                f"No such file: {os.fspath(path)!r}. Write it with EncodedCorpus.write."
            ) from None
        with opened as file:
            header = _read_header(file, self.path)
            mapped = mmap.mmap(file.fileno(), header.size, access=mmap.ACCESS_READ)
        self.vocabulary = header.vocabulary
        self._ids = np.frombuffer(mapped, header.dtype, header.ids, _HEADER)
        self._records = np.frombuffer(mapped, "<i8", 3 * header.pairs, header.records).reshape(-1, 3)
        self._check_content()

    def _check_content(self) -> None:
        """Raise ArgumentError unless records are contiguous and ids are in the vocabulary.

        The checksum detects accidental damage, but not a forged file.
        """
        end = 0
        for first in range(0, len(self), _BLOCK):
            records = self._records[first : first + _BLOCK]
            ends = end + records[:, 1:].sum(1).cumsum()
            in_range = 0 <= records.min() <= records.max() <= len(self._ids)
            if not in_range or not np.array_equal(records[:, 0], np.concatenate([[end], ends[:-1]])):
                raise self._error("has records that are not contiguous")
            end = int(ends[-1])
        if end != len(self._ids):
            raise self._error(f"has {len(self._ids):,} ids, but its records need {end:,}")
        for first in range(0, len(self._ids), _BLOCK):
            if self._ids[first : first + _BLOCK].max() >= self.vocabulary:
                raise self._error(f"has ids outside its vocabulary of {self.vocabulary:,}")

    def _error(self, reason: str) -> ArgumentError:
        return ArgumentError(f"{os.fspath(self.path)!r} {reason}. {_CURE}")

    @classmethod
    def write(
        cls,
        path: str | os.PathLike[str],
        pairs: Iterable[tuple[Sequence[int], Sequence[int]]],
        *,
        vocabulary: int,
    ) -> Self:
        """Write pairs from an iterable atomically, and open the file.

        vocabulary: vocabulary size; all ids must be smaller. Ids take 2 bytes each if the size is at most
            65,536, otherwise 4.
        """
        check_int("EncodedCorpus.write got vocabulary", vocabulary, min=1)
        header, remaining, digest = _Header(0, 0, vocabulary), iter(pairs), hashlib.sha256()
        with open_atomic(path) as file, tempfile.TemporaryFile(dir=Path(path).parent) as records:
            file.write(bytes(_HEADER))
            while chunk := list(islice(remaining, _CHUNK)):
                sizes = np.array([[len(source), len(target)] for source, target in chunk])
                ids = _flatten(chunk, vocabulary, header.pairs)
                ends = header.ids + sizes.sum(1).cumsum()
                starts = ends - sizes.sum(1)
                _put(ids.astype(header.dtype).tobytes(), file, digest)
                records.write(np.column_stack([starts, sizes]).astype("<i8").tobytes())
                header = header._replace(pairs=header.pairs + len(chunk), ids=header.ids + len(ids))
            _put(bytes(header.records - file.tell()), file, digest)
            records.seek(0)
            while block := records.read(_BLOCK):
                _put(block, file, digest)
            file.seek(0)
            file.write(header.to_bytes(digest.hexdigest()))
        return cls(path)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Source and target length of each pair, (pairs, 2); memory-mapped."""
        return self._records[:, 1:]

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # int or slice
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        start, source, target = self._records[operator.index(index)].tolist()
        middle = start + source
        return IdPair(self._ids[start:middle], self._ids[middle : middle + target])

    def __repr__(self) -> str:
        return f"EncodedCorpus({os.fspath(self.path)!r}: {len(self):,} pairs, {len(self._ids):,} ids)"


class _Header(NamedTuple):
    pairs: int
    ids: int
    vocabulary: int

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        return np.dtype("<u2" if self.vocabulary <= 2**16 else "<u4")

    @property
    def records(self) -> int:
        """Offset of the records, aligned to 8 bytes."""
        return _HEADER + -(-self.ids * self.dtype.itemsize // 8) * 8

    @property
    def size(self) -> int:
        return self.records + self.pairs * _RECORD

    def to_bytes(self, digest: str) -> bytes:
        """Serialize the header; `digest` is the SHA-256 of the rest of the file."""
        text = json.dumps({"format": _FORMAT, **self._asdict()})
        checksum = hashlib.sha256(f"{text} {digest}".encode()).hexdigest()
        return json.dumps({**json.loads(text), "sha256": checksum}).encode().ljust(_HEADER - 1) + b"\n"


def _put(content: bytes, file: BinaryIO, digest: "hashlib._Hash") -> None:
    file.write(content)
    digest.update(content)


def _flatten(
    chunk: list[tuple[Sequence[int], Sequence[int]]], vocabulary: int, first: int
) -> NDArray[np.int64]:
    """Concatenate and check the ids in a chunk of pairs; `first` is the index of the first pair."""
    flat = np.fromiter(chain.from_iterable(chain.from_iterable(chunk)), np.int64)
    if len(flat) and not 0 <= flat.min() <= flat.max() < vocabulary:
        index, wrong = next(
            (index, token)
            for index, pair in enumerate(chunk, first)
            for token in chain(*pair)
            if not 0 <= token < vocabulary
        )
        raise ArgumentError(
            f"Pair {index:,} contains id {wrong}, which is out of range for a vocabulary of {vocabulary:,}. "
            "Pass the size of the vocabulary that the pair was encoded with."
        )
    return flat


def _read_header(file: BufferedReader, path: Path) -> _Header:
    """Read the header and verify the whole file."""
    size, content = os.fstat(file.fileno()).st_size, file.read(_HEADER)
    try:
        values = json.loads(content)
        known = values.pop("format") == _FORMAT
        header = _Header(*(int(values[name]) for name in _Header._fields))
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError, OverflowError):
        known = False
    if not known:
        raise ArgumentError(
            f"{os.fspath(path)!r} is not an encoded corpus that this version of regard can read. {_CURE}"
        )
    if min(header) < 0 or header.size != size:
        raise ArgumentError(
            f"{os.fspath(path)!r} has {size:,} bytes, but {header.pairs:,} pairs with {header.ids:,} ids "
            f"take {header.size:,}: it was truncated or modified. {_CURE}"
        )
    if content != header.to_bytes(hashlib.file_digest(file, "sha256").hexdigest()):
        raise ArgumentError(f"{os.fspath(path)!r} does not match its checksum: it was modified. {_CURE}")
    return header
