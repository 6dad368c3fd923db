"""Recordings of `watch`: the weights of every attention layer, and the tokens they belong to."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard._util.name_hints import hint_arguments, unknown_attribute
from regard.errors import ArgumentError
from regard.inspection import display
from regard.inspection.measures.call_record import CallRecord, require_record
from regard.inspection.measures.head_statistics import head_statistics
from regard.inspection.recordings.layers import RecordedLayers, UnavailableWeights
from regard.mechanism.weights.rollout import rollout

if TYPE_CHECKING:
    from regard.inspection.measures.gradients import Gradients
    from regard.inspection.measures.norms import Norms

_MEASURES = (
    "entropy", "distance", "first", "previous", "same", "next", "induction", "duplicate", "copying",
    "retrieval", "sink", "dormant", "streaming",
)  # fmt: skip


class Seen(RecordedLayers):
    """Attention weights recorded by `watch`, in order; indexed by module name or by number, as in seen[0].

    If a module computes attention several times in the block, because the model is called several times or
    uses the module several times per call, its entries are "decoder.attention", "decoder.attention@2", …, in
    call order. Hugging Face's `generate` gives one entry per layer, over the prompt and the generated tokens.

    >>> import torch, regard
    >>> layer = regard.models.MultiHeadAttention(16, 4)
    >>> with regard.watch(torch.nn.Sequential(layer)) as seen:
    ...     output = layer(torch.randn(5, 16))
    >>> seen
    Seen(0: Weights(4 × 5 × 5))
    >>> seen["0"] is seen[0] is seen[-1]
    True
    """

    # All layers

    def __getattr__(self, name: str) -> Any:
        raise unknown_attribute("Seen", name, dir(type(self)))

    def heads(self, *, frame: bool | None = None) -> Any:
        """Return the statistics of every head, one row per head.

        Returns a pandas DataFrame if pandas is installed, otherwise a list of dictionaries. `frame` overrides
        this choice.

        layer, head: layer name and head number.
        label: the dominant kind of key; otherwise "broad" or "mixed".
        entropy: mean row entropy in nats.
        distance: mean distance of the keys in tokens; in cross-attention, their distance from the diagonal.
        first, previous, same, next: mean weight on the first key, and on the previous, same and next token.
        duplicate: mean weight on earlier occurrences of the query's token.
        induction: mean weight on the tokens after earlier occurrences of the query's token.
        copying: mean weight on earlier occurrences of the token that follows the query.
        retrieval: fraction of rows whose largest weight is on such an occurrence (Wu et al. 2024).
        sink, dormant: fraction of rows whose weight on the first key is above 0.3 (sink) or 0.9 (dormant).
        streaming: mean weight on the first 4 and the last 64 keys, in causal layers with over 136 tokens.
        Measures that do not apply are NaN. `regard.inspection.measures.head_statistics` cites the papers.

        >>> import torch, regard
        >>> layer = regard.models.SelfAttention()
        >>> with regard.watch(layer) as seen:
        ...     output = layer(torch.eye(3), mask=regard.Causal())
        >>> [round(seen.heads(frame=False)[0][column], 2) for column in ("entropy", "first", "previous")]
        [0.57, 0.54, 0.31]
        """
        rows = []
        for name in self:
            heads = head_statistics(self[name], cross=self.kind(name) == "cross", ids=self.ids(name))
            for number, head in enumerate(heads):
                measures = {measure: head.measures.get(measure, math.nan) for measure in _MEASURES}
                rows.append({"layer": name, "head": number, "label": head.label, **measures})
        return _table(rows, ["layer", "head", "label", *_MEASURES], frame)

    def spans(self, spans: "Mapping[str, tuple[int, int] | slice]", *, frame: bool | None = None) -> Any:
        """Return how much each span of tokens attends to each other span, one row per head and pair of spans.

        weight: the weight of the span `queries` on the span `keys`, summed over the keys and averaged over
        the queries. Rows with a span as `queries` show what it attends to; rows with it as `keys` show which
        spans attend to it. This takes one pass over each layer, in linear memory.

        spans: maps names to (start, stop) or slices. In cross-attention they select only keys, and `queries`
            is "(all)". frame: as in `heads`.

        >>> import torch, regard
        >>> layer = regard.models.SelfAttention()
        >>> with regard.watch(layer) as seen:
        ...     output = layer(torch.eye(4), mask=regard.Causal())
        >>> table = seen.spans({"question": (0, 1), "answer": (1, 4)}, frame=False)
        >>> [(row["queries"], row["keys"], round(row["weight"], 2)) for row in table[:3]]
        [('question', 'question', 1.0), ('question', 'answer', 0.0), ('answer', 'question', 0.3)]
        """
        from regard.inspection.measures.spans import span_rows

        rows = [
            {"layer": name, **row}
            for name in self
            for row in span_rows(self[name], spans, cross=self.kind(name) == "cross", layer=name)
        ]
        return _table(rows, ["layer", "head", "queries", "keys", "weight"], frame)

    def key_scores(self, method: str = "h2o", **options: Any) -> dict[str, Tensor]:
        """Return a score for each cached key of each self-attention layer, (…, g, k), for cache eviction.

        method: "h2o", "snapkv" or "tova". options: keyword arguments of `regard.inspection.key_scores`.

        >>> import torch, regard
        >>> layer = regard.models.MultiHeadAttention(8, 4, key_heads=2)
        >>> with regard.watch(layer) as seen:
        ...     output = layer(torch.randn(6, 8), mask=regard.Causal())
        >>> seen.key_scores("tova")[""].shape
        torch.Size([2, 6])
        """
        from regard.inspection.measures.key_scores import key_scores

        return {name: key_scores(self[name], method, **options) for name in self if self.kind(name) == "self"}

    def rollout(
        self, queries: int | Sequence[int] | Tensor | None = None, *, residual: float = 0.5
    ) -> Tensor:
        """Compute `regard.rollout`: how much each input token contributes to positions in the last layer.

        If there are several stacks (encoder and decoder) or calls, only the last stack and call are used.
        """
        return rollout([self[name] for name in self._last_stack("rollout")], queries, residual=residual)

    def _last_stack(self, function: str) -> list[str]:
        """Return the self-attention layers of the last stack and call."""
        names = [name for name in self if self.kind(name) == "self"]
        if not names:
            raise ArgumentError(f"{function} needs self-attention; {self!r} has none.")

        def stack_and_run(name: str) -> tuple[str, int]:
            """Return the stack of an entry, and the number of the model call that it belongs to."""
            module, run = self._modules[name]
            return re.split(r"\d", module)[0], run

        return [name for name in names if stack_and_run(name) == stack_and_run(names[-1])]

    def norms(self, *, project: bool = True) -> "dict[str, Norms]":
        """Return ‖α f(x)‖ for each layer: the norm of the vector that each key adds to each query.

        The matrices are lazy. Requires `watch(model, values=True)`. Unlike weights, norms are small for keys
        whose value is close to zero, such as sinks (Kobayashi et al. 2020).

        project: apply the output projection of each head, as the paper does; otherwise use the values alone.

        >>> import torch, regard
        >>> layer = regard.models.MultiHeadAttention(8, 2)
        >>> with regard.watch(layer, values=True) as seen:
        ...     output = layer(torch.randn(5, 8))
        >>> seen.norms()[""].topk(1).indices.shape
        torch.Size([2, 5, 1])
        """
        from regard.inspection.measures.norms import Norms

        return {
            name: Norms(self[name], self._record(name, "norms", "values"), project=project) for name in self
        }

    def gradients(self) -> "dict[str, Gradients]":
        """Return the gradient of the weights of each layer, dA = dO · Vᵀ, as lazy matrices.

        Requires `watch(model, gradients=True)` and a backward pass, inside or after the block. Gradients
        accumulate over backward passes, as in `Tensor.grad`.

        >>> import torch, regard
        >>> layer = regard.models.MultiHeadAttention(8, 2)
        >>> with regard.watch(layer, gradients=True) as seen:
        ...     loss = layer(torch.randn(5, 8)).square().sum()
        >>> loss.backward()
        >>> seen.gradients()[""].times_weights()
        WeightProduct(2 × 5 × 5)
        """
        from regard.inspection.measures.gradients import Gradients

        return {name: Gradients.of(self[name], self._record(name, "gradients", "gradients")) for name in self}

    def relevance(self, queries: int | Sequence[int] | Tensor | None = None) -> Tensor:
        """Compute how much each input token matters for the loss, from gradient × weight of all layers.

        Rollout of the positive part of gradient × weight: R ← R + Ā R (Chefer et al. 2021, eqs. 5 and 6).
        Requires `watch(model, gradients=True)` and a backward pass. Memory is linear in the number of tokens.

        queries: positions in the last layer, as in `rollout`; None for the mean over all positions.

        >>> import torch, regard
        >>> layer = regard.models.MultiHeadAttention(8, 2)
        >>> with regard.watch(layer, gradients=True) as seen:
        ...     layer(torch.randn(5, 8))[0].sum().backward()
        >>> seen.relevance(queries=0).shape
        torch.Size([5])
        """
        from regard.inspection.measures.gradients import relevance

        gradients = self.gradients()
        return relevance([gradients[name].times_weights() for name in self._last_stack("relevance")], queries)

    def _record(self, name: str, function: str, option: str) -> CallRecord:
        return require_record(self._records.get(name), name, function, option)

    def to(self, device: torch.device | str) -> "Seen":
        """Return the recording on another device."""
        moved = type(self)(self._texts)
        for entry, (name, run) in self._modules.items():
            weights = self._weights[entry]
            weights = weights if isinstance(weights, UnavailableWeights) else weights.to(device)
            moved._add(name, weights, self._kinds[entry], run)
        moved._records = {entry: record.to(device) for entry, record in self._records.items()}
        moved._empty, moved._unseen, moved._windowed = self._empty, self._unseen, dict(self._windowed)
        return moved

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the recording to a folder, as safetensors and JSON. Loading it does not require the model.

        >>> import tempfile, torch, regard
        >>> layer = regard.models.SelfAttention()
        >>> with regard.watch(layer) as seen:
        ...     output = layer(torch.eye(3))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     again = regard.Seen.load(seen.save(folder + "/recording"))
        >>> again
        Seen((the model): Weights(1 × 3 × 3))
        """
        from regard.inspection.recordings import files

        return files.save(self, folder)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> "Seen":
        """Read a recording written by `save`."""
        from regard.inspection.recordings import files

        return files.load(cls, folder)

    # Display

    @hint_arguments
    def show(self, *, title: str = "") -> Any:
        """Show all layers in a notebook widget, or in the browser outside notebooks.

        Returns the widget, or the path of the page.

        >>> import regard
        >>> def look(seen: regard.Seen) -> None:
        ...     seen.show(title="what the model looked at")
        """
        return display.show(self, title)

    @hint_arguments
    def to_html(self, path: str | os.PathLike[str], *, title: str = "") -> Path:
        """Write the interactive view of all layers to one HTML file that opens in any browser.

        >>> import tempfile, torch, regard
        >>> layer = regard.models.SelfAttention()
        >>> with regard.watch(layer, tokens=["dogs", "bark", "loudly"]) as seen:
        ...     output = layer(torch.eye(3))
        >>> seen.to_html(tempfile.mkdtemp() + "/seen.html").name
        'seen.html'
        """
        return display.to_html(self, path, title)


def _table(rows: list[dict[str, Any]], columns: list[str], frame: bool | None) -> Any:
    """Return a pandas DataFrame, or the rows if `frame` is False or pandas is not installed."""
    if frame is False or (frame is None and find_spec("pandas") is None):
        return rows
    return import_module("pandas").DataFrame(rows, columns=columns)
