"""One-line summary of a model: parameters, layers, heads and cost per token.

The cost is the number of floating-point operations (FLOPs) in the matrix products for one token. A
multiply-add counts as two operations. Embedding lookups, norms and activations are not counted.
"""

from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from regard._util.checks import check_int
from regard._util.text import format_bytes, type_name
from regard.errors import ArgumentError, DTypeError
from regard.mechanism.scores import Additive, Concat, General
from regard.models.layers.attention import Attends, MultiHeadAttention, is_cross_attention
from regard.models.layers.blocks import DecoderBlock, EncoderBlock

_BLOCKS = (EncoderBlock, DecoderBlock, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_COMPILED = "_orig_mod"  # attribute in which a torch.compile wrapper stores the model
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Summary:
    """The result of `summary`; prints as one line.

    parameters, bytes: number of parameters and their size in bytes.
    layers: number of layers; two values for an encoder and a decoder, () if there are no layers.
    heads: distinct pairs (heads, key heads) of the attention layers, in ascending order.
    cost: FLOPs per token, or per source token and per target token, for sequences of `length` tokens.

    >>> import torch
    >>> from regard.models import summary
    >>> info = summary(torch.nn.Linear(3, 5))
    >>> info.parameters, info.layers, info.cost
    (20, (), (30,))
    """

    model: str
    parameters: int
    bytes: int
    layers: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]
    cost: tuple[int, ...]
    length: int

    def __str__(self) -> str:
        parts = [f"{_si(self.parameters).strip()} parameters ({format_bytes(self.bytes)})"]
        if self.layers:
            parts.append(f"{' + '.join(map(str, self.layers))} layer{_s(sum(self.layers))}")
        if self.heads:
            heads, key_heads = (_range(numbers) for numbers in zip(*self.heads, strict=True))
            over = "" if heads == key_heads else f" over {key_heads}"
            parts.append(f"{heads} head{_s(self.heads[-1][0])}{over}")
        kinds = ("token",) if len(self.cost) == 1 else ("source token", "target token")
        costs = [f"{_si(cost)}FLOP per {kind}" for cost, kind in zip(self.cost, kinds, strict=True)]
        at = f" at {self.length} token{_s(self.length)}" if self.heads else ""
        return f"{self.model}: {', '.join(parts)}, {' and '.join(costs)}{at}"

    __repr__ = __str__


def summary(model: nn.Module, *, length: int = 128) -> Summary:
    """Summarize a model: parameters (shared ones counted once), layers, heads, and FLOPs per token.

    length: sequence length of source and target, which determines the cost of attention.

    The FLOPs include the matrix products of Linear, recurrent and convolution layers, of attention layers
    (`Attends` and torch's own), and of an `output_weight` shared with the embedding. For a model with
    `encoder` and `decoder`, s source tokens and t target tokens cost s × the first value + t × the second.

    >>> import torch, regard
    >>> from regard.models import summary
    >>> summary(regard.models.EncoderBlock(regard.models.TransformerConfig(width=256, heads=8, key_heads=2)))
    EncoderBlock: 691.1 k parameters (2.8 MB), 1 layer, 8 heads over 2, 1.5 MFLOP per token at 128 tokens
    >>> summary(torch.nn.Transformer(64, 4, 3, 3, 256, batch_first=True), length=32)
    Transformer: 350.5 k parameters (1.4 MB), 3 + 3 layers, 4 heads,
    368.6 kFLOP per source token and 393.2 kFLOP per target token at 32 tokens
    """
    _check(model, length)
    model = _uncompiled(model)
    is_seq2seq = all(isinstance(getattr(model, part, None), nn.Module) for part in ("encoder", "decoder"))
    sides = 2 if is_seq2seq else 1
    cost, blocks, attentions, heads = [0] * sides, [0] * sides, [0] * sides, set[tuple[int, int]]()
    for path, module in model.named_modules(remove_duplicate=False):  # a layer used twice is counted twice
        name = ".".join(part for part in path.split(".") if part != _COMPILED)
        side = 0 if f"{name}.".startswith("encoder.") else -1
        cost[side] += 2 * _matrix_products(module)
        blocks[side] += _layers(module)
        if isinstance(module, Attends | nn.MultiheadAttention):
            attentions[side] += 1
            heads.add(_heads(module))
            cost[side] += 2 * _attention_products(module, length)
            if is_cross_attention(name):  # keys and values are projected once per source token
                cost[side] -= 2 * _key_value_products(module)
                cost[0] += 2 * _key_value_products(module)
    cost[-1] += 2 * _tied_weights(model)
    layers = tuple(n or alone for n, alone in zip(blocks, attentions, strict=True))
    parameters = list(model.parameters())
    return Summary(
        type(model).__name__,
        sum(parameter.numel() for parameter in parameters),
        sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        layers if any(layers) else (),
        tuple(sorted(heads)),
        tuple(cost),
        length,
    )


