"""Sinusoidal position embeddings."""

from typing import Any

import torch
from torch import Tensor

from regard._util.checks import check_int, check_number
from regard.models.layers.position_encoding import PositionEncoding, PositionSizes, waves

_MIN_TABLE = 128


def make(sizes: PositionSizes) -> "SinusoidalPositions":
    return SinusoidalPositions(sizes.width)


class SinusoidalPositions(PositionEncoding):
    """sin and cos of the position, at wavelengths from 2π to 10,000 · 2π (Vaswani et al. 2017, section 3.5).

    width: vector dimension.
    base: longest wavelength divided by 2π; default: 10,000. Increase base for longer texts.

    The module has no parameters and no maximum position.

    >>> import torch, regard
    >>> regard.models.SinusoidalPositions(4)(torch.tensor([0, 1, 1_000_000])).shape
    torch.Size([3, 4])
    """

    def __init__(self, width: int, base: float = 10_000.0) -> None:
        super().__init__()
        check_int("SinusoidalPositions got width", width, min=1)
        check_number("SinusoidalPositions got base", base, above=1)
        self.width, self.base = width, float(base)
        self._table: Tensor | None = None  # of the first positions, for decoding

    def forward(self, positions: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the vectors of positions, (…) → (…, m), with sin at even and cos at odd indices."""
        sin, cos = waves(positions, self.width, self.base, dtype)
        return torch.stack([sin, cos], -1).flatten(-2)[..., : self.width]

    def encode(self, x: Tensor, positions: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return x + self(positions, x.dtype), {}

    def row(self, position: int) -> Tensor:
        """Return the vector of one position, (1, m), in float32 on the CPU."""
        if self._table is None or len(self._table) <= position:
            size = max(_MIN_TABLE, 2 * position)
            self._table = self(torch.arange(size), torch.float32)
        return self._table[position : position + 1]

    def tables(self, length: int) -> dict[str, Tensor]:
        return {"": self(torch.arange(length))}

    def extra_repr(self) -> str:
        return str(self.width)
