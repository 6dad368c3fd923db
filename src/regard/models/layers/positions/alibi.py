"""ALiBi: a bias that decreases linearly with the distance, added to the scores."""

import math

import torch
from torch import Tensor

from regard._util.checks import check_int
from regard._util.name_hints import hint_arguments
from regard.mechanism.biases import RelativeBias
from regard.models.layers.position_encoding import PositionSizes


def make(sizes: PositionSizes) -> "ALiBi":
    return ALiBi(sizes.heads)


@hint_arguments
class ALiBi(RelativeBias):
    """The bias −slope · |distance|, with slopes 2^(−8/h), 2^(−16/h), … (Press et al. 2022, section 3).

    ALiBi has no parameters. If the number of heads is not a power of two, the slopes for the next smaller
    power are followed by every other slope for the next larger one, as in the authors' code.

    >>> import torch, regard
    >>> regard.ALiBi(2).slopes
    tensor([0.0625, 0.0039])
    >>> x = torch.randn(2, 5, 4)
    >>> regard.attention(x, x, x, mask=regard.Causal(), bias=regard.ALiBi(2)).shape
    torch.Size([2, 5, 4])
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        check_int("ALiBi got heads", heads, min=1)
        self.heads = heads

    @property
    def slopes(self) -> Tensor:
        """The slope of each head."""
        return torch.tensor(_slopes(self.heads))

    def forward(self, distance: Tensor) -> Tensor:
        # not a buffer: half precision would convert it to float16, which is too coarse beyond distance 2,048
        slopes = torch.tensor(_slopes(self.heads), device=distance.device)
        return -slopes[:, None] * distance.abs()

    def extra_repr(self) -> str:
        return f"heads={self.heads}"


def _slopes(heads: int) -> list[float]:
    power = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    return slopes if power == heads else slopes + _slopes(2 * power)[0::2][: heads - power]
