"""What heads do, told from their weights: measures of each head, and a label by plain rules.

previous, next, same, first: the mean weight that a query gives to the token before it, after it, at its own
place, and to the very first. broad: the entropy of a row over log n, 1 where everything is read alike. The
means are over the rows that have such a key.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from regard.inspection.layer_view import Floats, LayerView, as_floats, in_bands
from regard.mechanism.weights.matrix import Weights

_MUCH = 0.4  # of the weight, on one kind of key, gives a head its label
_BROAD = 0.85  # of the entropy of reading everything alike
_ROWS = 256  # that are looked at together around the diagonal
_CELLS = 2**20  # weights that are looked at together
_LABELS = {"previous": "previous token", "next": "next token", "same": "same token", "first": "first token"}


@dataclass(frozen=True)
class Told:
    """What one head does: a label, and the measures behind it.

    >>> import torch
    >>> from regard.app.view_model import LayerView
    >>> from regard.inspection.statistics import tell
    >>> (told,) = tell(LayerView("attention", "attention", "self", torch.eye(4).roll(1, 0)))
    >>> told.label, told.measures["previous"]
    ('previous token', 1.0)
    """

    label: str
    measures: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold."""
        return {"label": self.label, "measures": {name: round(x, 6) for name, x in self.measures.items()}}


@torch.no_grad()
def tell(layer: LayerView, heads: Sequence[int] | None = None) -> list[Told]:
    """What each head of a layer, or some of them, does, in memory that is linear in the number of tokens.

    >>> import torch, regard
    >>> from regard.app.view_model import LayerView
    >>> from regard.inspection.statistics import tell
    >>> x = torch.zeros(2, 5, 4)
    >>> [told.label for told in tell(LayerView("attention", "layer 0", "self", regard.attend(x, x, x)[1]))]
    ['broad', 'broad']
    """
    return [_tell(layer, head) for head in (range(layer.heads) if heads is None else heads)]


def _tell(layer: LayerView, head: int) -> Told:
    queries, keys = layer.size
    if not queries or not keys:
        return Told("empty", {})
    if layer.kind != "self":
        broad, distance = _spread(layer, head, diagonal=True)
        measures = {"diagonal": _along_diagonal(layer, head), "broad": broad, "distance": distance}
        return Told(_crossing(measures), measures)
    near = _near(layer, head)
    broad, distance = _spread(layer, head)
    measures = {**near, "broad": broad, "distance": distance}
    return Told(_label(measures, queries), measures)


def _label(measures: dict[str, float], tokens: int) -> str:
    """The kind of key that most weight goes to, if it is much; else broad, or mixed."""
    if tokens == 1:
        return "same token"
    best = max(_LABELS, key=lambda name: measures[name])
    # of very few tokens, even reading all alike gives much to each
    if measures[best] >= max(_MUCH, 1.5 / tokens):
        return _LABELS[best]
    return "broad" if measures["broad"] >= _BROAD else "mixed"


def _crossing(measures: dict[str, float]) -> str:
    if measures["diagonal"] >= _MUCH and measures["broad"] < _BROAD:
        return "diagonal"
    return "broad" if measures["broad"] >= _BROAD else "mixed"


def _near(layer: LayerView, head: int) -> dict[str, float]:
    """Mean weights of the neighbours: only a band around the diagonal is computed, and the first column."""
    queries, keys = layer.size
    sums = {-1: 0.0, 0: 0.0, 1: 0.0}
    for start in range(0, queries, _ROWS):
        stop = min(start + _ROWS, queries)
        low, high = max(start - 1, 0), min(stop + 1, keys)
        if high <= low:
            break
        block = _part(layer, head, slice(start, stop), slice(low, high))
        for step in sums:
            sums[step] += float(np.trace(block, offset=start - low + step, dtype=np.float64))
    first = _part(layer, head, slice(0, queries), slice(0, 1))

    def mean(step: int) -> float:
        rows = min(queries, keys - step) - max(0, -step)  # that have such a neighbour
        return sums[step] / rows if rows > 0 else 0.0

    return {
        "previous": mean(-1),
        "next": mean(1),
        "same": mean(0),
        # the first token itself and the second, whose neighbour it is, have no choice
        "first": float(first[2:].mean(dtype=np.float64)) if queries > 2 else float(first.mean()),
    }


def _along_diagonal(layer: LayerView, head: int) -> float:
    """The weight within a tenth of the text, or one token, around the straight line from start to end."""
    queries, keys = layer.size
    reach = max(1.0, 0.1 * keys)
    total = 0.0
    for start, block in _strips(layer, head):
        centre = (np.arange(start, start + len(block)) + 0.5) * keys / queries - 0.5
        near = np.abs(np.arange(keys) - centre[:, None]) <= reach
        total += float(block.sum(where=near, dtype=np.float64))
    return total / queries


def _spread(layer: LayerView, head: int, *, diagonal: bool = False) -> tuple[float, float]:
    """Mean entropy over log n, and mean distance in tokens; across texts, from the straight line."""
    queries, keys = layer.size
    weights = layer.select_heads([head])
    entropy, distance, mass = 0.0, 0.0, 0.0
    lazy = isinstance(weights, Weights)
    if isinstance(weights, Weights):
        for band in in_bands(weights):
            entropy += float(as_floats(band.entropy()).sum(dtype=np.float64))
    places = np.arange(keys, dtype=np.float32)
    for start, block in _strips(layer, head):
        own = np.arange(start, start + len(block), dtype=np.float32)
        centre = (own + 0.5) * (keys / queries) - 0.5 if diagonal else own
        distance += _distance(block, places, centre.astype(np.float32))
        mass += float(block.sum(dtype=np.float64))
        if not lazy:
            entropy += float(torch.special.entr(torch.from_numpy(block)).clamp(min=0).sum())
    largest = np.log(keys) if keys > 1 else 1.0
    return max(entropy / queries / float(largest), 0.0), distance / mass if mass > 0 else 0.0


def _distance(block: Floats, places: Floats, centre: Floats) -> float:
    """Σ w |place − centre|, without a matrix of distances: left and right of all centres it is linear."""
    low, high = (
        int(np.clip(edge, 0, len(places))) for edge in (np.floor(centre[0]), np.ceil(centre[-1]) + 1)
    )
    total = 0.0
    for part, sign in ((slice(0, low), 1.0), (slice(high, None), -1.0)):
        linear = np.stack([np.ones_like(places[part]), places[part]], 1)
        sums = block[:, part] @ linear
        total += sign * float((centre * sums[:, 0] - sums[:, 1]).sum(dtype=np.float64))
    inside = block[:, low:high] * np.abs(places[low:high] - centre[:, None])
    return total + float(inside.sum(dtype=np.float64))


def _strips(layer: LayerView, head: int) -> Iterator[tuple[int, Floats]]:
    """Some rows with all keys at a time."""
    queries, keys = layer.size
    rows = max(_CELLS // max(keys, 1), 1)
    for start in range(0, queries, rows):
        yield start, _part(layer, head, slice(start, min(start + rows, queries)), slice(0, keys))


def _part(layer: LayerView, head: int, rows: slice, columns: slice) -> Floats:
    """Some weights as they are: (rows, columns)."""
    size = rows.stop - rows.start, columns.stop - columns.start
    return layer.tile(rows, columns, *size, heads=[head])[0]
