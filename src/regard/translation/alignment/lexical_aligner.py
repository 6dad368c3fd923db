"""Word alignment without a neural model: a lexicon and an HMM, trained on the sentence pairs themselves.

EM starts with IBM model 1, which ignores positions (Brown et al. 1993), and continues with a hidden Markov
model (`hmm.py`). Both directions are trained jointly: each link is weighted by the agreement of its two
posteriors (Liang, Taskar and Klein 2006), so the two directions converge to the same links. Each link's own
contribution to the counts is subtracted before its probability is recomputed, as in collapsed variational
inference (Asuncion et al. 2009). Rare words share statistics with words that have the same stem or ending,
words with similar spelling are more likely to be linked, and words that are often unlinked less likely
(`lexicon.py`).
"""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard._util.checks import check_int
from regard._util.text import pluralize, shorten
from regard.errors import ArgumentError
from regard.translation.alignment.hmm import EncodedPairs, Expectation, sums
from regard.translation.alignment.lexical_alignment import LexicalAlignment
from regard.translation.alignment.lexicon import Lexicon, WordPairs
from regard.translation.alignment.links import Links, SymmetrizationMethod
from regard.translation.alignment.vocabulary import Floats, Integers, Vocabulary
from regard.translation.data.pairs import check_pair, check_pairs

# Tuned on the Greek-English gold links for books 40 to 44.
_IBM1_ITERATIONS, _HMM_ITERATIONS = 1, 4  # with more iterations, rare words attract unrelated words
_NORMALIZED_WEIGHT = 0.2  # of the normalized product in `_agreement`; 0.15 to 0.5 give similar error rates
_MIN_DIVISOR = 1e-6  # in `_agreement`; avoids 0 / 0 if one direction is certain and the other excludes a link
_MIN_SCORE = 0.96  # of links in the intersection; chosen on the gold sets, excluding Greek books 45 to 66
_UNSEEN = 1e-6  # added to the expected null count of each word
_NEGLIGIBLE = 0.02  # fraction of a word pair's count below which a cell's own count is not subtracted
_MIN_COUNT = 1e-6  # word pairs with a lower expected count are dropped after training
_CHUNK_CELLS = 1 << 22  # maximum number of cells (source words × target words) in memory
_MAX_WORDS = 5_000  # per sentence; the table of jumps between its words needs about 1 GB

Progress = Callable[[int, int], None]


