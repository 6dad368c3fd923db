"""regard.scaled_dot_product_attention matches torch: same results, gradients and errors.

Almost every test calls both functions with the same arguments and compares what happens. PyTorch's own
tests are meant to pass with the one in the place of the other, so this file goes where they go: masks
of every kind, zero sizes, bias objects, kernel contexts, OpInfo samples, and the modules of torch.nn.
"""

import contextlib
import functools
import itertools
import math
import re
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.overrides import TorchFunctionMode

import regard
from tests.cases import looped
from tests.fresh import run_fresh

theirs = F.scaled_dot_product_attention
ours = regard.scaled_dot_product_attention

# torch loads forward-mode rules through torch.jit, which warns
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

B, H, Q, K, D, E = 2, 3, 5, 7, 8, 11
Call = tuple[tuple[Any, ...], dict[str, Any]]


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype)


def qkv(*lead: int, q: int = Q, k: int = K, d: int = D, e: int = D) -> tuple[Tensor, Tensor, Tensor]:
    return draw(*lead, q, d), draw(*lead, k, d), draw(*lead, k, e)


def boolean(*shape: int) -> Tensor:
    """A boolean mask in which every row sees its first key."""
    mask = torch.rand(shape) > 0.4
    mask[..., 0] = True
    return mask


def minus_infinity(*shape: int) -> Tensor:
    """The same as an additive mask: −inf where masked."""
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
    "no heads": lambda: (qkv(B, 0), {}),
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


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20)


def run(function: Callable[..., Tensor], args: Any, options: Any, mask_learns: bool = False) -> list[Tensor]:
    """The output and all gradients, for a fixed cotangent."""
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


# Results


@looped("name", CASES)
def test_output_and_gradients_are_torchs(name: str) -> None:
    args, options = CASES[name]()
    assert_matches_torch(args, options, rtol=1e-9, atol=1e-10)


@looped("name", [name for name in CASES if "bias" in name or "−inf" in name])
def test_a_mask_that_requires_grad_gets_torchs_gradient(name: str) -> None:
    args, options = CASES[name]()
    assert_matches_torch(args, options, mask_learns=True, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda *args, **options: ours(*args, **options) * (1 + 1e-6),
        lambda *args, **options: ours(*args, **options).float(),
        lambda query, key, value, **options: ours(query, key.detach() + 0 * key, value, **options),
        lambda query, key, value, **options: ours(query, key.flip(-2), value, **options),
    ],
    ids=["inexact", "another dtype", "no gradient of key", "other keys"],
)
def test_the_comparison_can_fail(wrong: Callable[..., Tensor]) -> None:
    with pytest.raises(AssertionError):
        assert_matches_torch(qkv(B, H), {"is_causal": True}, rtol=1e-9, atol=1e-10, function=wrong)


@looped("causal", [False, True])
@looped("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@looped("shape", [(B, H), (H,)], ids=["4-D", "3-D"])
def test_no_less_exact_than_torch(dtype: torch.dtype, causal: bool, shape: tuple[int, ...]) -> None:
    args = [t.to(dtype) for t in qkv(*shape, q=67, k=129, d=16, e=16)]
    exact = run(theirs, [t.double() for t in args], {"is_causal": causal})
    mine = run(ours, args, {"is_causal": causal})
    torchs = run(theirs, args, {"is_causal": causal})
    for a, b, true in zip(mine, torchs, exact, strict=True):
        assert a.dtype is dtype
        floor = torch.finfo(dtype).eps * true.abs().max()
        assert (a - true).abs().max() <= 2 * (b - true).abs().max() + floor


@looped("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@looped("kind", ["bool", "float", "wide float"])
def test_masks_for_every_dtype(dtype: torch.dtype, kind: str) -> None:
    args = [t.to(dtype) for t in qkv(B, H)]
    mask = boolean(B, 1, Q, K)
    if kind == "float":
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -math.inf)
    if kind == "wide float":  # torch takes float32 with half precision
        mask = torch.zeros(mask.shape, dtype=torch.float32).masked_fill(~mask, -math.inf)
    tolerance = 1e-5 if dtype is torch.float32 else 5e-2
    assert_matches_torch(args, {"attn_mask": mask}, rtol=tolerance, atol=tolerance)


def test_a_causal_scale_of_zero_is_the_mean_of_the_past() -> None:
    # torch's fused kernel multiplies −inf by the scale and returns NaN
    query, key, value = qkv(B, H, q=K)
    past = value.cumsum(-2) / torch.arange(1, K + 1)[:, None]
    torch.testing.assert_close(ours(query, key, value, is_causal=True, scale=0.0), past)


# Layouts


def _strided(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    if kind == "heads inside":  # the usual layout of models: (b, n, h, d) with two axes swapped
        return tuple(draw(B, n, H, D).transpose(1, 2) for n in (Q, K, K))
    if kind == "packed":
        return draw(B, Q, 3 * H * D).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4).unbind(0)
    if kind == "features outside":
        return tuple(draw(B, H, D, n).mT for n in (Q, K, K))
    if kind == "every second":
        return tuple(draw(B, H, 2 * n, 2 * D)[..., ::2, ::2] for n in (Q, K, K))
    if kind == "expanded":
        return tuple(draw(B, 1, n, D).expand(B, H, n, D) for n in (Q, K, K))
    if kind == "a row for all":
        return tuple(draw(1, 1, n, 1).expand(B, H, n, D) for n in (Q, K, K))
    raise AssertionError(kind)


LAYOUTS = ["heads inside", "packed", "features outside", "every second", "expanded", "a row for all"]


@looped("causal", [False, True])
@looped("kind", LAYOUTS)
def test_any_layout(kind: str, causal: bool) -> None:
    assert_matches_torch(_strided(kind), {"is_causal": causal}, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", LAYOUTS[:2])
def test_the_output_has_the_layout_of_the_query(kind: str) -> None:
    args = _strided(kind)
    assert theirs(*args).stride() == args[0].stride() or kind == "packed"
    assert ours(*args).stride() == theirs(*args).stride()


def test_heads_merge_without_a_copy_as_in_torchs_tutorial() -> None:
    # torch's SDPA tutorial ends with y.transpose(1, 2).view(batch, n, heads * width)
    query, key, value = _strided("heads inside")
    for function in (theirs, ours):
        merged = function(query, key, value).transpose(1, 2).view(B, Q, H * D)
        assert merged.shape == (B, Q, H * D)


def test_gradients_of_a_strided_cotangent() -> None:
    args = [t.requires_grad_() for t in qkv(B, H)]
    direction = draw(B, Q, H, 2 * D).transpose(1, 2)[..., ::2]
    actual = torch.autograd.grad(ours(*args), args, direction)
    expected = torch.autograd.grad(theirs(*args), args, direction)
    torch.testing.assert_close(actual, expected)
    summed = torch.autograd.grad(ours(*args).sum(), args)  # an expanded cotangent
    torch.testing.assert_close(summed, torch.autograd.grad(theirs(*args).sum(), args))


def test_lazy_clones_stay_lazy() -> None:
    """Copy-on-write tensors must not be materialized; OpInfo tests the same for torch."""
    args = [torch._lazy_clone(t).requires_grad_() for t in qkv(B, H)]
    mask = torch._lazy_clone(draw(Q, K))
    output = ours(*args, attn_mask=mask)
    torch.autograd.grad(output.sum(), args)
    assert all(torch._C._is_cow_tensor(t) for t in (*args, mask))


# Gradients only where needed


@looped("which", list(itertools.product([False, True], repeat=3)), ids=str)
def test_requires_grad_follows_the_inputs(which: tuple[bool, ...]) -> None:
    args = [t.requires_grad_(need) for t, need in zip(qkv(B, H), which, strict=True)]
    mine, expected = ours(*args), theirs(*args)
    assert mine.requires_grad == expected.requires_grad == any(which)
    leaves = [t for t in args if t.requires_grad]
    if leaves:
        actual = torch.autograd.grad(mine.sum(), leaves)
        torch.testing.assert_close(actual, torch.autograd.grad(expected.sum(), leaves))


# torch.func


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # of torch's own
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 1, 1), (2, -1, 0), (None, None, 0)])
def test_vmap(in_dims: tuple[int | None, ...]) -> None:
    args = [
        t if at is None else torch.stack([t, t.flip(-1), t + 1], at)
        for t, at in zip(qkv(B, H), in_dims, strict=True)
    ]
    for options in ({}, {"is_causal": True}, {"attn_mask": boolean(Q, K)}):
        actual = torch.vmap(lambda *a, o=options: ours(*a, **o), in_dims)(*args)
        expected = torch.vmap(lambda *a, o=options: theirs(*a, **o), in_dims)(*args)
        torch.testing.assert_close(actual, expected)


