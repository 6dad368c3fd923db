"""Greek-English New Testament with manual word alignments, from the package `bible-alignments`.

Greek: SBLGNT, Society of Biblical Literature and Logos Bible Software. English: Berean Standard Bible. Links:
Clear-Bible/Alignments (Biblica), CC BY 4.0. 7,919 verses, 189,473 links between words in the same verse.

Only the package's data is read, so its dependencies are not needed: `pip install --no-deps bible-alignments`.
"""

import csv
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from itertools import product
from pathlib import Path
from typing import NamedTuple

from regard.errors import ArgumentError, MissingExtraError
from regard.translation.alignment.links import Links
from regard.translation.data.pairs import Pair

_GREEK = "data/sources/SBLGNT.tsv"
_ENGLISH = "data/eng/targets/BSB/nt_BSB.tsv"
_LINKS = "data/eng/alignments/BSB/SBLGNT-BSB-manual.json"
_BOOKS = range(40, 67)


class Verse(NamedTuple):
    """A verse in Greek and English with its word alignment.

    reference: book, chapter and verse: "40001001" is Matthew 1:1. links: (Greek word, English word) indices.
    punctuation: whether each English word is a punctuation mark; the Greek text has none.

    >>> from regard.translation.data.bible import Verse
    >>> verse = Verse(
    ...     "40001001", ("Βίβλος",), ("The", "book", "."), frozenset({(0, 1)}), (False, False, True)
    ... )
    >>> verse.pair
    Pair(source='Βίβλος', target='The book .')
    >>> verse.without_punctuation({(0, 1), (0, 2)})
    frozenset({(0, 1)})
    """

    reference: str
    source_words: tuple[str, ...]
    target_words: tuple[str, ...]
    links: Links
    punctuation: tuple[bool, ...]

    @property
    def book(self) -> int:
        """Number of the book, from 40 (Matthew) to 66 (Revelation)."""
        return int(self.reference[:2])

    @property
    def pair(self) -> Pair:
        """The two texts, with words separated by spaces."""
        return Pair(" ".join(self.source_words), " ".join(self.target_words))

    def without_punctuation(self, links: Iterable[tuple[int, int]]) -> Links:
        """Remove links to punctuation marks, which the gold alignment does not contain."""
        return frozenset(link for link in links if not self.punctuation[link[1]])


def bible(books: Collection[int] | None = None) -> list[Verse]:
    """Load all verses with links, in order. All links are sure links.

    books: 40 (Matthew) to 66 (Revelation), e.g. range(40, 45) for the Gospels and Acts. Default: all.

    >>> from regard.translation.data.bible import bible
    >>> bible(books=[1])
    Traceback (most recent call last):
    regard.errors.ArgumentError: books must be between 40 (Matthew) and 66 (Revelation), got [1].
    """
    selected = set(_BOOKS if books is None else books)
    if not selected or not selected <= set(_BOOKS):
        raise ArgumentError(
            f"books must be between 40 (Matthew) and 66 (Revelation), got {sorted(selected, key=str)}."
        )
    greek, english = defaultdict(list), defaultdict(list)  # words of each verse
    for row in _rows(_GREEK):
        if int(row["id"][1:3]) in selected:
            greek[row["id"][1:9]].append(_Word(row["id"], row["text"], False))
    for row in _rows(_ENGLISH):
        if row["source_verse"] in greek:
            english[row["source_verse"]].append(_Word(row["id"], row["text"], row["exclude"] == "y"))
    links = _read_links(greek, english)
    return [
        Verse(
            reference,
            tuple(word.text for word in words),
            tuple(word.text for word in english[reference]),
            frozenset(links[reference]),
            tuple(word.punctuation for word in english[reference]),
        )
        for reference, words in greek.items()
        if reference in links
    ]


class _Word(NamedTuple):
    id: str
    text: str
    punctuation: bool


_Words = Mapping[str, list[_Word]]


def _read_links(greek: _Words, english: _Words) -> dict[str, list[tuple[int, int]]]:
    """Return the links by verse; the few links between different verses are omitted."""
    sources, targets = (
        {
            word.id: (reference, index)
            for reference, verse in words.items()
            for index, word in enumerate(verse)
        }
        for words in (greek, english)
    )
    links = defaultdict(list)
    for record in json.loads(_path(_LINKS).read_text("utf-8"))["records"]:
        for source, target in product(record["source"], record["target"]):
            if source in sources and target in targets:
                (reference, i), (other, j) = sources[source], targets[target]
                if reference == other:
                    links[reference].append((i, j))
    return links


def _rows(name: str) -> Iterator[dict[str, str]]:
    with open(_path(name), encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)


def _path(name: str) -> Path:
    """Return the path of a data file in the package."""
    cure = "Run: pip install --no-deps bible-alignments"
    try:
        path = Path(str(distribution("bible-alignments").locate_file(name)))
    except PackageNotFoundError:
        raise MissingExtraError(
            f"bible needs the package bible-alignments, which is not installed. {cure}"
        ) from None
    if not path.exists():
        raise ArgumentError(f"The installed package bible-alignments has no file {name!r}. {cure}==0.4.2")
    return path
