"""Sinusoidal position embeddings."""

from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from regard._util.checks import check_choice, check_int, check_number
from regard.models.configs import Sinusoids
from regard.models.layers.position_encoding import PositionEncoding, PositionSizes, waves

_MIN_TABLE = 128


def make(sizes: PositionSizes) -> "SinusoidalPositions":
    return SinusoidalPositions(sizes.width, layout=sizes.sinusoids)


class SinusoidalPositions(PositionEncoding):
    """sin and cos of the position, at wavelengths from 2π to 10,000 · 2π (Vaswani et al. 2017, section 3.5).

    width: vector dimension.
    base: longest wavelength divided by 2π; default: 10,000. Increase base for longer texts.
    layout: order of the features. "interleaved": sin at even and cos at odd indices; "concatenated": all sin,
        then all cos (Marian); "fairseq": the same, with wavelengths up to exactly base · 2π and positions
        counted from 2 (M2M-100).

    The module has no parameters and no maximum position.

    >>> import torch, regard
    >>> regard.models.SinusoidalPositions(4)(torch.tensor([0, 1, 1_000_000])).shape
    torch.Size([3, 4])
    """

    def __init__(self, width: int, base: float = 10_000.0, *, layout: Sinusoids = "interleaved") -> None:
        super().__init__()
        check_int("SinusoidalPositions got width", width, min=1)
        check_number("SinusoidalPositions got base", base, above=1)
        check_choice("SinusoidalPositions got layout", layout, get_args(Sinusoids))
        self.width, self.base, self.layout = width, float(base), layout
        self._table: Tensor | None = None  # cached vectors of the first positions, for decoding

    def forward(self, positions: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the vectors of positions, (…) → (…, m)."""
        if self.layout == "fairseq":
            half = self.width // 2
            # waves uses base^(−2i / width), but fairseq uses base^(−i / (half − 1))
            base = self.base ** (half / max(half - 1, 1))
            parts = waves(positions + 2, 2 * half, base, dtype)
            return F.pad(torch.cat(parts, -1), (0, self.width % 2))
        sin, cos = waves(positions, self.width, self.base, dtype)
        if self.layout == "concatenated":
            return torch.cat([sin, cos], -1)[..., : self.width]
        return torch.stack([sin, cos], -1).flatten(-2)[..., : self.width]

    def encode(self, x: Tensor, positions: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return x + self(positions, x.dtype), {}

    def row(self, position: int) -> Tensor:
        """Return the vector of one position, (1, m), in float32 on the CPU."""
        return self.table(position + 1)[position : position + 1]

    def table(self, length: int) -> Tensor:
        """Return at least the first `length` vectors, contiguous, in float32 on the CPU; cached."""
        table = self._table  # read once: another thread may replace it with a shorter table
        if table is None or len(table) < length:
            table = self(torch.arange(max(_MIN_TABLE, 2 * length)), torch.float32).contiguous()
            self._table = table
        return table

    def tables(self, length: int) -> dict[str, Tensor]:
        return {"": self(torch.arange(length))}

    def extra_repr(self) -> str:
        return str(self.width) if self.layout == "interleaved" else f"{self.width}, layout={self.layout!r}"
