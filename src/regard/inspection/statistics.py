"""Head statistics (previous-token, induction, sink, …) and a label for each head.

entropy: mean row entropy in nats. normalized_entropy: entropy / log(keys); 1 for uniform weights.
first: mean weight on the first key that any query may attend to.

Self-attention has these measures:
previous, same, next: mean weight on the previous, same and next token.
distance: mean distance in tokens.
induction: mean weight on the tokens after earlier occurrences of the query's token.

Cross-attention has these measures:
distance: mean distance from the diagonal, which maps the queries linearly to the keys.
diagonal: mean weight within 10% of the keys on either side of the diagonal.

Means are over the nonzero rows that have such a key; NaN if there are none.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard._util import interrupt
from regard.mechanism.call.problem import Tile
from regard.mechanism.weights.matrix import Weights

_DOMINANT = 0.4  # mean weight on one kind of key that decides the label
_UNIFORM = 0.85  # normalized entropy from which a head counts as broad
_CELLS = 2**20  # weights per block of a dense matrix
_LABELS = {"previous": "previous token", "next": "next token", "same": "same token", "first": "first token"}
_OFFSETS = {"previous": -1, "next": 1, "same": 0}

Measured = dict[str, tuple[Tensor, Tensor]]  # sum and count of each measure in a block, … h


@dataclass(frozen=True)
class HeadStatistics:
    """Label and measures of one attention head.

    >>> import torch, regard.inspection
    >>> (head,) = regard.inspection.head_statistics(torch.eye(4).roll(1, 0))  # a previous-token head
    >>> head.label, head.measures["previous"]
    ('previous token', 1.0)
    """

    label: str
    measures: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-serializable values: the label, and all finite measures except the raw entropy."""
        finite = {name: x for name, x in self.measures.items() if math.isfinite(x) and name != "entropy"}
        return {"label": self.label, "measures": {name: round(x, 6) for name, x in finite.items()}}


@torch.no_grad()
def head_statistics(
    weights: Weights | Tensor, *, cross: bool = False, ids: Tensor | None = None
) -> list[HeadStatistics]:
    """Compute the statistics of every head in a layer, in linear memory.

    weights: (…, h, q, k), or (q, k) for one head; a batch is averaged.
    cross: queries and keys come from different texts.
    ids: token ids of the keys, (b, k); required for induction.

    >>> import torch, regard, regard.inspection
    >>> x = torch.zeros(2, 5, 4)
    >>> [head.label for head in regard.inspection.head_statistics(regard.attend(x, x, x)[1])]
    ['broad', 'broad']
    """
    queries, keys = weights.shape[-2:]
    heads = int(weights.shape[-3]) if has_heads(weights) else 1
    if not queries or not keys:
        return [HeadStatistics("empty", {})] * heads
    if isinstance(weights, Weights):
        weights.compute_tau()
    sums: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}
    meter = _Meter(weights, cross, ids)
    for at, block in _blocks(weights):
        interrupt.check()
        if not block.numel():
            continue
        block = block.to(torch.promote_types(block.dtype, torch.float32)).nan_to_num(0, 0, 0)
        for name, (total, count) in meter.measure(at, block).items():
            index: tuple[Any, ...] = (*at.lead, ...)
            for totals, values in ((sums, total), (counts, count)):
                whole = totals.setdefault(name, torch.zeros(meter.lead, dtype=torch.float64))
                whole[index] += values.double().cpu()
    if isinstance(weights, Weights):
        sums["entropy"] = _entropy(weights).nan_to_num(0, 0, 0).clamp(min=0).double().sum(-1).cpu()
    if not counts:  # everything is masked
        return [HeadStatistics("mixed", {})] * heads
    means = {
        name: sums[name].reshape(-1, heads).sum(0) / counts[name].reshape(-1, heads).sum(0) for name in counts
    }
    means["normalized_entropy"] = means["entropy"] / (math.log(keys) if keys > 1 else 1.0)
    table = [{name: float(values[head]) for name, values in means.items()} for head in range(heads)]
    return [HeadStatistics(_label(measures, keys, cross), measures) for measures in table]


