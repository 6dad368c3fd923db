"""Make a lazy matrix usable by code that expects a tensor.

`LAZY` lists the torch functions that a lazy matrix computes itself. Every other torch function, tensor method
and operator receives the dense matrix, up to `MAX_DENSE_BYTES`.
"""

import math
from collections.abc import Callable
from types import EllipsisType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard._util.name_hints import unknown_attribute
from regard._util.text import format_bytes
from regard.errors import ArgumentError

MAX_DENSE_BYTES = 2**30  # maximum size of a dense matrix that is created implicitly

# torch function → method that computes the same result without the dense matrix
LAZY = {
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "linalg_matmul"), "matmul"),
    **{name: name for name in ("sum", "mean", "max", "amax", "argmax", "topk", "svd_lowrank")},
    **{name: name for name in ("select", "unbind", "squeeze", "unsqueeze", "transpose", "adjoint")},
    **{name: name for name in ("detach", "clone", "to", "numel", "is_floating_point", "is_complex")},
    "t": "adjoint",
    "swapaxes": "transpose",
    "swapdims": "transpose",
}

_GRADIENT = (
    "the output was not computed from these lazy weights, so backward() gives them no gradient. For the "
    "gradient of a model's weights, use regard.watch(model, gradients=True) and seen.gradients(). Otherwise "
    "compute the output from dense weights: dense = weights.dense(); dense.retain_grad(); "
    "output = dense @ value."
)
_SCIPY = "scipy cannot read the torch dtype {dtype}; pass weights.linear_operator() instead of weights."

Index = Any  # anything that can index a tensor


class TensorLike:
    """Tensor attributes, methods and operators for a matrix with `shape`, `dtype`, `device` and `dense()`."""

    @property
    def shape(self) -> torch.Size:
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        raise NotImplementedError

    def dense(self) -> Tensor:
        """Return the full matrix as a dense tensor."""
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Tensor:
        """Return part of the matrix as a dense tensor."""
        raise NotImplementedError

    def to_dense(self, *, max_bytes: int | None = None) -> Tensor:
        """Return the full matrix as a dense tensor, or raise an error if it is too large.

        Torch functions without a lazy version receive this tensor.

        max_bytes: maximum size; default: 1 GiB. To create a larger matrix, call `dense`.

        >>> import torch, regard
        >>> x = torch.randn(3, 4)
        >>> weights = regard.attend(x, x, x)[1]
        >>> torch.equal(weights.to_dense(), weights.dense())
        True
        """
        limit = MAX_DENSE_BYTES if max_bytes is None else max_bytes
        if self.nbytes > limit:
            raise ArgumentError(
                f"the dense weights of shape {tuple(self.shape)} need {format_bytes(self.nbytes)}, more than "
                f"the limit of {format_bytes(limit)}. In linear memory, use weights @ x, sum(-1), mean(-2), "
                "max(-1), topk(k), entropy(), received(), svd(k), pool(64, 64), or a part such as "
                "weights[..., 0, :] or weights.batch(0).heads(3). To create them anyway, call "
                "weights.dense()."
            )
        return self.dense()

    # Metadata that does not need the dense matrix

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        """Return the number of axes."""
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or the size of one axis."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Return the number of weights."""
        return math.prod(self.shape)

    nelement = numel

    def element_size(self) -> int:
        """Return the size of a weight in bytes."""
        return self.dtype.itemsize

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Memory that the dense matrix would need, in bytes."""
        return self.numel() * self.dtype.itemsize

    @property
    def layout(self) -> torch.layout:
        return torch.strided

    def is_contiguous(self, *, memory_format: Any = None) -> bool:
        """Return True: the dense matrix is contiguous."""
        return True

    def stride(self, dim: int | None = None) -> Any:
        """Return the strides of the dense matrix, or the stride of one axis."""
        sizes = [max(size, 1) for size in self.shape]  # as in torch
        strides = tuple(math.prod(sizes[axis + 1 :]) for axis in range(self.ndim))
        return strides if dim is None else strides[dim]

    def is_floating_point(self) -> bool:
        """Return True."""
        return True

    def is_complex(self) -> bool:
        """Return False."""
        return False

    @property
    def requires_grad(self) -> bool:
        """Whether the weights depend on a tensor that requires a gradient."""
        raise NotImplementedError

    @property
    def is_leaf(self) -> bool:
        return not self.requires_grad

    def __len__(self) -> int:
        return self.shape[0]

    # Conversion

    def numpy(self) -> NDArray[Any]:
        """Return the full matrix as a NumPy array."""
        return self.to_dense().detach().cpu().numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def __dlpack__(self, **options: Any) -> Any:  # for torch.as_tensor, torch.from_dlpack and NumPy
        return self.to_dense().detach().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return torch.empty(0, device=self.device).__dlpack_device__()

    def tolist(self) -> Any:
        """Return the full matrix as nested lists."""
        return self.to_dense().tolist()

    def __bool__(self) -> bool:
        if self.numel() != 1:
            raise ArgumentError(
                f"the truth value of weights of shape {tuple(self.shape)} is ambiguous. To test whether "
                "there are any weights, use weights.numel() > 0 or weights is not None."
            )
        return bool(self.to_dense())

    def __float__(self) -> float:
        return float(self.to_dense())

    def __int__(self) -> int:
        return int(self.to_dense())

    def __contains__(self, x: Any) -> bool:
        return dense_arguments(x) in self.to_dense()

    __array_priority__ = 1000  # as for tensors: in arithmetic, NumPy scalars defer to the weights
    __hash__ = object.__hash__  # == is elementwise, as for tensors

    def __setitem__(self, index: Any, value: Any) -> None:
        raise _read_only("weights[…] = …")

    # torch functions and tensor methods

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)
        name = getattr(function, "__name__", "")
        method = LAZY.get(name)
        if method == "matmul" and len(args) == 2 and not kwargs:
            left, right = args
            return left @ right if isinstance(left, TensorLike) else right.__rmatmul__(left)
        if name == "to" and args and not isinstance(args[0], TensorLike):  # tensor.to(weights)
            return args[0].to(device=args[1].device, dtype=args[1].dtype)
        first = args[0] if args else None
        if isinstance(first, TensorLike):
            if _in_place(name):
                raise _read_only(name)
            if method is not None and hasattr(type(first), method) and not {"out", "other"} & set(kwargs):
                return getattr(first, method)(*args[1:], **kwargs)
        if isinstance(kwargs.get("out"), TensorLike):
            raise _read_only(f"{name}(out=weights)")
        return function(*dense_arguments(args), **dense_arguments(kwargs))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("is_") and not callable(getattr(Tensor, name, len)):
            return name == f"is_{self.device.type}"  # True for is_cuda or is_cpu, False for is_sparse, …
        if name == "matvec":  # looked up by scipy's aslinearoperator
            raise ArgumentError(_SCIPY.format(dtype=self.dtype))
        if name in ("grad", "retain_grad", "register_hook"):
            raise AttributeError(f"weights.{name}: {_GRADIENT}", name=name)
        if name.startswith("_") or not callable(getattr(Tensor, name, None)):
            raise unknown_attribute(type(self).__name__, name)
        if _in_place(name):
            raise _read_only(name)

        def method(*args: Any, **options: Any) -> Any:
            dense = self.to_dense()
            return getattr(dense, name)(*dense_arguments(args), **dense_arguments(options))

        return method


def _in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _read_only(operation: str) -> ArgumentError:
    return ArgumentError(
        f"{operation}: lazy weights are computed on demand and cannot be modified. Change a dense copy: "
        "dense = weights.dense()."
    )


class SplitIndex(NamedTuple):
    """An index split into one slice per axis, and a second index that drops axes indexed by integers."""

    lead: tuple[slice, ...]
    rows: slice
    columns: slice
    dropped: tuple[int | slice, ...]


def split_index(index: Index, shape: torch.Size) -> SplitIndex | None:
    """Return the slices of an index, or None for advanced indices, such as arrays."""
    parts = _basic_index(index, len(shape))
    if parts is None:
        return None
    *lead, rows, columns = (as_slice(i, n) for i, n in zip(parts, shape, strict=True))
    dropped = tuple(0 if isinstance(i, int) else slice(None) for i in parts)
    return SplitIndex(tuple(lead), rows, columns, dropped)


def _basic_index(index: Index, axes: int) -> list[int | slice] | None:
    """Return one integer or slice per axis, or None for advanced indices, such as arrays."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if word := next((i for i in parts if isinstance(i, str)), None):
        raise TypeError(f"{word!r} is not an index; weights are indexed by numbers: tokens.index({word!r}).")
    if not all(isinstance(i, int | slice | EllipsisType) and not isinstance(i, bool) for i in parts):
        return None
    if Ellipsis not in parts:
        parts.append(Ellipsis)
    at = parts.index(Ellipsis)
    missing = axes - len(parts) + 1
    if missing < 0 or parts.count(Ellipsis) > 1:
        raise IndexError(f"too many indices: {len(parts) - 1} for weights with {axes} axes")
    return [*parts[:at], *[slice(None)] * missing, *parts[at + 1 :]]


