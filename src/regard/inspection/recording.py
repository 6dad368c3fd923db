"""Recordings of `watch`: the weights of every attention layer, and the tokens they belong to."""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from regard._util.text import type_name
from regard.errors import ArgumentError
from regard.inspection import display
from regard.inspection.capture import AttentionKind
from regard.inspection.measures.record import CallRecord, NoValues, require_record
from regard.inspection.statistics import head_statistics, is_causal
from regard.mechanism.weights.matrix import Weights
from regard.mechanism.weights.rollout import rollout
from regard.models.layers.attention import is_cross_attention

if TYPE_CHECKING:
    from regard.inspection.measures.gradients import Gradients
    from regard.inspection.measures.norms import Norms

_MEASURES = (
    "entropy", "distance", "first", "previous", "same", "next", "induction", "duplicate", "copying",
    "retrieval", "sink", "dormant", "streaming",
)  # fmt: skip


# Tokens


class CallTokens(NamedTuple):
    """The token ids of one call, each (b, n). target: the decoder's input."""

    source: Tensor | None
    target: Tensor | None = None


def call_tokens(args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallTokens:
    """Find the token ids among the arguments of a model."""
    positional = [arg for arg in args if _is_ids(arg)][:2]
    source = kwargs.get("input_ids", positional.pop(0) if positional else None)
    target = kwargs.get("decoder_input_ids", positional.pop(0) if positional else None)
    return CallTokens(_copy(source), _copy(target))


def _is_ids(x: Any) -> bool:
    integer = isinstance(x, Tensor) and not x.is_floating_point() and x.dtype is not torch.bool
    return integer and x.dim() in (1, 2)


def _copy(x: Any) -> Tensor | None:
    return torch.atleast_2d(x.detach().cpu()).clone() if _is_ids(x) else None


class RecordedTexts:
    """The token ids of each call, and the tokens if known.

    tokenizer: an object with `convert_ids_to_tokens`, or a function from a list of ids to a list of tokens.
    tokens: the tokens of one text, or of each text in the batch.
    """

    def __init__(self, tokenizer: Any = None, tokens: Sequence[Any] | None = None) -> None:
        convert = getattr(tokenizer, "convert_ids_to_tokens", tokenizer)
        if convert is not None and not callable(convert):
            raise ArgumentError(
                f"watch(tokenizer=…) got {type_name(tokenizer)}; pass an object with a method "
                "convert_ids_to_tokens, or a function from a list of ids to a list of tokens."
            )
        self._convert = convert
        self._tokens: list[list[str]] | None = None
        if tokens is not None:
            is_batch = bool(tokens) and not isinstance(tokens[0], str)
            self._tokens = [[str(token) for token in text] for text in (tokens if is_batch else [tokens])]
        self.calls: list[CallTokens] = []
        self.loaded: list[dict[str, list[list[str]]]] = []  # tokens of a loaded recording, by call and side

    def ids(self, call: int, side: str) -> Tensor | None:
        """Return the token ids of one call; side: "source" or "target"."""
        if not self.calls:
            return None
        return getattr(self.calls[min(call, len(self.calls) - 1)], side)

    def tokens(self, call: int, side: str, row: int) -> list[str] | None:
        """Return the tokens of one row of the batch."""
        if self.loaded:
            rows = self.loaded[min(call, len(self.loaded) - 1)].get(side)
            return rows[row % len(rows)] if rows else None
        if self._tokens is not None and side == "source":
            return self._tokens[row % len(self._tokens)]
        ids = self.ids(call, side)
        if ids is None or self._convert is None:
            return None
        return [str(token) for token in self._convert(ids[row % len(ids)].tolist())]


# Weights


class UnavailableWeights(NamedTuple):
    """The reason why a call has no weights."""

    reason: str


def _weights(entry: "Weights | UnavailableWeights") -> Weights:
    if isinstance(entry, UnavailableWeights):
        raise ArgumentError(entry.reason)
    return entry


def _entry(name: str, call: int) -> str:
    """Return the name of an entry; call: 1 for the module's first call."""
    return name if call == 1 else f"{name}@{call}"


class Seen(Mapping[str, Weights]):
    """Attention weights recorded by `watch`, in order; indexed by module name or by number, as in seen[0].

    If a module computes attention several times in the block, the entries are "decoder.attention",
    "decoder.attention@2", …, in this order. The model may have been called several times, or may use the
    module several times per call. Hugging Face's `generate` gives one entry per layer, over the prompt and
    the generated tokens.

    >>> import torch, regard
    >>> layer = regard.models.MultiHeadAttention(16, 4)
    >>> with regard.watch(torch.nn.Sequential(layer)) as seen:
    ...     output = layer(torch.randn(5, 16))
    >>> seen
    Seen(0: Weights(4 × 5 × 5))
    >>> seen["0"] is seen[0] is seen[-1]
    True
    """

    def __init__(self, texts: RecordedTexts | None = None) -> None:
        self._weights: dict[str, Weights | UnavailableWeights] = {}
        self._calls: dict[str, list[Weights | UnavailableWeights]] = {}
        self._kinds: dict[str, AttentionKind] = {}
        self._modules: dict[str, tuple[str, int]] = {}  # module name and number of the model's call
        self._records: dict[str, CallRecord | NoValues] = {}  # values and gradients, by entry
        self._empty = "nothing yet: call the model inside the with block"
        self._unseen = ""  # attention that ran but could not be recorded
        self._texts = RecordedTexts() if texts is None else texts

    def add(
        self, name: str, weights: Weights, kind: AttentionKind | None = None, run: int | None = None
    ) -> None:
        """Record a call of a module. By default, `kind` is inferred from the name.

        run: number of the model's call that it belongs to. Default: each call of the model uses it once.
        """
        self._add(name, weights, kind, run)

    def add_record(self, name: str, record: CallRecord | NoValues) -> None:
        """Add values and gradients to the last call of a module."""
        self._records[_entry(name, len(self._calls[name]))] = record

    def add_error(
        self, name: str, reason: str, kind: AttentionKind | None = None, run: int | None = None
    ) -> None:
        """Record a call whose weights are not available; reading them raises an ArgumentError."""
        self._add(name, UnavailableWeights(reason), kind, run)

    def _add(
        self, name: str, weights: "Weights | UnavailableWeights", kind: AttentionKind | None, run: int | None
    ) -> None:
        calls = self._calls.setdefault(name, [])
        calls.append(weights)
        entry = _entry(name, len(calls))
        self._weights[entry] = weights
        self._modules[entry] = name, len(calls) - 1 if run is None else run
        self._kinds[entry] = kind or ("cross" if is_cross_attention(name) else "self")

    # Single layers

    def __getitem__(self, name: str | int) -> Weights:
        return _weights(self._weights[self.name(name)])

    def name(self, layer: str | int) -> str:
        """Return the name of a layer, given its name or number.

        >>> import torch, regard
        >>> layer = regard.models.SelfAttention()
        >>> with regard.watch(torch.nn.Sequential(layer, layer)) as seen:
        ...     output = layer(layer(torch.eye(3)))
        >>> seen.name(-1)
        '0@2'
        """
        if isinstance(layer, int):
            if not self._weights:
                raise IndexError(f"seen[{layer}] is out of range for 0 layers: {self._empty}.")
            if not -len(self) <= layer < len(self):
                raise IndexError(
                    f"seen[{layer}] is out of range for {len(self)} layers, 0 to {len(self) - 1}."
                )
            return list(self._weights)[layer]
        if layer not in self._weights:
            raise KeyError(self._missing(layer))
        return layer

    def calls(self, name: str) -> list[Weights]:
        """Return the weights of every call of a module."""
        if name not in self._calls:
            raise KeyError(self._missing(name))
        return [_weights(call) for call in self._calls[name]]

    def joined(self, name: str) -> Tensor:
        """Concatenate the weights of every call of a module along the queries, dense: (…, q, k).

        Use it for a decoder that runs step by step. If the number of keys grows, as with a cache, missing
        weights are zero. The steps of Hugging Face's `generate` are already joined.
        """
        calls = [weights.dense() for weights in self.calls(name)]
        keys = max(weights.shape[-1] for weights in calls)
        return torch.cat([nn.functional.pad(w, (0, keys - w.shape[-1])) for w in calls], -2)

    def kind(self, name: str | int) -> AttentionKind:
        """Return "self" or "cross": whether a layer attends to its own sequence or to another one.

        >>> import torch, regard
        >>> model = torch.nn.TransformerDecoderLayer(8, 2)
        >>> with regard.watch(model) as seen:
        ...     output = model(torch.randn(3, 1, 8), torch.randn(5, 1, 8))
        >>> {name: seen.kind(name) for name in seen}
        {'self_attn': 'self', 'multihead_attn': 'cross'}
        """
        return self._kinds[self.name(name)]

    def causal(self, name: str | int) -> bool:
        """Return whether a layer is causal self-attention."""
        return self.kind(name) == "self" and is_causal(self[name])

    def storage(self, name: str | int) -> Literal["lazy", "dense"]:
        """Return how a layer is stored: "lazy" as query and key, "dense" as a matrix of weights.

        Layers are dense if their weights cannot be computed from query, key and masks alone.

        >>> import torch, regard
        >>> layer = regard.models.SelfAttention()
        >>> with regard.watch(layer) as seen:
        ...     output = layer(torch.eye(3))
        >>> seen.storage(0)
        'lazy'
        """
        return "dense" if self[name].problem["query"].shape[-1] == 0 else "lazy"

    @property
    def unseen(self) -> str:
        """The attention that ran but was not recorded, and why; empty if everything was recorded."""
        return self._unseen

    # Tokens

    @property
    def tokens(self) -> list[str] | None:
        """The tokens of the first input of the model, if known."""
        return self._texts.tokens(0, "source", 0)

    def texts(self, name: str | int, row: int = 0) -> tuple[list[str] | None, list[str] | None]:
        """Return the tokens of a layer's queries and keys, for one row of the batch.

        >>> import torch, regard
        >>> model = regard.models.LanguageModel(
        ...     9, regard.models.TransformerConfig(width=8, heads=2, layers=1)
        ... )
        >>> with regard.watch(model, tokenizer=lambda ids: [f"word {i}" for i in ids]) as seen:
        ...     logits = model(torch.tensor([[5, 6]]))
        >>> seen.texts(0)
        (['word 5', 'word 6'], ['word 5', 'word 6'])
        """
        name = self.name(name)
        call = self._modules[name][1]
        texts = []
        for side, size in zip(self._sides(name), self[name].shape[-2:], strict=True):
            tokens = self._texts.tokens(call, side, row)
            texts.append(tokens if tokens is not None and len(tokens) == size else None)
        return texts[0], texts[1]

    def _sides(self, name: str) -> tuple[str, str]:
        """Return "source" or "target" for the queries and for the keys."""
        module, call = self._modules[name]
        decoded = "target" if self._texts.ids(call, "target") is not None else "source"
        if self.kind(name) == "cross":
            return decoded, "source"
        side = decoded if "decoder" in module or "encoder" not in module else "source"
        return side, side

    def ids(self, name: str | int) -> Tensor | None:
        """Return the token ids of a layer's keys, (b, k), if known."""
        name = self.name(name)
        ids = self._texts.ids(self._modules[name][1], self._sides(name)[1])
        return ids if ids is not None and ids.shape[-1] == self[name].shape[-1] else None

    # All layers

    def heads(self, *, frame: bool | None = None) -> Any:
        """Return the statistics of every head, one row per head.

        Returns a pandas DataFrame if pandas is installed, otherwise a list of dictionaries. `frame` overrides
        this choice.

        layer, head: name of the layer and number of the head. label: what dominates, or "broad" or "mixed".
        entropy: mean row entropy in nats.
        distance: mean distance in tokens; in cross-attention, from the diagonal.
        first, previous, same, next: mean weight on the first key, and on the previous, same and next token.
        duplicate: mean weight on earlier occurrences of the query's token.
        induction: mean weight on the tokens after earlier occurrences of the query's token.
        copying: mean weight on earlier occurrences of the token that follows the query.
        retrieval: fraction of rows whose largest weight is on such an occurrence (Wu et al. 2024).
        sink, dormant: fraction of rows with a weight above 0.3, and above 0.9, on the first key.
        streaming: mean weight on the first 4 and the last 64 keys, if causal and longer than 136 tokens.
        Measures that do not apply are NaN. `regard.inspection.statistics` cites the papers.

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
        """Return how much each span of tokens reads from each other span, one row per head and pair of spans.

        weight: the weight of the span `queries` on the span `keys`, summed over the keys and averaged over
        the queries. What a span read is in its rows as `queries`; what read it, in its rows as `keys`. One
        pass over each layer, in linear memory.

        spans: names and (start, stop), or slices. In cross-attention they select keys only: `queries` is
            "(all)". frame: as in `heads`.

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

        See `regard.inspection.measures.key_scores`: method: "h2o", "snapkv" or "tova"; options of the method.

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
        """Compute `regard.rollout`: how much each input token contributes to positions of the last layer.

        If there are several stacks (encoder and decoder) or calls, only the last stack and call are used.
        """
        return rollout([self[name] for name in self._last_stack("rollout")], queries, residual=residual)

    def _last_stack(self, function: str) -> list[str]:
        """Return the self-attention layers of the last stack and call."""
        names = [name for name in self if self.kind(name) == "self"]
        if not names:
            raise ArgumentError(f"{function} needs self-attention; {self!r} has none.")

        def stack_and_run(name: str) -> tuple[str, int]:
            """Return the stack and the number of the model's call; a call may use a module several times."""
            module, run = self._modules[name]
            return re.split(r"\d", module)[0], run

        return [name for name in names if stack_and_run(name) == stack_and_run(names[-1])]

    def norms(self, *, project: bool = True) -> "dict[str, Norms]":
        """Return ‖α f(x)‖ for each layer: the norm of the vector that each key adds to each query, lazy.

        Requires `watch(model, values=True)`. Unlike weights, norms are small for keys whose value is close to
        zero, such as sinks (Kobayashi et al. 2020).

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
        """Return the gradient of the weights of each layer, dA = dO · Vᵀ, lazy.

        Requires `watch(model, gradients=True)` and a backward pass, inside or after the block. Several
        backward passes add up, as in `Tensor.grad`.

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
        Requires `watch(model, gradients=True)` and a backward pass. Memory is linear in the tokens.

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
        moved._empty, moved._unseen = self._empty, self._unseen
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
        from regard.inspection import recording_files

        return recording_files.save(self, folder)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> "Seen":
        """Read a recording written by `save`."""
        from regard.inspection import recording_files

        return recording_files.load(cls, folder)

    # Display

    def show(self, *, title: str = "") -> Any:
        """Show all layers in a notebook widget, or outside notebooks in the browser.

        Returns the widget, or the path of the page.

        >>> import regard
        >>> def look(seen: regard.Seen) -> None:
        ...     seen.show(title="what the model looked at")
        """
        return display.show(self, title)

    def to_html(self, path: str | os.PathLike[str], *, title: str = "") -> Path:
        """Write an interactive page of all layers, as a single file that opens in any browser.

        >>> import tempfile, torch, regard
        >>> layer = regard.models.SelfAttention()
        >>> with regard.watch(layer, tokens=["dogs", "bark", "loudly"]) as seen:
        ...     output = layer(torch.eye(3))
        >>> seen.to_html(tempfile.mkdtemp() + "/seen.html").name
        'seen.html'
        """
        return display.to_html(self, path, title)

    # Mapping

    def _missing(self, name: str) -> str:
        unseen = f" Not recorded: {self._unseen}." if self._unseen and self._weights else ""
        return f"{name!r} was not recorded. Recorded: {', '.join(self._weights) or self._empty}.{unseen}"

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def __repr__(self) -> str:
        lines = []
        for name, weights in self._weights.items():
            text = "not available"
            if isinstance(weights, Weights):
                text = f"Weights({' × '.join(map(str, weights.shape))})"
            lines.append(f"{name or '(the model)'}: {text}")
        if self._unseen:
            lines.append(f"not recorded: {self._unseen}")
        return f"Seen({', '.join(lines)})" if len(lines) < 2 else "Seen(\n  " + ",\n  ".join(lines) + ",\n)"


def _table(rows: list[dict[str, Any]], columns: list[str], frame: bool | None) -> Any:
    """Return a pandas DataFrame if wanted and possible, otherwise the rows."""
    if frame is False or (frame is None and find_spec("pandas") is None):
        return rows
    return import_module("pandas").DataFrame(rows, columns=columns)
