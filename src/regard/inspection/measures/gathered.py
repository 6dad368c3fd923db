"""Selected entries and parts of lazy weights, computed from the known τ without a pass over all pairs.

    weight(i, j) = φ(score(i, j) − τ_i)

Diagonals, columns and pairs of equal tokens are a few dot products per row. Sums over intervals of keys use
the kernels, which skip everything outside of the intervals.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from regard._util import interrupt
from regard.mechanism import reference
from regard.mechanism.call.problem import Problem, Tile
from regard.mechanism.mask_algebra import MaskTerm
from regard.mechanism.normalizers import Normalizer
from regard.mechanism.weights.lazy_matrix import kernels_support
from regard.mechanism.weights.matrix import Weights
from regard.mechanism.weights.reader import Reader

_ROUNDING = 1e-3  # accepted relative rounding error of a gathered weight
_CELLS = 2**21  # numbers per block of gathered keys or pairs


def is_gatherable(weights: Weights) -> bool:
    """Return whether entries can be computed from τ: the kernels support the call, without a dense mask.

    >>> import torch, regard
    >>> from regard.inspection.measures.gathered import is_gatherable
    >>> x = torch.randn(5, 4)
    >>> is_gatherable(regard.attend(x, x, x, score=regard.Additive(4, 4))[1].detach())
    False
    """
    problem = weights.problem
    normalize = problem.config.normalize
    if weights.is_head_mean or problem.config.family != "dot" or not kernels_support(problem):
        return False
    if not normalize.sums_to_one or type(normalize).divisor is not Normalizer.divisor:
        return False
    if any(term.allowed is not None for term in problem.terms()) or not weights.compute_tau():
        return False
    problem = weights.problem
    batched = any(term.start is not None and term.start[..., 0, 0].numel() > 1 for term in problem.terms())
    if batched and (problem.all("bias") or problem.all("line")):
        return False  # the first key differs between sequences, and so does the index of its bias
    finite = bool(problem["tau"].isfinite().all())
    return finite and _largest_score(problem) * torch.finfo(torch.float32).eps <= _ROUNDING


def _largest_score(problem: Problem) -> float:
    """Return an upper bound on the magnitude of the scores, without biases."""
    query, key = (float(problem[name].float().norm(dim=-1).max()) for name in ("query", "key"))
    return abs(problem.config.scale) * query * key


class GatheredWeights:
    """Entries of gatherable weights. Leading axes are (…, g, r), as in a `Problem`."""

    def __init__(self, weights: Weights) -> None:
        self.problem, self._rows_per_key_head = weights.problem, weights._rows_per_key_head()
        self.lead = self.problem.lead()

    def at(self, keys: Tensor) -> Tensor:
        """Return the weight of each row at one key, (…, g, r, q). keys: (q,), or (…, g, r, 1) for one column.

        Zero for keys out of range.
        """
        problem, rows = self.problem, torch.arange(self.problem.queries, device=keys.device)
        inside = (keys >= 0) & (keys < problem.keys)
        keys = keys.clamp(0, problem.keys - 1)
        query = problem["query"].expand(*self.lead, *problem["query"].shape[-2:])
        if keys.dim() == 1:
            pairs = (query.float() * problem["key"][..., keys, :].float()).sum(-1)
        else:
            key = problem["key"].expand(*self.lead, *problem["key"].shape[-2:])
            chosen = keys.expand(*self.lead, 1)[..., None]
            column = key.gather(-2, chosen.expand(*chosen.shape[:-1], key.shape[-1]))
            pairs = (query.float() @ column.float().mT).squeeze(-1)
        return _weights(problem, pairs, rows, keys) * inside

    def same_tokens(self, ids: Tensor, *, query: int = 0, key: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield rows and their weights on earlier occurrences of their token, grouped by token.

        ids: (k,). query, key: added to the positions of the later and of the earlier occurrence. Yields rows
        (t, c) and weights (…, g, r, t, c, c'), zero where there is no such pair; rows are −1 for padding.
        """
        problem = self.problem
        offset = problem.keys - problem.queries
        for positions in _groups(ids, max(_CELLS // max(_numel(self.lead), 1), 1)):
            positions = positions.to(problem["query"].device)
            every_key = (positions + key).clamp(0, problem.keys - 1)
            gathered = problem["key"][..., every_key, :].float()
            for part in _split(positions.shape, _numel(self.lead), problem["query"].shape[-1]):
                later, earlier = positions[:, part], positions[:, : part.stop]  # in ascending order
                rows, keys, at = later + query - offset, earlier + key, every_key[:, : part.stop]
                pair = (later[:, :, None] > earlier[:, None]) & (earlier[:, None] >= 0)
                pair &= ((rows >= 0) & (rows < problem.queries))[:, :, None]
                pair &= ((keys >= 0) & (keys < problem.keys))[:, None]
                index = rows.clamp(0, problem.queries - 1)
                full = problem["query"].expand(*self.lead, *problem["query"].shape[-2:])
                scores = full[..., index, :].float() @ gathered[..., : part.stop, :].mT
                values = _weights(problem, scores, index[:, :, None], at[:, None]) * pair
                yield torch.where(pair.any(-1), rows, -1), values

    def column_sums(self, start: Tensor | None, stop: Tensor | None, x: Tensor) -> Tensor:
        """Return Σ_i w_ij x_i over the pairs with start_i ≤ j < stop_i: (…, g, r, k, e). x: (q, e).

        start, stop: (q,) or (…, g, r, q), or None for no limit.
        """
        limits = [None if end is None else end.unsqueeze(-1) for end in (start, stop)]
        problem, extra = self.problem, MaskTerm(*limits)
        terms = [term.intersect(extra) for term in problem.terms() or [MaskTerm()]]
        tensors = {name: t for name, t in problem.tensors.items() if not name.startswith(("start", "stop"))}
        axes = problem["query"].dim()
        for number, term in enumerate(terms):
            for name, end in (("start", term.start), ("stop", term.stop)):
                if end is not None:
                    tensors[f"{name}{number}"] = end.reshape((1,) * (axes - end.dim()) + tuple(end.shape))
        bounded = problem.with_tensors(tensors).with_config(terms=len(terms))
        columns = x.to(problem["query"].dtype).expand(*self.lead, *x.shape)
        lead = tuple(slice(0, n) for n in self.lead[:-1])
        total: Tensor | None = None
        for rows in interrupt.bands(problem.queries, _numel(self.lead) * problem.keys):  # to be interrupted
            part = bounded.part(Tile(lead, rows, slice(0, problem.keys)))
            reader = Reader(part, self._rows_per_key_head)
            sums = reader.transposed_product(columns[..., rows, :])
            assert sums is not None  # τ is finite
            total = sums if total is None else total + sums
        assert total is not None
        return total

    def visible_rows(self) -> Tensor:
        """Return which rows see any key, (…, g, r, q)."""
        problem = self.problem
        rows = torch.zeros(1, dtype=torch.bool, device=problem["query"].device)
        for term in problem.terms() or [MaskTerm()]:
            start = 0 if term.start is None else term.start.clamp(min=0)
            stop = problem.keys if term.stop is None else term.stop.clamp(max=problem.keys)
            seen = torch.as_tensor(start < stop, device=rows.device)
            rows = rows | (seen[..., 0] if seen.dim() else seen)
        return rows.expand(*self.lead, problem.queries)

    def max_weight(self) -> Tensor:
        """Return the largest weight of each row, (…, g, r, q): φ(maximum − τ). A sink counts as a key."""
        rest = self.problem["tau"][..., 1]
        return self.problem.config.normalize.phi(-rest)

    def batch(self, index: int) -> "GatheredWeights":
        """Select one sequence of the batch."""
        part = GatheredWeights.__new__(GatheredWeights)
        *outer, groups, _ = self.lead
        lead = (slice(index, index + 1), *(slice(0, n) for n in outer[1:]), slice(0, groups))
        tile = Tile(lead, slice(0, self.problem.queries), slice(0, self.problem.keys))
        part.problem, part._rows_per_key_head = self.problem.part(tile), self._rows_per_key_head
        part.lead = part.problem.lead()
        return part


def _weights(problem: Problem, scores: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """Return φ(scores − τ) for pairs: scores (…, g, r, *p), rows and keys broadcast to p."""
    config = problem.config
    scores = scores * config.scale
    if config.softcap is not None:
        scores = reference.softcap(scores, config.softcap)
    for bias in problem.all("bias"):
        row = rows if bias.shape[-2] > 1 else torch.zeros_like(rows)
        scores = scores + bias[..., row, keys if bias.shape[-1] > 1 else torch.zeros_like(keys)]
    for line in problem.all("line"):
        scores = scores + line.squeeze(-2)[..., keys - problem["row"].flatten()[rows] + config.queries - 1]
    tau = problem["tau"]
    result = config.normalize.phi(scores - tau[..., 0][..., rows] - tau[..., 1][..., rows])
    terms = problem.terms()
    if not terms:
        return result
    visible = torch.zeros((), dtype=torch.bool, device=scores.device)
    for term in terms:
        start, stop = (
            None if end is None else end[..., 0][..., rows if end.shape[-2] > 1 else torch.zeros_like(rows)]
            for end in (term.start, term.stop)
        )
        inside = torch.ones((), dtype=torch.bool, device=scores.device)
        inside = inside if start is None else inside & (keys >= start)
        visible = visible | (inside if stop is None else inside & (keys < stop))
    return torch.where(visible, result, 0.0)


def _groups(ids: Tensor, max_numbers: int) -> Iterator[Tensor]:
    """Yield the positions of repeated tokens, (t, c): one row per token, padded with −1 at the end.

    Tokens with similar counts share a group, so padding at most doubles the pairs.

    >>> import torch
    >>> from regard.inspection.measures.gathered import _groups
    >>> list(_groups(torch.tensor([7, 5, 7, 7, 9, 5]), 100))
    [tensor([[1, 5]]), tensor([[ 0,  2,  3, -1]])]
    """
    _, token, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    order = torch.argsort(token, stable=True)
    first = counts.cumsum(0) - counts
    size = 2
    while size < 2 * int(counts.max()):
        chosen = ((counts > size // 2) & (counts <= size) & (counts > 1)).nonzero().flatten()
        steps = torch.arange(size, device=ids.device)
        for part in chosen.split(max(max_numbers // (size * size), 1)):
            index = (first[part, None] + steps).clamp(max=len(order) - 1)
            yield torch.where(steps < counts[part, None], order[index], -1)
        size *= 2


def _split(shape: torch.Size, lead: int, width: int) -> Iterator[slice]:
    """Divide the rows of a group so that neither its keys nor its pairs exceed the budget."""
    tokens, count = shape
    step = max(_CELLS // max(tokens * lead * max(count, width), 1), 1)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def _numel(lead: tuple[int, ...]) -> int:
    return int(torch.Size(lead).numel())
