"""Whether a tensor's values can be looked at now: not while tracing, and not for tensors without values."""

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor


def concrete(*tensors: Tensor) -> bool:
    """Whether Python may branch on the values of these tensors."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or traced():
        return False
    return all(type(t) in (Tensor, nn.Parameter) and not t.is_meta and not batched(t) for t in tensors)


def traced() -> bool:
    """Whether operations are written down for a graph that is to serve for other values, or not computed."""
    modes = torch._C._TorchDispatchModeKey
    if torch._C._get_tracing_state() is not None:  # torch.jit.trace
        return True
    return any(torch._C._get_dispatch_mode(mode) is not None for mode in (modes.PROXY, modes.FAKE))


def forward_mode() -> bool:
    """Whether forward-mode derivatives are being carried along."""
    return torch.autograd.forward_ad._current_level >= 0


def subclassed(*tensors: Tensor) -> bool:
    """Whether a tensor is of somebody's own kind, for which only plain operations can be counted on."""
    return any(type(t) not in (Tensor, nn.Parameter, nn.Buffer, FakeTensor) for t in tensors)


def batched(tensor: Tensor) -> bool:
    """Whether torch's older vmap, which `is_grads_batched` uses, has wrapped this tensor."""
    return torch._C._functorch.is_legacy_batchedtensor(tensor)
