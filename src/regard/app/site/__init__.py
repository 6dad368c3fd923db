"""The page as a static site, with models that run in the browser."""

from regard._util.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
