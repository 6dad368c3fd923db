"""Model configurations. This module does not import torch, so the command line can check settings quickly."""

from dataclasses import dataclass
from typing import Literal, cast, get_args

from regard._util.checks import check_bool, check_choice, check_int, check_number
from regard.errors import ArgumentError
from regard.models.layers.positions import Positions

# "reglu", "geglu", "geglu_tanh" and "swiglu" have a gate
Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "reglu", "geglu", "geglu_tanh", "swiglu"]
Sinusoids = Literal["interleaved", "concatenated", "fairseq"]
Norm = Literal["layer", "rms", "none"]
Cell = Literal["lstm", "gru"]
AttentionKind = Literal["none", "additive", "dot", "general", "concat"]
Precision = Literal["float32", "bfloat16", "int8"]


def check_precision(dtype: str) -> Precision:
    """Return `dtype`, or raise an error if it does not name a precision for inference.

    >>> from regard.models.configs import check_precision
    >>> check_precision("int4")
    Traceback (most recent call last):
    regard.errors.ArgumentError: quantize got dtype='int4'; choose one of float32, bfloat16, int8.
    """
    check_choice("quantize got dtype", dtype, get_args(Precision))
    return cast(Precision, dtype)


@dataclass(frozen=True)
class TransformerSettings:
    """`TransformerConfig` without the normalizer, which needs torch.

    >>> from regard.models.configs import TransformerSettings
    >>> TransformerSettings(width=6, heads=4)
    Traceback (most recent call last):
    regard.errors.ArgumentError: TransformerConfig got width=6 and heads=4; width must be a multiple of heads.
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
    head_width: int | None = None
    scale_scores: bool = True
    scale_embedding: bool = True
    embedding_norm: bool = False
    attention_dropout: float | None = None
    activation_dropout: float | None = None
    sinusoids: Sinusoids = "interleaved"
    buckets: int = 32
    max_distance: int = 128

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads", "max_positions"):
            check_int(f"TransformerConfig got {name}", getattr(self, name), min=1)
        for name in ("norm_first", "linear_bias", "scale_scores", "scale_embedding", "embedding_norm"):
            check_bool(f"TransformerConfig got {name}", getattr(self, name))
        check_int("TransformerConfig got ffn_dim", self.resolved_ffn_dim, min=1)
        for name in ("key_heads", "head_width"):
            if getattr(self, name) is not None:
                check_int(f"TransformerConfig got {name}", getattr(self, name), min=1)
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            if getattr(self, name) is not None:
                check_number(f"TransformerConfig got {name}", getattr(self, name), min=0, below=1)
        check_number("TransformerConfig got eps", self.eps, above=0)
        choices = {"activation": Activation, "norm": Norm, "positions": Positions, "sinusoids": Sinusoids}
        for name, values in choices.items():
            check_choice(f"TransformerConfig got {name}", getattr(self, name), get_args(values))
        if self.head_width is None and self.width % self.heads:
            raise ArgumentError(
                f"TransformerConfig got width={self.width} and heads={self.heads}; width must be a multiple "
                "of heads."
            )
        if self.key_heads is not None and self.heads % self.key_heads:
            raise ArgumentError(
                f"TransformerConfig got heads={self.heads} and key_heads={self.key_heads}; heads must be a "
                "multiple of key_heads."
            )

    @property
    def resolved_ffn_dim(self) -> int:
        """`ffn_dim`, or its default if None."""
        return 4 * self.width if self.ffn_dim is None else self.ffn_dim

    @property
    def resolved_head_width(self) -> int:
        """`head_width`, or its default if None."""
        return self.width // self.heads if self.head_width is None else self.head_width

    @property
    def resolved_attention_dropout(self) -> float:
        """`attention_dropout`, or its default if None."""
        return self.dropout if self.attention_dropout is None else self.attention_dropout

    @property
    def resolved_activation_dropout(self) -> float:
        """`activation_dropout`, or its default if None."""
        return self.dropout if self.activation_dropout is None else self.activation_dropout


@dataclass(frozen=True)
class RecurrentConfig:
    """Architecture of a recurrent encoder-decoder.

    width: dimension of embeddings and states; each direction of a bidirectional encoder has half the width.
    layers: number of layers in the encoder and in the decoder. cell: "lstm" or "gru".
    attention: "none" (Sutskever et al. 2014); "additive" (Bahdanau et al. 2015); "dot", "general" or "concat"
        (Luong et al. 2015, eq. 8).
    bidirectional: use a bidirectional encoder (Schuster and Paliwal 1997).
    reverse: reverse the source sentence (Sutskever et al. 2014, section 3.3).
    input_feeding: feed the attended vector into the next step (Luong et al. 2015, section 3.3).
    dropout: dropout probability for embeddings, between layers and before the vocabulary projection.

    >>> from regard.models.configs import RecurrentConfig
    >>> RecurrentConfig(cell="gru", attention="additive").parallel
    False
    >>> RecurrentConfig(attention="additive", input_feeding=True)
    Traceback (most recent call last):
    regard.errors.ArgumentError: RecurrentConfig got input_feeding=True and attention='additive'; ...
    """

    width: int = 256
    layers: int = 1
    cell: Cell = "lstm"
    attention: AttentionKind = "general"
    bidirectional: bool = True
    reverse: bool = False
    input_feeding: bool = False
    dropout: float = 0.1

    def __post_init__(self) -> None:
        check_int("RecurrentConfig got width", self.width, min=1)
        check_int("RecurrentConfig got layers", self.layers, min=1)
        check_number("RecurrentConfig got dropout", self.dropout, min=0, below=1)
        check_choice("RecurrentConfig got cell", self.cell, get_args(Cell))
        check_choice("RecurrentConfig got attention", self.attention, get_args(AttentionKind))
        for name in ("bidirectional", "reverse", "input_feeding"):
            check_bool(f"RecurrentConfig got {name}", getattr(self, name))
        if self.bidirectional and self.width % 2:
            raise ArgumentError(
                f"RecurrentConfig got width={self.width} and bidirectional=True; each direction has half the "
                f"width, so width must be even, e.g. {self.width + 1}."
            )
        if self.input_feeding and self.attention in ("none", "additive"):
            raise ArgumentError(
                f"RecurrentConfig got input_feeding=True and attention={self.attention!r}; input feeding "
                "needs dot, general or concat attention."
            )

    @property
    def parallel(self) -> bool:
        """Whether all target positions are computed in parallel during training."""
        return self.attention != "additive" and not self.input_feeding
