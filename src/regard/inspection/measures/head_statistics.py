"""Head statistics (previous-token, induction, sink, …) and a label for each head.

entropy: mean row entropy in nats. normalized_entropy: entropy / log(keys); 1 for uniform weights ("broad").
first: mean weight on the first key that any query may attend to.
sink: fraction of rows with a weight above 0.3 on the first key (the ε of Gu et al. 2025).
dormant: fraction of rows with a weight above 0.9 on the first key, which attend to almost nothing else
    (Guo et al. 2024).

Self-attention has these measures:
previous, same, next: mean weight on the previous, same and next token.
distance: mean distance in tokens.

Given token ids, self-attention also has these measures:
duplicate: mean weight on earlier occurrences of the query's token (Wang et al. 2023, duplicate token heads).
induction: mean weight on the tokens after earlier occurrences (Olsson et al. 2022).
copying: mean weight on earlier occurrences of the token that follows the query: the token to copy.
retrieval: fraction of rows whose largest weight is on such an occurrence (Wu et al. 2024).

Causal self-attention over more than 136 tokens also has this measure:
streaming: mean weight on the first 4 keys and the last 64 up to the query (Xiao et al. 2024).

Cross-attention has these measures:
distance: mean distance from the diagonal, which maps the queries linearly to the keys.
diagonal: mean weight within 10% of the keys on either side of the diagonal.

Means and fractions are over the nonzero rows for which the measured key exists; they are NaN if there are
none.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard._util import interrupt
from regard.inspection.measures.head_meters import BlockMeter, has_heads, row_entropies
from regard.inspection.measures.kernel_meter import KernelMeter
from regard.mechanism.call.problem import Tile
from regard.mechanism.weights.weights import Weights

_DOMINANT = 0.4  # a kind of key with at least this mean weight decides the label
_UNIFORM = 0.85  # a head with at least this normalized entropy counts as broad
_CELLS = 2**20  # weights per block of a dense matrix
_LABELS = {
    "previous": "previous token",
    "next": "next token",
    "same": "same token",
    "first": "first token",
    "induction": "induction",
    "duplicate": "duplicate token",
}


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

    weights: (…, h, q, k), or (q, k) for one head. The measures are averaged over a batch.
    cross: whether queries and keys come from different texts.
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
    meter = BlockMeter(weights, cross, ids)
    if isinstance(weights, Weights):
        measured = KernelMeter(meter, weights).measure()
        if measured is not None:
            return _statistics(*measured, heads, keys, cross)
        weights.compute_tau()
    sums: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}
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
        sums["entropy"] = row_entropies(weights).nan_to_num(0, 0, 0).clamp(min=0).double().sum(-1).cpu()
    return _statistics(sums, counts, heads, keys, cross)


def _statistics(
    sums: dict[str, Tensor], counts: dict[str, Tensor], heads: int, keys: int, cross: bool
) -> list[HeadStatistics]:
    """Sum over the batch, divide the sums by the counts, and label the heads."""
    if not counts or not bool(counts["entropy"].any()):  # everything is masked
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
    # in short texts, even uniform weights pass the threshold: require 1.5 × the uniform weight
    uniform = 1 / keys
    if best == "first":  # causal uniform weights: 1 in the first row, 1/2 in the second, …
        uniform *= sum(1 / row for row in range(1, min(keys, 20) + 1))
    if known.get(best, 0.0) >= max(_DOMINANT, 1.5 * uniform):
        return _LABELS[best]
    return "broad" if broad else "mixed"


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
