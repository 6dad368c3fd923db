"""Cache the routes of FlexAttention calls, so that a layer does not trace its functions on every call.

A route is reused only if nothing that determines it can have changed: its functions use no objects other than
numbers, strings, small tensors without gradients, and functions that meet the same condition. These
tensors, and those of the block mask, must have the same values.
"""

import builtins
import dis
import math
from collections import OrderedDict
from collections.abc import Hashable
from contextlib import suppress
from functools import lru_cache
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from regard.mechanism.torch_state import plain_cpu

_NUMBERS = (int, float, bool, str, type(None), torch.dtype)
_MODULES = (torch, math, torch.nn.functional)
_TYPES = (int, float, bool, tuple, Tensor)
_FUNCTIONS = {
    name: function
    for module in (torch, math)
    for name, function in vars(module).items()
    if isinstance(function, BuiltinFunctionType) and not name.startswith("_")
}
_BUILTINS = {abs, divmod, isinstance, len, max, min, pow, round, sum, *_FUNCTIONS.values()}
_DTYPES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
# tensor attributes that depend on more than the elements
_MEMORY = {"as_strided", "storage", "untyped_storage", "data_ptr", "grad", "grad_fn"}
# tensor methods that modify nothing and whose results depend only on the elements
_METHODS = {name for name in dir(Tensor) if not name.startswith("_") and not name.endswith("_")} - _MEMORY
# attributes whose values never change, unlike torch.backends, which depends on global settings
_ATTRIBUTES = {"nn", "functional", "inf", "nan", "pi", "e", "tau", *_METHODS, *_FUNCTIONS, *_DTYPES}
_MAX_DEPTH = 8  # maximum nesting depth of functions
_MAX_ROUTES = 32
_MAX_ELEMENTS = 4096  # per captured tensor, because its bytes are part of the key
_UNDEFINED = object()
_SETTINGS = ("get_", "is_")  # prefixes of torch functions that read a setting
_BLOCK_TENSORS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")

Route = TypeVar("Route")


def fingerprint(function: Any, depth: int = 0, *, tensors: bool = True) -> Hashable | None:
    """Return a value that is equal for two functions only if they compute the same results.

    It contains the elements of captured tensors. Returns None if the results may depend on other state.

    tensors: if False, return None for functions that capture tensors.

    >>> from regard.mechanism.flex.route_cache import fingerprint
    >>> def window(size):
    ...     return lambda b, h, q, k: q - k < size
    >>> fingerprint(window(4)) == fingerprint(window(4)), fingerprint(window(4)) == fingerprint(window(5))
    (True, False)
    """
    if type(function) is not FunctionType or depth > _MAX_DEPTH or function.__dict__:
        return None
    names = _global_names(function.__code__)
    if names is None:
        return None
    try:
        values = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a variable has no value yet
        return None
    values += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    scope = function.__globals__
    values += [scope[name] if name in scope else getattr(builtins, name, _UNDEFINED) for name in names]
    parts: list[Hashable] = [function.__code__]
    for value in values:
        part = _fingerprint_value(value, depth, tensors=tensors)
        if part is None:
            return None
        parts.append(part)
    return tuple(parts)


def _fingerprint_value(value: Any, depth: int, *, tensors: bool) -> Hashable | None:
    if type(value) in _NUMBERS or isinstance(value, torch.dtype):
        return type(value), value, math.copysign(1, value) if isinstance(value, float) else 0
    if type(value) is tuple:
        parts = tuple(_fingerprint_value(item, depth + 1, tensors=tensors) for item in value)
        return None if None in parts or depth > _MAX_DEPTH else parts
    if isinstance(value, ModuleType):
        return value.__name__ if value in _MODULES else None
    if isinstance(value, type):
        return value.__name__ if value in _TYPES else None  # attributes of other classes may change
    if isinstance(value, BuiltinFunctionType):
        return id(value) if value in _BUILTINS else None  # a method's result depends on its object
    if isinstance(value, Tensor):
        return _fingerprint_tensor(value) if tensors else None
    return fingerprint(value, depth + 1, tensors=tensors)


def _fingerprint_tensor(tensor: Tensor) -> Hashable | None:
    if (
        type(tensor) not in (Tensor, nn.Parameter)
        or not plain_cpu(tensor)
        or tensor.requires_grad
        or tensor.grad is not None
        or tensor.numel() > _MAX_ELEMENTS
    ):
        return None
    # a copy, because only elements without gaps can be viewed as bytes
    copied = tensor.detach().clone(memory_format=torch.contiguous_format)
    content = copied.reshape(-1).view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tensor.shape, tensor.stride(), content


@lru_cache(maxsize=256)
def _global_names(code: CodeType) -> tuple[str, ...] | None:
    """Return the global names that a function reads.

    Returns None if the function imports modules, assigns outer variables, or reads torch settings.
    """
    names: list[str] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("IMPORT_NAME", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF"):
            return None
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            name = instruction.argval
            if name not in _ATTRIBUTES or name.startswith(_SETTINGS):
                return None
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names.append(instruction.argval)
        if isinstance(instruction.argval, CodeType):
            inner = _global_names(instruction.argval)
            if inner is None:
                return None
            names += inner
    return tuple(names)


class RouteCache(Generic[Route]):
    """The most recently used routes, with the values of their block masks."""

    def __init__(self) -> None:
        self._routes: OrderedDict[Hashable, tuple[list[Tensor | None], Route]] = OrderedDict()

    def key(self, call: Any, *, tensors: bool) -> Hashable | None:
        """Return the key of a call, or None if its route must not be reused.

        tensors: whether the route may be reused if its functions capture tensors. A reused route contains
        the functions of an earlier call, whose captured tensors may have changed since.
        """
        query, key, _, score_mod, block_mask, scale, _ = call
        functions: list[Hashable] = []
        for function in (score_mod, None if block_mask is None else block_mask.mask_mod):
            part = 0 if function is None else fingerprint(function, tensors=tensors)
            if part is None:
                return None
            functions.append(part)
        blocks = None if block_mask is None else (tuple(block_mask.BLOCK_SIZE), tuple(block_mask.seq_lengths))
        shapes = tuple(query.shape), tuple(key.shape[:3])
        mode = torch.is_inference_mode_enabled(), query.dtype, query.device
        return (*functions, blocks, shapes, scale, mode)

    def get(self, key: Hashable, block_mask: Any) -> Route | None:
        """Return the cached route for an equal key and an equal block mask, or None."""
        entry = self._routes.get(key)
        if entry is None or not all(map(_equal, entry[0], _block_tensors(block_mask))):
            return None
        with suppress(KeyError):  # another thread may have removed the entry
            self._routes.move_to_end(key)
        return entry[1]

    def put(self, key: Hashable, block_mask: Any, route: Route) -> None:
        """Store a route and evict the least recently used one if the cache is full."""
        tensors = [None if x is None else x.detach().clone() for x in _block_tensors(block_mask)]
        self._routes[key] = (tensors, route)
        while len(self._routes) > _MAX_ROUTES:
            with suppress(KeyError):
                self._routes.popitem(last=False)


def _block_tensors(block_mask: Any) -> list[Tensor | None]:
    return [getattr(block_mask, name, None) for name in _BLOCK_TENSORS]


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
