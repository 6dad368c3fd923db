"""Dropout between the parts of a block, in one pass: what is dropped is a hash of a seed and the place.

torch draws a number for each place on one thread, which takes longer than anything else that a training step
does beside its matrix products. A hash needs no mask to be kept, and backward finds the same places again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.mechanism import fused
from regard.mechanism.torch_state import concrete, forward_mode


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, without dropout, for the duration; each module then has its own mode back.

    >>> import torch
    >>> from regard.models.layers.dropout import eval_mode
    >>> layer = torch.nn.Dropout()
    >>> with eval_mode(layer):
    ...     layer.training
    False
    >>> layer.training
    True
    """
    trained = [module for module in model.modules() if module.training]
    for module in trained:
        module.training = False
    try:
        yield
    finally:
        for module in trained:
            module.training = True


class Dropout(nn.Dropout):
    """Numbers dropped in training, and the rest scaled up: Srivastava et al. 2014.

    `p` is the share that is dropped; `inplace` is as in torch's own.

    >>> import torch
    >>> from regard.models.layers.dropout import Dropout
    >>> dropout, x = Dropout(0.5), torch.ones(1000)
    >>> dropout(x).unique(), dropout.add(x, x).unique(), dropout.relu(-x).unique()
    (tensor([0., 2.]), tensor([1., 3.]), tensor([0.]))
    """

    def forward(self, y: Tensor) -> Tensor:
        """y, dropped from."""
        if not self._drops(y):
            return super().forward(y)
        return _AddDropped.apply(None, y, self.p, _seed())  # type: ignore[no-untyped-call]

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y, with y dropped from."""
        if x.shape != y.shape or not self._drops(x, y):
            return x + super().forward(y)
        return _AddDropped.apply(x, y, self.p, _seed())  # type: ignore[no-untyped-call]

    def relu(self, y: Tensor) -> Tensor:
        """max(y, 0), dropped from."""
        if not self._drops(y):
            return super().forward(F.relu(y))
        return _ReluDropped.apply(y, self.p, _seed())  # type: ignore[no-untyped-call]

    def _drops(self, *tensors: Tensor) -> bool:
        """Whether anything is to be dropped, and the kernels can read these, here and now."""
        if not self.training or not 0 < self.p < 1:
            return False
        return concrete(*tensors) and not forward_mode() and fused.drops(*tensors)


class _AddDropped(torch.autograd.Function):
    """x + keep(y); linear, so that its gradient is itself again, without an x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor | None, y: Tensor, dropout: float, seed: int) -> Tensor:
        ctx.options = dropout, seed
        ctx.added = x is not None
        return fused.drop("add", x, y, dropout=dropout, seed=seed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        dropped = _AddDropped.apply(None, grad.contiguous(), *ctx.options)  # type: ignore[no-untyped-call]
        return grad if ctx.added else None, dropped, None, None


class _ReluDropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dropout: float, seed: int) -> Tensor:
        output = fused.drop("relu", None, x, dropout=dropout, seed=seed)
        ctx.dropout = dropout
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (output,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again
            return torch.where(output <= 0, 0, grad / (1 - ctx.dropout)), None, None
        return fused.drop("relu_back", output, grad.contiguous(), dropout=ctx.dropout, seed=0), None, None


def _seed() -> int:
    return int(torch.randint(2**63 - 1, ()))
