"""Whether a tensor's values can be looked at now: not while tracing, and not for tensors without values.

These questions need private functions of torch. Each is looked up once, here, and has an answer for a torch
that no longer has it: one that sends calls the general way, which is right for every tensor.
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
    except ImportError:  # then fake tensors count as any other subclass

        class FakeTensor(Tensor):
            """Stands for torch's class, so that no tensor is an instance of it."""


def private(path: str) -> Any:
    """An attribute of torch that may be gone in another version; then None."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


_transforms_active: Callable[[], bool] | None = private("_C._are_functorch_transforms_active")
_tracing_state: Callable[[], object] | None = private("_C._get_tracing_state")
_dispatch_mode: Callable[[Any], object] | None = private("_C._get_dispatch_mode")
_dispatch_modes: Callable[[], int] | None = private("_C._len_torch_dispatch_stack")
_dispatch_keys: Callable[[Tensor], Any] | None = private("_C._dispatch_keys")
_legacy_batched: Callable[[Tensor], bool] | None = private("_C._functorch.is_legacy_batchedtensor")
_MODES = [private(f"_C._TorchDispatchModeKey.{name}") for name in ("PROXY", "FAKE")]
_FORWARD = torch.autograd.forward_ad


def concrete(*tensors: Tensor) -> bool:
    """Whether Python may branch on the values of these tensors."""
    if torch.compiler.is_compiling() or transformed() or traced():
        return False
    return all(type(t) in (Tensor, nn.Parameter) and not t.is_meta and not batched(t) for t in tensors)


def transformed() -> bool:
    """Whether a transform of torch.func, such as vmap or grad, is active."""
    return _transforms_active is None or _transforms_active()


def traced() -> bool:
    """Whether operations are written down for a graph that is to serve for other values, or not computed."""
    if _tracing_state is None or _tracing_state() is not None:  # torch.jit.trace
        return True
    if _dispatch_mode is None or None in _MODES:
        return True
    return any(_dispatch_mode(mode) is not None for mode in _MODES)


def forward_mode() -> bool:
    """Whether forward-mode derivatives are being carried along."""
    level: int = getattr(_FORWARD, "_current_level", 0)
    return level >= 0


def subclassed(*tensors: Tensor) -> bool:
    """Whether a tensor is of somebody's own kind, for which only plain operations can be counted on."""
    return any(type(t) not in (Tensor, nn.Parameter, nn.Buffer, FakeTensor) for t in tensors)


def batched(tensor: Tensor) -> bool:
    """Whether torch's older vmap, which `is_grads_batched` uses, has wrapped this tensor."""
    return _legacy_batched is not None and _legacy_batched(tensor)  # without the function, without the vmap


def _keys(tensor: Tensor) -> object:
    """The dispatch keys of a tensor; None if torch does not say."""
    return None if _dispatch_keys is None else _dispatch_keys(tensor).raw_repr()


def _empty(inference: bool) -> Tensor:
    with torch.inference_mode(inference):  # whatever mode this module is first imported in
        return torch.empty(0, device="cpu")


# dispatch keys of dense CPU tensors, made with and without inference mode
_ORDINARY = {_keys(_empty(inference)) for inference in (False, True)}
_QUIET = None not in (_transforms_active, _tracing_state, _dispatch_modes, _dispatch_keys)


def quiet(*tensors: Tensor) -> bool:
    """Whether these are dense CPU tensors, and no transform, tracing, autocast or mode is active."""
    if (
        not _QUIET
        or _dispatch_modes()  # type: ignore[misc]
        or _transforms_active()  # type: ignore[misc]
        or forward_mode()
        or torch.is_autocast_enabled("cpu")
        or _tracing_state() is not None  # type: ignore[misc]
    ):
        return False
    return all(_dispatch_keys(t).raw_repr() in _ORDINARY for t in tensors)  # type: ignore[misc]
