"""Size and a sample of a corpus, collected while it is being read."""

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from regard.translation.data.pairs import Pair

_SAMPLE = 2000  # maximum number of sampled pairs
_MAX_HASHES = 2_000_000  # maximum number of distinct pairs stored to detect duplicates
_CHARACTERS_PER_TOKEN = 4.5  # for subwords from a small vocabulary
_FIRST_WIDE = "\u2e80"  # characters from here on are mostly Han, kana and hangul
_WIDE = 3.0  # each wide character counts as this many characters


class NumberedPair(NamedTuple):
    """A pair and its number in the corpus, counted from 1; dropped pairs are counted too."""

    number: int
    pair: Pair


@dataclass
class CorpusStatistics:
    """Size of a corpus, after cleaning.

    pairs: number of pairs. characters: number of characters on both sides; a Chinese character counts
        as three.
    alphabet: how often each character occurs. duplicates: number of repeated pairs.
    sample: up to 2,000 random pairs, in corpus order.

    >>> from regard.translation.data.pairs import Pair
    >>> from regard.translation.data.statistics import CorpusStatistics
    >>> statistics = CorpusStatistics()
    >>> for pair in statistics.observe([Pair("two dogs", "zwei Hunde"), Pair("two dogs", "zwei Hunde")]):
    ...     pass
    >>> statistics.pairs, statistics.tokens, statistics.duplicates
    (2, 8, 1)
    """

    pairs: int = 0
    characters: float = 0
    duplicates: int = 0
    alphabet: Counter[str] = field(default_factory=Counter, repr=False)
    sample: list[NumberedPair] = field(default_factory=list, repr=False)

    @property
    def tokens(self) -> int:
        """Estimated number of subword tokens, source plus target."""
        return round(self.characters / _CHARACTERS_PER_TOKEN)

    def observe(self, pairs: Iterable[Pair]) -> Iterator[Pair]:
        """Yield the pairs and count them."""
        choose, hashes = random.Random(0), set[bytes]()
        for pair in pairs:
            self.pairs += 1
            self._count(pair)
            if len(hashes) < _MAX_HASHES:
                key = blake2b("\t".join(pair).encode(errors="replace"), digest_size=8).digest()
                self.duplicates += key in hashes
                hashes.add(key)
            # reservoir sampling: every pair is in the sample with the same probability
            slot = self.pairs - 1 if self.pairs <= _SAMPLE else choose.randrange(self.pairs)
            if slot < _SAMPLE:
                number = getattr(pairs, "number", self.pairs)
                self.sample[slot : slot + 1] = [NumberedPair(number, pair)]
            yield pair
        self.sample.sort()

    def _count(self, pair: Pair) -> None:
        for side in pair:
            self.alphabet.update(side)
            wide = 0 if side.isascii() else sum(char >= _FIRST_WIDE for char in side)
            self.characters += len(side) + wide * (_WIDE - 1)
