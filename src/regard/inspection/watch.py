"""Look into a model while it runs: the weights of every attention inside, by the name of its module."""

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
from regard.inspection.capture import Kind
from regard.inspection.layers import Layers, LayerSelection, attends, clean, compiled, own_attention, plain
from regard.inspection.texts import Texts
from regard.mechanism.rollout import rollout
from regard.mechanism.weights.matrix import Weights
from regard.models.layers.attention import watch_layers


class Refused(NamedTuple):
    """Takes the place of weights that would be wrong."""

    reason: str


def _shown(weights: "Weights | Refused") -> Weights:
    if isinstance(weights, Refused):
        raise ArgumentError(weights.reason)
    return weights


class Seen(Mapping[str, Weights]):
    """What was seen, in order: a mapping from names to weights, which also counts: seen[0] is the first.

    A module that attends several times has a name for each: "decoder.attention", "decoder.attention@2", …
    What Hugging Face's `generate` computes in many steps is one map, over prompt and generated tokens.

    >>> import torch, regard
    >>> layer = regard.models.MultiHeadAttention(16, 4)
    >>> with regard.watch(torch.nn.Sequential(layer)) as seen:
    ...     output = layer(torch.randn(5, 16))
    >>> seen
    Seen(0: Weights(4 × 5 × 5))
    >>> seen["0"] is seen[0] is seen[-1]
    True
    """

    def __init__(self, texts: Texts | None = None) -> None:
        self._weights: dict[str, Weights | Refused] = {}
        self._calls: dict[str, list[Weights | Refused]] = {}
        self._kinds: dict[str, Kind] = {}
        self._about: dict[str, tuple[str, int]] = {}  # the module's name and the number of its call
        self._nothing = "nothing yet: call the model inside the with block"
        self._unseen = ""  # what ran and could not be seen
        self._texts = Texts() if texts is None else texts

    def add(self, name: str, weights: Weights, kind: Kind | None = None) -> None:
        """Keep what the module of this name has just done."""
        self._add(name, weights, kind)

    def refuse(self, name: str, reason: str, kind: Kind) -> None:
        """Note that what the module of this name did cannot be shown; looking at it raises the reason."""
        self._add(name, Refused(reason), kind)

    def _add(self, name: str, weights: "Weights | Refused", kind: Kind | None) -> None:
        calls = self._calls.setdefault(name, [])
        calls.append(weights)
        entry = name if len(calls) == 1 else f"{name}@{len(calls)}"
        self._weights[entry] = weights
        self._about[entry] = name, len(calls) - 1
        self._kinds[entry] = kind or ("cross" if "cross" in name.rpartition(".")[2] else "self")

    # One of them

    def __getitem__(self, name: str | int) -> Weights:
        return _shown(self._weights[self.name(name)])

    def name(self, layer: str | int) -> str:
        """The name of a layer, given by its name or number.

        >>> import torch, regard
        >>> layer = regard.models.SelfAttention()
        >>> with regard.watch(torch.nn.Sequential(layer, layer)) as seen:
        ...     output = layer(layer(torch.eye(3)))
        >>> seen.name(-1)
        '0@2'
        """
        if isinstance(layer, int):
            if not self._weights:
                raise IndexError(f"seen[{layer}] of 0 attentions: {self._nothing}.")
            if not -len(self) <= layer < len(self):
                raise IndexError(f"seen[{layer}] of {len(self)} attentions; they count from 0.")
            return list(self._weights)[layer]
        if layer not in self._weights:
            raise KeyError(self._missing(layer))
        return layer

    def calls(self, name: str) -> list[Weights]:
        """All that the module of this name did, call by call."""
        if name not in self._calls:
            raise KeyError(self._missing(name))
        return [_shown(call) for call in self._calls[name]]

    def joined(self, name: str) -> Tensor:
        """All that the module of this name did, one call below the other, dense: (…, q, k).

        That is how a decoder that goes step by step looked at its source. Steps with caches, which see more
        keys each time, are filled up with zeros. What `generate` of Hugging Face did is joined already.
        """
        calls = [weights.dense() for weights in self.calls(name)]
        keys = max(weights.shape[-1] for weights in calls)
        return torch.cat([nn.functional.pad(w, (0, keys - w.shape[-1])) for w in calls], -2)

    def kind(self, name: str | int) -> Kind:
        """Whether an attention reads its own sequence, "self", or another one, "cross".

        >>> import torch, regard
        >>> model = torch.nn.TransformerDecoderLayer(8, 2)
        >>> with regard.watch(model) as seen:
        ...     output = model(torch.randn(3, 1, 8), torch.randn(5, 1, 8))
        >>> {name: seen.kind(name) for name in seen}
        {'self_attn': 'self', 'multihead_attn': 'cross'}
        """
        return self._kinds[self.name(name)]

    def causal(self, name: str | int) -> bool:
        """Whether an attention reads its own sequence without looking ahead."""
        return self.kind(name) == "self" and recording.causal(self[name])

    # What stands where

    @property
    def tokens(self) -> list[str] | None:
        """The tokens of the first text that the model read, if there is a tokenizer."""
        return self._texts.words(0, "source", 0)

    def texts(self, name: str | int, row: int = 0) -> tuple[list[str] | None, list[str] | None]:
        """The tokens that the queries and the keys of an attention stand for, of one row of the batch.

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
        call = self._about[name][1]
        found = []
        for side, size in zip(self._sides(name), self[name].shape[-2:], strict=True):
            words = self._texts.words(call, side, row)
            found.append(words if words is not None and len(words) == size else None)
        return found[0], found[1]

    def _sides(self, name: str) -> tuple[str, str]:
        module, call = self._about[name]
        written = "target" if self._texts.ids(call, "target") is not None else "source"
        if self.kind(name) == "cross":
            return written, "source"
        side = written if "decoder" in module or "encoder" not in module else "source"
        return side, side

    def ids(self, name: str | int) -> Tensor | None:
        """The token numbers (b, k) of the keys of an attention, if they are known."""
        name = self.name(name)
        found = self._texts.ids(self._about[name][1], self._sides(name)[1])
        return found if found is not None and found.shape[-1] == self[name].shape[-1] else None

    # Questions

    def heads(self, *, frame: bool | None = None) -> Any:
        """What every head does, a row each: a pandas frame where pandas is there, else a list of dicts.

        layer, head; entropy: of its rows, in nats, on average; distance: how far it looks, in tokens; first:
        the weight on the first key; previous: on the key before the query's own; induction: on what followed
        earlier occurrences of the query's token, if any. NaN where there is nothing to say, as about the
        distances in cross-attention.

        >>> import torch, regard
        >>> layer = regard.models.SelfAttention()
        >>> with regard.watch(layer) as seen:
        ...     output = layer(torch.eye(3), mask=regard.Causal())
        >>> [round(seen.heads(frame=False)[0][column], 2) for column in ("entropy", "first", "previous")]
        [0.57, 0.54, 0.31]
        """
        return recording.heads(self, frame)

    def rollout(
        self, queries: int | Sequence[int] | Tensor | None = None, *, residual: float = 0.5
    ) -> Tensor:
        """How much each input token reaches positions of the last layer: `regard.rollout` of what was seen.

        Of an encoder and a decoder, or of several calls, the self-attentions of the last one count.
        """
        return rollout(recording.stack(self), queries, residual=residual)

    def to(self, device: torch.device | str) -> "Seen":
        """The same recording on another device."""
        return self._with(
            {
                name: weights if isinstance(weights, Refused) else weights.to(device)
                for name, weights in self._weights.items()
            }
        )

    def _with(self, weights: "dict[str, Weights | Refused]") -> "Seen":
        found = type(self)(self._texts)
        for entry, (name, _) in self._about.items():
            found._add(name, weights[entry], self._kinds[entry])
        found._nothing, found._unseen = self._nothing, self._unseen
        return found

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the whole recording to a folder, safetensors and JSON: it can be looked at without the model.

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
        """Read what `save` wrote."""
        return recording.load(cls, folder)

    # Looking at it

    def show(self, *, title: str = "") -> Any:
        """Look at all layers: a widget in a notebook; elsewhere a page in the browser, whose path it is.

        >>> import regard
        >>> def look(seen: regard.Seen) -> None:
        ...     seen.show(title="what the model looked at")
        """
        return display.show(self, title)

    def to_html(self, path: str | os.PathLike[str], *, title: str = "") -> Path:
        """Write an interactive page of all layers, one file that opens in any browser.

        >>> import tempfile, torch, regard
        >>> layer = regard.models.SelfAttention()
        >>> with regard.watch(layer, tokens=["dogs", "bark", "loudly"]) as seen:
        ...     output = layer(torch.eye(3))
        >>> seen.to_html(tempfile.mkdtemp() + "/seen.html").name
        'seen.html'
        """
        return display.to_html(self, path, title)

    # As a mapping

    def _missing(self, name: str) -> str:
        unseen = f" Not seen: {self._unseen}." if self._unseen and self._weights else ""
        return f"{name!r} was not seen; seen were {', '.join(self._weights) or self._nothing}.{unseen}"

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def __repr__(self) -> str:
        lines = [
            f"{name or '(the model)'}: "
            + (
                "refused"
                if isinstance(weights, Refused)
                else f"Weights({' × '.join(map(str, weights.shape))})"
            )
            for name, weights in self._weights.items()
        ]
        if self._unseen:
            lines.append(f"not seen: {self._unseen}")
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
    """Collect the lazy weights of each attention inside a model, for as long as the block lasts.

    Any model will do whose attentions are regard's, torch's `nn.MultiheadAttention` and Transformer layers,
    calls of `torch.nn.functional.scaled_dot_product_attention`, or go through the attention interface of
    Hugging Face transformers, whichever kernel computes them. What the model computes is not changed by a
    bit; what is kept is linear in its length. Nothing is kept outside the block, or of other threads.
    Weights are those before dropout.

    layers: only these, by number (0 is the first, −1 the last), name or pattern: [0, −1], "decoder.*".
    heads: only these, of each layer.
    tokenizer: makes words of the token numbers that the model is called with, for `Seen.texts` and the views.
    tokens: the words themselves, if there are no token numbers.

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
        raise DTypeError(f"watch got a {type(model).__name__}; it looks into a torch.nn.Module.")
    if plain(model):
        raise ArgumentError(
            f"watch got a {type(model).__name__} in which no module attends; it sees regard's own layers, "
            "torch's, calls of scaled_dot_product_attention, and what goes through transformers' interface."
        )
    choice, seen = LayerSelection(model, layers), Seen(Texts(tokenizer, tokens))
    recorder = Recorder(model, seen, choice, heads)
    with recorder.recording(), watch_layers(model, recorder.see_own):
        yield seen
    unseen = _compiled_away(model, choice, seen) if recorder.ran else []
    if unseen:
        seen._unseen = _COMPILED.format(", ".join(unseen))
        seen._nothing = f"nothing: {seen._unseen}"
    elif not seen and recorder.ran:
        seen._nothing = _bypassed(model, layers)
    elif not seen and recorder.ran_elsewhere:
        seen._nothing = _ELSEWHERE
    if unseen or (not seen and (recorder.ran or recorder.ran_elsewhere)):
        told = seen._nothing if not seen else seen._unseen
        warnings.warn(f"{type(model).__name__}: {told}.", stacklevel=3)


