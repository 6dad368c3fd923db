"""Where a token stands: what attention alone cannot know, as it treats its keys as a set.

Positions enter at one of three places: `SinusoidalPositions` and `LearnedPositions` are added to the embeddings, `RotaryPositions` turns
queries and keys, and `regard.ALiBi` and `regard.T5Bias` are biases of the scores.
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
    base: 10,000 above; more for longer texts.

    Nothing is learned, and any position has its vector.

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
        """(…) → (…, m): sin in the even places, cos in the odd ones."""
        sin, cos = _waves(positions, self.width, self.base, dtype)
        return torch.stack([sin, cos], -1).flatten(-2)[..., : self.width]

    def extra_repr(self) -> str:
        return str(self.width)


class LearnedPositions(nn.Module):
    """A learned vector for each position below `max_positions`: Gehring et al. 2017, section 3.1; BERT.

    max_positions: size of the table. width: vector dimension.

    >>> import torch, regard
    >>> positions = regard.models.LearnedPositions(512, 16)
    >>> positions(torch.arange(5)).shape
    torch.Size([5, 16])
    >>> positions(torch.arange(600))
    Traceback (most recent call last):
    regard.errors.ArgumentError: a sentence reaches position 599 and LearnedPositions has positions 0 to 511; ...
    """

    def __init__(self, max_positions: int, width: int) -> None:
        super().__init__()
        check_int("LearnedPositions got max_positions", max_positions, min=1)
        check_int("LearnedPositions got width", width, min=1)
        self.vectors = nn.Parameter(torch.randn(max_positions, width) * 0.02)

    def forward(self, positions: Tensor) -> Tensor:
        """(…) → (…, m)."""
        if concrete(positions) and positions.numel():
            least, most = (int(bound) for bound in positions.aminmax())
            if least < 0 or most >= len(self.vectors):
                raise ArgumentError(
                    f"a sentence reaches position {least if least < 0 else most} and LearnedPositions has positions 0 "
                    f"to {len(self.vectors) - 1}; shorten it, learn more positions, or use others: "
                    "Sinusoidal, Rotary, ALiBi and T5 have no end."
                )
        return self.vectors[positions]

    def extra_repr(self) -> str:
        return f"{self.vectors.shape[0]}, {self.vectors.shape[1]}"


class Rotation(NamedTuple):
    """cos and sin of the angles at some positions, both (…, n, d): turns x (…, h, n, d).

    >>> import torch, regard
    >>> rotation = regard.models.RotaryPositions(2)(torch.tensor([0, 1]))  # by 0 and by 1 radian
    >>> rotation(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    tensor([[1.0000, 0.0000],
            [0.5403, 0.8415]])
    """

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """x turned, with feature i paired with feature i + d/2."""
        n, width = self.cos.shape[-2:]
        if x.shape[-1] < width or x.shape[-2] != n:
            raise ShapeError(
                f"x has the shape {tuple(x.shape)} and the angles are for {n} positions and heads of {width} "
                f"features; give Rotary the width of a head, and one position for each token."
            )
        turned, rest = x[..., :width], x[..., width:]
        first, second = turned.chunk(2, -1)
        turned = turned * self.cos.to(x.dtype) + torch.cat([-second, first], -1) * self.sin.to(x.dtype)
        return torch.cat([turned, rest], -1) if rest.shape[-1] else turned


class RotaryPositions(nn.Module):
    """Queries and keys turned by their position, so that scores see the distance: Su et al. 2021, eq. 34.

    The paper turns neighbours, 2i and 2i + 1, together; here feature i is paired with i + d/2, as in GPT-NeoX
    and LLaMA, which is the same but for the order of the features.

    width: that of a head.
    base: the wavelengths go up to base · 2π; more for longer texts.

    Nothing is learned, and any position has its angles. `RotaryPositions(d)(positions)` is
    a function that turns queries and keys, for all layers alike.

    >>> import torch, regard
    >>> rotation = regard.models.RotaryPositions(4)(torch.arange(5))
    >>> x = torch.randn(2, 5, 4)
    >>> torch.allclose(rotation(x).norm(dim=-1), x.norm(dim=-1), atol=1e-5)  # lengths stay
    True
    """

    def __init__(self, width: int, base: float = 10_000.0) -> None:
        super().__init__()
        check_int("RotaryPositions got width", width, min=2)
        check_number("RotaryPositions got base", base, above=1)
        if width % 2:
            raise ArgumentError(
                f"RotaryPositions got width={width}; it turns pairs of features, so give an even width: that "
                f"of a head, or {width - 1} for all its features but the last."
            )
        self.width, self.base = width, float(base)

    def forward(self, positions: Tensor, dtype: torch.dtype | None = None) -> Rotation:
        """(…, n) → angles for (…, h, n, d)."""
        sin, cos = (torch.cat([wave, wave], -1) for wave in _waves(positions, self.width, self.base, dtype))
        if positions.dim() > 1:
            sin, cos = sin.unsqueeze(-3), cos.unsqueeze(-3)  # b n d -> b 1 n d
        return Rotation(cos, sin)

    def extra_repr(self) -> str:
        return str(self.width)


def _waves(positions: Tensor, width: int, base: float, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """sin and cos of position · base^(−2i / width), for each pair i of features: (…, width / 2) each.

    In float64, as float32 angles are off by 0.06 at position 1e6; and once for each position, where many
    tokens share it.
    """
    if concrete(positions) and positions.numel():
        least, most = (int(end) for end in positions.aminmax())
        if least >= 0 and positions.numel() > most + 1:
            sin, cos = _waves(torch.arange(most + 1, device=positions.device), width, base, dtype)
            return sin[positions], cos[positions]
    exponents = torch.arange(0, width, 2, device=positions.device, dtype=torch.float64) / width
    angles = positions[..., None].double() * torch.exp(exponents * -math.log(base))
    dtype = torch.get_default_dtype() if dtype is None else dtype
    return angles.sin().to(dtype), angles.cos().to(dtype)
