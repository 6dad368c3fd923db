"""Contextual word vectors from a masked language model (BERT, Devlin et al. 2019)."""

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
    """Word vectors from the layers of a masked language model.

    vocabulary: created by `Vocabulary.of(sentences, special_tokens=BertEncoder.special_tokens)`.
    width: model dimension. layers: number of blocks; the embeddings are an additional vector layer.
    heads: number of attention heads. dropout: dropout probability.
    max_positions: maximum number of tokens, including the start and end tokens.

    >>> from regard.models import BertEncoder, Vocabulary
    >>> vocabulary = Vocabulary.of(
    ...     ["dogs bark", "the bark of trees"], special_tokens=BertEncoder.special_tokens
    ... )
    >>> encoder = BertEncoder(vocabulary, width=8, layers=2, heads=2)
    >>> encoder.embed("Trees have no bark")[0]
    WordVectors('Trees have no bark': 4 words × 3 layers × 8)
    >>> [word for word, _ in encoder.attended_words("dogs bark", "bark")]
    ['<s>', 'dogs', 'bark', '</s>']
    >>> encoder.loss(["dogs bark", "trees"]).shape
    torch.Size([])
    """

    format = "bert 2"
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
        return {
            name: getattr(self.config, name)
            for name in ("width", "layers", "heads", "dropout", "max_positions")
        }

    def states(self, tokens: Tensor | Packed, lengths: Tensor | None = None) -> Tensor:
        """Return all vector layers: (layers, …, m) for tokens (b, l) or packed (n)."""
        return torch.stack(self.model.states(tokens, lengths))

    def forward(self, tokens: Tensor | Packed, lengths: Tensor | None = None) -> Tensor:
        """Return the last layer: (…, m) for tokens (b, l) or packed (n)."""
        return self.model.states(tokens, lengths)[-1]

    def loss(self, tokens: Tensor | Packed | str | Sequence[str], lengths: Tensor | None = None) -> Tensor:
        """Return the mean cross-entropy of the masked tokens; each call masks different tokens."""
        batch = as_packed(tokens, lengths) if isinstance(tokens, Tensor | Packed) else self.pack(tokens)
        start, end, mask = (self.special_tokens.index(token) for token in ("<s>", "</s>", "<mask>"))
        size = len(self.vocabulary)
        return self.model.loss(*mask_tokens(batch, mask_id=mask, vocab_size=size, special_ids=(start, end)))

    def extra_repr(self) -> str:
        return f"{len(self.vocabulary)} words"
