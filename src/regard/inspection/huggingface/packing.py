"""Run the layers of Hugging Face models without padding.

Each layer of a packed model receives the tokens of all sequences in a batch as one sequence of length
Σ lengths, and attends with a `Documents` mask. Its output is padded again, so that the rest of the model,
such as a pooling layer, works unchanged. The time depends only on the number of real tokens.
"""

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard._util.text import type_name
from regard.errors import ArgumentError
from regard.inspection.huggingface.packed_batch import Packing, Sequences
from regard.inspection.layers import own_attention
from regard.mechanism.masks.algebra import Mask
from regard.mechanism.masks.by_position import Causal, Rule, Window
from regard.models.layers.linear import LinearForward, replace_linear

_CACHES = ("past_key_values", "past_key_value", "layer_past")
_CROSS_INPUTS = ("encoder_hidden_states", "encoder_attention_mask", "position_bias", "alibi")
_BATCH_OUTPUTS = ("output_attentions", "output_router_logits")  # outputs whose shape depends on the batch
# Without gradients, a layer runs on about this many tokens at a time: enough for fast matrix products, but
# small enough that intermediate results stay in the CPU caches.
CHUNK_TOKENS = 512


class _State(threading.local):
    """The packings of running models in this thread, and the sequences of the running layer."""

    def __init__(self) -> None:
        self.models: dict[nn.Module, list[Packing | None]] = {}
        self.layer: Sequences | None = None
        self.suspended: set[nn.Module] = set()


_STATE = _State()


def install(model: nn.Module) -> None:
    """Pack the layers of a model, by replacing `forward` on each module instance."""
    from transformers.pytorch_utils import Conv1D

    for owner, layers in _stacks(model).items():
        owner.forward = _ModelForward(owner)
        for layer in layers:
            layer.forward = _LayerForward(layer, owner)
            replace_linear(layer, Conv1D)


def remove(model: nn.Module) -> bool:
    """Undo `install`; return whether the model was packed."""
    packed = is_packed(model)
    for module in model.modules():
        if isinstance(vars(module).get("forward"), _Forward | LinearForward):
            del module.forward
    return packed


def is_packed(model: nn.Module) -> bool:
    """Return whether the layers of a model are packed."""
    return any(isinstance(vars(module).get("forward"), _Forward) for module in model.modules())


def is_packing(model: nn.Module | None) -> bool:
    """Return whether the layers of a running model are packed; the model then needs no mask."""
    stack = _STATE.models.get(model) if model is not None else None
    return bool(stack) and stack[-1] is not None  # type: ignore[index]


def packed_mask(module: nn.Module, causal: bool, keywords: dict[str, Any]) -> Mask | None:
    """Return the mask of an attention call inside a packed layer, or None outside.

    keywords: keyword arguments of the call to transformers' attention interface.
    """
    sequences = _STATE.layer
    if sequences is None:
        return None
    if keywords.get("position_bias") is not None:
        raise _refused(module, "adds a bias for each pair of positions")
    window = keywords.get("sliding_window")
    kind = _layer_type(module)
    if kind not in (None, "full_attention", "global_attention", "sliding_attention", "local_attention"):
        raise _refused(module, f"is a layer of type {kind!r}")
    if window is None and (kind in ("sliding_attention", "local_attention") or _has_window(module)):
        raise _refused(module, "applies its window only through a mask")
    rule: Rule | None = Causal() if causal else None
    if window is not None:
        rule = Window(left=window - 1, right=0 if causal else window - 1)
    return sequences.attention_mask(rule)


def _layer_type(module: nn.Module) -> str | None:
    types = getattr(getattr(module, "config", None), "layer_types", None)
    index = getattr(module, "layer_idx", None)
    return types[index] if types and index is not None and index < len(types) else None


def _has_window(module: nn.Module) -> bool:
    return isinstance(getattr(module, "sliding_window", None), int)


def _refused(module: nn.Module, reason: str) -> ArgumentError:
    return ArgumentError(
        f"Cannot pack {type_name(module)}: it {reason}. Run the model with padding: "
        "regard.huggingface.unpack(model)."
    )


# Layers


