"""Convert a model to another precision for inference: bfloat16, or int8 weights."""

import copy
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import nn

from regard.errors import ArgumentError
from regard.mechanism import fused
from regard.models.configs import Precision, check_precision
from regard.models.layers.linear import Int8Linear
from regard.models.seq2seq import INT8_OUTPUT, Seq2Seq

Model = TypeVar("Model", bound=nn.Module)


def quantize(module: Model, dtype: Precision) -> Model:
    """Return a copy of a module for inference in another precision.

    dtype: "int8" replaces every `nn.Linear`, and the output projection of a sequence-to-sequence model, by
        int8 weights with one scale per output; everything else stays in float32. "bfloat16" or "float32"
        converts all parameters.

    Parameters that do not change are shared with the original, which is not modified. An int8 model
    runs on the CPU, needs the compiled kernels, and cannot be trained.

    >>> import torch
    >>> from regard.models import Transformer, TransformerConfig
    >>> from regard.models.quantization import quantize
    >>> model = Transformer(100, TransformerConfig(width=16, heads=2, layers=1)).eval()
    >>> small = quantize(model, "int8")
    >>> small.decoder.blocks[0].feed_forward.in_proj
    Int8Linear(16, 64, bias=True)
    >>> small.train()
    Traceback (most recent call last):
    regard.errors.ArgumentError: This model is quantized to int8, for inference only. ...
    """
    check_precision(dtype)
    if dtype != "int8":
        return copy.deepcopy(module).to(getattr(torch, dtype))
    _check_int8(module)
    copied = _copy_frozen(module).eval()
    for parent in list(copied.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                setattr(parent, name, Int8Linear(child))
    if isinstance(copied, Seq2Seq):
        output = SimpleNamespace(weight=copied.output_weight, bias=copied.output_bias)
        copied.add_module(INT8_OUTPUT, Int8Linear(output))  # type: ignore[arg-type]
    return copied


def _copy_frozen(module: Model) -> Model:
    """Copy a module; parameters become float32 without gradients, and share memory if they were float32."""
    frozen: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.detach().float(), requires_grad=False)
        for parameter in module.parameters()
    }
    return copy.deepcopy(module, frozen)


def is_quantized(module: nn.Module) -> bool:
    """Return whether a module has int8 weights.

    >>> import torch
    >>> from regard.models.quantization import is_quantized, quantize
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 5))
    >>> is_quantized(model), is_quantized(quantize(model, "int8"))
    (False, True)
    """
    return any(isinstance(part, Int8Linear) for part in module.modules())


def multiplies_bfloat16() -> bool:
    """Return whether this processor has instructions for bfloat16 products, which makes them faster."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, name, bool)()) for name in names)


def _check_int8(module: nn.Module) -> None:
    devices = {parameter.device.type for parameter in module.parameters()} - {"cpu"}
    if devices:
        raise ArgumentError(
            f"quantize got a model on {min(devices)!r}; int8 runs on the CPU only. Call model.cpu(), or "
            "use bfloat16."
        )
    if not fused.available():
        raise ArgumentError(f"int8 needs regard's compiled kernels, but {fused.DESCRIPTION}.")
