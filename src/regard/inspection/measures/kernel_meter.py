"""Head measures of lazy weights in one pass of the kernels, in about twice the time of `entropy()` or less.

Each measure is a sum of weights over a set of keys: an interval around the row's own position, or the keys
with a certain token. The kernel adds a weight to all sets that contain its key, so the time does not depend
on how often the tokens of a text repeat.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from regard._util import interrupt
from regard.inspection.measures.head_meters import (
    DORMANT,
    LARGEST,
    MATCHES,
    OFFSETS,
    SINK,
    STREAMING,
    BlockMeter,
    TokenMatches,
    sum_counted,
)
from regard.mechanism.call.problem import Tile
from regard.mechanism.weights.reader import Reader
from regard.mechanism.weights.weights import Weights

_TOTALS = ("total", "entropy", "distance", "largest")  # the first columns of `fused.sums`


class KernelMeter:
    """Computes head measures of lazy weights with the kernels."""

    def __init__(self, meter: BlockMeter, weights: Weights) -> None:
        self.meter, self.weights = meter, weights
        self.centers = meter.centers(torch.arange(meter.queries, device=weights.device))
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor] = {}

    def measure(self) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
        """Return the sum and the number of counted rows for each measure, (…, g, r).

        Returns None if the kernels do not support the weights, or if the weights are not finite.
        """
        reader = self.weights.reader()
        if reader is None:
            return None
        problem = reader.problem
        outer = tuple(slice(0, n) for n in problem.lead()[:-1])
        spans = self._spans(Tile(outer, slice(0, problem.queries), slice(0, problem.keys)))
        ids = self.meter.ids_of(Tile(outer, slice(0, problem.queries), slice(0, problem.keys)))
        tokens = None if ids is None or self.meter.cross else TokenMatches(ids, self.centers)
        columns = self._read(reader, spans, tokens)
        if columns is None:
            return None
        self._add_all(dict(zip(_names(spans, tokens), columns.unbind(-1), strict=True)), tokens)
        return self.sums, self.counts

    def _spans(self, whole: Tile) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the start and stop of the keys that each measure sums over, broadcast to (…, q)."""
        first = self.meter.first_key(whole, self.weights.device).squeeze(-1)  # … 1
        spans = {"first": (first, first + 1)}
        if self.meter.cross:
            low, high = self.centers - self.meter.radius, self.centers + self.meter.radius
            return spans | {"diagonal": (low.ceil().long(), high.floor().long() + 1)}
        for name, offset in OFFSETS.items():
            spans[name] = self.centers + offset, self.centers + offset + 1
        if self.meter.streams:
            recent = self.centers - STREAMING[1] + 1
            spans["recent"] = recent, self.centers + 1
            spans["initial"] = first, torch.minimum(first + STREAMING[0], recent)
        return spans

    def _read(
        self, reader: Reader, spans: dict[str, tuple[Tensor, Tensor]], tokens: "TokenMatches | None"
    ) -> Tensor | None:
        """Run the kernel and return its sums, (…, g, r, q, columns)."""
        problem = reader.problem
        axes, queries = len(problem.lead()), problem.queries
        ends = torch.broadcast_tensors(*(end for span in spans.values() for end in span), self.centers)[:-1]
        tensors = {"span": torch.stack(ends, -1), "center": self.centers.float()[:, None]}
        if tokens is not None:
            batch = (len(tokens.ranks), *(1,) * (axes - 1))
            tensors["token"] = tokens.of_rows().reshape(*batch, queries, -1)
            tensors["key_token"] = tokens.of_keys().reshape(*batch, problem.keys, -1)
        tensors = {name: t.reshape((1,) * (axes + 2 - t.dim()) + t.shape) for name, t in tensors.items()}
        problem = problem.with_tensors({**problem.tensors, **tensors})
        parts = [part.sums() for part in _bands(Reader(problem, reader.rows_per_key_head))]
        finite = [part for part in parts if part is not None]
        return torch.cat(finite, -2) if len(finite) == len(parts) else None

    def _add_all(self, columns: dict[str, Tensor], tokens: "TokenMatches | None") -> None:
        total, first, keys = columns["total"], columns["first"], self.meter.keys
        attends = total != 0
        self._add("first", first, attends)
        self._add("sink", first > SINK, attends)
        self._add("dormant", first > DORMANT, attends)
        if "diagonal" in columns:
            self._add("diagonal", columns["diagonal"], attends)
        for name, offset in OFFSETS.items() if not self.meter.cross else ():
            inside = (self.centers + offset >= 0) & (self.centers + offset < keys)
            self._add(name, columns[name], attends & inside)
        for name, matched in tokens.matched().items() if tokens is not None else ():
            counted = attends & matched.reshape(len(matched), *(1,) * (attends.dim() - 2), -1)
            self._add(name, columns[name], counted)
            if name == "copying":
                retrieved = columns["largest copying"] >= columns["largest"] * LARGEST
                self._add("retrieval", retrieved, counted)
        if "recent" in columns:
            self._add("streaming", columns["recent"] + columns["initial"], attends)
        self.sums["distance"] = columns["distance"].sum(-1, dtype=torch.float64).cpu()
        self.counts["distance"] = total.sum(-1, dtype=torch.float64).cpu()
        self._add("entropy", columns["entropy"].nan_to_num(0, 0, 0).clamp(min=0), attends)

    def _add(self, name: str, values: Tensor, counted: Tensor) -> None:
        self.sums[name], self.counts[name] = (x.cpu() for x in sum_counted(values, counted))


def _names(spans: dict[str, tuple[Tensor, Tensor]], tokens: TokenMatches | None) -> list[str]:
    matches = () if tokens is None else MATCHES
    return [*_TOTALS, *spans, *(part for name in matches for part in (name, f"largest {name}"))]


def _bands(reader: Reader) -> Iterator[Reader]:
    """Divide the rows into bands, so that the computation can be interrupted."""
    problem = reader.problem
    *outer, _ = lead = problem.lead()
    for rows in interrupt.bands(problem.queries, math.prod(lead) * problem.keys):
        tile = Tile(tuple(slice(0, n) for n in outer), rows, slice(0, problem.keys))
        yield Reader(problem.part(tile), reader.rows_per_key_head)
