"""Convert between `nn.MultiheadAttention` and `MultiHeadAttention`."""

import torch
from torch import Tensor, nn

from regard._util.text import type_name
from regard.errors import ArgumentError, DTypeError
from regard.mechanism.normalizers import Softmax, Softmax1
from regard.mechanism.scores import ScaledDot
from regard.models.layers.attention import MultiHeadAttention


def from_torch(module: nn.MultiheadAttention) -> MultiHeadAttention:
    """Convert an `nn.MultiheadAttention`. `add_zero_attn` (an extra key with score 0) becomes `Softmax1`."""
    if not isinstance(module, nn.MultiheadAttention):
        raise DTypeError(f"from_torch got {type_name(module)}; pass a torch.nn.MultiheadAttention.")
    if module.bias_k is not None:
        raise ArgumentError(
            "from_torch got a layer with add_bias_kv=True, which regard does not support. Append the extra "
            "key to the source, or train the layer without this option."
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
    weight = module.out_proj.weight
    layer.to(device=weight.device, dtype=weight.dtype).train(module.training)
    _copy(_torch_tensors(module), _tensors(layer))
    layer.requires_grad_(weight.requires_grad)
    return layer


def to_torch(layer: MultiHeadAttention) -> nn.MultiheadAttention:
    """Convert to an `nn.MultiheadAttention` with batch_first=True."""
    width = layer.width / layer.heads if layer.width % layer.heads else layer.width // layer.heads
    for name, value, supported in (
        ("score", layer.score, (ScaledDot(),)),
        ("normalize", layer.normalize, (Softmax(), Softmax1())),
        ("key_heads", layer.key_heads, (layer.heads,)),
        ("head_width", (layer.head_width, layer.head_value_width), ((width, width),)),
    ):
        if not any(_same(value, other) for other in supported):
            raise ArgumentError(
                f"to_torch got a layer with {name}={value!r}; torch.nn.MultiheadAttention supports only "
                f"{' or '.join(map(repr, supported))}."
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
    _copy(_tensors(layer), _torch_tensors(module))
    return module


def _same(value: object, other: object) -> bool:
    if isinstance(other, Softmax1):  # Softmax1 compares by identity, because its score may be a tensor
        return (
            isinstance(value, Softmax1) and not isinstance(value.score, Tensor) and value.score == other.score
        )
    return value == other


def _tensors(layer: MultiHeadAttention) -> list[Tensor | None]:
    """Return the weights and biases of the query, key, value and output projections."""
    parts = [tensor for which in range(3) for tensor in layer.projection(which)]
    return [*parts, layer.out_proj.weight, layer.out_proj.bias]


def _torch_tensors(module: nn.MultiheadAttention) -> list[Tensor | None]:
    if module.in_proj_weight is None:
        matrices = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    else:
        matrices = list(module.in_proj_weight.chunk(3))
    biases = [None] * 3 if module.in_proj_bias is None else list(module.in_proj_bias.chunk(3))
    parts = [tensor for pair in zip(matrices, biases, strict=True) for tensor in pair]
    return [*parts, module.out_proj.weight, module.out_proj.bias]


def _copy(source: list[Tensor | None], target: list[Tensor | None]) -> None:
    with torch.no_grad():
        for old, new in zip(source, target, strict=True):
            assert (old is None) == (new is None)
            if old is not None and new is not None:
                new.copy_(old)
