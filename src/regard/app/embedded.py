"""A view with its weights as JSON, for pages without a server.

Arrays are little-endian float32 in base64. Large matrices are pooled to block means, so browsers can open
the file.
"""

import math
from typing import Any

import torch
from torch import Tensor

from regard.app.protocol import encode_array, formula
from regard.app.view_model import ViewModel, join_notes
from regard.inspection.layer_view import InputView, LayerView, as_floats
from regard.mechanism.weights.matrix import Weights

_SIZES = (512, 384, 256, 192, 128, 96, 64, 48, 32)  # of a pooled matrix; the largest that fits is used
_MAX_WEIGHTS = 6_000_000  # per file: 32 MB
_MAX_VECTOR_NUMBERS = 2_000_000  # total size of all query and key vectors
_MAX_STATISTICS = 2**31  # head statistics are computed for layers with up to this many weights


def embedded(view: ViewModel) -> dict[str, Any]:
    """Return the description and all data of a view as JSON-serializable values.

    >>> import torch
    >>> from regard.app.embedded import embedded
    >>> from regard.app.view_model import ViewModel
    >>> layer = embedded(ViewModel.of(torch.eye(3)))["inputs"][0]["layers"][0]
    >>> layer["weights"]["shape"], layer["pooled"], layer["heads"][0]["label"]
    ([1, 3, 3], False, 'same token')
    """
    layers = [layer for model_input in view.inputs for layer in model_input.layers]
    fitting = (size for size in _SIZES if sum(_pooled_size(layer, size) for layer in layers) <= _MAX_WEIGHTS)
    size = next(fitting, _SIZES[-1])
    vectors = sum(map(_vector_numbers, layers)) <= _MAX_VECTOR_NUMBERS
    description = view.describe()
    inputs = []
    for model_input, described in zip(view.inputs, description["inputs"], strict=True):
        data = [_layer(layer, size, vectors) for layer in model_input.layers]
        for layer_data, described_layer in zip(data, described["layers"], strict=True):
            described_layer["vectors"] = layer_data["query"] is not None
        described["note"] = join_notes(described["note"], _note(model_input, size))
        inputs.append({"layers": data})
    return {"view": description, "inputs": inputs}


def _pooled_size(layer: LayerView, size: int) -> int:
    queries, keys = layer.size
    return layer.heads * min(queries, size) * min(keys, size)


def _vector_numbers(layer: LayerView) -> int:
    """Return the total size of the query and key vectors of a layer."""
    if not layer.has_vectors or not isinstance(layer.weights, Weights):
        return 0
    return layer.heads * sum(layer.size) * layer.weights.problem["query"].shape[-1]


def _note(model_input: InputView, size: int) -> str:
    """Return a note about pooling, if any layer is pooled."""
    pooled = {layer.size for layer in model_input.layers if max(layer.size) > size}
    if not pooled:
        return ""
    queries, keys = max(pooled, key=math.prod)
    return (
        f"This file contains block means, at most {size} × {size} of {queries:,} × {keys:,} weights. "
        "Notebooks and regard look show every weight."
    )


def _layer(layer: LayerView, size: int, vectors: bool) -> dict[str, Any]:
    pooled = max(layer.size) > size
    heads = None
    if layer.heads * math.prod(layer.size) <= _MAX_STATISTICS:
        heads = [{"head": head, **item.to_dict()} for head, item in enumerate(layer.head_statistics())]
    weights = encode_array(layer.tile(slice(None), slice(None), size, size))
    data = _vectors(layer if vectors and not pooled else None)
    return {"weights": weights, "pooled": pooled, "heads": heads, **data}


@torch.no_grad()
def _vectors(layer: LayerView | None) -> dict[str, Any]:
    """Return the query and key vectors of a layer, or None for each field if they are not available."""
    empty = dict.fromkeys(("query", "key", "scale", "normalizer", "formula", "tau"))
    if layer is None or not layer.has_vectors or not isinstance(layer.weights, Weights):
        return empty
    layer.weights.check_inputs()
    problem = layer.weights.problem
    if problem.config.softcap is not None:
        return empty

    def by_head(x: Tensor) -> Tensor:  # … g r n d -> h n d
        return x.expand(*problem.lead(), *x.shape[-2:]).reshape(layer.heads, *x.shape[-2:])

    tau = by_head(problem["tau"]).double().sum(-1)
    return {
        "query": encode_array(as_floats(by_head(problem["query"]))),
        "key": encode_array(as_floats(by_head(problem["key"]))),
        "scale": problem.config.scale,
        "normalizer": type(problem.config.normalize).__name__,
        "formula": formula(problem.config.normalize),
        "tau": None
        if bool(tau.isnan().any())
        else encode_array(as_floats(tau)),  # NaN: torch's SDPA does not return it
    }
