"""The encoder-decoder Transformer (Vaswani et al. 2017).

Batches are `Packed` (no padding) or padded token ids (b, l) with lengths; both give the same results.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard._util.checks import check_type
from regard._util.name_hints import hint_arguments
from regard._util.text import pluralize
from regard.errors import ArgumentError, ShapeError
from regard.mechanism.masks.algebra import Mask
from regard.mechanism.masks.by_length import Documents, Padding
from regard.mechanism.operator import attend
from regard.models.layers import decoder_step
from regard.models.layers.blocks import Stack, TransformerConfig
from regard.models.layers.embedding import Embedding
from regard.models.layers.kv_cache import KeyValues, KVCache, RowMap
from regard.models.layers.positions.sinusoidal import SinusoidalPositions
from regard.models.packed import ModelInput, Packed, as_packed, as_padded, check_batch, full_lengths
from regard.models.seq2seq import INT8_OUTPUT, Seq2Seq, State, check_state, vocab_sizes


class TransformerState(State):
    """The projected source and the KV cache of each block. All rows of a sentence share one source."""

    def __init__(self, sources: list[KeyValues], lengths: Tensor, caches: list[KVCache]) -> None:
        self.sources, self.mask, self.caches = sources, Padding(lengths), caches
        self.row_map = RowMap(len(lengths))
        self.fast: decoder_step.Source | None = None  # None unless `decoder_step` supports the decoder

    def select(self, rows: Tensor) -> None:
        self.row_map, kept = self.row_map.select(rows)
        if kept is not None:
            self.sources = [source.select(kept) for source in self.sources]
            self.mask = Padding(self.mask.lengths[kept])
        self.sources = [source._replace(row_map=self.row_map) for source in self.sources]
        if self.fast is not None:
            self.fast = self.fast.select(kept, self.row_map)
        recorded = [] if self.fast is None or self.fast.recorded is None else [self.fast.recorded[1]]
        for cache in (*self.caches, *recorded):
            cache.select(rows)

    def record_queries(self, layer: int) -> bool:
        if self.fast is None or not -len(self.sources) <= layer < len(self.sources):
            return False
        if self.caches[0].length:  # the queries of earlier steps were not recorded
            return False
        layer %= len(self.sources)
        self.fast = self.fast._replace(recorded=(layer, KVCache()))
        self._recorded_source = self.sources[layer].key, self.mask
        return True

    def record_missing_queries(self, like: Tensor) -> None:
        """Record NaN queries, one per row of `like`, for a step that `decoder_step` did not compute."""
        if self.fast is not None and self.fast.recorded is not None:
            recorder, layer = self.fast.recorded[1], self.fast.layers[0]
            heads, width = layer.heads, layer.head_width
            recorder.append(like.new_full((len(like), heads * width), torch.nan), (heads, width, 0))

    def queries(self, rows: Tensor) -> Tensor:
        assert self.fast is not None
        assert self.fast.recorded is not None
        return self.fast.recorded[1].rows(rows)

    def weights(self, sentences: Tensor, queries: Tensor) -> Tensor:
        key, mask = self._recorded_source
        key, width = key[sentences], key.shape[-1]
        query = queries.unflatten(-1, (-1, width)).transpose(-3, -2)
        return attend(query, key, key, mask=Padding(mask.lengths[sentences]))[1].dense()

    def __len__(self) -> int:
        return len(self.row_map)


@hint_arguments
class Transformer(Seq2Seq):
    """Encoder-decoder Transformer (Vaswani et al. 2017).

    vocab_size: one size, or a pair (source, target). config: the architecture.
    share: use one matrix for source, target and output embeddings (section 3.4); requires one vocabulary.
    decoder_config: the architecture of the decoder, if it differs: layers, heads, ffn_dim and so on.
    tie_output: whether the output layer shares the target embeddings; default: share.
    output_bias: whether the logits have a bias.
    output_scale: factor for the decoder output; T5 uses 1 / √width.

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
        vocab_size: int | tuple[int, int],
        config: TransformerConfig = TransformerConfig(),  # noqa: B008
        *,
        share: bool = False,
        decoder_config: TransformerConfig | None = None,
        tie_output: bool | None = None,
        output_bias: bool = False,
        output_scale: float = 1.0,
    ) -> None:
        super().__init__()
        decoder_config = config if decoder_config is None else decoder_config
        for part in (config, decoder_config):
            check_type("Transformer got a config", part, TransformerConfig, "TransformerConfig(width=256)")
        if config.width != decoder_config.width:
            raise ArgumentError(
                f"Transformer got an encoder of width {config.width} and a decoder of width "
                f"{decoder_config.width}; they must be equal."
            )
        source, target = vocab_sizes("Transformer", vocab_size, share)
        width, scale = config.width, config.scale_embedding
        self.source_embedding = None if share else Embedding(source, width, scale=scale)
        self.embedding = Embedding(target, width, scale=decoder_config.scale_embedding)
        self.encoder = Stack(config)
        self.decoder = Stack(decoder_config, causal=True, cross=True)
        self.max_length = getattr(self.decoder.positions, "max_length", None)
        tied = share if tie_output is None else tie_output
        self.matrix = None if tied else nn.Parameter(torch.randn(target, width) * width**-0.5)
        self.bias = nn.Parameter(torch.zeros(target)) if output_bias else None
        self.output_scale = output_scale

    @property
    def output_weight(self) -> Tensor:
        return self.embedding.weight if self.matrix is None else self.matrix

    @property
    def output_bias(self) -> Tensor | None:
        return self.bias

    def encode(self, source: Tensor | Packed, source_lengths: Tensor | None = None) -> Tensor:
        """Return encoder outputs: (…, m) for a source of shape (…)."""
        inputs = ModelInput.of(source, source_lengths, name="source")
        x = (self.source_embedding or self.embedding)(inputs.tokens)
        return self.encoder(x, mask=inputs.mask, positions=inputs.positions)

    def hidden(
        self,
        source: Tensor | Packed,
        target: Tensor | Packed,
        *,
        source_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None,
    ) -> Tensor:
        check_batch(source, source_lengths, "source")
        inputs = ModelInput.of(target, target_lengths, causal=True, name="target")
        if len(source) != len(target):
            raise ShapeError(
                f"source has {pluralize(len(source), 'sentence')} and target has {len(target):,}; pass one "
                "target per source."
            )
        # convert the source to the target's format
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
        x = self.decoder(
            self.embedding(inputs.tokens),
            x,
            mask=inputs.mask,
            source_mask=source_mask,
            positions=inputs.positions,
        )
        return x if self.output_scale == 1 else x * self.output_scale

    def start(self, source: Tensor | Packed, source_lengths: Tensor | None = None) -> TransformerState:
        x = self.encode(source, source_lengths)
        if isinstance(source, Packed):
            x, source_lengths = source.pad(x), source.lengths
        lengths = full_lengths(x, source_lengths)
        state = TransformerState(self.decoder.project_source(x), lengths, self.decoder.caches())
        if x.is_contiguous() and decoder_step.supports(self.decoder):
            state.fast = decoder_step.Source.of(self.decoder, state.sources, lengths, state.row_map)
        return state

    def step(self, tokens: Tensor, state: State) -> Tensor:
        state = check_state(tokens, state, TransformerState)
        if state.fast is not None and _is_usable(state.fast):
            logits = self._fast_step(tokens, state.fast, state.caches)
            if logits is not None:
                return logits
        x = self.decoder(
            self.embedding(tokens)[:, None],
            state.sources,
            source_mask=state.mask,
            positions=torch.tensor([state.caches[0].length], device=tokens.device),
            caches=state.caches,
        )
        x = x[:, 0]
        state.record_missing_queries(x)
        return self._logits(x if self.output_scale == 1 else x * self.output_scale)

    def _fast_step(self, tokens: Tensor, source: decoder_step.Source, caches: list[KVCache]) -> Tensor | None:
        """Return the logits from `decoder_step`, or None if it does not apply or a result is not finite."""
        x, positions, position = self.embedding(tokens), self.decoder.positions, caches[0].length
        if type(positions) is SinusoidalPositions:
            x += positions.row(position)
        else:
            encoded, options = positions.encode(x[:, None], torch.tensor([position]))
            if options:  # a rotation or a bias
                return None
            x = encoded[:, 0].clone()
        x = self.decoder.embedding_norm(x)
        if x.dtype is not torch.float32:  # the dtype of the embedding may differ from the decoder's
            return None
        if self.output_scale == 1:
            output = self._modules.get(INT8_OUTPUT) or OutputProjection(self.output_weight, self.output_bias)
            logits = decoder_step.compiled_step(self.decoder, x, source, caches, output)  # type: ignore[arg-type]
            if logits is not None:
                return logits
        hidden = decoder_step.decode_step(self.decoder, x, source, caches)
        return None if hidden is None else self._logits(hidden * self.output_scale)


def _is_usable(source: decoder_step.Source) -> bool:
    """Whether `decoder_step` can still be used. While queries are recorded, hooks are not checked."""
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return False
    return source.recorded is not None or not source.is_observed()


class OutputProjection(NamedTuple):
    """The output embedding matrix (V, m) and bias as a linear layer."""

    weight: Tensor
    bias: Tensor | None = None

    @property
    def out_features(self) -> int:
        """The size of the vocabulary."""
        return len(self.weight)
