"""One decoding step of a Transformer decoder, without the checks and views of the general layers.

With a few rows, the checks and views take longer than the matrix products. The results equal those of the
general layers up to rounding.

compiled_step   a single kernel call for all blocks: for int8 weights, or float32 with few rows
decode_step     matrix products by torch, attention by the kernels: for float32 with many rows
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.mechanism import fused
from regard.mechanism.kernels import layer_kernels
from regard.mechanism.kernels.layer_kernels import Strided
from regard.mechanism.normalizers import Softmax
from regard.mechanism.scores import ScaledDot
from regard.mechanism.torch_state import plain_cpu
from regard.models.layers.attention import Attends, MultiHeadAttention
from regard.models.layers.blocks import (
    DecoderBlock,
    EncoderBlock,
    FeedForward,
    Residual,
    Stack,
    TransformerConfig,
)
from regard.models.layers.dropout import Dropout
from regard.models.layers.kv_cache import KeyValues, KVCache, RowMap
from regard.models.layers.linear import MAX_ROWS, Int8Linear, few_rows_linear, project

_ATTENTION = Attends.attention  # the original, which `regard.watch` and `regard.edit` replace
_MODULES = {  # exact types: a subclass may compute anything
    Stack,
    EncoderBlock,
    DecoderBlock,
    MultiHeadAttention,
    FeedForward,
    Residual,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.Linear,
    Int8Linear,
    nn.Identity,
    nn.ModuleList,
    Dropout,
}
_METHODS = {"forward", "attention", "encode"}  # an instance attribute of this name overrides the method


class Source(NamedTuple):
    """Projected sources of a batch: keys and values (sources, s, 2 g d) per block, lengths and row map.

    addresses: the addresses of each block's parameters, if `compiled_step` supports the decoder.
    kept: the tensors at these addresses, to keep their memory alive if the model changes.
    recorded: a block and the cache of its cross-attention queries, if `State.record_queries` was called.
    layers, hooks: the decoder's attention layers and the hooks of its modules, for `is_observed`.
    """

    key_values: list[Tensor]
    lengths: Tensor
    row_map: RowMap
    addresses: list[list[int]] | None = None
    kept: list[Tensor] = []  # noqa: RUF012
    recorded: tuple[int, KVCache] | None = None
    layers: list[MultiHeadAttention] = []  # noqa: RUF012
    hooks: list[Mapping[int, object]] = []  # noqa: RUF012

    @classmethod
    def of(cls, stack: Stack, sources: list[KeyValues], lengths: Tensor, row_map: RowMap) -> "Source":
        """Create a Source from the keys and values (b, g, s, d) of each block."""
        joined = [
            torch.cat([part.transpose(1, 2).flatten(2) for part in (source.key, source.value)], -1)
            for source in sources
        ]
        compiled = is_compiled(stack)
        addresses = [_block_addresses(block) for block in stack.blocks] if compiled else None  # type: ignore[arg-type]
        modules = list(stack.modules())
        return cls(
            joined,
            lengths.long().contiguous(),
            row_map,
            addresses,
            kept=[x.detach() for x in (*stack.parameters(), *stack.buffers())] if compiled else [],
            layers=[module for module in modules if isinstance(module, MultiHeadAttention)],
            hooks=[
                hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)
            ],
        )

    def is_observed(self) -> bool:
        """Return whether the decoder has been watched, edited or hooked since `supports` was checked."""
        return not is_original() or any(self.hooks) or any(layer.watchers for layer in self.layers)

    def select(self, kept: Tensor | None, row_map: RowMap) -> "Source":
        """Return the sources with the indices `kept` (all if None) and a new row map."""
        if kept is None:
            return self._replace(row_map=row_map)
        key_values = [source[kept] for source in self.key_values]
        return self._replace(key_values=key_values, lengths=self.lengths[kept], row_map=row_map)


def is_original() -> bool:
    """Return whether `regard.watch` and `regard.edit` leave the attention of regard's layers unchanged."""
    return Attends.attention is _ATTENTION


