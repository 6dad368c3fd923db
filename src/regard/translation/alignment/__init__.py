"""Word alignments from cross-attention and from a lexical model, and their error rates."""

from regard._util.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
