"""Attention that ran while a model was watched but was not recorded, and why."""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from regard.inspection.hooks.interception import THREAD
from regard.inspection.layers import Layers, LayerSelection, attends, clean, compiled, own_attention

_ATTENTION_NAME = re.compile("attention|attn|deltanet", re.IGNORECASE)

OTHER_THREAD = (
    "the model was called in another thread, and watch records only its own thread. "
    "Open the block in the thread that calls the model"
)
_NO_SOFTMAX = (
    "it does not call softmax in the watched thread. It may use linear or sigmoid attention, a convolution "
    "or a recurrence, or run in a worker thread"
)
_OTHER_SOFTMAX = "watch could not trace its softmax to a product of queries and keys"
_POOLING = (
    "it multiplies activations by a softmax that watch could not trace to a product of queries and keys, as "
    "in attention pooling, additive attention or linear attention"
)
_SCRIPT = "its softmax runs as TorchScript, which watch cannot trace. Use the unscripted module"
_THREAD = "it ran in another thread, and watch records only its own thread"
_COMPILED = (
    "it ran as compiled code, which watch cannot trace if torch.compile is first used inside the block. "
    "Compile the model before the block"
)


class CallHook:
    """A forward pre-hook that reports calls to a module. Copies of the module report nothing.

    report: called with three arguments: whether the call is in an observed thread, its positional arguments,
    and its keyword arguments.
    """

    def __init__(
        self, observer: Any, report: Callable[[bool, tuple[Any, ...], dict[str, Any]], None]
    ) -> None:
        self.observer, self.report = observer, report

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        # torch registers the hook before its with_kwargs flag, so another thread may call it without kwargs
        observed = self.observer in THREAD.observers
        if self.observer is not None and (kwargs is not None or not observed):
            self.report(observed, args, kwargs or {})

    def __deepcopy__(self, memo: Any) -> "CallHook":
        return CallHook(None, self.report)


class UnrecordedModules:
    """Finds the attention modules of a model that ran without being recorded.

    A module counts as attention if its class name matches `_ATTENTION_NAME` or it computes a softmax in
    TorchScript. Modules of torch and regard are excluded, because they are always recorded, and a hook would
    disable the fast path of torch's modules.
    """

    def __init__(self, model: nn.Module, selection: LayerSelection) -> None:
        self.model, self.selection = model, selection
        self.candidates = {
            module: clean(name)
            for name, module in model.named_modules()
            if (_ATTENTION_NAME.search(_class_name(module)) or is_scripted(module))
            and not type(module).__module__.startswith(("torch.nn.", "regard."))
            and selection(clean(name))
        }
        self.compiler_loaded = "torch._dynamo.eval_frame" in sys.modules
        self.ran: set[nn.Module] = set()
        self.ran_elsewhere: set[nn.Module] = set()  # modules that ran in other threads
        self.softmaxes: set[nn.Module] = set()  # modules whose softmax could not be traced
        self.pooled: set[nn.Module] = set()  # modules that multiply such a softmax by activations
        self.names = {module: clean(name) for name, module in model.named_modules()}

    def hooks(self, observer: Any) -> list[Any]:
        """Register hooks that record which candidates run; return their handles."""
        handles = []
        for module in self.candidates:
            if isinstance(module, torch.jit.ScriptModule):
                self.ran.add(module)
                continue

            def report(observed: bool, *_: Any, module: nn.Module = module) -> None:
                (self.ran if observed else self.ran_elsewhere).add(module)

            handles.append(module.register_forward_pre_hook(CallHook(observer, report), with_kwargs=True))
        return handles

    def describe(self, recorded: Iterable[str]) -> str:
        """Return the classes that ran without being recorded, with the reason; empty if there are none.

        recorded: names of the recorded modules.
        """
        names = set(recorded)
        missing = [module for module in self.candidates if module in self.ran | self.ran_elsewhere]
        missing = [module for module in missing if not self._is_recorded(self.candidates[module], names)]
        inner = [m for m in missing if not any(other in missing for other in list(m.modules())[1:])]
        reasons = Counter((_class_name(module), self._reason(module)) for module in inner)
        pooled = (m for m in self.pooled if m not in missing and self.names[m] not in names)
        reasons.update((type(module).__name__, _POOLING) for module in pooled)
        return "; ".join(
            f"{name} ({count} modules): {reason}" if count > 1 else f"{name}: {reason}"
            for (name, reason), count in reasons.items()
        )

    @staticmethod
    def _is_recorded(name: str, names: set[str]) -> bool:
        """Return whether a module, one of its submodules or a module that contains it was recorded."""
        if any(other == name or other.startswith(f"{name}.") or not name for other in names):
            return True
        parts = name.split(".")
        return any(".".join(parts[:count]) in names for count in range(1, len(parts)))

    def _reason(self, module: nn.Module) -> str:
        if module not in self.ran:
            return _THREAD
        if is_scripted(module):
            return _SCRIPT
        if any(inside in self.softmaxes for inside in module.modules()):
            return _OTHER_SOFTMAX
        name = self.candidates[module]
        if not self.compiler_loaded and any(name.startswith(outer) for outer in compiled(self.model)):
            return _COMPILED
        return _NO_SOFTMAX


def is_scripted(module: nn.Module) -> bool:
    """Return whether a module, or a function that it calls, computes a softmax in TorchScript.

    >>> import torch
    >>> from regard.inspection.unrecorded import is_scripted
    >>> is_scripted(torch.nn.Softmax(-1))
    False
    """
    if isinstance(module, torch.jit.ScriptModule):
        return _computes_softmax(module)
    return _calls_scripted_softmax(type(module))  # type: ignore[arg-type]


@lru_cache(maxsize=1024)
def _calls_scripted_softmax(cls: type[nn.Module]) -> bool:
    code = getattr(cls.forward, "__code__", None)
    functions = (cls.forward.__globals__.get(name) for name in code.co_names) if code is not None else ()
    return any(isinstance(f, torch.jit.ScriptFunction) and _computes_softmax(f) for f in functions)


def _computes_softmax(scripted: Any) -> bool:
    graph = scripted.inlined_graph
    return any(
        graph.findAllNodes(f"aten::{name}", True) for name in ("softmax", "scaled_dot_product_attention")
    )


def _class_name(module: nn.Module) -> str:
    return getattr(module, "original_name", type(module).__name__)  # the class of a ScriptModule


def nothing_recorded(model: nn.Module, layers: Layers | None) -> str:
    """Return why nothing was recorded although the model ran, if no candidate explains it."""
    if any(attends(module) for module in model.modules()) and layers is not None:
        return f"no attention ran in the layers selected by layers={layers!r}"
    own = own_attention(model)
    subject = f"{', '.join(own)} {'computes' if len(own) == 1 else 'compute'}" if own else "it computes"
    return f"{subject} no softmax that watch could trace to a product of queries and keys"