def _stacks(model: nn.Module) -> dict[nn.Module, list[nn.Module]]:
    """Return the models that take a padding mask, each with its layers."""
    from regard.inspection.editing.interventions import uses_interface

    modules = own_attention(model, uses_interface)
    if modules:
        raise ArgumentError(
            f"Cannot pack {type_name(model)}: the attention of {', '.join(modules)} does not use "
            "transformers' attention interface. Run the model with padding."
        )
    stacks: dict[nn.Module, list[nn.Module]] = {}
    for owner, layer in _layers(model, uses_interface):
        if owner is not None and "attention_mask" in _parameter_names(owner):
            stacks.setdefault(owner, []).append(layer)
    if not stacks:
        raise ArgumentError(
            f"Cannot pack {type_name(model)}: it has no layers that take an attention_mask. Pass a "
            "transformers text model, such as AutoModel.from_pretrained(…)."
        )
    return stacks


def _layers(
    model: nn.Module, attends: Callable[[nn.Module], bool]
) -> Iterator[tuple[nn.Module | None, nn.Module]]:
    """Yield (model, layer) pairs: the innermost model around a layer, and the layer itself.

    A layer is an item of a module list and contains attention.
    """
    from transformers import PreTrainedModel

    def walk(module: nn.Module, owner: nn.Module | None) -> Iterator[tuple[nn.Module | None, nn.Module]]:
        owner = module if isinstance(module, PreTrainedModel) else owner
        for child in module.children():
            items = list(child) if isinstance(child, nn.ModuleList) else [child]
            for item in items:
                if (
                    isinstance(child, nn.ModuleList)
                    and not _is_group(item)
                    and any(map(attends, item.modules()))
                ):
                    yield owner, item
                else:
                    yield from walk(item, owner)

    seen: set[nn.Module] = set()  # Albert runs one layer several times
    for owner, layer in walk(model, None):
        if layer not in seen:
            seen.add(layer)
            yield owner, layer


def _is_group(module: nn.Module) -> bool:
    """Return whether a module contains only a list of layers, as in Albert."""
    children = list(module.children())
    return len(children) == 1 and isinstance(children[0], nn.ModuleList)


def _parameter_names(model: nn.Module) -> list[str]:
    return list(inspect.signature(model.forward).parameters)


# Forward methods


class _Forward:
    """Replaces the `forward` of one module. Copying the module copies this object too."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.forward = module, module.forward

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.forward)


class _ModelForward(_Forward):
    """Creates the packing of a call, if its batch is padded."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names = _parameter_names(self.module)
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        cached = any(values.get(name) is not None for name in _CACHES)
        if values.get("use_cache") is None and not cached and {"use_cache", "kwargs"} & set(names):
            kwargs = {**kwargs, "use_cache": False}  # by default, decoders create a cache
            values["use_cache"] = False
        stack = _STATE.models.setdefault(self.module, [])
        stack.append(_packing(self.module, values))
        try:
            return self.forward(*args, **kwargs)
        finally:
            stack.pop()
            if not stack:
                del _STATE.models[self.module]


