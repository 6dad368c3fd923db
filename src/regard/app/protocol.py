"""Questions about a layer of attention weights, and their answers. All arguments are validated.

tile: part of the matrix, pooled. topk: the largest weights of a row or column. received: the keys that
receive the most attention. heads: statistics of heads. numbers: the computation of one weight.
"""

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import Meta, Struct

from regard._util.text import pluralize
from regard.app.weight_computation import WeightComputation, weight_computation
from regard.errors import ArgumentError
from regard.inspection.layer_view import Floats, LayerView, as_floats
from regard.mechanism.weights.weights import Weights

_MAX_CELLS = 2**22  # maximum size of a tile, over all heads
_CACHE_SIZE = 64  # cached answers per layer
_CACHE_COST = 2**22  # answers that read at least this many weights are cached
_HEAD_PASSES = 3  # passes over all weights for head statistics: τ, entropy, distances
_BAND = 2**28  # above this number of weights per head, the sums are computed in bands of rows

Index = Annotated[int, Meta(ge=0, le=10_000_000)]
# lists, not tuples: msgspec 0.22 reads out of bounds for a union of a bounded string and a tuple
Range = Annotated[list[Index], Meta(min_length=2, max_length=2)]
Pixels = Annotated[int, Meta(ge=1, le=2048)]
K = Annotated[int, Meta(ge=1, le=1000)]
Heads = Annotated[list[Annotated[int, Meta(ge=0, le=10_000)]], Meta(min_length=1, max_length=1000)]


class Ranking(Struct, kw_only=True):
    """Token positions and their weights in decreasing order."""

    positions: list[int]
    weights: list[float]


class Received(Ranking, kw_only=True):
    """The keys that receive the most attention. bins: the mean attention that each bin of keys receives."""

    bins: list[float]


class HeadInfo(Struct, kw_only=True):
    """Label and measures of a head."""

    head: int
    label: str
    measures: dict[str, float]


class HeadList(Struct, kw_only=True):
    """Label and measures of each head."""

    heads: list[HeadInfo]


Answer = Floats | Ranking | HeadList | WeightComputation  # a tile is an array (heads, height, width)


class Work(NamedTuple):
    """A checked question: the number of weights that it reads, and the function that computes the answer."""

    cost: int
    answer: Callable[[], Any]


class Question(Struct, forbid_unknown_fields=True, kw_only=True):
    """A question about a layer of an input. Layers and inputs are numbered from 0."""

    answer: ClassVar[type]  # bytes for an array; see `encode_array`
    input: Index = 0
    layer: Index = 0

    def on(self, layer: LayerView) -> Work:
        """Return the computation for a layer; raise ArgumentError if an argument is out of range."""
        raise NotImplementedError


class TileQuestion(Question, kw_only=True):
    """At most height × width block means of part of the weights, per head or for the mean of the heads.

    >>> import torch
    >>> from regard.app.protocol import TileQuestion
    >>> from regard.app.view_model import LayerView
    >>> layer = LayerView("attention", "layer 0", "self", torch.zeros(8, 100, 100))
    >>> TileQuestion().on(layer).cost, TileQuestion(heads=[3], rows=[0, 10]).on(layer).cost
    (80000, 1000)
    """

    answer = bytes
    heads: Heads | None = None
    mean: bool = False
    rows: Range | None = None
    columns: Range | None = None
    height: Pixels = 256
    width: Pixels = 256

    def on(self, layer: LayerView) -> Work:
        heads = _heads(layer, self.heads)
        rows, columns = (
            _range(name, getattr(self, name), size)
            for name, size in zip(("rows", "columns"), layer.size, strict=True)
        )
        height, width = min(self.height, max(len(rows), 1)), min(self.width, max(len(columns), 1))
        matrices = 1 if self.mean else len(heads)
        if matrices * height * width > _MAX_CELLS:
            raise ArgumentError(
                f"A tile of {matrices} × {height} × {width} exceeds the limit of {_MAX_CELLS:,} cells. "
                "Request fewer heads, or reduce height and width."
            )

        def compute() -> Floats:
            part = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
            return layer.tile(*part, height, width, heads=heads, mean=self.mean)

        cost = len(heads) * len(rows) * len(columns)
        key = ("tile", tuple(heads), self.mean, rows, columns, height, width)
        return Work(cost, lambda: _cached(layer, key, cost, compute))


