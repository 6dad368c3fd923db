"""Values in a traced `score_mod` or `mask_mod`: constants, expressions in the indices, and scores.

    score_mod(score, b, h, q, k) = gain · tanh(factors · score) + terms, −inf where a mask is False
    without tanh                 = gain · factors · score + terms

The factors, terms and masks are expressions in the indices b, h, q, k and in captured tensors.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor that depends neither on the indices nor on the score."""

    tensor: Tensor


@dataclass(frozen=True, eq=False)
class Index:
    """An expression in the indices and in captured tensors.

    depends: the indices ("b", "h", "q" or "k") that affect the value; "d" if only the distance k − q does.
    slopes: coefficients of q and k if the expression is a linear function of q and k plus a function of the
        indices in `rest`, else None.
    integer, boolean: whether the values are known to be integers or booleans.
    name: the name of the index, if the expression is just an index.
    """

    depends: frozenset[str]
    function: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    slopes: tuple[int, int] | None = None
    rest: frozenset[str] = frozenset()
    integer: bool = False
    boolean: bool = False
    name: str = ""


Operand = Constant | Index | int | float


@dataclass(frozen=True, eq=False)
class ScoreForm:
    """A score after the operations of a `score_mod`; see the formula in the module docstring."""

    gain: float = 1.0
    factors: tuple[Constant | Index, ...] = ()
    inner_gain: float | None = None  # constant factor inside tanh; None if there is no tanh
    terms: tuple[Operand, ...] = ()
    masks: tuple[Constant | Index, ...] = ()

    def scaled(self, factor: Operand) -> "ScoreForm | None":
        """Return this form times a number or an expression, or None if the product is not a `ScoreForm`."""
        if isinstance(factor, int | float):
            if not math.isfinite(factor) or self.masks:  # −inf times a negative number is no longer masked
                return None
            scaled = replace(self, gain=self.gain * factor)
        elif self.inner_gain is None and not self.masks:
            scaled = replace(self, factors=(*self.factors, factor))
        else:
            return None
        return replace(scaled, terms=tuple(_multiply(term, factor) for term in self.terms))

    def plus(self, term: Operand) -> "ScoreForm":
        return replace(self, terms=(*self.terms, term))

    def tanh(self) -> "ScoreForm | None":
        if self.terms or self.masks or self.inner_gain is not None:
            return None
        return replace(self, gain=1.0, inner_gain=self.gain)

    def masked(self, mask: Constant | Index) -> "ScoreForm":
        return replace(self, masks=(*self.masks, mask))

    def same_scores(self, other: "ScoreForm") -> bool:
        """Whether the two forms are equal except for their terms."""
        return (self.gain, self.inner_gain, self.factors) == (
            other.gain,
            other.inner_gain,
            other.factors,
        ) and (not self.masks and not other.masks)


def index(name: str) -> Index:
    """Return the expression for the index "b", "h", "q" or "k"."""
    slopes = {"q": (1, 0), "k": (0, 1)}.get(name, (0, 0))
    rest = frozenset() if name in "qk" else frozenset(name)
    return Index(frozenset(name), slopes=slopes, rest=rest, integer=True, name=name)


def operate(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return the expression function(*args), or its value if no argument depends on an index."""
    if not any(isinstance(arg, Index) for arg in args):
        return Constant(
            function(*(arg.tensor if isinstance(arg, Constant) else arg for arg in args), **options)
        )
    # a comparison of linear expressions depends on the same indices as their difference
    compared = function in COMPARISONS
    slopes, rest = linear(torch.sub if compared else function, args, options)
    if slopes is None:
        depends = frozenset().union(*(arg.depends for arg in args if isinstance(arg, Index)))
    elif slopes[0] == -slopes[1]:
        depends = rest | ({"d"} if slopes[0] else set())
    else:
        depends = rest | {name for name, slope in zip("qk", slopes, strict=True) if slope}
    return Index(depends, function, args, tuple(options.items()), None if compared else slopes, rest)


COMPARISONS = (torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge)


def _multiply(a: Operand, b: Operand) -> Operand:
    if isinstance(a, int | float) and isinstance(b, int | float):
        return a * b
    product: Operand = operate(torch.mul, as_double(a), as_double(b))
    return product


def as_double(x: Operand) -> Operand:
    """Convert an operand to float64 before it is combined with a score.

    Small integers would overflow, and 16-bit floats would be rounded.
    """
    return x if isinstance(x, int | float) else operate(Tensor.double, x)


_NO_REST: frozenset[str] = frozenset()


def linear(
    function: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]
) -> tuple[tuple[int, int] | None, frozenset[str]]:
    """Return the slopes of a sum, difference, negation or integer multiple of linear expressions."""
    parts = [part for part in map(_slopes, args) if part is not None]
    if options or len(parts) != len(args):
        return None, _NO_REST
    (first, first_rest), *others = parts
    if function is torch.neg:
        return (-first[0], -first[1]), first_rest
    if len(others) != 1:
        return None, _NO_REST
    second, second_rest = others[0]
    if function in (torch.add, torch.sub):
        sign = 1 if function is torch.add else -1
        return (first[0] + sign * second[0], first[1] + sign * second[1]), first_rest | second_rest
    if function is torch.mul:
        for factor, slopes, rest in ((args[0], second, second_rest), (args[1], first, first_rest)):
            if isinstance(factor, int) and not isinstance(factor, bool):
                return (slopes[0] * factor, slopes[1] * factor), rest
    return None, _NO_REST


def _slopes(arg: Any) -> tuple[tuple[int, int], frozenset[str]] | None:
    """Return the slopes and the other dependencies of an integer operand."""
    if isinstance(arg, Index):
        if arg.slopes is None and arg.integer and arg.depends <= {"b", "h"}:
            return (0, 0), arg.depends
        return None if arg.slopes is None else (arg.slopes, arg.rest)
    if isinstance(arg, Constant):
        exact = not arg.tensor.is_floating_point() and arg.tensor.dtype is not torch.bool
        return ((0, 0), _NO_REST) if exact and not arg.tensor.dim() else None
    return ((0, 0), _NO_REST) if isinstance(arg, int) else None


def evaluate(value: Operand, indices: Mapping[str, Tensor]) -> Tensor:
    """Return the values of an expression at broadcasting index tensors, each with at least one axis."""
    return _evaluate(value, indices, {})


def _evaluate(value: Any, indices: Mapping[str, Tensor], cache: dict[int, Tensor]) -> Any:
    if isinstance(value, Constant):
        # add an axis: torch promotes dtypes differently for tensors without axes
        return value.tensor.reshape(1) if value.tensor.dim() == 0 else value.tensor
    if not isinstance(value, Index):
        return value
    if value.name:
        return indices[value.name]
    if id(value) not in cache:
        args = [_evaluate(arg, indices, cache) for arg in value.args]
        assert value.function is not None
        cache[id(value)] = value.function(*args, **dict(value.options))
    return cache[id(value)]


def lookup(table: Tensor, *at: Tensor | int) -> Tensor:
    """Return table[at] for one index per axis of the table."""
    return table[tuple(torch.as_tensor(i, device=table.device) for i in at)]
