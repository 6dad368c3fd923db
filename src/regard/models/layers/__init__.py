"""Building blocks of the models: attention, positions, caches, Transformer blocks."""

from regard._util.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
