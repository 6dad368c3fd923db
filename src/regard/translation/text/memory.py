"""Translation memory: the training pairs that are most similar to a text (fuzzy matches)."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard._util.checks import check_int
from regard.errors import ArgumentError
from regard.translation.data.encoded import EncodedCorpus
from regard.translation.model_folder import IDS
from regard.translation.tokens import TokenizerPair

_CANDIDATES = 64  # maximum number of pairs to compare word by word
_MAX_WORDS = 400  # longer texts are truncated before comparison


class Match(NamedTuple):
    """A training pair and its similarity to a text: 1 − word edit distance / words in the longer text.

    >>> from regard.translation.text.memory import Match
    >>> Match("ein Hund", "a dog", 0.5).similarity
    0.5
    """

    source: str
    target: str
    similarity: float


class TranslationMemory:
    """Training pairs with an inverted index of their source tokens.

    tokens, corpus: the vocabularies, and the training pairs as token ids.

    >>> import tempfile
    >>> from regard.translation import EncodedCorpus, Tokenizer, TokenizerPair
    >>> from regard.translation.text.memory import TranslationMemory
    >>> lines = ["ein Hund bellt", "zwei Hunde", "eine Katze schläft"]
    >>> tokenizer = Tokenizer.learn(lines * 5, kind="characters")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pairs = [(tokenizer.encode(line), tokenizer.encode(line)) for line in lines]
    ...     corpus = EncodedCorpus.write(f"{folder}/x.ids", pairs, vocabulary=len(tokenizer))
    ...     memory = TranslationMemory(TokenizerPair(tokenizer, tokenizer), corpus)
    ...     match = memory.matches("ein Hund schläft", 1)[0]
    >>> match.source, round(match.similarity, 2)
    ('ein Hund bellt', 0.67)
    """

    def __init__(self, tokens: TokenizerPair, corpus: EncodedCorpus) -> None:
        self._tokens, self._corpus = tokens, corpus
        sizes = corpus.sizes[:, 0]
        sentences = np.repeat(np.arange(len(corpus), dtype=np.int64), sizes)
        ids = _source_ids(corpus)
        order = np.argsort(ids, kind="stable")
        self._postings = sentences[order]
        self._starts = np.searchsorted(ids[order], np.arange(len(tokens.source) + 1))
        self._sizes = sizes

    @classmethod
    def open(cls, folder: str | os.PathLike[str], tokens: TokenizerPair) -> "TranslationMemory":
        """Open the training pairs in a model folder."""
        if not (Path(folder) / IDS).exists():
            raise missing_pairs(repr(os.fspath(folder)))
        return cls(tokens, EncodedCorpus(Path(folder) / IDS))

    def __len__(self) -> int:
        return len(self._corpus)

    def matches(self, text: str, n: int = 3) -> list[Match]:
        """Return up to n pairs, most similar first; pairs without a common word are omitted."""
        check_int("matches got n", n, min=1)
        words = text.split()[:_MAX_WORDS]
        candidates = self._candidates(self._tokens.source.encode(text), max(_CANDIDATES, 4 * n))
        similarities: dict[tuple[str, str], float] = {}
        for index in candidates.tolist():
            pair = self._corpus[index]
            source, target = (
                side.decode(ids.tolist()).text for side, ids in zip(self._tokens, pair, strict=True)
            )
            similarities[source, target] = _similarity(words, source.split()[:_MAX_WORDS])
        ranked = sorted(similarities.items(), key=lambda item: -item[1])[:n]
        return [Match(*pair, similarity) for pair, similarity in ranked if similarity > 0]

    def _candidates(self, ids: Sequence[int], count: int) -> NDArray[np.int64]:
        """Return the pairs that share the most tokens with a text; rare tokens count more."""
        score = np.zeros(len(self._corpus))
        for token in set(ids):
            first, stop = self._starts[token], self._starts[token + 1]
            if stop > first:
                rarity = np.log(1 + len(self._corpus) / (stop - first))
                score[np.unique(self._postings[first:stop])] += rarity
        score /= np.sqrt(self._sizes + 1.0)  # a long sentence shares more tokens by chance
        best = np.argpartition(-score, min(count, len(score) - 1))[:count]
        return best[score[best] > 0]


def _source_ids(corpus: EncodedCorpus) -> NDArray[np.int64]:
    return np.concatenate([pair.source for pair in corpus]).astype(np.int64)


def missing_pairs(owner: str = "This translator") -> ArgumentError:
    """Return the error for a translator or a folder without training pairs.

    >>> from regard.translation.text.memory import missing_pairs
    >>> print(missing_pairs())
    This translator has no training pairs to search (...). Use the folder in which the model was trained.
    """
    return ArgumentError(
        f"{owner} has no training pairs to search ({IDS}). Use the folder in which the model was trained."
    )


def _similarity(first: Sequence[str], second: Sequence[str]) -> float:
    """Return 1 − edit distance / length of the longer text, in words."""
    row = list(range(len(second) + 1))
    for i, word in enumerate(first, 1):
        previous, row[0] = row[0], i
        for j, other in enumerate(second, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (word != other))
    return 1 - row[-1] / max(len(first), len(second), 1)
