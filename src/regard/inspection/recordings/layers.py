"""The layers of a recording: their weights, names, kinds and tokens."""

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from regard._util.text import index_range
from regard.errors import ArgumentError
from regard.inspection.calls.capture import AttentionKind
from regard.inspection.calls.windows import WindowedLayer, Windows
from regard.inspection.measures.call_record import CallRecord, NoValues
from regard.inspection.measures.head_meters import is_causal
from regard.inspection.recordings.texts import RecordedTexts
from regard.mechanism.weights.weights import Weights
from regard.models.layers.attention import is_cross_attention


class UnavailableWeights(NamedTuple):
    """The reason why a call has no weights."""

    reason: str


def _weights(entry: "Weights | UnavailableWeights") -> Weights:
    if isinstance(entry, UnavailableWeights):
        raise ArgumentError(entry.reason)
    return entry


def _entry(name: str, call: int) -> str:
    """Return the name of an entry; `call` is 1 for the module's first call."""
    return name if call == 1 else f"{name}@{call}"


class RecordedLayers(Mapping[str, Weights]):
    """Weights by module name; the entries of further calls to a module are name@2, name@3, …"""

    def __init__(self, texts: RecordedTexts | None = None) -> None:
        self._weights: dict[str, Weights | UnavailableWeights] = {}
        self._calls: dict[str, list[Weights | UnavailableWeights]] = {}
        self._kinds: dict[str, AttentionKind] = {}
        self._modules: dict[str, tuple[str, int]] = {}  # by entry: module name and number of the model call
        self._records: dict[str, CallRecord | NoValues] = {}  # values and gradients, by entry
        self._windowed: dict[str, WindowedLayer] = {}  # layers with windows, by entry
        self._empty = "nothing yet. Call the model inside the with block"
        self._unseen = ""  # attention that ran but could not be recorded
        self._texts = RecordedTexts() if texts is None else texts

    def add(
        self, name: str, weights: Weights, kind: AttentionKind | None = None, run: int | None = None
    ) -> None:
        """Record a call to a module. By default, `kind` is inferred from the name.

        run: number of the model call that it belongs to. Default: each model call is assumed to run the
            module once.
        """
        self._add(name, weights, kind, run)

    def add_windows(self, name: str, layer: WindowedLayer) -> None:
        """Record a call to a module that divides its tokens into windows."""
        self._add(name, layer.weights(), layer.calls[0].kind, layer.run)
        self._windowed[_entry(name, len(self._calls[name]))] = layer

    def replace_windows(self, name: str, layer: WindowedLayer) -> None:
        """Update the last call to a module after further windows were added to it."""
        entry = _entry(name, len(self._calls[name]))
        self._calls[name][-1] = self._weights[entry] = layer.weights()

    def add_record(self, name: str, record: CallRecord | NoValues) -> None:
        """Add values and gradients to the record of the last call to a module."""
        self._records[_entry(name, len(self._calls[name]))] = record

    def add_error(
        self, name: str, reason: str, kind: AttentionKind | None = None, run: int | None = None
    ) -> None:
        """Record a call whose weights are not available; reading them raises an ArgumentError."""
        self._add(name, UnavailableWeights(reason), kind, run)

    def ends_with_error(self, name: str, reason: str, run: int) -> bool:
        """Return whether the last call to a module has this error and belongs to this run."""
        calls = self._calls.get(name, [])
        if not calls or calls[-1] != UnavailableWeights(reason):
            return False
        return self._modules[_entry(name, len(calls))][1] == run

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
                raise IndexError(f"seen[{layer}]: watch recorded {self._empty}.")
            if not -len(self) <= layer < len(self):
                raise IndexError(
                    f"seen[{layer}] is out of range: watch recorded {index_range('layer', len(self))}."
                )
            return list(self._weights)[layer]
        if isinstance(layer, slice):
            raise TypeError(
                "seen cannot be sliced; index one layer, such as seen[0], or use "
                "list(seen.values())[start:stop]."
            )
        if isinstance(layer, tuple):
            rest = ", ".join(map(str, layer[1:]))
            raise KeyError(f"seen takes one layer; for its heads, use seen[{layer[0]!r}][..., {rest}, :, :].")
        if layer not in self._weights:
            raise KeyError(self._missing(layer))
        return layer

    def calls(self, name: str) -> list[Weights]:
        """Return the weights of every call to a module."""
        if name not in self._calls:
            raise KeyError(self._missing(name))
        return [_weights(call) for call in self._calls[name]]

    def joined(self, name: str) -> Tensor:
        """Concatenate the weights of every call to a module along the queries, as a dense tensor (…, q, k).

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
        """Return "lazy" if a layer is stored as query and key, or "dense" if it is stored as a weight matrix.

        Layers are dense if their weights cannot be computed from query, key and masks alone.

        >>> import torch, regard
        >>> layer = regard.models.SelfAttention()
        >>> with regard.watch(layer) as seen:
        ...     output = layer(torch.eye(3))
        >>> seen.storage(0)
        'lazy'
        """
        layer = self._windowed.get(self.name(name))
        if layer is not None:
            return "dense" if any(call.dense for call in layer.calls) else "lazy"
        return "dense" if self[name].problem["query"].shape[-1] == 0 else "lazy"

    def windows(self, name: str | int) -> list[Windows]:
        """Return the weights of each window of a layer, before they are placed in the map of the image.

        seen[name] is the map over all tokens, (b, h, n, n). This method returns one `Windows` per window
        size: weights (windows, h, q, k), and the positions of queries and keys in the batch of images.

        >>> import torch, regard
        >>> class Windowed(torch.nn.Module):
        ...     def forward(self, x):
        ...         windows = torch.nn.functional.layer_norm(x, x.shape[-1:]).unflatten(1, (3, 2))
        ...         windows = windows.flatten(0, 1).unsqueeze(1)  # b·3 h 2 d
        ...         return torch.nn.functional.scaled_dot_product_attention(windows, windows, windows)
        >>> model = Windowed()
        >>> with regard.watch(model) as seen:
        ...     output = model(torch.randn(1, 6, 4))
        >>> seen[0].shape, seen.windows(0)[0].weights.shape
        (torch.Size([1, 1, 6, 6]), torch.Size([3, 1, 2, 2]))
        >>> seen.windows(0)[0].keys
        tensor([[0, 1],
                [2, 3],
                [4, 5]])
        """
        name = self.name(name)
        if name not in self._windowed:
            raise ArgumentError(
                f"windows: {name or 'the model'} has no recorded windows. If it divides its tokens into "
                "windows, their positions could not be traced, and each window is a batch entry of the "
                "weights."
            )
        device = self[name].device
        return [
            Windows(part.weights.to(device), part.queries.to(device), part.keys.to(device))
            for part in self._windowed[name].windows()
        ]

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

    # Mapping

    def _missing(self, name: str) -> str:
        if not self._weights:
            return f"{name!r} was not recorded: watch recorded {self._empty}."
        unseen = f" Not recorded: {self._unseen}." if self._unseen else ""
        return f"{name!r} was not recorded. Recorded: {', '.join(self._weights)}.{unseen}"

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
