"""What a model is, in one line: parameters, layers, heads, cost per token.

A cost is counted in floating-point operations, two for each multiplication with its addition: those of all
matrix products that one token passes on its way. Looking up an embedding, norms and activations are free.
"""

from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from regard._util.checks import check_int
from regard._util.text import format_bytes
from regard.errors import ArgumentError, DTypeError
from regard.mechanism.scores import Additive, Concat, General
from regard.models.layers.attention import Attends, MultiHeadAttention
from regard.models.layers.blocks import DecoderBlock, EncoderBlock

_BLOCKS = (EncoderBlock, DecoderBlock, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_CROSS = ("cross", "multihead_attn")  # the attention to the source in DecoderBlock and in torch's decoder
_COMPILED = "_orig_mod"  # what torch.compile calls the module that it wraps
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Summary:
    """What `summary` finds; printed, it is one line.

    parameters, bytes: how many numbers are learned, and the memory that they take.
    layers: how many; two numbers for an encoder and a decoder, none for a model that has no layers to count.
    heads: the pairs (heads, key heads) that occur, smallest first.
    cost: operations per token, or per source token and per target token, where each looks at `length` tokens.

    >>> import torch
    >>> from regard.models import summary
    >>> found = summary(torch.nn.Linear(3, 5))
    >>> found.parameters, found.layers, found.cost
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
        parts = [f"{_number(self.parameters).strip()} parameters ({format_bytes(self.bytes)})"]
        if self.layers:
            parts.append(f"{' + '.join(map(str, self.layers))} layer{_s(sum(self.layers))}")
        if self.heads:
            heads, key_heads = (_range(numbers) for numbers in zip(*self.heads, strict=True))
            over = "" if heads == key_heads else f" over {key_heads}"
            parts.append(f"{heads} head{_s(self.heads[-1][0])}{over}")
        kinds = ("token",) if len(self.cost) == 1 else ("source token", "target token")
        costs = [f"{_number(cost)}FLOP per {kind}" for cost, kind in zip(self.cost, kinds, strict=True)]
        at = f" at {self.length} token{_s(self.length)}" if self.heads else ""
        return f"{self.model}: {', '.join(parts)}, {' and '.join(costs)}{at}"

    __repr__ = __str__


def summary(model: nn.Module, *, length: int = 128) -> Summary:
    """A model in one line: its parameters (shared ones once), layers, heads, and what a token costs.

    length: how many tokens each attention looks at, in the source and in the target.

    Matrix products are those of Linear, recurrent and convolution layers, of the attentions that derive from
    `Attends` or are torch's own, and of the `output_weight` that a model shares with its embedding. With an
    `encoder` and a `decoder`, s source and t target tokens cost s × the first number + t × the second.

    >>> import torch, regard
    >>> from regard.models import summary
    >>> summary(regard.models.EncoderBlock(regard.models.TransformerConfig(width=256, heads=8, key_heads=2)))
    EncoderBlock: 691.1 k parameters (2.8 MB), 1 layer, 8 heads over 2, 1.5 MFLOP per token at 128 tokens
    >>> summary(torch.nn.Transformer(64, 4, 3, 3, 256, batch_first=True), length=32)
    Transformer: 350.5 k parameters (1.4 MB), 3 + 3 layers, 4 heads,
    368.6 kFLOP per source token and 393.2 kFLOP per target token at 32 tokens
    """
    _check(model, length)
    model = _plain(model)
    two = all(isinstance(getattr(model, part, None), nn.Module) for part in ("encoder", "decoder"))
    sides = 2 if two else 1
    cost, stacked, attending, heads = [0] * sides, [0] * sides, [0] * sides, set[tuple[int, int]]()
    for path, module in model.named_modules(remove_duplicate=False):  # a layer used twice is paid twice
        name = ".".join(part for part in path.split(".") if part != _COMPILED)
        side = 0 if f"{name}.".startswith("encoder.") else -1
        cost[side] += 2 * _matrix(module)
        stacked[side] += _layers(module)
        if isinstance(module, Attends | nn.MultiheadAttention):
            attending[side] += 1
            heads.add(_heads(module))
            cost[side] += 2 * _scoring(module, length)
            if _reads_source(name, module):  # whose keys and values are made once for each source token
                cost[side] -= 2 * _keys(module)
                cost[0] += 2 * _keys(module)
    cost[-1] += 2 * _tied(model)
    layers = tuple(blocks or alone for blocks, alone in zip(stacked, attending, strict=True))
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
        raise DTypeError(f"summary got {model!r:.60}; it sums up a torch.nn.Module.")
    check_int("summary got length", length, min=1)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ArgumentError(
                f"summary got a {type(model).__name__} whose {name} has no shape yet; call the model once."
            )


def _plain(model: nn.Module) -> nn.Module:
    """The model that torch.compile wrapped."""
    inner = model._modules.get(_COMPILED)
    return model if inner is None else _plain(inner)


def _matrix(module: nn.Module) -> int:
    """The multiplications of one token with the module's own matrices."""
    if isinstance(module, nn.RNNBase | nn.RNNCellBase | nn.MultiheadAttention):
        own = module.parameters(recurse=False)
        return sum(parameter.numel() for parameter in own if parameter.dim() == 2)
    # Hugging Face's GPT-2 calls its Linear a Conv1D
    if isinstance(module, (nn.Linear, *_CONVOLUTIONS)) or type(module).__name__ == "Conv1D":
        weight = module.weight
        assert isinstance(weight, Tensor)
        return weight.numel()
    return 0


def _layers(module: nn.Module) -> int:
    """How many layers of a stack this module is."""
    if isinstance(module, nn.RNNBase):
        return module.num_layers
    return int(isinstance(module, (*_BLOCKS, nn.RNNCellBase)))


def _heads(layer: Attends | nn.MultiheadAttention) -> tuple[int, int]:
    """Heads and key heads."""
    heads = layer.num_heads if isinstance(layer, nn.MultiheadAttention) else getattr(layer, "heads", 1)
    return heads, getattr(layer, "key_heads", heads)


def _scoring(layer: Attends | nn.MultiheadAttention, length: int) -> int:
    """The multiplications with keys, values and matrices of the score, but without the projections."""
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


def _keys(layer: Attends | nn.MultiheadAttention) -> int:
    """The multiplications that make one token's keys and values."""
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


def _reads_source(name: str, layer: Attends | nn.MultiheadAttention) -> bool:
    """An attention to the source: by its name in a block; a recurrent decoder has no other."""
    last = name.rpartition(".")[2]
    alone = not isinstance(layer, MultiHeadAttention | nn.MultiheadAttention)
    return name.startswith("decoder.") and (alone or last in _CROSS)


def _tied(model: nn.Module) -> int:
    """The size of vocabulary matrices that belong to no Linear."""
    found: dict[int, Tensor] = {}
    for module in map(_plain, model.modules()):
        with suppress(NotImplementedError):
            weight = getattr(module, "output_weight", None)
            if isinstance(weight, Tensor):
                found[id(weight)] = weight
    for module in model.modules():
        if isinstance(module, nn.Linear):
            found.pop(id(module.weight), None)
    return sum(weight.numel() for weight in found.values())


def _number(number: int) -> str:
    """1.5 M: what a unit follows."""
    for unit, sign in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.1f} {sign}"
    return f"{number} "


def _range(numbers: tuple[int, ...]) -> str:
    least, most = min(numbers), max(numbers)
    return str(least) if least == most else f"{least}-{most}"


def _s(number: int) -> str:
    return "" if number == 1 else "s"
