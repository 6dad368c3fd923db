"""Questions about a layer of attention weights, and their answers. Arguments are untrusted and checked.

tile: part of the matrix, pooled. topk: the largest weights of a row or column. received: the keys that
receive most attention. heads: statistics of heads. numbers: the computation of one weight.
"""

import math
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from regard.errors import ArgumentError
from regard.inspection.layer_view import Answer, Floats, LayerView, as_floats
from regard.mechanism import reference
from regard.mechanism.normalizers import Entmax, Hard, Mean, Normalizer, Relu, Sigmoid, Softmax, Softmax1
from regard.mechanism.weights.matrix import Weights

_MAX_CELLS = 2**22  # of a tile, over all heads
_MAX_K = 1000
_CACHE_SIZE = 64  # answers per layer
_CACHE_COST = 2**22  # weights behind an answer worth caching
_HEAD_PASSES = 4  # passes over all weights for head statistics: τ, entropy, distances, thumbnails
_BAND = 2**28  # weights per head from which keys are summed in bands of rows


def ask(layer: LayerView, question: str, arguments: Mapping[str, Any]) -> Answer:
    """Answer a question about a layer."""
    return _handler(question, arguments)(layer, arguments)


def cost(layer: LayerView, question: str, arguments: Mapping[str, Any]) -> int:
    """Return the number of weights an answer reads, queries × keys × heads.

    >>> import torch
    >>> from regard.app.view_model import LayerView
    >>> from regard.app.protocol import cost
    >>> layer = LayerView("attention", "layer 0", "self", torch.zeros(8, 100, 100))
    >>> cost(layer, "tile", {}), cost(layer, "tile", {"heads": [3], "rows": [0, 10]})
    (80000, 1000)
    """
    _handler(question, arguments)
    queries, keys = layer.size
    if question == "numbers":
        return keys
    heads = len(_heads(layer, arguments))
    if question == "tile":
        return heads * len(_range(arguments, "rows", queries)) * len(_range(arguments, "columns", keys))
    if question == "topk":
        return heads * (queries if arguments.get("side") == "key" else keys)
    return heads * queries * keys * (_HEAD_PASSES if question == "heads" else 1)


def tau_cost(layer: LayerView) -> int:
    """Return the number of weights to read before the first answer: all if τ is unknown, else 0.

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


def _handler(question: str, arguments: Mapping[str, Any]) -> Callable[[LayerView, Mapping[str, Any]], Answer]:
    """Return the function that answers a question; raise if the question or an argument is unknown."""
    if not isinstance(question, str) or question not in _QUESTIONS:
        raise ArgumentError(f"Unknown question {question!r:.80}. Use one of {', '.join(_QUESTIONS)}.")
    handler, names = _QUESTIONS[question]
    unknown = sorted(map(str, arguments.keys() - names))
    if unknown:
        raise ArgumentError(f"{question}: unknown argument {unknown[0]!r}. Use {', '.join(sorted(names))}.")
    return handler


def _tile(layer: LayerView, arguments: Mapping[str, Any]) -> Answer:
    heads, mean = _heads(layer, arguments), _flag(arguments, "mean")
    rows, columns = (
        _range(arguments, name, size) for name, size in zip(("rows", "columns"), layer.size, strict=True)
    )
    height = min(_integer(arguments, "height", 256, min=1), max(len(rows), 1))
    width = min(_integer(arguments, "width", 256, min=1), max(len(columns), 1))
    matrices = 1 if mean else len(heads)
    if matrices * height * width > _MAX_CELLS:
        raise ArgumentError(
            f"A tile of {matrices} × {height} × {width} exceeds the limit of {_MAX_CELLS:,} cells. Ask for "
            "fewer heads, or reduce height and width."
        )

    def compute() -> Floats:
        part = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
        return layer.tile(*part, height, width, heads=heads, mean=mean)

    key = ("tile", heads, mean, rows, columns, height, width)
    return Answer({}, [_cached(layer, key, len(heads) * len(rows) * len(columns), compute)])


def _topk(layer: LayerView, arguments: Mapping[str, Any]) -> Answer:
    side = arguments.get("side", "query")
    if side not in ("query", "key"):
        raise ArgumentError(f"topk: side is {side!r}; it must be 'query' or 'key'.")
    queries, keys = layer.size
    position = _integer(arguments, "position", 0, min=0, below=queries if side == "query" else keys)
    line = slice(position, position + 1)
    rows, columns = (line, slice(None)) if side == "query" else (slice(None), line)
    weights = layer.tile(rows, columns, queries, keys, heads=_heads(layer, arguments), mean=True)
    return Answer(_largest(weights.reshape(-1), _integer(arguments, "k", 10, min=1, below=_MAX_K + 1)), [])


def _received(layer: LayerView, arguments: Mapping[str, Any]) -> Answer:
    heads = _heads(layer, arguments)
    sums: Floats = np.stack([_received_in_head(layer, head) for head in heads]).mean(0, dtype=np.float32)
    k = _integer(arguments, "k", 10, min=1, below=_MAX_K + 1)
    bins = min(_integer(arguments, "bins", 256, min=1, below=_MAX_CELLS), max(len(sums), 1))
    edges = np.arange(bins + 1) * len(sums) // bins
    means = np.add.reduceat(sums, edges[:-1]) / np.diff(edges) if len(sums) else sums
    return Answer(_largest(sums, k), [means.astype(np.float32)])


@torch.no_grad()
def _received_in_head(layer: LayerView, head: int) -> Floats:
    """Return the sum of each key's weights over all queries: (k)."""

    def compute() -> Floats:
        if math.prod(layer.size) > _BAND:  # can be interrupted
            return layer.tile(slice(None), slice(None), 1, layer.size[1], heads=[head])[0, 0] * layer.size[0]
        weights = layer.select_heads([head])
        sums = weights.received() if isinstance(weights, Weights) else weights.float().sum(-2)
        return as_floats(sums).reshape(-1)

    return _cached(layer, ("received", head), math.prod(layer.size), compute)


