"""Normalizers turn scores into weights.

A normalizer consists of a row statistic τ and an elementwise function φ: weights = φ(scores − τ) / divisor.

If the rows sum to one, τ solves Σ φ(scores − τ) = 1. Such a normalizer is invariant to adding a constant to a
row, so its `tau` is called with the row maximum already subtracted. In the formulas below, s is a score.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature

import torch
from torch import Tensor, nn

from regard._util.checks import check_int, check_number
from regard._util.name_hints import hint_arguments
from regard.errors import ArgumentError, DTypeError
from regard.mechanism.entmax_tau import power, solve_tau


class Normalizer:
    """Base class for normalizers. Subclasses implement τ, φ and the derivative of φ.

    Masked keys have a score of −inf; the values of `phi` and `slope` for them are ignored.

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

    # Whether τ makes each row sum to one. If so, `tau` receives scores minus the row maximum, and its
    # derivative follows from Σ φ = 1; otherwise τ is treated as a constant.
    sums_to_one: bool = True
    _kernel: str | None = None  # name in kernels/abi.h; not used for subclasses of built-in normalizers

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def tau(self, scores: Tensor) -> Tensor:
        """Return τ for each row, (…, q, k) → (…, q, 1). If `sums_to_one` is True, the row maximum is 0."""
        raise NotImplementedError(f"{type(self).__name__} must implement tau(scores)")

    def phi(self, x: Tensor) -> Tensor:
        """Return φ(x), elementwise."""
        raise NotImplementedError(f"{type(self).__name__} must implement phi(x)")

    def slope(self, x: Tensor) -> Tensor:
        """Return φ'(x), elementwise."""
        raise NotImplementedError(f"{type(self).__name__} must implement slope(x)")

    def divisor(self, x: Tensor, visible: Tensor) -> Tensor | None:
        """Return the divisor for each row, (…, q, 1), or None. It is treated as a constant."""
        return None

    def sink(self) -> Tensor | float | None:
        """Return the score of a sink (an extra key with value zero), one score per head, or None."""
        return None


@hint_arguments
@dataclass(frozen=True)
class Softmax(Normalizer):
    """exp(s / t) / Σ exp(s / t) (Bahdanau et al. 2015, eq. 6; Vaswani et al. 2017, eq. 1).

    This is the default normalizer.

    temperature: the t in the formula. Low values approach `Hard`, high values uniform weights.

    >>> import torch, regard
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> regard.attend(x, x, x, score=regard.Dot(), normalize=regard.Softmax(temperature=0.1))[1].dense()
    tensor([[1.0000e+00, 4.5398e-05],
            [4.5398e-05, 1.0000e+00]])
    """

    temperature: float = 1.0
    _kernel = "softmax"

    def __post_init__(self) -> None:
        cure = "For the limit 0, use Hard()."
        check_number("Softmax got temperature", self.temperature, above=0, cure=cure)
        check_number("Softmax got temperature", self.temperature, min=1e-30, below=1e31, cure=cure)

    def tau(self, scores: Tensor) -> Tensor:
        return self.temperature * self.phi(scores).sum(-1, keepdim=True).log()

    def phi(self, x: Tensor) -> Tensor:
        return torch.exp(x if self.temperature == 1.0 else x / self.temperature)

    def slope(self, x: Tensor) -> Tensor:
        return self.phi(x) if self.temperature == 1.0 else self.phi(x) / self.temperature


@hint_arguments
@dataclass(frozen=True, eq=False)
class Softmax1(Normalizer):
    """Softmax with an attention sink, exp(s) / (exp(sink) + Σ exp(s)). Rows may sum to less than one.

    score: score of the sink, either one number or a tensor with one score per head.

    The sink is an extra key with value zero. A score of 0 gives "softmax off by one" (Miller 2023). A tensor
    receives gradients, as in gpt-oss. `Sink` is a module with learned scores.

    >>> import torch, regard
    >>> x = torch.zeros(1, 2)
    >>> regard.attend(x, x, x, normalize=regard.Softmax1())[1].dense()
    tensor([[0.5000]])
    """

    score: float | Tensor = 0.0
    _kernel = "softmax"

    def __post_init__(self) -> None:
        if isinstance(self.score, Tensor):
            if not self.score.is_floating_point():
                raise DTypeError(
                    f"Softmax1 got a sink of dtype {self.score.dtype}; it must be floating point. "
                    "Use score.float()."
                )
        elif self.score != -math.inf:  # −inf disables the sink
            check_number("Softmax1 got a sink with score", self.score)

    def tau(self, scores: Tensor) -> Tensor:
        return torch.exp(scores).sum(-1, keepdim=True).log()

    def phi(self, x: Tensor) -> Tensor:
        return torch.exp(x)

    def slope(self, x: Tensor) -> Tensor:
        return torch.exp(x)

    def sink(self) -> Tensor | float | None:
        return self.score


