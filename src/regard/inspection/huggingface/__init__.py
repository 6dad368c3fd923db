"""Hugging Face models on regard: attention, packed batches and int8 caches."""

from regard._util.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
