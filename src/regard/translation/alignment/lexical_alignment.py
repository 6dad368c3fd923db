"""Word alignments produced by the lexical aligner, with scores."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from regard.translation.alignment.links import (
    Links,
    SymmetrizationMethod,
    check_threshold,
    reverse_links,
    symmetrize,
    to_pharaoh,
)
from regard.translation.alignment.vocabulary import Floats

DECIMALS = 4  # decimal places of scores in JSON


@dataclass(frozen=True, eq=False)  # == on arrays returns an array
class LexicalAlignment:
    """Word alignment of a sentence pair, as returned by `LexicalAligner.align`.

    source_words, target_words: the words of both sentences, in order.
    forward: (target words, source words); the probability that a source word generated a target word. Each
        row sums to at most 1; the remainder is the probability of no link.
    backward: the probability that a target word generated a source word; each column sums to at most 1.
    score: log probability per word, averaged over both directions. It is low for pairs that are not
        translations of each other.

    >>> from regard.translation import LexicalAligner
    >>> pairs = [("ein Hund", "a dog"), ("ein Haus", "a house"), ("Hund und Haus", "dog and house")]
    >>> (alignment,) = LexicalAligner.learn(pairs).align([("Haus ein", "a house")])
    >>> alignment
    LexicalAlignment(2 source × 2 target words: 0-1 1-0)
    >>> sorted(alignment.links("intersection"))
    [(0, 1), (1, 0)]
    """

    source_words: tuple[str, ...]
    target_words: tuple[str, ...]
    forward: Floats
    backward: Floats
    score: float

    @cached_property
    def weights(self) -> Floats:
        """Score of each link (target words, source words): the geometric mean of both directions."""
        return np.sqrt(self.forward * self.backward)

    def links(
        self, method: SymmetrizationMethod = "grow-diag-final-and", threshold: float | None = None
    ) -> Links:
        """Return (source word, target word) links.

        method: how to combine the best links of both directions; see `symmetrize`.
        threshold: if given, return all links with at least this score instead.
        """
        check_threshold(threshold)
        if threshold is not None:
            rows, columns = np.nonzero(self.weights >= threshold)
            return frozenset(zip(columns.tolist(), rows.tolist(), strict=True))
        return symmetrize(*self.best_links(), method)

    def best_links(self) -> tuple[Links, Links]:
        """Return the best link, if any, of each target word and of each source word."""
        return _best_links(self.forward), reverse_links(_best_links(self.backward.T))

    def to_dict(self, links: Links | None = None) -> dict[str, Any]:
        """Return JSON-serializable values: words, links with their scores, the pair's score and all weights.

        links: the links to include. Default: `links()`.
        """
        links = self.links() if links is None else links
        return {
            "source_words": list(self.source_words),
            "target_words": list(self.target_words),
            "links": to_pharaoh(links),
            "link_scores": [
                round(float(self.weights[target, source]), DECIMALS) for source, target in sorted(links)
            ],
            "score": round(self.score, DECIMALS),
            "weights": self.weights.round(DECIMALS).tolist(),
        }

    def __repr__(self) -> str:
        sizes = f"{len(self.source_words)} source × {len(self.target_words)} target words"
        return f"LexicalAlignment({sizes}: {to_pharaoh(self.links()) or 'no links'})"


def _best_links(posteriors: Floats) -> Links:
    """Link each observed word (row) to its best given word, unless null is more probable."""
    if not posteriors.size:
        return frozenset()
    best, linked = posteriors.argmax(1), posteriors.max(1) > 1 - posteriors.sum(1)
    return frozenset((int(best[row]), int(row)) for row in np.nonzero(linked)[0])
