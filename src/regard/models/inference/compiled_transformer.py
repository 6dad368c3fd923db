"""A Transformer's parameters in the form that the kernels read, for a beam search that runs without Python.

The kernels (kernels/transformer.h) support encoder-decoder Transformers with layer norms, ReLU and softmax
attention, in float32 or with int8 weights. Their results equal those of the layers up to rounding.
"""

import math
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_state

from regard.models.inference.transformer_layout import StackSizes, TransformerParameters, stack_numbers
from regard.models.layers import decoder_step
from regard.models.layers.attention import MultiHeadAttention
from regard.models.layers.blocks import DecoderBlock, FeedForward, Residual, Stack
from regard.models.layers.dropout import fast_modules
from regard.models.layers.embedding import Embedding
from regard.models.layers.int8_packing import COLUMNS
from regard.models.layers.linear import Int8Linear
from regard.models.layers.position_encoding import PositionEncoding
from regard.models.layers.positions.learned import LearnedPositions
from regard.models.layers.positions.sinusoidal import SinusoidalPositions
from regard.models.seq2seq import INT8_OUTPUT
from regard.models.transformer import OutputProjection, Transformer

_CACHE = "_compiled_addresses"
_SETTINGS: dict[type, tuple[str, ...]] = {  # attributes on which the numbers depend
    Transformer: ("output_scale",),
    Stack: ("config",),
    MultiHeadAttention: ("normalize", "score", "heads", "key_heads", "watchers"),
    FeedForward: ("activation",),
    Residual: ("norm_first",),
    Embedding: ("scale", "num_embeddings", "max_norm"),
    nn.LayerNorm: ("eps",),
}


def read_parameters(
    model: Transformer, source_length: int, target_length: int
) -> TransformerParameters | None:
    """Return the parameters for the kernels, or None if the model needs Python.

    The kernels run models that they support and that are not watched, edited or hooked.

    source_length, target_length: maximum numbers of source and target tokens.
    """
    addresses = _read_addresses(model)
    if addresses is None:
        return None
    source_embedding = model.source_embedding or model.embedding
    source_table = _position_table(model.encoder.positions, source_length, source_embedding.embedding_dim)
    target_table = _position_table(model.decoder.positions, target_length, model.embedding.embedding_dim)
    if source_table is None or target_table is None:
        return None
    decoder = model.decoder
    return TransformerParameters(
        numbers=[
            *addresses.numbers,
            *(source_embedding.weight.data_ptr(), source_table.data_ptr()),
            *(model.embedding.weight.data_ptr(), target_table.data_ptr()),
            *addresses.output,
        ],
        factors=(
            model.encoder.config.eps,
            _scale(source_embedding),
            decoder.config.eps,
            _scale(model.embedding),
        ),
        kept=[*addresses.kept, source_table, target_table],
        heads=decoder.config.heads,
        layers=len(decoder.blocks),
        source_vocabulary=source_embedding.num_embeddings,
        target_vocabulary=model.embedding.num_embeddings,
    )


class _Addresses:
    """The addresses of a model's parameters, kept on the model for the next call. Copies start empty."""

    numbers: list[int]
    output: list[int]
    kept: list[Tensor]
    snapshot: tuple[list[Any], ...] | None = None

    def watch(self, model: Transformer) -> None:
        """Record the state that the addresses depend on, so that `is_current` is fast."""
        self.modules = modules = fast_modules(model)
        self.states = [module.__dict__ for module in modules]
        self.children = [state["_modules"] for state in self.states if state["_modules"]]
        self.tensors = [
            state[name] for state in self.states for name in ("_parameters", "_buffers") if state[name]
        ]
        self.hooks = [
            state[name] for state in self.states for name in ("_forward_hooks", "_forward_pre_hooks")
        ]
        self.settings = [
            (module.__dict__, name) for module in modules for name in _SETTINGS.get(type(module), ())
        ]
        self.snapshot = self._take_snapshot()

    def is_current(self, model: Transformer) -> bool:
        """Whether the model has no hooks and is unchanged since `watch`, except for parameter values."""
        if self.snapshot is None or self.modules[0] is not model:  # a shallow copy has the same cache
            return False
        return not any(self.hooks) and self._take_snapshot() == self.snapshot

    def _take_snapshot(self) -> tuple[list[Any], ...]:
        tensors = chain.from_iterable(map(dict.values, self.tensors))
        return (
            list(map(type, self.modules)),
            list(map(len, self.states)),  # a new attribute may replace a method, such as `forward`
            [state["training"] for state in self.states],
            list(map(id, chain.from_iterable(map(dict.values, self.children)))),
            [
                (id(x), x.data_ptr(), x.dtype, x.shape, x.is_contiguous())  # x.data may be another view
                for x in tensors
                if x is not None
            ],
            [state.get(name) for state, name in self.settings],
        )

    def __deepcopy__(self, _: object) -> "_Addresses":
        return _Addresses()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Addresses, ()


