"""Transformer blocks and stacks: attention and feed-forward layers with norms and residual connections.

norm_first=True:    x + f(norm(x))      pre-norm: Xiong et al. 2020
norm_first=False:   norm(x + f(x))      post-norm: Vaswani et al. 2017, section 3.1; BERT
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypedDict, Unpack, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard._util.checks import check_choice, check_int
from regard._util.name_hints import hint_arguments
from regard._util.text import pluralize
from regard.errors import ArgumentError, DTypeError
from regard.mechanism.biases import RelativeBias
from regard.mechanism.masks.algebra import Mask
from regard.mechanism.masks.by_position import Causal
from regard.mechanism.normalizers import Normalizer, Sink, Softmax
from regard.mechanism.scores import Dot, ScaledDot
from regard.models.configs import Activation, TransformerSettings
from regard.models.layers.attention import MultiHeadAttention, SelfAttentionOptions
from regard.models.layers.dropout import Dropout
from regard.models.layers.kv_cache import KeyValues, KVCache
from regard.models.layers.position_encoding import PositionEncoding, PositionSizes, make_positions

Caches = Sequence[KVCache]


@hint_arguments
@dataclass(frozen=True)
class TransformerConfig(TransformerSettings):
    """Architecture of a Transformer. With the defaults, a model can be trained on a laptop.

    width: model dimension. ffn_dim: feed-forward dimension; default: 4 × width. layers: blocks per stack.
    heads: number of attention heads. key_heads: number of key and value heads (grouped-query attention);
        default: heads.
    activation: "relu" (Vaswani et al. 2017), "gelu" (BERT), "gelu_tanh" (approximate gelu) or "silu";
        with a gate: "reglu", "geglu", "geglu_tanh" (T5 1.1) or "swiglu" (Shazeer 2020).
    norm: "layer", "rms" (Zhang and Sennrich 2019) or "none". eps: constant added to the variance.
    norm_first: pre-norm if True (Xiong et al. 2020), post-norm if False (Vaswani et al. 2017).
    linear_bias: whether projections and feed-forward layers have a bias.
    dropout: dropout probability for weights, embeddings, feed-forward activations and residual branches.
    positions: "sinusoidal", "learned", "rotary", "alibi", "t5" or "none". max_positions: size of a learned
        table. sinusoids: order of the sinusoidal features: "interleaved" (Vaswani et al. 2017),
        "concatenated" (Marian) or "fairseq" (M2M-100). buckets, max_distance: see `T5Bias`.
    normalize: normalizer for the attention layers; each layer uses a copy.
    head_width: dimension of each head; default: width / heads.
    scale_scores: whether scores are divided by √head_width; T5 leaves them unscaled.
    scale_embedding: whether embeddings are multiplied by √width (Vaswani et al. 2017, section 3.4).
    embedding_norm: whether embeddings are normalized after positions are added (BART).
    attention_dropout, activation_dropout: dropout probability for weights and for feed-forward activations;
        default: dropout.

    >>> import regard
    >>> regard.models.TransformerConfig(width=256, heads=8, layers=3, positions="rotary").resolved_ffn_dim
    1024
    """

    normalize: Normalizer | Sink = Softmax()  # noqa: RUF009 (a frozen value)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.normalize, Normalizer | Sink):
            raise DTypeError(
                f"TransformerConfig got normalize={self.normalize!r}, which is not a normalizer; pass "
                "normalize=Softmax() or another normalizer."
            )

    def make_attention(self) -> MultiHeadAttention:
        """Create an attention layer."""
        return MultiHeadAttention(
            self.width,
            self.heads,
            key_heads=self.key_heads,
            head_width=self.head_width,
            linear_bias=self.linear_bias,
            score=ScaledDot() if self.scale_scores else Dot(),
            normalize=copy.deepcopy(self.normalize),  # a Sink has parameters
            dropout=self.resolved_attention_dropout,
        )

    def make_norm(self) -> nn.Module:
        """Create a norm layer, or the identity for norm="none"."""
        if self.norm == "none":
            return nn.Identity()
        kind = nn.LayerNorm if self.norm == "layer" else nn.RMSNorm
        return kind(self.width, eps=self.eps)

    def make_feed_forward(self) -> "FeedForward":
        """Create a feed-forward layer."""
        return FeedForward(
            self.width,
            self.resolved_ffn_dim,
            self.activation,
            linear_bias=self.linear_bias,
            dropout=self.resolved_activation_dropout,
        )

    def make_positions(self, causal: bool) -> PositionEncoding | RelativeBias:
        """Create the position encoding."""
        sizes = PositionSizes(
            self.width,
            self.heads,
            self.resolved_head_width,
            self.max_positions,
            causal,
            sinusoids=self.sinusoids,
            buckets=self.buckets,
            max_distance=self.max_distance,
        )
        return make_positions(self.positions, sizes)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}
# gated activation → activation function of the gate
_GATES = {"reglu": "relu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "swiglu": "silu"}


class FeedForward(nn.Module):
    """act(x W) V at each position (Vaswani et al. 2017, eq. 2; with a gate, Shazeer 2020, eq. 5 and 6).

    width: input and output dimension. ffn_dim: inner dimension.
    activation: see `TransformerConfig`; "reglu", "geglu", "geglu_tanh" and "swiglu" use a third matrix.
    linear_bias: whether both layers have a bias. dropout: dropout probability for the activations.

    >>> import torch, regard
    >>> regard.models.FeedForward(16, 64, "swiglu")(torch.randn(5, 16)).shape
    torch.Size([5, 16])
    """

    def __init__(
        self,
        width: int,
        ffn_dim: int,
        activation: Activation = "relu",
        *,
        linear_bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_choice("FeedForward got activation", activation, get_args(Activation))
        check_int("FeedForward got width", width, min=1)
        check_int("FeedForward got ffn_dim", ffn_dim, min=1)
        self.activation = activation
        self.in_proj = nn.Linear(width, (2 if activation in _GATES else 1) * ffn_dim, bias=linear_bias)
        self.out_proj = nn.Linear(ffn_dim, width, bias=linear_bias)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the feed-forward layer: (…, m) → (…, m)."""
        hidden = self.in_proj(x)
        if self.activation == "relu":
            return self.out_proj(self.dropout.relu(hidden))
        return self.out_proj(self.dropout(self.activate(hidden)))

    def activate(self, hidden: Tensor) -> Tensor:
        """Apply the activation, and the gate if there is one."""
        if self.activation in _GATES:
            gate, hidden = hidden.chunk(2, -1)
            return _ACTIVATIONS[_GATES[self.activation]](gate) * hidden
        return _ACTIVATIONS[self.activation](hidden)

    def extra_repr(self) -> str:
        return self.activation


