"""From pairs of sentences to a translator: corpus, vocabulary, training, search, word alignments."""

from regard._util.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
