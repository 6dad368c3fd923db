"""Normalizers: from a row of scores to a row of weights.

Each is a row statistic τ and an elementwise φ:  weights = φ(scores − τ) / divisor.

The rows of most sum to one. For these τ solves Σ φ(scores − τ) = 1, which makes them indifferent to an
offset of the whole row; their `tau` is therefore called with the row's maximum already subtracted.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard._util.checks import check_int, check_number
from regard.errors import ArgumentError, DTypeError
from regard.mechanism.torch_state import concrete


class Normalizer:
    """Base of all normalizers: give φ, its derivative and τ, and the operator does the rest.

    Scores of −inf are masked keys, where `phi` and `slope` are not asked.

    >>> import torch, regard
    >>> class Squares(regard.Normalizer):  # the square of every positive score
    ...     sums_to_one = False
    ...
    ...     def tau(self, scores):
    ...         return torch.zeros_like(scores[..., :1])
    ...
    ...     def phi(self, x):
    ...         return x.clamp(min=0) ** 2
    ...
    ...     def slope(self, x):
    ...         return 2 * x.clamp(min=0)
    >>> x = torch.eye(2)
    >>> regard.attend(x, x, x, score=regard.Dot(), normalize=Squares())[1].dense()
    tensor([[1., 0.],
            [0., 1.]])
    """

    # Whether τ makes each row sum to one. If so, `tau` is called with the row's maximum subtracted, and the
    # derivative of τ follows from Σ φ = 1; if not, τ is taken for a constant.
    sums_to_one: bool = True

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def tau(self, scores: Tensor) -> Tensor:
        """τ of each row, (…, q, k) → (…, q, 1). For rows that sum to one, the row's maximum is 0."""
        raise NotImplementedError(f"{type(self).__name__} needs a method tau(scores)")

    def phi(self, x: Tensor) -> Tensor:
        """φ, elementwise."""
        raise NotImplementedError(f"{type(self).__name__} needs a method phi(x)")

    def slope(self, x: Tensor) -> Tensor:
        """φ', elementwise."""
        raise NotImplementedError(f"{type(self).__name__} needs a method slope(x)")

    def divisor(self, x: Tensor, visible: Tensor) -> Tensor | None:
        """What each row is divided by, (…, q, 1), or None; never differentiated."""
        return None

    def sink(self) -> Tensor | float | None:
        """The score of one more key whose value is zero: a number, or one per head; or None."""
        return None


