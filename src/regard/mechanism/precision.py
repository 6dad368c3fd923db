"""Computing in the dtype of the tensors, whatever `torch.autocast` says at the moment.

Weights are read and gradients are taken long after the attention itself, inside or outside of an autocast
block. They must agree with what was computed then, so they are computed with autocast off.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn

from regard.mechanism.torch_state import batched, forward_mode, traced


class _OnDevice(Protocol):
    @property
    def device(self) -> torch.device: ...


_Self = TypeVar("_Self", bound=_OnDevice)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def autocasts(device: str) -> bool:
    """Whether autocast is on for this type of device."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def autocast_off(device: str) -> AbstractContextManager[Any]:
    """A block without autocast on this type of device; it costs nothing where autocast is off already."""
    return torch.autocast(device, enabled=False) if autocasts(device) else nullcontext()


def in_own_dtype(
    method: Callable[Concatenate[_Self, _Arguments], _Result],
) -> Callable[Concatenate[_Self, _Arguments], _Result]:
    """A method that computes with autocast off for the object's device."""

    @wraps(method)
    def read(self: _Self, /, *args: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        with autocast_off(self.device.type):
            return method(self, *args, **options)

    return read


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for (…, n, m) and (…, m, k), with gradients that do not depend on autocast during backward.

    torch's own node would multiply in bfloat16 if `backward` is called inside an autocast block.
    """
    return _Product.apply(a, b) if _recorded(a, b) else a @ b  # type: ignore[no-untyped-call]


class _Product(torch.autograd.Function):
    """A matrix product whose backward is a product too, differentiable again."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        left, right = ctx.needs_input_grad
        with autocast_off(grad.device.type):
            return (
                _summed(matmul(grad, b.mT), a.shape) if left else None,
                _summed(matmul(a.mT, grad), b.shape) if right else None,
            )


def _summed(x: Tensor, shape: torch.Size) -> Tensor:
    return x if x.shape == shape else x.sum_to_size(shape)


def _recorded(a: Tensor, b: Tensor) -> bool:
    """Whether eager torch records derivatives of these tensors, with no transformation at work."""
    if (
        not torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or not (a.requires_grad or b.requires_grad)
    ):
        return False
    if torch._C._are_functorch_transforms_active() or forward_mode() or traced():
        return False
    return all(type(t) in (Tensor, nn.Parameter) and not batched(t) for t in (a, b))
