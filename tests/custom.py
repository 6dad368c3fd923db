"""Custom normalizers that several test files use."""

import torch
from torch import Tensor, nn

import regard


class OwnSoftmax(regard.Normalizer):
    """Equal to softmax."""

    def tau(self, scores: Tensor) -> Tensor:
        return torch.logsumexp(scores, -1, keepdim=True)

    def phi(self, x: Tensor) -> Tensor:
        return x.exp()

    def slope(self, x: Tensor) -> Tensor:
        return x.exp()


class LearnedSoftmax(nn.Module, OwnSoftmax):
    """Equal to softmax, with a parameter that has no effect."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))


class Unnormalized(regard.Normalizer):
    """Base class for rows that do not sum to one: τ is zero."""

    sums_to_one = False

    def tau(self, scores: Tensor) -> Tensor:
        return torch.zeros_like(scores[..., :1])


class OwnMean(Unnormalized):
    """Equal to Mean."""

    def phi(self, x: Tensor) -> Tensor:
        return x

    def slope(self, x: Tensor) -> Tensor:
        return torch.ones_like(x)

    def divisor(self, x: Tensor, visible: Tensor) -> Tensor:
        return visible.sum(-1, keepdim=True).clamp(min=1).to(x.dtype)


class Squares(Unnormalized):
    """The example in the guide: max(s, 0)²."""

    def phi(self, x: Tensor) -> Tensor:
        return x.clamp(min=0) ** 2

    def slope(self, x: Tensor) -> Tensor:
        return 2 * x.clamp(min=0)


class OwnCubes(Unnormalized):
    """s³."""

    def phi(self, x: Tensor) -> Tensor:
        return x**3

    def slope(self, x: Tensor) -> Tensor:
        return 3 * x**2
