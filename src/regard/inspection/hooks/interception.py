"""Where attention is computed by others, and how its calls are seen: functions that stand in for theirs.

They are put in place while somebody watches, in any thread, and taken back with the last one. What they stand
for always computes, with the arguments as they came. Who watches is known per thread, so that what one thread
runs is nobody else's business. No module gets a hook: torch's encoder layers would leave their fast path.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from regard.inspection.capture import CapturedCall, MaskReader

Function = Callable[..., Any]


class Observer(Protocol):
    """Somebody who watches."""

    names: dict[nn.Module, str]  # the modules, and what they are called

    def see(self, module: nn.Module, kept: CapturedCall) -> None:
        """An attention of one of the modules was computed."""

    def generating(self, model: nn.Module, generate: Function, *args: Any, **kwargs: Any) -> Any:
        """Call generate(model, …), which makes many calls that belong together."""

    def reordered(self, cache: Any, rows: Tensor) -> None:
        """A cache goes on with these rows."""

    def cropped(self, cache: Any, tokens: int) -> None:
        """A cache forgets its last tokens."""


class _Thread(threading.local):
    """What one thread is doing."""

    def __init__(self) -> None:
        self.observers: list[Observer] = []
        self.inside = 0  # attentions that are being computed, whose parts are no attentions of their own
        self.reader = MaskReader()
        self.told: set[nn.Module] = set()  # modules of torch that were seen in this call
        self.updated: tuple[Tensor, Tensor, Any] | None = None  # what a cache gave back, for which keys; it
        self.reordering = 0


THREAD = _Thread()


def report(module: nn.Module, make: Callable[[], CapturedCall | None]) -> None:
    """Tell those who watch this module what it did; made once, and only if somebody does."""
    interested = [observer for observer in THREAD.observers if module in observer.names]
    if not interested:
        return
    with torch.no_grad():
        kept = make()
    if kept is not None:
        for observer in interested:
            observer.see(module, kept)


@contextmanager
def within() -> Iterator[None]:
    """While an attention is computed, the functions it is made of are not seen on their own."""
    THREAD.inside += 1
    try:
        yield
    finally:
        THREAD.inside -= 1


def watched() -> bool:
    """Whether anybody watches what this thread computes now, and has not been told of it already."""
    if not THREAD.observers or THREAD.inside or torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() == -1  # what a backward pass computes again was seen before


def innermost() -> nn.Module | None:
    """The module whose method is running: the nearest one up the stack that somebody watches."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] in ("self", "module"):
            found = frame.f_locals.get(code.co_varnames[0])
            if isinstance(found, nn.Module) and any(found in o.names for o in THREAD.observers):
                return found
        frame = frame.f_back  # type: ignore[assignment]
    return None


REPLACES, EDITS, WATCHES = range(3)  # ranks


class Place:
    """An attribute of somebody's class or module that has a stand-in for a while.

    Several may stand in one place, and go in any order: those that are left are stacked anew upon the
    original, first what replaces it, then what edits, and who watches on top.
    """

    def __init__(
        self, owner: Any, name: str, stand_in: Callable[[Function], Function], *, rank: int = WATCHES
    ) -> None:
        self.stand_in, self.rank = stand_in, rank
        with _STACKING:
            self._stack = _STACKS.setdefault((id(owner), name), _Stack(owner, name))
            self._stack.change([*self._stack.places, self])

    @property
    def owner(self) -> Any:
        """Whose attribute it is."""
        return self._stack.owner

    def restore(self) -> None:
        """Take the stand-in away; whoever has put something else there since keeps it."""
        with _STACKING:
            self._stack.change([place for place in self._stack.places if place is not self])


class _Stack:
    """An attribute, what was there at first, and the stand-ins upon it."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name, self.places = owner, name, list[Place]()
        self.inherited = name not in vars(owner)
        self.original: Function = getattr(owner, name) if self.inherited else vars(owner)[name]
        self.top = None if self.inherited else self.original

    def change(self, places: list[Place]) -> None:
        self.places = sorted(places, key=lambda place: place.rank)
        if not places:
            _STACKS.pop((id(self.owner), self.name), None)
        if vars(self.owner).get(self.name) is not self.top:
            return
        found = self.original
        for place in self.places:
            made = place.stand_in(found)
            found = made if place.rank == REPLACES else wraps(found)(made)
        if self.inherited and not places:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, found)
        self.top = found


_STACKING = threading.RLock()
_STACKS: dict[tuple[int, str], _Stack] = {}


def original(owner: Any, name: str) -> Function:
    """What an attribute is when nothing stands in for it."""
    stack = _STACKS.get((id(owner), name))
    return getattr(owner, name) if stack is None else stack.original


_LOCK = threading.Lock()
_PLACES: list[Place] = []
_count = 0
_with_hub = False


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Tell an observer what this thread computes, for as long as the block lasts."""
    _install()
    THREAD.observers.append(observer)
    try:
        yield
    finally:
        THREAD.observers.remove(observer)
        if not THREAD.observers:
            THREAD.reader, THREAD.updated = MaskReader(), None
            THREAD.told.clear()
        _uninstall()


def _install() -> None:
    global _count, _with_hub
    with _LOCK:
        _count += 1
        if _count == 1:
            from regard.inspection.hooks import torch

            _PLACES.extend(torch.places())
        if not _with_hub and "transformers.modeling_utils" in sys.modules:
            from regard.inspection.hooks import transformers

            _with_hub = True
            _PLACES.extend(transformers.places())


def _uninstall() -> None:
    global _count, _with_hub
    with _LOCK:
        _count -= 1
        if _count == 0:
            while _PLACES:
                _PLACES.pop().restore()
            _with_hub = False
