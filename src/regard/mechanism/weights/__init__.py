"""Lazy attention weights: rows, tiles and reductions, computed on demand."""

from regard._util.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
