"""Translation probabilities of words, from expected link counts.

    p(observed | given) = (count(given, observed) + PRIOR · spelling · prior) / (count(given) + PRIOR)
                          · fertility^FERTILITY
    prior               = (1 − ENDING) · p(observed | s) + ENDING · p(observed | e)
    p(observed | s)     = (count(s, observed) + STEM_PRIOR · backoff) / (count(s) + STEM_PRIOR)
    p(observed | e)     = (count(e, observed) + STEM_PRIOR · backoff) / (count(e) + STEM_PRIOR)
    backoff             = p(s' | s) · p(observed | s')

s and s' are the stems of the given and the observed word (Fraser and Marcu 2005), and e is the ending of the
given word: endings of verbs predict pronouns and auxiliary verbs of the other language, and endings of nouns
prepositions. spelling is a factor that favors words with similar spelling, such as names. fertility is the
number of links per occurrence of the given word, divided by the mean of all words: words that usually have
no translation attract fewer words. It replaces the fertility model of Brown et al. 1993, whose exact
expectations cannot be computed efficiently.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.translation.alignment.hmm import sums
from regard.translation.alignment.vocabulary import Floats, Integers, Vocabulary, spelling_similarity

Vocabularies = tuple[Vocabulary, Vocabulary]

# Tuned on the gold links described in docs/results.md, excluding Greek books 45 to 66.
_PRIOR = 8.0  # weight of the statistics of stems and endings, in links
_STEM_PRIOR = 4.0
_ENDING = 0.4  # weight of the ending's statistics, compared with the stem's
_FERTILITY = 0.9  # exponent; with 1, words without links would never get any
_FERTILITY_PRIOR = 4.0  # weight of the mean fertility, in occurrences
_SMOOTHING = 3e-3  # added to the count of each stem pair
_SPELLING = 20.0  # a pair with identical spelling is weighted by 1 + _SPELLING
_MIN_LINKS = 1e-6  # in the whole text; prevents a division by zero
_UNKNOWN = 0.01  # assumed frequency of unseen words


class WordPairs:
    """Co-occurring word pairs as sorted keys: source id × target vocabulary size + target id."""

    def __init__(self, words: Vocabularies, keys: Integers) -> None:
        self.words, self.keys = words, keys
        source, target = np.divmod(keys, max(len(words[1]), 1))
        self.numbers = source.astype(np.int32), target.astype(np.int32)
        self.spelling: NDArray[np.float32] = 1 + _SPELLING * spelling_similarity(words, *self.numbers) ** 2

    def __len__(self) -> int:
        return len(self.keys)

    def select(self, index: NDArray[np.bool_]) -> "WordPairs":
        """Return the pairs where `index` is True."""
        selected = object.__new__(WordPairs)
        selected.words, selected.keys = self.words, self.keys[index]
        selected.numbers = self.numbers[0][index], self.numbers[1][index]
        selected.spelling = self.spelling[index]
        return selected


class _Statistics(NamedTuple):
    """Expected counts of word pairs in one direction, and of their words and stems."""

    pair: Floats
    given: Floats
    stem_pair: Floats  # count by the given word's stem and the observed word
    stem: Floats
    stems: Floats  # count by the stems of both words
    ending_pair: Floats  # count by the given word's ending and the observed word
    ending: Floats
    observed: Floats  # p(observed | its stem)
    frequency: Floats  # occurrences of the given word
    fertility: float  # mean number of links per given word
    spelling: NDArray[np.float32]

    def probability(self, observed_stems: int, own: Floats | float = 0.0) -> Floats:
        """Return p(observed | given) for each pair.

        observed_stems: number of distinct stems of observed words.
        own: expected counts to subtract.
        """
        stem, given = self.stem - own, self.given - own
        backoff = (self.stems - own + _SMOOTHING) / (stem + _SMOOTHING * observed_stems) * self.observed
        by_stem = (self.stem_pair - own + _STEM_PRIOR * backoff) / (stem + _STEM_PRIOR)
        by_ending = (self.ending_pair - own + _STEM_PRIOR * backoff) / (self.ending - own + _STEM_PRIOR)
        prior = ((1 - _ENDING) * by_stem + _ENDING * by_ending) * self.spelling
        fertility = (given / self.fertility + _FERTILITY_PRIOR) / (self.frequency + _FERTILITY_PRIOR)
        return (self.pair - own + _PRIOR * prior) / (given + _PRIOR) * fertility**_FERTILITY


class _Table:
    """Sums of counts by key. index: for each word pair, the index of its key in `keys`."""

    def __init__(self, keys: Integers) -> None:
        self.keys, index = np.unique(keys, return_inverse=True)
        self.index = index.astype(np.int32)
        self.sums = np.zeros(len(self.keys))

    def find(self, keys: Integers) -> Floats:
        """Return the sum for each of the given keys; 0 for keys that are not in the table."""
        return find(self.keys, self.sums, keys)


class Lexicon:
    """Expected link counts of word pairs, and the translation probabilities that follow from them.

    pairs: the word pairs in the training text. frequencies: how often each source and target word
        occurs in it.
    """

    def __init__(self, pairs: WordPairs, frequencies: tuple[Integers, Integers]) -> None:
        self.pairs, self.frequencies = pairs, frequencies
        self.counts = np.zeros(len(pairs))
        self._stem_pairs = [_Table(_stem_pair_keys(pairs, pairs.words, i)) for i in (0, 1)]
        self._ending_pairs = [_Table(_ending_pair_keys(pairs, pairs.words, i)) for i in (0, 1)]
        self._stems = _Table(_stem_keys(pairs, pairs.words))
        self._given: list[Floats] = []
        self._given_stems: list[Floats] = []
        self._given_endings: list[Floats] = []
        self._fertility = [1.0, 1.0]

    def update(self, counts: Floats) -> None:
        """Set the expected number of links for each word pair."""
        self.counts = counts
        words, numbers = self.pairs.words, self.pairs.numbers
        self._given = [sums(numbers[i], counts, len(words[i])) for i in (0, 1)]
        self._given_stems = [sums(words[i].stems, self._given[i], words[i].stem_count) for i in (0, 1)]
        self._given_endings = [sums(words[i].endings, self._given[i], words[i].ending_count) for i in (0, 1)]
        self._fertility = [
            max(float(counts.sum()), _MIN_LINKS) / max(int(frequencies.sum()), 1)
            for frequencies in self.frequencies
        ]
        for table in (*self._stem_pairs, *self._ending_pairs, self._stems):
            table.sums = sums(table.index, counts, len(table.keys))

    def probabilities(self, direction: int) -> Floats:
        """Return p(observed | given) for each word pair in the training text."""
        if not self._given:  # before the first update, only the spelling is known
            return self.pairs.spelling / len(self.pairs.words[1 - direction])
        return self._probability(direction, self.statistics(direction, slice(None)))

    def leave_out(self, direction: int, at: Integers, own: Floats) -> Floats:
        """Return p(observed | given) for word pairs after subtracting `own` from their expected counts.

        at: indices of word pairs in the training text.
        """
        return self._probability(direction, self.statistics(direction, at), own)

    def statistics(self, direction: int, at: "Integers | slice") -> _Statistics:
        """Return the statistics of word pairs in the training text."""
        words, stem_pairs = self.pairs.words, self._stem_pairs[direction]
        ending_pairs = self._ending_pairs[direction]
        given, observed = self.pairs.numbers[direction][at], self.pairs.numbers[1 - direction][at]
        return _Statistics(
            self.counts[at],
            self._given[direction][given],
            stem_pairs.sums[stem_pairs.index[at]],
            self._given_stems[direction][words[direction].stems[given]],
            self._stems.sums[self._stems.index[at]],
            ending_pairs.sums[ending_pairs.index[at]],
            self._given_endings[direction][words[direction].endings[given]],
            self._share_of_stem(1 - direction, words[1 - direction])[observed],
            self.frequencies[direction][given].astype(np.float64),
            self._fertility[direction],
            self.pairs.spelling[at],
        )

    def lookup(self, direction: int, pairs: WordPairs) -> Floats:
        """Return p(observed | given) for other word pairs, whose vocabularies extend the lexicon's."""
        words, given, observed = pairs.words, pairs.numbers[direction], pairs.numbers[1 - direction]
        stems, endings = words[direction].stems[given], words[direction].endings[given]
        statistics = _Statistics(
            find(self.pairs.keys, self.counts, _pair_keys(pairs, self.pairs.words)),
            _at(self._given[direction], given),
            self._stem_pairs[direction].find(_stem_pair_keys(pairs, self.pairs.words, direction)),
            _at(self._given_stems[direction], stems),
            self._stems.find(_stem_keys(pairs, self.pairs.words)),
            self._ending_pairs[direction].find(_ending_pair_keys(pairs, self.pairs.words, direction)),
            _at(self._given_endings[direction], endings),
            self._share_of_stem(1 - direction, words[1 - direction])[observed],
            _at(self.frequencies[direction], given).astype(np.float64),
            self._fertility[direction],
            pairs.spelling,
        )
        return self._probability(direction, statistics)

    def _probability(self, direction: int, statistics: _Statistics, own: Floats | float = 0.0) -> Floats:
        return statistics.probability(self.pairs.words[1 - direction].stem_count, own)

    def _share_of_stem(self, side: int, vocabulary: Vocabulary) -> Floats:
        """Return p(word | its stem) for each word in a vocabulary that extends the trained one."""
        frequencies = np.full(len(vocabulary), _UNKNOWN)
        frequencies[: len(self.frequencies[side])] += self.frequencies[side]
        return frequencies / sums(vocabulary.stems, frequencies)[vocabulary.stems]


