"""Sums of head measures over the rows of a matrix, from blocks of dense weights."""

import math
from typing import Any

import torch
from torch import Tensor

from regard._util import interrupt
from regard.mechanism.call.problem import Tile
from regard.mechanism.weights.weights import Weights

OFFSETS = {"previous": -1, "next": 1, "same": 0}
SINK, DORMANT = 0.3, 0.9  # a row counts if its weight on the first key exceeds this threshold
LARGEST = 1 - 1e-4  # a weight of at least this fraction of the row maximum counts as the largest
STREAMING = (4, 64)  # number of first and of most recent keys that a streaming head attends to

MATCHES = ("duplicate", "induction", "copying")
_NO_TOKEN = -2  # a rank that no token has

Measured = dict[str, tuple[Tensor, Tensor]]  # measure → sum over a block and number of rows, both (…, h)


class BlockMeter:
    """Computes head measures from blocks of a weight matrix."""

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
        measured = {"first": sum_counted(first, attends & counted)}
        measured["sink"] = sum_counted(first > SINK, attends & counted)
        measured["dormant"] = sum_counted(first > DORMANT, attends & counted)
        centers = self.centers(rows)
        if self.cross:
            near = (keys - centers[:, None]).abs() <= self.radius
            measured["diagonal"] = sum_counted((block * near).sum(-1), attends)
        else:
            for name, offset in OFFSETS.items():
                values, counted = self._at(block, at, centers + offset)
                measured[name] = sum_counted(values, attends & counted)
            measured |= self._of_tokens(at, block, centers, keys, attends)
            if self.streams:
                near = (keys <= centers[:, None]) & (keys > centers[:, None] - STREAMING[1])
                near = near | ((keys >= first_key[..., None]) & (keys < first_key[..., None] + STREAMING[0]))
                measured["streaming"] = sum_counted((block * near).sum(-1), attends)
        measured["distance"] = _distance(block, keys, centers).sum(-1), total.double().sum(-1)
        # for lazy weights, a kernel computes the entropy later
        entropy = torch.zeros_like(total) if isinstance(self.weights, Weights) else _row_entropy(block)
        measured["entropy"] = sum_counted(entropy, attends)
        return measured

    @property
    def radius(self) -> float:
        """Maximum distance from the diagonal that counts as near."""
        return max(1.0, 0.1 * self.keys)

    @property
    def streams(self) -> bool:
        """Whether the weights are causal and the text is long enough to detect streaming."""
        return not self.cross and self.keys > 2 * sum(STREAMING) and is_causal(self.weights)

    def centers(self, rows: Tensor) -> Tensor:
        """Return the key at each row's own position; in cross-attention, the key on the diagonal."""
        if self.cross:
            return (rows + 0.5) * (self.keys / self.queries) - 0.5
        return rows + self.keys - self.queries  # the last query is aligned with the last key

    def _of_tokens(self, at: Tile, block: Tensor, centers: Tensor, keys: Tensor, attends: Tensor) -> Measured:
        """Compute the measures that compare tokens: duplicate, induction, copying and retrieval."""
        ids = self.ids_of(at)
        if ids is None:
            return {}
        ids = ids.to(centers.device)
        tokens, after = ids[:, centers.clamp(min=0), None], centers[:, None]
        following = ids[:, (centers + 1).clamp(0, self.keys - 1), None]
        masks = {
            "duplicate": (tokens == ids[:, None, keys]) & (keys < after),
            "induction": (tokens == ids[:, None, (keys - 1).clamp(min=0)]) & (keys > 0) & (keys - 1 < after),
            "copying": (following == ids[:, None, keys]) & (keys <= after) & (after < self.keys - 1),
        }  # b q k
        batched = len(self.lead) > 2 or len(ids) > 1
        axes = (slice(None), *[None] * (len(self.lead) - 1)) if batched else (0,)
        masks = {name: mask[axes] for name, mask in masks.items()}
        # all keys count, including keys outside the block, whose weights are 0
        counted = {name: attends & rows[axes] for name, rows in TokenMatches(ids, centers).matched().items()}
        measured = {name: sum_counted((block * mask).sum(-1), counted[name]) for name, mask in masks.items()}
        largest = (block * masks["copying"]).amax(-1) >= block.amax(-1) * LARGEST
        measured["retrieval"] = sum_counted(largest, counted["copying"])
        return measured

    def _at(self, block: Tensor, at: Tile, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weight of each row at one position, (…, q), and whether this position exists."""
        positions = positions.expand(block.shape[:-1])
        inside = (positions >= at.keys.start) & (positions < at.keys.stop)
        index = (positions - at.keys.start).clamp(0, block.shape[-1] - 1)
        values = block.gather(-1, index[..., None]).squeeze(-1)
        return values * inside, (positions >= 0) & (positions < self.keys)

    def first_key(self, at: Tile, device: torch.device) -> Tensor:
        """Return the first key that any query may attend to, (…, 1, 1). In left-padded texts, it is not 0."""
        zero = torch.zeros(1, 1, dtype=torch.long, device=device)
        starts = []
        for term in self.weights.problem.terms() if isinstance(self.weights, Weights) else ():
            if term.start is None or term.stop is None:
                return zero
            cut = tuple(i if n > 1 else slice(None) for i, n in zip(at.lead, term.start.shape, strict=False))
            # the intervals of sliding windows start before 0
            start, stop = torch.broadcast_tensors(term.start.clamp(min=0), term.stop)
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


class TokenMatches:
    """The tokens to match for each row, and whether an earlier key has such a token.

    ids: token ids of the keys, (b, k). centers: the key at each row's own position, (q,).
    """

    def __init__(self, ids: Tensor, centers: Tensor) -> None:
        self.centers, self.keys = centers, ids.shape[-1]
        distinct, self.ranks = ids.to(centers.device).unique(return_inverse=True)  # ids as 0, 1, 2, …; b k
        self.own, self.following = (self._at(centers + offset) for offset in (0, 1))
        first = torch.full((len(ids), len(distinct)), self.keys, device=centers.device)
        positions = torch.arange(self.keys, device=centers.device).expand_as(self.ranks)
        self.first = first.scatter_reduce(1, self.ranks, positions, "amin")  # first occurrence of each token

    def _at(self, positions: Tensor) -> Tensor:
        inside = (positions >= 0) & (positions < self.keys)
        return torch.where(inside, self.ranks[:, positions.clamp(0, self.keys - 1)], _NO_TOKEN)

    def of_rows(self) -> Tensor:
        """Return the token to match for each row and the end of the keys to search, per match: (b, q, 2m)."""
        before, until = self.centers.expand_as(self.own), (self.centers + 1).expand_as(self.own)
        return torch.stack([self.own, before, self.own, until, self.following, until], -1)

    def of_keys(self) -> Tensor:
        """Return the token to compare at each key, per match (b, k, m): for induction, the previous token."""
        previous = torch.nn.functional.pad(self.ranks[:, :-1], (1, 0), value=_NO_TOKEN - 1)
        return torch.stack([self.ranks, previous, self.ranks], -1)

    def matched(self) -> dict[str, Tensor]:
        """Return which rows have a matching key, masked or not, per match: (b, q)."""
        repeated, copies = (
            self.first.gather(1, token.clamp(min=0)) < self.centers + offset
            for offset, token in enumerate((self.own, self.following))
        )
        repeated, copies = repeated & (self.own >= 0), copies & (self.following >= 0)
        return dict(zip(MATCHES, (repeated, repeated, copies), strict=True))


def is_causal(weights: Weights | Tensor) -> bool:
    """Return whether the weights are causal: no query attends to a later key.

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


def sum_counted(values: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the values over the counted rows, and the number of these rows."""
    return (values * counted).sum(-1, dtype=torch.float64), counted.sum(-1)


def _row_entropy(block: Tensor) -> Tensor:
    return torch.special.entr(block.float()).sum(-1).nan_to_num(0, 0, 0).clamp(min=0)


def _distance(block: Tensor, keys: Tensor, centers: Tensor) -> Tensor:
    """Return Σ w |key − center| of each row, (…, q).

    For keys to the left or right of all centers, the distance is linear in the key, so only the keys between
    the centers need a matrix of distances.
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
