"""Run Hugging Face models on regard: `enable()`, then attn_implementation="regard"."""

from regard._util.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
