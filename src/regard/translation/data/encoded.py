"""Pairs of sentences as ids on disk, memory-mapped: a corpus may be larger than memory.

One file, whatever the size of the corpus, all numbers little-endian:

    header    4096 bytes: JSON with the checksum of all else, filled up with blanks
    ids       of the first pair's source, then of its target, then of the second pair's source, …
    records   one for each pair, three numbers of 8 bytes: where its ids start, and how many its sides have
"""

import hashlib
import json
import mmap
import operator
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
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
_HEADER = 4096  # bytes: a page, so that the ids start on one
_RECORD = 24  # bytes
_CHUNK = 1024  # pairs that are written at once
_BLOCK = 1 << 20  # bytes that are read at once

IdArray = NDArray[np.integer[Any]]


class IdPair(NamedTuple):
    """The ids of a sentence and of its translation, in the file: they can be read, not changed.

    >>> import numpy as np
    >>> from regard.translation.data.encoded import IdPair
    >>> pair = IdPair(np.array([5, 2]), np.array([1, 7, 2]))
    >>> pair.target.tolist()
    [1, 7, 2]
    """

    source: IdArray
    target: IdArray


class EncodedCorpus(Sequence[IdPair]):
    """Pairs of sentences as ids, in a file that is read where it is needed.

    path: of a file that `EncodedCorpus.write` wrote. It is read once to verify its checksum, and not held in memory.

    >>> import tempfile
    >>> from regard.translation.data.encoded import EncodedCorpus
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = EncodedCorpus.write(f"{folder}/train.ids", [([5, 2], [1, 7, 2]), ([2], [1, 2])], vocabulary=8)
    >>> len(store)
    2
    >>> source, target = store[0]
    >>> source.tolist(), target.tolist()
    ([5, 2], [1, 7, 2])
    >>> store.sizes.tolist()
    [[2, 3], [1, 2]]
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            opened = open_regular(path)
        except FileNotFoundError:
            raise ArgumentError(f"there is no file {os.fspath(path)!r}; write it with EncodedCorpus.write.") from None
        with opened as file:
            about = _read_header(file, self.path)
            mapped = mmap.mmap(file.fileno(), about.size, access=mmap.ACCESS_READ)
        self.vocabulary = about.vocabulary
        self._ids = np.frombuffer(mapped, about.kind, about.ids, _HEADER)
        self._records = np.frombuffer(mapped, "<i8", 3 * about.pairs, about.records).reshape(-1, 3)
        self._check_numbers()

    def _check_numbers(self) -> None:
        """Raise ArgumentError unless records follow each other and ids are in the vocabulary.

        A checksum protects against accidents, and not against a file that was made so on purpose.
        """
        end = 0
        for first in range(0, len(self), _BLOCK):  # few at a time, as a corpus may be larger than memory
            some = self._records[first : first + _BLOCK]
            ends = end + some[:, 1:].sum(1).cumsum()
            fits = 0 <= some.min() <= some.max() <= len(self._ids)
            if not fits or not np.array_equal(some[:, 0], np.concatenate([[end], ends[:-1]])):
                raise self._wrong("has records that do not follow each other")
            end = int(ends[-1])
        if end != len(self._ids):
            raise self._wrong(f"has {len(self._ids):,} ids, and its records {end:,}")
        for first in range(0, len(self._ids), _BLOCK):
            if self._ids[first : first + _BLOCK].max() >= self.vocabulary:
                raise self._wrong(f"has ids outside of its vocabulary of {self.vocabulary:,}")

    def _wrong(self, why: str) -> ArgumentError:
        return ArgumentError(f"{os.fspath(self.path)!r} {why}; write it anew with EncodedCorpus.write.")

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open a file that `write` wrote, if it has its checksum."""
        return cls(path)

    @classmethod
    def write(
        cls,
        path: str | os.PathLike[str],
        pairs: Iterable[tuple[Sequence[int], Sequence[int]]],
        *,
        vocabulary: int,
    ) -> Self:
        """Write pairs as they come, and open the file; it gets its name when it is complete.

        vocabulary: how many ids there are, at most. Ids take two bytes each where it is 65,536 or less, and
        four above.
        """
        check_int("Store.write got vocabulary", vocabulary, min=1)
        about, remaining, digest = _About(0, 0, vocabulary), iter(pairs), hashlib.sha256()
        with open_atomic(path) as file, tempfile.TemporaryFile(dir=Path(path).parent) as records:
            file.write(bytes(_HEADER))
            while chunk := list(islice(remaining, _CHUNK)):
                sizes = np.array([[len(source), len(target)] for source, target in chunk])
                ids = _flat(chunk, vocabulary, about.pairs)
                ends = about.ids + sizes.sum(1).cumsum()
                starts = ends - sizes.sum(1)
                _put(ids.astype(about.kind).tobytes(), file, digest)
                records.write(np.column_stack([starts, sizes]).astype("<i8").tobytes())
                about = about._replace(pairs=about.pairs + len(chunk), ids=about.ids + len(ids))
            _put(bytes(about.records - file.tell()), file, digest)
            records.seek(0)
            while block := records.read(_BLOCK):
                _put(block, file, digest)
            file.seek(0)
            file.write(about.header(digest.hexdigest()))
        return cls(path)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """How many ids each pair has in its source and in its target: (pairs, 2); on disk, too."""
        return self._records[:, 1:]

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # int or slice, as of a list
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        start, source, target = self._records[operator.index(index)].tolist()
        middle = start + source
        return IdPair(self._ids[start:middle], self._ids[middle : middle + target])

    def __iter__(self) -> Iterator[IdPair]:
        return map(self.__getitem__, range(len(self)))

    def __repr__(self) -> str:
        return f"Store({os.fspath(self.path)!r}: {len(self):,} pairs, {len(self._ids):,} ids)"