def _label(measures: dict[str, float], keys: int, cross: bool) -> str:
    """Return the dominant kind of key; otherwise "broad" or "mixed"."""
    known = {name: x for name, x in measures.items() if math.isfinite(x)}
    broad = known.get("normalized_entropy", 0.0) >= _UNIFORM
    if cross:
        diagonal = known.get("diagonal", 0.0) >= _DOMINANT and not broad
        return "diagonal" if diagonal else "broad" if broad else "mixed"
    if keys == 1:
        return "same token"
    best = max(_LABELS, key=lambda name: known.get(name, 0.0))
    # in short texts uniform weights alone pass the threshold: require 1.5 × uniform
    uniform = 1 / keys
    if best == "first":  # causal uniform weights: 1 in the first row, 1/2 in the second, …
        uniform *= sum(1 / row for row in range(1, min(keys, 20) + 1))
    if known.get(best, 0.0) >= max(_DOMINANT, 1.5 * uniform):
        return _LABELS[best]
    return "broad" if broad else "mixed"


class _Meter:
    """Measures the blocks of a matrix."""

    def __init__(self, weights: Weights | Tensor, cross: bool, ids: Tensor | None) -> None:
        self.weights, self.cross, self.ids = weights, cross, ids
        self.queries, self.keys = weights.shape[-2:]
        self.lead = weights.problem_lead if isinstance(weights, Weights) else tuple(weights.shape[:-2])

    def measure(self, at: Tile, block: Tensor) -> Measured:
        """Return the sum over the rows of a block (…, h, q, k) and the number of rows, for each measure."""
        rows = torch.arange(at.rows.start, at.rows.stop, device=block.device)
        keys = torch.arange(at.keys.start, at.keys.stop, device=block.device)
        total = block.sum(-1)
        attends = total != 0
        measured = {"first": self._at(block, at, self._first_key(at, block.device).squeeze(-1), attends)}
        if self.cross:
            centers = (rows + 0.5) * (self.keys / self.queries) - 0.5
            near = (keys - centers[:, None]).abs() <= max(1.0, 0.1 * self.keys)
            measured["diagonal"] = _count((block * near).sum(-1), attends)
        else:
            centers = rows + self.keys - self.queries  # aligned at the last token
            for name, offset in _OFFSETS.items():
                measured[name] = self._at(block, at, centers + offset, attends)
            repeated = self._after_repetitions(at, centers, keys)
            if repeated is not None:
                measured["induction"] = _count((block * repeated).sum(-1), attends & repeated.any(-1))
        measured["distance"] = _distance(block, keys, centers).sum(-1), total.double().sum(-1)
        # for lazy weights, a kernel computes the entropy later
        entropy = torch.zeros_like(total) if isinstance(self.weights, Weights) else _row_entropy(block)
        measured["entropy"] = _count(entropy, attends)
        return measured

    def _at(self, block: Tensor, at: Tile, positions: Tensor, attends: Tensor) -> tuple[Tensor, Tensor]:
        """Measure the weight of each row at one position; positions broadcast to (…, q)."""
        positions = positions.expand(block.shape[:-1])
        inside = (positions >= at.keys.start) & (positions < at.keys.stop)
        index = (positions - at.keys.start).clamp(0, block.shape[-1] - 1)
        values = block.gather(-1, index[..., None]).squeeze(-1)
        return _count(values * inside, attends & (positions >= 0) & (positions < self.keys))

    def _first_key(self, at: Tile, device: torch.device) -> Tensor:
        """Return the first key that any query may attend to, (…, 1, 1); not key 0 in left-padded texts."""
        zero = torch.zeros(1, 1, dtype=torch.long, device=device)
        starts = []
        for term in self.weights.problem.terms() if isinstance(self.weights, Weights) else ():
            if term.start is None or term.stop is None:
                return zero
            cut = tuple(i if n > 1 else slice(None) for i, n in zip(at.lead, term.start.shape, strict=False))
            start, stop = torch.broadcast_tensors(term.start, term.stop)
            start = torch.where(start < stop, start, 2**40)[cut if start.shape == term.start.shape else ...]
            starts.append(start.amin(-2, keepdim=True))
        first = starts[0] if starts else zero
        for start in starts[1:]:
            first = torch.minimum(first, start)
        return first

    def _after_repetitions(self, at: Tile, rows: Tensor, keys: Tensor) -> Tensor | None:
        """Return a mask of the keys that follow an earlier occurrence of the query's token, (…, q, k)."""
        if self.ids is None or self.ids.shape[-1] != self.keys:
            return None
        batch = self.weights.shape[: -3 if has_heads(self.weights) else -2]
        batched = len(batch) == 1 and len(self.ids) == batch[0]
        if not batched and len(self.ids) != 1:
            return None
        ids = (self.ids[at.lead[0]] if batched and at.lead else self.ids).to(rows.device)
        same = ids[:, rows.clamp(min=0), None] == ids[:, None, (keys - 1).clamp(min=0)]
        same = same & (keys > 0) & (keys - 1 < rows[:, None])  # b q k
        return same[(slice(None), *[None] * (len(self.lead) - 1))] if batched else same[0]


