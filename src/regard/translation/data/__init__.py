"""Parallel text: reading, cleaning, encoding and batching sentence pairs; built-in corpora."""

from regard._util.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