@dataclass(frozen=True)
class Softmax(Normalizer):
    """exp(s / t) / Σ exp(s / t): the usual one (Bahdanau et al. 2015, eq. 6; Vaswani et al. 2017, eq. 1).

    A low temperature t sharpens the weights towards `Hard`, a high one flattens them towards the mean.

    >>> import torch, regard
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> regard.attend(x, x, x, score=regard.Dot(), normalize=regard.Softmax(temperature=0.1))[1].dense()
    tensor([[1.0000e+00, 4.5398e-05],
            [4.5398e-05, 1.0000e+00]])
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        cure = "For the limit of temperature 0 use Hard()."
        check_number("Softmax got temperature", self.temperature, above=0, cure=cure)
        check_number("Softmax got temperature", self.temperature, min=1e-30, below=1e31, cure=cure)  # in float32

    def tau(self, scores: Tensor) -> Tensor:
        return self.temperature * self.phi(scores).sum(-1, keepdim=True).log()

    def phi(self, x: Tensor) -> Tensor:
        return torch.exp(x if self.temperature == 1.0 else x / self.temperature)

    def slope(self, x: Tensor) -> Tensor:
        return self.phi(x) if self.temperature == 1.0 else self.phi(x) / self.temperature


@dataclass(frozen=True, eq=False)
class Softmax1(Normalizer):
    """exp(s) / (exp(sink) + Σ exp(s)): softmax with a way out, so that a row may sum to less than one.

    score: the sink's, one number or a tensor with one per head.

    The sink is one more key with value zero. A sink of 0 is "softmax off by one" (Miller 2023); a
    tensor gives one per head, as in gpt-oss, and receives gradients. `Sink` is the same, learned.

    >>> import torch, regard
    >>> x = torch.zeros(1, 2)
    >>> regard.attend(x, x, x, normalize=regard.Softmax1())[1].dense()
    tensor([[0.5000]])
    """

    score: float | Tensor = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.score, Tensor):
            if not self.score.is_floating_point():
                raise DTypeError(
                    f"the sink is of {self.score.dtype}; a score is floating point: score.float()."
                )
        elif self.score != -math.inf:  # which no key can lose against
            check_number("the sink of Softmax1 got score", self.score)

    def tau(self, scores: Tensor) -> Tensor:
        return torch.exp(scores).sum(-1, keepdim=True).log()

    def phi(self, x: Tensor) -> Tensor:
        return torch.exp(x)

    def slope(self, x: Tensor) -> Tensor:
        return torch.exp(x)

    def sink(self) -> Tensor | float | None:
        return self.score


class Sink(nn.Module):
    """`Softmax1` with a learned sink per head (gpt-oss, 2025).

    heads: the heads of the query.
    start: the score that every sink begins with.

    >>> import torch, regard
    >>> normalize = regard.Sink(heads=8)
    >>> x = torch.randn(8, 5, 4)
    >>> regard.attention(x, x, x, normalize=normalize).sum().backward()
    >>> normalize.score.grad.shape
    torch.Size([8])
    """

    def __init__(self, heads: int, start: float = 0.0) -> None:
        super().__init__()
        check_int("Sink got heads", heads, min=1)
        check_number("Sink got start", start)
        self.score = nn.Parameter(torch.full((heads,), float(start)))

    def extra_repr(self) -> str:
        return f"heads={len(self.score)}"

    def forward(self) -> Softmax1:
        """The normalizer that this module stands for."""
        return Softmax1(self.score)


@dataclass(frozen=True, eq=False)
class Entmax(Normalizer):
    """max((α−1)(s−τ), 0)^(1/(α−1)), with τ such that rows sum to one: Peters et al. 2019, eq. 10.

    alpha: α, above 1; the larger it is, the sparser the weights.

    Weights are exactly zero where a score is low. α → 1 tends to `Softmax`. `Entmax(2.0)` is equal to
    `Sparsemax()`, and `Entmax(1.5)` to `Entmax15()`.

    >>> import torch, regard
    >>> query, key = torch.tensor([[1.0]]), torch.tensor([[0.0], [1.0], [2.0]])
    >>> regard.attend(query, key, key, score=regard.Dot(), normalize=regard.Entmax(1.5))[1].dense()
    tensor([[0.0000, 0.1693, 0.8307]])
    """

    alpha: float = 1.5

    def __post_init__(self) -> None:
        # beyond these bounds float32 cannot tell the weights from those of the limits
        cure = "alpha = 1 is Softmax(), and alpha → ∞ is Hard()."
        check_number("Entmax got alpha", self.alpha, min=1.01, below=8.01, cure=cure)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Entmax) or self._family() is not other._family():
            return NotImplemented
        return self.alpha == other.alpha

    def __hash__(self) -> int:
        return hash((self._family(), self.alpha))

    def _family(self) -> type["Entmax"]:
        """Entmax for Sparsemax and Entmax15 too, which name an alpha; any other subclass is its own."""
        return Entmax if type(self) in (Sparsemax, Entmax15) else type(self)

    def tau(self, scores: Tensor) -> Tensor:
        x = scores.detach() * (self.alpha - 1)  # the row's maximum is 0, so τ lies in [−1, 0)
        return _root(x, 1 / (self.alpha - 1)) / (self.alpha - 1)

    def phi(self, x: Tensor) -> Tensor:
        return _power(x * (self.alpha - 1), 1 / (self.alpha - 1))

    def slope(self, x: Tensor) -> Tensor:
        return _power(x * (self.alpha - 1), 1 / (self.alpha - 1) - 1)


class Sparsemax(Entmax):
    """max(s − τ, 0): the nearest point of the simplex (Martins & Astudillo 2016, eq. 2). `Entmax(2)`.

    >>> import torch, regard
    >>> query, key = torch.tensor([[1.0]]), torch.tensor([[0.0], [0.5], [1.0]])
    >>> regard.attend(query, key, key, score=regard.Dot(), normalize=regard.Sparsemax())[1].dense()
    tensor([[0.0000, 0.2500, 0.7500]])
    """

    def __init__(self) -> None:
        super().__init__(alpha=2.0)

    def __repr__(self) -> str:
        return "Sparsemax()"


class Entmax15(Entmax):
    """`Entmax(1.5)`: max((s − τ)/2, 0)².

    >>> import regard
    >>> regard.Entmax15().alpha
    1.5
    """

    def __init__(self) -> None:
        super().__init__(alpha=1.5)

    def __repr__(self) -> str:
        return "Entmax15()"


def _power(x: Tensor, exponent: float) -> Tensor:
    """x^exponent where x > 0, and 0 elsewhere, with derivatives that are zero there too."""
    if exponent == 0:
        return (x > 0).to(x.dtype)
    if exponent == 1:
        return x.clamp(min=0)
    if exponent == 2:
        return x.clamp(min=0).square()
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1.0) ** exponent, 0.0)


def _root(x: Tensor, p: float, steps: int = 60) -> Tensor:
    """τ with Σ max(x − τ, 0)^p = 1, for rows whose maximum is 0.

    For p ≥ 1 the norm ‖max(x − τ, 0)‖ₚ is convex and falls with τ, so Newton's method started at −1, left
    of the root, climbs to it and never passes it: in a few steps, and exactly for p = 1. For p < 1 it is
    not convex, and the interval between −1 and −n^(−1/p) is halved, in the logarithm: −τ may be tiny.
    """
    tau = torch.full_like(x[..., :1], -1.0)
    if p < 1:
        lower, upper = torch.zeros_like(tau), torch.full_like(tau, -math.log(x.shape[-1]) / p)
        for _ in range(steps):
            middle = (lower + upper) / 2
            above = _power(x + middle.exp(), p).sum(-1, keepdim=True) >= 1
            lower, upper = torch.where(above, middle, lower), torch.where(above, upper, middle)
        return -lower.exp()
    for _ in range(steps):
        following = torch.maximum(tau, tau + _newton_step(x, tau, p))
        if concrete(tau) and torch.equal(following, tau):
            break
        tau = following
    for _ in range(2):  # converged from the left; two unconstrained steps undo an overshoot by rounding
        tau = tau + _newton_step(x, tau, p)
    return tau


def _newton_step(x: Tensor, tau: Tensor, p: float) -> Tensor:
    """(‖max(x − τ, 0)‖ₚ − 1) / slope; 0 where nothing is above τ."""
    gap = x - tau
    norm = _power(gap, p).sum(-1, keepdim=True) ** (1 / p)
    fall = _power(gap, p - 1).sum(-1, keepdim=True) / norm ** (p - 1)
    return torch.where(fall > 0, (norm - 1) / fall, 0.0)


class _Unnormalized(Normalizer):
    """Rows need not sum to one: each weight depends on its own score and on the number of keys alone."""

    sums_to_one = False

    def tau(self, scores: Tensor) -> Tensor:
        return torch.zeros_like(scores[..., :1])


@dataclass(frozen=True)
class Mean(_Unnormalized):
    """s / n, with n the number of keys in sight: Wang et al. 2018, eq. 4, "dot product" with C(x) = N.

    >>> import torch, regard
    >>> x = torch.tensor([[1.0], [3.0]])
    >>> regard.attend(x, x, x, score=regard.Dot(), normalize=regard.Mean())[1].dense()
    tensor([[0.5000, 1.5000],
            [1.5000, 4.5000]])
    """

    def phi(self, x: Tensor) -> Tensor:
        return x

    def slope(self, x: Tensor) -> Tensor:
        return torch.ones_like(x)

    def divisor(self, x: Tensor, visible: Tensor) -> Tensor | None:
        return _count(visible, x)


@dataclass(frozen=True)
class Relu(_Unnormalized):
    """max(s, 0) / n, with n the number of keys in sight: Wortsman et al. 2023.

    >>> import torch, regard
    >>> x = torch.tensor([[1.0], [-3.0]])
    >>> regard.attend(x, x, x, score=regard.Dot(), normalize=regard.Relu())[1].dense()
    tensor([[0.5000, 0.0000],
            [0.0000, 4.5000]])
    """

    def phi(self, x: Tensor) -> Tensor:
        return x.clamp(min=0)

    def slope(self, x: Tensor) -> Tensor:
        return (x > 0).to(x.dtype)

    def divisor(self, x: Tensor, visible: Tensor) -> Tensor | None:
        return _count(visible, x)


@dataclass(frozen=True)
class Sigmoid(_Unnormalized):
    """1 / (1 + exp(−s − bias)), bias = −log n by default: Ramapuram et al. 2024, section 2.

    n is the number of keys in sight, so that a row of equal scores still sums to about one.

    >>> import torch, regard
    >>> x = torch.zeros(2, 1)
    >>> regard.attend(x, x, x, normalize=regard.Sigmoid())[1].dense()
    tensor([[0.3333, 0.3333],
            [0.3333, 0.3333]])
    """

    bias: float | None = None

    def __post_init__(self) -> None:
        if self.bias is not None:
            check_number("Sigmoid got bias", self.bias)

    def tau(self, scores: Tensor) -> Tensor:
        if self.bias is not None:
            return torch.full_like(scores[..., :1], -self.bias)
        return _count(scores != -math.inf, scores).log()

    def phi(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)

    def slope(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x) * torch.sigmoid(-x)


@dataclass(frozen=True)
class Hard(Normalizer):
    """All weight on the best key, shared among ties: the lookup in a dictionary.

    The limit of `Softmax` at temperature 0. Its weights are constant, so no gradient reaches the scores.

    >>> import torch, regard
    >>> keys, values = torch.eye(3), torch.tensor([[10.0], [20.0], [30.0]])
    >>> regard.attention(keys[1:2], keys, values, normalize=regard.Hard())
    tensor([[20.]])
    """

    def tau(self, scores: Tensor) -> Tensor:
        return torch.zeros_like(scores[..., :1])  # the row's maximum has been subtracted

    def phi(self, x: Tensor) -> Tensor:
        return (x >= 0).to(x.dtype)

    def slope(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def divisor(self, x: Tensor, visible: Tensor) -> Tensor | None:
        return _count(x >= 0, x)


def _count(chosen: Tensor, like: Tensor) -> Tensor:
    return chosen.sum(-1, keepdim=True).clamp(min=1).to(like.dtype)


_BUILT_IN = {
    kind.__name__: kind
    for kind in (Softmax, Softmax1, Entmax, Sparsemax, Entmax15, Mean, Relu, Sigmoid, Hard)
}


def spell(normalize: Normalizer) -> str | None:
    """A built-in normalizer as text, "Entmax 0x1.8p+0", or None for somebody's own.

    Compiled graphs and saved weights carry this text; hexadecimal loses no digit, and fixes numbers that
    torch.compile would treat as variable. A sink's score is a tensor and is kept beside it.
    """
    kind = type(normalize)
    if _BUILT_IN.get(kind.__name__) is not kind:
        return None
    if isinstance(normalize, Softmax):
        return f"Softmax {float(normalize.temperature).hex()}"
    if isinstance(normalize, Sigmoid) and normalize.bias is not None:
        return f"Sigmoid {float(normalize.bias).hex()}"
    if kind is Entmax and isinstance(normalize, Entmax):
        return f"Entmax {float(normalize.alpha).hex()}"
    return kind.__name__


def unspell(text: str) -> Normalizer:
    """The normalizer that `spell` wrote down."""
    name, *numbers = text.split(" ")
    if name not in _BUILT_IN:
        raise ArgumentError(f"{name!r} is no normalizer that regard knows; it knows {', '.join(_BUILT_IN)}.")
    build: Callable[..., Normalizer] = _BUILT_IN[name]
    return build(*map(float.fromhex, numbers))
