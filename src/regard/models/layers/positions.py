"""Position encodings. Attention alone ignores the order of its keys.

`SinusoidalPositions` and `LearnedPositions` are added to the embeddings, `RotaryPositions` rotates queries
and keys, and `regard.ALiBi` and `regard.T5Bias` are added to the scores.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard._util.checks import check_int, check_number
from regard.errors import ArgumentError, ShapeError
from regard.mechanism.torch_state import concrete


class SinusoidalPositions(nn.Module):
    """sin and cos of the position at wavelengths from 2π to 10,000 · 2π: Vaswani et al. 2017, section 3.5.

    width: vector dimension.
    base: 10,000 in the formula above; increase it for longer texts.

    There are no parameters and no maximum position.

    >>> import torch, regard
    >>> regard.models.SinusoidalPositions(4)(torch.tensor([0, 1, 1_000_000])).shape
    torch.Size([3, 4])
    """

    def __init__(self, width: int, base: float = 10_000.0) -> None:
        super().__init__()
        check_int("SinusoidalPositions got width", width, min=1)
        check_number("SinusoidalPositions got base", base, above=1)
        self.width, self.base = width, float(base)

    def forward(self, positions: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """(…) → (…, m): sin at even indices, cos at odd ones."""
        sin, cos = _waves(positions, self.width, self.base, dtype)
        return torch.stack([sin, cos], -1).flatten(-2)[..., : self.width]

    def extra_repr(self) -> str:
        return str(self.width)


class LearnedPositions(nn.Module):
    """A learned vector for each position below max_positions: Gehring et al. 2017, section 3.1; BERT.

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
        self.vectors = nn.Parameter(torch.randn(max_positions, width) * 0.02)

    def forward(self, positions: Tensor) -> Tensor:
        """(…) → (…, m)."""
        if concrete(positions) and positions.numel():
            low, high = (int(bound) for bound in positions.aminmax())
            if low < 0 or high >= len(self.vectors):
                raise ArgumentError(
                    f"Position {low if low < 0 else high} is out of range: LearnedPositions has "
                    f"{len(self.vectors)}. Shorten the input, raise max_positions, or use sinusoidal, "
                    "rotary, alibi or t5 positions, which have no limit."
                )
        return self.vectors[positions]

    def extra_repr(self) -> str:
        return f"{self.vectors.shape[0]}, {self.vectors.shape[1]}"


class Rotation(NamedTuple):
    """Rotation of queries and keys x (…, h, n, d): cos and sin of the angles at each position, (…, n, d).

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
                f"x has shape {tuple(x.shape)}, and this rotation is for {n} positions and {width} features "
                "per head; pass one position per token, and a head width to RotaryPositions."
            )
        rotated, rest = x[..., :width], x[..., width:]
        first, second = rotated.chunk(2, -1)
        rotated = rotated * self.cos.to(x.dtype) + torch.cat([-second, first], -1) * self.sin.to(x.dtype)
        return torch.cat([rotated, rest], -1) if rest.shape[-1] else rotated


class RotaryPositions(nn.Module):
    """Rotary position embedding: scores depend on relative positions only. Su et al. 2021, eq. 34.

    The paper pairs features 2i and 2i + 1; here feature i is paired with i + d/2, as in GPT-NeoX and LLaMA.
    The two differ only in the order of the features.

    width: head dimension, even. base: wavelengths go up to base · 2π; increase it for longer texts.

    There are no parameters and no maximum position. `RotaryPositions(d)(positions)` returns a `Rotation`,
    which all layers share.

    >>> import torch, regard
    >>> rotation = regard.models.RotaryPositions(4)(torch.arange(5))
    >>> x = torch.randn(2, 5, 4)
    >>> torch.allclose(rotation(x).norm(dim=-1), x.norm(dim=-1), atol=1e-5)  # norms are preserved
    True
    """

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
        """(…, n) → the rotation of x (…, h, n, d)."""
        sin, cos = (torch.cat([wave, wave], -1) for wave in _waves(positions, self.width, self.base, dtype))
        if positions.dim() > 1:
            sin, cos = sin.unsqueeze(-3), cos.unsqueeze(-3)  # b n d -> b 1 n d
        return Rotation(cos, sin)

    def extra_repr(self) -> str:
        return str(self.width)


def _waves(positions: Tensor, width: int, base: float, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """sin and cos of position · base^(−2i / width) for each feature pair i, both (…, width / 2).

    Computed in float64, because float32 angles are off by 0.06 at position 1e6; once per distinct position if
    many tokens share it.
    """
    if concrete(positions) and positions.numel():
        low, high = (int(bound) for bound in positions.aminmax())
        if low >= 0 and positions.numel() > high + 1:
            sin, cos = _waves(torch.arange(high + 1, device=positions.device), width, base, dtype)
            return sin[positions], cos[positions]
    exponents = torch.arange(0, width, 2, device=positions.device, dtype=torch.float64) / width
    angles = positions[..., None].double() * torch.exp(exponents * -math.log(base))
    dtype = torch.get_default_dtype() if dtype is None else dtype
    return angles.sin().to(dtype), angles.cos().to(dtype)