class _LayerForward(_Forward):
    """Packs the inputs of a layer and unpacks its outputs, if the running model has a packing."""

    def __init__(self, layer: nn.Module, owner: nn.Module) -> None:
        super().__init__(layer)
        self.owner, self.splittable = owner, True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stack = _STATE.models.get(self.owner)
        packing = stack[-1] if stack else None
        if packing is None:
            return self.forward(*args, **kwargs)
        for name in _CROSS_INPUTS:
            if kwargs.get(name) is not None:
                raise _refused(self.module, f"got {name}, which cannot be packed")
        kwargs = {
            name: None if name == "attention_mask" else _map(x, packing.is_padded, packing.pack)
            for name, x in kwargs.items()
        }
        args = tuple(_map(x, packing.is_padded, packing.pack) for x in args)
        return _map(self._run(packing, args, kwargs), packing.is_packed, packing.unpack)

    def _run(self, packing: Packing, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the layer on packed inputs; without gradients, on a chunk of the sequences at a time."""
        chunks = packing.sequences.chunks(CHUNK_TOKENS)
        if len(chunks) < 2 or torch.is_grad_enabled() or not self.splittable:
            return self._call(packing.sequences, args, kwargs)
        outputs, start = [], 0
        for sequences in chunks:
            part = partial(torch.narrow, dim=1, start=start, length=sequences.tokens)
            values = {name: _map(x, packing.is_packed, part) for name, x in kwargs.items()}
            output = self._call(sequences, _map(args, packing.is_packed, part), values)
            if not _is_per_token(output, sequences.tokens):  # such as a mean over the tokens
                self.splittable = False
                return self._call(packing.sequences, args, kwargs)
            outputs.append(output)
            start += sequences.tokens
        return _join(outputs)

    def _call(self, sequences: Sequences, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before, _STATE.layer = _STATE.layer, sequences
        try:
            return self.forward(*args, **kwargs)
        finally:
            _STATE.layer = before


def _packing(model: nn.Module, values: dict[str, Any]) -> Packing | None:
    """Return the packing of a call, or None to run it with padding."""
    from regard.inspection.hooks.edited_calls import is_edited
    from regard.inspection.hooks.interception import is_observed

    mask = values.get("attention_mask")
    if model in _STATE.suspended or torch.compiler.is_compiling() or is_observed() or is_edited():
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    config = getattr(model, "config", None)
    shaped = [name for name in _BATCH_OUTPUTS if values.get(name) or getattr(config, name, False)]
    cached = values.get("use_cache") or any(values.get(name) is not None for name in _CACHES)
    if shaped or cached or any(values.get(name) is not None for name in _CROSS_INPUTS):
        return None
    if model.training and getattr(model, "is_gradient_checkpointing", False):
        raise ArgumentError(
            "A packed model cannot be trained with gradient checkpointing. Call "
            "model.gradient_checkpointing_disable(), or regard.huggingface.unpack(model)."
        )
    visible = mask != 0
    padded = bool(visible.any()) and not bool(visible.all())
    return Packing(mask) if padded and not _has_gaps(visible) else None


def _has_gaps(visible: Tensor) -> bool:
    """Return whether a mask (b, n) has padding between tokens. Packing would change distances in a window."""
    starts = visible[:, 1:] & ~visible[:, :-1]
    return bool((starts.sum(-1) + visible[:, 0] > 1).any())


def _map(x: Any, matches: Callable[[Any], bool], change: Callable[[Tensor], Tensor]) -> Any:
    """Change the matching tensors in a value, or in a tuple or list of values."""
    if isinstance(x, tuple | list) and not hasattr(x, "_fields"):
        return type(x)(_map(item, matches, change) for item in x)
    return change(x) if matches(x) else x


def _is_per_token(output: Any, tokens: int) -> bool:
    """Return whether an output consists only of None and of tensors with one entry per token."""
    if type(output) in (tuple, list):
        return all(_is_per_token(x, tokens) for x in output)
    if isinstance(output, Tensor):
        return output.dim() > 1 and tuple(output.shape[:2]) == (1, tokens)
    return output is None


def _join(outputs: list[Any]) -> Any:
    """Concatenate the outputs of the parts of a batch."""
    first = outputs[0]
    if type(first) in (tuple, list):
        return type(first)(_join(list(parts)) for parts in zip(*outputs, strict=True))
    return None if first is None else torch.cat(outputs, 1)


# Check


@contextmanager
def _suspended(owner: nn.Module) -> Iterator[None]:
    """Run a packed model with padding inside a `with` block."""
    _STATE.suspended.add(owner)
    try:
        yield
    finally:
        _STATE.suspended.discard(owner)


def check_packing(model: nn.Module) -> None:
    """Raise an ArgumentError if packing changes the outputs of a model on a few tokens."""
    from regard.inspection.hooks.edited_calls import is_edited
    from regard.inspection.hooks.interception import is_observed

    if is_observed() or is_edited():  # such calls run with padding, so nothing would be compared
        raise ArgumentError("Call pack before the `with` block of watch or edit, not inside it.")
    owners = [owner for owner in _stacks(model) if "input_ids" in _parameter_names(owner)]
    for owner in owners:
        device = next((p.device for p in owner.parameters()), None)
        ids = torch.arange(3, 21, device=device).reshape(3, 6)
        lengths = torch.tensor([6, 2, 4], device=device)
        mask = (torch.arange(6, device=device) < lengths[:, None]).long()
        inputs = {"input_ids": ids, "attention_mask": mask}
        with torch.no_grad():
            with _suspended(owner):
                padded = owner(**inputs)[0]
            try:
                packed = owner(**inputs)[0]
            except (RuntimeError, IndexError, TypeError) as error:  # the run with padding succeeded
                raise _refused(owner, f"fails without padding ({error})") from error
        if packed.shape != padded.shape or packed.shape[:2] != ids.shape:
            raise _refused(owner, f"returns shape {tuple(packed.shape)} instead of {tuple(padded.shape)}")
        difference = float((packed - padded)[mask != 0].abs().max())
        scale = float(padded[mask != 0].abs().max())
        if not difference <= 1e-4 * max(scale, 1.0):
            raise _refused(
                owner, f"returns outputs that differ by {difference:.2g} (largest output: {scale:.2g})"
            )
