"""From pairs of sentences to a translator: corpus, vocabulary, training, search, word alignments."""

from regard.translation.tokens import Cut, Tokens, TwoSides

__all__ = ["Cut", "Tokens", "TwoSides"]
