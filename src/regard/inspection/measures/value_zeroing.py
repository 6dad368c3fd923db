"""Value zeroing: how much a layer's output for each token depends on every other token."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard._util.text import pluralize
from regard.errors import ArgumentError
from regard.inspection.editing.edges import ZeroValues
from regard.inspection.editing.interventions import attentions, call_model, edit
from regard.inspection.editing.replacements import AttentionCall, Intervention
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
    keys: positions of the keys; default: all. In cross-attention, keys are the tokens of the other text.

    >>> import torch, regard
    >>> model = regard.models.LanguageModel(50, regard.models.TransformerConfig(width=8, heads=2, layers=2))
    >>> changes = regard.inspection.value_zeroing(model, torch.tensor([[5, 6, 7]]))
    >>> {name: matrix.shape for name, matrix in changes.items()}
    {'decoder.blocks.0.attention': torch.Size([1, 3, 3]), 'decoder.blocks.1.attention': torch.Size([1, 3, 3])}
    """
    if isinstance(batch, Mapping) and (cached := [name for name, x in batch.items() if _is_cache(x)]):
        raise ArgumentError(
            f"value_zeroing got a cache in {cached[0]!r}, so the model would not process the whole text. "
            "Pass all tokens and no cache."
        )
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
    inner = next(child for child, m in block.named_modules() if m is module)
    sizes = _Sizes()
    with edit(block, inner or None, None, sizes):
        before = _hidden(block(*args, **kwargs), name)
    if getattr(module, "batch_first", True) is False and before.dim() == 3:  # n b m, as in torch's layers
        raise ArgumentError(
            f"value_zeroing: {name!r} has batch_first=False: the first axis of its output is the sequence. "
            "Create the model with batch_first=True, which does not change its parameters."
        )
    if sizes.queries != before.shape[-2]:
        raise ArgumentError(
            f"value_zeroing: {name!r} has {pluralize(sizes.queries, 'query')} per call, but its layer "
            f"returns {pluralize(before.shape[-2], 'token')}. Queries and tokens must correspond, which is "
            "not the case in windowed attention over images. Exclude it with layers=."
        )
    columns = []
    for key in range(sizes.keys) if keys is None else keys:
        with edit(block, inner or None, None, ZeroValues(key)):
            after = _hidden(block(*args, **kwargs), name)
        columns.append(1 - F.cosine_similarity(before, after, dim=-1))
    return torch.stack(columns, -1)


class _Sizes(Intervention):
    """An intervention that counts queries and keys, and changes nothing."""

    queries, keys = 0, 0

    def __call__(self, call: AttentionCall, heads: list[int]) -> Tensor:
        return self.apply(call, heads).output[..., heads, :, :]

    def apply(self, call: AttentionCall, heads: list[int]) -> AttentionCall:
        self.queries, self.keys = call.output.shape[-2], call.value.shape[-2]
        return call


def _block(model: nn.Module, name: str) -> nn.Module:
    """Return the layer that contains an attention module: the innermost item of a list of layers.

    All items of such a list have the same class. The parts of one layer may form a list too, but their
    classes differ (T5: self-attention, cross-attention, feed-forward network).
    """
    parts = name.split(".")
    numbered = [".".join(parts[: i + 1]) for i in reversed(range(len(parts))) if parts[i].isdigit()]
    for path in numbered:
        siblings = model.get_submodule(path.rpartition(".")[0]).children()
        if len({type(sibling) for sibling in siblings}) == 1:
            return model.get_submodule(path)
    return model.get_submodule(numbered[0] if numbered else name)


@contextmanager
def _inputs(
    blocks: set[nn.Module],
) -> Iterator[dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]]]:
    """Record the arguments of the first call to each of the given modules, excluding caches."""
    calls: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def on_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        without = {name: None if _is_cache(x) else x for name, x in kwargs.items()}
        calls.setdefault(module, (tuple(None if _is_cache(x) else x for x in args), without))

    hooks = [block.register_forward_pre_hook(on_call, with_kwargs=True) for block in blocks]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _is_cache(x: Any) -> bool:
    """Return whether `x` is a cache of transformers; running a layer again must not extend it."""
    return hasattr(x, "get_seq_length") and hasattr(x, "update")


def _hidden(output: Any, name: str) -> Tensor:
    hidden = output[0] if isinstance(output, tuple) else output
    if not isinstance(hidden, Tensor):
        raise ArgumentError(
            f"value_zeroing: the layer of {name!r} returned {type(hidden).__name__}; it must return a "
            "tensor, or a tuple that starts with one. Exclude it with layers=."
        )
    return hidden
