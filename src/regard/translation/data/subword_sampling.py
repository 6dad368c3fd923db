"""Subword regularization: in each training epoch, some words are split into different subwords.

A model that has also seen "Hund" as "H und" translates rare words better, which matters most for small
corpora (Kudo 2018). No token crosses a space, so the segmentation of each word is sampled independently.
"""

from bisect import bisect
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import exp

import numpy

from regard.translation.tokens import SPACE, SPECIAL_TOKENS, Tokenizer, TokenizerPair

_CANDIDATES = 32  # number of most probable segmentations to sample from
_ALPHA = 0.2  # candidates are sampled in proportion to probability ** alpha (Kudo 2018, section 3.3)
_MAX_CACHED = 1_000_000  # maximum number of words in the cache


class SubwordSampler:
    """Splits random words in a sentence into other subwords from a unigram vocabulary.

    rate: fraction of words whose segmentation is sampled.

    >>> import numpy
    >>> from regard.translation import Tokenizer
    >>> from regard.translation.data.subword_sampling import SubwordSampler
    >>> tokenizer = Tokenizer.learn(["ein Hund bellt", "eine Frau lacht"] * 10, size=30)
    >>> sampler, random = SubwordSampler(tokenizer, rate=0.5), numpy.random.default_rng(0)
    >>> ids = tokenizer.encode("eine Frau bellt")
    >>> samples = [sampler.sample(ids, random) for _ in range(10)]
    >>> {tokenizer.decode(sample).text for sample in samples}
    {'eine Frau bellt'}
    >>> len(set(map(tuple, samples))) > 1
    True
    """

    def __init__(self, tokenizer: Tokenizer, rate: float) -> None:
        self._tokenizer, self.rate = tokenizer, rate
        self._pieces, self._scores = zip(*tokenizer.scored_pieces(), strict=True)
        # a special token is a word of its own; the token after it starts a new word
        self._starts = [
            token < SPECIAL_TOKENS or piece.startswith(SPACE) for token, piece in enumerate(self._pieces)
        ]
        self._cache: dict[tuple[int, ...], tuple[list[list[int]], list[float]]] = {}

    @classmethod
    def create_pair(
        cls, tokens: TokenizerPair, rate: float
    ) -> "tuple[SubwordSampler, SubwordSampler] | None":
        """Create samplers for source and target (one for both if shared); return None if the rate is 0."""
        if not rate:
            return None
        source = cls(tokens.source, rate)
        return source, source if tokens.shared else cls(tokens.target, rate)

    def sample(self, ids: Sequence[int], random: numpy.random.Generator) -> list[int]:
        """Return token ids for the same text, resampling the segmentation of some words."""
        return [token for word in self.sample_words(self.words(ids), random) for token in word]

    def sample_words(self, words: Sequence[list[int]], random: numpy.random.Generator) -> list[list[int]]:
        """Resample the segmentation of some words, each given as token ids."""
        draws = random.random((len(words), 2)).tolist()
        return [
            self._sample(word, draw) if chosen < self.rate else word
            for word, (chosen, draw) in zip(words, draws, strict=True)
        ]

    def words(self, ids: Iterable[int]) -> list[list[int]]:
        """Group token ids by word; special tokens form words of their own."""
        words: list[list[int]] = []
        for token in map(int, ids):
            if not words or self._starts[token] or words[-1][-1] < SPECIAL_TOKENS:
                words.append([])
            words[-1].append(token)
        return words

    def _sample(self, word: list[int], draw: float) -> list[int]:
        key = tuple(word)
        if key not in self._cache:
            if len(self._cache) >= _MAX_CACHED:
                self._cache.clear()
            self._cache[key] = self._segmentations(word)
        candidates, cumulative = self._cache[key]
        return candidates[min(bisect(cumulative, draw * cumulative[-1]), len(candidates) - 1)]

    def _segmentations(self, word: list[int]) -> tuple[list[list[int]], list[float]]:
        """Return the most probable segmentations of a word, and their cumulative sampling weights."""
        text = "".join(self._pieces[token] for token in word)
        if min(word) < SPECIAL_TOKENS or not text.startswith(SPACE):
            return [word], [1.0]
        candidates = self._tokenizer.nbest(text.removeprefix(SPACE), _CANDIDATES)
        scores = [_ALPHA * sum(self._scores[token] for token in ids) for ids in candidates]
        return candidates, list(accumulate(exp(score - max(scores)) for score in scores))
