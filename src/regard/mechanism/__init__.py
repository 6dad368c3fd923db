"""The mechanism: one operator for every attention, and its weights as a lazy matrix."""

from regard._util.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
