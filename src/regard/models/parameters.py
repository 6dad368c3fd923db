"""Parameters from a safetensors file that anybody may have written: nothing in it is taken for granted."""

import os
from collections.abc import Mapping

import torch
from safetensors import safe_open
from torch import Tensor, nn

from regard._util.files import check_loadable

_REAL = {torch.float16, torch.bfloat16, torch.float32, torch.float64}  # that models compute in


def read_parameters(path: str | os.PathLike[str], model: nn.Module) -> dict[str, Tensor]:
    """All tensors of a file, if they are those of the model, which may be on the meta device; or ValueError.

    They must have its names and shapes, be of one real type and finite.
    """
    check_loadable(path)
    with safe_open(path, "pt") as file:
        check_shapes(model, {name: file.get_slice(name).get_shape() for name in file.keys()})  # noqa: SIM118
        # no longer tied to the file
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    check_numbers(tensors)
    return tensors


def check_shapes(model: nn.Module, shapes: Mapping[str, list[int]]) -> None:
    """Exactly the model's tensors, by name and shape."""
    wanted = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    if set(shapes) != set(wanted):
        raise ValueError(f"tensors are missing or too many: {sorted(set(shapes) ^ set(wanted))[:3]}")
    for name, shape in wanted.items():
        if shapes[name] != shape:
            raise ValueError(f"its {name} has the shape {shapes[name]} and the options need {shape}")


def check_numbers(tensors: Mapping[str, Tensor]) -> None:
    """All of one real type, and finite."""
    dtypes = {tensor.dtype for tensor in tensors.values()} & _REAL
    for name, tensor in tensors.items():
        if tensor.dtype not in _REAL or len(dtypes) > 1:
            raise ValueError(
                f"its {name} is of {tensor.dtype}, and the parameters should be of one real type"
            )
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"its {name} has numbers that are not finite")
