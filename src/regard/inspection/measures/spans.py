"""Attention between spans of tokens, such as a question and its documents."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from regard._util.text import pluralize
from regard.errors import ArgumentError
from regard.mechanism.weights.weights import Weights

Spans = Mapping[str, tuple[int, int] | slice]


@torch.no_grad()
def span_rows(
    weights: Weights, spans: Spans, *, cross: bool = False, layer: str = ""
) -> Iterator[dict[str, Any]]:
    """Yield head, queries, keys and weight for each head and pair of spans, averaged over the batch.

    >>> import torch, regard
    >>> from regard.inspection.measures.spans import span_rows
    >>> x = torch.zeros(4, 2)
    >>> rows = span_rows(regard.attend(x, x, x)[1], {"a": (0, 1), "b": (1, 4)})
    >>> [row["weight"] for row in rows]
    [0.25, 0.75, 0.25, 0.75]
    """
    queries, keys = weights.shape[-2:]
    key_spans = {name: _resolve(name, span, keys, layer) for name, span in spans.items()}
    offset = keys - queries  # if earlier tokens were cached, the queries are the last tokens
    query_spans = {"(all)": slice(0, queries)}
    if not cross:
        moved = {n: slice(max(s.start - offset, 0), max(s.stop - offset, 0)) for n, s in key_spans.items()}
        query_spans = {name: span for name, span in moved.items() if span.start < span.stop}
    members = torch.zeros(keys, len(key_spans), dtype=weights.dtype, device=weights.device)
    for number, span in enumerate(key_spans.values()):
        members[span, number] = 1.0
    read = weights @ members  # … h q s
    heads = read.reshape(-1, *read.shape[-3:]).mean(0) if weights.has_heads else read.unsqueeze(0)
    for head, row in enumerate(heads):
        for query_name, span in query_spans.items():
            means = row[span].mean(0).tolist()
            for key_name, weight in zip(key_spans, means, strict=True):
                yield {"head": head, "queries": query_name, "keys": key_name, "weight": weight}


def _resolve(name: str, span: tuple[int, int] | slice, keys: int, layer: str) -> slice:
    if isinstance(span, slice):
        if span.step not in (None, 1):
            raise ArgumentError(f"spans: {name!r} is {span!r}; pass a slice without a step.")
        start, stop, _ = span.indices(keys)
    else:
        start, stop = span
    if not 0 <= start < stop <= keys:
        raise ArgumentError(
            f"spans: {name!r} is ({start}, {stop}), but {layer or 'the layer'} has {pluralize(keys, 'key')}. "
            f"Pass (start, stop) with 0 ≤ start < stop ≤ {keys}."
        )
    return slice(start, stop)
