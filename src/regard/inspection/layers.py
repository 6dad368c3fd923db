"""Find the attention modules of a model by inspecting its code, and select, name and label them."""

import inspect
import re
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from types import CodeType
from typing import Any

from torch import nn

from regard._util.text import index_range, pluralize
from regard.errors import ArgumentError, DTypeError
from regard.models.layers.attention import Attends, is_cross_attention

Layers = int | str | Sequence[int | str]
_BASE_CLASSES = ("transformers.modeling_", "transformers.generation")  # Python modules that all models share
_ATTENTION_CALLS = {"ALL_ATTENTION_FUNCTIONS", "scaled_dot_product_attention"}


def attends(module: nn.Module) -> bool:
    """Return whether a module computes attention that `watch` can record.

    >>> import torch
    >>> from regard.inspection.layers import attends
    >>> attends(torch.nn.MultiheadAttention(8, 2)), attends(torch.nn.Linear(8, 8))
    (True, False)
    """
    return isinstance(module, Attends | nn.MultiheadAttention) or _calls_attention(type(module))  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def _calls_attention(cls: Hashable) -> bool:
    assert isinstance(cls, type)
    for base in cls.__mro__:
        if base.__module__.startswith(("torch.nn.", *_BASE_CLASSES)):
            continue  # these modules mention attention but do not compute it
        functions = _own_functions(base)
        if any(_ATTENTION_CALLS & set(_names(function.__code__)) for function in functions):
            return True
    return False


def attends_by_hand(module: nn.Module) -> bool:
    """Return whether the class name and the code of a module look like attention in tensor operations."""
    name = type(module).__name__.lower()
    return ("attention" in name or "attn" in name) and _calls_softmax(type(module))  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def _calls_softmax(cls: Hashable) -> bool:
    assert isinstance(cls, type)
    functions = (f for base in cls.__mro__ for f in _own_functions(base))
    return any("softmax" in _names(f.__code__) for f in functions if not f.__module__.startswith("torch."))


def _own_functions(cls: type) -> list[Any]:
    """Return the functions that a class itself defines."""
    # list: other threads may patch the class during the iteration
    return [inspect.unwrap(f) for f in list(vars(cls).values()) if inspect.isfunction(f)]


def has_windows(model: nn.Module) -> bool:
    """Return whether a model may divide its tokens into windows, judging by the names in its code.

    >>> import torch
    >>> from regard.inspection.layers import has_windows
    >>> has_windows(torch.nn.Linear(2, 2))
    False
    """
    return any(
        any(map(_is_window_name, list(vars(module)))) or _mentions_windows(type(module))  # type: ignore[arg-type]
        for module in model.modules()
    )


@lru_cache(maxsize=4096)
def _mentions_windows(cls: Hashable) -> bool:
    assert isinstance(cls, type)
    bases = [base for base in cls.__mro__ if not base.__module__.startswith(("torch.nn.", *_BASE_CLASSES))]
    functions = [f for base in bases for f in _own_functions(base)]
    names = (name for f in functions for name in (*_names(f.__code__), *f.__code__.co_varnames))
    return any(map(_is_window_name, names))


def _is_window_name(name: str) -> bool:
    return "sliding" not in name and ("window" in name or "partition" in name)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def own_attention(model: nn.Module, is_known: Callable[[nn.Module], bool] = attends) -> list[str]:
    """Return the names of attention classes whose modules contain no known attention module."""
    classes = {
        type(module).__name__
        for module in model.modules()
        if "attention" in type(module).__name__.lower() and not any(map(is_known, module.modules()))
    }
    return sorted(classes)


