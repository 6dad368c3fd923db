"""Replace torch's SDPA with regard's, for models that call SDPA directly, as in diffusers and timm."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from types import ModuleType
from typing import Any

from torch.nn import functional

from regard._util.name_hints import hint_arguments
from regard.inspection.hooks import interception
from regard.inspection.hooks.interception import REPLACE, Patch
from regard.mechanism.sdpa import scaled_dot_product_attention

_LOCK = RLock()
_NAME = "scaled_dot_product_attention"
_replaced: list[tuple[ModuleType, str, Callable[..., Any]]] = []  # module, attribute, original
_patches: list[Patch] = []  # patches of torch.nn.functional
_depth = 0  # number of `patch` calls not yet undone


@hint_arguments
def patch() -> None:
    """Replace torch's `scaled_dot_product_attention` with regard's, for the whole process.

    Modules that imported the function by name use regard's as well. References held elsewhere, in a class or
    a closure, are not replaced. Call `unpatch` once for each `patch`. Without gradients, torch's Transformer
    layers use a fast path that does not call SDPA; `torch.backends.mha.set_fastpath_enabled(False)` turns it
    off.

    >>> import regard, torch
    >>> regard.patch()
    >>> torch.nn.functional.scaled_dot_product_attention is regard.scaled_dot_product_attention
    True
    >>> regard.unpatch()
    >>> torch.nn.functional.scaled_dot_product_attention is regard.scaled_dot_product_attention
    False
    """
    global _depth
    with _LOCK:
        _depth += 1
        if _depth == 1:
            _replace()


def unpatch() -> None:
    """Undo one `patch`. The last call restores torch's function; any further call does nothing.

    >>> import regard
    >>> regard.unpatch()
    """
    global _depth
    with _LOCK:
        _depth = max(_depth - 1, 0)
        if _depth:
            return
        while _patches:
            _patches.pop().restore()
        while _replaced:
            module, name, original = _replaced.pop()
            if vars(module).get(name) is scaled_dot_product_attention:  # other code has not replaced it since
                setattr(module, name, original)


@hint_arguments
@contextmanager
def patched() -> Iterator[None]:
    """Apply `patch` inside a `with` block.

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
    if original is scaled_dot_product_attention:  # already replaced by the user
        return
    # rank REPLACE keeps it below the wrappers of watch and edit, whichever is installed first
    _patches.append(Patch(functional, _NAME, lambda _: scaled_dot_product_attention, rank=REPLACE))
    for path, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or path.partition(".")[0] in ("torch", "regard", "builtins"):
            continue
        for name, value in list(vars(module).items()):
            if value is original:
                _replaced.append((module, name, original))
                setattr(module, name, scaled_dot_product_attention)
