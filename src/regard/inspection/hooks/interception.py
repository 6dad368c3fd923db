"""Intercept the attention calls of other libraries by temporarily wrapping their functions.

Wrappers are installed when the first thread starts watching and removed when the last one stops. They always
call the original function with unchanged arguments. Each thread has its own observers and its own tracer,
which follows torch's functions. torch's attention modules have no forward hooks, because hooks would disable
the fast path of torch's encoder layers.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn, overrides

from regard.errors import ArgumentError, RegardError
from regard.inspection.calls.capture import CapturedCall
from regard.inspection.measures.call_record import AttentionOutput
from regard.mechanism.operator import OBSERVER
from regard.mechanism.torch_state import transformed
from regard.mechanism.weights.weights import Weights
from regard.models.layers.attention import is_cross_attention

Function = Callable[..., Any]


class Observer(Protocol):
    """Receives the attention calls of the modules that it observes."""

    names: dict[nn.Module, str]  # the observed modules and their names

    def on_attention(self, module: nn.Module, call: CapturedCall) -> None:
        """Called when one of the modules has computed attention."""

    def on_own_attention(self, name: str, weights: Weights) -> None:
        """Called when one of the modules has called `regard.attention` or `regard.attend`."""

    def on_own_values(self, module: nn.Module, value: Tensor, output: AttentionOutput) -> None:
        """Called with the value and the output, after `on_own_attention`."""

    @property
    def values(self) -> bool:
        """Whether values are recorded."""

    @property
    def has_windows(self) -> bool:
        """Whether the model may divide its tokens into windows."""

    def on_error(self, module: nn.Module, reason: str) -> None:
        """Called when an attention call of one of the modules cannot be read."""

    def on_softmax(self, module: nn.Module, pools: bool) -> None:
        """Called when one of the modules has computed a softmax that cannot be traced to attention.

        pools: whether the output of the softmax was multiplied by activations.
        """

    def on_generate(self, model: nn.Module, generate: Function, *args: Any, **kwargs: Any) -> Any:
        """Call generate(model, …) and group its attention calls."""

    def on_reorder(self, cache: Any, rows: Tensor) -> None:
        """Called when a cache has been reordered to the given rows."""

    def on_crop(self, cache: Any, tokens: int) -> None:
        """Called when a cache has dropped its last `tokens` tokens."""


class CacheUpdate(NamedTuple):
    """The last update of a key-value cache."""

    keys: Tensor  # all keys, as returned by the update
    new_keys: Tensor
    cache: Any


class _Thread(threading.local):
    """State of one thread."""

    def __init__(self) -> None:
        self.observers: list[Observer] = []
        self.depth = 0  # attention calls in progress; nested calls are not reported
        self.reported: set[nn.Module] = set()  # torch modules reported during the current encoder layer
        self.cache_update: CacheUpdate | None = None
        self.reorder_depth = 0
        self.tracer: Any = None  # a TorchFunctionMode, set while this thread observes


THREAD = _Thread()


TRANSFORMED = (
    "it ran inside a torch.func transform, such as vmap or grad, whose tensors cannot be kept. Watch a call "
    "to the model without the transform"
)


def report(module: nn.Module, capture: Callable[[], CapturedCall | None]) -> None:
    """Capture a call and pass it to the module's observers, if it has any."""
    observers = [observer for observer in THREAD.observers if module in observer.names]
    if not observers:
        return
    try:
        if transformed():
            raise ArgumentError(TRANSFORMED)
        with torch.no_grad():
            call = capture()
    except RegardError as error:
        for observer in observers:
            observer.on_error(module, str(error))
        return
    except Exception as error:  # watching must not stop the model
        for observer in observers:
            observer.on_error(module, f"its call could not be read: {type(error).__name__}: {error}")
        return
    if call is not None:
        for observer in observers:
            observer.on_attention(module, call)


@contextmanager
def inside_attention() -> Iterator[None]:
    """Do not report the attention calls inside this block."""
    THREAD.depth += 1
    try:
        with without_tracer():
            yield
    finally:
        THREAD.depth -= 1


@contextmanager
def without_tracer() -> Iterator[None]:
    """Remove the tracer inside this block, because torch's fast paths are disabled while a mode is active.

    The tracer stays if another mode was entered after it, because that mode disables the fast paths anyway.
    """
    tracer = THREAD.tracer
    if tracer is None or overrides._get_current_function_mode() is not tracer:
        yield
        return
    with overrides._pop_mode_temporarily():
        yield


