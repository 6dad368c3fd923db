"""Value zeroing: how much a layer's output for each token depends on every other token."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.errors import ArgumentError
from regard.inspection.editing.edges import ZeroValues
from regard.inspection.interventions import attentions, call_model, edit
from regard.inspection.layers import Layers, matching_names
from regard.models.layers.dropout import eval_mode


@torch.no_grad()
def value_zeroing(
    model: nn.Module, batch: Any, layers: Layers | None = None, *, keys: Sequence[int] | None = None
) -> dict[str, Tensor]:
    """Return the change in each token's output when the value of one key is zeroed, by layer: (…, q, keys).

    The change is the cosine distance between the outputs of the whole layer (attention, residual connections
    and feed-forward network) for a query with and without the value of a key (Mohebbi et al. 2023,
    section 3); dividing by the row sums gives the paper's scores. The layer runs once per key, on the inputs
    of one run of the model. Memory per run is linear; the result has one value per query and key.

    batch: the model's arguments: a dictionary, a tuple, or one tensor. layers: as in `regard.edit`.
    keys: positions of the keys; default: all.

    >>> import torch, regard
    >>> model = regard.models.LanguageModel(50, regard.models.TransformerConfig(width=8, heads=2, layers=2))
    >>> changes = regard.inspection.value_zeroing(model, torch.tensor([[5, 6, 7]]))
    >>> {name: matrix.shape for name, matrix in changes.items()}
    {'decoder.blocks.0.attention': torch.Size([1, 3, 3]), 'decoder.blocks.1.attention': torch.Size([1, 3, 3])}
    """
    modules = attentions(model)
    chosen = [layers] if isinstance(layers, int | str) else ["*"] if layers is None else list(layers)
    names = [name for layer in chosen for name in matching_names("value_zeroing", layer, list(modules))]
    blocks = {name: _block(model, name) for name in names}
    with eval_mode(model), _inputs(set(blocks.values())) as calls:
        call_model(model, batch)
        return {
            name: _changes(block, calls, modules[name], name, keys)
            for name, block in blocks.items()
            if block in calls
        }


def _changes(
    block: nn.Module,
    calls: Mapping[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]],
    module: nn.Module,
    name: str,
    keys: Sequence[int] | None,
) -> Tensor:
    args, kwargs = calls[block]
    before = _hidden(block(*args, **kwargs), name)
    inner = next(child for child, m in block.named_modules() if m is module)
    columns = []
    for key in range(before.shape[-2]) if keys is None else keys:
        with edit(block, inner or None, None, ZeroValues(key)):
            after = _hidden(block(*args, **kwargs), name)
        columns.append(1 - F.cosine_similarity(before, after, dim=-1))
    return torch.stack(columns, -1)


def _block(model: nn.Module, name: str) -> nn.Module:
    """Return the layer that contains an attention module: the innermost numbered module around it."""
    match = re.match(r"(.*\d)(\.|$)", name)
    return model.get_submodule(match.group(1)) if match else model.get_submodule(name)


@contextmanager
def _inputs(
    blocks: set[nn.Module],
) -> Iterator[dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]]]:
    """Record the arguments of the first call to each of the given modules, excluding caches."""
    calls: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def on_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(module, (args, {**kwargs, **{n: None for n in _CACHES if n in kwargs}}))

    hooks = [block.register_forward_pre_hook(on_call, with_kwargs=True) for block in blocks]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


_CACHES = ("past_key_values", "past_key_value", "layer_past")  # running a layer again must not extend them


def _hidden(output: Any, name: str) -> Tensor:
    hidden = output[0] if isinstance(output, tuple) else output
    if not isinstance(hidden, Tensor):
        raise ArgumentError(
            f"value_zeroing: the layer of {name!r} returned {type(hidden).__name__}; it must return a "
            "tensor, or a tuple that starts with one. Exclude it: layers=…."
        )
    return hidden
