"""One table of cases for correctness, gradients and benchmarks.

A `Case` is one name from each of SHAPES, SCORES, NORMALIZERS, MASKS and BIASES. Its numbers are seeded by its
name, so they are the same on every machine, and in every dtype up to rounding.

>>> case = Case("grouped", "additive", "sparsemax", "causal", "alibi")
>>> case.query, case.key, case.value
((2, 6, 5, 11), (2, 3, 7, 17), (2, 3, 7, 13))
>>> regard.attention(*case.tensors(), **case.options()).shape
torch.Size([2, 6, 5, 13])
"""

import functools
import inspect
import itertools
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn

import regard
from regard.mechanism import fused, tiled

WIDER = 6  # extra key features, for scores whose query and key may differ in width


class Shape(NamedTuple):
    """The shapes of query, key and value."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]

    @property
    def queries(self) -> int:
        return self.query[-2]

    @property
    def keys(self) -> int:
        return self.key[-2]

    @property
    def heads(self) -> int:
        return max(shape[-3] if len(shape) > 2 else 1 for shape in self)

    @property
    def lead(self) -> tuple[int, ...]:
        """The leading axes of output and weights."""
        if max(map(len, self)) == 2:
            return ()
        return (*torch.broadcast_shapes(*(shape[:-3] for shape in self)), self.heads)


# A different prime for every axis, to detect swapped axes (2 × 3: heads that share key heads).
SHAPES: dict[str, Shape] = {
    "heads": Shape((2, 3, 5, 11), (2, 3, 7, 11), (2, 3, 7, 13)),
    "grouped": Shape((2, 6, 5, 11), (2, 3, 7, 11), (2, 3, 7, 13)),
    "one key head": Shape((2, 3, 5, 11), (2, 1, 7, 11), (2, 1, 7, 13)),
    "no heads": Shape((5, 11), (7, 11), (7, 13)),
    "more batch axes": Shape((2, 3, 1, 5, 11), (2, 3, 1, 7, 11), (2, 3, 1, 7, 13)),
    "broadcasting batch": Shape((2, 1, 1, 5, 11), (3, 1, 7, 11), (7, 13)),
    "broadcasting heads": Shape((2, 1, 5, 11), (3, 7, 11), (2, 1, 7, 13)),
    "more queries": Shape((2, 3, 7, 11), (2, 3, 5, 11), (2, 3, 5, 13)),
    "square": Shape((2, 3, 7, 11), (2, 3, 7, 11), (2, 3, 7, 13)),
    "one query": Shape((2, 3, 1, 11), (2, 3, 7, 11), (2, 3, 7, 13)),
}


class Draw:
    """Random numbers of one dtype on one device, the same for all dtypes up to rounding."""

    def __init__(self, seed: str, dtype: torch.dtype, device: str, rounded: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
        self.dtype, self.device, self.rounded = dtype, device, rounded

    def __call__(self, *shape: int) -> Tensor:
        drawn = torch.randn(shape, dtype=torch.float64, generator=self.generator)
        return drawn.to(self.rounded).to(self.device, self.dtype)

    def parameter(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(self(*shape))

    def booleans(self, *shape: int) -> Tensor:
        return (torch.rand(shape, generator=self.generator) < 0.6).to(self.device)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=self.generator).to(self.device)

    def into(self, module: nn.Module) -> Any:
        """Return the module with random parameters."""
        module = module.to(self.device, self.dtype)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(self(*parameter.shape))
        return module


Build = Callable[[Shape, Draw], Any]


def laplace(query: Tensor, key: Tensor) -> Tensor:
    """A custom score: minus the Manhattan distance."""
    return -(query.unsqueeze(-2) - key.unsqueeze(-3)).abs().sum(-1) / max(query.shape[-1], 1) ** 0.5


SCORES: dict[str, Build] = {
    "scaled dot": lambda shape, draw: regard.ScaledDot(),
    "dot": lambda shape, draw: regard.Dot(),
    "scale": lambda shape, draw: regard.ScaledDot(scale=0.7),
    "softcap": lambda shape, draw: regard.Dot(softcap=1.7),
    "general": lambda shape, draw: draw.into(regard.General(shape.query[-1], shape.key[-1])),
    "additive": lambda shape, draw: draw.into(regard.Additive(shape.query[-1], shape.key[-1], width=3)),
    "concat": lambda shape, draw: draw.into(regard.Concat(shape.query[-1], shape.key[-1])),
    "concat wide": lambda shape, draw: draw.into(regard.Concat(shape.query[-1], shape.key[-1], width=3)),
    "cosine": lambda shape, draw: regard.Cosine(scale=-2.5, softcap=2.0),
    "gaussian": lambda shape, draw: regard.Gaussian(sigma=2.0),
    "function": lambda shape, draw: laplace,
}
MIXED_WIDTHS = {"general", "additive", "concat", "concat wide"}

NORMALIZERS: dict[str, Build] = {
    "softmax": lambda shape, draw: regard.Softmax(),
    "temperature": lambda shape, draw: regard.Softmax(temperature=1.7),
    "softmax1": lambda shape, draw: regard.Softmax1(0.5),
    "sinks": lambda shape, draw: regard.Softmax1(draw(shape.heads).requires_grad_()),
    "learned sink": lambda shape, draw: draw.into(regard.Sink(shape.heads)),
    "sparsemax": lambda shape, draw: regard.Sparsemax(),
    "entmax15": lambda shape, draw: regard.Entmax15(),
    "entmax 1.3": lambda shape, draw: regard.Entmax(1.3),
    "entmax 2.5": lambda shape, draw: regard.Entmax(2.5),
    "mean": lambda shape, draw: regard.Mean(),
    "sigmoid": lambda shape, draw: regard.Sigmoid(),
    "sigmoid bias": lambda shape, draw: regard.Sigmoid(bias=-0.5),
    "relu": lambda shape, draw: regard.Relu(),
    "hard": lambda shape, draw: regard.Hard(),
}


def _lengths(total: int, parts: int) -> list[int]:
    """Split the total into `parts` lengths; the first of three is 0."""
    cut = total // 2 + 1 if total > 1 else total
    return [0, cut, total - cut][-parts:]


def _documents(shape: Shape, parts: int, **options: Any) -> regard.Mask:
    queries, keys = _lengths(shape.queries, parts), _lengths(shape.keys, parts)
    return (
        regard.Documents(queries, **options)
        if queries == keys
        else regard.Documents(queries, keys, **options)
    )


def _padding(shape: Shape, draw: Draw, **options: Any) -> regard.Mask:
    """One length per sequence; the last is 0."""
    lengths = draw.integers(1, shape.keys, *shape.lead[:1])
    if lengths.dim():
        lengths[-1] = 0
    return regard.Padding(lengths, **options)


MASKS: dict[str, Build] = {
    "no mask": lambda shape, draw: None,
    "causal": lambda shape, draw: regard.Causal(),
    "causal start": lambda shape, draw: regard.Causal(align="start"),
    "window": lambda shape, draw: regard.Window(3),
    "window sides": lambda shape, draw: regard.Window(left=1, right=2),
    "window right": lambda shape, draw: regard.Window(right=1, align="start"),
    "padding": lambda shape, draw: _padding(shape, draw),
    "padding left": lambda shape, draw: _padding(shape, draw, side="left"),
    "documents": lambda shape, draw: _documents(shape, 2),
    "documents causal": lambda shape, draw: _documents(shape, 3, within=regard.Causal()),
    "documents window": lambda shape, draw: _documents(
        shape, 2, within=regard.Window(left=1, right=1, align="start")
    ),
    "prefix": lambda shape, draw: regard.Prefix(3),
    "prefix start": lambda shape, draw: regard.Prefix(2, align="start"),
    "tensor": lambda shape, draw: draw.booleans(*shape.lead, shape.queries, shape.keys),
    "tensor of keys": lambda shape, draw: draw.booleans(1, shape.keys),
    "intersection": lambda shape, draw: (
        regard.Causal() & regard.Window(left=3, right=1) & _padding(shape, draw)
    ),
    "union": lambda shape, draw: (
        (regard.Causal() & draw.booleans(shape.queries, shape.keys))
        | (_documents(shape, 2) & regard.Window(2))
        | regard.Padding(1)
    ),
}


BIASES: dict[str, Build] = {
    "no bias": lambda shape, draw: None,
    "dense": lambda shape, draw: draw.parameter(*shape.lead, shape.queries, shape.keys),
    "dense of keys": lambda shape, draw: draw.parameter(*shape.lead[-1:], 1, shape.keys),
    "dense of queries": lambda shape, draw: draw.parameter(*shape.lead[-1:], shape.queries, 1),
    "hiding": lambda shape, draw: draw(shape.queries, shape.keys).masked_fill(
        ~draw.booleans(shape.queries, shape.keys), -math.inf
    ),
    "relative": lambda shape, draw: regard.ClippedRelativeBias(draw.parameter(shape.heads, 5)),
    "alibi": lambda shape, draw: regard.ALiBi(shape.heads),
    "t5": lambda shape, draw: draw.into(regard.T5Bias(shape.heads, buckets=8, max_distance=16)),
    "two lines": lambda shape, draw: [
        regard.ClippedRelativeBias(draw.parameter(shape.heads, 3)),
        draw.parameter(shape.keys),
        draw.into(regard.T5Bias(shape.heads, buckets=6, max_distance=9)),
    ],
    "several": lambda shape, draw: [
        regard.ClippedRelativeBias(draw.parameter(7)),
        draw.parameter(shape.queries, shape.keys),
        regard.ALiBi(shape.heads),
        draw.parameter(*shape.lead[-1:], 1, shape.keys),
        draw.into(regard.T5Bias(shape.heads, buckets=4, max_distance=5, bidirectional=False)),
    ],
}


@dataclass(frozen=True)
class Case:
    """One name from each table."""

    shape: str = "heads"
    score: str = "scaled dot"
    normalize: str = "softmax"
    mask: str = "no mask"
    bias: str = "no bias"
    sizes: Shape | None = None  # default: the shape in SHAPES

    @property
    def name(self) -> str:
        return " × ".join((self.shape, self.score, self.normalize, self.mask, self.bias))

    @property
    def shapes(self) -> Shape:
        shapes = SHAPES[self.shape] if self.sizes is None else self.sizes
        if self.score not in MIXED_WIDTHS:
            return shapes
        return shapes._replace(key=(*shapes.key[:-1], shapes.key[-1] + WIDER))

    @property
    def query(self) -> tuple[int, ...]:
        return self.shapes.query

    @property
    def key(self) -> tuple[int, ...]:
        return self.shapes.key

    @property
    def value(self) -> tuple[int, ...]:
        return self.shapes.value

    def tensors(
        self,
        dtype: torch.dtype = torch.float64,
        device: str = "cpu",
        *,
        rounded: torch.dtype | None = None,
        requires_grad: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value. `rounded`: round the numbers to this dtype, but keep `dtype`."""
        draw = Draw(self.name, dtype, device, rounded or dtype)
        query, key, value = (draw(*shape).requires_grad_(requires_grad) for shape in self.shapes)
        return query, key, value

    def options(
        self, dtype: torch.dtype = torch.float64, device: str = "cpu", *, rounded: torch.dtype | None = None
    ) -> dict[str, Any]:
        """Score, normalize, mask and bias, as keyword arguments of `regard.attention`."""
        draw = Draw(self.name + " options", dtype, device, rounded or dtype)
        return {
            "score": SCORES[self.score](self.shapes, draw),
            "normalize": NORMALIZERS[self.normalize](self.shapes, draw),
            "mask": MASKS[self.mask](self.shapes, draw),
            "bias": BIASES[self.bias](self.shapes, draw),
        }


