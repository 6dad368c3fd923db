"""Masks by position and by sequence length, and mask algebra."""

from regard._util.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