def _check(model: nn.Module, length: int) -> None:
    if not isinstance(model, nn.Module):
        raise DTypeError(f"summary got {model!r:.60}; pass a torch.nn.Module.")
    check_int("summary got length", length, min=1)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ArgumentError(
                f"summary got {type_name(model)} whose {name} is uninitialized; call the model "
                "once to initialize it."
            )


def _uncompiled(model: nn.Module) -> nn.Module:
    """Return the model inside a torch.compile wrapper, or the model itself if it is not compiled."""
    inner = model._modules.get(_COMPILED)
    return model if inner is None else _uncompiled(inner)


def _matrix_products(module: nn.Module) -> int:
    """Count the multiplications per token in the matrix products of a module, excluding its submodules."""
    if isinstance(module, nn.RNNBase | nn.RNNCellBase | nn.MultiheadAttention):
        return sum(p.numel() for p in module.parameters(recurse=False) if p.dim() == 2)
    # Conv1D is the linear layer of Hugging Face's GPT-2
    if isinstance(module, (nn.Linear, *_CONVOLUTIONS)) or type(module).__name__ == "Conv1D":
        weight = module.weight
        assert isinstance(weight, Tensor)
        return weight.numel()
    return 0


def _layers(module: nn.Module) -> int:
    """Return the number of layers in a module, not counting its submodules."""
    if isinstance(module, nn.RNNBase):
        return module.num_layers
    return int(isinstance(module, (*_BLOCKS, nn.RNNCellBase)))


def _heads(layer: Attends | nn.MultiheadAttention) -> tuple[int, int]:
    """Return the number of heads and the number of key heads."""
    heads = layer.num_heads if isinstance(layer, nn.MultiheadAttention) else getattr(layer, "heads", 1)
    return heads, getattr(layer, "key_heads", heads)


def _attention_products(layer: Attends | nn.MultiheadAttention, length: int) -> int:
    """Count the multiplications per token for scores and weighted sums, excluding the layer's projections."""
    heads, _ = _heads(layer)
    if isinstance(layer, nn.MultiheadAttention):
        return 2 * heads * layer.head_dim * length
    score, width = getattr(layer, "score", None), getattr(layer, "head_width", 0)
    matrices = 0
    if isinstance(score, General):
        matrices, width = heads * score.weight.numel(), score.weight.shape[1]
    elif isinstance(score, Additive | Concat):
        matrices, width = heads * score.query_map.numel() + _key_map(layer), len(score.vector)
    return matrices + heads * (width + getattr(layer, "head_value_width", 0)) * length


def _key_value_products(layer: Attends | nn.MultiheadAttention) -> int:
    """Count the multiplications that project one token's key and value."""
    if isinstance(layer, MultiHeadAttention):
        return layer.projection(1)[0].numel() + layer.projection(2)[0].numel() + _key_map(layer)
    if isinstance(layer, Attends):
        return _key_map(layer)
    assert layer.kdim is not None
    assert layer.vdim is not None
    return layer.embed_dim * (layer.kdim + layer.vdim)


def _key_map(layer: Attends) -> int:
    score = getattr(layer, "score", None)
    return _heads(layer)[1] * score.key_map.numel() if isinstance(score, Additive | Concat) else 0


def _tied_weights(model: nn.Module) -> int:
    """Count the parameters of output embeddings that are not in a Linear layer."""
    weights: dict[int, Tensor] = {}
    for module in map(_uncompiled, model.modules()):
        with suppress(NotImplementedError):
            weight = getattr(module, "output_weight", None)
            if isinstance(weight, Tensor):
                weights[id(weight)] = weight
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weights.pop(id(module.weight), None)
    return sum(weight.numel() for weight in weights.values())


def _si(number: int) -> str:
    """Format a number with an SI prefix: "1.5 M"."""
    for unit, prefix in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.1f} {prefix}"
    return f"{number} "


def _range(numbers: tuple[int, ...]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}-{high}"


def _s(number: int) -> str:
    return "" if number == 1 else "s"
