"""Lazy weights for code that expects tensors: what they cannot answer lazily, their dense matrix answers."""

from typing import Any

import torch
from torch import Tensor

from regard.mechanism.weights.matrix import Weights


class Attentions(Weights):
    """`Weights` in the place of a tensor, as in `outputs.attentions` of a model that runs on regard.

    All that tensors have and torch's functions do is there, on the dense matrix, made when it is asked for;
    what `Weights` have of their own stays lazy.

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
        """The same weights, which also pass for a tensor."""
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
        """`Weights.mean` for "heads", which stays lazy; a tensor's mean for anything else."""
        if over == "heads":
            return super().mean(over)
        if "axis" in options:  # numpy's
            return self.numpy().mean(*args, **options)
        if over is not None:
            args = (over, *args)
        return self.dense().mean(*args, **options)

    def to(self, *args: Any, **options: Any) -> Any:
        """Lazy weights on another device; a dense tensor for another dtype."""
        if len(args) == 1 and not options and isinstance(args[0], str | torch.device | int):
            return super().to(args[0])  # type: ignore[arg-type]
        return self.dense().to(*args, **options)

    def size(self, *axis: int, dim: int | None = None) -> Any:  # type: ignore[override]
        return super().size(dim if not axis else axis[0])

    __hash__ = object.__hash__  # as a tensor's, although == is elementwise

    def __matmul__(self, x: Any) -> Any:
        return super().__matmul__(_dense(x))

    def tolist(self) -> Any:
        """All of it, as nested lists."""
        return self.dense().tolist()

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))


def _dense(given: Any) -> Any:
    if isinstance(given, Attentions):
        return given.dense()
    if isinstance(given, list | tuple):
        return type(given)(map(_dense, given)) if not hasattr(given, "_fields") else given
    if isinstance(given, dict):
        return {name: _dense(one) for name, one in given.items()}
    return given


def _operator(name: str) -> Any:
    def apply(self: Attentions, *others: Any) -> Any:
        return getattr(self.dense(), name)(*_dense(others))

    return apply


# Python looks these up on the class, past __getattr__; __matmul__ is the weights' own
for _name in (
    *(
        f"__{side}{word}__"
        for word in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
        for side in ("", "r")
    ),
    *(f"__{word}__" for word in ("neg", "abs", "lt", "le", "gt", "ge", "eq", "ne")),
):
    setattr(Attentions, _name, _operator(_name))
