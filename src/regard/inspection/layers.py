"""Which modules of a model attend, as far as its code tells, and which of them are meant."""

import inspect
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from types import CodeType

from torch import nn

from regard.errors import ArgumentError, DTypeError
from regard.models.layers.attention import Attends

Layers = int | str | Sequence[int | str]
_TELLING = {"ALL_ATTENTION_FUNCTIONS", "scaled_dot_product_attention"}


def attends(module: nn.Module) -> bool:
    """Whether a module's code attends in a way that can be seen.

    >>> import torch
    >>> from regard.inspection.layers import attends
    >>> attends(torch.nn.MultiheadAttention(8, 2)), attends(torch.nn.Linear(8, 8))
    (True, False)
    """
    return isinstance(module, Attends | nn.MultiheadAttention) or _calls_attention(type(module))  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def _calls_attention(kind: Hashable) -> bool:
    assert isinstance(kind, type)
    for home in kind.__mro__:
        if home.__module__.startswith(("torch.nn.", "transformers.modeling_", "transformers.generation")):
            continue  # what all models of transformers have in common speaks of attention only
        functions = (inspect.unwrap(f) for f in vars(home).values() if inspect.isfunction(f))
        if any(_TELLING & set(_names(function.__code__)) for function in functions):
            return True
    return False


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def own_attention(model: nn.Module, known: Callable[[nn.Module], bool] = attends) -> list[str]:
    """Classes that are called attentions, but in which nothing attends in a way that is known."""
    kinds = {
        type(module).__name__
        for module in model.modules()
        if "attention" in type(module).__name__.lower() and not any(map(known, module.modules()))
    }
    return sorted(kinds)


def compiled(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model that torch.compile(module) or module.compile() have compiled, by name.

    >>> import torch
    >>> from regard.inspection.layers import compiled
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    >>> model[1].compile(backend="eager")
    >>> list(compiled(model))
    ['1']
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # whoever has compiled anything has loaded it
    if dynamo is None:
        return {}
    return {
        clean(name): module
        for name, module in model.named_modules()
        if isinstance(module, dynamo.OptimizedModule) or module._compiled_call_impl is not None
    }


def plain(model: nn.Module) -> bool:
    """Whether all that a model consists of are torch's own layers and regard's, none of which attends."""
    ours = ("torch.nn.", "regard.")
    return not any(attends(m) or not type(m).__module__.startswith(ours) for m in model.modules())


class LayerSelection:
    """The layers that somebody wants to see: all, or by number, name or pattern.

    >>> import torch
    >>> from regard.inspection.layers import LayerSelection
    >>> model = torch.nn.Transformer(8, 2, 1, 1, batch_first=True)
    >>> choice = LayerSelection(model, "decoder.*")
    >>> choice("decoder.layers.0.self_attn"), choice("encoder.layers.0.self_attn")
    (True, False)
    """

    def __init__(self, model: nn.Module, layers: Layers | None) -> None:
        self.patterns: tuple[str, ...] | None = None
        if layers is None:
            return
        wanted = [layers] if isinstance(layers, int | str) else list(layers)
        names = [clean(name) for name, module in model.named_modules() if attends(module)]
        every = {clean(name) for name, _ in model.named_modules()}
        self.patterns = tuple(self._pattern(one, names, every) for one in wanted)

    def _pattern(self, one: int | str, names: list[str], every: set[str]) -> str:
        if not names and isinstance(one, str) and any(fits(name, one) for name in every):
            return one  # what attends there shows when it runs
        found = named("watch", one, names)
        return found[0] if isinstance(one, int) else one

    def __call__(self, name: str) -> bool:
        return self.patterns is None or any(fits(name, pattern) for pattern in self.patterns)


def clean(name: str) -> str:
    """A module's name, without what torch.compile puts into it."""
    return name.replace("_orig_mod.", "").removesuffix("_orig_mod")


def named(who: str, one: int | str, names: Sequence[str]) -> list[str]:
    """The names that a number, a name or a pattern stands for, or an error of who was asked.

    >>> from regard.inspection.layers import named
    >>> named("watch", -1, ["encoder.0", "encoder.1"]), named("edit", "encoder", ["encoder.0", "decoder.0"])
    (['encoder.1'], ['encoder.0'])
    """
    if isinstance(one, bool) or not isinstance(one, int | str):
        raise DTypeError(f"{who} got the layer {one!r}; a layer is a number, a name or a pattern of names.")
    if isinstance(one, int):
        if not -len(names) <= one < len(names):
            raise ArgumentError(f"{who} got the layer {one}; there are {len(names)}: {_listed(names)}.")
        return [names[one]]
    found = [name for name in names if fits(name, one)]
    if not found:
        raise ArgumentError(f"{who} got the layer {one!r}, and no name fits it; there are {_listed(names)}.")
    return found


def fits(name: str, pattern: str) -> bool:
    """Whether a module is meant by a name, by that of a module around it, or by a pattern."""
    return name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "none that can be told beforehand; leave layers out"
    return ", ".join(names) if len(names) <= 12 else f"{', '.join(names[:6])}, …, {', '.join(names[-3:])}"
