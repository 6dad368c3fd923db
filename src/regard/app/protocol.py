"""Questions about a layer of weights, and their answers; arguments are checked, as they come from anywhere.

tile: a part of the matrix, pooled. top: the strongest of a row or a column. received: the keys that are read
most. heads: what each head does. numbers: how one weight came about.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from regard.errors import ArgumentError
from regard.inspection.layer_view import Answer, Floats, LayerView, as_floats
from regard.inspection.statistics import tell
from regard.mechanism import reference
from regard.mechanism.normalizers import Entmax, Hard, Mean, Normalizer, Relu, Sigmoid, Softmax, Softmax1
from regard.mechanism.weights.matrix import Weights

_MOST_CELLS = 2**22  # of a tile, over all heads
_MOST_PLACES = 1000
_KEPT = 64  # answers that took a while to find, per layer
_COSTLY = 2**22  # weights behind an answer that is kept
_PASSES = 4  # over all weights to describe heads: τ, entropy, distances, thumbnails
_BAND = 2**28  # weights of a head above which the keys' sums come from bands of rows


def ask(layer: LayerView, question: str, arguments: Mapping[str, Any]) -> Answer:
    """The answer to a question about a layer; `arguments` without those that chose the layer."""
    return _known(question, arguments)(layer, arguments)


def pairs(layer: LayerView, question: str, arguments: Mapping[str, Any]) -> int:
    """How many weights an answer reads, queries × keys × heads: what the question costs.

    >>> import torch
    >>> from regard.app.view_model import LayerView
    >>> from regard.app.protocol import pairs
    >>> layer = LayerView("attention", "layer 0", "self", torch.zeros(8, 100, 100))
    >>> pairs(layer, "tile", {}), pairs(layer, "tile", {"heads": [3], "rows": [0, 10]})
    (80000, 1000)
    """
    _known(question, arguments)
    queries, keys = layer.size
    if question == "numbers":
        return keys
    heads = len(_heads(layer, arguments))
    if question == "tile":
        return heads * len(_range(arguments, "rows", queries)) * len(_range(arguments, "columns", keys))
    if question == "top":
        return heads * (queries if arguments.get("side") == "key" else keys)
    return heads * queries * keys * (_PASSES if question == "heads" else 1)


def unread(layer: LayerView) -> int:
    """How many weights have to be read once before any answer: all, where the rows' τ is unknown.

    >>> import torch
    >>> from regard.app.view_model import LayerView
    >>> from regard.app.protocol import unread
    >>> unread(LayerView("attention", "layer 0", "self", torch.eye(3)))
    0
    """
    if not isinstance(layer.weights, Weights):
        return 0
    tau = layer.weights._problem["tau"]
    unknown = tau.numel() > 0 and bool(tau[(0,) * tau.dim()].isnan())
    return layer.weights.numel() if unknown else 0


def _known(question: str, arguments: Mapping[str, Any]) -> Callable[[LayerView, Mapping[str, Any]], Answer]:
    """What answers a question; an error if nothing does, or if it does not take these arguments."""
    if not isinstance(question, str) or question not in _QUESTIONS:
        raise ArgumentError(f"there is no question {question!r:.80}; there are {', '.join(_QUESTIONS)}.")
    answer, known = _QUESTIONS[question]
    unknown = sorted(map(str, arguments.keys() - known))
    if unknown:
        raise ArgumentError(f"{question} got {unknown[0]!r}; it knows {', '.join(sorted(known))}.")
    return answer


def _tile(layer: LayerView, given: Mapping[str, Any]) -> Answer:
    heads, mean = _heads(layer, given), _flag(given, "mean")
    rows, columns = (
        _range(given, name, size) for name, size in zip(("rows", "columns"), layer.size, strict=True)
    )
    height = _whole(given, "height", 256, least=1)
    width = _whole(given, "width", 256, least=1)
    height, width = min(height, max(len(rows), 1)), min(width, max(len(columns), 1))
    shown = 1 if mean else len(heads)
    if shown * height * width > _MOST_CELLS:
        raise ArgumentError(
            f"a tile of {shown} × {height} × {width} has more than {_MOST_CELLS:,} cells; ask for fewer "
            "heads, or a smaller height and width."
        )

    def find() -> Floats:
        part = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
        return layer.tile(*part, height, width, heads=heads, mean=mean)

    what = ("tile", heads, mean, rows, columns, height, width)
    return Answer({}, [_kept(layer, what, len(heads) * len(rows) * len(columns), find)])


def _top(layer: LayerView, given: Mapping[str, Any]) -> Answer:
    side = given.get("side", "query")
    if side not in ("query", "key"):
        raise ArgumentError(f"top got side={side!r}; give 'query' or 'key'.")
    queries, keys = layer.size
    place = _whole(given, "place", 0, least=0, below=queries if side == "query" else keys)
    one = slice(place, place + 1)
    rows, columns = (one, slice(None)) if side == "query" else (slice(None), one)
    found = layer.tile(rows, columns, queries, keys, heads=_heads(layer, given), mean=True).reshape(-1)
    return Answer(_largest(found, _whole(given, "most", 10, least=1, below=_MOST_PLACES + 1)), [])


def _received(layer: LayerView, given: Mapping[str, Any]) -> Answer:
    heads = _heads(layer, given)
    found: Floats = np.stack([_received_by(layer, head) for head in heads]).mean(0, dtype=np.float32)
    most = _whole(given, "most", 10, least=1, below=_MOST_PLACES + 1)
    bins = min(_whole(given, "bins", 256, least=1, below=_MOST_CELLS), max(len(found), 1))
    edges = np.arange(bins + 1) * len(found) // bins
    means = np.add.reduceat(found, edges[:-1]) / np.diff(edges) if len(found) else found
    return Answer(_largest(found, most), [means.astype(np.float32)])


@torch.no_grad()
def _received_by(layer: LayerView, head: int) -> Floats:
    """How much each key is read in a head, summed over the queries: (k)."""

    def find() -> Floats:
        if math.prod(layer.size) > _BAND:  # can be interrupted
            return layer.tile(slice(None), slice(None), 1, layer.size[1], heads=[head])[0, 0] * layer.size[0]
        weights = layer.select_heads([head])
        summed = weights.received() if isinstance(weights, Weights) else weights.float().sum(-2)
        return as_floats(summed).reshape(-1)

    return _kept(layer, ("received", head), math.prod(layer.size), find)


def _about_heads(layer: LayerView, given: Mapping[str, Any]) -> Answer:
    size, heads = _whole(given, "size", 64, least=1, below=513), _heads(layer, given)
    queries, keys = layer.size
    cells = len(heads) * min(size, queries) * min(size, keys)
    if cells > _MOST_CELLS:
        raise ArgumentError(
            f"pictures of {len(heads)} heads at size {size} have {cells:,} cells; at most {_MOST_CELLS:,} "
            "are sent at once: ask for a smaller size, or for fewer heads."
        )
    told = _kept(layer, ("told", heads), _COSTLY, lambda: tell(layer, heads))

    def thumbnails() -> Floats:
        return layer.tile(slice(None), slice(None), size, size, heads=heads)

    small = _kept(layer, ("thumbnails", size, heads), len(heads) * queries * keys, thumbnails)
    described = [{"head": head, **one.to_dict()} for head, one in zip(heads, told, strict=True)]
    return Answer({"heads": described}, [small])


def _numbers(layer: LayerView, given: Mapping[str, Any]) -> Answer:
    if not layer.has_vectors:
        raise ArgumentError(
            f"the weights of {layer.label!r} do not come from products of queries and keys, so that numbers "
            "has nothing to show; ask another layer, one whose description has vectors."
        )
    queries, keys = layer.size
    head = _whole(given, "head", 0, least=0, below=layer.heads)
    query = _whole(given, "query", 0, least=0, below=queries)
    key = _whole(given, "key", 0, least=0, below=keys)
    return Answer(numbers(layer.select_heads([head]), query, key), [])


@torch.no_grad()
def numbers(weights: Weights | Any, query: int, key: int) -> dict[str, Any]:
    """How the weight of one query and one key came about, of lazy weights of one head."""
    row = weights._part([slice(None)] * (weights.dim() - 2), slice(query, query + 1))._problem.checked()
    scores = reference.scores(row)
    tau = reference.tau(row, scores)
    weight = reference.weights(row, scores, tau).flatten()[key]
    unmasked = row.with_rules(terms=0)
    score = reference.scores(unmasked).flatten()[key]
    first, second = row["query"].flatten(0, -2)[0], row["key"].flatten(0, -3)[0, key]
    product = row.rules.scale * (first.double() @ second.double())
    capped = row.rules.softcap
    before = product if capped is None else reference.softcap(product, capped)
    normalize = row.rules.normalize
    return {
        "query": [_finite(x) for x in first.tolist()],
        "key": [_finite(x) for x in second.tolist()],
        "scale": row.rules.scale,
        "bias": _finite(float(score) - float(before)) if row.all("bias") or row.all("line") else 0.0,
        "softcap": capped,
        "score": _finite(float(score)),
        "masked": bool(scores.flatten()[key] == -math.inf),
        "tau": _finite(float(tau.double().sum())),
        "weight": _finite(float(weight)) or 0.0,
        "normalizer": type(normalize).__name__,
        "formula": formula(normalize),
    }


def formula(normalize: Normalizer) -> str:
    """How a normalizer makes a weight of a score and τ, for people to read.

    >>> import regard
    >>> from regard.app.protocol import formula
    >>> formula(regard.Softmax()), formula(regard.Sparsemax())
    ('exp(score − τ)', 'max(score − τ, 0)')
    """
    match normalize:
        case Softmax(temperature=t):
            return "exp(score − τ)" if t == 1 else f"exp((score − τ) / {t:g})"
        case Softmax1():
            return "exp(score − τ)"
        case Entmax(alpha=2.0):
            return "max(score − τ, 0)"
        case Entmax(alpha=1.5):
            return "max((score − τ) / 2, 0)²"
        case Entmax(alpha=a):
            return f"max({a - 1:g} (score − τ), 0)^{1 / (a - 1):g}"
        case Mean():
            return "score / n"
        case Relu():
            return "max(score, 0) / n"
        case Sigmoid():
            return "1 / (1 + exp(τ − score))"
        case Hard():
            return "1 where the score is largest, shared among equals"
    return "φ(score − τ)"


_COMMON = {"heads"}
_QUESTIONS: dict[str, tuple[Callable[[LayerView, Mapping[str, Any]], Answer], set[str]]] = {
    "tile": (_tile, _COMMON | {"mean", "rows", "columns", "height", "width"}),
    "top": (_top, _COMMON | {"side", "place", "most"}),
    "received": (_received, _COMMON | {"most", "bins"}),
    "heads": (_about_heads, _COMMON | {"size"}),
    "numbers": (_numbers, {"head", "query", "key"}),
}


def _kept(layer: LayerView, what: tuple[Any, ...], cost: int, find: Callable[[], Any]) -> Any:
    """What was found before, if it was expensive, or is found now."""
    what = tuple(tuple(part) if isinstance(part, list) else part for part in what)
    if cost < _COSTLY:
        return find()
    found = layer.cache.get(what)  # several threads may ask
    if found is None:
        layer.cache[what] = found = find()
        if len(layer.cache) > _KEPT:
            layer.cache.pop(next(iter(list(layer.cache))), None)  # the oldest
    return found


def _largest(found: Floats, most: int) -> dict[str, list[Any]]:
    """The largest of some weights, the first of equals first; none that is 0."""
    some = found if len(found) <= 4 * most else None
    places = np.arange(len(found)) if some is not None else np.argpartition(-found, 2 * most)[: 2 * most]
    places = places[np.lexsort((places, -found[places]))][:most]
    places = places[found[places] > 0]
    return {"places": places.tolist(), "weights": found[places].tolist()}


def _heads(layer: LayerView, given: Mapping[str, Any]) -> list[int]:
    heads = given.get("heads")
    if heads is None:
        return list(range(layer.heads))
    if not isinstance(heads, Sequence) or isinstance(heads, str) or not heads:
        raise ArgumentError(f"heads are {heads!r:.80}; give a list of numbers from 0, or null for all.")
    for head in heads:
        _check("heads", head, 0, layer.heads)
    if len(heads) > layer.heads:
        raise ArgumentError(
            f"heads are {len(heads)} numbers and there are {layer.heads} heads; give each once."
        )
    return [int(head) for head in heads]


def _range(given: Mapping[str, Any], name: str, size: int) -> range:
    asked = given.get(name)
    if asked is None:
        return range(size)
    if not isinstance(asked, Sequence) or isinstance(asked, str) or len(asked) != 2:
        raise ArgumentError(
            f"{name} are {asked!r:.80}; give the first and the one after the last: [0, {size}]."
        )
    first, stop = (_check(name, one, 0, size + 1) for one in asked)
    if stop < first:
        raise ArgumentError(f"{name} are [{first}, {stop}]; the second is not before the first: [0, {size}].")
    return range(first, stop)


def _whole(
    given: Mapping[str, Any], name: str, otherwise: int, *, least: int, below: int | None = None
) -> int:
    return _check(name, given.get(name, otherwise), least, below)


def _check(name: str, value: Any, least: int, below: int | None) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ArgumentError(f"{name} got {value!r:.80}; give a whole number.")
    if value < least or (below is not None and value >= below):
        bound = f"at least {least}" if below is None else f"from {least} to {below - 1}"
        nothing = below is not None and below <= least
        raise ArgumentError(f"{name} got {value}; " + ("there are none." if nothing else f"give {bound}."))
    return int(value)


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} got {value!r:.80}; give true or false.")
    return value


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None
