"""An exhibit with its weights, as JSON holds it: what a page needs that has nobody to ask.

Numbers are float32, little-endian, in base64. Many weights become means of blocks, so that a file stays of a
size that a browser opens.
"""

import math
from base64 import b64encode
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.app.protocol import formula
from regard.app.view_model import ViewModel
from regard.inspection.layer_view import Floats, InputView, LayerView, as_floats
from regard.inspection.statistics import tell
from regard.mechanism.weights.matrix import Weights

_SIDES = (512, 384, 256, 192, 128, 96, 64, 48, 32)  # of a matrix that is held, the first that fits
_WEIGHTS = 6_000_000  # of a file: 32 MB
_VECTORS = 2_000_000  # numbers of queries and keys
_TOLD = 2**31  # weights of a layer whose heads are told


def embedded(exhibit: ViewModel) -> dict[str, Any]:
    """Everything that the view in a page asks for, as JSON can hold it.

    >>> import torch
    >>> from regard.app.embedded import embedded
    >>> from regard.app.view_model import ViewModel
    >>> held = embedded(ViewModel.of(torch.eye(3)))["inputs"][0]["layers"][0]
    >>> held["weights"]["shape"], held["pooled"], held["heads"][0]["label"]
    ([1, 3, 3], False, 'same token')
    """
    layers = [layer for one in exhibit.inputs for layer in one.layers]
    side = next((s for s in _SIDES if sum(_held(layer, s) for layer in layers) <= _WEIGHTS), _SIDES[-1])
    vectors = sum(map(_numbers, layers)) <= _VECTORS
    described = exhibit.describe()
    inputs = []
    for one, about in zip(exhibit.inputs, described["inputs"], strict=True):
        inputs.append({"layers": [_layer(layer, side, vectors) for layer in one.layers]})
        for layer, told in zip(inputs[-1]["layers"], about["layers"], strict=True):
            told["vectors"] = layer["query"] is not None
        about["note"] = "; ".join(filter(None, (about["note"], _note(one, side))))
    return {"exhibit": described, "inputs": inputs}


def _held(layer: LayerView, side: int) -> int:
    queries, keys = layer.size
    return layer.heads * min(queries, side) * min(keys, side)


def _numbers(layer: LayerView) -> int:
    """How many numbers the queries and keys of a layer have."""
    if not layer.has_vectors or not isinstance(layer.weights, Weights):
        return 0
    return layer.heads * sum(layer.size) * layer.weights._problem["query"].shape[-1]


def _note(one: InputView, side: int) -> str:
    """What a file does not hold."""
    sizes = {layer.size for layer in one.layers if max(layer.size) > side}
    if not sizes:
        return ""
    queries, keys = max(sizes, key=math.prod)
    return (
        f"this file holds means of blocks, at most {side} × {side} of {queries:,} × {keys:,} weights; a "
        "notebook, and the page of regard look, show each of them"
    )


def _layer(layer: LayerView, side: int, vectors: bool) -> dict[str, Any]:
    pooled = max(layer.size) > side
    weights = layer.tile(slice(None), slice(None), side, side)
    few = layer.heads * math.prod(layer.size) <= _TOLD
    told = [{"head": number, **one.to_dict()} for number, one in enumerate(tell(layer))] if few else None
    found: dict[str, Any] = {"weights": _packed(weights), "pooled": pooled, "heads": told}
    return {**found, **_vectors(layer if vectors and not pooled else None)}


@torch.no_grad()
def _vectors(layer: LayerView | None) -> dict[str, Any]:
    """The queries and keys that a layer's scores are products of, if a file shall hold them."""
    nothing = dict.fromkeys(("query", "key", "scale", "normalizer", "formula", "tau"))
    if layer is None or not layer.has_vectors or not isinstance(layer.weights, Weights):
        return nothing
    layer.weights._check()
    problem = layer.weights._problem
    if problem.rules.softcap is not None:
        return nothing

    def of_heads(x: Tensor) -> Tensor:  # … g r n d -> h n d
        return x.expand(*problem.lead(), *x.shape[-2:]).reshape(layer.heads, *x.shape[-2:])

    tau = of_heads(problem["tau"]).double().sum(-1)
    return {
        "query": _packed(as_floats(of_heads(problem["query"]))),
        "key": _packed(as_floats(of_heads(problem["key"]))),
        "scale": problem.rules.scale,
        "normalizer": type(problem.rules.normalize).__name__,
        "formula": formula(problem.rules.normalize),
        "tau": None if bool(tau.isnan().any()) else _packed(as_floats(tau)),  # another's kernel told none
    }


def _packed(x: Floats) -> dict[str, Any]:
    """An array as JSON holds it."""
    return {"shape": list(x.shape), "data": b64encode(np.ascontiguousarray(x, "<f4").tobytes()).decode()}