_COMPILED = (
    "the attention in {} ran as compiled code, which cannot be seen. Run it uncompiled: "
    'with torch.compiler.set_stance("force_eager"), regard.watch(model) as seen: …'
)
_ELSEWHERE = (
    "nothing: the model was called in another thread, and watch sees only the thread that opened it. "
    "Open the block in the thread that calls the model"
)


def _compiled_away(model: nn.Module, choice: LayerSelection, seen: Seen) -> list[str]:
    """The compiled parts of a model in which something attends, and of which nothing was seen."""
    names: list[str] = []
    for name, part in compiled(model).items():
        inside = (
            clean(f"{name}.{below}".strip(".")) for below, module in part.named_modules() if attends(module)
        )
        wanted = [one for one in inside if choice(one)]
        seen_there = any(one == name or one.startswith(f"{name}." if name else "") for one in seen)
        if (
            wanted
            and not seen_there
            and not any(name.startswith(f"{outer}.") or not outer for outer in names)
        ):
            names.append(name)
    return [name or type(getattr(model, "_orig_mod", model)).__name__ for name in names]


def _bypassed(model: nn.Module, layers: Layers | None) -> str:
    own = own_attention(model)
    if layers is not None and not own:
        return f"nothing, as the layers {layers!r} did not attend when it ran"
    whose = f"{', '.join(own)} computes" if own else "it computes"
    return (
        f"nothing, although it ran: {whose} attention without SDPA, nn.MultiheadAttention or transformers' "
        "attention interface, so that its weights cannot be seen"
    )
