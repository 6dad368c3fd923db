"""Where attention calls of torch and transformers are intercepted."""

from regard._util.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
