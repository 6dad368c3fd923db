"""Gold alignments and the alignment error rate (AER).

precision = |A ∩ P| / |A|    recall = |A ∩ S| / |S|    AER = 1 − (|A ∩ S| + |A ∩ P|) / (|A| + |S|)
A: predicted links; S: sure gold links; P: possible gold links, which include the sure ones.
(Och and Ney 2003, section 6.1)
"""

import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from regard._util.text import pluralize
from regard.errors import ArgumentError
from regard.translation.alignment.links import Links, read_links
from regard.translation.data.formats import read_lines


class GoldAlignment(NamedTuple):
    """Manual alignment of a sentence pair: sure links and possible links.

    >>> from regard.translation.alignment.aer import GoldAlignment
    >>> GoldAlignment(frozenset({(0, 0)})).possible
    frozenset()
    """

    sure: Links
    possible: Links = frozenset()

    @classmethod
    def of(cls, links: "GoldAlignment | Links") -> "GoldAlignment":
        """Convert plain links, which all count as sure; return a GoldAlignment unchanged."""
        return links if isinstance(links, GoldAlignment) else cls(links)


class ErrorRates(NamedTuple):
    """Alignment error rate (`aer`), precision and recall, each from 0 to 1; printed in percent.

    >>> from regard.translation.alignment.aer import ErrorRates
    >>> print(ErrorRates(aer=0.207, precision=0.9, recall=0.7))
    AER 20.7%, precision 90.0%, recall 70.0%
    """

    aer: float
    precision: float
    recall: float

    @classmethod
    def from_counts(cls, links: int, sure: int, hits: int, possible_hits: int) -> "ErrorRates":
        """Compute the rates from |A|, |S|, |A ∩ S| and |A ∩ P|. If there are no links, the AER is 0."""
        return cls(
            aer=1 - (hits + possible_hits) / (links + sure) if links + sure else 0.0,
            precision=possible_hits / links if links else 1.0,
            recall=hits / sure if sure else 1.0,
        )

    def __str__(self) -> str:
        return f"AER {self.aer:.1%}, precision {self.precision:.1%}, recall {self.recall:.1%}"


def error_rate(
    predicted: Sequence[Iterable[tuple[int, int]]], gold: Sequence[GoldAlignment | Links]
) -> ErrorRates:
    """Compute the error rates of predicted links, pooled over all sentence pairs.

    gold: for each sentence pair, a `GoldAlignment`, or plain links, which all count as sure.

    >>> from regard.translation.alignment.aer import GoldAlignment, error_rate
    >>> gold = [GoldAlignment(sure=frozenset({(0, 0), (1, 1)}), possible=frozenset({(2, 1)}))]
    >>> print(error_rate([{(0, 0), (2, 1), (2, 2)}], gold))
    AER 40.0%, precision 66.7%, recall 50.0%
    """
    if len(predicted) != len(gold):
        raise ArgumentError(
            f"error_rate got links for {pluralize(len(predicted), 'sentence pair')} and gold links for "
            f"{len(gold):,}; pass one entry per pair, empty if the pair has no links."
        )
    links = sure_links = hits = possible_hits = 0
    for predicted_links, gold_links in zip(predicted, gold, strict=True):
        predicted_set, (sure, possible) = frozenset(predicted_links), GoldAlignment.of(gold_links)
        links += len(predicted_set)
        sure_links += len(sure)
        hits += len(predicted_set & sure)
        possible_hits += len(predicted_set & (sure | possible))
    return ErrorRates.from_counts(links, sure_links, hits, possible_hits)


def read_gold(path: str | os.PathLike[str], index_base: int = 0) -> list[GoldAlignment]:
    """Read gold links, one line per sentence pair: `1-2` is a sure link and `1p2` a possible one.

    index_base: index of the first word, 0 or 1. Files from the WPT shared tasks count from 1.

    >>> import pathlib, tempfile
    >>> from regard.translation.alignment.aer import read_gold
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "gold")
    ...     written = path.write_text("1-1 2p3")
    ...     read_gold(path, index_base=1)
    [GoldAlignment(sure=frozenset({(0, 0)}), possible=frozenset({(1, 2)}))]
    """
    if index_base not in (0, 1):
        raise ArgumentError(f"read_gold got index_base={index_base}; it must be 0 or 1.")
    return [
        GoldAlignment(*read_links(line, where, index_base, possible=True)) for where, line in _lines(path)
    ]


def read_pharaoh(path: str | os.PathLike[str]) -> list[Links]:
    """Read Pharaoh links (source-target) from a text file: one line per sentence pair, such as `0-0 1-2`.

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
    """Return each line with a prefix for error messages; an empty line is a pair without links."""
    lines = enumerate(read_lines(path), start=1)
    return [(f"{os.fspath(path)}, line {number}: ", line) for number, line in lines]