# Dropout


@looped("dropout", [0.2, 0.9, 1.0])
@looped("name", ["4-D", "3-D", "causal", "mask (5, 7)", "gqa, two each"])
def test_dropout_draws_torchs_numbers(name: str, dropout: float) -> None:
    args, options = CASES[name]()
    results = []
    for function in (ours, theirs):
        torch.manual_seed(7)
        results.append([*run(function, args, {**options, "dropout_p": dropout}), torch.rand(3)])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("nothing", [0, 0.0, False])
def test_without_dropout_no_random_number_is_drawn(nothing: float) -> None:
    state = torch.get_rng_state()
    args = qkv(B, H)
    torch.set_rng_state(state)
    ours(*args, dropout_p=nothing)
    assert torch.equal(torch.get_rng_state(), state)


# Causal bias objects


@pytest.mark.filterwarnings("ignore:Lower right causal bias:UserWarning")  # of rows without a key
@looped("build", [causal_upper_left, causal_lower_right])
@looped("sizes", [(5, 7), (7, 7), (7, 5), (1, 7), (7, 1)], ids=str)
@looped("dtype", [torch.float64, torch.float16], ids=str)
def test_bias_objects(build: Callable[..., Tensor], sizes: tuple[int, int], dtype: torch.dtype) -> None:
    args = [t.to(dtype) for t in qkv(B, H, q=sizes[0], k=sizes[1])]
    bias = build(*sizes)
    tolerance = {"rtol": 5e-3, "atol": 5e-3} if dtype is torch.float16 else {}
    dense = run(theirs, args, {"attn_mask": bias._materialize("cpu")})
    actual = run(ours, args, {"attn_mask": bias})
    for a, b in zip(actual, dense, strict=True):
        torch.testing.assert_close(a, b, **tolerance)
    if build is causal_upper_left:
        torch.testing.assert_close(actual[0], ours(*args, is_causal=True))


def test_bias_objects_with_dropout_scale_and_shared_heads() -> None:
    query, key, value = draw(B, 6, Q, D), draw(B, 3, K, D), draw(B, 3, K, D)
    bias = causal_lower_right(Q, K)
    actual = ours(query, key, value, bias, scale=0.3, enable_gqa=True)
    expected = theirs(query, key, value, bias._materialize("cpu"), scale=0.3, enable_gqa=True)
    torch.testing.assert_close(actual, expected)
    results = []
    for function in (ours, theirs):
        torch.manual_seed(3)
        results.append(function(*qkv(B, H), attn_mask=bias, dropout_p=0.4))
    torch.testing.assert_close(*results)


# Kernel contexts

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


@looped("kernels", BACKENDS)
@looped("name", ["4-D", "3-D", "causal", "bias (5, 7)"])
@pytest.mark.filterwarnings("ignore")  # torch says why it has no kernel
def test_inside_a_kernel_context(name: str, kernels: str) -> None:
    args, options = CASES[name]()
    with sdpa_kernel(BACKENDS[kernels]):
        assert_same_outcome(args, options)


