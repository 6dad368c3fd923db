"""Layers and models on top of the operator: each small, readable beside its paper, trainable, and visible.

>>> import torch, regard
>>> model = regard.models.LanguageModel(1000, regard.models.Recipe(width=32, heads=4, layers=2))
>>> with regard.watch(model) as seen:
...     logits = model(torch.tensor([[3, 14, 15, 9]]))
>>> seen["decoder.blocks.0.attention"].shape
torch.Size([1, 4, 4, 4])
"""

from regard.mechanism.biases import T5, ALiBi
from regard.models.allocation import keep_memory, return_memory
from regard.models.bert import BertEncoder
from regard.models.blocks import DecoderBlock, EncoderBlock, FeedForward, Recipe, Residual
from regard.models.dropout import Dropout
from regard.models.elmo import ElmoEncoder, ScalarMix
from regard.models.embedding import Embedding
from regard.models.encoders import Attended, Comparison, Embedded, Near, Tokens, WordEncoder
from regard.models.grids import NonLocal
from regard.models.heads import Attends, MultiHeadAttention, SelfAttention
from regard.models.language import LanguageModel, MaskedLanguageModel, gaps
from regard.models.learning import LearnedEncoder
from regard.models.loss import vocabulary_loss
from regard.models.memory import Cache, Memory
from regard.models.packed import Packed, pack
from regard.models.positions import Learned, Rotary, Sinusoidal, Turn
from regard.models.pretrained import PretrainedEncoder, load_encoder
from regard.models.recurrent import RecurrentRecipe, RecurrentSeq2Seq
from regard.models.seq2seq import Seq2Seq, State
from regard.models.stack import Stack
from regard.models.static import StaticEncoder
from regard.models.summaries import Summary, summary
from regard.models.transformer import Transformer
from regard.models.words import Vocabulary, Word

__all__ = [
    "T5",
    "ALiBi",
    "Attended",
    "Attends",
    "BertEncoder",
    "Cache",
    "Comparison",
    "DecoderBlock",
    "Dropout",
    "ElmoEncoder",
    "Embedded",
    "Embedding",
    "EncoderBlock",
    "FeedForward",
    "LanguageModel",
    "Learned",
    "LearnedEncoder",
    "MaskedLanguageModel",
    "Memory",
    "MultiHeadAttention",
    "Near",
    "NonLocal",
    "Packed",
    "PretrainedEncoder",
    "Recipe",
    "RecurrentRecipe",
    "RecurrentSeq2Seq",
    "Residual",
    "Rotary",
    "ScalarMix",
    "SelfAttention",
    "Seq2Seq",
    "Sinusoidal",
    "Stack",
    "State",
    "StaticEncoder",
    "Summary",
    "Tokens",
    "Transformer",
    "Turn",
    "Vocabulary",
    "Word",
    "WordEncoder",
    "gaps",
    "keep_memory",
    "load_encoder",
    "pack",
    "return_memory",
    "summary",
    "vocabulary_loss",
]