def supports(stack: Stack) -> bool:
    """Return whether `decode_step` can replace the stack, which must be neither watched nor edited."""
    return (
        fused.available()
        and not stack.training
        and is_original()
        and not torch.is_grad_enabled()
        and _is_position_encoding(stack.positions)
        and all(_is_plain(module) for module in stack.modules())
        and all(p.dtype is torch.float32 and p.is_contiguous() for p in _float_tensors(stack))
        and plain_cpu(*stack.parameters())
    )


def _float_tensors(stack: Stack) -> Iterator[Tensor]:
    yield from stack.parameters()
    yield from (module.scales for module in stack.modules() if isinstance(module, Int8Linear))


def _is_plain(module: nn.Module) -> bool:
    if module._forward_hooks or module._forward_pre_hooks or not vars(module).keys().isdisjoint(_METHODS):
        return False
    if isinstance(module, MultiHeadAttention):
        return (
            type(module) is MultiHeadAttention
            and not module.watchers
            and module.normalize == Softmax()
            and module.score == ScaledDot()
            and isinstance(module.in_proj, nn.Linear | Int8Linear)
            and module.head_width == module.head_value_width
        )
    return type(module) in _MODULES or _is_position_encoding(module)


def _is_position_encoding(module: object) -> bool:
    """Whether a module encodes positions in the input of the first block, which the caller prepares."""
    from regard.models.layers.position_encoding import PositionEncoding
    from regard.models.layers.positions.rotary import RotaryPositions

    return isinstance(module, PositionEncoding) and not isinstance(module, RotaryPositions)