@pytest.mark.filterwarnings("ignore")
def test_no_kernel_at_all() -> None:
    with sdpa_kernel([SDPBackend.ERROR]):
        assert_same_outcome(qkv(B, H), {})


@pytest.mark.parametrize("kernels", ["math", "flash", "efficient"])
@pytest.mark.filterwarnings("ignore")
def test_contexts_do_not_change_the_errors(kernels: str) -> None:
    single, half = draw(1, 4, 8, 16, dtype=torch.float32), draw(1, 4, 8, 16, dtype=torch.float16)
    with sdpa_kernel(BACKENDS[kernels]):
        assert_same_outcome((single, half, half), {}, refused=True)
        assert_same_outcome((half[0, 0, 0], half, half), {}, refused=True)


def test_large_negative_scale_in_the_math_context() -> None:
    x = draw(1, 3, 64, 64, dtype=torch.float32)
    expected = ((x @ x.mT) / -0.0001).softmax(-1) @ x
    with sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(ours(x, x, x, scale=-1 / 0.0001), expected)


def test_a_mask_with_whole_blocks_of_minus_infinity() -> None:
    full = torch.full((600, 600), -math.inf)
    band = full.triu(1) + full.tril(-10)
    args = [draw(1, 2, 600, 8, dtype=torch.float32) for _ in range(3)]
    with sdpa_kernel(SDPBackend.MATH):
        expected = theirs(*args, attn_mask=band)
    torch.testing.assert_close(ours(*args, attn_mask=band), expected)


# Errors


def outcome(function: Callable[..., Any], args: Any, options: Any) -> Any:
    """The result of a call: a tensor, or the type and message of its error."""
    try:
        return function(*args, **options)
    except Exception as error:
        # torch counts only positional arguments
        return type(error), re.sub(r" \(position \d+\)", "", str(error))


def assert_same_outcome(
    args: Any, options: Any, refused: bool | None = None, function: Callable[..., Any] = ours
) -> None:
    expected, actual = outcome(theirs, args, options), outcome(function, args, options)
    if refused is not None:
        assert isinstance(expected, tuple) == refused, "the case is not what it says it is"
    if isinstance(expected, tuple):
        assert isinstance(actual, tuple), f"torch refuses: {expected}"
        assert actual == expected
    else:
        assert isinstance(actual, Tensor), f"torch accepts, regard says {actual}"
        assert (actual.shape, actual.dtype, actual.layout) == (
            expected.shape,
            expected.dtype,
            expected.layout,
        )
        if not actual.is_meta:
            torch.testing.assert_close(actual, expected)


x = torch.linspace(-1, 1, B * H * Q * D).reshape(B, H, Q, D)  # float32, the same for all three

