"""A stack of Transformer blocks with a position encoding."""

from collections.abc import Sequence
from typing import TypedDict, Unpack

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.mechanism.masks.algebra import Mask
from regard.mechanism.masks.by_position import Causal
from regard.models.layers.blocks import DecoderBlock, EncoderBlock, TransformerConfig
from regard.models.layers.dropout import Dropout
from regard.models.layers.kv_cache import KeyValues, KVCache

Caches = Sequence[KVCache]


class StackOptions(TypedDict, total=False):
    """Keyword arguments of `Stack.forward`."""

    mask: Mask | None
    source_mask: Mask | None
    positions: Tensor | None
    caches: Caches | None


class Stack(nn.Module):
    """Transformer blocks with a position encoding: an encoder, or a decoder if `causal`.

    config: the architecture. causal: whether the default mask is causal.
    cross: whether each block has cross-attention to a source.

    >>> import torch, regard
    >>> encoder = regard.models.Stack(regard.models.TransformerConfig(width=16, heads=4))
    >>> encoder(torch.randn(2, 5, 16), mask=regard.Padding([3, 5])).shape
    torch.Size([2, 5, 16])
    """

    def __init__(self, config: TransformerConfig, *, causal: bool = False, cross: bool = False) -> None:
        super().__init__()
        self.config, self.causal, self.cross = config, causal, cross
        self.positions = config.make_positions(causal)
        block = DecoderBlock if cross else EncoderBlock
        self.blocks = nn.ModuleList(block(config) for _ in range(config.layers))
        self.embedding_norm = config.make_norm() if config.embedding_norm else nn.Identity()
        self.dropout = Dropout(config.dropout)
        self.norm = config.make_norm() if config.norm_first else nn.Identity()

    def forward(
        self, x: Tensor, source: Tensor | Sequence[KeyValues] | None = None, **options: Unpack[StackOptions]
    ) -> Tensor:
        """Apply all blocks: (…, n, m) → (…, n, m).

        source: (…, s, m), or its keys and values from `project_source`.
        """
        return self.states(x, source, **options)[-1]

    def states(
        self,
        x: Tensor,
        source: Tensor | Sequence[KeyValues] | None = None,
        *,
        mask: Mask | None = None,
        source_mask: Mask | None = None,
        positions: Tensor | None = None,
        caches: Caches | None = None,
    ) -> list[Tensor]:
        """Return the input of the first block and the output of each block. The last output is normalized."""
        if (source is None) == self.cross:
            raise ArgumentError(
                f"Stack(cross={self.cross}) got {'no' if self.cross else 'a'} source; pass a source if and "
                "only if cross=True."
            )
        if positions is None:  # continue after the cached tokens
            start = caches[0].length if caches else 0
            positions = torch.arange(start, start + x.shape[-2], device=x.device)
        x, encoded = self.positions.encode(x, positions)
        if mask is None and self.causal:
            mask = Causal()
        if caches is not None and len(caches) != len(self.blocks):
            raise ArgumentError(
                f"Stack has {len(self.blocks)} blocks, but got {len(caches)} caches; pass one per block: "
                "stack.caches()."
            )
        states = [self.dropout(self.embedding_norm(x))]
        for i, block in enumerate(self.blocks):
            cache = None if caches is None else caches[i]
            if source is None:
                states.append(block(states[-1], mask=mask, cache=cache, **encoded))
            else:
                keys = source if isinstance(source, Tensor) else source[i]
                states.append(
                    block(states[-1], keys, mask=mask, source_mask=source_mask, cache=cache, **encoded)
                )
        states[-1] = self.norm(states[-1])
        return states

    def project_source(self, source: Tensor) -> list[KeyValues]:
        """Project a source (…, s, m) to keys and values for each block, once for all decoding steps."""
        return [
            block.cross.project_source(source) for block in self.blocks if isinstance(block, DecoderBlock)
        ]

    def caches(self) -> list[KVCache]:
        """Create an empty cache for each block."""
        return [KVCache() for _ in self.blocks]
