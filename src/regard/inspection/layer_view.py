"""The content of the interactive view: texts, and layers of weights between them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard._util.text import pluralize, type_name
from regard.errors import ArgumentError, DTypeError, ShapeError
from regard.inspection.calls.windows import WINDOW_WEIGHTS
from regard.inspection.measures.head_meters import has_heads
from regard.inspection.measures.head_statistics import HeadStatistics, head_statistics
from regard.mechanism.weights.weights import Weights

LayerKind = Literal["self", "cross", "words"]
Floats = NDArray[np.float32]
_MAX_SELECTIONS = 64  # cached head selections per layer


@dataclass(frozen=True)
class TextView:
    """The tokens of a text.

    special: positions of special tokens, such as [CLS] or the end-of-sentence token.

    >>> from regard.app.view_model import TextView
    >>> TextView(("[CLS]", "dogs", "bark"), special=(0,)).describe()
    {'tokens': ['[CLS]', 'dogs', 'bark'], 'special': [0]}
    """

    tokens: Sequence[str]
    special: Sequence[int] = ()

    def __post_init__(self) -> None:
        if isinstance(self.tokens, str) or not all(isinstance(token, str) for token in self.tokens):
            raise DTypeError("tokens must be a list of strings, one per row or column; split the text.")
        wrong = [position for position in self.special if not 0 <= position < len(self.tokens)]
        if wrong:
            raise ArgumentError(
                f"Special-token position {wrong[0]} is out of range for "
                f"{pluralize(len(self.tokens), 'token')}; positions start at 0."
            )

    @classmethod
    def numbered(cls, size: int) -> "TextView":
        """Return the tokens "1", "2", …, for a text whose tokens are unknown."""
        return cls(tuple(map(str, range(1, size + 1))))

    def describe(self) -> dict[str, Any]:
        """Return the tokens and special positions as JSON-serializable values."""
        return {"tokens": [utf8_text(token) for token in self.tokens], "special": list(self.special)}


@dataclass(frozen=True, eq=False)
class LayerView:
    """The weights between two texts.

    name: module name. label: name displayed in the view. kind: "self", "cross" or "words" (an alignment).
    weights: (h, q, k), or (q, k) for one head; lazy `Weights` or a dense tensor.
    queries, keys: indices of the query text and the key text in the input.
    cache: results that are expensive to compute.

    >>> import torch
    >>> from regard.app.view_model import LayerView
    >>> LayerView("decoder.blocks.0.cross", "decoder 0 to source", "cross", torch.eye(3)).heads
    1
    """

    name: str
    label: str
    kind: LayerKind
    weights: Weights | Tensor
    queries: int = 0
    keys: int = 0
    cache: dict[Any, Any] = field(default_factory=dict, repr=False)
    _selections: dict[Any, Weights] = field(default_factory=dict, repr=False)  # weights by head numbers

    def __post_init__(self) -> None:
        if self.kind not in get_args(LayerKind):
            raise ArgumentError(
                f"LayerView(kind={self.kind!r}): use one of {', '.join(get_args(LayerKind))}."
            )
        if isinstance(self.weights, Tensor) and self.weights.is_complex():
            raise DTypeError(
                f"LayerView(weights=…) got {self.weights.dtype}; pass real weights, such as weights.abs()."
            )
        if not isinstance(self.weights, Weights | Tensor):
            raise DTypeError(
                f"LayerView(weights=…) got {type_name(self.weights)}; pass regard.Weights or a Tensor."
            )
        if self.weights.dim() < 2 or any(n != 1 for n in _batch(self.weights)):
            raise ShapeError(
                f"LayerView(weights=…) got shape {tuple(self.weights.shape)}; pass (heads, queries, "
                "keys). ViewModel.of(weights) splits a batch."
            )

    @property
    def heads(self) -> int:
        """The number of heads; 1 if there is no head axis."""
        return int(self.weights.shape[-3]) if has_heads(self.weights) else 1

    @property
    def size(self) -> tuple[int, int]:
        """The number of queries and of keys."""
        return int(self.weights.shape[-2]), int(self.weights.shape[-1])

    @property
    def has_vectors(self) -> bool:
        """Whether the query and key vectors behind each weight are available."""
        if not isinstance(self.weights, Weights) or self.weights.is_head_mean:
            return False
        problem = self.weights.problem
        if problem.config.score == WINDOW_WEIGHTS:
            return False
        return problem.config.family == "dot" and problem["query"].shape[-1] > 0

    def describe(self) -> dict[str, Any]:
        """Return JSON-serializable values: everything but the weights."""
        return {
            "name": utf8_text(self.name),
            "label": utf8_text(self.label),
            "kind": self.kind,
            "heads": self.heads,
            "queries": self.queries,
            "keys": self.keys,
            "vectors": self.has_vectors,
        }

    def select_heads(self, heads: Sequence[int] | None = None) -> Weights | Tensor:
        """Return the weights of some heads, (…, n, q, k); lazy weights stay lazy."""
        if heads is None or not has_heads(self.weights) or list(heads) == list(range(self.heads)):
            return self.weights
        if isinstance(self.weights, Tensor):
            return self.weights[..., list(heads), :, :]
        selection = self._selections.get(tuple(heads))
        if selection is None:
            if len(self._selections) >= _MAX_SELECTIONS:
                self._selections.clear()
            self._selections[tuple(heads)] = selection = self.weights.heads(list(heads))
        return selection

    def head_statistics(self, heads: Sequence[int] | None = None) -> list[HeadStatistics]:
        """Return the label and measures of each head."""
        return head_statistics(self.select_heads(heads), cross=self.kind != "self")

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
        """Pool part of the matrix to at most height × width block means, per head or for their mean."""
        weights = self.select_heads(heads)
        if isinstance(weights, Tensor):
            count = int(weights.shape[-3]) if has_heads(weights) else 1
            dense = weights.reshape(count, *self.size)[:, rows, columns]
            pooled = pool_dense(dense.float().mean(0, keepdim=True) if mean else dense, height, width)
        else:
            weights.compute_tau()
            if mean and weights.has_heads:
                weights = weights.mean("heads")
            pooled = weights.pool(max(height, 1), max(width, 1), within=(rows, columns))
        count = 1 if mean or not has_heads(self.weights) else int(weights.shape[-3])
        return as_floats(pooled).reshape(count, *pooled.shape[-2:])


@dataclass(frozen=True, eq=False)
class InputView:
    """One input of a model: its texts, and the attention layers between them.

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
                        f"Layer {layer.label!r} has {side}={number}, which is out of range for "
                        f"{pluralize(len(self.texts), 'text')}; texts are numbered from 0."
                    )
                tokens = len(self.texts[number].tokens)
                if tokens != size:
                    raise ShapeError(
                        f"Got {pluralize(tokens, 'token')} for {size} {side} of layer {layer.label!r}; the "
                        "numbers must be equal."
                    )

    def describe(self) -> dict[str, Any]:
        """Return JSON-serializable values: everything but the weights."""
        return {
            "title": utf8_text(self.title),
            "note": utf8_text(self.note),
            "texts": [text.describe() for text in self.texts],
            "layers": [layer.describe() for layer in self.layers],
        }


