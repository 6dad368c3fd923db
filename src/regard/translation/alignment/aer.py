"""How good word links are: gold files, and the alignment error rate.

precision = |A ∩ P| / |A|    recall = |A ∩ S| / |S|    AER = 1 − (|A ∩ S| + |A ∩ P|) / (|A| + |S|)
A: the links found; S: the sure ones of the gold; P: the possible ones, among which are the sure ones.
(Och and Ney 2003, section 6.1)
"""

import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from regard.errors import ArgumentError
from regard.translation.data.formats import read_lines
from regard.translation.data.links import Links, read_links


class GoldAlignment(NamedTuple):
    """The links of a sentence pair that people drew: those they were sure of, and others that are possible.

    >>> from regard.translation.alignment.aer import GoldAlignment
    >>> GoldAlignment(frozenset({(0, 0)})).possible
    frozenset()
    """

    sure: Links
    possible: Links = frozenset()


class ErrorRates(NamedTuple):
    """Alignment error rate (`aer`), precision and recall, each from 0 to 1; printed in per cent.

    >>> from regard.translation.alignment.aer import ErrorRates
    >>> print(ErrorRates(aer=0.207, precision=0.9, recall=0.7))
    AER 20.7%, precision 90.0%, recall 70.0%
    """

    aer: float
    precision: float
    recall: float

    def __str__(self) -> str:
        return f"AER {self.aer:.1%}, precision {self.precision:.1%}, recall {self.recall:.1%}"


def error_rate(found: Sequence[Iterable[tuple[int, int]]], gold: Sequence[GoldAlignment | Links]) -> ErrorRates:
    """How far the links found are from those of the gold, over all sentences together.

    gold: for each sentence a `GoldAlignment`, or links that are all sure.

    >>> from regard.translation.alignment.aer import GoldAlignment, error_rate
    >>> gold = [GoldAlignment(sure=frozenset({(0, 0), (1, 1)}), possible=frozenset({(2, 1)}))]
    >>> print(error_rate([{(0, 0), (2, 1), (2, 2)}], gold))
    AER 40.0%, precision 66.7%, recall 50.0%
    """
    if len(found) != len(gold):
        raise ArgumentError(
            f"there are links of {len(found)} sentences and gold links of {len(gold)}; both need one line "
            "for each sentence pair, an empty one where there are no links."
        )
    links = sure_links = hits = possible_hits = 0
    for some, true in zip(found, gold, strict=True):
        mine, (sure, possible) = frozenset(some), true if isinstance(true, GoldAlignment) else GoldAlignment(true)
        links += len(mine)
        sure_links += len(sure)
        hits += len(mine & sure)
        possible_hits += len(mine & (sure | possible))
    return rates(links, sure_links, hits, possible_hits)


def rates(links: int, sure: int, hits: int, possible_hits: int) -> ErrorRates:
    """Of the numbers |A|, |S|, |A ∩ S| and |A ∩ P|; where there is nothing to find or wrong, nothing is."""
    return ErrorRates(
        aer=1 - (hits + possible_hits) / (links + sure) if links + sure else 0.0,
        precision=possible_hits / links if links else 1.0,
        recall=hits / sure if sure else 1.0,
    )


def read_gold(path: str | os.PathLike[str], base: int = 0) -> list[GoldAlignment]:
    """The gold links of a file, a line for each sentence pair: `1-2` is sure, `1p2` possible.

    path: of a text file.
    base: the number of a sentence's first word, 0 or 1; files of the WPT shared tasks count from 1.

    >>> import pathlib, tempfile
    >>> from regard.translation.alignment.aer import read_gold
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "gold")
    ...     written = path.write_text("1-1 2p3")
    ...     read_gold(path, base=1)
    [GoldAlignment(sure=frozenset({(0, 0)}), possible=frozenset({(1, 2)}))]
    """
    if base not in (0, 1):
        raise ArgumentError(f"read_gold got base={base}; words are counted from 0 or from 1.")
    return [GoldAlignment(*read_links(line, where, base, possible=True)) for where, line in _lines(path)]


def read_pharaoh(path: str | os.PathLike[str]) -> list[Links]:
    """The links of a file in the format of Pharaoh and Moses: `0-0 1-2`, source-target, counted from 0.

    path: of a text file, a line for each sentence pair.

    >>> import pathlib, tempfile
    >>> from regard.translation.alignment.aer import read_pharaoh
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "links")
    ...     written = path.write_text("0-1")
    ...     read_pharaoh(path)
    [frozenset({(0, 1)})]
    """
    return [read_links(line, where)[0] for where, line in _lines(path)]


def _lines(path: str | os.PathLike[str]) -> list[tuple[str, str]]:
    """Each line, and the words with which an error about it begins; an empty line is a pair without links."""
    lines = enumerate(read_lines(path), start=1)
    return [(f"{os.fspath(path)}, line {number}: ", line) for number, line in lines]