def _describe_heads(layer: LayerView, arguments: Mapping[str, Any]) -> Answer:
    size, heads = _integer(arguments, "size", 64, min=1, below=513), _heads(layer, arguments)
    queries, keys = layer.size
    cells = len(heads) * min(size, queries) * min(size, keys)
    if cells > _MAX_CELLS:
        raise ArgumentError(
            f"Thumbnails of {len(heads)} heads at size {size} have {cells:,} cells; the limit is "
            f"{_MAX_CELLS:,}. Reduce the size, or ask for fewer heads."
        )
    statistics = _cached(layer, ("statistics", heads), _CACHE_COST, lambda: layer.head_statistics(heads))

    def compute() -> Floats:
        return layer.tile(slice(None), slice(None), size, size, heads=heads)

    thumbnails = _cached(layer, ("thumbnails", size, heads), len(heads) * queries * keys, compute)
    described = [{"head": head, **item.to_dict()} for head, item in zip(heads, statistics, strict=True)]
    return Answer({"heads": described}, [thumbnails])


def _numbers(layer: LayerView, arguments: Mapping[str, Any]) -> Answer:
    if not layer.has_vectors:
        raise ArgumentError(
            f"The weights of {layer.label!r} come without query and key vectors, so numbers has nothing to "
            "show. Ask a layer whose description has vectors."
        )
    queries, keys = layer.size
    head = _integer(arguments, "head", 0, min=0, below=layer.heads)
    query = _integer(arguments, "query", 0, min=0, below=queries)
    key = _integer(arguments, "key", 0, min=0, below=keys)
    return Answer(weight_computation(layer.select_heads([head]), query, key), [])


@torch.no_grad()
def weight_computation(weights: Weights | Any, query: int, key: int) -> dict[str, Any]:
    """Return the steps from query and key to one weight, for lazy weights of one head."""
    row = weights.rows(slice(query, query + 1)).problem.nan_checked()
    scores = reference.scores(row)
    tau = reference.tau(row, scores)
    weight = reference.weights(row, scores, tau).flatten()[key]
    unmasked = row.with_config(terms=0)
    score = reference.scores(unmasked).flatten()[key]
    query_vector, key_vector = row["query"].flatten(0, -2)[0], row["key"].flatten(0, -3)[0, key]
    product = row.config.scale * (query_vector.double() @ key_vector.double())
    softcap = row.config.softcap
    without_bias = product if softcap is None else reference.softcap(product, softcap)
    normalize = row.config.normalize
    return {
        "query": [_finite(x) for x in query_vector.tolist()],
        "key": [_finite(x) for x in key_vector.tolist()],
        "scale": row.config.scale,
        "bias": _finite(float(score) - float(without_bias)) if row.all("bias") or row.all("line") else 0.0,
        "softcap": softcap,
        "score": _finite(float(score)),
        "masked": bool(scores.flatten()[key] == -math.inf),
        "tau": _finite(float(tau.double().sum())),
        "weight": _finite(float(weight)) or 0.0,
        "normalizer": type(normalize).__name__,
        "formula": formula(normalize),
    }


