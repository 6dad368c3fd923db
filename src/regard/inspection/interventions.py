"""Heads switched off or changed while a model runs, and how much each of them matters."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, DTypeError
from regard.inspection.hooks.interventions import Edit, editing
from regard.inspection.layers import Layers, attends, clean, fits, named
from regard.inspection.replacements import (
    AttentionCall,
    MeanAblation,
    Intervention,
    ReplaceOutput,
    ReplaceWeights,
    UniformAttention,
    ZeroAblation,
    as_heads,
)
from regard.models.layers.attention import Attends

__all__ = ["MeanAblation", "Intervention", "ReplaceOutput", "ReplaceWeights", "UniformAttention", "ZeroAblation", "edit", "importance"]

Loss = Callable[[Any], Tensor]


@contextmanager
def edit(
    model: nn.Module, layers: Layers | None, heads: int | Sequence[int] | None, change: Intervention
) -> Iterator[nn.Module]:
    """Change some heads of a model for as long as a block lasts; all else in it stays as it is.

    For Hugging Face models that go through its attention interface, `nn.MultiheadAttention`, and regard's own
    layers. Blocks nest; each acts on what the thread that opened it runs. The weights that a model returns
    are those before the change.

    layers: a number, counted over the model's attentions in their order, a name or a pattern, several of
        these, or None for all.
    heads: a number, several, or None for all.
    change: ZeroAblation(), MeanAblation(), UniformAttention(), ReplaceOutput(function) or ReplaceWeights(function).

    >>> import torch, regard
    >>> model = regard.models.LanguageModel(100, regard.models.TransformerConfig(width=16, heads=2, layers=2))
    >>> tokens = torch.tensor([[5, 6, 7]])
    >>> with regard.edit(model, "decoder.blocks.1.*", [0], regard.ZeroAblation()):
    ...     changed = model(tokens)
    >>> torch.equal(changed, model(tokens))
    False
    """
    if not isinstance(model, nn.Module):
        raise DTypeError(f"edit got a {type(model).__name__}; it changes a torch.nn.Module.")
    if not isinstance(change, Intervention):
        cure = f"{change.__name__}()" if isinstance(change, type) else "ZeroAblation()"
        raise DTypeError(f"edit got the change {change!r}; give one of regard's, such as {cure}.")
    chosen, one = _choose(model, layers), Edit(as_heads(heads), change)
    for name, module in chosen.items():
        _check_heads(name, module, one.heads)
    with editing(dict.fromkeys(chosen.values(), one)):
        yield model


def importance(
    model: nn.Module, batch: Any, loss: Loss | None = None, *, intervention: Intervention | None = None
) -> Any:
    """How much each head matters: the change of the loss when it is zeroed, the most important one first.

    A pandas frame with the columns layer, number, head and change, where pandas is installed; otherwise a
    list of dictionaries. The model runs once for each of its heads, in evaluation mode and without gradients.

    batch: what the model is called with: a dictionary of arguments, a tuple of them, or one tensor.
    loss: a number from what the model returns. By default its own loss, if the batch has labels; otherwise
        the Kullback-Leibler divergence from the logits as they are to those without the head, in nats
        per token.
    change: what is done to a head instead of ZeroAblation().

    >>> import torch, regard
    >>> model = regard.models.LanguageModel(100, regard.models.TransformerConfig(width=16, heads=2, layers=2))
    >>> table = regard.importance(model, torch.tensor([[5, 6, 7]]))
    >>> len(table)
    4
    """
    found = _choose(model, None)
    counts = {name: heads_of(module) for name, module in found.items()}
    with _evaluating(model), torch.no_grad():
        heads: list[int] = []
        for name, module in found.items():
            heads.append(counts[name] or _count(model, batch, module))
        before = _call(model, batch)
        judge = _difference(model, before, batch) if loss is None else _by(loss, before)
        rows = []
        for number, (name, module) in enumerate(found.items()):
            for head in range(heads[number]):
                with editing({module: Edit((head,), intervention or ZeroAblation())}):
                    after = _call(model, batch)
                rows.append({"layer": name, "number": number, "head": head, "change": judge(after)})
    return _table(sorted(rows, key=lambda row: -row["change"]))


# Which attentions


def attentions(model: nn.Module) -> dict[str, nn.Module]:
    """The attentions of a model that can be edited, by name, in their order.

    >>> import torch
    >>> from regard.inspection.interventions import attentions
    >>> list(attentions(torch.nn.Transformer(8, 2, 1, 1, batch_first=True)))
    ['encoder.layers.0.self_attn', 'decoder.layers.0.self_attn', 'decoder.layers.0.multihead_attn']
    """
    return {
        clean(name): module
        for name, module in model.named_modules()
        if isinstance(module, Attends | nn.MultiheadAttention) or through_interface(module)
    }


def through_interface(module: nn.Module) -> bool:
    """Whether a module asks Hugging Face's interface for its attention."""
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _choose(model: nn.Module, layers: Layers | None) -> dict[str, nn.Module]:
    known = attentions(model)
    direct = {
        clean(name): module
        for name, module in model.named_modules()
        if attends(module) and clean(name) not in known
    }
    wanted = [layers] if isinstance(layers, int | str) else ["*"] if layers is None else list(layers)
    meant = {name for one in wanted if isinstance(one, str) for name in direct if fits(name, one)}
    if meant and not any(fits(name, one) for one in wanted if isinstance(one, str) for name in known):
        kinds = ", ".join(sorted({type(direct[name]).__name__ for name in meant}))
        raise ArgumentError(
            f"{kinds} calls torch's scaled_dot_product_attention itself. watch sees such calls, but edit "
            "cannot change them: it changes regard's layers, nn.MultiheadAttention and what goes through the "
            "attention interface of transformers. A forward hook on the module can change its output."
        )
    if not known:
        raise ArgumentError(
            f"there is nothing to edit in a {type(model).__name__}: no attention in it is regard's, torch's "
            "nn.MultiheadAttention, or goes through the attention interface of transformers."
        )
    names = [name for one in wanted for name in named("edit", one, list(known))]
    return {name: known[name] for name in names}


