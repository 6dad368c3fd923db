"""Fused dropout: the dropout mask is a hash of a seed and the element's index.

torch draws one random number per element on a single thread, which is the slowest part of a training step
after the matrix products. With a hash, no mask is stored, because the backward pass recomputes it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.mechanism.kernels import layer_kernels
from regard.mechanism.torch_state import concrete, forward_mode


def fast_modules(model: nn.Module) -> list[nn.Module]:
    """Return all modules, shared ones repeatedly. This is three times as fast as `nn.Module.modules`."""
    modules = [model]
    for module in modules:  # the list grows
        modules += [child for child in module.__dict__["_modules"].values() if child is not None]
    return modules


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch a model to evaluation mode inside a `with` block, then restore the previous mode of each module.

    >>> import torch
    >>> from regard.models.layers.dropout import eval_mode
    >>> layer = torch.nn.Dropout()
    >>> with eval_mode(layer):
    ...     layer.training
    False
    >>> layer.training
    True
    """
    training = [module for module in fast_modules(model) if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


class Dropout(nn.Dropout):
    """Dropout with rescaling, in training mode only (Srivastava et al. 2014).

    p: dropout probability. inplace: see `nn.Dropout`.

    >>> import torch
    >>> from regard.models.layers.dropout import Dropout
    >>> dropout, x = Dropout(0.5), torch.ones(1000)
    >>> dropout(x).unique(), dropout.add(x, x).unique(), dropout.relu(-x).unique()
    (tensor([0., 2.]), tensor([1., 3.]), tensor([0.]))
    """

    def forward(self, y: Tensor) -> Tensor:
        """Return dropout(y)."""
        if not self._fusable(y):
            return super().forward(y)
        return _DropoutAdd.apply(None, y, self.p, _seed(), y.dtype)  # type: ignore[no-untyped-call]

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x + dropout(y)."""
        if x.shape != y.shape or not self._fusable(x, y):
            return x + super().forward(y)
        dtype = torch.promote_types(x.dtype, y.dtype)
        return _DropoutAdd.apply(x, y, self.p, _seed(), dtype)  # type: ignore[no-untyped-call]

    def relu(self, y: Tensor) -> Tensor:
        """Return dropout(relu(y))."""
        if not self._fusable(y):
            return super().forward(F.relu(y))
        return _DropoutRelu.apply(y, self.p, _seed())  # type: ignore[no-untyped-call]

    def _fusable(self, *tensors: Tensor) -> bool:
        """Whether dropout is active and the kernel can process the tensors."""
        if not self.training or self.inplace or not 0 < self.p < 1:
            return False
        return concrete(*tensors) and not forward_mode() and layer_kernels.supports_dropout(*tensors)


class _DropoutAdd(torch.autograd.Function):
    """x + dropout(y). The function is linear in y, so its gradient is the same function without x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor | None, y: Tensor, dropout: float, seed: int, dtype: torch.dtype
    ) -> Tensor:
        ctx.options = dropout, seed, y.dtype
        ctx.shape, ctx.has_x = y.shape, x is not None
        return layer_kernels.dropout("add", x, y, probability=dropout, seed=seed, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None, None, None]:
        if concrete(grad):
            dropped = _DropoutAdd.apply(None, grad.contiguous(), *ctx.options)  # type: ignore[no-untyped-call]
        else:  # several gradients at once: vmap
            dropout, seed, dtype = ctx.options
            ones = torch.ones(ctx.shape, dtype=dtype)
            factors = layer_kernels.dropout("add", None, ones, probability=dropout, seed=seed, dtype=dtype)
            dropped = (grad * factors).to(dtype)
        return grad if ctx.has_x else None, dropped, None, None, None


class _DropoutRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dropout: float, seed: int) -> Tensor:
        output = layer_kernels.dropout("relu", None, x, probability=dropout, seed=seed, dtype=x.dtype)
        ctx.dropout = dropout
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (output,) = ctx.saved_tensors
        if torch.is_grad_enabled() or not concrete(grad):  # create_graph=True, or several gradients at once
            return torch.where(output <= 0, 0, grad / (1 - ctx.dropout)), None, None
        options = {"probability": ctx.dropout, "seed": 0, "dtype": output.dtype}
        return layer_kernels.dropout("relu_back", output, grad.contiguous(), **options), None, None


def _seed() -> int:
    return int(torch.randint(2**63 - 1, ()))
