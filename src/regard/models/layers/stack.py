"""Blocks on top of each other: what the three kinds of Transformers have in common."""

from collections.abc import Sequence
from typing import TypedDict, Unpack

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.mechanism.biases import RelativeBias
from regard.mechanism.mask_algebra import Mask
from regard.mechanism.masks import Causal
from regard.models.layers.blocks import DecoderBlock, EncoderBlock, TransformerConfig
from regard.models.layers.dropout import Dropout
from regard.models.layers.kv_cache import KVCache, KeyValues
from regard.models.layers.positions import LearnedPositions, RotaryPositions, SinusoidalPositions

Caches = Sequence[KVCache]


class StackOptions(TypedDict, total=False):
    """The keyword arguments of `Stack`: the masks, where the tokens stand, and the keys of earlier calls."""

    mask: Mask | None
    source_mask: Mask | None
    positions: Tensor | None
    caches: Caches | None


class Stack(nn.Module):
    """Blocks on top of each other, with their positions: an encoder, or with `causal` a decoder.

    config: width, heads, layers, positions and all else.
    causal: no token sees those after it.
    cross: the blocks also attend to a source.

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
        self.dropout = Dropout(config.dropout)
        self.norm = config.make_norm() if config.norm_first else nn.Identity()

    def forward(
        self, x: Tensor, source: Tensor | Sequence[KeyValues] | None = None, **options: Unpack[StackOptions]
    ) -> Tensor:
        """(…, n, m) → (…, n, m); the source is (…, s, m), or what `project_source` made of it."""
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
        """The input of the first block, and the output of each; that of the last one normed."""
        if (source is None) == self.cross:
            raise ArgumentError(
                f"the Stack was made with cross={self.cross} and got {'no' if self.cross else 'a'} source; "
                "blocks with cross=True attend to a source, others to their own tokens alone."
            )
        if positions is None:  # after what the caches hold
            start = caches[0].length if caches else 0
            positions = torch.arange(start, start + x.shape[-2], device=x.device)
        rotation = self.positions(positions, x.dtype) if isinstance(self.positions, RotaryPositions) else None
        bias = self.positions if isinstance(self.positions, RelativeBias) else None
        if isinstance(self.positions, SinusoidalPositions):
            x = x + self.positions(positions, x.dtype)
        elif isinstance(self.positions, LearnedPositions):
            x = x + self.positions(positions)
        if mask is None and self.causal:
            mask = Causal()
        if caches is not None and len(caches) != len(self.blocks):
            raise ArgumentError(
                f"the Stack has {len(self.blocks)} blocks and got {len(caches)} caches; each block needs its "
                "own: caches()."
            )
        found = [self.dropout(x)]
        for i, block in enumerate(self.blocks):
            cache = None if caches is None else caches[i]
            if source is None:
                x = block(found[-1], mask=mask, bias=bias, rotation=rotation, cache=cache)
            else:
                memory = source if isinstance(source, Tensor) else source[i]
                x = block(
                    found[-1],
                    memory,
                    mask=mask,
                    source_mask=source_mask,
                    bias=bias,
                    rotation=rotation,
                    cache=cache,
                )
            found.append(x)
        found[-1] = self.norm(found[-1])
        return found

    def project_source(self, source: Tensor) -> list[KeyValues]:
        """The source's keys and values for each block, to be read by many steps."""
        return [block.cross.project_source(source) for block in self.blocks if isinstance(block, DecoderBlock)]

    def caches(self) -> list[KVCache]:
        """An empty cache for each block."""
        return [KVCache() for _ in self.blocks]