def _pair_keys(pairs: WordPairs, trained: Vocabularies) -> Integers:
    """Return the keys of word pairs in the trained vocabularies; -1 if unknown."""
    return _combine(*pairs.numbers, len(trained[0]), len(trained[1]))


def _stem_pair_keys(pairs: WordPairs, trained: Vocabularies, direction: int) -> Integers:
    """Return keys that identify the given word's stem and the observed word; -1 if unknown."""
    stems = pairs.words[direction].stems[pairs.numbers[direction]]
    sizes = trained[direction].stem_count, len(trained[1 - direction])
    return _combine(stems, pairs.numbers[1 - direction], *sizes)


def _ending_pair_keys(pairs: WordPairs, trained: Vocabularies, direction: int) -> Integers:
    """Return keys that identify the given word's ending and the observed word; -1 if unknown."""
    endings = pairs.words[direction].endings[pairs.numbers[direction]]
    sizes = trained[direction].ending_count, len(trained[1 - direction])
    return _combine(endings, pairs.numbers[1 - direction], *sizes)


def _stem_keys(pairs: WordPairs, trained: Vocabularies) -> Integers:
    """Return keys that identify the stems of the source and target words; -1 if unknown."""
    source, target = (pairs.words[i].stems[pairs.numbers[i]] for i in (0, 1))
    return _combine(source, target, trained[0].stem_count, trained[1].stem_count)


def _combine(first: Integers, second: Integers, first_size: int, second_size: int) -> Integers:
    known = (first < first_size) & (second < second_size)
    return np.where(known, first.astype(np.int64) * second_size + second, -1)


def find(keys: Integers, values: Floats, wanted: Integers) -> Floats:
    """Return the values of the wanted keys in sorted `keys`; 0 for keys that do not exist."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0.0)


def _at(values: NDArray[Any], index: Integers) -> NDArray[Any]:
    """Return the values at each index; 0 beyond the end."""
    return np.where(index < len(values), values[np.minimum(index, len(values) - 1)], 0.0)
