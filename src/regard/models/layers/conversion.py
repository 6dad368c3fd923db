"""torch's multi-head attention as regard's, and back."""

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, DTypeError
from regard.mechanism.normalizers import Softmax, Softmax1
from regard.mechanism.scores import ScaledDot
from regard.models.layers.attention import MultiHeadAttention


def from_torch(module: nn.MultiheadAttention) -> MultiHeadAttention:
    """The same numbers from regard's layer; torch's `add_zero_attn` is `Softmax1`: a key that scores 0."""
    if not isinstance(module, nn.MultiheadAttention):
        raise DTypeError(
            f"from_torch got a {type(module).__name__}; it converts torch.nn.MultiheadAttention."
        )
    if module.bias_k is not None:
        raise ArgumentError(
            "from_torch got a layer with add_bias_kv=True; regard has no learned extra key. "
            "Append it to the source yourself, or train without it."
        )
    assert module.kdim is not None
    assert module.vdim is not None
    layer = MultiHeadAttention(
        module.embed_dim,
        module.num_heads,
        source_width=(module.kdim, module.vdim),
        linear_bias=module.in_proj_bias is not None,
        normalize=Softmax1() if module.add_zero_attn else Softmax(),
        dropout=module.dropout,
    )
    given = module.out_proj.weight
    layer.to(device=given.device, dtype=given.dtype).train(module.training)
    _copy(_theirs(module), _ours(layer))
    layer.requires_grad_(given.requires_grad)
    return layer


def to_torch(layer: MultiHeadAttention) -> nn.MultiheadAttention:
    """The same numbers from torch's layer, batch first."""
    width = layer.width / layer.heads if layer.width % layer.heads else layer.width // layer.heads
    for name, ours, only in (
        ("score", layer.score, (ScaledDot(),)),
        ("normalize", layer.normalize, (Softmax(), Softmax1())),
        ("key_heads", layer.key_heads, (layer.heads,)),
        ("head_width", (layer.head_width, layer.head_value_width), ((width, width),)),
    ):
        if not any(_same(ours, one) for one in only):
            raise ArgumentError(
                f"to_torch got a layer with {name} = {ours!r}; torch.nn.MultiheadAttention has only "
                f"{' or '.join(map(repr, only))}."
            )
    module = nn.MultiheadAttention(
        layer.width,
        layer.heads,
        dropout=layer.dropout,
        bias=layer.out_proj.bias is not None,
        add_zero_attn=isinstance(layer.normalize, Softmax1),
        kdim=layer.key_width,
        vdim=layer.value_width,
        batch_first=True,
    )
    module.to(device=layer.out_proj.weight.device, dtype=layer.out_proj.weight.dtype).train(layer.training)
    _copy(_ours(layer), _theirs(module))
    return module


def _same(ours: object, only: object) -> bool:
    if isinstance(only, Softmax1):  # compares by identity, as its sink may be a tensor
        return isinstance(ours, Softmax1) and not isinstance(ours.score, Tensor) and ours.score == only.score
    return ours == only


def _ours(layer: MultiHeadAttention) -> list[Tensor | None]:
    """Matrix and bias of query, key, value and output."""
    parts = [tensor for which in range(3) for tensor in layer.projection(which)]
    return [*parts, layer.out_proj.weight, layer.out_proj.bias]


def _theirs(module: nn.MultiheadAttention) -> list[Tensor | None]:
    if module.in_proj_weight is None:
        matrices = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    else:
        matrices = list(module.in_proj_weight.chunk(3))
    biases = [None] * 3 if module.in_proj_bias is None else list(module.in_proj_bias.chunk(3))
    parts = [tensor for pair in zip(matrices, biases, strict=True) for tensor in pair]
    return [*parts, module.out_proj.weight, module.out_proj.bias]


def _copy(given: list[Tensor | None], taken: list[Tensor | None]) -> None:
    with torch.no_grad():
        for old, new in zip(given, taken, strict=True):
            assert (old is None) == (new is None)
            if old is not None and new is not None:
                new.copy_(old)