def as_slice(index: int | slice, size: int) -> slice:
    """Convert an integer to a slice of length one. As in torch, steps must be positive."""
    if isinstance(index, slice):
        if index.step is not None and index.step <= 0:
            raise ValueError(f"slice step must be positive, got {index.step}")
        return index
    if not -size <= index < size:
        raise IndexError(f"index {index} is out of range for an axis of size {size}")
    index %= size
    return slice(index, index + 1)


def dense_arguments(x: Any) -> Any:
    """Replace lazy matrices in nested arguments with dense tensors."""
    if isinstance(x, TensorLike):
        return x.to_dense()
    if isinstance(x, list | tuple) and not hasattr(x, "_fields"):
        return type(x)(map(dense_arguments, x))
    if isinstance(x, dict):
        return {name: dense_arguments(value) for name, value in x.items()}
    return x


def _operator(name: str) -> Any:
    def apply(self: TensorLike, *others: Any) -> Any:
        others = tuple(x.item() if isinstance(x, np.generic) else x for x in others)
        if any(isinstance(x, np.ndarray) for x in others):
            return getattr(self.numpy(), name)(*others)
        if not all(isinstance(x, Tensor | TensorLike | int | float | complex) for x in others):
            return NotImplemented
        return getattr(self.to_dense(), name)(*dense_arguments(others))

    apply.__name__ = name
    return apply


# Python looks up operators on the class and ignores __getattr__
for _name in (
    *(
        f"__{side}{word}__"
        for word in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
        for side in ("", "r")
    ),
    *(f"__{word}__" for word in ("neg", "pos", "abs", "lt", "le", "gt", "ge", "eq", "ne")),
):
    setattr(TensorLike, _name, _operator(_name))
