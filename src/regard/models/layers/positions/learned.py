"""Learned position embeddings."""

from typing import Any

import torch
from torch import Tensor, nn

from regard._util.checks import check_int
from regard.errors import ArgumentError
from regard.mechanism.torch_state import concrete
from regard.models.layers.position_encoding import PositionEncoding, PositionSizes


def make(sizes: PositionSizes) -> "LearnedPositions":
    return LearnedPositions(sizes.max_positions, sizes.width)


class LearnedPositions(PositionEncoding):
    """A learned vector for each position below max_positions (Gehring et al. 2017, section 3.1; BERT).

    max_positions: size of the table. width: vector dimension.

    >>> import torch, regard
    >>> positions = regard.models.LearnedPositions(512, 16)
    >>> positions(torch.arange(5)).shape
    torch.Size([5, 16])
    >>> positions(torch.arange(600))
    Traceback (most recent call last):
    regard.errors.ArgumentError: Position 599 is out of range: LearnedPositions has 512. ...
    """

    def __init__(self, max_positions: int, width: int) -> None:
        super().__init__()
        check_int("LearnedPositions got max_positions", max_positions, min=1)
        check_int("LearnedPositions got width", width, min=1)
        self.max_length = max_positions
        self.vectors = nn.Parameter(torch.empty(max_positions, width))
        nn.init.normal_(self.vectors, std=0.02)

    def forward(self, positions: Tensor) -> Tensor:
        """Return the vectors of positions: (…) → (…, m)."""
        if concrete(positions) and positions.numel():
            low, high = (int(bound) for bound in positions.aminmax())
            if low < 0 or high >= len(self.vectors):
                raise ArgumentError(
                    f"Position {low if low < 0 else high} is out of range: LearnedPositions has "
                    f"{len(self.vectors)}. Shorten the input, raise max_positions, or use sinusoidal, "
                    "rotary, alibi or t5 positions, which have no limit."
                )
        return self.vectors[positions]

    def encode(self, x: Tensor, positions: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return x + self(positions), {}

    def tables(self, length: int) -> dict[str, Tensor]:
        return {"": self(torch.arange(length))}

    def extra_repr(self) -> str:
        return f"{self.vectors.shape[0]}, {self.vectors.shape[1]}"
