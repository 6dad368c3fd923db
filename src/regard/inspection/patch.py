"""regard in the place of torch's attention, for models that know no other: diffusers, timm, own code."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from types import ModuleType
from typing import Any

from torch.nn import functional

from regard.inspection.hooks import interception
from regard.inspection.hooks.interception import REPLACES, Place
from regard.mechanism.sdpa import scaled_dot_product_attention

_LOCK = RLock()
_NAME = "scaled_dot_product_attention"
_replaced: list[
    tuple[ModuleType, str, Callable[..., Any]]
] = []  # where, under which name, and what stood there
_places: list[Place] = []  # torch's own
_asked = 0  # how often `patch` was called and not undone


def patch() -> None:
    """Put regard's `scaled_dot_product_attention` in the place of torch's, for the whole process.

    Modules that have imported torch's function by its name get regard's too; what keeps it elsewhere, in a
    class or in a closure, keeps torch's. `unpatch` undoes it, as often as it was done. Without gradients,
    torch's layers go on to take their own fast path, which calls no such function, until
    `torch.backends.mha.set_fastpath_enabled(False)`.

    >>> import regard, torch
    >>> regard.patch()
    >>> torch.nn.functional.scaled_dot_product_attention is regard.scaled_dot_product_attention
    True
    >>> regard.unpatch()
    >>> torch.nn.functional.scaled_dot_product_attention is regard.scaled_dot_product_attention
    False
    """
    global _asked
    with _LOCK:
        _asked += 1
        if _asked == 1:
            _replace()


def unpatch() -> None:
    """Undo one `patch`; the last one brings torch's function back. Without a patch it does nothing.

    >>> import regard
    >>> regard.unpatch()
    """
    global _asked
    with _LOCK:
        _asked = max(_asked - 1, 0)
        if _asked:
            return
        while _places:
            _places.pop().restore()
        while _replaced:
            module, name, original = _replaced.pop()
            # somebody else may have put something of their own there
            if vars(module).get(name) is scaled_dot_product_attention:
                setattr(module, name, original)


@contextmanager
def patched() -> Iterator[None]:
    """`patch` for as long as a block lasts, whatever happens in it.

    >>> import regard, torch
    >>> x = torch.randn(1, 4, 3, 8)
    >>> with regard.patched():
    ...     output = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    """
    patch()
    try:
        yield
    finally:
        unpatch()


def _replace() -> None:
    original = interception.original(functional, _NAME)
    if original is scaled_dot_product_attention:  # put there by hand, who may take it away again
        return
    # below those who watch and edit, whenever they came
    _places.append(Place(functional, _NAME, lambda _: scaled_dot_product_attention, rank=REPLACES))
    for place, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or place.partition(".")[0] in ("torch", "regard", "builtins"):
            continue
        for name, held in list(vars(module).items()):
            if held is original:
                _put(module, name, original)


def _put(module: ModuleType, name: str, original: Callable[..., Any]) -> None:
    _replaced.append((module, name, original))
    setattr(module, name, scaled_dot_product_attention)
