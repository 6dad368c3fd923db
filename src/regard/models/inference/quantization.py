"""Convert a model to another precision for inference: bfloat16, or int8 weights."""

import copy
import faulthandler
import os
import signal
import time
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
_PROBE_SECONDS = 5.0  # time limit for one small product


def quantize(module: Model, dtype: Precision) -> Model:
    """Return a copy of a module for inference at a different precision.

    dtype: "int8" replaces every `nn.Linear`, and the output projection of a sequence-to-sequence model, with
        int8 weights and one scale per output; everything else stays in float32. "bfloat16" or "float32"
        converts all parameters.

    The original is not modified. An int8 model shares its unchanged float32 parameters with the original,
    runs on the CPU, needs the compiled kernels, and cannot be trained.

    >>> import torch
    >>> from regard.models import Transformer, TransformerConfig
    >>> from regard.models.inference.quantization import quantize
    >>> model = Transformer(100, TransformerConfig(width=16, heads=2, layers=1)).eval()
    >>> small = quantize(model, "int8")
    >>> small.decoder.blocks[0].feed_forward.in_proj
    Int8Linear(16, 64, bias=True)
    >>> small.train()
    Traceback (most recent call last):
    regard.errors.ArgumentError: This model is quantized to int8, for inference only. ...
    """
    check_precision(dtype)
    if any(isinstance(part, Int8Linear) for part in module.modules()):
        raise ArgumentError(f"This model is already quantized to int8; quantize the original to {dtype!r}.")
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
    """Copy a module with frozen float32 parameters; parameters already in float32 share memory."""
    frozen: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.detach().float(), requires_grad=False)
        for parameter in module.parameters()
    }
    return copy.deepcopy(module, frozen)


def is_quantized(module: nn.Module) -> bool:
    """Return whether a module has int8 weights.

    >>> import torch
    >>> from regard.models.inference.quantization import is_quantized, quantize
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 5))
    >>> is_quantized(model), is_quantized(quantize(model, "int8"))
    (False, True)
    """
    return any(isinstance(part, Int8Linear) for part in module.modules())


def multiplies_bfloat16() -> bool:
    """Return whether this processor has instructions that make bfloat16 products fast."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, name, bool)()) for name in names)


def runs_bfloat16(device: torch.device) -> bool:
    """Return whether bfloat16 products can be computed on a device.

    Some virtual machines report AMX instructions but kill every process that uses them. On processors with
    AMX, a child process therefore tries a product first.
    """
    has_amx = bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())
    if device.type != "cpu" or not has_amx or not hasattr(os, "fork"):
        return True
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        torch.set_num_threads(1)  # the parent's threads do not exist in this process
        matrix = torch.ones(64, 64, dtype=torch.bfloat16)
        os._exit(int(float((matrix @ matrix)[0, 0]) != 64))
    deadline = time.monotonic() + _PROBE_SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _check_int8(module: nn.Module) -> None:
    devices = {parameter.device.type for parameter in module.parameters()} - {"cpu"}
    if devices:
        raise ArgumentError(
            f"quantize got a model on {min(devices)!r}; int8 runs on the CPU only. Call model.cpu(), or "
            "use bfloat16."
        )
    if not fused.available():
        raise ArgumentError(f"int8 needs regard's compiled kernels, but {fused.DESCRIPTION}.")
