"""Training in several processes, and models sharded across them."""

from regard._util.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
