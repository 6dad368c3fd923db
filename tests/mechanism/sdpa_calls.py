"""Calls to scaled_dot_product_attention, and comparisons with torch."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

import regard

theirs = F.scaled_dot_product_attention
ours = regard.scaled_dot_product_attention

B, H, Q, K, D, E = 2, 3, 5, 7, 8, 11
Call = tuple[tuple[Any, ...], dict[str, Any]]


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype)


def qkv(*lead: int, q: int = Q, k: int = K, d: int = D, e: int = D) -> tuple[Tensor, Tensor, Tensor]:
    return draw(*lead, q, d), draw(*lead, k, d), draw(*lead, k, e)


def boolean(*shape: int) -> Tensor:
    """Return a boolean mask that allows the first key in every row."""
    mask = torch.rand(shape) > 0.4
    mask[..., 0] = True
    return mask


def minus_infinity(*shape: int) -> Tensor:
    """Return a random additive mask, −inf where masked; the first key is always visible."""
    return draw(*shape).masked_fill(~boolean(*shape), -math.inf)


def no_key_for_row(row: int, kind: str) -> Tensor:
    mask = torch.ones(B, 1, Q, K, dtype=torch.bool)
    mask[0, 0, row] = False
    return mask if kind == "bool" else torch.zeros(mask.shape).double().masked_fill(~mask, -math.inf)


MASK_SHAPES = [
    *((Q, K), (1, K), (Q, 1), (1, 1), (H, Q, K), (1, 1, K), (B, 1, Q, K)),
    *((1, H, Q, K), (B, H, 1, K), (B, H, Q, 1), (B, 1, 1, K), (B, H, Q, K)),
]

CASES: dict[str, Callable[[], Call]] = {
    "2-D": lambda: (qkv(), {}),
    "3-D": lambda: (qkv(H), {}),
    "4-D": lambda: (qkv(B, H), {}),
    "5-D": lambda: (qkv(2, B, H), {}),
    "values of another width": lambda: (qkv(B, H, e=E), {}),
    "values of another width, 2-D": lambda: (qkv(e=E), {}),
    "one query": lambda: (qkv(B, H, q=1), {}),
    "one key": lambda: (qkv(B, H, k=1), {}),
    "one feature": lambda: (qkv(B, H, d=1, e=1), {}),
    "long": lambda: (qkv(1, 1, q=515, k=601), {}),
    "keys for every batch": lambda: ((draw(B, H, Q, D), draw(1, H, K, D), draw(1, H, K, D)), {}),
    "keys for every head": lambda: ((draw(B, H, Q, D), draw(B, 1, K, D), draw(B, 1, K, D)), {}),
    "query for every batch": lambda: ((draw(1, H, Q, D), draw(B, H, K, D), draw(B, H, K, D)), {}),
    "query of fewer axes": lambda: ((draw(H, Q, D), draw(B, H, K, D), draw(B, H, K, D)), {}),
    "keys of fewer axes": lambda: ((draw(B, H, Q, D), draw(H, K, D), draw(H, K, D)), {}),
    # causal: top-left
    "causal": lambda: (qkv(B, H, q=K), {"is_causal": True}),
    "causal, more keys": lambda: (qkv(B, H), {"is_causal": True}),
    "causal, more queries": lambda: (qkv(B, H, q=9, k=4), {"is_causal": True}),
    "causal, 2-D": lambda: (qkv(), {"is_causal": True}),
    "causal, 3-D": lambda: (qkv(H), {"is_causal": True}),
    "causal, 5-D": lambda: (qkv(2, B, H), {"is_causal": True}),
    "causal, long": lambda: (qkv(1, 1, q=601, k=515), {"is_causal": True}),
    "causal, values of another width": lambda: (qkv(B, H, e=E), {"is_causal": True}),
    # masks
    "mask, 2-D": lambda: (qkv(), {"attn_mask": boolean(Q, K)}),
    "mask, 3-D": lambda: (qkv(H), {"attn_mask": boolean(H, Q, K)}),
    "mask, 5-D": lambda: (qkv(2, B, H), {"attn_mask": boolean(2, 1, H, Q, K)}),
    "bias, 2-D": lambda: (qkv(), {"attn_mask": draw(Q, K)}),
    "bias, 3-D": lambda: (qkv(H), {"attn_mask": draw(1, Q, K)}),
    "bias, 5-D": lambda: (qkv(2, B, H), {"attn_mask": minus_infinity(2, 1, H, Q, K)}),
    "transposed mask": lambda: (qkv(B, H), {"attn_mask": boolean(K, Q).mT}),
    "transposed bias": lambda: (qkv(B, H), {"attn_mask": minus_infinity(B, H, K, Q).mT}),
    "expanded mask": lambda: (qkv(B, H), {"attn_mask": boolean(B, 1, 1, K).expand(B, H, Q, K)}),
    "expanded bias": lambda: (qkv(B, H), {"attn_mask": draw(1, K).expand(Q, K)}),
    "every second column": lambda: (qkv(B, H), {"attn_mask": draw(Q, 2 * K)[:, ::2]}),
    "mask without a key": lambda: (qkv(B, H), {"attn_mask": no_key_for_row(2, "bool")}),
    "bias without a key": lambda: (qkv(B, H), {"attn_mask": no_key_for_row(2, "float")}),
    "mask without a key, 3-D": lambda: (qkv(B), {"attn_mask": no_key_for_row(2, "bool")[:, 0]}),
    "no key at all": lambda: (qkv(B, H), {"attn_mask": torch.zeros(Q, K, dtype=torch.bool)}),
    # shared heads
    "gqa, two each": lambda: ((draw(B, 6, Q, D), draw(B, 3, K, D), draw(B, 3, K, D)), {"enable_gqa": True}),
    "gqa, one for all": lambda: (
        (draw(B, 6, Q, D), draw(B, 1, K, D), draw(B, 1, K, D)),
        {"enable_gqa": True},
    ),
    "gqa, no sharing": lambda: (qkv(B, H), {"enable_gqa": True}),
    "gqa, 3-D": lambda: ((draw(6, Q, D), draw(3, K, D), draw(3, K, D)), {"enable_gqa": True}),
    "gqa, 5-D": lambda: (
        (draw(2, B, 6, Q, D), draw(2, B, 3, K, D), draw(2, B, 3, K, D)),
        {"enable_gqa": True},
    ),
    "gqa, causal": lambda: (
        (draw(B, 6, Q, D), draw(B, 2, K, D), draw(B, 2, K, E)),
        {"enable_gqa": True, "is_causal": True},
    ),
    "gqa, mask": lambda: (
        (draw(B, 6, Q, D), draw(B, 2, K, D), draw(B, 2, K, D)),
        {"enable_gqa": True, "attn_mask": boolean(B, 6, Q, K)},
    ),
    "gqa, heads of value": lambda: (
        (draw(B, 6, Q, D), draw(B, 3, K, D), draw(B, 2, K, D)),
        {"enable_gqa": True},
    ),
    # scale
    **{
        f"scale {scale}": lambda scale=scale: (qkv(B, H), {"scale": scale})
        for scale in (None, 0.5, -1.5, 0.0, 3, 1e-30, True, np.float32(0.3))
    },
    "scale, 3-D, negative": lambda: (qkv(H), {"scale": -0.7, "is_causal": True}),
    # empty
    "no batch": lambda: (qkv(0, H), {}),
    # torch 2.10 divides by zero
    **({} if torch.__version__.startswith("2.10.") else {"no heads": lambda: (qkv(B, 0), {})}),
    "no queries": lambda: (qkv(B, H, q=0), {}),
    "no keys": lambda: (qkv(B, H, k=0), {}),
    "no keys, causal": lambda: (qkv(B, H, k=0), {"is_causal": True}),
    "no keys, mask": lambda: (qkv(B, H, k=0), {"attn_mask": torch.ones(Q, 0, dtype=torch.bool)}),
    "no tokens": lambda: (qkv(B, H, q=0, k=0), {}),
    "no tokens, 3-D": lambda: (qkv(H, q=0, k=0), {"is_causal": True}),
    "no features": lambda: (qkv(B, H, d=0, e=0), {}),
    "no features, 3-D": lambda: (qkv(H, d=0, e=E), {}),
    "no value features": lambda: (qkv(B, H, e=0), {}),
    "no batch, mask": lambda: (qkv(0, H), {"attn_mask": boolean(0, 1, Q, K)}),
    "no heads, gqa": lambda: ((draw(B, 0, Q, D), draw(B, 3, K, D), draw(B, 3, K, D)), {"enable_gqa": True}),
}
CASES |= {f"mask {shape}": lambda s=shape: (qkv(B, H), {"attn_mask": boolean(*s)}) for shape in MASK_SHAPES}
CASES |= {f"bias {shape}": lambda s=shape: (qkv(B, H), {"attn_mask": draw(*s)}) for shape in MASK_SHAPES}
CASES |= {
    f"−inf {shape}": lambda s=shape: (qkv(B, H), {"attn_mask": minus_infinity(*s)})
    for shape in ((Q, K), (B, 1, Q, K), (B, H, Q, K))
}


def run(function: Callable[..., Tensor], args: Any, options: Any, mask_learns: bool = False) -> list[Tensor]:
    """Return the output and all gradients, for a fixed cotangent."""
    args = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in args]
    leaves = list(args)
    mask = options.get("attn_mask")
    if mask_learns and mask is not None and mask.is_floating_point():
        options = {**options, "attn_mask": mask.detach().requires_grad_()}
        leaves.append(options["attn_mask"])
    output = function(*args, **options)
    direction = torch.arange(output.numel(), dtype=output.dtype).remainder(7).sub(2.5).reshape(output.shape)
    return [output, *torch.autograd.grad(output, leaves, direction)]


def assert_matches_torch(
    args: Any,
    options: Any,
    mask_learns: bool = False,
    function: Callable[..., Tensor] = ours,
    **tolerance: float,
) -> None:
    mine = run(function, args, options, mask_learns)
    expected = run(theirs, args, options, mask_learns)
    for a, b in zip(mine, expected, strict=True):
        assert (a.shape, a.dtype, a.device, type(a)) == (b.shape, b.dtype, b.device, type(b))
        torch.testing.assert_close(a, b, **tolerance)


def outcome(function: Callable[..., Any], args: Any, options: Any) -> Any:
    """Return the result of a call: a tensor, or the type and message of its error."""
    try:
        return function(*args, **options)
    except Exception as error:
        # torch's position counts only positional arguments
        return type(error), re.sub(r" \(position \d+\)", "", str(error))


def assert_same_outcome(
    args: Any, options: Any, refused: bool | None = None, function: Callable[..., Any] = ours
) -> None:
    expected, actual = outcome(theirs, args, options), outcome(function, args, options)
    if refused is not None:
        assert isinstance(expected, tuple) == refused, "torch behaves differently from what this case expects"
    if isinstance(expected, tuple):
        assert isinstance(actual, tuple), f"torch rejects the call: {expected}"
        assert actual == expected
    else:
        assert isinstance(actual, Tensor), f"torch accepts the call, but regard raises {actual}"
        assert (actual.shape, actual.dtype, actual.layout) == (
            expected.shape,
            expected.dtype,
            expected.layout,
        )
        if not actual.is_meta:
            torch.testing.assert_close(actual, expected)


BACKENDS = {
    "math": [SDPBackend.MATH],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "fused": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
    "flash or math": [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
    "all": [
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
        SDPBackend.CUDNN_ATTENTION,
    ],
}


x = torch.linspace(-1, 1, B * H * Q * D).reshape(B, H, Q, D)  # float32, the same for all three
