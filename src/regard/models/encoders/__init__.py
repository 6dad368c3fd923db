"""Word and sentence encoders: static vectors, ELMo, BERT and pretrained models."""

from regard._util.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
