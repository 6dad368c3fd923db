"""torch's `scaled_dot_product_attention`, by regard's operator: one assignment replaces it."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import has_torch_function

from regard.mechanism.masking import Mask, broadcasts
from regard.mechanism.masks import Causal
from regard.mechanism.operator import attention
from regard.mechanism.scores import ScaledDot

_torch_attention = torch.nn.functional.scaled_dot_product_attention


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, with the same arguments and the same meaning.

    Causality is torch's top-left rule. What regard does not compute itself goes to torch's own function:
    dropout, whose random numbers would differ; nested tensors and other subclasses; a choice of kernels
    by `torch.nn.attention.sdpa_kernel`; and arguments that torch refuses, so that it refuses them itself.

    >>> import torch, regard
    >>> x = torch.randn(2, 8, 5, 16)
    >>> ours = regard.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> theirs = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> torch.allclose(ours, theirs, atol=1e-6)
    True
    """
    if dropout_p == 0 and _regard_can(query, key, value, attn_mask, is_causal, enable_gqa):
        mask, bias = _mask_and_bias(attn_mask, is_causal)
        return attention(query, key, value, score=ScaledDot(scale), mask=mask, bias=bias)
    return _torch_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _mask_and_bias(attn_mask: Tensor | None, is_causal: bool) -> tuple[Mask | Tensor | None, Tensor | None]:
    """torch has one argument for what are two things here."""
    if is_causal:
        return Causal(align="start"), None
    if isinstance(attn_mask, CausalBias):
        return Causal(align="start" if attn_mask.variant == CausalVariant.UPPER_LEFT else "end"), None
    if attn_mask is None or attn_mask.dtype is torch.bool:
        return attn_mask, None
    return None, attn_mask


def _regard_can(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool, enable_gqa: bool
) -> bool:
    """Whether this is a call that torch would accept and that regard computes."""
    inputs = (query, key, value)
    if has_torch_function(inputs) or not all(
        isinstance(t, Tensor) and t.layout is torch.strided for t in inputs
    ):
        return False
    return (
        query.device.type in ("cpu", "meta")
        and query.is_floating_point()
        and all(t.dtype == query.dtype and t.device == query.device for t in inputs)
        and query.dim() == key.dim() == value.dim() >= 2
        and query.shape[-1] == key.shape[-1]
        and key.shape[-2] == value.shape[-2]
        and _lead_fits(query.shape[:-2], key.shape[:-2], value.shape[:-2], enable_gqa)
        and _mask_fits(query, key, attn_mask, is_causal)
        and (torch.compiler.is_compiling() or all(enabled() for enabled in _KERNELS))
    )


_KERNELS: tuple[Callable[[], bool], ...] = (
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
)


def _lead_fits(query: torch.Size, key: torch.Size, value: torch.Size, enable_gqa: bool) -> bool:
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
    if is_causal or attn_mask.is_nested or attn_mask.device != query.device:
        return False
    if isinstance(attn_mask, CausalBias):
        return (attn_mask.seq_len_q, attn_mask.seq_len_kv) == (query.shape[-2], key.shape[-2])
    whole = (*query.shape[:-2], query.shape[-2], key.shape[-2])
    known = attn_mask.dtype is torch.bool or attn_mask.dtype == query.dtype
    return (
        known
        and not has_torch_function((attn_mask,))
        and attn_mask.dim() >= 2
        and broadcasts(attn_mask.shape, whole)
    )
