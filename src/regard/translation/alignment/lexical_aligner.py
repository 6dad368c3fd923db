"""Word links without any model: a lexicon and a Markov chain, learned from the sentence pairs themselves.

Each observed word is written by one given word, or by none; the next one probably by a word nearby:

    p(observed, a | given) = Π_j p(a_j | a_{j−1}) p(observed_j | given_{a_j})       Vogel et al. 1996

After IBM model 1, for which all places are equal (Brown et al. 1993). Both directions are learned together,
by EM: a link counts as much as the product of what they think of it (Liang, Taskar and Klein 2006), so that
they come to agree. Rare words lean on others that begin with the same letters (Fraser and Marcu 2005).
"""

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard._util.checks import check_int
from regard.errors import ArgumentError
from regard.translation.data.links import Links, SymmetrizationMethod, reverse_links, symmetrize

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]

# Chosen on the Greek-English gold links of the books 40 to 44.
_STILL, _MOVING = 2, 4  # rounds of EM: more of them make rare words take up what is left over
_STEM = 5  # letters
_PRIOR = 16.0  # what the words of the same stem count beside a word's own links
_SMOOTH = 1e-3  # added to each count
_NONE = 0.1  # the share of words that no word wrote
_UNSEEN = 1e-6  # the probability of two words that never met
_CELLS = 1 << 20  # in a batch


class LexicalAligner:
    """Confident word links, found in the text alone: a baseline, and what a model's heads are judged by.

    `LexicalAligner.learn` makes them of pairs of sentences; nobody calls the constructor.

    All pairs are held as numbers: about 100 bytes for each pair of words that meet in a sentence pair.

    >>> from regard.translation.alignment.lexical_aligner import LexicalAligner
    >>> pairs = [("ein Hund", "a dog"), ("ein Haus", "a house"), ("Hund und Haus", "dog and house")]
    >>> anchors = LexicalAligner.learn(pairs)
    >>> [sorted(links) for links in anchors.links([("Haus ein", "a house")])]
    [[(0, 1), (1, 0)]]
    """

    def __init__(self, words: tuple["_Words", "_Words"], keys: Numbers, sides: list["_Side"]) -> None:
        self._words, self._keys, self._sides = words, keys, sides

    @classmethod
    def learn(
        cls, pairs: Sequence[tuple[str, str]], *, still: int = _STILL, moving: int = _MOVING
    ) -> "LexicalAligner":
        """Learn from pairs of sentences, whose words stand between white space.

        still, moving: rounds of learning, without and with regard to where words stand.
        """
        check_int("Anchors.learn got still", still, min=1)
        check_int("Anchors.learn got moving", moving)
        words = _Words(source for source, _ in pairs), _Words(target for _, target in pairs)
        corpus = _Corpus(words, pairs)
        if not corpus.size:
            raise ArgumentError(
                f"there are no words to link in {len(pairs)} sentence pairs; give pairs that have words on "
                "both sides."
            )
        keys, key_of = np.unique(corpus.keys(), return_inverse=True)
        both = keys // len(words[1]), keys % len(words[1])  # source and target word of each
        sides = [_Side.first(len(keys), len(observed), corpus.longest) for observed in reversed(words)]
        for step in range(still + moving):
            seen = [
                corpus.expect(direction, side, side.lexicon[key_of], moving=step >= still)
                for direction, side in enumerate(sides)
            ]
            counts = _sums(key_of, seen[0].weights * seen[1].weights, len(keys))
            sides = [
                _Side.fit(_lexicon(counts, both[i], words[i], both[1 - i], len(words[1 - i])), seen[i])
                for i in (0, 1)
            ]
        return cls(words, keys, sides)

    def links(
        self, pairs: Sequence[tuple[str, str]], how: SymmetrizationMethod = "intersection"
    ) -> list[Links]:
        """The links of each pair, of both directions together; the intersection has few wrong ones."""
        forward, backward = self._soft(pairs)
        return [
            symmetrize(_best(first), reverse_links(_best(second.T)), how)
            for first, second in zip(forward, backward, strict=True)
        ]

    def _soft(self, pairs: Sequence[tuple[str, str]]) -> list[list[Floats]]:
        """Of each direction and pair: target words × source words."""
        corpus = _Corpus(self._words, pairs)
        keys = corpus.keys()
        at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        met = self._keys[at] == keys
        return [
            corpus.split(corpus.expect(direction, side, np.where(met, side.lexicon[at], _UNSEEN)).weights)
            for direction, side in enumerate(self._sides)
        ]


