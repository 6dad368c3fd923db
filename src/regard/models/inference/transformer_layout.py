"""Describe a Transformer's parameters to the beam search in the kernels. Does not import torch.

The order of the numbers is that of the fields in kernels/transformer.h.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

_NO_LAYER, _NO_NORM = (0, 0, 0), (0, 0)


class TransformerParameters(NamedTuple):
    """The addresses of a Transformer's parameters.

    numbers, factors: see `start_search` in kernels/module.cpp.
    kept: objects whose memory must not be freed while the numbers are in use.
    heads, layers: of the decoder. source_vocabulary, target_vocabulary: numbers of tokens.
    """

    numbers: list[int]
    factors: tuple[float, float, float, float]
    kept: list[Any]
    heads: int
    layers: int
    source_vocabulary: int
    target_vocabulary: int


class StackSizes(NamedTuple):
    """Sizes of an encoder or decoder. group: query heads per key head."""

    width: int
    key_heads: int
    group: int
    head_width: int
    ffn_dim: int
    layers: int
    norm_first: bool


class Addresses(Protocol):
    """The addresses of a model's parameters by module name, such as "encoder.blocks.0.attention.in_proj"."""

    def norm(self, name: str) -> tuple[int, int]:
        """Return the addresses of a layer norm's weight and bias; zeros if there is no norm."""

    def linear(self, name: str, first: int = 0) -> tuple[int, int, int]:
        """Return the addresses of a layer's weight, scales and bias, from the output `first` on.

        The scales are 0 unless the weight is int8; the bias is 0 if there is none.
        """


def stack_numbers(name: str, sizes: StackSizes, addresses: Addresses, *, cross: bool) -> list[int]:
    """Return the sizes of a stack, then the addresses of its parameters.

    name: "encoder" or "decoder". cross: whether its blocks have cross-attention.
    """
    numbers = [int(size) for size in sizes]
    numbers += (*addresses.norm(f"{name}.embedding_norm"), *addresses.norm(f"{name}.norm"))
    queries = sizes.key_heads * sizes.group * sizes.head_width
    for layer in range(sizes.layers):
        numbers += _block_addresses(f"{name}.blocks.{layer}", queries, addresses, cross)
    return numbers


def _block_addresses(name: str, queries: int, addresses: Addresses, cross: bool) -> Iterator[int]:
    yield from addresses.norm(f"{name}.attention_residual.norm")
    yield from addresses.norm(f"{name}.cross_residual.norm") if cross else _NO_NORM
    yield from addresses.norm(f"{name}.feed_forward_residual.norm")
    yield from addresses.linear(f"{name}.attention.in_proj")
    yield from addresses.linear(f"{name}.attention.out_proj")
    if cross:
        yield from addresses.linear(f"{name}.cross.in_proj")
        yield from addresses.linear(f"{name}.cross.in_proj", queries)  # only keys and values
        yield from addresses.linear(f"{name}.cross.out_proj")
    else:
        yield from (*_NO_LAYER, *_NO_LAYER, *_NO_LAYER)
    yield from addresses.linear(f"{name}.feed_forward.in_proj")
    yield from addresses.linear(f"{name}.feed_forward.out_proj")
