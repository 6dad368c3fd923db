"""The interactive view: in a notebook, as a standalone page, and served by `regard look`."""

from regard._util.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