REFUSED: dict[str, Call] = {
    # shapes
    "0-D": ((x[0, 0, 0, 0],) * 3, {}),
    "1-D": ((x[0, 0, 0],) * 3, {}),
    "1-D query": ((x[0, 0, 0], x, x), {}),
    "1-D key": ((x, x[0, 0, 0], x), {}),
    "1-D value": ((x, x, x[0, 0, 0]), {}),
    "widths": ((x, x[..., :3], x), {}),
    "widths, 3-D": ((x[0], x[0, ..., :3], x[0]), {}),
    "widths, 2-D": ((x[0, 0], x[0, 0, :, :3], x[0, 0]), {}),
    "a width of zero": ((x, x[..., :0], x), {}),
    "more keys than values, 3-D": ((x[0], x[0], x[0, :, :3]), {}),
    "more values than keys, 3-D": ((x[0], x[0, :, :3], x[0]), {}),
    "more keys than values, 2-D": ((x[0, 0], x[0, 0], x[0, 0, :3]), {}),
    "heads": ((x, x[:, :2], x[:, :2]), {}),
    "heads of key": ((x, x[:, :2], x), {}),
    "heads of value": ((x, x, x[:, :2]), {}),
    "batches": ((x, x.repeat(3, 1, 1, 1)[:3], x), {}),
    "heads, 3-D": ((x[0], x[0, :2], x[0, :2]), {}),
    "gqa that does not divide": ((x, x[:, :2], x[:, :2]), {"enable_gqa": True}),
    "gqa with more key heads": ((x[:, :1], x[:, :2], x[:, :2]), {"enable_gqa": True}),
    "gqa, 2-D": ((x[0, 0],) * 3, {"enable_gqa": True}),
    # dtypes, devices, layouts
    "half keys": ((x, x.half(), x), {}),
    "half query": ((x.half(), x, x), {}),
    "double value": ((x, x, x.double()), {}),
    "double value, 3-D": ((x[0], x[0], x[0].double()), {}),
    "integers": ((x.long(),) * 3, {}),
    "integers, 3-D": ((x[0].int(),) * 3, {}),
    "booleans": ((x > 0,) * 3, {}),
    "bytes": ((x.to(torch.uint8),) * 3, {}),
    "float8": ((x.to(torch.float8_e4m3fn),) * 3, {}),
    "float8, 3-D": ((x[0].to(torch.float8_e5m2),) * 3, {}),
    "complex, 3-D": ((x[0].cfloat(),) * 3, {}),
    "complex": ((x.cfloat(),) * 3, {}),
    "one meta": ((x, x.to("meta"), x), {}),
    "meta query": ((x.to("meta"), x, x), {}),
    "meta query, mask": ((x.to("meta"), x, x), {"attn_mask": torch.zeros(Q, Q)}),
    "meta value, 3-D": ((x[0], x[0], x[0].to("meta")), {}),
    "sparse": ((x.to_sparse(),) * 3, {}),
    "sparse key": ((x, x.to_sparse(), x), {}),
    # masks
    "mask too wide": ((x, x, x), {"attn_mask": torch.ones(Q, Q + 1, dtype=torch.bool)}),
    "bias too wide": ((x, x, x), {"attn_mask": torch.zeros(Q, Q + 1)}),
    "mask too long": ((x, x, x), {"attn_mask": torch.ones(Q + 1, Q, dtype=torch.bool)}),
    "mask of other heads": ((x, x, x), {"attn_mask": torch.ones(B, 2, Q, Q, dtype=torch.bool)}),
    "mask of another batch": ((x, x, x), {"attn_mask": torch.zeros(3, 1, Q, Q)}),
    "mask too wide, 3-D": ((x[0], x[0], x[0]), {"attn_mask": torch.ones(Q, Q + 1, dtype=torch.bool)}),
    "bias too wide, 3-D": ((x[0], x[0], x[0]), {"attn_mask": torch.zeros(Q, Q + 1)}),
    "bytes for a mask": ((x, x, x), {"attn_mask": torch.ones(Q, Q, dtype=torch.uint8)}),
    "integers for a mask": ((x, x, x), {"attn_mask": torch.ones(Q, Q, dtype=torch.long)}),
    "doubles with floats": ((x, x, x), {"attn_mask": torch.zeros(Q, Q, dtype=torch.float64)}),
    "halves with floats": ((x, x, x), {"attn_mask": torch.zeros(Q, Q, dtype=torch.float16)}),
    "halves with floats, 3-D": ((x[0], x[0], x[0]), {"attn_mask": torch.zeros(Q, Q, dtype=torch.float16)}),
    "complex for a mask": ((x, x, x), {"attn_mask": torch.zeros(Q, Q, dtype=torch.cfloat)}),
    "mask and causal, 3-D": ((x[0],) * 3, {"attn_mask": torch.zeros(Q, Q), "is_causal": True}),
    "mask and causal, 2-D": ((x[0, 0],) * 3, {"attn_mask": torch.ones(Q, Q).bool(), "is_causal": True}),
    "mask and causal, values of another width": (
        (x, x, x[..., :3]),
        {"attn_mask": torch.zeros(Q, Q), "is_causal": True},
    ),
    "a sparse mask": ((x, x, x), {"attn_mask": torch.ones(Q, Q).to_sparse()}),
    # wrong argument types
    "list for query": (([[1.0]], x, x), {}),
    "None for query": ((None, x, x), {}),
    "number for key": ((x, 1.0, x), {}),
    "array for value": ((x, x, x.numpy()), {}),
    "list for mask": ((x, x, x), {"attn_mask": [[True]]}),
    "array for mask": ((x, x, x), {"attn_mask": np.ones((Q, Q), bool)}),
    "text for mask": ((x, x, x), {"attn_mask": "causal"}),
    "False for mask": ((x, x, x), {"attn_mask": False}),
    "dropout None": ((x, x, x), {"dropout_p": None}),
    "dropout text": ((x, x, x), {"dropout_p": "a"}),
    "dropout complex": ((x, x, x), {"dropout_p": 0j}),
    "dropout vector": ((x, x, x), {"dropout_p": torch.zeros(2)}),
    "dropout vector of one": ((x, x, x), {"dropout_p": torch.zeros(1)}),
    "dropout below 0": ((x, x, x), {"dropout_p": -0.1}),
    "dropout above 1": ((x, x, x), {"dropout_p": 1.5}),
    "dropout nan": ((x, x, x), {"dropout_p": math.nan}),
    **{
        f"{name} {value!r}": ((x, x, x), {name: value})
        for name in ("is_causal", "enable_gqa")
        for value in (None, 0, 1, "yes", "", np.True_, torch.tensor(True))
    },
    "scale text": ((x, x, x), {"scale": "x"}),
    "scale complex": ((x, x, x), {"scale": 1j}),
    "scale vector": ((x, x, x), {"scale": torch.ones(D)}),
    "scale vector of one": ((x, x, x), {"scale": torch.ones(1)}),
    "scale that learns": ((x, x, x), {"scale": torch.tensor(0.5, requires_grad=True)}),
    "scale by position": ((x, x, x, None, 0.0, False, 0.5), {}),
    "all by position": ((x, x, x, None, 0.0, False, 0.5, False), {}),
    "unknown option": ((x, x, x), {"mask": None}),
    "query twice": ((x, x, x), {"query": x}),
}


@looped("name", REFUSED)
@pytest.mark.filterwarnings("ignore")  # torch explains some refusals in warnings first
def test_invalid_calls_raise_the_errors_of_torch(name: str) -> None:
    args, options = REFUSED[name]
    assert_same_outcome(args, options, refused=True)


def test_a_different_error_is_detected() -> None:
    def otherwise(*args: Any, **options: Any) -> Tensor:
        try:
            return ours(*args, **options)
        except RuntimeError as error:
            raise RuntimeError(f"{error}!") from None

    args, options = REFUSED["heads"]
    with pytest.raises(AssertionError):
        assert_same_outcome(args, options, function=otherwise)
    with pytest.raises(AssertionError, match="torch refuses"):
        assert_same_outcome(args, options, function=lambda *_: x)
    with pytest.raises(AssertionError, match="not what it says"):
        assert_same_outcome((x, x, x), {}, refused=True)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_missing_arguments(count: int) -> None:
    with pytest.raises(TypeError, match="missing"):
        ours(*(x, x, x)[:count])


