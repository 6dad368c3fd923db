"""Masks: which keys a query may attend to, by position or by the lengths of sequences, and their algebra."""

from regard._util.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