class LexicalAligner:
    """Word aligner without a neural model, trained on the sentence pairs to align.

    Create an aligner with `LexicalAligner.learn` or `LexicalAligner.load`. Learning needs about 12 bytes of
    memory per cell (source words × target words, summed over sentence pairs) and 140 bytes per distinct
    word pair.

    >>> from regard.translation import LexicalAligner
    >>> pairs = [("ein Hund", "a dog"), ("ein Haus", "a house"), ("Hund und Haus", "dog and house")]
    >>> aligner = LexicalAligner.learn(pairs)
    >>> [sorted(links) for links in aligner.links([("Haus ein", "a house")], "union")]
    [[(0, 1), (1, 0)]]
    """

    def __init__(self, lexicon: Lexicon, null: Sequence[Floats], jumps: Sequence[Floats]) -> None:
        self.lexicon, self.null, self.jumps = lexicon, tuple(null), tuple(jumps)

    @classmethod
    def learn(
        cls,
        pairs: Sequence[tuple[str, str]],
        *,
        ibm1_iterations: int = _IBM1_ITERATIONS,
        hmm_iterations: int = _HMM_ITERATIONS,
        progress: Progress | None = None,
    ) -> "LexicalAligner":
        """Train on sentence pairs whose words are separated by whitespace.

        ibm1_iterations, hmm_iterations: EM iterations without and with word positions.
        progress: called with the number of completed steps and the total number of steps.
        """
        check_int("LexicalAligner.learn got ibm1_iterations", ibm1_iterations, min=1)
        check_int("LexicalAligner.learn got hmm_iterations", hmm_iterations)
        pairs = [check_pair(pair, i) for i, pair in enumerate(check_pairs(pairs))]
        words = (
            Vocabulary([]).extend(source for source, _ in pairs),
            Vocabulary([]).extend(target for _, target in pairs),
        )
        corpora = [EncodedPairs(words, part) for part in _chunks(pairs)]
        if not any(corpus.size for corpus in corpora):
            raise ArgumentError(
                f"Got {pluralize(len(pairs), 'sentence pair')}; at least one must have words on both sides."
            )
        parts, keys = _index_keys(corpora)
        frequencies = (_frequencies(corpora, 0, len(words[0])), _frequencies(corpora, 1, len(words[1])))
        trainer = _Trainer(Lexicon(WordPairs(words, keys), frequencies), parts)
        steps = [False] * ibm1_iterations + [True] * hmm_iterations
        for iteration, hmm in enumerate(steps):
            for done in trainer.run_iteration(hmm=hmm):
                if progress is not None:
                    progress(iteration * len(parts) + done, len(steps) * len(parts))
        return trainer.finish()

    def align(self, pairs: Sequence[tuple[str, str]]) -> list[LexicalAlignment]:
        """Align sentence pairs, which may contain words that were not in the training text.

        >>> from regard.translation import LexicalAligner
        >>> aligner = LexicalAligner.learn([("ein Hund", "a dog"), ("ein Haus", "a house")] * 3)
        >>> [alignment.to_dict()["links"] for alignment in aligner.align([("Haus", "house"), ("", "")])]
        ['0-0', '']
        """
        pairs = [check_pair(pair, i) for i, pair in enumerate(check_pairs(pairs))]
        return [alignment for part in _chunks(pairs) for alignment in self._align(part)]

    def links(
        self, pairs: Sequence[tuple[str, str]], method: SymmetrizationMethod = "intersection"
    ) -> list[Links]:
        """Return the links of each pair, combined from both directions; see `LexicalAlignment.links`."""
        return [alignment.links(method) for alignment in self.align(pairs)]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the aligner to a .safetensors file atomically.

        >>> import tempfile
        >>> from regard.translation import LexicalAligner
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     aligner = LexicalAligner.learn([("ein Hund", "a dog"), ("ein Haus", "a house")] * 3)
        ...     aligner.save(f"{folder}/de-en.aligner")
        ...     print(LexicalAligner.load(f"{folder}/de-en.aligner").links([("Haus", "house")]))
        [frozenset({(0, 0)})]
        """
        from regard.translation.alignment.aligner_file import write_aligner

        write_aligner(path, self)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "LexicalAligner":
        """Read a file written by `save`; raise if it is corrupted or has another format or version."""
        from regard.translation.alignment.aligner_file import read_aligner

        return read_aligner(path)

    def count_known(self, texts: Sequence[str], side: int) -> tuple[int, int]:
        """Count the known words and all words in source texts (side 0) or target texts (side 1)."""
        known = self.lexicon.pairs.words[side]
        extended = known.extend(texts)
        numbers = [number for text in texts for number in extended.encode(text)]
        return sum(number < len(known) for number in numbers), len(numbers)

    def _align(self, pairs: Sequence[tuple[str, str]]) -> list[LexicalAlignment]:
        trained = self.lexicon.pairs.words
        words = (
            trained[0].extend(source for source, _ in pairs),
            trained[1].extend(target for _, target in pairs),
        )
        corpus = EncodedPairs(words, pairs)
        keys, key_of = np.unique(corpus.keys(), return_inverse=True)
        word_pairs = WordPairs(words, keys)
        expected = [
            corpus.expect(
                direction,
                self.lexicon.lookup(direction, word_pairs)[key_of],
                _extend(self.null[direction], len(words[1 - direction])),
                self.jumps[direction],
            )
            for direction in (0, 1)
        ]
        scores = _sentence_scores(corpus, expected)
        forward, backward = (corpus.split(expectation.posteriors) for expectation in expected)
        return [
            LexicalAlignment(
                tuple(source.split()), tuple(target.split()), first, second, float(score), _MIN_SCORE
            )
            for (source, target), first, second, score in zip(pairs, forward, backward, scores, strict=True)
        ]


class _Part(NamedTuple):
    """A part of the training text. keys: indices of its word pairs. key_of: each cell's index into `keys`."""

    corpus: EncodedPairs
    keys: Integers
    key_of: NDArray[np.int32]


