"""Watch a model while it runs: the weights of every attention layer, by the name of its module."""

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, DTypeError
from regard.inspection import display, recording
from regard.inspection.capture import AttentionKind
from regard.inspection.layers import (
    Layers,
    LayerSelection,
    attends,
    clean,
    compiled,
    has_no_attention,
    is_cross_attention,
    own_attention,
)
from regard.inspection.texts import RecordedTexts
from regard.mechanism.rollout import rollout
from regard.mechanism.weights.matrix import Weights
from regard.models.layers.attention import watch_layers


class UnavailableWeights(NamedTuple):
    """Why a call has no weights."""

    reason: str


def _weights(entry: "Weights | UnavailableWeights") -> Weights:
    if isinstance(entry, UnavailableWeights):
        raise ArgumentError(entry.reason)
    return entry


class Seen(Mapping[str, Weights]):
    """The weights that `watch` recorded, in order, by the name of their module or by number: seen[0].

    If a module attends several times, its calls are "decoder.attention", "decoder.attention@2", ….
    Hugging Face's `generate` is one map per layer, over prompt and generated tokens.

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
        self._modules: dict[str, tuple[str, int]] = {}  # name of the module and number of the call
        self._empty = "nothing yet: call the model inside the with block"
        self._unseen = ""  # what ran but could not be recorded
        self._texts = RecordedTexts() if texts is None else texts

    def add(self, name: str, weights: Weights, kind: AttentionKind | None = None) -> None:
        """Record a call of a module. Without `kind`, its name decides."""
        self._add(name, weights, kind)

    def add_error(self, name: str, reason: str, kind: AttentionKind) -> None:
        """Record a call whose weights are not available; reading them raises an ArgumentError."""
        self._add(name, UnavailableWeights(reason), kind)

    def _add(self, name: str, weights: "Weights | UnavailableWeights", kind: AttentionKind | None) -> None:
        calls = self._calls.setdefault(name, [])
        calls.append(weights)
        entry = name if len(calls) == 1 else f"{name}@{len(calls)}"
        self._weights[entry] = weights
        self._modules[entry] = name, len(calls) - 1
        self._kinds[entry] = kind or ("cross" if is_cross_attention(name) else "self")

    # Single layers

    def __getitem__(self, name: str | int) -> Weights:
        return _weights(self._weights[self.name(name)])

    def name(self, layer: str | int) -> str:
        """Return the name of a layer, given by name or number.

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

        This joins a decoder that runs step by step. If steps have different numbers of keys, as with a cache,
        the missing ones are zero. Hugging Face's `generate` is joined already.
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
        return self.kind(name) == "self" and recording.is_causal(self[name])

    # Tokens

    @property
    def tokens(self) -> list[str] | None:
        """The tokens of the first text that the model read, if there is a tokenizer."""
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
        """Return the statistics of every head, one row each: a pandas frame if installed, or a list of dicts.

        layer, head: name of the layer and number of the head. entropy: mean row entropy in nats.
        distance: mean distance in tokens; in cross-attention, from the diagonal.
        first: mean weight on the first key. previous: mean weight on the previous token.
        induction: mean weight on the tokens after earlier occurrences of the query's token.
        Measures that do not apply are NaN.

        >>> import torch, regard
        >>> layer = regard.models.SelfAttention()
        >>> with regard.watch(layer) as seen:
        ...     output = layer(torch.eye(3), mask=regard.Causal())
        >>> [round(seen.heads(frame=False)[0][column], 2) for column in ("entropy", "first", "previous")]
        [0.57, 0.54, 0.31]
        """
        return recording.head_table(self, frame)

    def rollout(
        self, queries: int | Sequence[int] | Tensor | None = None, *, residual: float = 0.5
    ) -> Tensor:
        """Apply `regard.rollout`: how much each input token contributes to positions of the last layer.

        With an encoder and a decoder, or several calls, it uses the self-attention layers of the last one.
        """
        return rollout(recording.self_attention_stack(self), queries, residual=residual)

    def to(self, device: torch.device | str) -> "Seen":
        """Return the recording on another device."""
        moved = type(self)(self._texts)
        for entry, (name, _) in self._modules.items():
            weights = self._weights[entry]
            weights = weights if isinstance(weights, UnavailableWeights) else weights.to(device)
            moved._add(name, weights, self._kinds[entry])
        moved._empty, moved._unseen = self._empty, self._unseen
        return moved

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the recording to a folder, as safetensors and JSON. Reading it does not need the model.

        >>> import tempfile, torch, regard
        >>> layer = regard.models.SelfAttention()
        >>> with regard.watch(layer) as seen:
        ...     output = layer(torch.eye(3))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     again = regard.Seen.load(seen.save(folder + "/recording"))
        >>> again
        Seen((the model): Weights(1 × 3 × 3))
        """
        return recording.save(self, folder)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> "Seen":
        """Read a recording written by `save`."""
        return recording.load(cls, folder)

    # Display

    def show(self, *, title: str = "") -> Any:
        """Show all layers: a widget in a notebook; elsewhere a page in the browser, whose path is returned.

        >>> import regard
        >>> def look(seen: regard.Seen) -> None:
        ...     seen.show(title="what the model looked at")
        """
        return display.show(self, title)

    def to_html(self, path: str | os.PathLike[str], *, title: str = "") -> Path:
        """Write an interactive page of all layers: one file that opens in any browser.

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