class TopkQuestion(Question, kw_only=True):
    """The largest weights of a query or a key, averaged over heads."""

    answer = Ranking
    heads: Heads | None = None
    side: Literal["query", "key"] = "query"
    position: Index = 0
    k: K = 10

    def on(self, layer: LayerView) -> Work:
        heads, (queries, keys) = _heads(layer, self.heads), layer.size
        size, others = (queries, keys) if self.side == "query" else (keys, queries)
        check_index("position", self.position, size)
        line, every = slice(self.position, self.position + 1), slice(None)
        rows, columns = (line, every) if self.side == "query" else (every, line)

        def answer() -> Ranking:
            weights = layer.tile(rows, columns, queries, keys, heads=heads, mean=True)
            return Ranking(**_largest(weights.reshape(-1), self.k))

        return Work(len(heads) * others, answer)


class ReceivedQuestion(Question, kw_only=True):
    """The keys that receive the most attention, averaged over heads."""

    answer = Received
    heads: Heads | None = None
    k: K = 10
    bins: Pixels = 256

    def on(self, layer: LayerView) -> Work:
        heads = _heads(layer, self.heads)

        def answer() -> Received:
            received = [_received_in_head(layer, head) for head in heads]
            sums: Floats = np.stack(received).mean(0) if heads else np.zeros(layer.size[1], np.float32)
            bins = min(self.bins, max(len(sums), 1))
            edges = np.arange(bins + 1) * len(sums) // bins
            means = np.add.reduceat(sums, edges[:-1]) / np.diff(edges) if len(sums) else sums
            return Received(**_largest(sums, self.k), bins=means.tolist())

        return Work(len(heads) * math.prod(layer.size), answer)


class HeadsQuestion(Question, kw_only=True):
    """Statistics of heads."""

    answer = HeadList
    heads: Heads | None = None

    def on(self, layer: LayerView) -> Work:
        heads = _heads(layer, self.heads)

        def answer() -> HeadList:
            key = ("statistics", tuple(heads))
            statistics = _cached(layer, key, _CACHE_COST, lambda: layer.head_statistics(heads))
            described = zip(heads, (item.to_dict() for item in statistics), strict=True)
            return HeadList(heads=[HeadInfo(head=head, **values) for head, values in described])

        return Work(len(heads) * math.prod(layer.size) * _HEAD_PASSES, answer)


class NumbersQuestion(Question, kw_only=True):
    """The computation of one weight."""

    answer = WeightComputation
    head: Index = 0
    query: Index = 0
    key: Index = 0

    def on(self, layer: LayerView) -> Work:
        if not layer.has_vectors:
            raise ArgumentError(
                f"Layer {layer.label!r} has no query and key vectors, so the computation of a weight cannot "
                "be shown. Choose a layer that has them."
            )
        for name, size in zip(("head", "query", "key"), (layer.heads, *layer.size), strict=True):
            check_index(name, getattr(self, name), size)

        def answer() -> WeightComputation:
            return weight_computation(layer.select_heads([self.head]), self.query, self.key)

        return Work(layer.size[1], answer)


QUESTIONS: dict[str, type[Question]] = {
    "tile": TileQuestion,
    "topk": TopkQuestion,
    "received": ReceivedQuestion,
    "heads": HeadsQuestion,
    "numbers": NumbersQuestion,
}


def parse(question: str, arguments: Any = None) -> Question:
    """Parse a question; an unknown name or invalid arguments raise ArgumentError.

    >>> from regard.app.protocol import parse
    >>> parse("topk", {"position": 3}).k
    10
    """
    if not isinstance(question, str) or question not in QUESTIONS:
        raise ArgumentError(f"Unknown question {question!r:.80}. Use one of {', '.join(QUESTIONS)}.")
    try:
        return msgspec.convert({} if arguments is None else arguments, QUESTIONS[question])
    except msgspec.ValidationError as error:
        names = ", ".join(QUESTIONS[question].__struct_fields__)
        raise ArgumentError(f"{question}: {error}. Valid arguments: {names}.") from error


