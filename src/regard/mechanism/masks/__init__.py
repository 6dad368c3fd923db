"""Masks: which keys a query may attend to, their algebra, and masks given by lengths."""

from regard._util.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
