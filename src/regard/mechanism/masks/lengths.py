"""Lengths of sequences, for `Padding` and `Documents`: checks, comparison and display."""

from collections.abc import Hashable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from regard._util.checks import check_dense
from regard.errors import DeviceError, DTypeError, MaskError
from regard.mechanism.torch_state import concrete

MAX_COMPARED = 4096  # masks with more lengths are compared by identity


def as_lengths(mask: str, lengths: Sequence[int] | Tensor | int) -> Tensor:
    """Copy the lengths to a tensor that is not an inference tensor, because the backward pass may need it."""
    inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
    with torch.inference_mode(False) if inference else nullcontext():
        try:
            tensor = torch.as_tensor(lengths)
        except (TypeError, ValueError, RuntimeError):
            raise DTypeError(
                f"{mask} got lengths {lengths!r}; pass integers, in a list or a tensor."
            ) from None
        check_dense("lengths", tensor)
        if tensor.numel() and (
            tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool
        ):  # an empty list becomes a float tensor
            cure = f": {mask}(mask.sum(-1))" if tensor.dtype is torch.bool else ""
            raise DTypeError(f"{mask} got lengths of dtype {tensor.dtype}; they must be integers{cure}.")
        tensor = tensor.to(torch.int64, copy=True)
    if concrete(tensor) and tensor.numel() and int(tensor.min()) < 0:
        raise MaskError(f"{mask} got a length of {int(tensor.min())}; lengths must be at least 0.")
    return tensor


def length_key(lengths: Tensor) -> Hashable | None:
    """Return the lengths as a hashable value, or None if there are too many or they cannot be read."""
    if not concrete(lengths) or lengths.device.type != "cpu" or lengths.numel() > MAX_COMPARED:
        return None
    return tuple(lengths.shape), lengths.numpy().tobytes()


def lengths_on(lengths: Tensor, device: torch.device) -> Tensor:
    """Return the lengths on a device; raise DeviceError if they have no values there."""
    if lengths.is_meta and device.type != "meta":
        raise DeviceError(
            f"query is on {device} and the mask's lengths are on meta, where they have no values; pass "
            "lengths with values."
        )
    return lengths.to(device)


def summarize_lengths(lengths: Tensor) -> str:
    """Return a short text for the repr of a mask."""
    if not concrete(lengths) or lengths.numel() > 8:
        return f"<{' × '.join(map(str, lengths.shape))} lengths>"
    return str(lengths.tolist())