class Residual(nn.Module):
    """Residual connection with norm and dropout around a sublayer f: pre-norm is x + dropout(f(norm(x))).

    config: provides norm, norm_first, eps and dropout.

    >>> import torch, regard
    >>> residual = regard.models.Residual(regard.models.TransformerConfig(width=4, heads=1, dropout=0.0))
    >>> x = torch.randn(2, 4)
    >>> torch.equal(residual(x, torch.zeros_like), x)
    True
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm_first, self.norm = config.norm_first, config.make_norm()
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply a sublayer with norm, dropout and residual connection."""
        if self.norm_first:
            return self.dropout.add(x, sublayer(self.norm(x)))
        return self.norm(self.dropout.add(x, sublayer(x)))


class EncoderBlock(nn.Module):
    """Self-attention and feed-forward. With a causal mask, this is the block of a decoder-only model.

    config: the architecture.

    >>> import torch, regard
    >>> block = regard.models.EncoderBlock(regard.models.TransformerConfig(width=16, heads=4))
    >>> block(torch.randn(2, 5, 16), mask=regard.Padding([3, 5])).shape
    torch.Size([2, 5, 16])
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention, self.feed_forward = config.make_attention(), config.make_feed_forward()
        self.attention_residual, self.feed_forward_residual = Residual(config), Residual(config)

    def forward(self, x: Tensor, **options: Unpack[SelfAttentionOptions]) -> Tensor:
        """Apply the block: (…, n, m) → (…, n, m). For the options, see `MultiHeadAttention.forward`."""
        x = self.attention_residual(x, lambda y: self.attention(y, **options))
        return self.feed_forward_residual(x, self.feed_forward)


class DecoderBlock(nn.Module):
    """Self-attention, cross-attention and feed-forward (Vaswani et al. 2017, figure 1, right).

    config: the architecture.

    >>> import torch, regard
    >>> block = regard.models.DecoderBlock(regard.models.TransformerConfig(width=16, heads=4))
    >>> target, source = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    >>> block(target, source, mask=regard.Causal()).shape
    torch.Size([2, 5, 16])
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention, self.cross = config.make_attention(), config.make_attention()
        self.feed_forward = config.make_feed_forward()
        self.attention_residual, self.cross_residual = Residual(config), Residual(config)
        self.feed_forward_residual = Residual(config)

    def forward(
        self,
        x: Tensor,
        source: Tensor | KeyValues,
        *,
        source_mask: Mask | Tensor | None = None,
        **options: Unpack[SelfAttentionOptions],
    ) -> Tensor:
        """Apply the block: (…, t, m) → (…, t, m).

        source: (…, s, m), or its keys and values from `cross.project_source`.
        """
        x = self.attention_residual(x, lambda y: self.attention(y, **options))
        x = self.cross_residual(x, lambda y: self.cross(y, source, mask=source_mask))
        return self.feed_forward_residual(x, self.feed_forward)


