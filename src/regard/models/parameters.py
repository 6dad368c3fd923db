"""Read parameters from an untrusted safetensors file."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard._util.files import check_loadable

_FLOAT = {torch.float16, torch.bfloat16, torch.float32, torch.float64}  # allowed dtypes


@contextmanager
def meta_device() -> Iterator[None]:
    """Build modules without allocating or initializing memory, for `load_state_dict(..., assign=True)`.

    Random initial values on the meta device would import torch's compiler, which takes seconds.

    >>> from torch import nn
    >>> from regard.models.parameters import meta_device
    >>> with meta_device():
    ...     table = nn.Embedding(5, 3)
    >>> table.weight.device.type
    'meta'
    """
    with torch.device("meta"), _SkipInit():
        yield


class _SkipInit(TorchFunctionMode):
    """Turn the functions of `torch.nn.init` into no-ops."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == nn.init.__name__:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def read_parameters(path: str | os.PathLike[str], model: nn.Module) -> dict[str, Tensor]:
    """Read the parameters of a model, which may be on the meta device, from a file.

    Raise ValueError unless names and shapes match the model, all values are finite, and all tensors have the
    same floating-point dtype.
    """
    check_loadable(path)
    with safe_open(path, "pt") as file:
        check_shapes(model, {name: file.get_slice(name).get_shape() for name in file.keys()})  # noqa: SIM118
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (clone: a copy, not memory-mapped)
    check_values(tensors)
    return tensors


def check_shapes(model: nn.Module, shapes: Mapping[str, list[int]]) -> None:
    """Raise ValueError unless names and shapes match the model exactly."""
    expected = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    if set(shapes) != set(expected):
        raise ValueError(f"missing or unexpected tensors: {sorted(set(shapes) ^ set(expected))[:3]}")
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise ValueError(f"{name} has shape {shapes[name]}; the settings require {shape}")


def check_values(tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless all values are finite and all tensors have the same floating-point dtype."""
    dtypes = {tensor.dtype for tensor in tensors.values()} & _FLOAT
    for name, tensor in tensors.items():
        if tensor.dtype not in _FLOAT or len(dtypes) > 1:
            raise ValueError(
                f"{name} has dtype {tensor.dtype}; all parameters must have the same floating-point dtype"
            )
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} has NaN or infinite values")
