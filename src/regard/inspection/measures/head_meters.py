"""Sums of head measures over the rows of a matrix: block by block, or from selected dot products."""

import math
from typing import Any

import torch
from torch import Tensor

from regard._util import interrupt
from regard.inspection.measures.gathered import GatheredWeights
from regard.mechanism.call.problem import Tile
from regard.mechanism.weights.matrix import Weights

_OFFSETS = {"previous": -1, "next": 1, "same": 0}
_SINK, _DORMANT = 0.3, 0.9  # weight on the first key from which a row counts
_LARGEST = 1 - 1e-4  # fraction of the row maximum from which a weight counts as the largest
_STREAMING = (4, 64)  # first and most recent keys of a streaming head

Measured = dict[str, tuple[Tensor, Tensor]]  # sum and count of each measure in a block, … h


class BlockMeter:
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
        first_key = self.first_key(at, block.device).squeeze(-1)
        first, counted = self._at(block, at, first_key)
        measured = {"first": _count(first, attends & counted)}
        measured["sink"] = _count(first > _SINK, attends & counted)
        measured["dormant"] = _count(first > _DORMANT, attends & counted)
        centers = self.centers(rows)
        if self.cross:
            near = (keys - centers[:, None]).abs() <= self.radius
            measured["diagonal"] = _count((block * near).sum(-1), attends)
        else:
            for name, offset in _OFFSETS.items():
                values, counted = self._at(block, at, centers + offset)
                measured[name] = _count(values, attends & counted)
            measured |= self._of_tokens(at, block, centers, keys, attends)
            if self.streams:
                near = (keys <= centers[:, None]) & (keys > centers[:, None] - _STREAMING[1])
                near = near | ((keys >= first_key[..., None]) & (keys < first_key[..., None] + _STREAMING[0]))
                measured["streaming"] = _count((block * near).sum(-1), attends)
        measured["distance"] = _distance(block, keys, centers).sum(-1), total.double().sum(-1)
        # for lazy weights, a kernel computes the entropy later
        entropy = torch.zeros_like(total) if isinstance(self.weights, Weights) else _row_entropy(block)
        measured["entropy"] = _count(entropy, attends)
        return measured

    @property
    def radius(self) -> float:
        """Distance from the diagonal that counts as near."""
        return max(1.0, 0.1 * self.keys)

    @property
    def streams(self) -> bool:
        """Whether the weights are causal, over enough tokens to tell whether a head streams."""
        return not self.cross and self.keys > 2 * sum(_STREAMING) and is_causal(self.weights)

    def centers(self, rows: Tensor) -> Tensor:
        """Return the key of each row's own position, or its place on the diagonal in cross-attention."""
        if self.cross:
            return (rows + 0.5) * (self.keys / self.queries) - 0.5
        return rows + self.keys - self.queries  # aligned at the last token

    def _of_tokens(self, at: Tile, block: Tensor, centers: Tensor, keys: Tensor, attends: Tensor) -> Measured:
        """Measure the weights on keys that are matched by their tokens."""
        ids = self.ids_of(at)
        if ids is None:
            return {}
        ids = ids.to(centers.device)
        tokens, after = ids[:, centers.clamp(min=0), None], centers[:, None]
        following = ids[:, (centers + 1).clamp(max=self.keys - 1), None]
        masks = {
            "duplicate": (tokens == ids[:, None, keys]) & (keys < after),
            "induction": (tokens == ids[:, None, (keys - 1).clamp(min=0)]) & (keys > 0) & (keys - 1 < after),
            "copying": (following == ids[:, None, keys]) & (keys <= after) & (after < self.keys - 1),
        }  # b q k
        batched = len(self.lead) > 2 or len(ids) > 1
        axes = (slice(None), *[None] * (len(self.lead) - 1)) if batched else (0,)
        masks = {name: mask[axes] for name, mask in masks.items()}
        measured = {
            name: _count((block * mask).sum(-1), attends & mask.any(-1)) for name, mask in masks.items()
        }
        largest = (block * masks["copying"]).amax(-1) >= block.amax(-1) * _LARGEST
        measured["retrieval"] = _count(largest, attends & masks["copying"].any(-1))
        return measured

    def _at(self, block: Tensor, at: Tile, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weight of each row at one position, and whether it exists; positions fit (…, q)."""
        positions = positions.expand(block.shape[:-1])
        inside = (positions >= at.keys.start) & (positions < at.keys.stop)
        index = (positions - at.keys.start).clamp(0, block.shape[-1] - 1)
        values = block.gather(-1, index[..., None]).squeeze(-1)
        return values * inside, (positions >= 0) & (positions < self.keys)

    def first_key(self, at: Tile, device: torch.device) -> Tensor:
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

    def ids_of(self, at: Tile) -> Tensor | None:
        """Return the token ids of the sequences in a tile, (b, k) or (1, k), if they are known."""
        if self.ids is None or self.ids.shape[-1] != self.keys:
            return None
        batch = self.weights.shape[: -3 if has_heads(self.weights) else -2]
        batched = len(batch) == 1 and len(self.ids) == batch[0]
        if not batched and len(self.ids) != 1:
            return None
        return self.ids[at.lead[0]] if batched and at.lead else self.ids


class GatheredMeter:
    """Measures lazy weights from selected dot products, one kernel pass for entropy and one for distance."""

    def __init__(self, meter: BlockMeter, weights: Weights) -> None:
        self.meter, self.weights, self.gathered = meter, weights, GatheredWeights(weights)
        self.attends = self.gathered.visible_rows()
        self.rows = torch.arange(meter.queries, device=weights.device)
        self.centers = meter.centers(self.rows)
        *outer, _ = self.gathered.lead
        self.whole = Tile(tuple(slice(0, n) for n in outer), slice(0, meter.queries), slice(0, meter.keys))
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor] = {}

    def measure(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the sum and the number of counted rows of each measure, (…, g, r)."""
        first_key = self.meter.first_key(self.whole, self.weights.device).squeeze(-1)
        column = first_key.reshape(1).expand(len(self.rows)) if first_key.numel() == 1 else first_key
        first = self.gathered.at(column)
        self._add("first", first, self.attends)
        self._add("sink", first > _SINK, self.attends)
        self._add("dormant", first > _DORMANT, self.attends)
        if self.meter.cross:
            low = (self.centers - self.meter.radius).ceil().long()
            high = (self.centers + self.meter.radius).floor().long() + 1
            self._add_total("diagonal", low, high)
        else:
            for name, offset in _OFFSETS.items():
                keys = self.centers + offset
                inside = (keys >= 0) & (keys < self.meter.keys)
                self._add(name, self.gathered.at(keys), self.attends & inside)
            self._of_tokens()
            if self.meter.streams:
                self._streaming(first_key)
        interrupt.check()
        self._distance()
        entropy = row_entropies(self.weights).nan_to_num(0, 0, 0).clamp(min=0)
        self._add("entropy", entropy.reshape(self.attends.shape), self.attends)
        return self.sums, self.counts

    def _add(self, name: str, values: Tensor, counted: Tensor) -> None:
        self.sums[name], counts = (x.cpu() for x in _count(values.nan_to_num(0, 0, 0), counted))
        self.counts[name] = counts.expand(self.sums[name].shape)

    def _add_total(self, name: str, low: Tensor | None, high: Tensor | None) -> None:
        ones = torch.ones(len(self.rows), 1, device=self.weights.device)
        sums = self.gathered.column_sums(low, high, ones)[..., 0]
        self.sums[name] = sums.sum(-1, dtype=torch.float64).cpu()
        self.counts[name] = self.attends.sum(-1).cpu()

    def _streaming(self, first_key: Tensor) -> None:
        """Sum the weights on recent keys, then on the first keys that are not recent."""
        first = first_key.reshape(()) if first_key.numel() == 1 else first_key
        recent = self.centers - _STREAMING[1] + 1
        self._add_total("streaming", recent, self.centers + 1)
        total, until = self.sums["streaming"], torch.minimum(recent, first + _STREAMING[0])
        self._add_total("streaming", first.expand_as(until), until)
        self.sums["streaming"] = total + self.sums["streaming"]

    def _distance(self) -> None:
        """Sum w |key − center|: the keys up to the center and those after it, each linear in the key."""
        keys = torch.arange(self.meter.keys, device=self.weights.device, dtype=torch.float64)
        split = self.centers.floor().long() + 1
        middle = self.meter.keys / 2
        x = torch.stack([torch.ones_like(self.centers.double()), self.centers.double() - middle], -1)
        parts: list[tuple[Tensor | None, Tensor | None, float]] = [(None, split, 1.0)]
        if not is_causal(self.weights):
            parts.append((split, None, -1.0))
        shape = self.gathered.lead
        self.sums["distance"], self.counts["distance"] = (torch.zeros(shape).double() for _ in range(2))
        for low, high, sign in parts:
            sums = self.gathered.column_sums(low, high, x.float()).double()
            distance = sign * (sums[..., 1] - (keys - middle) * sums[..., 0]).sum(-1)
            self.sums["distance"] += distance.cpu()
            self.counts["distance"] += sums[..., 0].sum(-1).cpu()

    def _of_tokens(self) -> None:
        ids = self.meter.ids_of(self.whole)
        if ids is None:
            return
        batched = len(ids) > 1
        totals: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for number in range(len(ids)):
            gathered = self.gathered.batch(number) if batched else self.gathered
            attends = self.attends[number : number + 1] if batched else self.attends
            largest = gathered.max_weight() * _LARGEST
            measures = {"duplicate": (0, 0), "induction": (0, 1), "copying": (-1, 0)}
            for name, (query, key) in measures.items():
                weight, best, matched = (torch.zeros(attends.shape, device=ids.device) for _ in range(3))
                for rows, block in gathered.same_tokens(ids[number], query=query, key=key):
                    interrupt.check()
                    index = rows.clamp(min=0).flatten()
                    valid = (rows >= 0).flatten()
                    index = index[valid]
                    weight[..., index] = block.sum(-1).flatten(-2)[..., valid]
                    matched[..., index] = 1.0
                    if name == "copying":
                        best[..., index] = block.amax(-1).flatten(-2)[..., valid]
                counted = attends & (matched > 0)
                totals.setdefault(name, []).append(_count(weight, counted))
                if name == "copying":
                    totals.setdefault("retrieval", []).append(_count(best >= largest, counted))
        for name, parts in totals.items():
            self.sums[name], self.counts[name] = (torch.cat(x).cpu() for x in zip(*parts, strict=True))


def is_causal(weights: Weights | Tensor) -> bool:
    """Return whether no row attends to a key after its query.

    >>> import torch, regard
    >>> from regard.inspection.measures.head_meters import is_causal
    >>> x = torch.randn(5, 4)
    >>> is_causal(regard.attend(x, x, x, mask=regard.Causal())[1])
    True
    """
    if isinstance(weights, Tensor):
        return not bool(weights.triu(weights.shape[-1] - weights.shape[-2] + 1).any())
    problem = weights.problem
    queries, keys, terms = problem.queries, problem.keys, problem.terms()
    limit = torch.arange(queries, device=weights.device)[:, None] + keys - queries + 1

    def term_is_causal(term: Any) -> bool:
        if term.stop is not None and bool((term.stop <= limit).all()):
            return True
        if term.allowed is None:
            return queries <= 1
        later = torch.arange(keys, device=weights.device) >= limit
        return not bool((term.allowed & later).any())

    return bool(terms) and all(map(term_is_causal, terms))


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


def row_entropies(weights: Weights) -> Tensor:
    """Return the entropy of each row, (…, q).

    Processes a few rows at a time so that the computation can be interrupted.
    """
    *lead, queries, keys = weights.shape
    bands = interrupt.bands(queries, math.prod(lead) * keys)
    whole = slice(0, queries)
    parts = (weights if rows == whole else weights.rows(rows) for rows in bands)
    return torch.cat([part.entropy() for part in parts], -1)