def heads_of(module: nn.Module) -> int | None:
    """The number of heads of an attention, if it can be told before it runs."""
    for name in ("heads", "num_heads", "num_attention_heads", "n_heads"):
        if isinstance(found := getattr(module, name, None), int):
            return found
    config = getattr(module, "config", None)
    if isinstance(groups := getattr(module, "num_key_value_groups", None), int):
        keys = getattr(config, "num_key_value_heads", None)
        return groups * keys if isinstance(keys, int) else None
    return None


def _check_heads(name: str, module: nn.Module, heads: tuple[int, ...] | None) -> None:
    count = heads_of(module)
    for head in heads or ():
        if count is not None and not -count <= head < count:
            raise ArgumentError(
                f"edit got head {head}, and {name or 'the model'} has {count}; they count from 0."
            )


# How much they matter


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


class _Count(Intervention):
    """Notes how many heads there are."""

    def __init__(self) -> None:
        self.heads = 0

    def __call__(self, call: AttentionCall, heads: list[int]) -> Tensor:
        self.heads = len(heads)
        return call.output


def _count(model: nn.Module, batch: Any, module: nn.Module) -> int:
    counter = _Count()
    with editing({module: Edit(None, counter)}):
        _call(model, batch)
    return counter.heads


def _by(loss: Loss, before: Any) -> Callable[[Any], float]:
    first = float(loss(before))
    return lambda after: float(loss(after)) - first


def _difference(model: nn.Module, before: Any, batch: Any) -> Callable[[Any], float]:
    """The change of the model's own loss, or the divergence of its logits."""
    if getattr(before, "loss", None) is not None:
        return _by(lambda output: output.loss, before)
    logits = _logits(model, before)
    if logits is None:
        raise ArgumentError(
            f"importance got a {type(model).__name__}, which returns neither a loss nor logits; "
            "say what counts: loss=lambda output: ..., a number for what the model returns."
        )
    first = logits.float().log_softmax(-1)
    seen = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    real = seen.bool() if isinstance(seen, Tensor) and seen.shape == first.shape[:-1] else slice(None)

    def divergence(after: Any) -> float:
        last = _logits(model, after)
        assert last is not None
        apart = nn.functional.kl_div(last.float().log_softmax(-1), first, reduction="none", log_target=True)
        return float(apart.sum(-1)[real].mean())

    return divergence


def _logits(model: nn.Module, output: Any) -> Tensor | None:
    if isinstance(found := getattr(output, "logits", None), Tensor):
        return found
    # regard's own language models return them as they are
    return output if isinstance(output, Tensor) and hasattr(model, "output_weight") else None


def _table(rows: list[dict[str, Any]]) -> Any:
    try:
        import pandas as pd  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        return rows
    return pd.DataFrame(rows)