ACCEPTED: dict[str, Call] = {
    "0-D mask": ((x, x, x), {"attn_mask": torch.tensor(True)}),
    "1-D mask": ((x, x, x), {"attn_mask": torch.ones(Q, dtype=torch.bool)}),
    "1-D mask, 3-D": ((x[0],) * 3, {"attn_mask": torch.ones(Q, dtype=torch.bool)}),
    "1-D bias": ((x, x, x), {"attn_mask": torch.zeros(Q)}),
    "3-D mask": ((x, x, x), {"attn_mask": torch.zeros(H, Q, Q)}),
    "5-D mask": ((x, x, x), {"attn_mask": torch.zeros(1, B, H, Q, Q)}),
    "4-D mask, 3-D": ((x[0],) * 3, {"attn_mask": torch.zeros(B, H, Q, Q)}),
    "mask and causal": ((x, x, x), {"attn_mask": torch.zeros(Q, Q), "is_causal": True}),
    "floats with bfloat16": ((x.bfloat16(),) * 3, {"attn_mask": torch.zeros(Q, Q)}),
    "floats with bfloat16, 3-D": ((x[0].bfloat16(),) * 3, {"attn_mask": torch.zeros(Q, Q)}),
    "bfloat16 with floats": ((x, x, x), {"attn_mask": torch.zeros(Q, Q, dtype=torch.bfloat16)}),
    "dropout of a tensor": ((x, x, x), {"dropout_p": torch.tensor(0.0)}),
    "dropout of numpy": ((x, x, x), {"dropout_p": np.float64(0)}),
    "scale of a tensor": ((x, x, x), {"scale": torch.tensor(0.5)}),
    "by keyword": ((), {"value": x, "key": x, "query": x, "attn_mask": None}),
    "mask by position": ((x, x, x, boolean(Q, Q), 0.0, False), {}),
    "meta": ((x.to("meta"),) * 3, {}),
    "meta, 3-D, causal": ((x[0].to("meta"),) * 3, {"is_causal": True}),
    "parameters": (tuple(nn.Parameter(x) for _ in range(3)), {}),
}


@looped("name", ACCEPTED)
@pytest.mark.filterwarnings("ignore")
def test_unusual_arguments_match_torch(name: str) -> None:
    assert_same_outcome(*ACCEPTED[name])


@pytest.mark.parametrize("scale", [math.inf, -math.inf, math.nan])
def test_torch_takes_any_scale(scale: float) -> None:
    args = (x + 2,) * 3
    torch.testing.assert_close(ours(*args, scale=scale), theirs(*args, scale=scale), equal_nan=True)


# Invalid calls that torch accepts, returning uninitialized memory.


@looped(
    ("args", "options"),
    [
        # torch's fused kernel takes the length from the key: it reads, and backward writes, out of bounds
        ((x, x, x[..., :3, :]), {}),
        ((x, x[..., :3, :], x), {}),
        ((x, x, x), {"attn_mask": torch.zeros(Q, Q, device="meta")}),
        # torch divides by the number of heads, which kills the process
        *(
            ((x[0, :1], x[0, :0], x[0, :2]), {"enable_gqa": True}),
            ((x, x[:, :0], x[:, :2]), {"enable_gqa": True}),
        ),
    ],
)
def test_calls_that_torch_computes_out_of_bounds_are_rejected(args: Any, options: Any) -> None:
    with pytest.raises((RuntimeError, ValueError)):
        ours(*args, **options)


# Nested tensors, subclasses, modes


