"""The kernels' numeric codes for torch's dtypes."""

import torch

from regard.mechanism.kernels.library import KERNELS

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
    "boolean": torch.bool,
    "int8": torch.int8,
}
# Codes from kernels/abi.h; empty if the kernels are missing.
TYPES = {_DTYPES[name]: i for name, i in getattr(KERNELS, "TYPES", {}).items() if name in _DTYPES}