def leaves(options: Mapping[str, Any]) -> list[Tensor]:
    """Return every tensor in the options that receives a gradient."""
    parameters: list[Tensor] = []
    for option in options.values():
        for part in option if isinstance(option, list) else [option]:
            if isinstance(part, nn.Module):
                parameters += [parameter for parameter in part.parameters() if parameter.requires_grad]
            elif isinstance(part, regard.Softmax1):
                part = part.score
            if isinstance(part, Tensor) and part.requires_grad:
                parameters.append(part)
    return parameters


def upstream(output: Tensor) -> Tensor:
    """Return a random output gradient."""
    numbers = torch.arange(output.numel(), dtype=torch.float64)
    return torch.cos(numbers**1.5).reshape(output.shape).to(output)


@contextmanager
def tiles_of(scores: int) -> Iterator[None]:
    """Limit tiles to this many scores, so that a small problem has many tiles."""
    with patch.object(tiled, "TILE", scores):
        yield


@contextmanager
def instruction_set(name: str) -> Iterator[None]:
    """Run the kernels for another instruction set."""
    before = fused.DESCRIPTION.rpartition(" ")[2]
    fused.KERNELS.use(name)
    try:
        yield
    finally:
        fused.KERNELS.use(before)


def product(
    shapes: Iterable[str] = SHAPES,
    scores: Iterable[str] = SCORES,
    normalizers: Iterable[str] = NORMALIZERS,
    masks: Iterable[str] = MASKS,
    biases: Iterable[str] = BIASES,
    sizes: Shape | None = None,
) -> list[Case]:
    """Return every combination of these names."""
    return [
        Case(*names, sizes=sizes) for names in itertools.product(shapes, scores, normalizers, masks, biases)
    ]


