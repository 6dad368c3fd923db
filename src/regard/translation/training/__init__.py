"""Translator training: loop, validation, checkpoints and distributed training."""

from regard._util.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