def _count(values: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the values over the counted rows, and the number of these rows."""
    return (values * counted).sum(-1, dtype=torch.float64), counted.sum(-1)


def _row_entropy(block: Tensor) -> Tensor:
    return torch.special.entr(block.float()).nan_to_num(0, 0, 0).sum(-1).clamp(min=0)


def _distance(block: Tensor, keys: Tensor, centers: Tensor) -> Tensor:
    """Return Σ w |key − center| of each row, (…, q).

    Left and right of all centers the distance is linear in the key, so only the part between them needs a
    matrix of distances.
    """
    block, keys, centers = block.float(), keys.float(), centers.float()
    low = int(torch.searchsorted(keys, centers[0].floor()))
    high = int(torch.searchsorted(keys, centers[-1].ceil(), right=True))
    distance = (block[..., low:high] * (keys[low:high] - centers[:, None]).abs()).sum(-1, dtype=torch.float64)
    for part, sign in ((slice(0, low), 1), (slice(high, None), -1)):
        sums = block[..., part] @ torch.stack([torch.ones_like(keys[part]), keys[part]], -1)
        distance += sign * (centers * sums[..., 0] - sums[..., 1])
    return distance


def has_heads(weights: Weights | Tensor) -> bool:
    """Return whether weights have a head axis."""
    return weights.has_heads if isinstance(weights, Weights) else weights.dim() > 2


def _blocks(weights: Weights | Tensor) -> Iterator[tuple[Tile, Tensor]]:
    """Yield blocks of rows with all of their keys, and their positions."""
    if isinstance(weights, Weights):
        yield from weights.tiles()
        return
    *lead, queries, keys = weights.shape
    rows = max(_CELLS // (math.prod(lead) * keys or 1), 1)
    for start in range(0, queries, rows):
        part = slice(start, min(start + rows, queries))
        yield Tile((), part, slice(0, keys)), weights[..., part, :]


def _entropy(weights: Weights) -> Tensor:
    """Return the entropy of each row, (…, q).

    Processes a few rows at a time so that the computation can be interrupted.
    """
    *lead, queries, keys = weights.shape
    bands = interrupt.bands(queries, math.prod(lead) * keys)
    whole = slice(0, queries)
    parts = (weights if rows == whole else weights.rows(rows) for rows in bands)
    return torch.cat([part.entropy() for part in parts], -1)
