"""What an exhibit is made of: texts, and layers of weights between them, of which any part can be told."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard._util import interrupt
from regard.errors import ArgumentError, DTypeError, ShapeError
from regard.mechanism.weights.matrix import Weights

Kind = Literal["self", "cross", "words"]
Floats = NDArray[np.float32]
_CHOSEN = 64  # choices of heads that a layer remembers


class Answer(NamedTuple):
    """What an exhibit answers: facts, which JSON can hold, and arrays of float32.

    >>> import regard, torch
    >>> from regard.app.view_model import ViewModel
    >>> facts, arrays = ViewModel.of(torch.eye(3)).ask("top", {"side": "query", "place": 1, "most": 1})
    >>> facts
    {'places': [1], 'weights': [1.0]}
    """

    facts: dict[str, Any]
    arrays: list[Floats]


@dataclass(frozen=True)
class TextView:
    """The tokens of one side, and the places of those that are special: [CLS], an end mark.

    >>> from regard.app.view_model import TextView
    >>> TextView(("[CLS]", "dogs", "bark"), special=(0,)).describe()
    {'tokens': ['[CLS]', 'dogs', 'bark'], 'special': [0]}
    """

    tokens: Sequence[str]
    special: Sequence[int] = ()

    def __post_init__(self) -> None:
        if isinstance(self.tokens, str) or not all(isinstance(token, str) for token in self.tokens):
            raise DTypeError("tokens are a sequence of strings, one for each row or column; split the text.")
        wrong = [place for place in self.special if not 0 <= place < len(self.tokens)]
        if wrong:
            raise ArgumentError(
                f"place {wrong[0]} of a special token is not among {len(self.tokens)} tokens; they count "
                "from 0."
            )

    @classmethod
    def numbered(cls, size: int) -> "TextView":
        """Tokens that nobody named: their places, from 1, as the view counts them."""
        return cls(tuple(map(str, range(1, size + 1))))

    def describe(self) -> dict[str, Any]:
        """What JSON can hold."""
        return {"tokens": [plain(token) for token in self.tokens], "special": list(self.special)}


@dataclass(frozen=True, eq=False)
class LayerView:
    """Weights between two texts: (h, q, k), or (q, k) of one head; lazy `Weights`, or a dense tensor.

    name: of the module that attended. label: what people read. kind: "self", "cross", or "words", an
    alignment of words. queries, keys: numbers of texts of the input that the layer belongs to.

    >>> import torch
    >>> from regard.app.view_model import LayerView
    >>> LayerView("decoder.blocks.0.cross", "decoder 0 to source", "cross", torch.eye(3)).heads
    1
    """

    name: str
    label: str
    kind: Kind
    weights: Weights | Tensor
    queries: int = 0
    keys: int = 0
    kept: dict[Any, Any] = field(default_factory=dict, repr=False)  # what was expensive to find
    _chosen: dict[Any, Weights] = field(default_factory=dict, repr=False)  # some heads, which keep their τ

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ArgumentError(f"a layer got kind={self.kind!r}; there are {', '.join(get_args(Kind))}.")
        if isinstance(self.weights, Tensor) and self.weights.is_complex():
            raise DTypeError("a layer got complex numbers as weights; give real ones, such as weights.abs().")
        if not isinstance(self.weights, Weights | Tensor):
            raise DTypeError(
                f"a layer got a {type(self.weights).__name__} as weights; give regard.Weights or a Tensor."
            )
        if self.weights.dim() < 2 or any(n != 1 for n in _batch(self.weights)):
            raise ShapeError(
                f"a layer got weights of shape {tuple(self.weights.shape)}; it shows (heads, queries, keys), "
                "so choose one of a batch. Exhibit.of(weights) makes an input of each."
            )

    @property
    def heads(self) -> int:
        """How many there are; weights without an axis of heads have one."""
        return int(self.weights.shape[-3]) if _has_heads(self.weights) else 1

    @property
    def size(self) -> tuple[int, int]:
        """How many queries and keys there are."""
        return int(self.weights.shape[-2]), int(self.weights.shape[-1])

    @property
    def has_vectors(self) -> bool:
        """Whether each weight comes from the product of a query and a key that are at hand."""
        if not isinstance(self.weights, Weights) or self.weights._heads == "mean":
            return False
        problem = self.weights._problem
        return problem.rules.family == "dot" and problem["query"].shape[-1] > 0

    def describe(self) -> dict[str, Any]:
        """What JSON can hold: all but the weights."""
        return {
            "name": plain(self.name),
            "label": plain(self.label),
            "kind": self.kind,
            "heads": self.heads,
            "queries": self.queries,
            "keys": self.keys,
            "vectors": self.has_vectors,
        }

    def select_heads(self, heads: Sequence[int] | None = None) -> Weights | Tensor:
        """The weights of some heads, still lazy if they are: (…, n, q, k)."""
        every = heads is None or list(heads) == list(range(self.heads))
        if every or heads is None or not _has_heads(self.weights):
            return self.weights
        if isinstance(self.weights, Tensor):
            return self.weights[..., list(heads), :, :]
        found = self._chosen.get(tuple(heads))
        if found is None:
            if len(self._chosen) >= _CHOSEN:
                self._chosen.clear()
            self._chosen[tuple(heads)] = found = self.weights.heads(list(heads))
        return found

    @torch.no_grad()
    def tile(
        self,
        rows: slice,
        columns: slice,
        height: int,
        width: int,
        *,
        heads: Sequence[int] | None = None,
        mean: bool = False,
    ) -> Floats:
        """Exact means of at most height × width blocks of a part of the matrix: (heads or 1, ·, ·)."""
        weights = self.select_heads(heads)
        if isinstance(weights, Tensor):
            count = int(weights.shape[-3]) if _has_heads(weights) else 1
            dense = weights.reshape(count, *self.size)[:, rows, columns]
            pooled = _pooled(dense.float().mean(0, keepdim=True) if mean else dense, height, width)
        else:
            weights._settle()
            if mean and weights.has_heads:
                weights = weights.mean("heads")
            pooled = weights.pool(max(height, 1), max(width, 1), within=(rows, columns))
        count = 1 if mean or not _has_heads(self.weights) else int(weights.shape[-3])
        return as_floats(pooled).reshape(count, *pooled.shape[-2:])


@dataclass(frozen=True, eq=False)
class InputView:
    """One thing that a model read, and what it looked at: texts, and layers between them.

    >>> import torch
    >>> from regard.app.view_model import InputView, LayerView, TextView
    >>> layer = LayerView("attention", "attention", "self", torch.eye(2))
    >>> InputView("Dogs bark", [TextView(("Dogs", "bark"))], [layer]).describe()["layers"][0]["heads"]
    1
    """

    title: str
    texts: Sequence[TextView]
    layers: Sequence[LayerView]
    note: str = ""

    def __post_init__(self) -> None:
        for layer in self.layers:
            sides = zip(("queries", "keys"), (layer.queries, layer.keys), layer.size, strict=True)
            for side, number, size in sides:
                if not 0 <= number < len(self.texts):
                    raise ArgumentError(
                        f"layer {layer.label!r} says that its {side} are text {number}, and there are "
                        f"{len(self.texts)}; texts count from 0."
                    )
                found = len(self.texts[number].tokens)
                if found != size:
                    raise ShapeError(
                        f"there are {found} tokens for {size} {side} of {layer.label!r}; each needs its own."
                    )

    def describe(self) -> dict[str, Any]:
        """What JSON can hold: all but the weights."""
        return {
            "title": plain(self.title),
            "note": plain(self.note),
            "texts": [text.describe() for text in self.texts],
            "layers": [layer.describe() for layer in self.layers],
        }


def as_floats(x: Tensor) -> Floats:
    """Numbers for people to look at: float32, on the CPU; what is no number is 0.

    >>> import torch
    >>> from regard.inspection.layer_view import as_floats
    >>> as_floats(torch.tensor([0.5, float("nan")], dtype=torch.float64))
    array([0.5, 0. ], dtype=float32)
    """
    return x.detach().to("cpu", torch.float32).nan_to_num(0, 0, 0).contiguous().numpy()


def plain(text: str) -> str:
    """A text that can be written as UTF-8: half of a surrogate pair is no letter.

    >>> from regard.inspection.layer_view import plain
    >>> plain("dog\\udc80")
    'dog?'
    """
    return text.encode("utf-8", "replace").decode()


def layer_label(name: str) -> str:
    """What people call an attention, from its module's name: layers are counted from 0, as modules are.

    >>> from regard.inspection.layer_view import layer_label
    >>> [layer_label(name) for name in ("encoder.blocks.0.attention", "decoder.blocks.1.cross", "blocks.2")]
    ['encoder 0', 'decoder 1 to source', 'layer 2']
    >>> layer_label("decoder.attention")
    'decoder to source'
    """
    path, _, call = name.partition("@")
    again = f", call {call}" if call else ""
    parts = path.split(".")
    number = next((int(part) for part in reversed(parts) if re.fullmatch(r"[0-9]{1,9}", part)), None)
    side = next((part for part in parts if part in ("encoder", "decoder")), "layer")
    across = " to source" if is_cross_attention(path) else ""
    if number is not None:
        return f"{side} {number}{across}{again}"
    return (f"{side}{across}" if across else path.replace(".", " ") or "attention") + again


def is_cross_attention(name: str) -> bool:
    """Whether an attention of this name reads another text than its own.

    >>> from regard.inspection.layer_view import is_cross_attention
    >>> is_cross_attention("decoder.blocks.0.cross"), is_cross_attention("decoder.blocks.0.attention")
    (True, False)
    """
    parts = name.partition("@")[0].split(".")
    return "cross" in parts[-1] or parts[-2:] == ["decoder", "attention"]


def split_batch(weights: Weights | Tensor) -> list[Weights | Tensor]:
    """Each of a batch on its own, (…, h, q, k) or (…, q, k), lazy if it was.

    >>> import torch
    >>> from regard.inspection.layer_view import split_batch
    >>> [tuple(one.shape) for one in split_batch(torch.zeros(2, 8, 5, 5))]
    [(8, 5, 5), (8, 5, 5)]
    """
    lead = _batch(weights)
    if isinstance(weights, Tensor):
        own = weights.shape[len(lead) :]
        return [weights.reshape(-1, *own)[i] for i in range(int(np.prod(lead)))] if lead else [weights]
    if all(n == 1 for n in lead):
        return [weights]
    every = [slice(None)] if weights.has_heads else []
    return [
        weights._part([*(slice(int(i), int(i) + 1) for i in index), *every], slice(None))
        for index in np.ndindex(*lead)
    ]


def in_bands(weights: Weights) -> Iterator[Weights]:
    """Bands of query rows, still lazy: a long computation can be interrupted between them.

    >>> import torch, regard
    >>> from regard.inspection.layer_view import in_bands
    >>> x = torch.eye(3)
    >>> [tuple(band.shape) for band in in_bands(regard.attend(x, x, x)[1])]
    [(3, 3)]
    """
    *lead, queries, keys = weights.shape
    for rows in interrupt.bands(queries, math.prod(lead) * keys):
        every = rows == slice(0, queries)
        yield weights if every else weights._part([slice(None)] * len(lead), rows)


def _batch(weights: Weights | Tensor) -> tuple[int, ...]:
    return tuple(weights.shape[:-3] if _has_heads(weights) else weights.shape[:-2])


def _has_heads(weights: Weights | Tensor) -> bool:
    return weights.has_heads if isinstance(weights, Weights) else weights.dim() > 2


def _pooled(weights: Tensor, height: int, width: int) -> Tensor:
    """Means of blocks of a dense tensor (n, q, k)."""
    if not weights.numel():
        return weights.new_zeros(len(weights), min(height, weights.shape[1]), min(width, weights.shape[2]))
    for axis, most in ((-2, height), (-1, width)):
        size = weights.shape[axis]
        if most < size:
            edges = np.arange(most + 1) * size // most
            parts = weights.split(np.diff(edges).tolist(), axis)
            weights = torch.stack([part.double().mean(axis) for part in parts], axis)
    return weights