class _About(NamedTuple):
    """What the header says."""

    pairs: int
    ids: int
    vocabulary: int

    @property
    def kind(self) -> np.dtype[np.unsignedinteger[Any]]:
        return np.dtype("<u2" if self.vocabulary <= 2**16 else "<u4")

    @property
    def records(self) -> int:
        """Where the records start: at a multiple of 8 bytes, which their numbers need."""
        return _HEADER + -(-self.ids * self.kind.itemsize // 8) * 8

    @property
    def size(self) -> int:
        return self.records + self.pairs * _RECORD

    def header(self, digest: str) -> bytes:
        """The first bytes of the file; `digest` is that of all others."""
        text = json.dumps({"format": _FORMAT, **self._asdict()})
        both = hashlib.sha256(f"{text} {digest}".encode()).hexdigest()
        return json.dumps({**json.loads(text), "sha256": both}).encode().ljust(_HEADER - 1) + b"\n"


def _put(content: bytes, file: BinaryIO, digest: "hashlib._Hash") -> None:
    file.write(content)
    digest.update(content)


def _flat(
    chunk: list[tuple[Sequence[int], Sequence[int]]], vocabulary: int, before: int
) -> NDArray[np.int64]:
    """All ids of some pairs in a row, checked; `before`: how many pairs came before."""
    flat = np.fromiter(chain.from_iterable(chain.from_iterable(chunk)), np.int64)
    if len(flat) and not 0 <= flat.min() <= flat.max() < vocabulary:
        place, wrong = next(
            (place, one)
            for place, pair in enumerate(chunk, before)
            for one in chain(*pair)
            if not 0 <= one < vocabulary
        )
        raise ArgumentError(
            f"pair {place:,} has the id {wrong} and the vocabulary {vocabulary:,}; ids are 0 to "
            f"{vocabulary - 1:,}: give the size of the vocabulary that they were made with."
        )
    return flat


def _read_header(file: BufferedReader, path: Path) -> _About:
    """What the header says, if all of the file is as it was written."""
    size, header = os.fstat(file.fileno()).st_size, file.read(_HEADER)
    try:
        read = json.loads(header)
        known = read.pop("format") == _FORMAT
        about = _About(*(int(read[name]) for name in _About._fields))
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError, OverflowError):
        known = False
    if not known:
        raise ArgumentError(
            f"{os.fspath(path)!r} is no store of ids that this version of regard reads; write it anew with "
            "Store.write."
        )
    if min(about) < 0 or about.size != size:
        raise ArgumentError(
            f"{os.fspath(path)!r} has {size:,} bytes and {about.pairs:,} pairs with {about.ids:,} ids take "
            f"{about.size:,}; it was cut off or changed: write it anew with EncodedCorpus.write."
        )
    if header != about.header(hashlib.file_digest(file, "sha256").hexdigest()):
        raise ArgumentError(
            f"{os.fspath(path)!r} does not have its checksum; it was changed: write it anew with EncodedCorpus.write."
        )
    return about