def _best(weights: Floats) -> Links:
    """The given word of each observed one, of (observed × given), unless none is more probable than any."""
    if not weights.size:
        return frozenset()
    best, linked = weights.argmax(1), weights.max(1) > 1 - weights.sum(1)
    return frozenset((int(best[row]), int(row)) for row in np.nonzero(linked)[0])


class _Words:
    """The different words of one side, without regard to case and accents."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.numbers: dict[str, int] = {}
        for text in texts:
            for word in text.split():
                self.numbers.setdefault(_plain(word), len(self.numbers))
        stems: dict[str, int] = {}
        self.stems = np.array([stems.setdefault(w[:_STEM], len(stems)) for w in self.numbers], dtype=np.int64)

    def __len__(self) -> int:
        """One more than there are, for all that are unknown."""
        return len(self.numbers) + 1

    def read(self, text: str) -> list[int]:
        unknown = len(self.numbers)
        return [self.numbers.get(_plain(word), unknown) for word in text.split()]


class _Side(NamedTuple):
    """What one direction has learned: p(observed | given) by key, p(observed | none) by word, and moves."""

    lexicon: Floats
    none: Floats
    moves: Floats

    @classmethod
    def first(cls, keys: int, observed: int, longest: int) -> "_Side":
        moves = 2 * longest - 1  # from the last word to the first, …, from the first to the last
        return cls(np.full(keys, 1 / observed), np.full(observed, 1 / observed), np.full(moves, 1 / moves))

    @classmethod
    def fit(cls, lexicon: Floats, seen: "_Seen") -> "_Side":
        none, moves = seen.none + _UNSEEN, seen.moves + 1
        return cls(lexicon, none / none.sum(), moves / moves.sum())


class _Seen(NamedTuple):
    """What one direction makes of a corpus: the probability of each cell, of none by word, and moves."""

    weights: Floats
    none: Floats
    moves: Floats


class _Corpus:
    """Sentence pairs as numbers. Each has a cell for each target and source word, row after row."""

    def __init__(self, words: tuple[_Words, _Words], pairs: Sequence[tuple[str, str]]) -> None:
        self.kinds = len(words[1])
        sides = [[vocabulary.read(pair[i]) for pair in pairs] for i, vocabulary in enumerate(words)]
        self.words = [np.array([word for text in side for word in text], dtype=np.int64) for side in sides]
        self.lengths = [np.array([len(text) for text in side], dtype=np.int64) for side in sides]
        self.sizes = self.lengths[0] * self.lengths[1]
        self.size = int(self.sizes.sum())
        self.longest = max((int(lengths.max(initial=1)) for lengths in self.lengths), default=1)

    def keys(self) -> Numbers:
        """The source and the target word of each cell, in one number."""
        place = np.arange(self.size) - np.repeat(_starts(self.sizes), self.sizes)
        row, column = np.divmod(place, np.repeat(self.lengths[0], self.sizes))
        source, target = (np.repeat(_starts(lengths), self.sizes) for lengths in self.lengths)
        return self.words[0][source + column] * self.kinds + self.words[1][target + row]

    def split(self, cells: Floats) -> list[Floats]:
        """Of each pair: target words × source words."""
        parts = np.split(cells, np.cumsum(self.sizes)[:-1]) if len(self.sizes) else []
        shapes = zip(self.lengths[1], self.lengths[0], strict=True)
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def expect(self, direction: int, side: _Side, lexicon: Floats, *, moving: bool = True) -> _Seen:
        """What one direction makes of it: 0 if source words are given, 1 if target words are.

        lexicon: p(observed | given) of each cell.
        """
        weights = np.zeros(self.size + 1)  # and one for what is no cell
        cells, none = np.append(lexicon, 0.0) * (1 - _NONE), np.append(side.none * _NONE, 1.0)
        nobody, moves = np.zeros_like(none), np.zeros_like(side.moves)
        for some in _batches(self.lengths[direction], self.lengths[1 - direction]):
            at, words = self._places(direction, some, otherwise=len(side.none))
            place = np.arange(at.shape[-1])
            move = place - place[:, None] + len(moves) // 2  # from, to
            move = np.clip(move, 0, len(moves) - 1)  # in sentences longer than those it learned from
            chance = side.moves[move] if moving else np.ones(move.shape)
            seen, made = _forward_backward(cells[at], none[words], chance / chance.sum(1, keepdims=True))
            weights[at] = seen
            nobody += _sums(words.ravel(), 1 - seen.sum(-1).ravel(), len(nobody))
            moves += _sums(move.ravel(), made.ravel(), len(moves))
        return _Seen(weights[:-1], nobody[:-1], moves)

    def _places(self, direction: int, some: Numbers, otherwise: int) -> tuple[Numbers, Numbers]:
        """The cells (n, b, l) of n observed and l given words of some pairs, and the observed words (n, b).

        Where a sentence has ended, the cell after the last one, and `otherwise` for a word.
        """
        given, observed = self.lengths[direction][some], self.lengths[1 - direction][some]
        row = np.arange(observed.max())[:, None]
        ended = row >= observed
        word = np.where(ended, 0, _starts(self.lengths[1 - direction])[some] + row)
        words = np.where(ended, otherwise, self.words[1 - direction][word])
        # from source word to source word it is one cell, from target word to target word a whole row
        one, line = np.ones(len(some), dtype=np.int64), self.lengths[0][some]
        down, along = (line, one) if direction == 0 else (one, line)
        cells = (_starts(self.sizes)[some] + row * down)[..., None] + along[:, None] * np.arange(given[0])
        return np.where(ended[..., None], self.size, cells), words


def _forward_backward(cells: Floats, none: Floats, moves: Floats) -> tuple[Floats, Floats]:
    """The probability that each given word wrote each observed one, and how often each move was made.

    cells (n, b, l), none (n, b): p(observed | given) and p(observed | none), times how likely the case is;
    where a sentence has ended, 0 and 1. moves (l, l): from, to. A word that none wrote leaves the place as it
    is. Rabiner 1989, section III, with his scaling.
    """
    n, b, length = cells.shape
    place, wrote = np.empty((n + 1, b, length)), np.empty_like(cells)
    scale = np.empty((n, b, 1))
    place[0] = 1 / length
    for j in range(n):
        wrote[j] = (place[j] @ moves) * cells[j]
        place[j + 1] = wrote[j] + place[j] * none[j][:, None]
        scale[j] = place[j + 1].sum(-1, keepdims=True)
        wrote[j] /= scale[j]
        place[j + 1] /= scale[j]
    later, moved = np.ones((b, length)), np.zeros_like(moves)
    for j in reversed(range(n)):
        wrote[j] *= later
        ahead = cells[j] * later / scale[j]
        moved += moves * (place[j].T @ ahead)
        later = ahead @ moves.T + none[j][:, None] * later / scale[j]
    return wrote, moved


def _lexicon(counts: Floats, given: Numbers, words: _Words, observed: Numbers, kinds: int) -> Floats:
    """p(observed | given) of each key, with a prior: p(observed | a word with the stem of the given one)."""
    stems = words.stems[given]
    _, pair = np.unique(stems * kinds + observed, return_inverse=True)
    prior = _sums(pair, counts)[pair] + _SMOOTH
    prior /= _sums(stems, counts)[stems] + _SMOOTH * kinds
    return (counts + _PRIOR * prior) / (_sums(given, counts)[given] + _PRIOR)


def _batches(given: Numbers, observed: Numbers) -> Iterator[Numbers]:
    """Sentence pairs with equally many given words and about as many observed ones."""
    order = np.lexsort((observed, given))
    order = order[(given[order] > 0) & (observed[order] > 0)]
    edges = np.nonzero(np.diff(given[order]))[0] + 1
    for same in np.split(order, edges):
        if len(same):
            # shortest first, so that the last one says how large a batch is
            size = max(1, _CELLS // int(given[same[0]] * observed[same[-1]]))
            yield from (same[i : i + size] for i in range(0, len(same), size))


def _sums(at: Numbers, parts: Floats, size: int = 0) -> Floats:
    return np.bincount(at, parts, size).astype(np.float64, copy=False)


def _starts(lengths: Numbers) -> Numbers:
    return np.cumsum(lengths) - lengths


@lru_cache(1 << 16)
def _plain(word: str) -> str:
    """Without accents, in lower case."""
    letters = unicodedata.normalize("NFD", word)
    return "".join(letter for letter in letters if not unicodedata.combining(letter)).lower()