def is_observed() -> bool:
    """Return whether calls in this thread are currently reported."""
    if not THREAD.observers or THREAD.depth or torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() == -1  # checkpointing repeats the forward pass during backward


def records_values() -> bool:
    """Return whether an observer of this thread records values."""
    return any(observer.values for observer in THREAD.observers)


def calling_module(matches: Callable[[nn.Module], bool]) -> nn.Module | None:
    """Return the innermost matching module on the call stack."""
    return _calling_frame(matches)[0]


def _calling_frame(matches: Callable[[nn.Module], bool]) -> tuple[nn.Module | None, Any]:
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] in ("self", "module"):
            module = frame.f_locals.get(code.co_varnames[0])
            if isinstance(module, nn.Module) and matches(module):
                return module, frame
        frame = frame.f_back  # type: ignore[assignment]
    return None, None


def observed_module() -> tuple[nn.Module | None, Any]:
    """Return the innermost observed module on the call stack, and its frame."""
    return _calling_frame(lambda module: any(module in o.names for o in THREAD.observers))


_CROSS_ARGUMENTS = ("key_value_states", "encoder_hidden_states", "cross_attention_states")


def is_cross_call(module: nn.Module, caller_locals: Mapping[str, Any]) -> bool:
    """Detect cross-attention from the name of the module's class and the caller's local variables."""
    if is_cross_attention(type(module).__name__):
        return True
    if "is_cross_attention" in caller_locals:
        return bool(caller_locals["is_cross_attention"])
    return any(caller_locals.get(name) is not None for name in _CROSS_ARGUMENTS)


def located(call: CapturedCall, module: nn.Module, frame: Any) -> CapturedCall:
    """Add the kind of a call (self- or cross-attention), and its new keys if it attends to a cache."""
    update, (queries, keys) = THREAD.cache_update, (call.query.shape[-2], call.key.shape[-2])
    if call.dense:
        cached = update is not None and update.keys.shape[-2] == keys
    else:
        cached = update is not None and (update.keys.data_ptr(), update.keys.numel()) == (
            call.key.data_ptr(),
            call.key.numel(),
        )
    if cached and update is not None:
        new = update.new_keys.detach()
        new = (
            call.key[..., keys - queries :, :]
            if call.dense
            else new.reshape(*call.key.shape[:-2], *new.shape[-2:])
        )
        call = replace(call, new_keys=new, cached=True)
    cross = is_cross_call(module, frame.f_locals) or (queries != keys and not cached)
    return replace(call, kind="cross" if cross else "self")


REPLACE, EDIT, WATCH = range(3)  # ranks, innermost first


class Patch:
    """A wrapper around an attribute of a class or module, which stays until `restore` is called.

    Patches of the same attribute can be removed in any order. The remaining ones are reapplied to the
    original by rank: replacements innermost, then edits, then observers.
    """

    def __init__(
        self, owner: Any, name: str, wrap: Callable[[Function], Function], *, rank: int = WATCH
    ) -> None:
        self.wrap, self.rank = wrap, rank
        with _STACK_LOCK:
            self._stack = _STACKS.setdefault((id(owner), name), _Stack(owner, name))
            self._stack.update([*self._stack.patches, self])

    def restore(self) -> None:
        """Remove the wrapper. If other code has replaced the attribute since, that replacement stays."""
        with _STACK_LOCK:
            self._stack.update([patch for patch in self._stack.patches if patch is not self])