def as_floats(x: Tensor) -> Floats:
    """Convert to a float32 array; NaN and infinity become 0.

    >>> import torch
    >>> from regard.inspection.layer_view import as_floats
    >>> as_floats(torch.tensor([0.5, float("nan")], dtype=torch.float64))
    array([0.5, 0. ], dtype=float32)
    """
    return x.detach().to("cpu", torch.float32).nan_to_num(0, 0, 0).contiguous().numpy()


def utf8_text(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode.

    >>> from regard.inspection.layer_view import utf8_text
    >>> utf8_text("dog\\udc80")
    'dog?'
    """
    return text.encode("utf-8", "replace").decode()


def split_batch(weights: Weights | Tensor) -> list[Weights | Tensor]:
    """Return the weights of each batch entry, (…, h, q, k) or (…, q, k); lazy weights stay lazy.

    >>> import torch
    >>> from regard.inspection.layer_view import split_batch
    >>> [tuple(entry.shape) for entry in split_batch(torch.zeros(2, 8, 5, 5))]
    [(8, 5, 5), (8, 5, 5)]
    """
    batch = _batch(weights)
    if isinstance(weights, Tensor):
        return list(weights.reshape(math.prod(batch), *weights.shape[len(batch) :])) if batch else [weights]
    if all(n == 1 for n in batch):
        return [weights]
    every = [slice(None)] if weights.has_heads else []
    return [
        weights.part([*(slice(int(i), int(i) + 1) for i in index), *every]) for index in np.ndindex(*batch)
    ]


def pool_dense(weights: Tensor, height: int, width: int) -> Tensor:
    """Pool a dense tensor (…, q, k) into at most height × width block means.

    >>> import torch
    >>> from regard.inspection.layer_view import pool_dense
    >>> pool_dense(torch.eye(4), 2, 2).tolist()
    [[0.5, 0.0], [0.0, 0.5]]
    """
    if not weights.numel():
        rows, columns = weights.shape[-2:]
        return weights.new_zeros(*weights.shape[:-2], min(height, rows), min(width, columns))
    for axis, blocks in ((-2, height), (-1, width)):
        size = weights.shape[axis]
        if blocks < size:
            edges = np.arange(blocks + 1) * size // blocks
            parts = weights.split(np.diff(edges).tolist(), axis)
            weights = torch.stack([part.double().mean(axis) for part in parts], axis)
    return weights


def _batch(weights: Weights | Tensor) -> tuple[int, ...]:
    return tuple(weights.shape[:-3] if has_heads(weights) else weights.shape[:-2])
