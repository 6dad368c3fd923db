"""Checks of what callers give; each message names the value and the cure."""

import math
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, DeviceError, DTypeError


def number(
    what: str,
    value: Any,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float = math.inf,
    most: float | None = None,
    cure: str = "",
) -> None:
    """A real number within bounds; `what` is who got it, and its name: "Softmax got temperature"."""
    if isinstance(value, bool) or not isinstance(value, Real | torch.SymFloat | torch.SymInt):
        raise DTypeError(
            f"{what}={_shown(value)}; it must be a number, and this is a {type(value).__name__}."
        )
    plain: Any = value
    enough = plain > (-math.inf if above is None else above) and (least is None or plain >= least)
    if not enough or not plain < below or (most is not None and plain > most):
        bounds = [
            *([] if above is None else [f"above {above:g}"]),
            *([] if least is None else [f"at least {least:g}"]),
            *([] if below == math.inf else [f"below {below:g}"]),
            *([] if most is None else [f"at most {most:g}"]),
        ]
        bounds += ["finite"] if below == math.inf and most is None else []
        raise ArgumentError(f"{what}={value}; it must be {' and '.join(bounds)}. {cure}".rstrip())


def count(what: str, value: Any, *, least: int = 0, why: str = "") -> None:
    """A whole number that is not too small."""
    if isinstance(value, bool) or not isinstance(value, Integral | torch.SymInt):
        raise DTypeError(f"{what}={_shown(value)}; it must be a whole number, at least {least}.")
    if value < least:
        raise ArgumentError(f"{what}={value}; it must be at least {least}{why}.")


def of_kind(what: str, value: Any, kind: type, cure: str) -> None:
    """A value of a class; `what` is who got it, and its name: "Transformer got a recipe"."""
    if not isinstance(value, kind):
        raise DTypeError(f"{what} that is a {type(value).__name__}; give a {kind.__name__}: {cure}.")


def ordinary(what: str, tensor: Tensor) -> None:
    """A dense tensor, neither sparse nor nested nor quantized."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        if tensor.is_quantized:
            raise DTypeError(
                f"{what} is of {tensor.dtype}; attention needs floating point: {what}.dequantize()."
            )
        raise DTypeError(f"{what} is a {kind} tensor; regard needs an ordinary dense one: {what}.to_dense().")


def same_device(what: str, thing: Tensor | nn.Module, device: torch.device) -> None:
    """A tensor, or all of a module, on the query's device."""
    tensors = [thing] if isinstance(thing, Tensor) else [*thing.parameters(), *thing.buffers()]
    for tensor in tensors:
        if tensor.device != device:
            raise DeviceError(
                f"query is on {device} and {what} on {tensor.device}; bring them together: "
                f"{what.removeprefix('the ')}.to({str(device)!r})."
            )


def _shown(value: Any) -> str:
    return f"<tensor of shape {tuple(value.shape)}>" if isinstance(value, Tensor) else repr(value)
