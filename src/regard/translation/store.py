"""Pairs of sentences as ids on disk, memory-mapped: a corpus may be larger than memory.

One file, whatever the size of the corpus, all numbers little-endian:

    header    4096 bytes: JSON, filled up with blanks
    ids       of the first pair's source, then of its target, then of the second pair's source, …
    records   one for each pair, three numbers of 8 bytes: where its ids start, and how many its sides have
"""

import json
import mmap
import operator
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from regard.errors import ArgumentError
from regard.mechanism.checks import count
from regard.mechanism.files import writing

_FORMAT = "regard store 1"
_HEADER = 4096  # bytes: a page, so that the ids start on one
_RECORD = 24  # bytes
_CHUNK = 1024  # pairs that are written at once

IdArray = NDArray[np.integer[Any]]


class IdPair(NamedTuple):
    """The ids of a sentence and of its translation, in the file: they can be read, not changed.

    >>> import numpy as np
    >>> from regard.translation.store import IdPair
    >>> pair = IdPair(np.array([5, 2]), np.array([1, 7, 2]))
    >>> pair.target.tolist()
    [1, 7, 2]
    """

    source: IdArray
    target: IdArray


class Store(Sequence[IdPair]):
    """Pairs of sentences as ids, in a file that is read where it is needed.

    path: of a file that `Store.write` wrote.

    >>> import tempfile
    >>> from regard.translation.store import Store
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = Store.write(f"{folder}/train.ids", [([5, 2], [1, 7, 2]), ([2], [1, 2])], vocabulary=8)
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
        if not self.path.is_file():
            raise ArgumentError(f"there is no file {os.fspath(path)!r}; write it with Store.write.")
        with open(path, "rb") as file:
            about = _read_header(file, self.path)
            mapped = mmap.mmap(file.fileno(), about.size, access=mmap.ACCESS_READ)
        self.vocabulary = about.vocabulary
        self._ids = np.frombuffer(mapped, about.kind, about.ids, _HEADER)
        self._records = np.frombuffer(mapped, "<i8", 3 * about.pairs, about.records).reshape(-1, 3)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open a file that `write` wrote; nothing of it is read before it is asked for."""
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
        count("Store.write got vocabulary", vocabulary, least=1)
        about, remaining = _About(0, 0, vocabulary), iter(pairs)
        with writing(path) as file, tempfile.TemporaryFile(dir=Path(path).parent) as records:
            file.write(bytes(_HEADER))
            while chunk := list(islice(remaining, _CHUNK)):
                sizes = np.array([[len(source), len(target)] for source, target in chunk])
                ids = _flat(chunk, vocabulary, about.pairs)
                ends = about.ids + sizes.sum(1).cumsum()
                starts = ends - sizes.sum(1)
                file.write(ids.astype(about.kind).tobytes())
                records.write(np.column_stack([starts, sizes]).astype("<i8").tobytes())
                about = about._replace(pairs=about.pairs + len(chunk), ids=about.ids + len(ids))
            file.write(bytes(about.records - file.tell()))
            records.seek(0)
            shutil.copyfileobj(records, file)
            file.seek(0)
            header = json.dumps({"format": _FORMAT, **about._asdict()}).encode()
            file.write(header.ljust(_HEADER - 1) + b"\n")
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


def _read_header(file: BinaryIO, path: Path) -> _About:
    size = os.fstat(file.fileno()).st_size
    try:
        read = json.loads(file.read(_HEADER))
        known = read.pop("format") == _FORMAT
        about = _About(*(int(read[name]) for name in _About._fields))
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
        known = False
    if not known:
        raise ArgumentError(
            f"{os.fspath(path)!r} is no store of ids that this version of regard reads; write it anew with "
            "Store.write."
        )
    if about.size != size or min(about) < 0:
        raise ArgumentError(
            f"{os.fspath(path)!r} has {size:,} bytes and {about.pairs:,} pairs with {about.ids:,} ids take "
            f"{about.size:,}; it was cut off or changed: write it anew with Store.write."
        )
    return about