def pairs(
    shapes: Iterable[str] = SHAPES,
    scores: Iterable[str] = SCORES,
    normalizers: Iterable[str] = NORMALIZERS,
    masks: Iterable[str] = MASKS,
    biases: Iterable[str] = BIASES,
    sizes: Shape | None = None,
) -> list[Case]:
    """Return a small set of combinations that contains every pair of names of different kinds."""
    return [Case(*names, sizes=sizes) for names in pairwise(shapes, scores, normalizers, masks, biases)]


def pairwise(*axes: Iterable[str]) -> list[tuple[str, ...]]:
    """Return a small set of combinations, one name per axis, that contains every pair of names of two axes.

    >>> pairwise("ab", "cd", "ef")
    [('a', 'c', 'e'), ('a', 'd', 'f'), ('b', 'c', 'f'), ('b', 'd', 'e')]
    """
    kinds = [list(names) for names in axes]
    missing = {
        frozenset({(a, first), (b, second)})
        for a, b in itertools.combinations(range(len(kinds)), 2)
        for first in kinds[a]
        for second in kinds[b]
    }
    used: Counter[tuple[int, str]] = Counter()

    def best(kind: int, chosen: Mapping[int, str]) -> str:
        """Return the name that completes the most missing pairs; break ties by the least used."""

        def worth(name: str) -> tuple[int, int]:
            new = sum(frozenset({(kind, name), other}) in missing for other in chosen.items())
            return new, -used[kind, name]

        return max(kinds[kind], key=worth)

    combinations = []
    while missing:
        chosen = dict(min(missing, key=sorted))
        for kind in sorted(range(len(kinds)), key=lambda kind: -len(kinds[kind])):
            chosen.setdefault(kind, best(kind, chosen))
        used.update(chosen.items())
        missing -= {frozenset(two) for two in itertools.combinations(chosen.items(), 2)}
        combinations.append(tuple(chosen[kind] for kind in range(len(kinds))))
    return combinations


