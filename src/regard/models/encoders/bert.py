"""Words in context from a Transformer that fills gaps from both sides: Devlin et al. 2019 (BERT)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.models.encoders.pretraining import LearnedEncoder
from regard.models.encoders.words import Vocabulary
from regard.models.language import MaskedLanguageModel, mask_tokens
from regard.models.layers.blocks import TransformerConfig
from regard.models.packed import Packed, as_packed


class BertEncoder(LearnedEncoder):
    """A masked language model whose layers are vectors of words in context.

    vocabulary: of words, with the marks of the class: `Vocabulary.of(text, special_tokens=BertEncoder.special_tokens)`.
    width, heads, dropout: of the blocks.
    layers: of blocks; the vectors have one more, as the words and their places are layer 0.
    max_positions: how many tokens a sentence may have, its two marks included.

    >>> from regard.models import BertEncoder, Vocabulary
    >>> vocabulary = Vocabulary.of(["dogs bark", "the bark of trees"], special_tokens=BertEncoder.special_tokens)
    >>> encoder = BertEncoder(vocabulary, width=8, layers=2, heads=2)
    >>> encoder.embed("Trees have no bark")[0]
    WordVectors('Trees have no bark': 4 words × 3 layers × 8)
    >>> [one.word for one in encoder.attended("dogs bark", "bark")]
    ['<s>', 'dogs', 'bark', '</s>']
    >>> encoder.loss(["dogs bark", "trees"]).shape
    torch.Size([])
    """

    format = "bert 1"
    special_tokens = ("<unk>", "<s>", "</s>", "<mask>")

    def __init__(
        self,
        vocabulary: Vocabulary,
        width: int = 128,
        layers: int = 2,
        *,
        heads: int = 4,
        dropout: float = 0.1,
        max_positions: int = 512,
    ) -> None:
        super().__init__(vocabulary)
        config = TransformerConfig(
            width=width,
            layers=layers,
            heads=heads,
            dropout=dropout,
            max_positions=max_positions,
            activation="gelu",
            positions="learned",
        )
        self.config, self.layers = config, layers + 1
        self.model = MaskedLanguageModel(len(vocabulary), config)

    @property
    def options(self) -> dict[str, Any]:
        """What it was made with, beside the vocabulary."""
        return {
            name: getattr(self.config, name) for name in ("width", "layers", "heads", "dropout", "max_positions")
        }

    def states(self, tokens: Tensor | Packed, lengths: Tensor | None = None) -> Tensor:
        """All layers: tokens (b, l) or packed (n) → (layers, b, l, m) or (layers, n, m)."""
        return torch.stack(self.model.states(tokens, lengths))

    def forward(self, tokens: Tensor | Packed, lengths: Tensor | None = None) -> Tensor:
        """The last layer: tokens (b, l) or packed (n) → (b, l, m) or (n, m)."""
        return self.model.states(tokens, lengths)[-1]

    def loss(self, tokens: Tensor | Packed | str | Sequence[str], lengths: Tensor | None = None) -> Tensor:
        """The mean cross entropy of words that are hidden from the model, other ones in each call."""
        batch = as_packed(tokens, lengths) if isinstance(tokens, Tensor | Packed) else self.pack(tokens)
        mask, around = self.special_tokens.index("<mask>"), [self.special_tokens.index(mark) for mark in ("<s>", "</s>")]
        hidden, labels = mask_tokens(batch, mask_id=mask, vocab_size=len(self.vocabulary), special_ids=around)
        return self.model.loss(hidden, labels)

    def extra_repr(self) -> str:
        return f"{len(self.vocabulary)} words"