def _read_addresses(model: Transformer) -> _Addresses | None:
    """Return the addresses of the parameters; None if the kernels do not support the model."""
    if not decoder_step.is_original() or _has_global_hooks():
        return None
    cached = model.__dict__.get(_CACHE)
    if isinstance(cached, _Addresses) and cached.is_current(model):
        return cached
    if not _supports(model):
        return None
    addresses = model.__dict__[_CACHE] = _Addresses()
    output = model._modules.get(INT8_OUTPUT) or OutputProjection(model.output_weight, model.output_bias)
    addresses.numbers = [*_stack_numbers(model, "encoder"), *_stack_numbers(model, "decoder")]
    addresses.output = [*decoder_step.layer_addresses(output), output.out_features]  # type: ignore[arg-type, list-item]
    addresses.kept = [x.detach() for x in (*model.parameters(), *model.buffers())]
    addresses.watch(model)
    return addresses


def _has_global_hooks() -> bool:
    """Whether a hook was registered for all modules, as by `register_module_forward_hook`."""
    return bool(global_state._global_forward_hooks or global_state._global_forward_pre_hooks)


def _supports(model: Transformer) -> bool:
    source, target = model.source_embedding or model.embedding, model.embedding
    outputs = model.output_weight, model.output_bias
    return (
        type(model) is Transformer
        and not vars(model).keys() & {"start", "step", "encode"}
        and model.output_scale == 1
        and not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        and all(type(embedding) is Embedding and embedding.max_norm is None for embedding in (source, target))
        and all(embedding.num_embeddings <= len(embedding.weight) for embedding in (source, target))
        and all(_is_float32(x) for x in (*outputs, source.weight, target.weight))
        and all(x.shape[1] == model.decoder.config.width for x in (outputs[0], source.weight, target.weight))
        and len(model.output_weight) <= len(target.weight)  # every token that is generated has an embedding
        and all(_supports_stack(stack) for stack in (model.encoder, model.decoder))
    )


def _is_float32(tensor: Tensor | None) -> bool:
    return tensor is None or (
        tensor.dtype is torch.float32 and tensor.is_contiguous() and tensor.device.type == "cpu"
    )


def _supports_stack(stack: Stack) -> bool:
    return (
        decoder_step.supports(stack)
        and decoder_step.is_compiled(stack)
        and all(_can_divide(block) for block in stack.blocks)
    )


def _can_divide(block: nn.Module) -> bool:
    """Whether the cross-attention projection can be divided into its query, key and value parts."""
    if not isinstance(block, DecoderBlock) or not isinstance(block.cross.in_proj, Int8Linear):
        return True
    return (block.cross.heads * block.cross.head_width) % COLUMNS == 0


def _scale(embedding: Embedding) -> float:
    return math.sqrt(embedding.embedding_dim) if embedding.scale else 1.0


def _position_table(positions: object, length: int, width: int) -> Tensor | None:
    """Return the vectors that are added at the first `length` positions.

    Return None if there are fewer positions, or if the encoding is of another class.
    """
    if type(positions) is SinusoidalPositions:
        table = positions.table(length)
    elif type(positions) is LearnedPositions:
        table = positions.vectors
    elif type(positions) is PositionEncoding:  # no positions
        table = torch.zeros(length, width, dtype=torch.float32, device="cpu")
    else:
        return None
    fits = len(table) >= length and table.shape[1] == width and table.is_contiguous()
    return table if fits else None


def _stack_numbers(model: Transformer, name: str) -> list[int]:
    stack: Stack = getattr(model, name)
    layer = stack.blocks[0].attention
    assert isinstance(layer, MultiHeadAttention)
    sizes = StackSizes(
        stack.config.width,
        layer.key_heads,
        layer.heads // layer.key_heads,
        layer.head_width,
        stack.config.resolved_ffn_dim,
        len(stack.blocks),
        stack.config.norm_first,
    )
    return stack_numbers(name, sizes, _ModuleAddresses(model), cross=name == "decoder")


class _ModuleAddresses(NamedTuple):
    """The addresses of the parameters in a model's modules."""

    model: Transformer

    def norm(self, name: str) -> tuple[int, int]:
        return decoder_step.norm_addresses(self.model.get_submodule(name))

    def linear(self, name: str, first: int = 0) -> tuple[int, int, int]:
        layer = self.model.get_submodule(name)
        assert isinstance(layer, nn.Linear | Int8Linear)
        weight, scales, bias = decoder_step.layer_addresses(layer)
        bias = 0 if layer.bias is None else bias + 4 * first
        if isinstance(layer, Int8Linear):
            packed = layer.packed[first // COLUMNS :]
            return packed.data_ptr(), scales + 4 * first, bias
        return weight + 4 * first * layer.in_features, 0, bias
