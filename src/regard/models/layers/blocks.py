"""The blocks that Transformers are stacks of: attention, then feed-forward, each with a residual and a norm.

before:  x + f(norm(x))      trains without warm-up (Xiong et al. 2020)
after:   norm(x + f(x))      Vaswani et al. 2017, section 3.1; BERT
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor, nn
from torch.nn import functional as F

from regard._util.checks import check_int, check_number
from regard.errors import ArgumentError, DTypeError
from regard.mechanism.biases import ALiBi, T5Bias
from regard.mechanism.call.arguments import Bias
from regard.mechanism.mask_algebra import Mask
from regard.mechanism.normalizers import Normalizer, Sink, Softmax
from regard.models.layers.attention import MultiHeadAttention
from regard.models.layers.dropout import Dropout
from regard.models.layers.kv_cache import KVCache, KeyValues
from regard.models.layers.positions import LearnedPositions, RotaryPositions, Rotation, SinusoidalPositions

Activation = Literal["relu", "gelu", "swiglu"]
Norm = Literal["layer", "rms", "none"]
Positions = Literal["sinusoidal", "learned", "rotary", "alibi", "t5", "none"]


@dataclass(frozen=True)
class TransformerConfig:
    """What the blocks of a Transformer are made of; the defaults train on a laptop.

    width: of the vector of each token. layers: how many blocks. heads, key_heads: as of MultiHeadAttention.
    hidden: the width inside the feed-forward, 4 × width by default.
    activation: "relu" (Vaswani et al. 2017), "gelu" (BERT) or "swiglu" (Shazeer 2020).
    norm, before, epsilon: "layer", "rms" (Zhang and Sennrich 2019) or "none"; before each part or after it;
        what is added to the variance.
    linear_bias: whether projections and feed-forwards have biases.
    dropout: of weights, of embeddings, inside the feed-forward, and of what each part adds.
    positions: "sinusoidal", "learned", "rotary", "alibi", "t5" or "none"; `length` is how many are learned.
    normalize: of every attention; one with parameters is copied for each.

    >>> import regard
    >>> regard.models.TransformerConfig(width=256, heads=8, layers=3, positions="rotary").resolved_ffn_dim
    1024
    """

    width: int = 256
    layers: int = 3
    heads: int = 8
    key_heads: int | None = None
    ffn_dim: int | None = None
    activation: Activation = "relu"
    norm: Norm = "layer"
    norm_first: bool = True
    eps: float = 1e-5
    linear_bias: bool = True
    dropout: float = 0.1
    positions: Positions = "sinusoidal"
    max_positions: int = 512
    normalize: Normalizer | Sink = Softmax()  # noqa: RUF009 (a frozen value)

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads", "max_positions"):
            check_int(f"TransformerConfig got {name}", getattr(self, name), min=1)
        for name in ("norm_first", "linear_bias"):
            if not isinstance(getattr(self, name), bool):
                raise DTypeError(
                    f"TransformerConfig got {name}={getattr(self, name)!r}; it is True or False."
                )
        check_int("TransformerConfig got ffn_dim", self.resolved_ffn_dim, min=1)
        if self.key_heads is not None:
            check_int("TransformerConfig got key_heads", self.key_heads, min=1)
        if not isinstance(self.normalize, Normalizer | Sink):
            raise DTypeError(
                f"TransformerConfig got normalize={self.normalize!r}, which is no normalizer; pass one of regard's: "
                "normalize=Softmax()."
            )
        check_number("TransformerConfig got dropout", self.dropout, min=0, below=1)
        check_number("TransformerConfig got eps", self.eps, above=0)
        for name, choices in (("activation", Activation), ("norm", Norm), ("positions", Positions)):
            if getattr(self, name) not in get_args(choices):
                raise ArgumentError(
                    f"TransformerConfig got {name}={getattr(self, name)!r}; there are {', '.join(get_args(choices))}."
                )
        if self.width % self.heads:
            raise ArgumentError(
                f"TransformerConfig got width={self.width} and heads={self.heads}; the heads share the width, so "
                "it must be a multiple of their number."
            )
        if self.key_heads is not None and self.heads % self.key_heads:
            raise ArgumentError(
                f"TransformerConfig got heads={self.heads} and key_heads={self.key_heads}; equally many heads share a "
                "key head, so heads must be a multiple of key_heads."
            )

    @property
    def resolved_ffn_dim(self) -> int:
        """The width inside the feed-forward."""
        return 4 * self.width if self.ffn_dim is None else self.ffn_dim

    def make_attention(self) -> MultiHeadAttention:
        """One attention of a block."""
        return MultiHeadAttention(
            self.width,
            self.heads,
            key_heads=self.key_heads,
            linear_bias=self.linear_bias,
            normalize=copy.deepcopy(self.normalize),  # a Sink learns in each layer
            dropout=self.dropout,
        )

    def make_norm(self) -> nn.Module:
        """One norm of a block; without norms, what changes nothing."""
        if self.norm == "none":
            return nn.Identity()
        kind = nn.LayerNorm if self.norm == "layer" else nn.RMSNorm
        return kind(self.width, eps=self.eps)

    def make_feed_forward(self) -> "FeedForward":
        """The feed-forward of a block."""
        return FeedForward(
            self.width, self.resolved_ffn_dim, self.activation, linear_bias=self.linear_bias, dropout=self.dropout
        )

    def make_positions(self, causal: bool) -> nn.Module | None:
        """What tells where tokens stand: see `positions.py`; None if the model does not know."""
        makers: dict[str, Callable[[], nn.Module]] = {
            "sinusoidal": lambda: SinusoidalPositions(self.width),
            "learned": lambda: LearnedPositions(self.max_positions, self.width),
            "rotary": lambda: RotaryPositions(self.width // self.heads),
            "alibi": lambda: ALiBi(self.heads),
            "t5": lambda: T5Bias(self.heads, bidirectional=not causal),
        }
        return None if self.positions == "none" else makers[self.positions]()


class FeedForward(nn.Module):
    """act(x W) V, the same for each position: Vaswani et al. 2017, eq. 2; "swiglu": Shazeer 2020, eq. 6.

    width, hidden: the features outside and inside.
    activation: "relu", "gelu" or "swiglu", which has a third matrix.
    linear_bias: whether a bias is added to x W and to the output.
    dropout: of what is inside.

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
        if activation not in get_args(Activation):
            raise ArgumentError(
                f"FeedForward got activation={activation!r}; there are {', '.join(get_args(Activation))}."
            )
        check_int("FeedForward got width", width, min=1)
        check_int("FeedForward got ffn_dim", ffn_dim, min=1)
        self.activation = activation
        self.in_proj = nn.Linear(width, (2 if activation == "swiglu" else 1) * ffn_dim, bias=linear_bias)
        self.out_proj = nn.Linear(ffn_dim, width, bias=linear_bias)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(…, m) → (…, m)."""
        hidden = self.in_proj(x)
        if self.activation == "swiglu":
            gate, hidden = hidden.chunk(2, -1)
            hidden = F.silu(gate) * hidden
        elif self.activation == "gelu":
            hidden = F.gelu(hidden)
        else:
            return self.out_proj(self.dropout.relu(hidden))
        return self.out_proj(self.dropout(hidden))

    def extra_repr(self) -> str:
        return self.activation


class Residual(nn.Module):
    """x + f(x) around one part of a block, with its norm before or after, and dropout of what is added.

    config: which norm, where it stands, and how much is dropped.

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

    def forward(self, x: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        """Run a part of the block inside the residual."""
        if self.norm_first:
            return self.dropout.add(x, part(self.norm(x)))
        return self.norm(self.dropout.add(x, part(x)))


class EncoderBlock(nn.Module):
    """Self-attention, then feed-forward; with a causal mask it is the block of a decoder-only model.

    config: width, heads and all else of its parts.

    >>> import torch, regard
    >>> block = regard.models.EncoderBlock(regard.models.TransformerConfig(width=16, heads=4))
    >>> block(torch.randn(2, 5, 16), mask=regard.Padding([3, 5])).shape
    torch.Size([2, 5, 16])
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention, self.feed_forward = config.make_attention(), config.make_feed_forward()
        self.attention_residual, self.feed_forward_residual = Residual(config), Residual(config)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | None = None,
        rotation: Rotation | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """(…, n, m) → (…, n, m). mask, bias, turn and cache are those of `MultiHeadAttention`."""
        x = self.attention_residual(
            x, lambda y: self.attention(y, mask=mask, bias=bias, rotation=rotation, cache=cache)
        )
        return self.feed_forward_residual(x, self.feed_forward)


class DecoderBlock(nn.Module):
    """Self-attention, then attention to the source, then feed-forward: Vaswani et al. 2017, figure 1, right.

    config: width, heads and all else of its parts.

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
        mask: Mask | Tensor | None = None,
        source_mask: Mask | Tensor | None = None,
        bias: Bias | None = None,
        rotation: Rotation | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """(…, t, m) and a source (…, s, m), or what `self.cross.project_source` made of it → (…, t, m)."""
        x = self.attention_residual(
            x, lambda y: self.attention(y, mask=mask, bias=bias, rotation=rotation, cache=cache)
        )
        x = self.cross_residual(x, lambda y: self.cross(y, source, mask=source_mask))
        return self.feed_forward_residual(x, self.feed_forward)
