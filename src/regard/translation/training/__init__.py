"""Training a translator: the loop, validation, checkpoints and several processes."""

from regard._util.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
