"""Argument checks. Each error message names the argument, its value and the allowed values.

torch is imported only on first use, so settings can be checked without loading it.
"""

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from regard._util.text import type_name, with_article
from regard.errors import ArgumentError, DeviceError, DTypeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


def check_number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    min: float | None = None,
    below: float = math.inf,
    max: float | None = None,
    cure: str = "",
) -> None:
    """Raise unless `value` is a real number within bounds.

    name: start of the error message, such as "Softmax got temperature".
    """
    if isinstance(value, bool) or not (isinstance(value, Real) or _is_symbolic(value)):
        raise DTypeError(f"{name}={_shown(value)}, of type {type(value).__name__}; it must be a number.")
    number: Any = value
    in_range = number > (-math.inf if above is None else above) and (min is None or number >= min)
    if not in_range or not number < below or (max is not None and number > max):
        bounds = [
            *([] if above is None else [f"above {above:g}"]),
            *([] if min is None else [f"at least {min:g}"]),
            *([] if below == math.inf else [f"below {below:g}"]),
            *([] if max is None else [f"at most {max:g}"]),
        ]
        bounds += ["finite"] if below == math.inf and max is None else []
        raise ArgumentError(f"{name}={value}; it must be {' and '.join(bounds)}. {cure}".rstrip())


def check_int(name: str, value: Any, *, min: int = 0, why: str = "") -> None:
    """Raise unless `value` is an integer of at least `min`."""
    if isinstance(value, bool) or not (isinstance(value, Integral) or _is_symbolic(value)):
        raise DTypeError(f"{name}={_shown(value)}; it must be an integer of at least {min}.")
    if value < min:
        raise ArgumentError(f"{name}={value}; it must be at least {min}{why}.")


def check_bool(name: str, value: Any) -> None:
    """Raise unless `value` is a bool."""
    if not isinstance(value, bool):
        raise DTypeError(f"{name}={value!r}; it must be True or False.")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise unless `value` is one of `choices`."""
    if value not in choices:
        raise ArgumentError(f"{name}={value!r}; choose one of {', '.join(choices)}.")


def check_type(name: str, value: Any, kind: type, cure: str) -> None:
    """Raise unless `value` is an instance of `kind`.

    name: start of the error message, such as "Transformer got a config".
    """
    if not isinstance(value, kind):
        expected = with_article(kind.__name__)
        raise DTypeError(f"{name} of type {type(value).__name__}; pass {expected}: {cure}.")


def check_sentences(sentences: str | Sequence[str]) -> list[str]:
    """Return the sentences as a list of strings; raise if one cannot be encoded as UTF-8."""
    if not isinstance(sentences, str | Sequence):
        raise DTypeError(f"sentences is {type_name(sentences)}; pass a string or a list of strings.")
    checked = [sentences] if isinstance(sentences, str) else list(sentences)
    for i, sentence in enumerate(checked):
        if not isinstance(sentence, str):
            raise DTypeError(f"Sentence {i} is {type_name(sentence)}; pass strings.")
        if not sentence.isascii():
            try:
                sentence.encode()
            except UnicodeEncodeError as error:
                raise ArgumentError(
                    f"Sentence {i} contains the lone surrogate {sentence[error.start]!r} at character "
                    f"{error.start}; check how the text was decoded."
                ) from None
    return checked


def check_dense(name: str, tensor: "Tensor") -> None:
    """Raise if the tensor is sparse, nested or quantized."""
    import torch

    if tensor.is_quantized:
        raise DTypeError(f"{name} has dtype {tensor.dtype}; it must be floating point. Call dequantize().")
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        function = (
            "torch.nested.to_padded_tensor(), and mask the padding" if tensor.is_nested else "to_dense()"
        )
        raise DTypeError(f"{name} is a {kind} tensor; it must be dense. Convert it with {function}.")


def check_device(name: str, value: "Tensor | nn.Module", device: "torch.device") -> None:
    """Raise unless the tensor, or every tensor in the module, is on `device`, the device of the query."""
    from torch import Tensor

    tensors = [value] if isinstance(value, Tensor) else [*value.parameters(), *value.buffers()]
    for tensor in tensors:
        if tensor.device != device:
            raise DeviceError(
                f"query is on {device} and {name} on {tensor.device}; move {name}: "
                f"{name.removeprefix('the ')}.to({str(device)!r})."
            )


def _is_symbolic(value: Any) -> bool:
    """Whether `value` is a symbolic number from torch.compile: torch.SymInt or torch.SymFloat."""
    return type(value).__module__ == "torch" and type(value).__name__ in ("SymInt", "SymFloat")


def _shown(value: Any) -> str:
    return f"<tensor of shape {tuple(value.shape)}>" if hasattr(value, "shape") else repr(value)
