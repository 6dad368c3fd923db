"""Lazy weights for code that expects tensors. Operations without a lazy version use the dense matrix."""

from typing import Any

import torch
from torch import Tensor

from regard.mechanism.weights.matrix import Weights


class Attentions(Weights):
    """`Weights` that behave like a tensor: the `outputs.attentions` of a model that runs on regard.

    Methods of `Weights` stay lazy. All other tensor methods and torch functions work on the dense matrix,
    which is computed when needed.

    >>> import torch, regard
    >>> from regard.inspection.tensor_like import Attentions
    >>> x = torch.eye(3)
    >>> weights = Attentions.of(regard.attend(x, x, x)[1])
    >>> weights.sum(-1), (2 * weights).max()
    (tensor([1., 1., 1.]), tensor(0.9421))
    >>> torch.stack([weights, weights]).shape
    torch.Size([2, 3, 3])
    """

    @classmethod
    def of(cls, weights: Weights) -> "Attentions":
        """Return the same weights as `Attentions`."""
        self = cls.__new__(cls)
        vars(self).update(vars(weights))
        return self

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*_dense(args), **_dense(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name)
        return getattr(self.dense(), name)

    def mean(self, over: Any = None, *args: Any, **options: Any) -> Any:
        """Average over "heads" lazily, as `Weights.mean` does; for anything else, apply `Tensor.mean`."""
        if over == "heads":
            return super().mean(over)
        if "axis" in options:  # NumPy's spelling
            return self.numpy().mean(*args, **options)
        if over is not None:
            args = (over, *args)
        return self.dense().mean(*args, **options)

    def to(self, *args: Any, **options: Any) -> Any:
        """Return lazy weights on another device, or a dense tensor of another dtype."""
        if len(args) == 1 and not options and isinstance(args[0], str | torch.device | int):
            return super().to(args[0])  # type: ignore[arg-type]
        return self.dense().to(*args, **options)

    def size(self, *axis: int, dim: int | None = None) -> Any:  # type: ignore[override]
        return super().size(dim if not axis else axis[0])

    __hash__ = object.__hash__  # == is elementwise, as for tensors

    def __matmul__(self, x: Any) -> Any:
        return super().__matmul__(_dense(x))

    def tolist(self) -> Any:
        """Return the dense matrix as nested lists."""
        return self.dense().tolist()

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))


def _dense(x: Any) -> Any:
    """Replace `Attentions` in nested arguments with dense tensors."""
    if isinstance(x, Attentions):
        return x.dense()
    if isinstance(x, list | tuple):
        return type(x)(map(_dense, x)) if not hasattr(x, "_fields") else x
    if isinstance(x, dict):
        return {name: _dense(value) for name, value in x.items()}
    return x


def _operator(name: str) -> Any:
    def apply(self: Attentions, *others: Any) -> Any:
        return getattr(self.dense(), name)(*_dense(others))

    return apply


# Python looks up operators on the class and ignores __getattr__; Weights defines __matmul__
for _name in (
    *(
        f"__{side}{word}__"
        for word in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
        for side in ("", "r")
    ),
    *(f"__{word}__" for word in ("neg", "abs", "lt", "le", "gt", "ge", "eq", "ne")),
):
    setattr(Attentions, _name, _operator(_name))