def compiled(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules compiled by torch.compile(module) or module.compile(), by name.

    >>> import torch
    >>> from regard.inspection.layers import compiled
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    >>> model[1].compile(backend="eager")
    >>> list(compiled(model))
    ['1']
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # loaded by the first compilation
    if dynamo is None:
        return {}
    return {
        clean(name): module
        for name, module in model.named_modules()
        if isinstance(module, dynamo.OptimizedModule) or module._compiled_call_impl is not None
    }


def has_no_attention(model: nn.Module) -> bool:
    """Return whether a model consists only of torch and regard layers, none of them attention layers."""
    known = ("torch.nn.", "regard.")
    return not any(attends(m) or not type(m).__module__.startswith(known) for m in model.modules())


class LayerSelection:
    """A predicate on layer names: true for all layers, or for those selected by number, name or pattern.

    >>> import torch
    >>> from regard.inspection.layers import LayerSelection
    >>> model = torch.nn.Transformer(8, 2, 1, 1, batch_first=True)
    >>> selection = LayerSelection(model, "decoder.*")
    >>> selection("decoder.layers.0.self_attn"), selection("encoder.layers.0.self_attn")
    (True, False)
    """

    def __init__(self, model: nn.Module, layers: Layers | None) -> None:
        self.patterns: tuple[str, ...] | None = None
        if layers is None:
            return
        names = [
            clean(name)
            for name, module in model.named_modules()
            if attends(module) or attends_by_hand(module)
        ]
        modules = {clean(name) for name, _ in model.named_modules()}
        layers = [layers] if isinstance(layers, int | str) else layers
        self.patterns = tuple(self._pattern(layer, names, modules) for layer in layers)

    def _pattern(self, layer: int | str, names: list[str], modules: set[str]) -> str:
        if not names and isinstance(layer, str) and any(matches(name, layer) for name in modules):
            return layer  # the attention modules are known only when they run
        matching = matching_names("watch", layer, names)
        return matching[0] if isinstance(layer, int) else layer

    def __call__(self, name: str) -> bool:
        return self.patterns is None or any(matches(name, pattern) for pattern in self.patterns)


def clean(name: str) -> str:
    """Remove torch.compile's prefix from a module name."""
    return name.replace("_orig_mod.", "").removesuffix("_orig_mod").removesuffix(".")


def matching_names(function: str, layer: int | str, names: Sequence[str]) -> list[str]:
    """Return the names selected by a number, name or pattern. Errors mention the calling function.

    >>> from regard.inspection.layers import matching_names
    >>> matching_names("watch", -1, ["encoder.0", "encoder.1"])
    ['encoder.1']
    >>> matching_names("edit", "encoder", ["encoder.0", "decoder.0"])
    ['encoder.0']
    """
    if isinstance(layer, bool) or not isinstance(layer, int | str):
        raise DTypeError(f"{function}(layers=…) got {layer!r}; pass a number, a name or a pattern.")
    if not names:
        raise ArgumentError(
            f"{function}(layers={layer!r}): the attention layers of this model are not known before it runs; "
            "omit layers=."
        )
    if isinstance(layer, int):
        if not -len(names) <= layer < len(names):
            raise ArgumentError(
                f"{function}(layers={layer}): out of range for {pluralize(len(names), 'layer')}. "
                f"{_listed(names)}"
            )
        return [names[layer]]
    matching = [name for name in names if matches(name, layer)]
    if not matching:
        raise ArgumentError(f"{function}(layers={layer!r}): no layer matches. {_listed(names)}")
    return matching


def matches(name: str, pattern: str) -> bool:
    """Return whether a name matches a pattern, which is a name, the name of a parent module, or a glob."""
    return name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)


def head_numbers(function: str, heads: Sequence[int], count: int, layer: str = "this layer") -> list[int]:
    """Convert negative head numbers to non-negative ones. Errors name the calling function and the layer."""
    for head in heads:
        if not -count <= head < count:
            raise ArgumentError(
                f"{function}(heads=…): head {head} is out of range; {layer} has {index_range('head', count)}."
            )
    return [head % count for head in heads]


def _listed(names: Sequence[str]) -> str:
    shown = names if len(names) <= 12 else [*names[:6], "…", *names[-3:]]
    return f"The layers are {', '.join(shown)}." if len(names) > 1 else f"The only layer is {names[0]}."


# Names


def layer_label(name: str) -> str:
    """Return a readable label for a layer, from the name of its module.

    >>> from regard.inspection.layers import layer_label
    >>> [layer_label(name) for name in ("encoder.blocks.0.attention", "decoder.blocks.1.cross", "blocks.2")]
    ['encoder 0', 'decoder 1 to source', 'layer 2']
    >>> layer_label("decoder.attention")
    'decoder to source'
    """
    path, _, call = name.partition("@")
    suffix = f", call {call}" if call else ""
    parts = path.split(".")
    number = next((int(part) for part in reversed(parts) if re.fullmatch(r"[0-9]{1,9}", part)), None)
    stack = next((part for part in parts if part in ("encoder", "decoder")), "layer")
    to_source = " to source" if is_cross_attention(path) else ""
    if number is not None:
        return f"{stack} {number}{to_source}{suffix}"
    return (f"{stack}{to_source}" if to_source else path.replace(".", " ") or "attention") + suffix