def compiled_step(
    stack: Stack, x: Tensor, source: Source, caches: list[KVCache], output: nn.Linear | Int8Linear
) -> Tensor | None:
    """Apply all blocks and the output projection to one token per row, (n, m) → (n, V).

    x: embeddings with positions. Returns None and leaves the caches unchanged if the kernels do not support
    the call or a result is not finite.
    """
    if source.addresses is None or not _is_readable(output, len(x)):
        return None
    layer: MultiHeadAttention = stack.blocks[0].attention  # type: ignore[assignment]
    n, width, head, groups = len(x), x.shape[1], layer.head_width, layer.key_heads
    queries, row, inner = layer.heads * head, 2 * groups * head, stack.config.resolved_ffn_dim
    buffers = [cache.reserve(x, (groups, head, head)) for cache in caches]
    rows, logits = source.row_map, x.new_empty(n, output.out_features)
    sizes = (n * width, n * width, n * (queries + row), n * queries, n * inner)
    changed = x.clone()
    spread = 0 if rows.index is None else 2 * rows.sources * rows.slots * queries
    scratch = x.new_empty(sum(sizes) + spread)
    address = scratch.data_ptr()
    numbers = [n, width, groups, layer.heads // groups, head, inner, output.out_features]
    numbers += (
        caches[0].length,
        buffers[0].shape[1],
        rows.sources,
        rows.slots,
        source.key_values[0].shape[1],
    )
    numbers += (0 if rows.index is None else rows.index.data_ptr(), source.lengths.data_ptr())
    numbers += (changed.data_ptr(), logits.data_ptr())
    for size in (0, *sizes):
        address += 4 * size
        numbers.append(address)
    numbers += (stack.config.norm_first, len(buffers))
    recorded: dict[int, int] = {}
    if source.recorded is not None:
        block, queries_cache = source.recorded
        caches = [*caches, queries_cache]
        buffer = queries_cache.reserve(x, (layer.heads, head, 0))
        if queries_cache.length != caches[0].length or buffer.shape[1] != buffers[0].shape[1]:
            return None  # the kernels use one position and one capacity for all caches
        recorded[block] = buffer.data_ptr()
    for i, (buffer, key_values) in enumerate(zip(buffers, source.key_values, strict=True)):
        numbers += (buffer.data_ptr(), key_values.data_ptr(), recorded.get(i, 0), *source.addresses[i])
    numbers += (*norm_addresses(stack.norm), *layer_addresses(output))
    if not layer_kernels.decode_step(numbers, stack.config.eps):
        return None
    for cache in caches:
        cache.length += 1
    return logits


def _is_readable(output: nn.Linear | Int8Linear, rows: int) -> bool:
    """Whether the kernels can read the output projection's weights and are fast for this number of rows."""
    if isinstance(output, Int8Linear):
        return True
    return rows <= MAX_ROWS and output.weight.is_contiguous() and output.weight.dtype is torch.float32


def is_compiled(stack: Stack) -> bool:
    """Whether the kernels support a stack: layer norms, ReLU, and the same sizes in all blocks."""
    config, blocks = stack.config, list(stack.blocks)
    norms = [module for module in stack.modules() if isinstance(module, nn.LayerNorm)]
    return (
        bool(blocks)
        and all(isinstance(norm, nn.LayerNorm | nn.Identity) for norm in (stack.embedding_norm, stack.norm))
        and all(norm.elementwise_affine and norm.eps == config.eps for norm in norms)
        and all(_is_compiled_block(block, config, blocks[0].attention) for block in blocks)  # type: ignore[arg-type]
    )


def _is_compiled_block(block: nn.Module, config: TransformerConfig, first: MultiHeadAttention) -> bool:
    assert isinstance(block, EncoderBlock | DecoderBlock)
    residuals, attentions = [block.attention_residual, block.feed_forward_residual], [block.attention]
    if isinstance(block, DecoderBlock):
        residuals.append(block.cross_residual)
        attentions.append(block.cross)
    heads, key_heads, head, width = first.heads, first.key_heads, first.head_width, config.width
    inner = config.resolved_ffn_dim
    return (
        block.feed_forward.activation == "relu"
        and all(isinstance(x.norm, nn.LayerNorm) and x.norm_first == config.norm_first for x in residuals)
        and all((x.heads, x.key_heads, x.head_width) == (heads, key_heads, head) for x in attentions)
        and all(_shape(x.in_proj) == ((heads + 2 * key_heads) * head, width) for x in attentions)
        and all(_shape(x.out_proj) == (width, heads * head) for x in attentions)
        and _shape(block.feed_forward.in_proj) == (inner, width)
        and _shape(block.feed_forward.out_proj) == (width, inner)
    )


def _shape(layer: nn.Module) -> tuple[int, ...]:
    """Return the numbers of outputs and inputs of a linear layer."""
    if isinstance(layer, Int8Linear):
        return layer.out_features, layer.in_features
    assert isinstance(layer, nn.Linear)
    return tuple(layer.weight.shape)  # its parameters may have been replaced


def _block_addresses(block: DecoderBlock) -> list[int]:
    residuals = (block.attention_residual, block.cross_residual, block.feed_forward_residual)
    layers = (
        *(block.attention.in_proj, block.attention.out_proj, block.cross.in_proj, block.cross.out_proj),
        *(block.feed_forward.in_proj, block.feed_forward.out_proj),
    )
    norms = [address for residual in residuals for address in norm_addresses(residual.norm)]
    return norms + [address for layer in layers for address in layer_addresses(layer)]  # type: ignore[arg-type]


def norm_addresses(norm: nn.Module) -> tuple[int, int]:
    """Return the addresses of a layer norm's parameters; zeros for the identity."""
    if not isinstance(norm, nn.LayerNorm):
        return 0, 0
    return _address(norm.weight), _address(norm.bias)


def layer_addresses(layer: nn.Linear | Int8Linear) -> tuple[int, int, int]:
    """Return the addresses of a linear layer's weight, scales and bias; 0 for those that it lacks."""
    if isinstance(layer, Int8Linear):
        return _address(layer.packed), _address(layer.scales), _address(layer.bias)
    return _address(layer.weight), 0, _address(layer.bias)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def decode_step(stack: Stack, x: Tensor, source: Source, caches: list[KVCache]) -> Tensor | None:
    """Apply all blocks to one token per row, (n, m) → (n, m), and append to the caches.

    x: embeddings with positions. Returns None and leaves the caches unchanged if a result is not finite.
    """
    length = caches[0].length
    for i, (block, key_values, cache) in enumerate(zip(stack.blocks, source.key_values, caches, strict=True)):
        recorder = source.recorded[1] if source.recorded is not None and source.recorded[0] == i else None
        assert isinstance(block, DecoderBlock)
        after = _residual(block.attention_residual, x, lambda y: _self_attention(block.attention, y, cache))  # noqa: B023
        if after is not None:
            after = _residual(
                block.cross_residual,
                after,
                lambda y: _cross_attention(block.cross, y, key_values, source, recorder),  # noqa: B023
            )
        if after is None:
            for changed in (*caches, *([] if source.recorded is None else [source.recorded[1]])):
                changed.length = length
            return None
        x = _residual(block.feed_forward_residual, after, lambda y: _feed_forward(block.feed_forward, y))  # type: ignore[assignment]  # noqa: B023
    normalized: Tensor = stack.norm(x)
    return normalized


def _residual(residual: Residual, x: Tensor, sublayer: Callable[[Tensor], Tensor | None]) -> Tensor | None:
    y = sublayer(residual.norm(x) if residual.norm_first else x)
    if y is None:
        return None
    y += x
    normalized: Tensor = y if residual.norm_first else residual.norm(y)
    return normalized


def linear(x: Tensor, layer: nn.Linear | Int8Linear) -> Tensor:
    """Apply a linear layer to a few rows (n, m)."""
    if isinstance(layer, Int8Linear):
        return layer(x)
    return few_rows_linear(x, layer.weight, layer.bias)


def _self_attention(layer: MultiHeadAttention, x: Tensor, cache: KVCache) -> Tensor | None:
    n, width = len(x), layer.head_width
    projected = linear(x, layer.in_proj)  # type: ignore[arg-type]
    queries = layer.heads * width
    buffer = cache.append(projected[:, queries:], (layer.key_heads, width, width))
    output = x.new_empty(n, queries)
    per_group = layer.heads // layer.key_heads
    row, capacity = buffer.shape[-1], buffer.shape[-2]
    strides = (capacity * row, width, 0, row, 1)
    address = buffer.data_ptr()
    tensors = {
        "query": Strided(projected.data_ptr(), (projected.shape[1], per_group * width, width, 0, 1)),
        "key": Strided(address, strides),
        "value": Strided(address + 4 * layer.key_heads * width, strides),
        "output": Strided(output.data_ptr(), (queries, per_group * width, width, 0, 1)),
    }
    sizes = (n, layer.key_heads, per_group, 1, cache.length, width)
    if not layer_kernels.decode(sizes, tensors, width**-0.5):
        return None
    return linear(output, layer.out_proj)


def _cross_attention(
    layer: MultiHeadAttention, x: Tensor, key_values: Tensor, source: Source, recorder: KVCache | None
) -> Tensor | None:
    """Attend to the sources. One call handles all rows with the same source, so the keys are read once."""
    width, rows = layer.head_width, source.row_map
    queries = layer.heads * width
    projected = _project_queries(layer, x, queries)
    if recorder is not None:
        recorder.append(projected, (layer.heads, width, 0))
    projected = rows.spread(projected)
    output = torch.empty_like(projected)
    per_group, slots = layer.heads // layer.key_heads, rows.slots
    count, keys, row = key_values.shape
    strides = (keys * row, width, 0, row, 1)
    address = key_values.data_ptr()
    query_strides = (slots * queries, per_group * width, width, queries, 1)
    tensors = {
        "query": Strided(projected.data_ptr(), query_strides),
        "key": Strided(address, strides),
        "value": Strided(address + 4 * layer.key_heads * width, strides),
        "output": Strided(output.data_ptr(), query_strides),
    }
    sizes = (count, layer.key_heads, per_group, slots, keys, width)
    if not layer_kernels.decode(sizes, tensors, width**-0.5, source.lengths):
        return None
    return linear(rows.collect(output), layer.out_proj)


def _project_queries(layer: MultiHeadAttention, x: Tensor, queries: int) -> Tensor:
    in_proj = layer.in_proj
    assert isinstance(in_proj, nn.Linear | Int8Linear)
    if isinstance(in_proj, Int8Linear):
        return project(x, in_proj, 0, queries)
    bias = None if in_proj.bias is None else in_proj.bias[:queries]
    return few_rows_linear(x, in_proj.weight[:queries], bias)


def _feed_forward(layer: FeedForward, x: Tensor) -> Tensor:
    hidden = linear(x, layer.in_proj)
    hidden = hidden.relu_() if layer.activation == "relu" else layer.activate(hidden)
    return linear(hidden, layer.out_proj)
