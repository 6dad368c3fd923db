"""The kernels compute the formulas in float32, with at most twice the rounding error of dense torch.

The reference in float64, on the same float32 inputs, counts as exact; the reference in float32 defines the
acceptable error.
CI runs this file a second time with REGARD_ISA=generic.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import regard
from regard.mechanism import fused
from tests.cases import (
    BIASES,
    MASKS,
    NORMALIZERS,
    SCORES,
    TABLE,
    Case,
    Shape,
    crossed,
    instruction_set,
    leaves,
    looped,
    paired,
    rotated,
    upstream,
)

pytestmark = [
    pytest.mark.skipif(not fused.available(), reason=fused.DESCRIPTION),
    pytest.mark.usefixtures("one_thread"),
]

EPS = torch.finfo(torch.float32).eps
ISAS = fused.KERNELS.available() if fused.available() else []
WITHOUT = {"entmax 1.3", "entmax 2.5", "hard"}  # normalizers without a kernel
FUSED = [name for name in NORMALIZERS if name not in WITHOUT]
PLAIN = ["softmax", "softmax1", "sigmoid", "relu", "mean", "sparsemax", "entmax15"]  # one per kernel


class Counting:
    """Counts the runs of each kernel."""

    def __init__(self, kernels: Any) -> None:
        self.kernels, self.ran = kernels, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self.kernels, name)

        def counted(*args: Any) -> Any:
            self.ran[name] += 1
            return kernel(*args)

        return counted


@contextmanager
def counted_kernels() -> Iterator[Counter[str]]:
    counting = Counting(fused.KERNELS)
    with patch.object(fused, "KERNELS", counting):
        yield counting.ran


# Memory layouts

Layout = Callable[[Tensor], Tensor]


def _apart(x: Tensor, axis: int) -> Tensor:
    """Return a strided view into a larger tensor."""
    if x.dim() < -axis:
        return x
    return torch.stack([x, x + 1], axis if axis < -1 else -1).flatten(axis - 1, axis)[
        (..., slice(None, None, 2), *(slice(None),) * (-axis - 1))
    ]


def _expanded(x: Tensor, axis: int) -> Tensor:
    """Return a tensor expanded along an axis."""
    return x if x.dim() < -axis else x.narrow(axis, 0, min(x.shape[axis], 1)).expand_as(x)


LAYOUTS: dict[str, Layout] = {
    "plain": lambda x: x,
    "columns first": lambda x: x.mT.contiguous().mT,
    "heads inside tokens": lambda x: x if x.dim() < 3 else x.transpose(-3, -2).contiguous().transpose(-3, -2),
    "columns apart": lambda x: _apart(x, -1),
    "rows apart": lambda x: _apart(x, -2),
    "at an odd address": lambda x: torch.cat([x.new_ones(1), x.flatten()])[1:].view(x.shape),
    "one head": lambda x: _expanded(x, -3),
    "one row": lambda x: _expanded(x, -2),
    "one column": lambda x: _expanded(x, -1),
    "negative": lambda x: torch._neg_view(-x),
}


def test_layouts_have_the_named_strides():
    x = torch.arange(60.0).reshape(3, 4, 5)
    seen = {name: layout(x) for name, layout in LAYOUTS.items()}
    for name, y in seen.items():
        assert y.shape == x.shape
        assert name.startswith("one") or torch.equal(y, x)
    assert [y.stride() for y in seen.values()] == [
        *[(20, 5, 1), (20, 1, 4), (5, 15, 1), (40, 10, 2), (40, 10, 1)],
        *[(20, 5, 1), (0, 5, 1), (20, 0, 1), (20, 5, 0), (20, 5, 1)],
    ]
    assert seen["at an odd address"].storage_offset() == 1
    assert seen["negative"].is_neg()


# The comparison


def computed(
    case: Case,
    dtype: torch.dtype,
    implementation: str,
    layout: Layout = LAYOUTS["plain"],
    above: Layout = LAYOUTS["plain"],
) -> dict[str, Tensor]:
    """Compute output, weights and all gradients; return them in float64."""
    inputs = case.tensors(dtype, rounded=torch.float32, requires_grad=True)
    options = case.options(dtype, rounded=torch.float32)
    laid = [layout(x) for x in inputs]
    output, weights = regard.attend(*laid, implementation=implementation, **options)
    assert output.dtype is dtype
    scores = weights.detach().scores()
    learned = {"query": inputs[0], "key": inputs[1], "value": inputs[2]}
    learned |= {f"parameter {i}": leaf for i, leaf in enumerate(leaves(options))}
    gradient = above(upstream(output))
    grads = torch.autograd.grad(output, tuple(learned.values()), gradient, materialize_grads=True)
    actual = {"scores": scores, "values": laid[2], "output": output, "weights": weights.detach().dense()}
    actual |= {f"d {name}": grad for name, grad in zip(learned, grads, strict=True)}
    return {name: x.detach().double() for name, x in actual.items()}


def agree(compute: Callable[[torch.dtype, str], dict[str, Tensor]], roundings: float = 4) -> None:
    """Check that the kernels' error is at most twice that of the dense float32 formula, plus a few roundings.

    The inputs and the terms of each sum have magnitude 1, even if the sum is small; the terms of gradients
    are products with a value. Sums over many pairs accumulate more rounding errors, and the relative error of
    a weight is the absolute error of its score.
    """
    exact = compute(torch.float64, "reference")
    plain = compute(torch.float32, "reference")
    ours = compute(torch.float32, "fused")
    pairs = exact["weights"].numel()
    scores, values = exact.pop("scores"), exact.pop("values")
    value = values.norm(dim=-1).max().item() if values.numel() else 1.0
    scores = torch.where(scores == -math.inf, 0.0, scores).abs()
    roundings *= max(scores.max().item() / 8, 1) if scores.numel() else 1
    # rounding may move a key across the edge of the support, where the slope jumps
    support, *others = (x["weights"] > 1e-20 for x in (exact, ours, plain))
    edges = sum(int((support != other).sum()) for other in others)
    assert edges <= max(2, pairs * 1e-5)
    for name in exact:
        if (edges and name.startswith("d ")) or not exact[name].numel():
            continue
        assert ours[name].shape == exact[name].shape
        assert ours[name].isfinite().all(), name
        size = max(exact[name].abs().max().item(), 1.0, value if name.startswith("d ") else 0.0)
        more = max(math.sqrt(pairs / exact[name].numel()) / 8, 1)
        error, allowed = ((x[name] - exact[name]).abs().max().item() for x in (ours, plain))
        assert error <= 2 * allowed + roundings * EPS * size * more, (name, error / EPS, allowed / EPS)


def check(case: Case, layout: str = "plain", above: str = "plain", roundings: float = 4) -> None:
    def compute(dtype: torch.dtype, name: str) -> dict[str, Tensor]:
        actual = computed(case, dtype, name, LAYOUTS[layout], LAYOUTS[above])
        if case.normalize == "entmax 2.5":  # unbounded slope at the edge of the support
            return {name: actual[name] for name in ("scores", "values", "output", "weights")}
        return actual

    with counted_kernels() as ran:
        # equal numbers round in the same direction, so their rounding errors add up
        agree(compute, roundings * (10 if layout.startswith("one") else 1))
    ran.pop("lanes", None)
    if "negative" in (layout, above):
        return  # the kernels may fall back to another implementation
    if case.normalize in WITHOUT or case.bias == "several":  # too many bias lines
        assert not ran
    else:
        assert all(ran[kernel] for kernel in ("forward", "backward", "weights"))


@looped("case", TABLE, ids=lambda case: case.name, sampled=3)
def test_the_kernels_agree_with_the_formulas(case):
    check(case)


# all instruction sets share the same source code, so a few cases cover every line
@looped("case", TABLE, ids=lambda case: case.name, sampled=4)
@pytest.mark.parametrize("isa", fused.KERNELS.available()[1:][-1:] if fused.available() else [])
def test_the_most_basic_instruction_set_agrees_with_the_formulas(isa, case):
    with instruction_set(isa):
        check(case)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda numbers, factors: (numbers, [factors[0] * 1.00001, *factors[1:]]),
        lambda numbers, factors: ([*numbers[:-1], numbers[-1]], [*factors[:2], 9.0, *factors[3:]]),
    ],
    ids=["scale", "softcap"],
)
def test_a_wrong_kernel_is_detected(wrong):
    class Wrong(Counting):
        def __getattr__(self, name: str) -> Any:
            kernel = getattr(self.kernels, name)
            if name not in ("forward", "backward", "weights"):
                return kernel
            return lambda numbers, factors, threads: kernel(*wrong(numbers, factors), threads)

    case = Case("grouped", "dot", "softmax", "causal")
    with patch.object(fused, "KERNELS", Wrong(fused.KERNELS)), pytest.raises(AssertionError):
        agree(lambda dtype, name: computed(case, dtype, name))


# Sizes around a tile, a block and a vector

QUERIES = [1, 2, 3, 4, 5, 11, 12, 13, 23, 24, 25, 47, 63, 64, 65, 97, 127, 128, 129]
KEYS = [1, 2, 3, 4, 15, 16, 17, 71, 72, 73, 96, 127, 128, 129, 143, 144, 145, 191, 193, 255, 256, 257]
WIDTHS = [1, 3, 5, 8, 16, 17, 40, 64, 65]
ENOUGH = 60_000  # query-key pairs


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    queries, keys = draw(st.sampled_from(QUERIES)), draw(st.sampled_from(KEYS))
    groups, per_group = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    batch = draw(st.sampled_from([(), (2,), (1, 2), (3, 1, 2)]))
    assume(math.prod(batch) * groups * per_group * queries * keys <= ENOUGH)
    width, value_width = draw(st.sampled_from(WIDTHS)), draw(st.sampled_from(WIDTHS))

    def lead(heads: int) -> tuple[int, ...]:
        """Return the leading axes: each batch axis has its full size or 1."""
        return (*(draw(st.sampled_from([size, 1])) for size in batch), heads)

    query = (*batch, groups * per_group, queries, width)  # the query determines the sizes of the call
    return Shape(query, (*lead(groups), keys, width), (*lead(groups), keys, value_width))


# relative biases sum the gradients of thousands of pairs, which cancel only if c is exact
@example(
    Shape((2, 4, 129, 17), (2, 1, 97, 17), (1, 1, 97, 5)), "dot", "softmax1", "union", "t5", "plain", "plain"
)
@given(
    sizes=shapes(),
    score=st.sampled_from(sorted(SCORES)),
    normalize=st.sampled_from(FUSED),
    mask=st.sampled_from(sorted(MASKS)),
    bias=st.sampled_from(sorted(BIASES)),
    # with equal rows, gradients are zero up to rounding
    layout=st.sampled_from(sorted(LAYOUTS.keys() - {"one row", "one column"})),
    above=st.sampled_from(sorted(LAYOUTS)),
)
def test_results_do_not_depend_on_sizes_and_strides(sizes, score, normalize, mask, bias, layout, above):
    assume(score != "cosine" or sizes.query[-1] > 3)  # vectors with few features may be nearly zero
    # a few in thousands of these calls are ill-conditioned
    check(Case("heads", score, normalize, mask, bias, sizes=sizes), layout, above, roundings=12)


@rotated(width=WIDTHS, normalize=["softmax", "relu", "sparsemax"])
def test_any_width_of_the_additive_scores(width, normalize):
    sizes = Shape((2, 70, 6), (2, 75, 6), (2, 75, width))
    for kind in (regard.Additive, regard.Concat):
        case = Case("heads", "dot", normalize, "causal", sizes=sizes)

        def compute(dtype: torch.dtype, name: str, kind: type = kind, case: Case = case) -> dict[str, Tensor]:
            torch.manual_seed(width)
            score = kind(6, 6, width=width).to(dtype)
            options = {**case.options(dtype, rounded=torch.float32), "score": score}
            with patch.object(Case, "options", return_value=options):
                return computed(case, dtype, name)

        with counted_kernels() as ran:
            agree(compute)
        assert all(ran[kernel] for kernel in ("forward", "backward", "weights"))


@looped("normalize", ["softmax", "temperature"])
@looped("mask", ["no mask", "padding"])
@looped("width", [8, 16, 64])
def test_single_queries_have_a_kernel(width, mask, normalize):
    sizes = Shape((2, 3, 1, width), (2, 3, 41, width), (2, 3, 41, width))
    check(Case("one query", "scaled dot", normalize, mask, sizes=sizes))


ROWS = {"one": (1, 1, 1), "few": (1, 1, 3), "heads": (2, 4, 1), "a block": (1, 2, 8), "blocks": (1, 8, 9)}


@crossed(
    normalize=[*PLAIN, "sinks"],
    rows=ROWS,
    mask=["no mask", "causal", "padding", "tensor", "union"],
    bias=["no bias", "relative", "dense of keys"],
)
def test_long_keys_are_split(normalize, rows, mask, bias):
    groups, per_group, queries = ROWS[rows]
    keys = 2003 if mask != "causal" else 1543
    sizes = Shape((groups * per_group, queries, 20), (groups, keys, 20), (groups, keys, 17))
    check(Case("grouped", "scaled dot", normalize, mask, bias, sizes=sizes))


@looped("normalize", ["softmax", "sparsemax", "entmax15"])
@looped("keys", [75, 500, 2000, 10000])
def test_rows_of_nearly_equal_scores_sum_to_one(keys, normalize):
    # as at initialization: all keys have weight, and rounding errors in τ add up over the keys
    draw = torch.Generator().manual_seed(keys)
    query, key, value = torch.zeros(1, 8, 4), torch.zeros(1, keys, 4), torch.ones(1, keys, 1)
    noise, normalizer = torch.randn(1, 8, keys, generator=draw), NORMALIZERS[normalize](LONG, None)
    for spread in (0.0, 0.1, 0.5, 2.0, 8.0):
        options = {"bias": 3.3 + noise * spread / keys, "normalize": normalizer}
        ours, plain = (
            (regard.attention(query, key, value, implementation=name, **options) - 1).abs().max().item()
            for name in ("fused", "reference")
        )
        assert ours <= 2 * plain + keys * EPS, spread


@rotated(normalize=PLAIN, bias=["no bias", "several", "two lines", "dense of queries"])
def test_many_rows_have_several_segments(normalize, bias):
    # in the backward pass, several row segments add to the same keys
    sizes = Shape((2, 2, 520, 9), (2, 1, 75, 9), (2, 1, 75, 7))
    check(Case("grouped", "softcap", normalize, "documents causal", bias, sizes=sizes))


# Masks

LONG = Shape((2, 4, 131, 10), (2, 2, 149, 10), (2, 2, 149, 6))
Q, K = LONG.queries, LONG.keys


def rough(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(len(shape))) < 0.4


def holes(*shape: int) -> Tensor:
    """Return a dense mask with fully masked rows and a fully masked range of keys."""
    mask = rough(*shape)
    mask[..., 5, :], mask[..., 64:70, :], mask[..., 20:120] = False, False, False
    return mask


HARD_MASKS: dict[str, Any] = {
    "per head": rough(4, Q, K),
    "per sequence": rough(2, 1, Q, K),
    "per sequence and head": holes(2, 4, Q, K),
    "one for all": holes(Q, K),
    "of keys": rough(1, K),
    "of queries": rough(Q, 1),
    "nothing": torch.zeros(1, 1, dtype=torch.bool),
    "lengths": regard.Padding([0, 77]),
    "lengths on the left": regard.Padding([149, 3], side="left"),
    "empty documents": regard.Documents([0, 40, 0, 88, 3, 0], [0, 77, 2, 70, 0, 0]),
    "tiny documents": regard.Documents([1] * 131, [2] * 18 + [1] * 113, within=regard.Causal()),
    "the first rows see nothing": regard.Causal() & regard.Padding(100, side="left"),
    "far apart": regard.Padding(3) | regard.Padding(5, side="left"),
    "four terms": regard.Window(3)
    | regard.Padding([9, 1])
    | (regard.Causal() & rough(4, Q, K))
    | rough(1, K),
    "dense within an interval": regard.Window(left=9, right=30) & holes(2, 1, Q, K),
}


@rotated(mask=HARD_MASKS, normalize=PLAIN)
def test_masks(mask, normalize):
    case = Case("grouped", "scaled dot", normalize, mask, "relative", sizes=LONG)
    with patch.dict(MASKS, {mask: lambda shape, draw: HARD_MASKS[mask]}):
        check(case)


def test_more_terms_than_the_kernels_take_are_left_to_tiles():
    mask = regard.Padding(1)
    for width in range(2, 8):
        mask = mask | (regard.Window(width) & rough(1, K))
    case = Case("grouped", sizes=LONG)
    with patch.dict(MASKS, {"no mask": lambda shape, draw: mask}), counted_kernels() as ran:
        agree(lambda dtype, name: computed(case, dtype, name))
    assert not ran


@rotated(normalize=PLAIN, shared=[(2, 4), (2, 1), (1, 4), ()])
def test_a_bias_may_hide(shared, normalize):
    hidden = ~holes(*shared, Q, K)

    def build(_: Shape, draw: Any) -> Tensor:
        return draw(*hidden.shape).masked_fill(hidden, -math.inf).requires_grad_()

    with patch.dict(BIASES, {"no bias": build}):
        check(Case("grouped", "scaled dot", normalize, "causal", sizes=LONG))


# NaN and infinity

HIDDEN = 3  # masked key of the second sequence
OTHERS = torch.arange(9) != HIDDEN
HIDING: dict[str, Any] = {
    "dense": {"mask": OTHERS},
    "dense, of one sequence": {"mask": OTHERS | torch.tensor([True, False])[:, None, None, None]},
    "between two intervals": {"mask": regard.Padding(3) | regard.Padding(5, side="left")},
    "bias": {"bias": torch.where(OTHERS, 0.0, -math.inf).expand(5, 9)},
}
LEARNING = [
    "query",
    "key",
    "value",
    "bias",
    "keys' bias",
    "line",
    "sink",
    "vector",
    "function",
    "all",
    "none",
]


def attention_of(
    learning: str, normalize: str, key: Tensor, value: Tensor, implementation: str | None, **options: Any
) -> list[Tensor]:
    """Return the output, and the gradients of the parameters only."""
    generator = torch.Generator().manual_seed(4)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    inputs = {"query": numbers(2, 4, 5, 6), "key": key.clone(), "value": value.clone()}
    learned: list[Tensor] = [inputs[name] for name in inputs if learning in (name, "all")]
    biases = [options.pop("bias")] if "bias" in options else []
    for name, shape in (("bias", (4, 5, 9)), ("keys' bias", (9,))):
        if learning in (name, "all"):
            biases.append(numbers(*shape).requires_grad_())
            learned.append(biases[-1])
    if learning in ("line", "all"):
        learned.append(numbers(4, 5).requires_grad_())
        biases.append(regard.ClippedRelativeBias(learned[-1]))
    options["normalize"] = NORMALIZERS[normalize](LONG, None)
    if normalize == "softmax1":
        options["normalize"] = regard.Softmax1(numbers(4).requires_grad_(learning in ("sink", "all")))
        if learning in ("sink", "all"):
            learned.append(options["normalize"].score)
    if learning == "vector":
        torch.manual_seed(0)
        options["score"] = regard.Additive(6, 6, width=5).requires_grad_(False)
        learned.append(options["score"].vector.requires_grad_())
    if learning == "function":
        options["score"] = lambda query, key: query @ key.nan_to_num(0, 0, 0).repeat_interleave(1, -3).mT
        learned.append(inputs["query"])
    for tensor in learned:
        tensor.requires_grad_()
    output = regard.attention(*inputs.values(), bias=biases or None, implementation=implementation, **options)
    if not learned:
        return [output]
    return [output, *torch.autograd.grad(output, learned, upstream(output), materialize_grads=True)]


@crossed(3, learning=LEARNING, normalize=PLAIN, hiding=HIDING)
def test_masked_keys_may_contain_anything(learning, normalize, hiding):
    if learning == "sink" and normalize != "softmax1":
        return
    generator = torch.Generator().manual_seed(5)
    key, value = (torch.randn(2, 2, 9, 6, generator=generator) for _ in range(2))
    wanted = attention_of(learning, normalize, key, value, "reference", **HIDING[hiding])
    for bad, where in ((math.nan, "key"), (math.inf, "value"), (-math.inf, "both")):
        wild = {"key": key.clone(), "value": value.clone()}
        for name in wild:
            if where in (name, "both"):
                wild[name][1, :, HIDDEN] = bad
        for implementation in ("fused", None):
            actual = attention_of(learning, normalize, *wild.values(), implementation, **HIDING[hiding])
            torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=2e-6)


@crossed(normalize=PLAIN, where=["query", "key", "value", "bias"], bad=[math.nan, math.inf, -math.inf])
def test_visible_nonfinite_values_match_the_tiled_result(normalize, where, bad):
    generator = torch.Generator().manual_seed(6)
    # more keys than one tile
    sizes = {"query": (3, 20, 5), "key": (3, 100, 5), "value": (3, 100, 5), "bias": (3, 20, 100)}
    tensors = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    tensors[where][1, 12, 2] = bad
    bias, normalizer = tensors.pop("bias"), NORMALIZERS[normalize](LONG, None)
    actual = {}
    for name in ("tiled", "fused", None):
        inputs = [t.clone().requires_grad_() for t in tensors.values()]
        learned = [*inputs, bias.clone().requires_grad_()]
        options = {"mask": regard.Causal(), "bias": learned[-1], "normalize": normalizer}
        output = regard.attention(*inputs, implementation=name, **options)
        plain = {"mask": regard.Causal(), "normalize": normalizer}
        quiet = regard.attention(*(x.detach() for x in inputs), implementation=name, **plain)
        grads = torch.autograd.grad(output, learned, upstream(output))
        actual[name] = [output.detach(), quiet, *grads]
    for name in ("fused", None):
        for i, (one, other) in enumerate(zip(actual[name], actual["tiled"], strict=True)):
            # gradients of a NaN row are undefined
            known = torch.ones_like(other, dtype=torch.bool) if i < 2 else other.isfinite()
            torch.testing.assert_close(one[known], other[known], rtol=1e-4, atol=1e-5, equal_nan=True)


@looped("bits", [0x7FC00000, 0x7FC00001, 0x7F800003, 0x7FFFFFFF, -1, -0x400000])
@looped("normalize", PLAIN)
def test_any_nan_is_a_nan(normalize, bits):
    # arbitrary bits, as in uninitialized memory
    x = torch.randn(1, 7, 8, generator=torch.Generator().manual_seed(7))
    key = x.clone()
    key[0, 4, 3] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    assert key[0, 4, 3].isnan()
    for mask in (None, regard.Causal()):
        output = regard.attention(x, key, x, mask=mask, normalize=NORMALIZERS[normalize](LONG, None))
        assert output.isnan().any(-1)[0].tolist() == [mask is None or row >= 4 for row in range(7)]


OVERFLOWING = {
    "a tile": (1, 5, 7),
    "a row of a few": (1, 2, 7),
    "one query": (4, 1, 7),
    "one query of many keys": (1, 1, 4000),
    "a tile of several blocks": (1, 70, 100),
    "several tiles": (1, 70, 200),
}


SIGNS = {"+": torch.ones(8), "−": -torch.ones(8), "±": torch.tensor([-1.0, -1, 1, -1, 1, -1, 1, -1])}
LARGE = {f"{sign}{size}": (float(size), SIGNS[sign]) for sign in SIGNS for size in ("1e30", "1e38")}


@paired(
    3,
    normalize=NORMALIZERS,
    score=["scaled dot", "dot", "softcap"],
    sizes=OVERFLOWING,
    number=LARGE,
    hidden=["nothing", "nothing, by a mask", "by a mask", "by a bias"],
)
def test_overflowing_products_give_nan_as_in_the_formulas(normalize, score, sizes, number, hidden):
    # query and key are finite, their product is +inf, −inf or NaN
    heads, queries, keys = OVERFLOWING[sizes]
    case = Case(
        "heads", score, normalize, sizes=Shape((heads, queries, 8), (heads, keys, 8), (heads, keys, 8))
    )
    query, key, value = case.tensors(torch.float32)
    options = case.options(torch.float32)
    row, at = queries - 1, keys // 2
    query, key = query * 1e-3, key * 1e-3
    large, signs = LARGE[number]
    if score == "softcap" and number.startswith("±"):
        return  # such a sum is infinite or NaN, depending on the order of its terms
    query[:, row], key[:, at] = large, large * signs
    whole = torch.ones(queries, keys, dtype=torch.bool)
    seen = whole.clone()
    seen[row, at] = False
    options |= {
        "nothing": {},
        "nothing, by a mask": {"mask": whole},
        "by a mask": {"mask": seen},
        "by a bias": {"bias": torch.zeros(queries, keys).masked_fill(~seen, -math.inf)},
    }[hidden]
    actual = {
        name: regard.attend(query, key, value, implementation=name, **options)
        for name in ("reference", "tiled", "fused", None)
    }
    overflows = hidden.startswith("nothing") and score != "softcap"  # a softcap bounds infinity
    for output, weights in actual.values():
        for part, wanted in zip((output, weights.dense()), actual["reference"], strict=True):
            wanted = wanted if isinstance(wanted, Tensor) else wanted.dense()
            assert part[:, row].isnan().all() == part[:, row].isnan().any() == overflows
            torch.testing.assert_close(part[:, :row], wanted[:, :row], rtol=1e-4, atol=1e-5)


@looped("normalize", ["softmax", "entmax15", "sparsemax"])
def test_large_masked_numbers_have_no_effect(normalize):
    """query · key overflows but is masked; sums of large values are finite."""
    x = torch.randn(1, 40, 8, generator=torch.Generator().manual_seed(8)) * 1e20
    value, own = torch.full((1, 40, 3), 3e38), torch.eye(40, dtype=torch.bool)
    options = {"normalize": NORMALIZERS[normalize](LONG, None)}
    torch.testing.assert_close(regard.attention(x * 1e-3, x * 1e-3, value, mask=own, **options), value)
    tiled, fused_ = (
        regard.attention(x * 0.1, x * 0.1, value * 1e-5, mask=~own, implementation=name, **options).isfinite()
        for name in ("tiled", "fused")
    )
    assert torch.equal(tiled, fused_)


# Dropout


@rotated(normalize=PLAIN, dropout=[0.1, 0.7])
def test_dropout_drops_the_same_weights_as_tiles(normalize, dropout):
    for sizes in (
        LONG,
        Shape((2, 1, 3, 17), (3, 2003, 17), (2, 1, 2003, 5)),
        Shape((65, 4), (97, 4), (97, 4)),
        Shape((2, 3, 4, 1, 4), (2, 1, 2, 9, 4), (3, 2, 9, 4)),
    ):
        case = Case("grouped", "scaled dot", normalize, "causal", sizes=sizes)
        actual = {}
        for name in ("tiled", "fused", None):
            inputs = case.tensors(torch.float32, requires_grad=True)
            options = {**case.options(torch.float32), "dropout": dropout}
            generator = torch.Generator().manual_seed(11)
            output, weights = regard.attend(*inputs, generator=generator, implementation=name, **options)
            grads = torch.autograd.grad(output, inputs, upstream(output))
            actual[name] = [weights.detach().dense(), output.detach(), *grads]
        assert (actual["tiled"][0] == 0).any()
        for name in ("fused", None):
            torch.testing.assert_close(actual[name], actual["tiled"], rtol=1e-5, atol=5e-6)
            if normalize in ("softmax", "sigmoid", "mean"):
                assert torch.equal(actual[name][0] == 0, actual["tiled"][0] == 0)


# Weights that are kept for the backward pass

# queries, keys, width; some with several blocks of rows
SHORT = [(5, 7, 32), (16, 16, 32), (24, 24, 32), (11, 96, 32), (24, 2, 32), (50, 61, 32), (80, 128, 64)]
SHORT += [(77, 101, 64), (128, 128, 64)]


def learned(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@crossed(
    tokens=SHORT,
    mask=[None, regard.Causal(), regard.Padding([1, 5])],
    normalize=[regard.Softmax(), regard.Softmax(temperature=0.5)],
    wanted=[(0, 1, 2), (2,), (0,), (1, 2)],
    hook=[None, lambda x: x.clone(), lambda x: x.mT.contiguous().mT],
)
def test_gradients_with_kept_weights_equal_the_formulas(tokens, mask, normalize, wanted, hook):
    queries, keys, width = tokens
    inputs = [learned(2, 3, count, width, seed=i) for i, count in enumerate((queries, keys, keys))]
    leaves = [inputs[i] for i in wanted]
    options = {"mask": mask, "normalize": normalize}
    gradients = []
    for implementation in (None, None, "reference"):  # the second call is in the kernels' cache
        tensors = [x if any(x is leaf for leaf in leaves) else x.detach() for x in inputs]
        with saved_tensors_hooks(hook or (lambda x: x), lambda x: x):
            output = regard.attention(*tensors, implementation=implementation, **options)
        gradients.append(torch.autograd.grad(output, leaves, upstream(output)))
    for actual in gradients[:2]:
        for one, other in zip(actual, gradients[2], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7 * max(queries, 20))


def test_kept_weights_need_at_most_twice_the_memory_of_the_keys():
    x = learned(2, 3, 24, 32, seed=0)
    kept = []
    with saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        regard.attention(x, x, x)
    assert kept[-1] == (2, 3, 1, 24, -(-24 // fused.lanes()) * fused.lanes())
    for shape in ((2, 3, 100, 32), (2, 3, 24, 4), (2, 3, 2, 32)):  # long; narrow; few rows
        x = learned(*shape, seed=0)
        kept.clear()
        with saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
            regard.attention(x, x, x)
        assert len(kept) == 5, shape  # query, key, value, output, τ


def test_expanded_keys_keep_no_weights():
    query, key = learned(4, 3, 24, 32, seed=0), learned(1, 1, 24, 32, seed=1)
    kept = []
    with saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        regard.attention(query, key.expand(4, 3, -1, -1), key.expand(4, 3, -1, -1))
    assert len(kept) == 5


def test_kept_weights_that_a_hook_changed_are_computed_again():
    x = learned(2, 3, 24, 32, seed=0)
    expected = torch.autograd.grad(regard.attention(x, x, x).sum(), x)[0]  # also prepares the backward pass
    for change in (lambda t: t[:1], lambda t: t.half()):

        def unpack(t: Tensor, change: Callable[[Tensor], Tensor] = change) -> Tensor:
            return change(t) if t.dim() == 5 and t.shape[-1] > 2 else t

        with saved_tensors_hooks(lambda t: t, unpack):
            output = regard.attention(x, x, x)
        torch.testing.assert_close(torch.autograd.grad(output.sum(), x)[0], expected)


def test_kept_weights_of_another_instruction_set_are_not_read():
    x = learned(2, 3, 48, 32, seed=0)
    expected = torch.autograd.grad(regard.attention(x, x, x, implementation="reference").sum(), x)[0]
    for forward in ISAS:
        for backward in ISAS:
            with instruction_set(forward):
                output = regard.attention(x, x, x)
            with instruction_set(backward):
                torch.testing.assert_close(
                    torch.autograd.grad(output.sum(), x)[0], expected, rtol=1e-5, atol=2e-6
                )


# bfloat16 and float16


@looped("widths", [(16, 48), (64, 64), (128, 80), (20, 16)])  # key, value; the last is not read in place
@looped("heads", [1, 3, 4, 5, 8, 9])
def test_a_query_reads_bfloat16_in_place(heads, widths):
    draw = torch.Generator().manual_seed(heads)
    sizes = (heads, 1, widths[0]), (1, 1500, widths[0]), (1, 1500, widths[1])
    inputs = [torch.randn(size, generator=draw).bfloat16() for size in sizes]
    for mask in (None, regard.Causal(), regard.Padding(700)):
        output, weights = regard.attend(*inputs, mask=mask)
        exact, exact_weights = regard.attend(*(x.float() for x in inputs), mask=mask)
        torch.testing.assert_close(output, exact.bfloat16(), rtol=2**-8, atol=1e-6)
        torch.testing.assert_close(weights.dense().float(), exact_weights.dense(), rtol=2**-8, atol=1e-6)


@crossed(
    normalize=PLAIN,
    score=["scaled dot", "additive"],
    mask=["causal", "tensor"],
    bias=["no bias", "relative"],
    dtype=[torch.bfloat16, torch.float16],
)
def test_narrow_inputs_are_computed_in_float32_and_rounded_once(normalize, score, mask, bias, dtype):
    case = Case("grouped", score, normalize, mask, bias, sizes=LONG)
    actual = []
    for held in (dtype, torch.float32):
        inputs = case.tensors(held, rounded=dtype, requires_grad=True)
        options = case.options(held, rounded=dtype)
        if case.score == "additive":  # torch computes its matrix products
            options["score"] = case.options(torch.float32, rounded=dtype)["score"]
            options["score"] = _InFloat32(options["score"])
        output = regard.attention(*inputs, **options)
        grads = torch.autograd.grad(output, inputs, upstream(output).to(dtype).to(held))
        quiet = regard.attention(*(x.detach() for x in inputs), **options)
        actual.append([x.to(dtype) for x in (output, quiet, *grads)])
    # kernels that multiply pairs of bfloat16 sum them in another order
    pairs = dtype is torch.bfloat16 and fused.DESCRIPTION.endswith(("bf16", "amx"))
    for narrow, wide in zip(*actual, strict=True):
        torch.testing.assert_close(narrow, wide, rtol=1e-2 if pairs else 0, atol=1e-3 if pairs else 0)


PAIRS = [isa for isa in ("amx", "emulated_amx", "avx512bf16") if isa in ISAS]


@pytest.mark.skipif(not PAIRS, reason="this processor does not multiply bfloat16 pairs")
@crossed(
    normalize=["softmax", "sigmoid", "mean", "sparsemax"],
    mask=["no mask", "causal", "padding"],
    bias=["no bias", "relative"],
    sizes=[
        Shape((2, 4, 65, 64), (2, 2, 97, 64), (2, 2, 97, 64)),
        Shape((1, 2, 130, 40), (1, 2, 193, 40), (1, 2, 193, 18)),
        Shape((3, 2, 4, 2), (3, 1, 5, 2), (3, 1, 5, 3)),
        Shape((1, 2, 33, 24), (1, 2, 31, 24), (1, 2, 31, 80)),
        Shape((2, 1, 17, 128), (2, 1, 129, 128), (2, 1, 129, 16)),
    ],
)
def test_products_of_pairs_are_as_exact_as_float32(normalize, mask, bias, sizes):
    case = Case("grouped", "scaled dot", normalize, mask, bias, sizes=sizes)
    bfloat16, double = torch.bfloat16, torch.float64
    exact = regard.attention(
        *case.tensors(double, rounded=bfloat16), **case.options(double, rounded=bfloat16)
    )
    errors = {}
    for isa in ("avx512", *PAIRS):
        with instruction_set(isa):
            output = regard.attention(*case.tensors(bfloat16), **case.options(bfloat16))
            errors[isa] = (output.double() - exact).abs()
    single = errors.pop("avx512")
    for pairs in errors.values():
        assert pairs.square().mean().sqrt() <= 1.1 * single.square().mean().sqrt() + 1e-6
        assert pairs.max() <= 2 * single.max() + 1e-6


@pytest.mark.skipif(not PAIRS, reason="this processor does not multiply bfloat16 pairs")
def test_values_that_cancel_are_summed_as_in_float32():
    # weights that differ by a thousandth, and as many values of 1 as of −1: only the differences remain
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(4, n, 64, generator=generator) for n in (65, 96, 96))
    value = torch.where(value > value.median(-2, keepdim=True).values, 1.0, -1.0)
    inputs = [x.bfloat16() for x in (query / 1024, key, value)]
    exact = regard.attention(*(x.double() for x in inputs))
    errors = {}
    for isa in ("avx512", *PAIRS):
        with instruction_set(isa):
            errors[isa] = (regard.attention(*inputs).double() - exact).square().mean().sqrt()
    single = errors.pop("avx512")
    assert all(pairs <= 2 * single for pairs in errors.values()), (single, errors)


class _InFloat32(regard.Score):
    """A score whose parameters stay in float32."""

    def __init__(self, score: Any) -> None:
        self.score = score

    def prepare(self, query: Tensor, key: Tensor) -> Any:
        return self.score.prepare(query.float(), key.float())


def test_every_float16_value_is_read_exactly():
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        every = bits.view(dtype)
        every = every[every.isfinite()]
        # one key, whose value is returned unchanged, at every position in a vector
        for width in (1, 7, 64):
            value = every[: len(every) // width * width].view(-1, 1, 1, width)
            ones = torch.ones(*value.shape[:-1], 1, dtype=dtype)
            assert torch.equal(regard.attention(ones, ones, value), value)


# Reading weights


def test_weights_with_many_batch_axes_multiply():
    # the kernels support ten leading axes
    for axes in range(6, 12):
        x = torch.randn(*[1] * (axes - 1), 2, 4, 3, 5, generator=torch.Generator().manual_seed(axes))
        output, weights = regard.attend(x, x, x)
        torch.testing.assert_close(weights @ x, output)
        torch.testing.assert_close(weights.T @ x, weights.dense().mT @ x)


def test_numbers_with_a_minus_in_their_strides_multiply():
    x = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(9))
    minus = torch._neg_view(x)
    weights = regard.attend(x, x, x)[1]
    torch.testing.assert_close(weights @ minus, -(weights @ x))
    torch.testing.assert_close(weights.T @ minus, -(weights.T @ x))
    torch.testing.assert_close(regard.attention(minus, x, x), regard.attention(-x, x, x))


# The fast path

POSITIONS = [
    None,
    regard.Causal(),
    regard.Causal(align="start"),
    regard.Window(3),
    regard.Window(left=70, right=2),
]
MATCHES = [regard.ScaledDot(), regard.ScaledDot(scale=0.7), regard.Dot(), regard.Dot(softcap=2.0)]
ALIKE = [
    *(regard.Softmax(t) for t in (1.0, 0.5, 2.0)),
    *(regard.Sigmoid(bias) for bias in (None, 0.0, -0.5)),
    *(regard.Softmax1(score) for score in (0.0, 0.5)),
    *(regard.Relu(), regard.Mean(), regard.Sparsemax(), regard.Entmax15(), regard.Entmax(1.3), regard.Hard()),
]


@given(
    sizes=shapes(),
    score=st.sampled_from(MATCHES),
    normalize=st.sampled_from(ALIKE),
    mask=st.sampled_from(POSITIONS),
    layout=st.sampled_from(sorted(LAYOUTS)),
    above=st.sampled_from(sorted(LAYOUTS)),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
    learns=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_the_fast_path_equals_the_general_path(sizes, score, normalize, mask, layout, above, dtype, learns):
    options = {"score": score, "normalize": normalize, "mask": mask}
    actual = []
    for name in ("fused", None):
        leaf = [
            x.to(dtype).requires_grad_(learn)
            for x, learn in zip(Case(sizes=sizes).tensors(), learns, strict=True)
        ]
        laid = [LAYOUTS[layout](x) for x in leaf]
        output, weights = regard.attend(*laid, implementation=name, **options)
        assert output.dtype is dtype
        wanted = [x for x in leaf if x.requires_grad]
        grads = torch.autograd.grad(output, wanted, LAYOUTS[above](upstream(output))) if wanted else ()
        with torch.no_grad():
            alone = regard.attention(*laid, implementation=name, **options)
            actual.append([alone, output, weights.detach().dense(), *grads])
    for one, other in zip(*actual, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        assert one.shape == other.shape


@crossed(score=MATCHES, normalize=ALIKE, mask=POSITIONS)
def test_calls_of_equal_sizes_are_distinguished(score, normalize, mask):
    x, y = (numbers.float() for numbers in Case("heads").tensors()[:2])
    y = y[..., :5, :].repeat(1, 1, 3, 1)
    options = {"score": score, "normalize": normalize, "mask": mask}
    wanted = regard.attention(x, y, y, implementation="reference", **options)
    for _ in range(2):  # the second call uses the cache
        torch.testing.assert_close(regard.attention(x, y, y, **options), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrong", [1, 2], ids=["key", "value"])
def test_a_cached_call_of_another_dtype_is_rejected(wrong):
    inputs = [numbers.float() for numbers in Case("heads").tensors()]
    regard.attention(*inputs)  # cached call
    inputs[wrong] = inputs[wrong].double()
    with pytest.raises(regard.DTypeError):
        regard.attention(*inputs)
