"""Recurrent sequence-to-sequence models.

s_t is the decoder state, a_t the attended vector, and y_t a word:

none:                   s_t = f(s_{t−1}, y_{t−1})                                    Sutskever et al. 2014
additive:               s_t = f(s_{t−1}, [y_{t−1}; a_t]), query s_{t−1}              Bahdanau et al. 2015
dot, general, concat:   s_t = f(s_{t−1}, y_{t−1}), query s_t; tanh(W [a_t; s_t])     Luong et al. 2015

If no step depends on an earlier attended vector, all target positions are computed in parallel.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard._util.checks import check_type
from regard._util.text import pluralize
from regard.errors import ArgumentError, ShapeError
from regard.mechanism.masks.by_length import Padding
from regard.mechanism.scores import Additive, Dot, General
from regard.mechanism.torch_state import concrete
from regard.models.configs import RecurrentConfig
from regard.models.layers.embedding import Embedding
from regard.models.packed import Packed, check_batch, reorder, reversed_order, token_mask
from regard.models.recurrent_cells import (
    BahdanauDecoder,
    LuongDecoder,
    PlainDecoder,
    RecurrentEncoder,
    RecurrentState,
)
from regard.models.seq2seq import Seq2Seq, State, check_state, vocab_sizes


class RecurrentSeq2Seq(Seq2Seq):
    """Recurrent encoder-decoder with or without attention.

    vocab_size: one size, or a pair (source, target). config: the architecture.
    share: use one matrix for source, target and output embeddings (Press and Wolf 2017); requires one
        vocabulary.

    >>> import torch, regard
    >>> from regard.models import Packed
    >>> from regard.models.recurrent import RecurrentConfig, RecurrentSeq2Seq
    >>> model = RecurrentSeq2Seq((100, 200), RecurrentConfig(width=16, layers=2, attention="general"))
    >>> source, target = Packed.of([[5, 6, 7], [8, 9]]), Packed.of([[1, 5, 2], [1, 2]])
    >>> with regard.watch(model) as seen:
    ...     logits = model(source, target)
    >>> logits.shape
    torch.Size([5, 200])
    >>> seen["decoder.attention"].shape  # sentences × 1 × target × source
    torch.Size([2, 1, 3, 3])
    >>> model.loss(source, target).backward()
    """

    def __init__(
        self,
        vocab_size: int | tuple[int, int],
        config: RecurrentConfig = RecurrentConfig(),  # noqa: B008 (a frozen value)
        *,
        share: bool = False,
    ) -> None:
        super().__init__()
        check_type("RecurrentSeq2Seq got a config", config, RecurrentConfig, "RecurrentConfig(width=256)")
        source, target = vocab_sizes("RecurrentSeq2Seq", vocab_size, share)
        self.config = config
        self.source_embedding = None if share else Embedding(source, config.width)
        self.embedding = Embedding(target, config.width)
        self.encoder = RecurrentEncoder(
            config.cell, config.width, config.layers, config.dropout, bidirectional=config.bidirectional
        )
        self.decoder = _make_decoder(config)
        self.dropout = nn.Dropout(config.dropout)
        self.matrix = None if share else nn.Parameter(torch.randn(target, config.width) * config.width**-0.5)
        self.bias = nn.Parameter(torch.zeros(target))

    @property
    def output_weight(self) -> Tensor:
        return self.embedding.weight if self.matrix is None else self.matrix

    @property
    def output_bias(self) -> Tensor:
        return self.bias

    def hidden(
        self,
        source: Tensor | Packed,
        target: Tensor | Packed,
        *,
        source_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None,
    ) -> Tensor:
        source_batch = PaddedBatch.of("source", source, source_lengths)
        target_batch = PaddedBatch.of("target", target, target_lengths)
        if len(source_batch.tokens) != len(target_batch.tokens):
            raise ShapeError(
                f"source has {pluralize(len(source_batch.tokens), 'sentence')} and target has "
                f"{len(target_batch.tokens):,}; pass one target per source."
            )
        # padding comes last, so it does not affect real positions
        return target_batch.restore(self._decode(target_batch.tokens, self._encode(source_batch)))

    def start(self, source: Tensor | Packed, source_lengths: Tensor | None = None) -> RecurrentState:
        return self._encode(PaddedBatch.of("source", source, source_lengths))

    def step(self, tokens: Tensor, state: State) -> Tensor:
        state = check_state(tokens, state, RecurrentState)
        x = self._decode(tokens[:, None], state)[:, 0]
        return self._logits(x)

    def _encode(self, source: "PaddedBatch") -> RecurrentState:
        embedding = self.embedding if self.source_embedding is None else self.source_embedding
        order = reversed_order(source.tokens, source.lengths) if self.config.reverse else None
        tokens = source.tokens if order is None else source.tokens.gather(1, order)
        x, last = self.encoder(self.dropout(embedding(tokens)), source.lengths)
        if order is not None:  # restore the original order, so that weights refer to it
            x = reorder(x, order)
        mask = None if source.lengths is None else Padding(source.lengths)
        return self.decoder.start(x, last, mask)

    def _decode(self, tokens: Tensor, state: RecurrentState) -> Tensor:
        return self.dropout(self.decoder(self.dropout(self.embedding(tokens)), state))


@dataclass(frozen=True)
class PaddedBatch:
    """A validated padded batch (b, l) with zeros as padding.

    packed: the original batch if it was Packed, otherwise None.

    >>> import torch, regard.models
    >>> from regard.models.recurrent import PaddedBatch
    >>> batch = PaddedBatch.of("source", regard.models.Packed.of([[5, 6, 7], [8]]), None)
    >>> batch.tokens
    tensor([[5, 6, 7],
            [8, 0, 0]])
    >>> batch.restore(batch.tokens)
    tensor([5, 6, 7, 8])
    """

    tokens: Tensor
    lengths: Tensor | None
    packed: Packed | None = None

    @classmethod
    def of(cls, name: str, tokens: Tensor | Packed, lengths: Tensor | None) -> "PaddedBatch":
        """Create a batch from Packed or padded tokens. Error messages refer to the tokens as `name`."""
        check_batch(tokens, lengths, name)
        if isinstance(tokens, Packed):
            return cls._of_packed(name, tokens)
        if 0 in tokens.shape:
            raise ShapeError(
                f"{name} has shape {tuple(tokens.shape)}; a recurrent model needs at least one sentence of "
                "at least one token."
            )
        if lengths is None:
            return cls(tokens, None)
        _check_empty(name, lengths)
        lengths = lengths.to(tokens.device)
        return cls(torch.where(token_mask(tokens, lengths), tokens, 0), lengths)

    @classmethod
    def _of_packed(cls, name: str, packed: Packed) -> "PaddedBatch":
        if not len(packed):
            raise ShapeError(f"{name} has no sentences; pass at least one.")
        if packed.lengths.is_meta:
            raise ArgumentError(
                f"{name} is Packed on the meta device, where lengths have no values; pass a padded batch "
                "(b, l)."
            )
        _check_empty(name, packed.lengths)
        return cls(packed.pad(packed.tokens), packed.lengths, packed)

    def restore(self, x: Tensor) -> Tensor:
        """Convert values of the padded batch to the original format: b l … -> n … if the batch was packed."""
        return x if self.packed is None else x[self.packed.sentences, self.packed.positions]


def _check_empty(name: str, lengths: Tensor) -> None:
    if concrete(lengths) and int(lengths.min()) < 1:
        shortest = int(lengths.argmin())
        raise ArgumentError(
            f"{name.capitalize()} sentence {shortest} has length {int(lengths[shortest])}; every sentence "
            "needs at least one token. Remove the sentence, or append an end token."
        )


def _make_decoder(config: RecurrentConfig) -> PlainDecoder:
    sizes = config.cell, config.width, config.layers, config.dropout
    if config.attention == "none":
        return PlainDecoder(*sizes)
    if config.attention == "additive":
        return BahdanauDecoder(*sizes, start_width=config.width // (2 if config.bidirectional else 1))
    kind = General if config.attention == "general" else Additive
    score = Dot() if config.attention == "dot" else kind(config.width, config.width)
    return LuongDecoder(*sizes, score=score, input_feeding=config.input_feeding)