@hint_arguments
class Sink(nn.Module):
    """`Softmax1` with a learned sink per head (gpt-oss, 2025).

    heads: number of query heads. start: initial score.

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
        """Return the normalizer with the current scores."""
        return Softmax1(self.score)


@hint_arguments
@dataclass(frozen=True, eq=False)
class Entmax(Normalizer):
    """α-entmax, max((α−1)(s−τ), 0)^(1/(α−1)), where τ makes each row sum to one (Peters et al. 2019, eq. 10).

    alpha: α > 1; larger values give sparser weights, with exact zeros for low scores.

    The limit α → 1 is `Softmax`. `Entmax(2.0)` equals `Sparsemax()`, and `Entmax(1.5)` equals `Entmax15()`.

    >>> import torch, regard
    >>> query, key = torch.tensor([[1.0]]), torch.tensor([[0.0], [1.0], [2.0]])
    >>> regard.attend(query, key, key, score=regard.Dot(), normalize=regard.Entmax(1.5))[1].dense()
    tensor([[0.0000, 0.1693, 0.8307]])
    """

    alpha: float = 1.5

    def __post_init__(self) -> None:
        # outside these bounds, float32 cannot distinguish the weights from those of Softmax or Hard
        cure = "For the limit 1, use Softmax(); for the limit ∞, use Hard()."
        check_number("Entmax got alpha", self.alpha, min=1.01, below=8.01, cure=cure)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Entmax) or self._family() is not other._family():
            return NotImplemented
        return self.alpha == other.alpha

    def __hash__(self) -> int:
        return hash((self._family(), self.alpha))

    @property
    def _kernel(self) -> str | None:  # type: ignore[override]
        return {2.0: "sparsemax", 1.5: "entmax15"}.get(self.alpha)

    def _family(self) -> type["Entmax"]:
        """Return Entmax for Sparsemax and Entmax15, which only fix alpha; otherwise the class itself."""
        return Entmax if type(self) in (Sparsemax, Entmax15) else type(self)

    def tau(self, scores: Tensor) -> Tensor:
        x = scores.detach() * (self.alpha - 1)  # the row maximum is 0, so τ is in [−1, 0)
        return solve_tau(x, 1 / (self.alpha - 1)) / (self.alpha - 1)

    def phi(self, x: Tensor) -> Tensor:
        return power(x * (self.alpha - 1), 1 / (self.alpha - 1))

    def slope(self, x: Tensor) -> Tensor:
        return power(x * (self.alpha - 1), 1 / (self.alpha - 1) - 1)


@hint_arguments
class Sparsemax(Entmax):
    """Projection onto the simplex, max(s − τ, 0) (Martins & Astudillo 2016, eq. 2). Equals `Entmax(2)`.

    >>> import torch, regard
    >>> query, key = torch.tensor([[1.0]]), torch.tensor([[0.0], [0.5], [1.0]])
    >>> regard.attend(query, key, key, score=regard.Dot(), normalize=regard.Sparsemax())[1].dense()
    tensor([[0.0000, 0.2500, 0.7500]])
    """

    def __init__(self) -> None:
        super().__init__(alpha=2.0)

    def __repr__(self) -> str:
        return "Sparsemax()"


@hint_arguments
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


class _Unnormalized(Normalizer):
    """Base class for normalizers whose weights depend only on the score and the number of visible keys."""

    sums_to_one = False

    def tau(self, scores: Tensor) -> Tensor:
        return torch.zeros_like(scores[..., :1])


@dataclass(frozen=True)
class Mean(_Unnormalized):
    """s / n, where n is the number of visible keys ("dot product" with C(x) = N in Wang et al. 2018, eq. 4).

    >>> import torch, regard
    >>> x = torch.tensor([[1.0], [3.0]])
    >>> regard.attend(x, x, x, score=regard.Dot(), normalize=regard.Mean())[1].dense()
    tensor([[0.5000, 1.5000],
            [1.5000, 4.5000]])
    """

    _kernel = "mean"

    def phi(self, x: Tensor) -> Tensor:
        return x

    def slope(self, x: Tensor) -> Tensor:
        return torch.ones_like(x)

    def divisor(self, x: Tensor, visible: Tensor) -> Tensor | None:
        return _count_keys(visible, x)


@dataclass(frozen=True)
class Relu(_Unnormalized):
    """max(s, 0) / n, where n is the number of visible keys (Wortsman et al. 2023).

    >>> import torch, regard
    >>> x = torch.tensor([[1.0], [-3.0]])
    >>> regard.attend(x, x, x, score=regard.Dot(), normalize=regard.Relu())[1].dense()
    tensor([[0.5000, 0.0000],
            [0.0000, 4.5000]])
    """

    _kernel = "relu"

    def phi(self, x: Tensor) -> Tensor:
        return x.clamp(min=0)

    def slope(self, x: Tensor) -> Tensor:
        return (x > 0).to(x.dtype)

    def divisor(self, x: Tensor, visible: Tensor) -> Tensor | None:
        return _count_keys(visible, x)


@hint_arguments
@dataclass(frozen=True)
class Sigmoid(_Unnormalized):
    """1 / (1 + exp(−s − bias)) (Ramapuram et al. 2024, section 2).

    bias: added to each score; default: −log n, where n is the number of visible keys. With the default, a row
        of zero scores sums to n / (n + 1), which is close to one.

    >>> import torch, regard
    >>> x = torch.zeros(2, 1)
    >>> regard.attend(x, x, x, normalize=regard.Sigmoid())[1].dense()
    tensor([[0.3333, 0.3333],
            [0.3333, 0.3333]])
    """

    bias: float | None = None
    _kernel = "sigmoid"

    def __post_init__(self) -> None:
        if self.bias is not None:
            check_number("Sigmoid got bias", self.bias)

    def tau(self, scores: Tensor) -> Tensor:
        if self.bias is not None:
            return torch.full_like(scores[..., :1], -self.bias)
        return _count_keys(scores != -math.inf, scores).log()

    def phi(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)

    def slope(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x) * torch.sigmoid(-x)


@hint_arguments
@dataclass(frozen=True)
class Hard(Normalizer):
    """Hard attention, like a dictionary lookup: all weight is on the largest score, shared equally by ties.

    This is the limit of `Softmax` at temperature 0. The weights are piecewise constant, so the scores receive
    no gradient.

    >>> import torch, regard
    >>> keys, values = torch.eye(3), torch.tensor([[10.0], [20.0], [30.0]])
    >>> regard.attention(keys[1:2], keys, values, normalize=regard.Hard())
    tensor([[20.]])
    """

    def tau(self, scores: Tensor) -> Tensor:
        return torch.zeros_like(scores[..., :1])  # the row maximum is already subtracted

    def phi(self, x: Tensor) -> Tensor:
        return (x >= 0).to(x.dtype)

    def slope(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def divisor(self, x: Tensor, visible: Tensor) -> Tensor | None:
        return _count_keys(x >= 0, x)


def _count_keys(mask: Tensor, like: Tensor) -> Tensor:
    return mask.sum(-1, keepdim=True).clamp(min=1).to(like.dtype)


BUILT_IN: dict[str, type[Normalizer]] = {
    kind.__name__: kind
    for kind in (Softmax, Softmax1, Entmax, Sparsemax, Entmax15, Mean, Relu, Sigmoid, Hard)
}
BUILT_IN_TYPES = frozenset(BUILT_IN.values())  # exact types: a subclass may override any method
# the numeric arguments of each; the score of a sink is stored separately, because it may be a tensor
_NUMBERS = {
    name: tuple(signature(kind).parameters) for name, kind in BUILT_IN.items() if kind is not Softmax1
}


def to_text(normalize: Normalizer) -> str | None:
    """Serialize a built-in normalizer as text, e.g. "Entmax 0x1.8p+0". Returns None for a custom one.

    Compiled graphs and saved weights contain this text. Hexadecimal numbers are exact, and torch.compile
    treats them as constants. The score of a sink is stored separately, as a tensor.
    """
    if type(normalize) not in BUILT_IN_TYPES:
        return None
    name = type(normalize).__name__
    numbers = [getattr(normalize, number) for number in _NUMBERS.get(name, ())]
    return " ".join([name, *(float(number).hex() for number in numbers if number is not None)])


def from_text(text: str) -> Normalizer:
    """Parse the result of `to_text`."""
    name, *numbers = text.split(" ")
    if name not in BUILT_IN:
        raise ArgumentError(f"unknown normalizer {name!r}; the known normalizers are {', '.join(BUILT_IN)}.")
    build: Callable[..., Normalizer] = BUILT_IN[name]
    return build(*map(float.fromhex, numbers))