@contextmanager
def watch(
    model: nn.Module,
    layers: Layers | None = None,
    *,
    heads: Sequence[int] | None = None,
    tokenizer: Any = None,
    tokens: Sequence[Any] | None = None,
) -> Iterator[Seen]:
    """Record the lazy weights of every attention layer of a model inside a `with` block.

    It sees regard's layers, torch's `nn.MultiheadAttention` and Transformer layers, calls of
    `torch.nn.functional.scaled_dot_product_attention`, and the attention interface of Hugging Face
    transformers, with any kernel. The model's outputs do not change by a bit, and the memory is linear in the
    length. Only calls in this block and this thread are recorded. The weights are those before dropout.

    layers: only these layers, by number (0 is the first, −1 the last), name or pattern: [0, −1], "decoder.*".
    heads: only these heads of each layer.
    tokenizer: converts token ids to tokens, for `Seen.texts` and the views.
    tokens: the tokens, if the model is not called with ids.

    >>> import torch, regard
    >>> model = torch.nn.TransformerEncoder(
    ...     torch.nn.TransformerEncoderLayer(16, 2, batch_first=True), 3
    ... ).eval()
    >>> with torch.no_grad(), regard.watch(model, layers=[0, -1]) as seen:
    ...     output = model(torch.randn(1, 5, 16))
    >>> list(seen)
    ['layers.0.self_attn', 'layers.2.self_attn']
    >>> seen[-1].shape
    torch.Size([1, 2, 5, 5])
    """
    from regard.inspection.recorder import Recorder

    if not isinstance(model, nn.Module):
        raise DTypeError(f"watch() got a {type(model).__name__}; pass a torch.nn.Module.")
    if has_no_attention(model):
        raise ArgumentError(
            f"watch() got a {type(model).__name__} without attention layers. It sees regard's and torch's "
            "layers, calls of scaled_dot_product_attention, and the attention interface of transformers."
        )
    selection, seen = LayerSelection(model, layers), Seen(RecordedTexts(tokenizer, tokens))
    recorder = Recorder(model, seen, selection, heads)
    with recorder.recording(), watch_layers(model, recorder.on_own_attention):
        yield seen
    unseen = _unseen_compiled(model, selection, seen) if recorder.ran else []
    if unseen:
        seen._unseen = _COMPILED.format(", ".join(unseen))
        seen._empty = f"nothing: {seen._unseen}"
    elif not seen and recorder.ran:
        seen._empty = _unseen_attention(model, layers)
    elif not seen and recorder.ran_elsewhere:
        seen._empty = _OTHER_THREAD
    if unseen or (not seen and (recorder.ran or recorder.ran_elsewhere)):
        message = seen._unseen if seen else seen._empty
        warnings.warn(f"{type(model).__name__}: {message}.", stacklevel=3)


_COMPILED = (
    "the attention in {} ran as compiled code, which watch cannot see. Run it uncompiled: "
    'with torch.compiler.set_stance("force_eager"), regard.watch(model) as seen: …'
)
_OTHER_THREAD = (
    "nothing: the model was called in another thread, and watch sees only its own. "
    "Open the block in the thread that calls the model"
)


def _unseen_compiled(model: nn.Module, selection: LayerSelection, seen: Seen) -> list[str]:
    """Return the outermost compiled modules with selected attention layers, none of them recorded."""
    names: list[str] = []
    for name, module in compiled(model).items():
        inner = (clean(f"{name}.{n}".strip(".")) for n, child in module.named_modules() if attends(child))
        selected = any(map(selection, inner))
        recorded = any(entry == name or entry.startswith(f"{name}." if name else "") for entry in seen)
        nested = any(name.startswith(f"{outer}.") or not outer for outer in names)
        if selected and not recorded and not nested:
            names.append(name)
    return [name or type(getattr(model, "_orig_mod", model)).__name__ for name in names]


def _unseen_attention(model: nn.Module, layers: Layers | None) -> str:
    own = own_attention(model)
    if layers is not None and not own:
        return f"nothing: no attention ran in the layers {layers!r}"
    subject = f"{', '.join(own)} computes" if own else "it computes"
    return (
        f"nothing, although it ran: {subject} attention without SDPA, nn.MultiheadAttention or the attention "
        "interface of transformers, which watch cannot see"
    )
