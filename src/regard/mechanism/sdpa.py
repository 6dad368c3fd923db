"""Drop-in replacement for torch's `scaled_dot_product_attention`."""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import handle_torch_function, has_torch_function

from regard._util.checks import check_device
from regard._util.text import pluralize
from regard.errors import ArgumentError, ShapeError
from regard.mechanism.call.validation import broadcasts
from regard.mechanism.masks.algebra import Mask
from regard.mechanism.masks.by_position import Causal
from regard.mechanism.operator import attention
from regard.mechanism.scores import ScaledDot
from regard.mechanism.torch_state import private

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias

# torch's own function, because the attribute of `torch.nn.functional` may already be patched.
_torch_attention: Callable[..., Tensor] = (
    private("_C._nn.scaled_dot_product_attention") or torch.nn.functional.scaled_dot_product_attention
)


class SDPACall(NamedTuple):
    """The arguments of an SDPA call, with torch's names."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def mask_and_bias(self) -> tuple[Mask | Tensor | None, Tensor | None]:
        """Convert attn_mask and is_causal to a mask and a bias."""
        if self.is_causal:
            return Causal(align="start"), None
        mask = self.attn_mask
        if _causal_bias(mask):
            return Causal(align="start" if mask.variant.name == "UPPER_LEFT" else "end"), None
        return (mask, None) if mask is None or mask.dtype is torch.bool else (None, mask)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Drop-in replacement for `torch.nn.functional.scaled_dot_product_attention`.

    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa: see torch's documentation.

    The results agree with torch. Some calls are forwarded to torch: calls with dropout, whose random numbers
    would differ; with nested tensors or other subclasses; with kernels selected by
    `torch.nn.attention.sdpa_kernel`; and with invalid arguments, for which torch raises its own errors.

    >>> import torch, regard
    >>> x = torch.randn(2, 8, 5, 16)
    >>> ours = regard.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> theirs = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> torch.allclose(ours, theirs, atol=1e-6)
    True
    """
    call = SDPACall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    tensors: tuple[Tensor | None, ...] = call[:4]
    if _causal_bias(attn_mask):
        if is_causal:
            raise ArgumentError("CausalBias should not be used with causal=True")
        tensors = tensors[:3]
    if has_torch_function(tensors):
        function = _public_function(tensors)
        return handle_torch_function(function, tensors, *call[:6], scale=scale, enable_gqa=enable_gqa)
    if _has_valid_types(call) and dropout_p == 0 and _is_supported(call):
        mask, bias = call.mask_and_bias()
        score = ScaledDot(None if scale is None else float(scale))
        return attention(query, key, value, score=score, mask=mask, bias=bias)
    _check_sizes(call)
    if _causal_bias(attn_mask):  # torch's operator does not accept a CausalBias
        call = call._replace(attn_mask=attn_mask._materialize(query.device))
    return _torch_attention(*call[:6], scale=scale, enable_gqa=enable_gqa)


def _public_function(tensors: Sequence[Tensor | None]) -> Callable[..., Tensor]:
    """Return the function to pass to `__torch_function__`.

    Tensor subclasses compare it with the current attribute of `torch.nn.functional`; nested tensors compare
    it with the original function.
    """
    if not any(hasattr(t, "__torch_function__") and type(t) not in (Tensor, Parameter) for t in tensors):
        return scaled_dot_product_attention
    if any(t.is_nested for t in tensors if isinstance(t, Tensor)):
        return _torch_attention
    return torch.nn.functional.scaled_dot_product_attention


def _has_valid_types(call: SDPACall) -> bool:
    flags = type(call.is_causal) is bool and type(call.enable_gqa) is bool
    numbers = isinstance(call.dropout_p, int | float) and isinstance(call.scale, int | float | None)
    return flags and numbers and (call.scale is None or math.isfinite(call.scale))


def _check_sizes(call: SDPACall) -> None:
    """Raise for three mistakes that make torch's CPU kernel read out of bounds."""
    query, key, value, attn_mask = call[:4]
    inputs = (query, key, value)
    if not all(isinstance(t, Tensor) and not t.is_nested and t.dim() >= 3 for t in inputs):
        return
    if call.enable_gqa is True and 0 in (key.shape[-3], value.shape[-3]):
        raise ShapeError(
            f"query, key and value have {query.shape[-3]}, {key.shape[-3]} and {value.shape[-3]} heads; key "
            "and value need at least one head."
        )
    if not all(t.dim() == 4 for t in inputs):
        return
    if key.shape[-2] != value.shape[-2]:
        raise ShapeError(
            f"key has {pluralize(key.shape[-2], 'token')} and value has {int(value.shape[-2]):,}; they must "
            "match along axis -2."
        )
    if isinstance(attn_mask, Tensor) and query.device == key.device == value.device:
        check_device("attn_mask", attn_mask, query.device)


def _causal_bias(attn_mask: Tensor | None) -> TypeGuard["CausalBias"]:
    """Whether the mask is an instance of torch's CausalBias."""
    if attn_mask is None or type(attn_mask) in (Tensor, Parameter):
        return False
    from torch.nn.attention.bias import CausalBias  # slow: imports the compiler

    return isinstance(attn_mask, CausalBias)


def _is_supported(call: SDPACall) -> bool:
    """Whether the call is valid in torch and supported by regard."""
    query, key, value = inputs = call[:3]
    if not all(isinstance(t, Tensor) and not t.is_nested and t.layout is torch.strided for t in inputs):
        return False
    return (
        query.device.type in ("cpu", "meta")
        and query.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        and all(t.dtype == query.dtype and t.device == query.device for t in inputs)
        and query.dim() == key.dim() == value.dim() >= 2
        and query.shape[-1] == key.shape[-1]
        and key.shape[-2] == value.shape[-2]
        and _lead_fits(query.shape[:-2], key.shape[:-2], value.shape[:-2], call.enable_gqa)
        and _mask_fits(query, key, call.attn_mask, call.is_causal)
        and (torch.compiler.is_compiling() or all(enabled() for enabled in _KERNELS))
    )


_KERNELS: tuple[Callable[[], bool], ...] = (
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
)


def _lead_fits(query: torch.Size, key: torch.Size, value: torch.Size, enable_gqa: bool) -> bool:
    if enable_gqa and not query:
        return False
    if query == key == value:
        return True
    if enable_gqa:
        return (
            len(query) > 1
            and key == value
            and query[:-1] == key[:-1]
            and key[-1] > 0
            and query[-1] % key[-1] == 0
        )
    return broadcasts(key, query) and broadcasts(value, query)


def _mask_fits(query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool) -> bool:
    if attn_mask is None:
        return True
    if is_causal or not isinstance(attn_mask, Tensor) or attn_mask.device != query.device:
        return False
    if attn_mask.is_nested or attn_mask.layout is not torch.strided:
        return False
    if _causal_bias(attn_mask):
        return (attn_mask.seq_len_q, attn_mask.seq_len_kv) == (query.shape[-2], key.shape[-2])
    shape = (*query.shape[:-2], query.shape[-2], key.shape[-2])
    valid_dtype = attn_mask.dtype is torch.bool or attn_mask.dtype == query.dtype
    return valid_dtype and attn_mask.dim() >= 2 and broadcasts(attn_mask.shape, shape)


# TorchScript cannot compile the function above; scripted modules call torch's operator instead.
with contextlib.suppress(AttributeError):  # this version of torch has no TorchScript, or a different registry
    torch.jit._builtins._register_builtin(scaled_dot_product_attention, "aten::scaled_dot_product_attention")
