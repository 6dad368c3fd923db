"""Length filters for sentence pairs."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from regard._util.checks import check_int, check_number
from regard.translation.data.pairs import Pair, check_pair, check_pairs, normalize_spaces


@dataclass
class LengthFilter:
    """Length limits for pairs, and counts of the pairs dropped for each reason.

    max_length: maximum length of a side. max_ratio, slack: each side is at most max_ratio × the length of the
    other, plus slack. unit: unit of length, for messages.
    """

    max_length: int
    max_ratio: float
    slack: int
    unit: str
    seen: int = 0
    empty: int = 0
    long: int = 0
    unequal: int = 0

    def __post_init__(self) -> None:
        check_int("max_length", self.max_length, min=1)
        check_number("max_ratio", self.max_ratio, min=1, below=math.inf)
        check_int("slack", self.slack)

    @property
    def total(self) -> int:
        """Number of dropped pairs."""
        return self.empty + self.long + self.unequal

    def keeps(self, source: int, target: int) -> bool:
        """Count a pair with the given lengths; return whether to keep it."""
        shorter, longer = sorted((source, target))
        self.seen += 1
        if not shorter:
            self.empty += 1
        elif longer > self.max_length:
            self.long += 1
        elif longer > self.max_ratio * shorter + self.slack:
            self.unequal += 1
        else:
            return True
        return False

    def __str__(self) -> str:
        reasons = [
            (self.empty, "with an empty side"),
            (self.long, f"longer than {self.max_length:,} {self.unit}"),
            (self.unequal, "with very different lengths"),
        ]
        details = ", ".join(f"{count:,} {reason}" for count, reason in reasons if count)
        pairs = f"{self.seen:,} pair{'' if self.seen == 1 else 's'}"
        return f"dropped {self.total:,} of {pairs}: {details}" if details else f"dropped none of {pairs}"


class CleanedPairs(Iterator[Pair]):
    """Iterator over the pairs that pass a filter; `dropped` counts the others."""

    def __init__(self, pairs: Iterable[Pair], dropped: LengthFilter) -> None:
        self.dropped = dropped
        self._pairs = iter(check_pairs(pairs))

    def __next__(self) -> Pair:
        for item in self._pairs:
            source, target = check_pair(item, self.dropped.seen)
            pair = Pair(normalize_spaces(source), normalize_spaces(target))
            if self.dropped.keeps(len(pair.source), len(pair.target)):
                return pair
        raise StopIteration

    @property
    def number(self) -> int:
        """Number of the last pair in the original corpus, counted from 1."""
        return self.dropped.seen


def clean_pairs(pairs: Iterable[Pair], *, max_length: int = 2000, max_ratio: float = 4.0) -> CleanedPairs:
    """Normalize whitespace; drop pairs that have an empty side, are too long, or differ too much in length.

    max_length: maximum number of characters.
    max_ratio: each side has at most max_ratio × the characters of the other, plus 40, because "Ja." can
        translate to "That's what I think too."

    The result can be iterated once; its attribute `dropped` counts the dropped pairs by reason.

    >>> from regard.translation.data.cleaning import clean_pairs
    >>> from regard.translation.data.pairs import Pair
    >>> pairs = clean_pairs([Pair(" two  dogs", "zwei Hunde"), Pair("a dog", ""), Pair("No.", "Nein. " * 20)])
    >>> list(pairs)
    [Pair(source='two dogs', target='zwei Hunde')]
    >>> print(pairs.dropped)
    dropped 2 of 3 pairs: 1 with an empty side, 1 with very different lengths
    """
    return CleanedPairs(pairs, LengthFilter(max_length, max_ratio, slack=40, unit="characters"))