def tau_cost(layer: LayerView) -> int:
    """Return the number of weights needed to compute τ: all of them, or 0 if τ is known or not needed.

    >>> import torch
    >>> from regard.app.view_model import LayerView
    >>> from regard.app.protocol import tau_cost
    >>> tau_cost(LayerView("attention", "layer 0", "self", torch.eye(3)))
    0
    """
    if not isinstance(layer.weights, Weights):
        return 0
    tau = layer.weights.problem["tau"]
    unknown = tau.numel() > 0 and bool(tau[(0,) * tau.dim()].isnan())
    return layer.weights.numel() if unknown else 0


@torch.no_grad()
def _received_in_head(layer: LayerView, head: int) -> Floats:
    """Return the sum of each key's weights over all queries: (k)."""

    def compute() -> Floats:
        if math.prod(layer.size) > _BAND:  # in bands, so that the computation can be interrupted
            return layer.tile(slice(None), slice(None), 1, layer.size[1], heads=[head])[0, 0] * layer.size[0]
        weights = layer.select_heads([head])
        sums = weights.received() if isinstance(weights, Weights) else weights.float().sum(-2)
        return as_floats(sums).reshape(-1)

    return _cached(layer, ("received", head), math.prod(layer.size), compute)


def _cached(layer: LayerView, key: tuple[Any, ...], cost: int, compute: Callable[[], Any]) -> Any:
    """Return a cached result, or compute it; only expensive results are cached."""
    if cost < _CACHE_COST:
        return compute()
    result = layer.cache.get(key)  # other threads may evict it
    if result is None:
        layer.cache[key] = result = compute()
        if len(layer.cache) > _CACHE_SIZE:
            layer.cache.pop(next(iter(list(layer.cache))), None)  # evicts the oldest result
    return result


def _largest(weights: Floats, k: int) -> dict[str, list[Any]]:
    """Return the k largest nonzero weights and their positions; equal weights are in order of position."""
    few = len(weights) <= 4 * k
    positions = np.arange(len(weights)) if few else np.argpartition(-weights, 2 * k)[: 2 * k]
    positions = positions[np.lexsort((positions, -weights[positions]))][:k]
    positions = positions[weights[positions] > 0]
    return {"positions": positions.tolist(), "weights": weights[positions].tolist()}


def _heads(layer: LayerView, heads: Sequence[int] | None) -> list[int]:
    if heads is None:
        return list(range(layer.heads))
    for head in heads:
        check_index("heads", head, layer.heads)
    if len(heads) > layer.heads:
        raise ArgumentError(
            f"heads lists {len(heads)} numbers, but the layer has {pluralize(layer.heads, 'head')}; list "
            "each head once."
        )
    return list(heads)


def _range(name: str, value: Sequence[int] | None, size: int) -> range:
    if value is None:
        return range(size)
    start, stop = value
    if not start <= stop <= size:
        raise ArgumentError(
            f"{name} is [{start}, {stop}]; it must be [start, stop] with start ≤ stop ≤ {size}."
        )
    return range(start, stop)


def check_index(name: str, value: int, size: int) -> None:
    """Raise ArgumentError if an index is out of range."""
    if value >= size:
        bounds = f"; it must be at most {size - 1}." if size else ", but there are none to choose from."
        raise ArgumentError(f"{name} is {value}{bounds}")


def encode_array(x: Floats) -> bytes:
    """Encode heads, height and width as little-endian uint32, followed by the values as float32.

    >>> import numpy
    >>> from regard.app.protocol import encode_array
    >>> len(encode_array(numpy.zeros((2, 3, 5), "f4")))
    132
    """
    return np.array(x.shape, "<u4").tobytes() + np.ascontiguousarray(x, "<f4").tobytes()
