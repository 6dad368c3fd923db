"""T5's relative positions: a learned bias per bucket of distances, added to the scores."""

import math

import torch
from torch import Tensor, nn

from regard._util.checks import check_int
from regard._util.name_hints import hint_arguments
from regard.mechanism.biases import RelativeBias
from regard.models.layers.position_encoding import PositionSizes


def make(sizes: PositionSizes) -> "T5Bias":
    return T5Bias(sizes.heads, sizes.buckets, sizes.max_distance, bidirectional=not sizes.causal)


@hint_arguments
class T5Bias(RelativeBias):
    """A learned bias for each head and distance bucket (Raffel et al. 2020, section 2.1).

    buckets: number of buckets. Half of them cover one distance each; the others are spaced logarithmically.
    max_distance: larger distances share the last bucket.
    bidirectional: split the buckets between left and right; otherwise all keys to the right share the
        bucket for distance 0.

    >>> import torch, regard
    >>> bias = regard.T5Bias(heads=8)
    >>> bias.bucket(torch.tensor([-200, -1, 0, 1, 200]))
    tensor([15,  1,  0, 17, 31])
    >>> x = torch.randn(8, 5, 4)
    >>> regard.attention(x, x, x, bias=bias).sum().backward()
    >>> bias.table.grad.shape
    torch.Size([32, 8])
    """

    def __init__(
        self, heads: int, buckets: int = 32, max_distance: int = 128, bidirectional: bool = True
    ) -> None:
        super().__init__()
        check_int("T5Bias got heads", heads, min=1)
        check_int("T5Bias got buckets", buckets, min=4 if bidirectional else 2)
        exact = buckets // 4 if bidirectional else buckets // 2
        check_int(
            "T5Bias got max_distance", max_distance, min=exact + 1, why=f", above the {exact} exact distances"
        )
        self.buckets, self.max_distance, self.bidirectional = buckets, max_distance, bidirectional
        self.table = nn.Parameter(torch.randn(buckets, heads) * 0.1)

    def bucket(self, distance: Tensor) -> Tensor:
        """Return the bucket of each key − query distance."""
        buckets, base = self.buckets, torch.zeros_like(distance)
        if self.bidirectional:
            buckets //= 2
            base = (distance > 0) * buckets
            far = distance.abs()
        else:
            far = (-distance).clamp(min=0)
        exact = buckets // 2
        growth = torch.log(far.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        coarse = (exact + (growth * (buckets - exact)).long()).clamp(max=buckets - 1)
        return base + torch.where(far < exact, far, coarse)

    def forward(self, distance: Tensor) -> Tensor:
        return self.table[self.bucket(distance)].mT  # l h -> h l

    def extra_repr(self) -> str:
        direction = "" if self.bidirectional else ", bidirectional=False"
        sizes = f"heads={self.table.shape[1]}, buckets={self.buckets}, max_distance={self.max_distance}"
        return sizes + direction
