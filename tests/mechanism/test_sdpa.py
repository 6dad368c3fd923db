"""regard.scaled_dot_product_attention matches torch: same results, gradients and errors.

Almost every test calls both functions with the same arguments and compares the outcomes.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from tests.cases import looped
from tests.mechanism.sdpa_calls import (
    BACKENDS,
    CASES,
    B,
    Call,
    D,
    H,
    K,
    Q,
    assert_matches_torch,
    assert_same_outcome,
    boolean,
    draw,
    ours,
    qkv,
    run,
    theirs,
    x,
)

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
    if kind == "wide float":  # torch accepts float32 with half precision
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
    """Copy-on-write tensors must not be materialized; OpInfo has the same test for torch."""
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


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # from torch
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


@pytest.mark.filterwarnings("ignore:Lower right causal bias:UserWarning")  # about rows without visible keys
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


@looped("kernels", BACKENDS)
@looped("name", ["4-D", "3-D", "causal", "bias (5, 7)"])
@pytest.mark.filterwarnings("ignore")  # torch explains why it has no kernel
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
@pytest.mark.filterwarnings("ignore")  # torch explains some errors in warnings
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
    with pytest.raises(AssertionError, match="torch rejects the call"):
        assert_same_outcome(args, options, function=lambda *_: x)
    with pytest.raises(AssertionError, match="torch behaves differently from what this case expects"):
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


# Invalid calls that torch accepts, returning uninitialized memory


@looped(
    ("args", "options"),
    [
        # torch's fused kernel takes the length from the key: it reads, and in backward writes, out of bounds
        ((x, x, x[..., :3, :]), {}),
        ((x, x[..., :3, :], x), {}),
        ((x, x, x), {"attn_mask": torch.zeros(Q, Q, device="meta")}),
        # torch divides by the number of heads, which crashes the process
        *(
            ((x[0, :1], x[0, :0], x[0, :2]), {"enable_gqa": True}),
            ((x, x[:, :0], x[:, :2]), {"enable_gqa": True}),
        ),
    ],
)
def test_calls_that_torch_computes_out_of_bounds_are_rejected(args: Any, options: Any) -> None:
    with pytest.raises((RuntimeError, ValueError)):
        ours(*args, **options)
