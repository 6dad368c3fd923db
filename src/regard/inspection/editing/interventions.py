"""Ablate or change heads while a model runs, and measure the importance of each head."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from regard._util.name_hints import hint_arguments
from regard._util.text import type_name
from regard.errors import ArgumentError, DTypeError
from regard.inspection.editing.activation_patching import Capture, Patch, ResampleAblation
from regard.inspection.editing.edges import Block, ZeroValues
from regard.inspection.editing.replacements import (
    AttentionCall,
    Intervention,
    MeanAblation,
    ReplaceOutput,
    ReplaceWeights,
    UniformAttention,
    ZeroAblation,
    as_heads,
)
from regard.inspection.hooks.edited_calls import Edit, editing
from regard.inspection.layers import Layers, attends, attends_by_hand, clean, head_numbers, matching_names
from regard.models.layers.dropout import eval_mode

__all__ = [
    "Block",
    "Capture",
    "Intervention",
    "MeanAblation",
    "Patch",
    "ReplaceOutput",
    "ReplaceWeights",
    "ResampleAblation",
    "UniformAttention",
    "ZeroAblation",
    "ZeroValues",
    "edit",
    "importance",
]

Loss = Callable[[Any], Tensor]


@hint_arguments
@contextmanager
def edit(
    model: nn.Module, layers: Layers | None, heads: int | Sequence[int] | None, intervention: Intervention
) -> Iterator[nn.Module]:
    """Change some heads of a model inside a `with` block.

    Works with regard's layers, `nn.MultiheadAttention`, Hugging Face models that use the attention interface
    of transformers, modules that call torch's `scaled_dot_product_attention`, and attention in plain tensor
    operations: softmax(query · keyᵀ) · value, where weights of 0 count as masked. Blocks can be nested, and
    affect only calls in their own thread. The weights of an edited layer, as returned by the model or
    recorded by `watch`, are the weights before the intervention.

    layers: a number, name or pattern, a list of these, or None for all layers.
    heads: a head, a list of heads, or None for all heads.
    intervention: ZeroAblation(), MeanAblation(), ResampleAblation(), UniformAttention(),
        Block(queries, keys), ZeroValues(keys), Capture(), Patch(captured), ReplaceOutput(function) or
        ReplaceWeights(function).

    >>> import torch, regard
    >>> model = regard.models.LanguageModel(100, regard.models.TransformerConfig(width=16, heads=2, layers=2))
    >>> tokens = torch.tensor([[5, 6, 7]])
    >>> with regard.edit(model, "decoder.blocks.1.*", [0], regard.ZeroAblation()):
    ...     changed = model(tokens)
    >>> torch.equal(changed, model(tokens))
    False
    """
    if not isinstance(model, nn.Module):
        raise DTypeError(f"edit() got {type_name(model)}; pass a torch.nn.Module.")
    if not isinstance(intervention, Intervention):
        fix = f"{intervention.__name__}()" if isinstance(intervention, type) else "regard.ZeroAblation()"
        raise DTypeError(f"edit(intervention=…) got {intervention!r}; pass an intervention, such as {fix}.")
    modules, numbers = _select(model, layers), as_heads(heads)
    for name, module in modules.items():
        if (count := head_count(module)) is not None:
            head_numbers("edit", numbers or (), count, name or "the model")
    edits = {module: Edit(numbers, intervention, name) for name, module in modules.items()}
    with _running(model) as ran, editing(edits) as edited:
        yield model
    if ran and not edited:
        raise ArgumentError(
            f"edit had no effect: the attention of {', '.join(modules) or 'the model'} did not run, computes "
            "no softmax over products of queries and keys, or ran as compiled code. Run the model "
            'uncompiled, or with another implementation, such as model.set_attn_implementation("sdpa").'
        )


@contextmanager
def _running(model: nn.Module) -> Iterator[list[bool]]:
    """Yield a list that becomes nonempty when the model runs in this thread."""
    ran: list[bool] = []
    thread = get_ident()
    # a hook would disable the fast path of these modules
    if isinstance(model, nn.TransformerEncoderLayer | nn.MultiheadAttention):
        yield ran
        return

    def on_call(*_: Any) -> None:
        if get_ident() == thread:
            ran.append(True)

    hook = model.register_forward_hook(on_call)
    try:
        yield ran
    finally:
        hook.remove()


def importance(
    model: nn.Module, batch: Any, loss: Loss | None = None, *, intervention: Intervention | None = None
) -> Any:
    """Measure the importance of each head: the change in the loss when the head is ablated, largest first.

    Returns a pandas DataFrame with the columns layer, number, head and change if pandas is installed,
    otherwise a list of dictionaries. The model runs once per head, in evaluation mode and without gradients.

    batch: the model's arguments: a dictionary, a tuple, or one tensor.
    loss: function from the model's output to a number. Default: the model's own loss, if the batch has
        labels; otherwise the KL divergence between the original and the ablated predictions,
        KL(original ‖ ablated), in nats per token.
    intervention: applied to each head in turn; default: ZeroAblation().

    >>> import torch, regard
    >>> model = regard.models.LanguageModel(100, regard.models.TransformerConfig(width=16, heads=2, layers=2))
    >>> table = regard.importance(model, torch.tensor([[5, 6, 7]]))
    >>> len(table)
    4
    """
    modules = _select(model, None)
    rows = []
    with eval_mode(model), torch.no_grad():
        heads = [head_count(module) or _count_heads(model, batch, module) for module in modules.values()]
        output = call_model(model, batch)
        change = _default_change(model, output, batch) if loss is None else _loss_change(loss, output)
        for number, (name, module) in enumerate(modules.items()):
            for head in range(heads[number]):
                with editing({module: Edit((head,), intervention or ZeroAblation(), name)}):
                    ablated = call_model(model, batch)
                rows.append({"layer": name, "number": number, "head": head, "change": change(ablated)})
    return _table(sorted(rows, key=lambda row: -row["change"]))


# Layers and heads


def attentions(model: nn.Module) -> dict[str, nn.Module]:
    """Return the attention modules that `edit` can change, by name, in model order.

    >>> import torch
    >>> from regard.inspection.editing.interventions import attentions
    >>> list(attentions(torch.nn.Transformer(8, 2, 1, 1, batch_first=True)))
    ['encoder.layers.0.self_attn', 'decoder.layers.0.self_attn', 'decoder.layers.0.multihead_attn']
    """
    return {
        clean(name): module
        for name, module in model.named_modules()
        if attends(module) or attends_by_hand(module)
    }


def uses_interface(module: nn.Module) -> bool:
    """Return whether a module uses the attention interface of transformers."""
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _select(model: nn.Module, layers: Layers | None) -> dict[str, nn.Module]:
    editable = attentions(model)
    layers = [layers] if isinstance(layers, int | str) else ["*"] if layers is None else list(layers)
    if not editable:  # the modules may call SDPA through functions in other files
        modules = {clean(name): module for name, module in model.named_modules()}
        named = {layer for layer in layers if isinstance(layer, str) and layer in modules}
        if not named:
            raise ArgumentError(
                f"edit() recognizes no attention layers in {type_name(model)}. It recognizes regard's "
                "layers, nn.MultiheadAttention, layers that use the attention interface of transformers or "
                "call scaled_dot_product_attention, and layers with attention in their class name that "
                "call softmax. If a module computes attention in a function in another file, pass the "
                "name of the module."
            )
        return {name: modules[name] for name in named}
    names = [name for layer in layers for name in matching_names("edit", layer, list(editable))]
    return {name: editable[name] for name in names}


def head_count(module: nn.Module) -> int | None:
    """Return the number of heads if the module stores it as an attribute, otherwise None."""
    for name in ("heads", "num_heads", "num_attention_heads", "n_heads"):
        if isinstance(count := getattr(module, name, None), int):
            return count
    if isinstance(groups := getattr(module, "num_key_value_groups", None), int):
        key_heads = getattr(getattr(module, "config", None), "num_key_value_heads", None)
        return groups * key_heads if isinstance(key_heads, int) else None
    return None


# Importance


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call a model with a dictionary, a tuple, or one argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


class _HeadCounter(Intervention):
    """An intervention that counts the heads and changes nothing."""

    def __init__(self) -> None:
        self.heads = 0

    def __call__(self, call: AttentionCall, heads: list[int]) -> Tensor:
        self.heads = len(heads)
        return call.output


def _count_heads(model: nn.Module, batch: Any, module: nn.Module) -> int:
    counter = _HeadCounter()
    with editing({module: Edit(None, counter)}):
        call_model(model, batch)
    return counter.heads


def _loss_change(loss: Loss, output: Any) -> Callable[[Any], float]:
    before = float(loss(output))
    return lambda ablated: float(loss(ablated)) - before


def _default_change(model: nn.Module, output: Any, batch: Any) -> Callable[[Any], float]:
    """Return a function that computes the change in the model's loss, or the divergence of its logits."""
    if getattr(output, "loss", None) is not None:
        return _loss_change(lambda output: output.loss, output)
    logits = _logits(model, output)
    if logits is None:
        raise ArgumentError(
            f"importance() got {type_name(model)}, which returns neither a loss nor logits. Pass a "
            "function from the model's output to a number: loss=lambda output: output[0].mean()."
        )
    before = logits.float().log_softmax(-1)
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    tokens = mask.bool() if isinstance(mask, Tensor) and mask.shape == before.shape[:-1] else slice(None)

    def divergence(ablated: Any) -> float:
        logits = _logits(model, ablated)
        assert logits is not None
        after = logits.float().log_softmax(-1)
        terms = nn.functional.kl_div(after, before, reduction="none", log_target=True)
        return float(terms.sum(-1)[tokens].mean())

    return divergence


def _logits(model: nn.Module, output: Any) -> Tensor | None:
    if isinstance(logits := getattr(output, "logits", None), Tensor):
        return logits
    # regard's language models return their logits as a tensor
    return output if isinstance(output, Tensor) and hasattr(model, "output_weight") else None


def _table(rows: list[dict[str, Any]]) -> Any:
    try:
        import pandas as pd  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        return rows
    return pd.DataFrame(rows)
