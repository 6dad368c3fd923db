"""Whether a tensor's values can be looked at now: not while tracing, and not for tensors without values."""

import torch
from torch import Tensor, nn


def concrete(*tensors: Tensor) -> bool:
    """Whether Python may branch on the values of these tensors."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return all(type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta for tensor in tensors)
