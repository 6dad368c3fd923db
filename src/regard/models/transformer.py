"""The Transformer, encoder and decoder: Vaswani et al. 2017.

It takes sentences packed one after the other (`Packed`), without a single padded place, or a padded batch
(b, l) with its lengths; the numbers are the same.
"""

import torch
from torch import Tensor, nn

from regard._util.checks import check_type
from regard.errors import ShapeError
from regard.mechanism.mask_algebra import Mask
from regard.mechanism.masks import Documents, Padding
from regard.models.layers.blocks import TransformerConfig
from regard.models.layers.embedding import Embedding
from regard.models.layers.kv_cache import KeyValues, KVCache, RowMap
from regard.models.layers.stack import Stack
from regard.models.packed import ModelInput, Packed, full_lengths, as_packed, as_padded, check_batch
from regard.models.seq2seq import Seq2Seq, State, check_state, vocab_sizes


class TransformerState(State):
    """What decoding goes on with: the source's keys and values, and a cache, for each block.

    The source is held once, however many rows read it.
    """

    def __init__(self, memories: list[KeyValues], lengths: Tensor, caches: list[KVCache]) -> None:
        self.memories, self.mask, self.caches = memories, Padding(lengths), caches
        self.readers = RowMap(len(lengths))

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        self.readers, kept = self.readers.select(rows)
        if kept is not None:
            self.memories = [memory.select(kept) for memory in self.memories]
            self.mask = Padding(self.mask.lengths[kept])
        self.memories = [memory._replace(readers=self.readers) for memory in self.memories]
        for cache in self.caches:
            cache.select(rows)

    def __len__(self) -> int:
        return len(self.readers)


class Transformer(Seq2Seq):
    """Encoder and decoder: Vaswani et al. 2017.

    vocabulary: its size, or a pair, that of the source and that of the target.
    config: width, heads, layers of each side and all else.
    share: one matrix for source, target and output (section 3.4); needs one vocabulary for both.

    >>> import torch, regard
    >>> from regard.models import Packed, TransformerConfig, Transformer
    >>> model = Transformer(100, TransformerConfig(width=16, heads=2, layers=2), share=True)
    >>> source, target = Packed.of([[5, 6, 7], [8, 9]]), Packed.of([[1, 5, 2], [1, 2]])
    >>> model(source, target).shape  # logits
    torch.Size([5, 100])
    >>> model.loss(source, target, label_smoothing=0.1).backward()
    """

    def __init__(
        self,
        vocabulary: int | tuple[int, int],
        config: TransformerConfig = TransformerConfig(),  # noqa: B008
        *,
        share: bool = False,
    ) -> None:
        super().__init__()
        check_type("Transformer got a config", config, TransformerConfig, "TransformerConfig(width=256)")
        source, target = vocab_sizes("Transformer", vocabulary, share)
        self.source_embedding = None if share else Embedding(source, config.width)
        self.embedding = Embedding(target, config.width)
        self.encoder = Stack(config)
        self.decoder = Stack(config, causal=True, cross=True)
        self.matrix = None if share else nn.Parameter(torch.randn(target, config.width) * config.width**-0.5)

    @property
    def output_weight(self) -> Tensor:
        """The vocabulary matrix (V, m)."""
        return self.embedding.weight if self.matrix is None else self.matrix

    def encode(self, source: Tensor | Packed, source_lengths: Tensor | None = None) -> Tensor:
        """The source's vectors: its shape and m."""
        laid = ModelInput.of(source, source_lengths, name="source")
        x = (self.source_embedding or self.embedding)(laid.tokens)
        return self.encoder(x, mask=laid.mask, positions=laid.positions)

    def hidden(
        self,
        source: Tensor | Packed,
        target: Tensor | Packed,
        *,
        source_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None,
    ) -> Tensor:
        check_batch(source, source_lengths, "source")
        laid = ModelInput.of(target, target_lengths, causal=True, name="target")
        if len(source) != len(target):
            raise ShapeError(
                f"the source has {len(source)} sentences and the target {len(target)}; each target sentence "
                "belongs to one of the source."
            )
        # both in the form of the target
        if isinstance(target, Packed) and not isinstance(source, Packed):
            source, source_lengths = as_packed(source, source_lengths), None
        elif isinstance(source, Packed) and not isinstance(target, Packed):
            source, source_lengths = as_padded(source)
        x = self.encode(source, source_lengths)
        source_mask: Mask | None
        if isinstance(source, Packed) and isinstance(target, Packed):
            source_mask = Documents(target.lengths, source.lengths)
        else:
            source_mask = None if source_lengths is None else Padding(source_lengths)
        return self.decoder(
            self.embedding(laid.tokens),
            x,
            mask=laid.mask,
            source_mask=source_mask,
            positions=laid.positions,
        )

    def start(self, source: Tensor | Packed, source_lengths: Tensor | None = None) -> TransformerState:
        x = self.encode(source, source_lengths)
        if isinstance(source, Packed):
            x, source_lengths = source.pad(x), source.lengths
        return TransformerState(
            self.decoder.project_source(x), full_lengths(x, source_lengths), self.decoder.caches()
        )

    def step(self, tokens: Tensor, state: State) -> Tensor:
        state = check_state(tokens, state, TransformerState)
        position = torch.tensor([state.caches[0].length], device=tokens.device)
        x = self.decoder(
            self.embedding(tokens)[:, None],
            state.memories,
            source_mask=state.mask,
            positions=position,
            caches=state.caches,
        )
        return self._logits(x[:, 0])
