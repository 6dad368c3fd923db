"""Which pairs of sentences are worth training on; the others are dropped, and counted."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from regard._util.checks import check_int, check_number
from regard.translation.data.pairs import Pair, check_pair, listed, tidy


@dataclass
class LengthFilter:
    """What limits there are for a pair, and how many pairs were dropped for which reason.

    longest: of a side, at most. ratio, slack: neither side may be longer than `ratio` times the other and
    `slack` more. unit: what is counted.

    >>> from regard.translation.data.cleaning import LengthFilter
    >>> dropped = LengthFilter(longest=256, ratio=4, slack=10, unit="pieces")
    >>> [dropped.keeps(*sizes) for sizes in [(7, 9), (0, 2), (3, 300), (3, 23)]]
    [True, False, False, False]
    >>> print(dropped)
    dropped 3 of 4 pairs: 1 with an empty side, 1 longer than 256 pieces, 1 with sides of very unequal length
    """

    longest: int
    ratio: float
    slack: int
    unit: str
    seen: int = 0
    empty: int = 0
    long: int = 0
    unequal: int = 0

    def __post_init__(self) -> None:
        check_int("longest", self.longest, min=1)
        check_number("ratio", self.ratio, min=1, below=math.inf)
        check_int("slack", self.slack)

    @property
    def total(self) -> int:
        """How many were dropped."""
        return self.empty + self.long + self.unequal

    def keeps(self, source: int, target: int) -> bool:
        """Whether a pair whose sides have these sizes is kept; it is counted."""
        shorter, longer = sorted((source, target))
        self.seen += 1
        if not shorter:
            self.empty += 1
        elif longer > self.longest:
            self.long += 1
        elif longer > self.ratio * shorter + self.slack:
            self.unequal += 1
        else:
            return True
        return False

    def __str__(self) -> str:
        reasons = [
            (self.empty, "with an empty side"),
            (self.long, f"longer than {self.longest:,} {self.unit}"),
            (self.unequal, "with sides of very unequal length"),
        ]
        said = ", ".join(f"{many:,} {reason}" for many, reason in reasons if many)
        pairs = f"{self.seen:,} pair{'' if self.seen == 1 else 's'}"
        return f"dropped {self.total:,} of {pairs}: {said}" if said else f"dropped none of {pairs}"


class CleanedPairs(Iterator[Pair]):
    """Pairs that are worth training on, as they come; `dropped` counts the others.

    >>> from regard.translation.data.cleaning import CleanedPairs, LengthFilter
    >>> from regard.translation.data.pairs import Pair
    >>> pairs = CleanedPairs([Pair(" two  dogs", "zwei Hunde"), Pair("", "nichts")], LengthFilter(20, 4, 0, "letters"))
    >>> next(pairs), pairs.dropped.seen
    (Pair(source='two dogs', target='zwei Hunde'), 1)
    """

    def __init__(self, pairs: Iterable[Pair], dropped: LengthFilter) -> None:
        self.dropped = dropped
        self._pairs = iter(listed(pairs))

    def __next__(self) -> Pair:
        for given in self._pairs:
            source, target = check_pair(given, self.dropped.seen)
            pair = Pair(tidy(source), tidy(target))
            if self.dropped.keeps(len(pair.source), len(pair.target)):
                return pair
        raise StopIteration


def clean_pairs(pairs: Iterable[Pair], *, longest: int = 2000, ratio: float = 4.0) -> CleanedPairs:
    """Drop pairs with an empty side, over-long ones and wildly unequal ones; white space becomes one blank.

    longest: characters of a sentence at most. ratio: neither side may have more than `ratio` times the
        other's characters and 40 more (short sentences differ much: "Ja." may be "That's what I think too.").

    The result is read once, as it comes, and its `dropped` says how many were dropped and why.

    >>> from regard.translation.data.cleaning import clean_pairs
    >>> from regard.translation.data.pairs import Pair
    >>> pairs = clean_pairs([Pair(" two  dogs", "zwei Hunde"), Pair("a dog", ""), Pair("No.", "Nein. " * 20)])
    >>> list(pairs)
    [Pair(source='two dogs', target='zwei Hunde')]
    >>> print(pairs.dropped)
    dropped 2 of 3 pairs: 1 with an empty side, 1 with sides of very unequal length
    """
    return CleanedPairs(pairs, LengthFilter(longest, ratio, slack=40, unit="characters"))