def formula(normalize: Normalizer, score: str = "score") -> str:
    """Return the formula of a normalizer for display; score: how to write the score.

    >>> import regard
    >>> from regard.app.protocol import formula
    >>> formula(regard.Softmax()), formula(regard.Sparsemax(), "s")
    ('exp(score − τ)', 'max(s − τ, 0)')
    """
    match normalize:
        case Softmax(temperature=t):
            return f"exp({score} − τ)" if t == 1 else f"exp(({score} − τ) / {t:g})"
        case Softmax1():
            return f"exp({score} − τ)"
        case Entmax(alpha=2.0):
            return f"max({score} − τ, 0)"
        case Entmax(alpha=1.5):
            return f"max(({score} − τ) / 2, 0)²"
        case Entmax(alpha=a):
            return f"max({a - 1:g} ({score} − τ), 0)^{1 / (a - 1):g}"
        case Mean():
            return f"{score} / n"
        case Relu():
            return f"max({score}, 0) / n"
        case Sigmoid():
            return f"1 / (1 + exp(τ − {score}))"
        case Hard():
            return f"1 if {score} is the maximum, else 0; ties share the weight"
    return f"φ({score} − τ)"


_QUESTIONS: dict[str, tuple[Callable[[LayerView, Mapping[str, Any]], Answer], set[str]]] = {
    "tile": (_tile, {"heads", "mean", "rows", "columns", "height", "width"}),
    "topk": (_topk, {"heads", "side", "position", "k"}),
    "received": (_received, {"heads", "k", "bins"}),
    "heads": (_describe_heads, {"heads", "size"}),
    "numbers": (_numbers, {"head", "query", "key"}),
}


def _cached(layer: LayerView, key: tuple[Any, ...], cost: int, compute: Callable[[], Any]) -> Any:
    """Return a cached result, or compute it; only expensive results are cached."""
    key = tuple(tuple(part) if isinstance(part, list) else part for part in key)
    if cost < _CACHE_COST:
        return compute()
    result = layer.cache.get(key)  # several threads may ask
    if result is None:
        layer.cache[key] = result = compute()
        if len(layer.cache) > _CACHE_SIZE:
            layer.cache.pop(next(iter(list(layer.cache))), None)  # the oldest
    return result


def _largest(weights: Floats, k: int) -> dict[str, list[Any]]:
    """Return the k largest nonzero weights and their positions; ties in order of position."""
    few = len(weights) <= 4 * k
    positions = np.arange(len(weights)) if few else np.argpartition(-weights, 2 * k)[: 2 * k]
    positions = positions[np.lexsort((positions, -weights[positions]))][:k]
    positions = positions[weights[positions] > 0]
    return {"positions": positions.tolist(), "weights": weights[positions].tolist()}


def _heads(layer: LayerView, arguments: Mapping[str, Any]) -> list[int]:
    heads = arguments.get("heads")
    if heads is None:
        return list(range(layer.heads))
    if not isinstance(heads, Sequence) or isinstance(heads, str) or not heads:
        raise ArgumentError(f"heads is {heads!r:.80}; it must be a list of numbers from 0, or null for all.")
    for head in heads:
        _check("heads", head, 0, layer.heads)
    if len(heads) > layer.heads:
        raise ArgumentError(f"heads has {len(heads)} numbers for {layer.heads} heads; list each head once.")
    return [int(head) for head in heads]


def _range(arguments: Mapping[str, Any], name: str, size: int) -> range:
    value = arguments.get(name)
    if value is None:
        return range(size)
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise ArgumentError(f"{name} is {value!r:.80}; it must be [start, stop], such as [0, {size}].")
    start, stop = (_check(name, bound, 0, size + 1) for bound in value)
    if stop < start:
        raise ArgumentError(f"{name} is [{start}, {stop}]; stop must not precede start.")
    return range(start, stop)


def _integer(
    arguments: Mapping[str, Any], name: str, default: int, *, min: int, below: int | None = None
) -> int:
    return _check(name, arguments.get(name, default), min, below)


def _check(name: str, value: Any, min: int, below: int | None) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ArgumentError(f"{name} is {value!r:.80}; it must be an integer.")
    if below is not None and below <= min:
        raise ArgumentError(f"{name} is {value}, but there are none.")
    if value < min or (below is not None and value >= below):
        bounds = f"at least {min}" if below is None else f"{min} to {below - 1}"
        raise ArgumentError(f"{name} is {value}; it must be {bounds}.")
    return int(value)


def _flag(arguments: Mapping[str, Any], name: str) -> bool:
    value = arguments.get(name, False)
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} is {value!r:.80}; it must be true or false.")
    return value


def encode_array(x: Floats) -> dict[str, Any]:
    """Return shape, and little-endian float32 values in base64."""
    return {"shape": list(x.shape), "data": b64encode(np.ascontiguousarray(x, "<f4").tobytes()).decode()}


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None
