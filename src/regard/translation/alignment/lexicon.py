"""Translation probabilities of words, from expected link counts.

    p(observed | given) = (count(given, observed) + PRIOR · prior) / (count(given) + PRIOR)

The prior is the probability of the observed word given the stem of the given word (Fraser and Marcu 2005), times
a factor for words that are spelled alike, such as names.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.translation.alignment.hmm import sums
from regard.translation.alignment.vocabulary import Floats, Integers, Vocabulary, spelling_similarity

Vocabularies = tuple[Vocabulary, Vocabulary]

_PRIOR = 16.0  # weight of the stem's statistics, in links
_SMOOTHING = 1e-3  # added to each count of a stem
_SPELLING = 20.0  # factor of the prior for identical spelling, minus 1


class WordPairs:
    """Word pairs that occur together: sorted keys, source number × target vocabulary + target number."""

    def __init__(self, words: Vocabularies, keys: Integers) -> None:
        self.words, self.keys = words, keys
        self.numbers = keys // max(len(words[1]), 1), keys % max(len(words[1]), 1)
        self.spelling: NDArray[np.float32] = 1 + _SPELLING * spelling_similarity(words, *self.numbers) ** 2

    def __len__(self) -> int:
        return len(self.keys)

    def stem_keys(self, direction: int) -> Integers:
        """Return, for each pair, a number that identifies the given word's stem and the observed word."""
        given, observed = self.numbers[direction], self.numbers[1 - direction]
        return self.words[direction].stems[given] * len(self.words[1 - direction]) + observed


class _Direction(NamedTuple):
    """Counts of one direction: sorted stem keys with their counts, and totals of given words and stems."""

    stem_keys: Integers
    stem_of: Integers  # index of each word pair's stem key
    totals: Floats
    stem_totals: Floats
    stem_counts: Floats


class Lexicon:
    """Expected link counts of word pairs, and the translation probabilities that follow from them.

    pairs: the word pairs of the training text. Set the counts with `update`.
    """

    def __init__(self, pairs: WordPairs) -> None:
        self.pairs, self.counts = pairs, np.zeros(len(pairs))
        self._stems = [
            np.unique(pairs.stem_keys(direction), return_inverse=True) for direction in (0, 1)
        ]
        self._directions: list[_Direction] = []

    def update(self, counts: Floats) -> None:
        """Set the expected number of links of each word pair."""
        self.counts = counts
        self._directions = []
        for direction, (stem_keys, stem_of) in enumerate(self._stems):
            vocabulary, given = self.pairs.words[direction], self.pairs.numbers[direction]
            totals = sums(given, counts, len(vocabulary))
            self._directions.append(
                _Direction(
                    stem_keys,
                    stem_of,
                    totals,
                    sums(vocabulary.stems, totals, vocabulary.stem_count),
                    sums(stem_of, counts, len(stem_keys)),
                )
            )

    def probabilities(self, direction: int) -> Floats:
        """Return p(observed | given) of each word pair of the training text."""
        if not self._directions:  # before the first E-step, only the spelling is known
            return self.pairs.spelling / len(self.pairs.words[1 - direction])
        counts = self._directions[direction]
        return self._probability(direction, self.pairs, self.counts, counts.stem_counts[counts.stem_of])

    def lookup(self, direction: int, pairs: WordPairs) -> Floats:
        """Return p(observed | given) of other word pairs, whose vocabularies extend those of the training text."""
        trained = self.pairs.words
        source, target = pairs.numbers
        known = (source < len(trained[0])) & (target < len(trained[1]))
        keys = np.where(known, source * len(trained[1]) + target, -1)
        counts = self._directions[direction]
        vocabulary = len(trained[1 - direction])
        stems, observed = pairs.words[direction].stems[pairs.numbers[direction]], pairs.numbers[1 - direction]
        known_stem = (stems < len(counts.stem_totals)) & (observed < vocabulary)
        stem_keys = np.where(known_stem, stems * vocabulary + observed, -1)
        return self._probability(
            direction,
            pairs,
            _find(self.pairs.keys, self.counts, keys),
            _find(counts.stem_keys, counts.stem_counts, stem_keys),
        )

    def _probability(self, direction: int, pairs: WordPairs, count: Floats, stem_count: Floats) -> Floats:
        counts, given = self._directions[direction], pairs.numbers[direction]
        stems = pairs.words[direction].stems[given]
        prior = stem_count + _SMOOTHING
        prior /= _at(counts.stem_totals, stems) + _SMOOTHING * len(self.pairs.words[1 - direction])
        return (count + _PRIOR * prior * pairs.spelling) / (_at(counts.totals, given) + _PRIOR)


def _find(keys: Integers, values: Floats, wanted: Integers) -> Floats:
    """Return the values of the wanted keys; 0 for keys that do not exist."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0.0)


def _at(values: Floats, index: Integers) -> Floats:
    """Return the values at each index; 0 beyond the end."""
    return np.where(index < len(values), values[np.minimum(index, len(values) - 1)], 0.0)
