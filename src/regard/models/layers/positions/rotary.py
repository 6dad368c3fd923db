"""Rotary position embeddings."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard._util.checks import check_int, check_number
from regard._util.name_hints import hint_arguments
from regard.errors import ArgumentError, ShapeError
from regard.models.layers.position_encoding import PositionEncoding, PositionSizes, waves


def make(sizes: PositionSizes) -> "RotaryPositions":
    return RotaryPositions(sizes.head_width)


class Rotation(NamedTuple):
    """A rotation of queries and keys (…, h, n, d), stored as cos and sin of the angles, (…, n, d).

    >>> import torch, regard
    >>> rotation = regard.models.RotaryPositions(2)(torch.tensor([0, 1]))  # by 0 and by 1 radian
    >>> rotation(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    tensor([[1.0000, 0.0000],
            [0.5403, 0.8415]])
    """

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate x, pairing feature i with feature i + d/2."""
        n, width = self.cos.shape[-2:]
        if x.shape[-1] < width or x.shape[-2] != n:
            raise ShapeError(
                f"x has shape {tuple(x.shape)}; this rotation needs (…, {n}, {width}), or a larger last "
                "axis. Pass one position per token, and pass the head width to RotaryPositions."
            )
        rotated, rest = x[..., :width], x[..., width:]
        first, second = rotated.chunk(2, -1)
        rotated = rotated * self.cos.to(x.dtype) + torch.cat([-second, first], -1) * self.sin.to(x.dtype)
        return torch.cat([rotated, rest], -1) if rest.shape[-1] else rotated


@hint_arguments
class RotaryPositions(PositionEncoding):
    """Rotary position embedding (Su et al. 2021, eq. 34). Scores depend only on relative positions.

    The paper pairs features 2i and 2i + 1; here, feature i is paired with feature i + d/2, as in GPT-NeoX and
    LLaMA. The two conventions differ only in the order of the features.

    width: head dimension, which must be even. base: wavelengths go up to base · 2π; increase base for longer
        texts.

    The module has no parameters and no maximum position. `RotaryPositions(d)(positions)` returns a
    `Rotation`, which all layers share.

    >>> import torch, regard
    >>> rotation = regard.models.RotaryPositions(4)(torch.arange(5))
    >>> x = torch.randn(2, 5, 4)
    >>> torch.allclose(rotation(x).norm(dim=-1), x.norm(dim=-1), atol=1e-5)  # norms are preserved
    True
    """

    columns = "pair of features"

    def __init__(self, width: int, base: float = 10_000.0) -> None:
        super().__init__()
        check_int("RotaryPositions got width", width, min=2)
        check_number("RotaryPositions got base", base, above=1)
        if width % 2:
            raise ArgumentError(
                f"RotaryPositions got width={width}; it rotates pairs of features, so width must be even. To "
                f"leave the last feature unrotated, pass {width - 1}."
            )
        self.width, self.base = width, float(base)

    def forward(self, positions: Tensor, dtype: torch.dtype | None = None) -> Rotation:
        """Return the rotation for positions (…, n) and x (…, h, n, d)."""
        sin, cos = (torch.cat([wave, wave], -1) for wave in waves(positions, self.width, self.base, dtype))
        if positions.dim() > 1:
            sin, cos = sin.unsqueeze(-3), cos.unsqueeze(-3)  # b n d -> b 1 n d
        return Rotation(cos, sin)

    def encode(self, x: Tensor, positions: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return x, {"rotation": self(positions, x.dtype)}

    def tables(self, length: int) -> dict[str, Tensor]:
        # the second half of the features repeats the first
        cos, sin = (wave[:, : self.width // 2] for wave in self(torch.arange(length)))
        return {"cos of the angle": cos, "sin of the angle": sin}

    def extra_repr(self) -> str:
        return str(self.width)