class _Stack:
    """An attribute, its original value, and the patches on it."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name, self.patches = owner, name, list[Patch]()
        self.inherited = name not in vars(owner)
        self.original: Function = getattr(owner, name) if self.inherited else vars(owner)[name]
        self.top = None if self.inherited else self.original

    def update(self, patches: list[Patch]) -> None:
        self.patches = sorted(patches, key=lambda patch: patch.rank)
        if not patches:
            _STACKS.pop((id(self.owner), self.name), None)
        if vars(self.owner).get(self.name) is not self.top:
            return
        function = self.original
        for patch in self.patches:
            wrapper = patch.wrap(function)
            function = wrapper if patch.rank == REPLACE else wraps(function)(wrapper)
        if self.inherited and not patches:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, function)
        self.top = function


_STACK_LOCK = threading.RLock()
_STACKS: dict[tuple[int, str], _Stack] = {}


def original(owner: Any, name: str) -> Function:
    """Return the original, unpatched attribute."""
    stack = _STACKS.get((id(owner), name))
    return getattr(owner, name) if stack is None else stack.original


class PatchSet:
    """Patches of torch, and of transformers if loaded, installed while at least one thread uses them."""

    def __init__(
        self, torch_patches: Callable[[], list[Patch]], hub_patches: Callable[[], list[Patch]]
    ) -> None:
        self._torch_patches, self._hub_patches = torch_patches, hub_patches
        self._lock, self._users, self._patches = threading.Lock(), 0, list[Patch]()
        self._patched_hub = False

    def add(self, patch: Callable[[], Patch]) -> None:
        """Install another patch until no thread uses the set; do nothing if none does."""
        with self._lock:
            if self._users:
                self._patches.append(patch())

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install the patches inside a `with` block."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._patches += self._torch_patches()
            if not self._patched_hub and "transformers.modeling_utils" in sys.modules:
                self._patched_hub = True
                self._patches += self._hub_patches()
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                while not self._users and self._patches:
                    self._patches.pop().restore()
                self._patched_hub = self._patched_hub and self._users > 0


class _ThreadStance:
    """torch.compile's stance: "force_eager" in threads that observe, the original one in all others."""

    def __init__(self, original: Any) -> None:
        self._original = original

    @property
    def stance(self) -> str:
        return "force_eager" if THREAD.observers and not THREAD.depth else self._original.stance

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _torch_patches() -> list[Patch]:
    from regard.inspection.hooks import torch_layers

    patches = torch_layers.patches()
    patches.append(_stance_patch() if "torch._dynamo.eval_frame" in sys.modules else _compile_patch())
    return patches


def _stance_patch() -> Patch:
    return Patch(sys.modules["torch._dynamo.eval_frame"], "_stance", _ThreadStance, rank=REPLACE)  # type: ignore[arg-type]


def _compile_patch() -> Patch:
    """Set the stance when torch.compile or FlexAttention loads the compiler, whose import takes seconds."""

    def wrap(compile: Function) -> Function:
        is_loaded = False

        def load(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_loaded
            compiled = compile(*args, **kwargs)
            if not is_loaded and "torch._dynamo.eval_frame" in sys.modules:
                is_loaded = True
                _PATCHES.add(_stance_patch)
            return compiled

        return load

    return Patch(torch, "compile", wrap)


def _transformers_patches() -> list[Patch]:
    from regard.inspection.hooks import transformers

    return transformers.patches()


_PATCHES = PatchSet(_torch_patches, _transformers_patches)


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Report this thread's attention calls to an observer."""
    with _PATCHES.installed():
        THREAD.observers.append(observer)
        try:
            _enter_tracer()
            _update_tokens()
            yield
        finally:
            THREAD.observers.remove(observer)
            _update_tokens()
            if not THREAD.observers:
                _exit_tracer()
                THREAD.cache_update = None
                THREAD.reported.clear()


def _enter_tracer() -> None:
    from regard.inspection.hooks.torch_layers import run_observed
    from regard.inspection.hooks.tracing import Tracer

    if THREAD.tracer is None:
        THREAD.tracer = Tracer()
        overrides._push_mode(THREAD.tracer)
        OBSERVER.functions = (*OBSERVER.functions, run_observed)  # edits come first


def _update_tokens() -> None:
    """Track tokens while a model with windows is observed."""
    from regard.inspection.hooks.token_tracker import TokenTracker

    needed = any(observer.has_windows for observer in THREAD.observers)
    if THREAD.tracer is not None and needed != (THREAD.tracer.tokens is not None):
        THREAD.tracer.chains.tokens = TokenTracker() if needed else None


def _exit_tracer() -> None:
    from regard.inspection.hooks.torch_layers import run_observed

    tracer, THREAD.tracer = THREAD.tracer, None
    if tracer is not None:
        OBSERVER.functions = tuple(run for run in OBSERVER.functions if run is not run_observed)
        remove_mode(tracer)
        tracer.clear()


def remove_mode(mode: overrides.TorchFunctionMode) -> None:
    """Remove a mode from the thread's mode stack, even if it is not on top: blocks may end in any order."""
    if all(other is not mode for other in overrides._get_current_function_mode_stack()):
        return
    above = []
    while (other := overrides._pop_mode()) is not mode:
        above.append(other)
    for other in reversed(above):
        overrides._push_mode(other)