@pytest.mark.filterwarnings("ignore")  # nested tensors are a prototype, says torch
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors(layout: torch.layout) -> None:
    parts = [draw(H, n, D) for n in (3, 5, 2)]
    if layout is torch.strided:
        nested = torch.nested.nested_tensor(parts, layout=layout)
    else:  # only the axis behind the batch's may be ragged
        turned = [part.transpose(0, 1) for part in parts]
        nested = torch.nested.nested_tensor(turned, layout=layout).transpose(1, 2)
    actual, expected = ours(nested, nested, nested), theirs(nested, nested, nested)
    assert actual.is_nested
    for a, b, part in zip(actual.unbind(), expected.unbind(), parts, strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(a, ours(part, part, part))


@pytest.mark.filterwarnings("ignore")
def test_mixed_nested_and_dense_inputs_raise_the_same_error() -> None:
    nested = torch.nested.nested_tensor([draw(n, H, D) for n in (3, 5)]).transpose(1, 2)
    dense = draw(2, H, 4, D)
    for args in ((nested, dense, dense), (dense, nested, nested)):
        expected, actual = outcome(theirs, args, {}), outcome(ours, args, {})
        assert isinstance(expected, tuple) == isinstance(actual, tuple)
        if isinstance(expected, tuple):
            assert actual == expected
    assert_same_outcome((dense, dense, dense), {"attn_mask": nested}, refused=True)


@pytest.mark.filterwarnings("ignore")
def test_nested_tensors_with_options() -> None:
    parts = [draw(n, H, D) for n in (3, 5, 2)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    for options in ({"is_causal": True}, {"scale": 0.3}, {"attn_mask": boolean(5, 5)}):
        expected, actual = outcome(theirs, (nested,) * 3, options), outcome(ours, (nested,) * 3, options)
        if isinstance(expected, tuple):
            assert actual == expected
        else:
            torch.testing.assert_close(actual.values(), expected.values())


class _Noted(Tensor):
    """A tensor that records torch function calls."""

    seen: list[Any] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


class _Duck:
    """Not a tensor, but it implements __torch_function__."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return "quack" if function is F.scaled_dot_product_attention else NotImplemented


@pytest.mark.parametrize("place", range(4))
def test_a_subclass_intercepts_one_call(place: int) -> None:
    args: list[Tensor] = [*qkv(B, H), draw(Q, K)]
    expected = theirs(*args)
    args[place] = args[place].as_subclass(_Noted)
    _Noted.seen.clear()
    output = ours(*args)
    assert sum(function in (theirs, ours) for function in _Noted.seen) == 1
    assert isinstance(output, _Noted)
    torch.testing.assert_close(output.as_subclass(Tensor), expected)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("place", range(4))
def test_overrides_of_torch_also_override_regard(
    monkeypatch: pytest.MonkeyPatch, place: int, swapped: bool
) -> None:
    # overrides compare with the current F.scaled_dot_product_attention
    args: list[Any] = [*qkv(B, H), draw(Q, K)]
    args[place] = _Duck()
    assert theirs(*args) == "quack"
    if swapped:
        monkeypatch.setattr(F, "scaled_dot_product_attention", ours)
    assert ours(*args) == "quack"


def test_a_mode_intercepts_one_call() -> None:
    seen = []

    class Watching(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    args = qkv(B, H)
    expected = theirs(*args)
    with Watching():
        output = ours(*args)
    assert sum(function in (theirs, ours) for function in seen) == 1
    torch.testing.assert_close(output, expected)


def test_the_default_device_has_no_effect() -> None:
    """`with torch.device(…)` is a mode too; regard's function is still called."""
    query, key, value = qkv(B, H)
    value[..., -1, :] = math.nan
    mask = torch.arange(K) < K - 1
    expected = ours(query, key, value, attn_mask=mask[None])
    with torch.device("cpu"):
        actual = ours(query, key, value, attn_mask=mask[None])
    torch.testing.assert_close(actual, expected)


# Autocast


@looped("dtype", [torch.bfloat16, torch.float16], ids=str)
@looped(
    "given",
    [
        (torch.float32, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float64, torch.float64, torch.float64),
        (torch.float64, torch.float32, torch.float32),
    ],
    ids=str,
)
def test_autocast(dtype: torch.dtype, given: tuple[torch.dtype, ...]) -> None:
    args = [t.to(d) for t, d in zip(qkv(B, H), given, strict=True)]
    with torch.autocast("cpu", dtype=dtype):
        expected, actual = outcome(theirs, args, {}), outcome(ours, args, {})
    if isinstance(expected, tuple):
        assert actual == expected
        return
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_autocast_with_a_mask(mask_dtype: torch.dtype) -> None:
    args = [t.float().requires_grad_() for t in qkv(B, H)]
    mask = boolean(Q, K) if mask_dtype is torch.bool else draw(Q, K, dtype=mask_dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, actual = (outcome(f, args, {"attn_mask": mask}) for f in (theirs, ours))
    if isinstance(expected, tuple):
        assert actual == expected
        return
    assert actual.dtype is torch.bfloat16
    torch.testing.assert_close(actual, expected, rtol=3e-2, atol=3e-2)
    for a, b in zip(
        torch.autograd.grad(actual.sum(), args), torch.autograd.grad(expected.sum(), args), strict=True
    ):
        assert a.dtype is torch.float32
        torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2)


# torch.compile


SLOW = pytest.mark.slow  # one of many that take a second each: they compile


@pytest.mark.parametrize(
    "name",
    [
        *("causal, more keys", "bias (2, 1, 5, 7)", "gqa, two each"),
        *(pytest.param(name, marks=SLOW) for name in ("4-D", "3-D", "mask (5, 7)", "scale 0.5")),
    ],
)
def test_compiles_into_one_graph(name: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    args, options = CASES[name]()
    actual = run(torch.compile(ours, backend=counter, fullgraph=True), args, options)
    assert counter.frame_count == 1
    torch.testing.assert_close(actual, run(ours, args, options))


@pytest.mark.parametrize("build", [pytest.param(causal_upper_left, marks=SLOW), causal_lower_right])
def test_bias_objects_compile_into_one_graph(build: Callable[..., Tensor]) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    args = [t.half() for t in qkv(1, 1, q=23, k=56, d=15, e=15)]
    bias = build(23, 56)
    with sdpa_kernel(BACKENDS["all"]):
        actual = run(torch.compile(ours, backend=counter), args, {"attn_mask": bias})
    assert counter.frame_count == 1
    for a, b in zip(actual, run(theirs, args, {"attn_mask": bias}), strict=True):
        torch.testing.assert_close(a, b, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("kernels", ["math", pytest.param("flash", marks=SLOW)])
def test_compiles_inside_a_kernel_context(kernels: str) -> None:
    torch._dynamo.reset()
    args = qkv(B, H)

    def call(*args: Tensor) -> Tensor:
        with sdpa_kernel(BACKENDS[kernels]):
            return ours(*args, is_causal=True)

    actual = torch.compile(call, backend="aot_eager", fullgraph=True)(*args)
    torch.testing.assert_close(actual, theirs(*args, is_causal=True))


def test_dropout_compiles() -> None:
    torch._dynamo.reset()
    args = qkv(B, H)
    compiled = torch.compile(lambda *a: ours(*a, dropout_p=0.5), backend="aot_eager", fullgraph=True)
    torch.manual_seed(5)
    actual = compiled(*args)
    torch.manual_seed(5)
    torch.testing.assert_close(actual, theirs(*args, dropout_p=0.5))


# OpInfo: torch's own test samples


@pytest.fixture(scope="module")
def info() -> Any:
    """torch's OpInfo of the function; torch.testing imports one name of expecttest."""
    if "expecttest" not in sys.modules:
        try:
            import expecttest  # noqa: F401
        except ImportError:
            stand_in = types.ModuleType("expecttest")
            stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
            sys.modules["expecttest"] = stand_in
    flag = "__allow_nonbracketed_mutation_flag"  # importing torch.testing freezes torch.backends' settings
    allowed = getattr(torch.backends, flag)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    setattr(torch.backends, flag, allowed)
    (actual,) = (op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
    return actual


def samples(info: Any, dtype: torch.dtype, dropout: bool | None = None, learn: bool = True) -> Iterator[Call]:
    for sample in info.sample_inputs("cpu", dtype, requires_grad=learn):
        if dropout is None or (sample.kwargs["dropout_p"] > 0) == dropout:
            yield (sample.input, *sample.args), sample.kwargs


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_opinfo_samples(info: Any, dtype: torch.dtype) -> None:
    tolerance = {torch.float64: 1e-9, torch.float32: 3e-4}.get(dtype, 0.3)  # the samples reach ±9
    for args, options in samples(info, dtype):
        results = []
        for function in (ours, theirs):
            torch.manual_seed(11)
            results.append(run(function, args, options, mask_learns=True))
        torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)
        assert results[0][0].stride() == results[1][0].stride()


def test_opinfo_gradcheck(info: Any) -> None:
    """Derivatives of both modes, batched, as OpInfo and torch's gradient tests check them."""
    for args, options in samples(info, torch.float64, dropout=False):
        call = functools.partial(ours, **options)
        # torch has no forward mode on the fused path; a query with fewer axes goes to torch
        forward = args[0].dim() == args[1].dim()
        checks = {"check_forward_ad": forward, "check_batched_forward_grad": forward}
        assert gradcheck(call, args, fast_mode=True, check_batched_grad=True, **checks)
        assert gradgradcheck(call, args, fast_mode=True)


def test_opinfo_composite_compliance(info: Any) -> None:
    """Every combination of plain tensors and an opaque wrapper subclass."""
    from torch.testing._internal import composite_compliance

    for args, options in itertools.islice(
        samples(info, torch.float32, dropout=False, learn=False), 0, None, 3
    ):
        composite_compliance.check_with_mode(ours, args, options, torch.testing.assert_close)
        with composite_compliance_errors():
            composite_compliance.check_all_permutations(ours, args, options, torch.testing.assert_close)


def test_opinfo_composite_compliance_of_the_gradient(info: Any) -> None:
    from torch.testing._internal import composite_compliance

    # plain tensors take the kernels and a subclass the dense formula, which round differently; the samples
    # are of size 9, their scores of size 100
    almost = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-4)
    for args, options in itertools.islice(samples(info, torch.float32, dropout=False), 0, None, 3):
        with composite_compliance_errors():
            composite_compliance.check_backward_formula(ours, args, options, assert_equal_fn=almost)


@contextlib.contextmanager
def composite_compliance_errors() -> Iterator[None]:
    """Show the underlying error: torch's checker hides it under advice."""
    try:
        yield
    except RuntimeError as error:
        raise AssertionError(f"{error.__cause__!r}\n{error}"[:1500]) from error


# Replacing torch's function


@pytest.fixture
def swap(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """Replace torch's function by regard's; the list records the calls."""

    def put() -> list[int]:
        calls: list[int] = []

        def counted(*args: Any, **kwargs: Any) -> Tensor:
            calls.append(1)
            return ours(*args, **kwargs)

        monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
        return calls

    return put


def compare_module(
    module: nn.Module, inputs: tuple[Tensor, ...], swap: Callable[[], list[int]], calls: int, **options: Any
) -> None:
    """Outputs and gradients of a module, with torch's function and then with regard's."""
    results = []
    counted: list[int] = []
    for swapped in (False, True):
        if swapped:
            counted = swap()
        torch.manual_seed(13)
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        output = module(*leaves, **options)
        output = output[0] if isinstance(output, tuple) else output
        wanted = [*leaves, *module.parameters()]
        grads = torch.autograd.grad(output.square().sum(), wanted, allow_unused=True)
        results.append([output, *(g for g in grads if g is not None)])
    assert len(counted) == calls
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def _padding(batch: int, length: int) -> Tensor:
    """True = padding: torch.nn's convention."""
    return torch.arange(length) >= torch.arange(length, length - batch, -1)[:, None]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("masked", ["nothing", "causal", "bool", "float", "padding", "both"])
def test_multihead_attention(
    swap: Callable[[], list[int]], training: bool, dropout: float, masked: str
) -> None:
    module = nn.MultiheadAttention(12, 3, dropout=dropout, batch_first=True).train(training)
    inputs = tuple(torch.randn(B, n, 12) for n in (Q, Q, Q))
    causal = nn.Transformer.generate_square_subsequent_mask(Q)
    options: dict[str, Any] = {
        "nothing": {},
        "causal": {"attn_mask": causal, "is_causal": True},
        "bool": {"attn_mask": causal != 0},
        "float": {"attn_mask": torch.randn(B * 3, Q, Q)},
        "padding": {"key_padding_mask": _padding(B, Q)},
        "both": {"attn_mask": causal != 0, "key_padding_mask": _padding(B, Q)},
    }[masked]
    compare_module(module, inputs, swap, calls=1, need_weights=False, **options)


def test_multihead_attention_with_other_widths_and_extra_keys(swap: Callable[[], list[int]]) -> None:
    module = nn.MultiheadAttention(12, 3, kdim=7, vdim=5, add_bias_kv=True, add_zero_attn=True)
    inputs = (torch.randn(Q, B, 12), torch.randn(K, B, 7), torch.randn(K, B, 5))
    compare_module(module, inputs, swap, calls=1, need_weights=False)


def test_multihead_attention_with_weights_needs_no_function(swap: Callable[[], list[int]]) -> None:
    inputs = tuple(torch.randn(Q, B, 12) for _ in range(3))
    compare_module(nn.MultiheadAttention(12, 3), inputs, swap, calls=0, need_weights=True)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_encoder_layer(swap: Callable[[], list[int]], training: bool, norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(12, 3, 16, dropout=0.2, batch_first=True, norm_first=norm_first)
    compare_module(
        layer.train(training),
        (torch.randn(B, Q, 12),),
        swap,
        calls=1,
        src_mask=nn.Transformer.generate_square_subsequent_mask(Q) != 0,
        src_key_padding_mask=_padding(B, Q),
    )


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_transformer(swap: Callable[[], list[int]], training: bool, padded: bool) -> None:
    module = nn.Transformer(12, 2, 2, 2, 16, dropout=0.1, batch_first=True).train(training)
    options: dict[str, Any] = {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(Q)}
    if padded:
        options = {
            "tgt_mask": nn.Transformer.generate_square_subsequent_mask(Q) != 0,
            "src_key_padding_mask": _padding(B, K),
            "tgt_key_padding_mask": _padding(B, Q),
            "memory_key_padding_mask": _padding(B, K),
        }
    compare_module(module, (torch.randn(B, K, 12), torch.randn(B, Q, 12)), swap, calls=2 + 2 * 2, **options)


@pytest.mark.filterwarnings("ignore")  # nested tensors are a prototype, says torch
def test_the_inference_fast_path_agrees(swap: Callable[[], list[int]]) -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 16, batch_first=True), 2).eval()
    x = torch.randn(B, Q, 12)
    padding = _padding(B, Q)
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=padding)
    calls = swap()
    actual = encoder(x, src_key_padding_mask=padding)
    assert len(calls) == 2
    torch.testing.assert_close(actual.masked_fill(padding[..., None], 0), expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(encoder(x, src_key_padding_mask=padding), expected)


def test_replacing_the_function_does_not_recurse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for calls that go to torch: dropout, unusual shapes, errors."""
    args = qkv(B, H)
    monkeypatch.setattr(F, "scaled_dot_product_attention", ours)
    assert F.scaled_dot_product_attention(*args).shape == (B, H, Q, D)
    assert F.scaled_dot_product_attention(*args, dropout_p=0.5).shape == (B, H, Q, D)
    assert F.scaled_dot_product_attention(args[0][0], *args[1:]).shape == (B, H, Q, D)
    assert F.scaled_dot_product_attention(*args, attn_mask=causal_upper_left(Q, K)).shape == (B, H, Q, D)
    with pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(args[0], args[1].float(), args[2])


# torch's CausalBias compares with F.scaled_dot_product_attention, so calls that regard forwards to torch are
# not recognized once that name is regard's


@pytest.mark.parametrize("build", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("why", ["dropout", "kernel context", "2-D"])
def test_bias_objects_in_a_swapped_call(
    monkeypatch: pytest.MonkeyPatch, build: Callable[..., Tensor], why: str
) -> None:
    args, bias = (qkv() if why == "2-D" else qkv(B, H)), build(Q, K)
    dropout = 0.3 if why == "dropout" else 0.0
    results = []
    for swapped in (False, True):
        if swapped:
            monkeypatch.setattr(F, "scaled_dot_product_attention", ours)
        torch.manual_seed(19)
        with sdpa_kernel(SDPBackend.MATH) if why == "kernel context" else contextlib.nullcontext():
            results.append(F.scaled_dot_product_attention(*args, attn_mask=bias, dropout_p=dropout))
    torch.testing.assert_close(*results)


# Wrappers around regard in torch's place, set before and after regard is imported.
BY_REGARD = "F.scaled_dot_product_attention = lambda *a, **k: regard.scaled_dot_product_attention(*a, **k)"
REPLACED = {
    "before": (BY_REGARD, ""),
    "after": ("", BY_REGARD),
    "a wrapper of a wrapper": (
        "",
        """
inner = lambda *a, **k: regard.scaled_dot_product_attention(*a, **k)
F.scaled_dot_product_attention = lambda *a, **k: inner(*a, **k)""",
    ),
    "a partial": (
        "",
        "F.scaled_dot_product_attention = functools.partial(regard.scaled_dot_product_attention)",
    ),
    "a wrapper of torch's, then of regard's": (
        "F.scaled_dot_product_attention = lambda *a, **k: torchs(*a, **k)",
        BY_REGARD,
    ),
}
SWAPPED = """
import functools, warnings
import torch
import torch.nn.functional as F
warnings.simplefilter("ignore")
torchs = F.scaled_dot_product_attention
{before}
import regard
{after}

class Kind(torch.Tensor):
    pass

from torch.nn.attention.bias import causal_lower_right
attend = lambda *a, **k: F.scaled_dot_product_attention(*a, **k)
x = torch.randn(2, 3, 5, 8)
jagged = torch.nested.nested_tensor([torch.randn(5, 3, 8), torch.randn(2, 3, 8)], layout=torch.jagged)
jagged = jagged.transpose(1, 2)

def check():
    close = torch.testing.assert_close
    close(attend(x, x, x, is_causal=True), torchs(x, x, x, is_causal=True))
    torch.manual_seed(0)
    dropped = attend(x, x, x, dropout_p=0.5)  # torch's own random numbers
    torch.manual_seed(0)
    close(dropped, torchs(x, x, x, dropout_p=0.5))
    for mine, theirs in zip(attend(jagged, jagged, jagged).unbind(), torchs(jagged, jagged, jagged).unbind()):
        close(mine, theirs)
    close(attend(x, x, x, causal_lower_right(5, 5)), torchs(x, x, x, is_causal=True))
    kind = x.as_subclass(Kind)
    assert type(attend(kind, kind, kind)) is Kind
    print("right")

check()
with regard.patched():
    check()
check()
"""


@pytest.mark.parametrize("case", REPLACED)
def test_wrappers_around_regard_do_not_recurse(case: str) -> None:
    before, after = REPLACED[case]
    program = SWAPPED.format(before=before, after=after)
    done = run_fresh(program)
    assert done.returncode == 0, done.stderr[-1500:]
    assert done.stdout.split() == ["right"] * 3


def test_a_bias_object_and_is_causal_are_rejected_in_a_swapped_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", ours)
    with pytest.raises(ValueError, match="CausalBias should not be used with causal=True"):
        F.scaled_dot_product_attention(*qkv(B, H), attn_mask=causal_upper_left(Q, K), is_causal=True)


def test_swapped_modules_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    module = nn.TransformerEncoderLayer(12, 3, 16, dropout=0.0, batch_first=True)
    x, mask = torch.randn(B, Q, 12), nn.Transformer.generate_square_subsequent_mask(Q)
    expected = module(x, src_mask=mask)
    monkeypatch.setattr(F, "scaled_dot_product_attention", ours)
    actual = torch.compile(module, backend="aot_eager", fullgraph=True)(x, src_mask=mask)
    torch.testing.assert_close(actual, expected)


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated, and torch's tests still use it
def test_swapped_modules_can_be_scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.MultiheadAttention(12, 3, batch_first=True)
    x = torch.randn(B, Q, 12)
    monkeypatch.setattr(F, "scaled_dot_product_attention", ours)
    scripted = torch.jit.script(module)
    torch.testing.assert_close(
        scripted(x, x, x, need_weights=False)[0], module(x, x, x, need_weights=False)[0]
    )
