"""Measures of what attention contributes: norms, gradients, spans, scores of keys, value zeroing."""

from regard._util.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