class StackOptions(TypedDict, total=False):
    """Keyword arguments of `Stack.forward`."""

    mask: Mask | None
    source_mask: Mask | None
    positions: Tensor | None
    caches: Caches | None


class Stack(nn.Module):
    """Transformer blocks with a position encoding: an encoder, or a decoder if `causal`.

    config: the architecture. causal: whether the default mask is causal.
    cross: whether each block has cross-attention to a source.

    >>> import torch, regard
    >>> encoder = regard.models.Stack(regard.models.TransformerConfig(width=16, heads=4))
    >>> encoder(torch.randn(2, 5, 16), mask=regard.Padding([3, 5])).shape
    torch.Size([2, 5, 16])
    """

    def __init__(self, config: TransformerConfig, *, causal: bool = False, cross: bool = False) -> None:
        super().__init__()
        self.config, self.causal, self.cross = config, causal, cross
        self.positions = config.make_positions(causal)
        block = DecoderBlock if cross else EncoderBlock
        self.blocks = nn.ModuleList(block(config) for _ in range(config.layers))
        self.embedding_norm = config.make_norm() if config.embedding_norm else nn.Identity()
        self.dropout = Dropout(config.dropout)
        self.norm = config.make_norm() if config.norm_first else nn.Identity()

    def forward(
        self, x: Tensor, source: Tensor | Sequence[KeyValues] | None = None, **options: Unpack[StackOptions]
    ) -> Tensor:
        """Apply all blocks: (…, n, m) → (…, n, m).

        source: (…, s, m), or its keys and values from `project_source`.
        """
        return self.states(x, source, **options)[-1]

    def states(
        self,
        x: Tensor,
        source: Tensor | Sequence[KeyValues] | None = None,
        *,
        mask: Mask | None = None,
        source_mask: Mask | None = None,
        positions: Tensor | None = None,
        caches: Caches | None = None,
    ) -> list[Tensor]:
        """Return the input of the first block and the output of each block. The last output is normalized."""
        if (source is None) == self.cross:
            raise ArgumentError(
                f"Stack(cross={self.cross}) got {'no' if self.cross else 'a'} source; pass a source if and "
                "only if cross=True."
            )
        if positions is None:  # continue after the cached tokens
            start = caches[0].length if caches else 0
            positions = torch.arange(start, start + x.shape[-2], device=x.device)
        x, encoded = self.positions.encode(x, positions)
        if mask is None and self.causal:
            mask = Causal()
        if caches is not None and len(caches) != len(self.blocks):
            raise ArgumentError(
                f"Stack has {pluralize(len(self.blocks), 'block')}, but got "
                f"{pluralize(len(caches), 'cache')}; pass one per block: stack.caches()."
            )
        states = [self.dropout(self.embedding_norm(x))]
        for i, block in enumerate(self.blocks):
            cache = None if caches is None else caches[i]
            if source is None:
                states.append(block(states[-1], mask=mask, cache=cache, **encoded))
            else:
                keys = source if isinstance(source, Tensor) else source[i]
                states.append(
                    block(states[-1], keys, mask=mask, source_mask=source_mask, cache=cache, **encoded)
                )
        states[-1] = self.norm(states[-1])
        return states

    def project_source(self, source: Tensor) -> list[KeyValues]:
        """Project a source (…, s, m) to keys and values for each block, once for all decoding steps."""
        return [
            block.cross.project_source(source) for block in self.blocks if isinstance(block, DecoderBlock)
        ]

    def caches(self) -> list[KVCache]:
        """Create an empty cache for each block."""
        return [KVCache() for _ in self.blocks]
