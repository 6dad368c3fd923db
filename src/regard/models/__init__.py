"""Layers and models on top of the operator: each small, readable beside its paper, trainable, and visible.

>>> import torch, regard
>>> model = regard.models.LanguageModel(1000, regard.models.Recipe(width=32, heads=4, layers=2))
>>> with regard.watch(model) as seen:
...     logits = model(torch.tensor([[3, 14, 15, 9]]))
>>> seen["decoder.blocks.0.attention"].shape
torch.Size([1, 4, 4, 4])
"""

from regard.models.blocks import DecoderBlock, EncoderBlock, FeedForward, Recipe, Residual
from regard.models.heads import Attends, Cache, Memory, MultiHeadAttention, SelfAttention
from regard.models.packed import Packed, pack
from regard.models.positions import Learned, Rotary, Sinusoidal, Turn
from regard.models.transformer import (
    Embedding,
    LanguageModel,
    MaskedLanguageModel,
    Stack,
    Transformer,
    gaps,
)

__all__ = [
    "Attends",
    "Cache",
    "DecoderBlock",
    "Embedding",
    "EncoderBlock",
    "FeedForward",
    "LanguageModel",
    "Learned",
    "MaskedLanguageModel",
    "Memory",
    "MultiHeadAttention",
    "Packed",
    "Recipe",
    "Residual",
    "Rotary",
    "SelfAttention",
    "Sinusoidal",
    "Stack",
    "Transformer",
    "Turn",
    "gaps",
    "pack",
]