Decorator = Callable[[Callable[..., None]], Callable[..., None]]


def paired(sampled: int = 1, **axes: Iterable[str]) -> Decorator:
    """Loop over a few combinations that contain every pair of names: see `pairwise`."""
    return looped(tuple(axes), sorted(pairwise(*axes.values())), sampled=sampled)


def crossed(sampled: int = 1, **axes: Iterable[Any]) -> Decorator:
    """Loop over a few combinations that contain every pair of values; `make test-slow`: over all."""
    values = [list(axis) for axis in axes.values()]
    names = pairwise(*([f"{i:03}" for i in range(len(axis))] for axis in values))
    return _extended(axes, values, sorted(tuple(map(int, row)) for row in names), sampled)


def rotated(sampled: int = 1, **axes: Iterable[Any]) -> Decorator:
    """Loop over a few combinations that contain every value; `make test-slow`: over all.

    >>> @rotated(letter="abc", number=[1, 2])
    ... def print_case(letter, number):
    ...     print(letter, number)
    >>> print_case()
    a 1
    b 2
    c 1
    """
    values = [list(axis) for axis in axes.values()]
    longest = range(max(map(len, values)))
    return _extended(axes, values, [tuple(i % len(axis) for axis in values) for i in longest], sampled)


def _extended(
    names: Iterable[str], values: list[list[Any]], quick: list[tuple[int, ...]], sampled: int
) -> Decorator:
    """Loop over the combinations with these indices; `make test-slow`: over all of them."""
    others = sorted({*itertools.product(*(range(len(axis)) for axis in values))} - {*quick})
    chosen, rest = (
        [tuple(axis[i] for axis, i in zip(values, row, strict=True)) for row in rows]
        for rows in (quick, others)
    )
    return looped(tuple(names), chosen, sampled=sampled, slow=rest)


def looped(
    names: str | Sequence[str],
    values: Iterable[Any],
    ids: Any = None,
    *,
    sampled: int = 1,
    slow: Iterable[Any] = (),
) -> Decorator:
    """Like `pytest.mark.parametrize`, but all cases are one test, whose error names the case.

    Use it for cases that take a few milliseconds, about as long as pytest's overhead per test. Every case
    starts with the same random numbers; fixtures are shared.

    sampled: `make test` runs every n-th case, `make test-slow` all of them.
    slow: cases that only `make test-slow` runs.
    """
    names = names.replace(",", " ").split() if isinstance(names, str) else names
    values, slow = list(values), list(slow)
    cases = [tuple(value) if len(names) > 1 else (value,) for value in [*values, *slow]]
    spell = ids if callable(ids) else repr
    labels = ["-".join(map(str, map(spell, case))) for case in cases] if callable(ids) or not ids else ids
    table = list(zip(labels, cases, strict=True))

    def wrap(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def every(*args: Any, **fixtures: Any) -> None:
            all_cases = settings.get_current_profile_name() == "deep"
            for label, case in table if all_cases else table[: len(values) : sampled]:
                torch.manual_seed(0)
                try:
                    test(*args, **fixtures, **dict(zip(names, case, strict=True)))
                except (Exception, pytest.fail.Exception) as error:
                    error.add_note(f"case: {label}")
                    raise

        rest = [parameter for name, parameter in signature.parameters.items() if name not in names]
        every.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        # `make test-slow` selects this mark
        return pytest.mark.hypothesis(every) if sampled > 1 or slow else every

    return wrap


TABLE = pairs()
