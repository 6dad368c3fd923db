"""Compute in the dtype of the tensors, independently of `torch.autocast`.

Weights and gradients are computed after the forward pass, possibly inside another autocast block. They must
agree with the forward pass, so autocast is disabled for them.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from regard.mechanism.torch_state import concrete, forward_mode

_Method = TypeVar("_Method", bound=Callable[..., Any])


def autocasts(device: str) -> bool:
    """Whether autocast is enabled for a device type."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def autocast_off(device: str) -> AbstractContextManager[Any]:
    """Return a context manager that disables autocast. It does nothing if autocast is already off."""
    return torch.autocast(device, enabled=False) if autocasts(device) else nullcontext()


def in_own_dtype(method: _Method) -> _Method:
    """Decorator that runs a method with autocast disabled for `self.device`."""

    @wraps(method)
    def wrapper(self: Any, /, *args: Any, **options: Any) -> Any:
        with autocast_off(self.device.type):
            return method(self, *args, **options)

    return cast(_Method, wrapper)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, with gradients that do not depend on autocast during the backward pass.

    torch's own matmul computes gradients in bfloat16 if `backward` is called inside an autocast block.
    """
    recorded = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    eager = recorded and concrete(a, b) and not forward_mode()  # no transform is active
    return _Product.apply(a, b) if eager else a @ b  # type: ignore[no-untyped-call]


class _Product(torch.autograd.Function):
    """Matrix product with a differentiable backward pass."""

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
                _reduce_to(matmul(grad, b.mT), a.shape) if left else None,
                _reduce_to(matmul(a.mT, grad), b.shape) if right else None,
            )


def _reduce_to(x: Tensor, shape: torch.Size) -> Tensor:
    return x if x.shape == shape else x.sum_to_size(shape)
