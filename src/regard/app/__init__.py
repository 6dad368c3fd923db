"""The interactive view: notebook widget, standalone page, and the server of `regard look`."""

from regard._util.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
