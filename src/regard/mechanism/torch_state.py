"""Inspect torch's state: tracing, transforms, dispatch modes, tensor subclasses.

These checks use private torch functions, which are looked up only in this module. If a function is missing,
the check returns the value that selects the general implementation, which is correct for every tensor.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
else:
    try:
        from torch._subclasses.fake_tensor import FakeTensor
    except ImportError:  # fake tensors are then treated like any other subclass

        class FakeTensor(Tensor):
            """Placeholder for a missing class; it has no instances."""


def private(path: str) -> Any:
    """Return an attribute of torch, or None if this version does not have it."""
    attribute: Any = torch
    for name in path.split("."):
        attribute = getattr(attribute, name, None)
    return attribute


_transforms_active: Callable[[], bool] | None = private("_C._are_functorch_transforms_active")
_tracing_state: Callable[[], object] | None = private("_C._get_tracing_state")
_dispatch_mode: Callable[[Any], object] | None = private("_C._get_dispatch_mode")
_dispatch_modes: Callable[[], int] | None = private("_C._len_torch_dispatch_stack")
_dispatch_keys: Callable[[Tensor], Any] | None = private("_C._dispatch_keys")
_legacy_batched: Callable[[Tensor], bool] | None = private("_C._functorch.is_legacy_batchedtensor")
_MODES = [private(f"_C._TorchDispatchModeKey.{name}") for name in ("PROXY", "FAKE")]
_FORWARD = torch.autograd.forward_ad


def concrete(*tensors: Tensor) -> bool:
    """Whether Python code can read the values of the tensors, which is impossible while tracing."""
    if torch.compiler.is_compiling() or transformed() or traced():
        return False
    return all(type(t) in (Tensor, nn.Parameter) and not t.is_meta and not batched(t) for t in tensors)


def transformed() -> bool:
    """Whether a torch.func transform, such as vmap or grad, is active."""
    return _transforms_active is None or _transforms_active()


def traced() -> bool:
    """Whether torch is tracing a graph or running with fake tensors."""
    if _tracing_state is None or _tracing_state() is not None:  # torch.jit.trace
        return True
    if _dispatch_mode is None or None in _MODES:
        return True
    return any(_dispatch_mode(mode) is not None for mode in _MODES)


def fake_mode() -> Any:
    """Return a dispatch mode in which operations compute only shapes, dtypes and devices."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def forward_mode() -> bool:
    """Whether forward-mode AD is active."""
    level: int = getattr(_FORWARD, "_current_level", 0)
    return level >= 0


def subclassed(*tensors: Tensor) -> bool:
    """Whether any tensor is an instance of a custom subclass, which supports only plain operations."""
    return any(type(t) not in (Tensor, nn.Parameter, FakeTensor) for t in tensors)


def batched(tensor: Tensor) -> bool:
    """Whether a tensor is wrapped by the legacy vmap that `is_grads_batched` uses."""
    return _legacy_batched is not None and _legacy_batched(tensor)


def _keys(tensor: Tensor) -> object:
    """Return the dispatch keys of a tensor, or None if unavailable."""
    return None if _dispatch_keys is None else _dispatch_keys(tensor).raw_repr()


def _empty(inference: bool) -> Tensor:
    with torch.inference_mode(inference):  # set explicitly: the mode at import time is unknown
        return torch.empty(0, device="cpu")


# dispatch keys of dense CPU tensors, outside and inside inference mode
_PLAIN_CPU_KEYS = {_keys(_empty(inference)) for inference in (False, True)}
_PROBES_AVAILABLE = None not in (_transforms_active, _tracing_state, _dispatch_modes, _dispatch_keys)


def probes() -> dict[str, Any] | None:
    """Return the functions and constants that the kernels need to perform the checks of `plain_cpu`.

    Returns None if this version of torch lacks one of them.
    """
    any_autocast = private("_C._is_any_autocast_enabled")
    exchange = private("Tensor.__dlpack_c_exchange_api__")
    if not _PROBES_AVAILABLE or any_autocast is None or exchange is None:
        return None
    return {
        "types": (Tensor, nn.Parameter),
        "plain_keys": tuple(_PLAIN_CPU_KEYS),
        "probes": (_dispatch_modes, _transforms_active, _tracing_state, any_autocast),
        "forward_ad": _FORWARD,
        "dispatch_keys": _dispatch_keys,
        "is_grad_enabled": torch.is_grad_enabled,
        "get_num_threads": torch.get_num_threads,
        "new_empty_strided": Tensor.new_empty_strided,
        "dlpack": exchange,
    }


def plain_cpu(*tensors: Tensor) -> bool:
    """Whether all tensors are dense and on the CPU, and no transform, tracing, autocast or mode is active."""
    if (
        not _PROBES_AVAILABLE
        or _dispatch_modes()  # type: ignore[misc]
        or _transforms_active()  # type: ignore[misc]
        or forward_mode()
        or torch.is_autocast_enabled("cpu")
        or _tracing_state() is not None  # type: ignore[misc]
    ):
        return False
    for tensor in tensors:  # noqa: SIM110 (all() would take twice as long)
        if _dispatch_keys(tensor).raw_repr() not in _PLAIN_CPU_KEYS:  # type: ignore[misc]
            return False
    return True
