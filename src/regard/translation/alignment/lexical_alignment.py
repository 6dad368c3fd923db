"""Word alignments produced by the lexical aligner, with scores."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from regard._util.checks import check_number
from regard.errors import ShapeError
from regard.translation.alignment.links import (
    Links,
    SymmetrizationMethod,
    check_threshold,
    reverse_links,
    symmetrize,
    to_pharaoh,
)
from regard.translation.alignment.vocabulary import Floats

if TYPE_CHECKING:
    from regard.translation.alignment.alignment import Alignment

DECIMALS = 4  # decimal places of scores in JSON
_MODEL_WEIGHT = 0.75  # tuned on the Greek-English gold links for books 40 to 44
_MIN_PROBABILITY = 1e-6  # lower probabilities are raised to this value in geometric means
_NOISE = 1e-3  # assumed probability that a direction is wrong, however certain it is
_LIKELY = 0.5  # links with at least this score are candidates
_UNLIKELY = 2.5e-3  # links with a lower score are not, even if they are the best in a direction


@dataclass(frozen=True, eq=False)  # == on arrays returns an array
class LexicalAlignment:
    """Word alignment of a sentence pair, as returned by `LexicalAligner.align`.

    source_words, target_words: the words of both sentences, in order.
    forward: (target words, source words); the probability that a source word generated a target word. Each
        row sums to at most 1; the remainder is the probability of no link.
    backward: the probability that a target word generated a source word; each column sums to at most 1.
    score: log probability per word, averaged over both directions. It is low for pairs that are not
        translations of each other. The lexicon is not normalized: words with similar spelling, such as
        names, get additional probability, so the score of a pair can be above 0.
    min_score: the minimum score of links in the intersection.

    >>> from regard.translation import LexicalAligner
    >>> pairs = [("ein Hund", "a dog"), ("ein Haus", "a house"), ("Hund und Haus", "dog and house")]
    >>> (alignment,) = LexicalAligner.learn(pairs).align([("Haus ein", "a house")])
    >>> alignment
    LexicalAlignment(2 source × 2 target words: 0-1 1-0)
    >>> sorted(alignment.links("intersection"))  # of these, links with a high score
    [(1, 0)]
    """

    source_words: tuple[str, ...]
    target_words: tuple[str, ...]
    forward: Floats
    backward: Floats
    score: float
    min_score: float = 0.0

    @cached_property
    def weights(self) -> Floats:
        """Score of each link (target words, source words): its probability according to both directions.

        The directions count as independent evidence, so their odds are multiplied:
        score / (1 − score) = forward / (1 − forward) · backward / (1 − backward).
        A word that is linked to several words divides its probability among them in one direction. The other
        direction can be certain of each, so the product does not penalize such links as a mean would.
        """
        odds = _odds(self.forward) * _odds(self.backward)
        return odds / (1 + odds)

    def links(
        self, method: SymmetrizationMethod = "grow-diag-final-and", threshold: float | None = None
    ) -> Links:
        """Return (source word, target word) links.

        method: how to combine the links of both directions (`candidates`); see `symmetrize`. "intersection"
            leaves out links with a score below `min_score`.
        threshold: if given, return all links with at least this score instead.
        """
        check_threshold(threshold)
        if threshold is not None:
            return self._links_from(threshold)
        links = symmetrize(*self.candidates(), method)
        return links & self._links_from(self.min_score) if method == "intersection" else links

    def candidates(self) -> tuple[Links, Links]:
        """Return the links of each direction that `links` combines.

        Each set has the best links of its direction (`best_links`), except those that the other direction
        makes very unlikely, and all links that are more likely than not according to their score.
        """
        likely, possible = self._links_from(_LIKELY), self._links_from(_UNLIKELY)
        forward, backward = ((best & possible) | likely for best in self.best_links())
        return forward, backward

    def _links_from(self, min_score: float) -> Links:
        """Return all links with at least this score."""
        rows, columns = np.nonzero(self.weights >= min_score)
        return frozenset(zip(columns.tolist(), rows.tolist(), strict=True))

    def best_links(self) -> tuple[Links, Links]:
        """Return the best link, if any, of each target word and of each source word."""
        return _best_links(self.forward), reverse_links(_best_links(self.backward.T))

    def combine(
        self, forward: "Alignment", backward: "Alignment", weight: float = _MODEL_WEIGHT
    ) -> "LexicalAlignment":
        """Return the weighted geometric mean of these probabilities and the weights of two models.

        On Greek and English, combining an earlier version of the lexical aligner with models trained with
        `guided_alignment_weight=1` gave a lower error rate than either alone (docs/results.md). Models that
        align worse than the lexical aligner may not lower the error rate.

        forward: alignment of the pair by a source-to-target model. backward: alignment of (target, source)
            by a target-to-source model. weight: weight of the models, from 0 to 1.

        >>> import torch
        >>> from regard.translation import LexicalAligner
        >>> from regard.translation.alignment.alignment import Alignment
        >>> pairs = [("ein Hund", "a dog"), ("ein Haus", "a house"), ("Hund und Haus", "dog and house")]
        >>> (lexical,) = LexicalAligner.learn(pairs).align([("Haus ein", "a house")])
        >>> forward = Alignment(("Haus", "ein"), ("a", "house"), torch.tensor([[0.2, 0.8], [0.9, 0.1]]))
        >>> backward = Alignment(("a", "house"), ("Haus", "ein"), torch.tensor([[0.1, 0.9], [0.7, 0.3]]))
        >>> lexical.combine(forward, backward)
        LexicalAlignment(2 source × 2 target words: 0-1 1-0)
        """
        check_number("combine got weight", weight, min=0, max=1)
        shape = self.forward.shape
        for name, alignment, expected in (("forward", forward, shape), ("backward", backward, shape[::-1])):
            if alignment.weights.shape != expected:
                raise ShapeError(
                    f"combine got {name} weights of shape {tuple(alignment.weights.shape)}; the pair has "
                    f"{shape[0]} target words and {shape[1]} source words, so they need {expected}."
                )
        weights = [alignment.weights.detach().cpu().double().numpy() for alignment in (forward, backward)]
        return replace(
            self,
            forward=_geometric_mean(self.forward, weights[0], weight),
            backward=_geometric_mean(self.backward.T, weights[1], weight).T,
            min_score=0.0,  # attention is less certain than the lexical aligner
        )

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


def _odds(probabilities: Floats) -> Floats:
    """Return p / (1 − p), where p is the probability rescaled to the range from _NOISE to 1 − _NOISE."""
    p = _NOISE + (1 - 2 * _NOISE) * probabilities
    return p / (1 - p)


def _geometric_mean(first: Floats, second: Floats, weight: float) -> Floats:
    """Return the weighted geometric mean of probabilities (rows), renormalized, including that of no link."""
    means = [
        np.maximum(a, _MIN_PROBABILITY) ** (1 - weight) * np.maximum(b, _MIN_PROBABILITY) ** weight
        for a, b in ((first, second), (1 - first.sum(1, keepdims=True), 1 - second.sum(1, keepdims=True)))
    ]
    mean: Floats = means[0] / (means[0].sum(1, keepdims=True) + means[1])
    return mean
