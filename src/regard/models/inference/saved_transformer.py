"""A Transformer for beam search in the kernels, made from saved parameters without importing torch.

Importing torch takes longer than translating a sentence.
"""

import math
import threading
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Literal

import numpy as np

from regard.models.configs import TransformerSettings
from regard.models.inference.transformer_layout import StackSizes, TransformerParameters, stack_numbers
from regard.models.layers.int8_packing import COLUMNS, Array, pack_int8, pad_columns

_MIN_TABLE = 128  # positions in the smallest table
_LINEAR_WEIGHTS = (".in_proj.weight", ".out_proj.weight")
_BASE = 10_000.0  # as in SinusoidalPositions
_PACKING = threading.Lock()  # since Python 3.12, two threads may compute a cached_property at once


class SavedTransformer:
    """The parameters of a Transformer whose encoder and decoder have the same settings.

    settings: the architecture, which `is_supported` accepts.
    vocab_size: a pair (source, target), or one size if source, target and output share an embedding matrix.
    arrays: float32 parameters by name, as in `Transformer.state_dict()`; see `expected_shapes`.
    int8: whether to quantize the linear layers and the output.

    >>> from regard.models.configs import TransformerSettings
    >>> from regard.models.inference.saved_transformer import expected_shapes
    >>> shapes = expected_shapes(TransformerSettings(width=16, heads=2, layers=1), 100)
    >>> shapes["encoder.blocks.0.attention.in_proj.weight"]
    (48, 16)
    """

    def __init__(
        self,
        settings: TransformerSettings,
        vocab_size: int | tuple[int, int],
        arrays: Mapping[str, Array],
        *,
        int8: bool = False,
    ) -> None:
        self.settings, self.vocab_size, self.int8 = settings, vocab_size, int8
        self.arrays = dict(arrays)
        self._table = np.zeros((0, settings.width), np.float32)

    @property
    def max_length(self) -> int | None:
        """The maximum number of tokens per sentence, or None for no limit."""
        return self.settings.max_positions if self.settings.positions == "learned" else None

    def read_parameters(self, source_length: int, target_length: int) -> TransformerParameters | None:
        """Return the parameters for these maximum lengths, or None if the model has fewer positions."""
        numbers, output, factors = self._addresses
        tables = [
            self._position_table("encoder", source_length),
            self._position_table("decoder", target_length),
        ]
        if len(tables[0]) < source_length or len(tables[1]) < target_length:
            return None
        source, target = self._vocabularies()
        embeddings = [self.arrays.get("source_embedding.weight"), self.arrays["embedding.weight"]]
        if embeddings[0] is None:
            embeddings[0] = embeddings[1]
        numbers = list(numbers)
        for embedding, table in zip(embeddings, tables, strict=True):
            numbers += (_address(embedding), _address(table))
        return TransformerParameters(
            [*numbers, *output, target],
            factors,
            [self.arrays, self._packed, *tables],
            heads=self.settings.heads,
            layers=self.settings.layers,
            source_vocabulary=source,
            target_vocabulary=target,
        )

    def norm(self, name: str) -> tuple[int, int]:
        return _address(self.arrays.get(f"{name}.weight")), _address(self.arrays.get(f"{name}.bias"))

    def linear(self, name: str, first: int = 0) -> tuple[int, int, int]:
        bias = self.arrays.get(f"{name}.bias")
        if not self.int8:
            offset = 0 if bias is None else 4 * first
            weight = self.arrays[f"{name}.weight"]
            return _address(weight) + first * weight.strides[0], 0, _address(bias) + offset
        packed, scales, bias = self._packed[name]
        offset = 0 if bias is None else 4 * first
        return _address(packed[first // COLUMNS :]), _address(scales) + 4 * first, _address(bias) + offset

    @cached_property
    def _packed(self) -> dict[str, tuple[Array, Array, Array | None]]:
        """The int8 weights, scales and padded bias of each linear layer; the output has the name ""."""
        if not self.int8:
            return {}
        names = [name.removesuffix(".weight") for name in self.arrays if name.endswith(_LINEAR_WEIGHTS)]
        packed = {}
        for name in names:
            bias = self.arrays.get(f"{name}.bias")
            packed[name] = (
                *pack_int8(self.arrays[f"{name}.weight"]),
                None if bias is None else pad_columns(bias),
            )
        return packed | {"": (*pack_int8(self._output), None)}

    @property
    def _output(self) -> Array:
        return self.arrays.get("matrix", self.arrays["embedding.weight"])

    @cached_property
    def _addresses(self) -> tuple[list[int], tuple[int, int, int], tuple[float, float, float, float]]:
        settings = self.settings
        key_heads = settings.key_heads or settings.heads
        sizes = StackSizes(
            settings.width,
            key_heads,
            settings.heads // key_heads,
            settings.resolved_head_width,
            settings.resolved_ffn_dim,
            settings.layers,
            settings.norm_first,
        )
        with _PACKING:  # the addresses must be those of the weights that are kept
            numbers = [
                *stack_numbers("encoder", sizes, self, cross=False),
                *stack_numbers("decoder", sizes, self, cross=True),
            ]
            if self.int8:
                packed, scales, _ = self._packed[""]
                output = _address(packed), _address(scales), 0
            else:
                output = _address(self._output), 0, 0
        scale = math.sqrt(settings.width) if settings.scale_embedding else 1.0
        return numbers, output, (settings.eps, scale, settings.eps, scale)

    def _vocabularies(self) -> tuple[int, int]:
        size = self.vocab_size
        return size if isinstance(size, tuple) else (size, size)

    def _position_table(self, stack: str, length: int) -> Array:
        """Return the vectors that are added at the first `length` positions."""
        if self.settings.positions == "learned":
            return self.arrays[f"{stack}.positions.vectors"]
        table = self._table  # read once: another thread may replace it
        if len(table) < length:
            shape = max(_MIN_TABLE, 2 * length), self.settings.width
            table = (
                _sinusoids(*shape) if self.settings.positions == "sinusoidal" else np.zeros(shape, np.float32)
            )
            self._table = table
        return table

    def __reduce__(self) -> tuple[Any, ...]:
        # a copy has its own arrays, so it must not inherit the addresses
        return _restore, (self.settings, self.vocab_size, self.arrays, self.int8)


def _restore(
    settings: TransformerSettings,
    vocab_size: int | tuple[int, int],
    arrays: Mapping[str, Array],
    int8: bool,
) -> SavedTransformer:
    return SavedTransformer(settings, vocab_size, arrays, int8=int8)


def is_supported(settings: TransformerSettings, precision: Literal["float32", "int8"] = "float32") -> bool:
    """Whether the kernels support an architecture with softmax attention."""
    queries = settings.heads * settings.resolved_head_width
    return (
        settings.activation == "relu"
        and settings.norm == "layer"
        and settings.positions in ("sinusoidal", "learned", "none")
        and settings.sinusoids == "interleaved"
        and settings.scale_scores
        # an int8 layer can be divided only between blocks
        and (precision == "float32" or queries % COLUMNS == 0)
    )


def expected_shapes(
    settings: TransformerSettings, vocab_size: int | tuple[int, int]
) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter by name, for an architecture that `is_supported` accepts."""
    width = settings.width
    shapes: dict[str, tuple[int, ...]] = {}
    if isinstance(vocab_size, tuple):
        shapes["source_embedding.weight"] = vocab_size[0], width
        shapes["embedding.weight"] = shapes["matrix"] = vocab_size[1], width
    else:
        shapes["embedding.weight"] = vocab_size, width
    for stack in ("encoder", "decoder"):
        if settings.positions == "learned":
            shapes[f"{stack}.positions.vectors"] = settings.max_positions, width
        norms = [
            *(["embedding_norm"] if settings.embedding_norm else []),
            *(["norm"] if settings.norm_first else []),
        ]
        for name in norms:
            shapes |= _norm_shapes(f"{stack}.{name}", width)
        for layer in range(settings.layers):
            for name, shape in _block_shapes(settings, cross=stack == "decoder"):
                shapes[f"{stack}.blocks.{layer}.{name}"] = shape
    return shapes


def _block_shapes(settings: TransformerSettings, *, cross: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, ffn_dim, head = settings.width, settings.resolved_ffn_dim, settings.resolved_head_width
    queries, keys = settings.heads * head, (settings.key_heads or settings.heads) * head
    attentions = {"attention": "attention_residual"} | ({"cross": "cross_residual"} if cross else {})
    layers = {"feed_forward.in_proj": (ffn_dim, width), "feed_forward.out_proj": (width, ffn_dim)}
    for name in attentions:
        layers |= {f"{name}.in_proj": (queries + 2 * keys, width), f"{name}.out_proj": (width, queries)}
    for name, shape in layers.items():
        yield f"{name}.weight", shape
        if settings.linear_bias:
            yield f"{name}.bias", shape[:1]
    for name in (*attentions.values(), "feed_forward_residual"):
        yield from _norm_shapes(f"{name}.norm", width).items()


def _norm_shapes(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _sinusoids(length: int, width: int) -> Array:
    """Return the first vectors of `SinusoidalPositions`, (length, width)."""
    exponents = np.arange(0, width, 2, dtype=np.float64) / width
    angles = np.arange(length, dtype=np.float64)[:, None] * np.exp(exponents * -math.log(_BASE))
    table = np.stack([np.sin(angles), np.cos(angles)], -1).reshape(length, -1)[:, :width]
    return np.ascontiguousarray(table, np.float32)


def _address(array: Array | None) -> int:
    return 0 if array is None else int(array.ctypes.data)
