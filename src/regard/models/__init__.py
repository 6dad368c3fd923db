"""Layers and models built on the attention operator. `regard.watch` captures their attention weights.

>>> import torch, regard
>>> model = regard.models.LanguageModel(1000, regard.models.TransformerConfig(width=32, heads=4, layers=2))
>>> with regard.watch(model) as seen:
...     logits = model(torch.tensor([[3, 14, 15, 9]]))
>>> seen["decoder.blocks.0.attention"].shape
torch.Size([1, 4, 4, 4])
"""

from regard._util.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