class _Trainer:
    """Expectation maximization: computes expected counts and updates the parameters."""

    def __init__(self, lexicon: Lexicon, parts: Sequence[_Part]) -> None:
        self.lexicon, self.parts = lexicon, parts
        self._own: list[NDArray[np.float32]] = []  # each cell's contribution to the counts, by part
        sizes = [len(vocabulary) for vocabulary in reversed(lexicon.pairs.words)]  # observed words
        jumps = 2 * max(part.corpus.longest for part in parts) - 1
        self.null, self.jumps = [np.full(n, 1 / n) for n in sizes], [np.full(jumps, 1 / jumps)] * 2

    def run_iteration(self, *, hmm: bool) -> Iterator[int]:
        """Run one EM iteration. After each part, yield the number of completed parts."""
        lexicons = [self.lexicon.probabilities(direction) for direction in (0, 1)]
        counts = np.zeros(len(self.lexicon.pairs))
        null, jumps = [np.zeros_like(n) for n in self.null], [np.zeros_like(n) for n in self.jumps]
        previous, self._own = self._own, []
        for done, (corpus, keys, key_of) in enumerate(self.parts, 1):
            cells = [lexicon[keys][key_of] for lexicon in lexicons]
            if previous:
                self._leave_out(cells, keys, key_of, previous[done - 1])
            expected = [corpus.expect(i, cells[i], self.null[i], self.jumps[i], hmm=hmm) for i in (0, 1)]
            agreement = _agreement(expected[0].posteriors, expected[1].posteriors)
            self._own.append(agreement.astype(np.float32))
            counts[keys] += sums(key_of, agreement, len(keys))
            for i in (0, 1):
                null[i] += expected[i].null
                jumps[i] += expected[i].jumps
            yield done
        self.lexicon.update(counts)
        self.null = [_normalize(count + _UNSEEN) for count in null]
        self.jumps = [_normalize(count + 1) for count in jumps]

    def _leave_out(
        self, cells: list[Floats], keys: Integers, key_of: NDArray[np.int32], own: NDArray[np.float32]
    ) -> None:
        """Recompute the probability of cells, excluding each cell's own count unless it is negligible.

        Without this, words that occur once or twice would reinforce links that arose by chance.
        """
        at = np.nonzero(own > _NEGLIGIBLE * self.lexicon.counts[keys][key_of])[0]
        left_out = own[at].astype(np.float64) * (1 - 1e-6)  # rounding must not make a count negative
        for direction in (0, 1):
            cells[direction][at] = self.lexicon.leave_out(direction, keys[key_of[at]], left_out)

    def finish(self) -> LexicalAligner:
        """Drop word pairs with a negligible expected count, and return the aligner."""
        kept = self.lexicon.counts >= _MIN_COUNT
        lexicon = Lexicon(self.lexicon.pairs.select(kept), self.lexicon.frequencies)
        lexicon.update(self.lexicon.counts[kept].astype(np.float32).astype(np.float64))  # as in saved files
        return LexicalAligner(lexicon, self.null, self.jumps)


def _chunks(pairs: Sequence[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Split pairs into lists with a bounded number of cells."""
    chunk: list[tuple[str, str]] = []
    cells = 0
    for source, target in pairs:
        size = _count_cells(source, target)
        if chunk and cells + size > _CHUNK_CELLS:
            yield chunk
            chunk, cells = [], 0
        chunk.append((source, target))
        cells += size
    if chunk:
        yield chunk


def _count_cells(source: str, target: str) -> int:
    """Return the size of a pair's matrix; raise if a sentence is too long for the hidden Markov model."""
    lengths = len(source.split()), len(target.split())
    if all(lengths) and max(lengths) > _MAX_WORDS:
        raise ArgumentError(
            f"The pair {shorten(source)!r} and {shorten(target)!r} has {lengths[0]:,} source and "
            f"{lengths[1]:,} target words; at most {_MAX_WORDS:,} per side are supported. Split "
            "it into sentences."
        )
    return lengths[0] * lengths[1]


def _index_keys(corpora: Sequence[EncodedPairs]) -> tuple[list[_Part], Integers]:
    """Number the distinct word pairs in all corpora."""
    local = [np.unique(corpus.keys(), return_inverse=True) for corpus in corpora]
    keys = np.unique(np.concatenate([part_keys for part_keys, _ in local]))
    return [
        _Part(corpus, np.searchsorted(keys, part_keys), key_of.astype(np.int32))
        for corpus, (part_keys, key_of) in zip(corpora, local, strict=True)
    ], keys


def _frequencies(corpora: Sequence[EncodedPairs], side: int, size: int) -> Integers:
    return np.sum([np.bincount(corpus.words[side], minlength=size) for corpus in corpora], axis=0)


def _sentence_scores(corpus: EncodedPairs, expected: Sequence[Expectation]) -> Floats:
    """Return the log probability per word of each pair, averaged over both directions; 0 for empty pairs."""
    forward, backward = expected
    source, target = (np.maximum(lengths, 1) for lengths in corpus.lengths)
    return (forward.log_probabilities / target + backward.log_probabilities / source) / 2


def _agreement(forward: Floats, backward: Floats) -> Floats:
    """Return the weight of each link in training.

    It is the product of its posteriors in both directions (Liang et al. 2006), mixed with the normalized
    product: the probability of the link if both directions agree that it is present or absent. The product
    alone gives the links of a word with several translations too little weight, because one direction
    divides its probability among them.
    """
    product = forward * backward
    normalized = product / np.maximum(product + (1 - forward) * (1 - backward), _MIN_DIVISOR)
    return (1 - _NORMALIZED_WEIGHT) * product + _NORMALIZED_WEIGHT * normalized


def _normalize(counts: Floats) -> Floats:
    return counts / counts.sum()


def _extend(null: Floats, size: int) -> Floats:
    """Give unknown words the probability of the least probable known word."""
    return np.append(null, np.full(size - len(null), null.min()))
