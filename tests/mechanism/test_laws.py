"""Laws of attention for every implementation, and known mistakes in other libraries.

Reference and tiled compute in float64, the kernels in float32.
"""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck

import regard
from regard.mechanism import fused, tiled
from tests import naive
from tests.cases import (
    BIASES,
    MASKS,
    MIXED_WIDTHS,
    NORMALIZERS,
    SCORES,
    Case,
    Draw,
    Shape,
    crossed,
    leaves,
    looped,
    rotated,
    tiles_of,
    upstream,
)
from tests.recorder import Largest

Attend = Callable[..., tuple[Tensor, regard.Weights]]

FAMILIES = [name for name in SCORES if name != "function"]
# Every score and every normalizer once; test_operator.py has all pairs.
EVERY = list(zip(itertools.cycle(SCORES), NORMALIZERS, strict=False))


pytestmark = pytest.mark.usefixtures("one_thread")


DTYPE, WITHIN = torch.float64, 1e-10  # set by the running implementation


@pytest.fixture(params=["reference", "tiled", "fused"])
def attend(request, monkeypatch) -> Attend:
    """Return `regard.attend` with a fixed implementation and tiles so small that a call needs several."""
    monkeypatch.setattr(tiled, "TILE", 64)
    if request.param == "fused":
        if not fused.available():
            pytest.skip(fused.DESCRIPTION)
        monkeypatch.setitem(globals(), "DTYPE", torch.float32)
        monkeypatch.setitem(globals(), "WITHIN", 1e-4)
    return partial(regard.attend, implementation=request.param)


@pytest.fixture
def attention(attend) -> Callable[..., Tensor]:
    return partial(regard.attention, **attend.keywords)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1000 * len(shape) + sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype or DTYPE)


def inputs(*, lead: tuple[int, ...] = (3,), q: int = 5, k: int = 7, d: int = 4, e: int = 2) -> list[Tensor]:
    """Return query, key and value that require gradients."""
    shapes = ((*lead, q, d), (*lead, k, d), (*lead, k, e))
    return [normal(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]


def build(table: dict[str, Any], name: str, width: int = 4, heads: int = 3) -> Any:
    """Return a score or normalizer from the table, for query and key of this width."""
    shape = Shape((heads, 5, width), (heads, 7, width), (heads, 7, 2))
    return table[name](shape, Draw(name, DTYPE, "cpu", DTYPE))


def gradients(output: Tensor, *wanted: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(output, wanted, upstream(output), materialize_grads=True)


def close(actual: Any, wanted: Any, within: float | None = None) -> None:
    within = WITHIN if within is None else within
    torch.testing.assert_close(actual, wanted, rtol=within, atol=within)


# Rows


@looped(("score", "normalize"), EVERY, sampled=2)
def test_masked_keys_equal_removed_keys(attention, score, normalize):
    query, key, value = inputs()
    options = {"score": build(SCORES, score), "normalize": build(NORMALIZERS, normalize)}
    seen = torch.tensor([True, False, True, True, False, False, True])
    parameters = (query, key, value, *leaves(options))
    masked = attention(query, key, value, mask=seen, **options)
    removed = attention(query, key[:, seen], value[:, seen], **options)
    close(masked, removed)
    close(gradients(masked, *parameters), gradients(removed, *parameters))


@looped(("score", "normalize"), EVERY)
def test_a_fully_masked_row_is_zero_and_has_no_gradient(attend, score, normalize):
    query, key, value = inputs()
    options = {"score": build(SCORES, score), "normalize": build(NORMALIZERS, normalize)}
    learned = leaves(options)
    seen = torch.ones(5, 7, dtype=torch.bool)
    seen[2] = False
    output, weights = attend(query, key, value, mask=seen, **options)
    assert (output[:, 2] == 0).all()
    assert (weights.dense()[:, 2] == 0).all()
    actual = gradients(output, query, key, value, *learned)
    assert all(grad.isfinite().all() for grad in actual)
    assert (actual[0][:, 2] == 0).all()

    rest = [0, 1, 3, 4]  # all rows except the masked one
    fewer = attend(query[:, rest], key, value, **options)[0]
    wanted = torch.autograd.grad(
        fewer, (query, key, value, *learned), upstream(output)[:, rest], materialize_grads=True
    )
    close(actual, wanted)


@looped("normalize", NORMALIZERS)
def test_fully_masked_calls_are_zero(attend, normalize):
    query, key, value = inputs()
    options = {
        "normalize": build(NORMALIZERS, normalize),
        "bias": [normal(3, 5, 7).requires_grad_(), regard.ClippedRelativeBias(nn.Parameter(normal(3, 5)))],
        "mask": regard.Padding(0),
    }
    output, weights = attend(query, key, value, **options)
    assert (output == 0).all()
    assert (weights.dense() == 0).all()
    assert weights.tau.isfinite().all()
    for grad in gradients(output, query, key, value, *leaves(options)):
        assert (grad == 0).all()


def test_a_single_masked_key_is_not_read(attention):
    query, key, value = inputs(k=1)
    bias = normal(3, 5, 1).requires_grad_()
    output = attention(query, key, value, bias=bias, mask=torch.zeros(1, dtype=torch.bool))
    output = output + attention(query, key, value, bias=bias, mask=regard.Padding(0))
    assert (output == 0).all()
    assert all((grad == 0).all() for grad in gradients(output, query, key, value, bias))


# Order


@looped(("score", "normalize"), EVERY)
def test_queries_permuted_permute_the_output(attention, score, normalize):
    query, key, value = inputs()
    order = torch.tensor([3, 1, 0, 4, 2])
    options = {"score": build(SCORES, score), "normalize": build(NORMALIZERS, normalize)}
    seen = normal(5, 7) > -0.5
    close(
        attention(query[:, order], key, value, mask=seen[order], **options),
        attention(query, key, value, mask=seen, **options)[:, order],
    )


# NaN and infinity


BAD = [math.nan, math.inf, -math.inf, 3e38]


def spoil(tensors: list[Tensor], where: str, at: int, bad: float) -> list[Tensor]:
    """Return copies with a bad key or value at this token."""
    copies = [tensor.detach().clone() for tensor in tensors]
    copies[{"key": 1, "value": 2}[where]][..., at, 1] = bad
    return [copy.requires_grad_() for copy in copies]


@crossed(
    3, score=FAMILIES, normalize=["softmax", "learned sink", "sparsemax", "mean"], where=["key", "value"]
)
def test_masked_keys_and_values_do_not_leak(attention, score, normalize, where):
    options = {
        "score": build(SCORES, score),
        "normalize": build(NORMALIZERS, normalize),
        "bias": regard.ClippedRelativeBias(nn.Parameter(normal(3, 5))),
        "mask": torch.tensor([True, True, False, True, True, True, True]),
    }
    clean, learned = inputs(), leaves(options)
    output = attention(*clean, **options)
    wanted = [output, *gradients(output, *clean, *learned)]
    for bad in BAD:
        spoilt = spoil(clean, where, 2, bad)
        output = attention(*spoilt, **options)
        close([output, *gradients(output, *spoilt, *learned)], wanted)


@looped("score", FAMILIES, sampled=2)
def test_queries_of_masked_rows_do_not_leak(attention, score):
    options = {"score": build(SCORES, score), "mask": torch.ones(5, 7, dtype=torch.bool)}
    options["mask"][2] = False
    clean, learned = inputs(), leaves(options)
    output = attention(*clean, **options)
    wanted = [output, *gradients(output, *clean, *learned)]
    for bad in BAD:
        spoilt = [x.detach().clone() for x in clean]
        spoilt[0][:, 2, 1] = bad
        for x in spoilt:
            x.requires_grad_()
        output = attention(*spoilt, **options)
        close([output, *gradients(output, *spoilt, *learned)], wanted)


def test_biases_of_masked_pairs_do_not_leak(attention):
    tensors, seen = inputs(), regard.Causal().dense(5, 7)
    line = normal(3, 13)
    biases = [normal(5, 7), regard.ClippedRelativeBias(nn.Parameter(line))]
    biases[0].requires_grad_()
    learned = (biases[0], biases[1].vector)
    output = attention(*tensors, bias=biases, mask=regard.Causal())
    wanted = [output, *gradients(output, *tensors, *learned)]
    for bad in BAD:
        dense = biases[0].detach().masked_fill(~seen, bad).requires_grad_()
        vector = line.clone()
        vector[:, 7:] = bad  # keys after the query
        relative = regard.ClippedRelativeBias(nn.Parameter(vector))
        output = attention(*tensors, bias=[dense, relative], mask=regard.Causal())
        close([output, *gradients(output, *tensors, dense, relative.vector)], wanted)


def test_masked_keys_do_not_leak_from_score_functions(attention):
    query, key, value = (x.detach() for x in inputs())
    spoilt = key.clone()
    spoilt[:, 6] = math.nan
    mask = regard.Padding(6)
    score = build(SCORES, "function")
    close(
        attention(query, spoilt, value, score=score, mask=mask),
        attention(query, key, value, score=score, mask=mask),
    )


@crossed(3, score=FAMILIES, where=["key", "value"], bad=BAD)
def test_a_late_nan_does_not_affect_earlier_rows(attention, score, where, bad):
    clean, score = inputs(q=7), build(SCORES, score)
    wanted = attention(*clean, score=score, mask=regard.Causal())
    (wanted_gradient,) = gradients(wanted, clean[0])
    spoilt = spoil(clean, where, 5, bad)
    output = attention(*spoilt, score=score, mask=regard.Causal())
    (gradient,) = gradients(output, spoilt[0])
    close(output[:, :5], wanted[:, :5])
    close(gradient[:, :5], wanted_gradient[:, :5])


@looped("where", ["key", "value"])
def test_a_loss_on_earlier_rows_has_no_nan_in_any_gradient(attention, where):
    # the loss ignores rows that attend to the late key: their output gradient is zero
    clean = inputs(q=7)
    wanted = gradients(attention(*clean, mask=regard.Causal())[:, :5], *clean)
    for bad in BAD:
        spoilt = spoil(clean, where, 5, bad)
        close(gradients(attention(*spoilt, mask=regard.Causal())[:, :5], *spoilt), wanted)


@looped("normalize", ["sparsemax", "entmax15", "entmax 2.5", "relu", "hard"])
def test_zero_weights_ignore_their_values(attend, normalize):
    key = torch.tensor([[3.0], [-50.0], [2.9]], dtype=DTYPE, requires_grad=True)
    query = torch.ones(1, 1, dtype=DTYPE, requires_grad=True)
    value = torch.tensor([[1.0], [math.nan], [2.0]], dtype=DTYPE, requires_grad=True)
    options = {"normalize": build(NORMALIZERS, normalize, heads=1), "score": regard.Dot()}
    output, weights = attend(query, key, value, **options)
    assert weights.dense()[0, 1] == 0
    assert output.isfinite().all()
    for grad in gradients(output, query, key, value):
        assert grad.isfinite().all()


@rotated(normalize=NORMALIZERS, bad=[math.inf, math.nan])
def test_a_row_that_sees_infinity_or_nan_in_a_bias_is_nan(attend, normalize, bad):
    # as in torch's softmax, for every normalizer; other rows are unaffected
    query, key, value = inputs(q=5, k=5)
    if bad is math.inf:
        bias, rows = torch.zeros(5, 5, dtype=DTYPE), [1]
        bias[1, 3] = bad
        bias.requires_grad_()
    else:
        line, rows = torch.zeros(9, dtype=DTYPE), [0, 1, 2]
        line[6] = bad  # at distance 2
        bias = regard.ClippedRelativeBias(nn.Parameter(line))
    others = [i for i in range(5) if i not in rows]
    options = {"normalize": build(NORMALIZERS, normalize)}
    output, weights = attend(query, key, value, bias=bias, **options)
    for part in (output, weights.dense(), weights.tau, weights.entropy()):
        assert part[:, rows].isnan().all()
    plain, plain_weights = attend(query, key, value, **options)
    close(output[:, others], plain[:, others])
    close(weights.dense()[:, others], plain_weights.dense()[:, others])
    learned = (query, key, value, *leaves(options))
    close(gradients(output[:, others], *learned), gradients(plain[:, others], *learned))


def test_a_visible_nan_is_not_hidden(attention):
    query, key, value = (x.detach() for x in inputs())
    key[:, 3] = math.nan
    assert attention(query, key, value).isnan().all()
    assert attention(query, key.nan_to_num(), key).isnan().all()


# Rows, batches and threads


def test_a_row_does_not_depend_on_the_rest_of_the_batch(attend):
    # Equal up to rounding in float64: the rounding of torch's matmul depends on the memory alignment of its
    # operands, and thus on the rest of the batch. The kernels are bitwise reproducible; see test_kernels.py.
    for (score, normalize), mask, bias in zip(EVERY, MASKS, itertools.cycle(BIASES), strict=False):
        case = Case("heads", score, normalize, mask, bias)
        tensors, options = case.tensors(DTYPE), case.options(DTYPE)
        output, weights = attend(*tensors, **options)
        for content in (17.0, math.nan):
            others = [tensor.clone() for tensor in tensors]
            for tensor in others:
                tensor[0] = content
            changed, changed_weights = attend(*others, **options)
            for actual, wanted in ((changed[1], output[1]), (changed_weights[1], weights[1])):
                close(actual, wanted, 1e-6 if DTYPE is torch.float32 else 1e-13)


@pytest.mark.parametrize(
    ("score", "n_q", "n_k", "normalize"),
    [
        ("scaled dot", 8, 4099, "softmax"),
        ("scaled dot", 150, 150, "sparsemax"),
        ("additive", 70, 150, "sigmoid"),
    ],
)
def test_the_number_of_threads_changes_no_more_than_the_last_digit(attention, score, n_q, n_k, normalize):
    # torch's matmul and sigmoid round differently with one and two threads
    tensors = [x.detach().float().requires_grad_() for x in inputs(lead=(2,), q=n_q, k=n_k, d=32, e=16)]
    options = {
        "score": build(SCORES, score, 32),
        "normalize": build(NORMALIZERS, normalize),
        "mask": regard.Causal(),
        "dropout": 0.1,
    }
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with tiles_of(2**18):
                output = attention(*tensors, **options, generator=torch.Generator().manual_seed(1))
                results.append([output.detach(), *gradients(output, *tensors)])
    finally:
        torch.set_num_threads(before)
    for one, other in zip(*results, strict=True):
        close(one, other, 16 * torch.finfo(torch.float32).eps * one.abs().max().item())


# Numbers


LARGE = [(1.0, 1e4), (1.0, -1e4), (1e4, 0.0)]  # spread and offset


@rotated(normalize=NORMALIZERS, large=LARGE)
def test_large_scores_stay_finite_and_accurate(attend, normalize, large):
    spread, offset = large
    # with a single feature of 1, the scores are the keys, in float32 and float64
    key = (normal(1, 29, 1) * spread + offset).float()
    tensors = [x.requires_grad_() for x in (torch.ones(1, 3, 1), key, normal(1, 29, 2).float())]
    exact = [x.detach().double().requires_grad_() for x in tensors]
    options = {"score": regard.Dot(), "normalize": build(NORMALIZERS, normalize, heads=1)}
    output, weights = attend(*tensors, **options)
    wanted, wanted_weights = attend(*exact, **options)
    if DTYPE is torch.float64:
        close(wanted_weights.dense().detach(), naive.attention(*exact, **options)[1])
    close(weights.dense().double(), wanted_weights.dense(), 2e-6)
    close(output.double(), wanted, 5e-6 * max(wanted.abs().max().item(), 1))
    # the gradient of the query is a sum over large keys
    scales = (key.abs().max().item(), 1, 1)
    for one, other, scale in zip(gradients(output, *tensors), gradients(wanted, *exact), scales, strict=True):
        close(one.double(), other, 2e-6 * max(other.abs().max().item(), scale))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
class TestHalfPrecision:
    def test_sums_are_in_float32(self, attention, dtype):
        # in bfloat16, 256 + 1 is 256
        query, key, value = (torch.ones(n, 3, dtype=dtype) for n in (5, 4096, 4096))
        with tiles_of(2**20):
            close(attention(query, key, value), torch.ones(5, 3, dtype=dtype), 0)
            mean = attention(query, key, value, score=regard.Dot(), normalize=regard.Mean())
            close(mean, torch.full((5, 3), 3.0, dtype=dtype), 0)
            wide = attention(key.mT, key.mT, value[:3], score=regard.Dot(), normalize=regard.Mean())
            close(wide, torch.full((3, 3), 4096.0, dtype=dtype), 0)

    def test_gradients_are_summed_in_float32(self, attention, dtype):
        query = torch.ones(4096, 1, dtype=dtype)
        key, value = torch.ones(1, 1, dtype=dtype), torch.ones(1, 1, dtype=dtype, requires_grad=True)
        with tiles_of(2**20):
            attention(query, key, value).sum().backward()
        assert value.grad.item() == 4096

    # a score function computes in half precision
    @looped(("score", "normalize"), [pair for pair in EVERY if pair[0] != "function"])
    def test_the_result_is_the_correctly_rounded_one(self, attention, dtype, score, normalize):
        case = Case("grouped", score, normalize, "causal", "several")
        with tiles_of(2**20):
            exact = attention(
                *case.tensors(torch.float64, rounded=dtype), **case.options(torch.float64, rounded=dtype)
            )
            output = attention(*case.tensors(dtype), **case.options(dtype))
        assert output.dtype is dtype
        error = (output.double() - exact).abs().max().item()
        assert error <= 1.01 * torch.finfo(dtype).eps / 2 * exact.abs().max().item()


@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4])
def test_gaussian_scores_are_accurate_far_from_zero(attention, offset):
    tensors = [x.detach().float() for x in inputs(q=20, k=30)]
    tensors[:2] = [x + offset for x in tensors[:2]]
    exact, _ = naive.attention(*tensors, score=regard.Gaussian(), normalize=regard.Softmax())
    close(attention(*tensors, score=regard.Gaussian()).double(), exact, 3e-6)


def test_an_infinite_softcap_has_no_effect(attention):
    query, key, value = inputs()
    actual = attention(query, key, value, score=regard.Dot(softcap=math.inf))
    wanted = attention(query, key, value, score=regard.Dot())
    close(actual, wanted)
    close(gradients(actual, query, key, value), gradients(wanted, query, key, value))


def test_a_softcap_bounds_infinite_scores(attend):
    query = torch.full((1, 1), 1e30, requires_grad=True)
    key = torch.tensor([[1e30], [-1e30], [0.0]], requires_grad=True)  # their products overflow
    output, weights = attend(query, key, key.detach() * 1e-30, score=regard.Dot(softcap=2.0))
    close(weights.scores(), torch.tensor([[2.0, -2.0, 0.0]]))
    assert output.isfinite().all()
    assert all(grad.isfinite().all() for grad in gradients(output, query, key))


# Shapes


SIZES = {"batch": 2, "heads": 3, "queries": 5, "keys": 7, "width": 4, "value width": 2}


@looped("axis, number", itertools.product(SIZES, range(len(EVERY))), sampled=3)
def test_axes_of_size_zero(attend, axis, number):
    (score, normalize), sizes = EVERY[number], {**SIZES, axis: 0}
    refused = {"width": MIXED_WIDTHS, "heads": {"learned sink"}}.get(axis, set())  # empty parameters
    if {score, normalize} & refused:
        return
    lead, n_q, n_k = (sizes["batch"], sizes["heads"]), sizes["queries"], sizes["keys"]
    masks = [None, regard.Causal(), regard.Window(2), regard.Padding(n_k), torch.ones(n_q, n_k) > 0]
    query, key, value = inputs(lead=lead, q=n_q, k=n_k, d=sizes["width"], e=sizes["value width"])
    options = {
        "score": build(SCORES, score, sizes["width"], sizes["heads"]),
        "normalize": build(NORMALIZERS, normalize, heads=sizes["heads"]),
        "bias": [normal(n_q, n_k).requires_grad_(), regard.ClippedRelativeBias(nn.Parameter(normal(5)))],
    }
    output, weights = attend(query, key, value, mask=masks[number % len(masks)], **options)
    assert output.shape == (*lead, n_q, sizes["value width"])
    assert weights.shape == weights.dense().shape == (*lead, n_q, n_k)
    assert output.isfinite().all()
    if axis == "keys":
        assert (output == 0).all()
    tensors = (query, key, value, *leaves(options))
    for tensor, grad in zip(tensors, gradients(output, *tensors), strict=True):
        assert grad.shape == tensor.shape
        assert grad.isfinite().all()


def test_without_features_all_keys_are_equal(attention):
    query, key, value = inputs(d=0)
    close(attention(query, key, value), value.mean(-2, keepdim=True).expand(-1, 5, -1))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "heads after tokens": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every other": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "every other token": lambda x: x.repeat_interleave(2, -2)[..., ::2, :],
    "from the middle": lambda x: torch.cat([x, x, x], -1)[..., x.shape[-1] : -x.shape[-1]],
    "batch last": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
}


@looped("score", ["scaled dot", "additive"])
@looped("layout", LAYOUTS)
def test_strides_are_irrelevant(attention, layout, score):
    tensors = inputs(lead=(2, 3))
    options = {"score": build(SCORES, score), "bias": normal(2, 3, 5, 7), "mask": normal(2, 3, 5, 7) > -1}
    odd = {name: LAYOUTS[layout](x) if isinstance(x, Tensor) else x for name, x in options.items()}
    wanted = attention(*tensors, **options)
    strided = [LAYOUTS[layout](x) for x in tensors]
    assert not any(x.is_contiguous() for x in strided)
    actual = attention(*strided, **odd)
    close(actual, wanted)
    above = upstream(wanted)
    close(
        torch.autograd.grad(actual, tensors, LAYOUTS[layout](above)),
        torch.autograd.grad(wanted, tensors, above),
    )


@pytest.mark.parametrize("score", ["scaled dot", "additive"])
def test_expanded_inputs_and_gradients(attention, score):
    query, key, value = inputs(lead=(1, 1))
    options = {"score": build(SCORES, score), "mask": regard.Causal()}
    expanded = [x.expand(2, 3, -1, -1) for x in (query, key, value)]
    repeated = [x.repeat(2, 3, 1, 1) for x in (query, key, value)]
    actual, wanted = attention(*expanded, **options), attention(*repeated, **options)
    close(actual, wanted)
    above = torch.ones((), dtype=DTYPE).expand(actual.shape)  # the gradient from sum().backward()
    close(
        torch.autograd.grad(actual, (query, key, value), above),
        torch.autograd.grad(wanted, (query, key, value), above.contiguous()),
    )


def test_one_vector_for_all_keys(attention):
    query, key, value = (x.detach() for x in inputs())
    same = key[:, :1].expand(-1, 7, -1)
    close(attention(query, same, value), value.mean(-2, keepdim=True).expand(-1, 5, -1))


def test_more_than_int32_pairs():
    n = 2**16
    x = torch.linspace(-1, 1, n)[:, None]
    bias = torch.tensor([0.5, -0.5, 0.0, 0.0, 0.0])
    output, weights = regard.attend(
        *(x, x, x),
        mask=regard.Window(3) & regard.Padding(9, side="left"),  # skips most rows: they have no visible key
        bias=regard.ClippedRelativeBias(bias),
        dropout=0.5,
        generator=torch.Generator().manual_seed(0),
        implementation="tiled",
    )
    assert weights.numel() > 2**31
    for row in range(n - 7, n):
        near = x[row - 2 : row + 1]
        wanted = torch.softmax(near @ x[row] + bias[:3], 0) * 2
        kept = weights[row, row - 2 : row + 1]
        close(kept, torch.where(kept == 0, 0.0, wanted), 1e-5)
        close(output[row], kept @ near, 1e-5)
    assert (output[: n - 9] == 0).all()
    assert 0 < sum((weights[row] != 0).sum() for row in range(n - 7, n)) < 21


# Dropout


class TestDropout:
    def test_the_seed_decides(self, attention):
        tensors = inputs(q=20, k=30)
        torch.manual_seed(1)
        first, second = attention(*tensors, dropout=0.5), attention(*tensors, dropout=0.5)
        torch.manual_seed(1)
        again = attention(*tensors, dropout=0.5)
        assert torch.equal(first, again)
        assert not torch.equal(first, second)

    def test_a_generator_decides_alone(self, attention):
        tensors = inputs()
        state = torch.get_rng_state()
        attention(*tensors)
        first = attention(*tensors, dropout=0.5, generator=torch.Generator().manual_seed(3))
        again = attention(*tensors, dropout=0.5, generator=torch.Generator().manual_seed(3))
        assert torch.equal(first, again)
        assert torch.equal(state, torch.get_rng_state())

    def test_implementations_and_tiles_drop_the_same(self):
        tensors = inputs(lead=(2, 3), q=20, k=30)
        results = []
        for size, name in ((2**20, "reference"), (2**20, "tiled"), (1, "tiled"), (7, "tiled"), (64, "tiled")):
            with tiles_of(size):
                output = regard.attention(
                    *tensors,
                    dropout=0.4,
                    generator=torch.Generator().manual_seed(3),
                    mask=regard.Window(left=20, right=2),
                    implementation=name,
                )
                results.append([output.detach(), *gradients(output, *tensors)])
        for other in results[1:]:
            close(other, results[0])

    def test_it_drops_whole_weights_and_scales_the_rest(self, attend):
        query, key, value = (x.detach() for x in inputs(q=20, k=30))
        before = attend(query, key, value)[1].dense()
        output, weights = attend(query, key, value, dropout=0.3)
        after = weights.dense()
        kept = after != 0
        close(after[kept], before[kept] / 0.7)
        close(after @ value, output)
        assert torch.equal(after, weights.dense())

    def kept(self, attend, dropout):
        """Return the dropout mask of 2 × 3 × 100 × 200 weights."""
        query, key = torch.zeros(2, 3, 100, 1), torch.zeros(2, 3, 200, 1)
        with tiles_of(2**20):
            generator = torch.Generator().manual_seed(5)
            _, weights = attend(query, key, key, dropout=dropout, generator=generator)
            return (weights.dense() > 0).double()

    def test_the_expectation_is_right_in_every_row_column_and_head(self, attend):
        kept = self.kept(attend, 0.3)
        for axes in ((0, 1, 2, 3), (0, 1, 2), (0, 1, 3), (0, 2, 3), (1, 2, 3)):
            share = kept.mean(axes)
            coins = kept.numel() / share.numel()
            assert (share - 0.7).abs().max() < 5 * math.sqrt(0.3 * 0.7 / coins)

    def test_places_are_independent_of_each_other(self, attend):
        coins = self.kept(attend, 0.5) - 0.5
        for axis in range(4):
            for shift in range(1, min(coins.shape[axis], 9)):
                pairs = coins.narrow(axis, shift, coins.shape[axis] - shift) * coins.narrow(
                    axis, 0, coins.shape[axis] - shift
                )
                assert pairs.mean().abs() < 5 * 0.25 / math.sqrt(pairs.numel())

    @pytest.mark.parametrize("normalize", ["softmax", "sinks", "sparsemax", "entmax15", "sigmoid", "mean"])
    def test_forward_and_backward_drop_the_same(self, attention, normalize):
        tensors = inputs()
        normalize = build(NORMALIZERS, normalize)

        def call(*x: Tensor) -> Tensor:
            generator = torch.Generator().manual_seed(7)
            return attention(*x, dropout=0.4, generator=generator, normalize=normalize, mask=regard.Causal())

        with tiles_of(20):
            if DTYPE is torch.float64:
                assert gradcheck(call, tensors, fast_mode=True)
                return
        output = call(*tensors)
        exact = [x.detach().double().requires_grad_() for x in tensors]
        attention.keywords["implementation"] = "reference"
        close(gradients(output, *tensors), [x.float() for x in gradients(call(*exact), *exact)])

    def test_a_dropped_nan_is_not_read(self, attend):
        query, key, value = (x.detach() for x in inputs())
        value[:, 3] = math.nan
        for x in (query, key, value):
            x.requires_grad_()
        generator = torch.Generator().manual_seed(8)
        output, weights = attend(query, key, value, dropout=0.5, generator=generator)
        dropped = weights.dense()[..., 3] == 0
        assert dropped.any()
        assert output[dropped].isfinite().all()
        assert output[~dropped].isnan().all()
        (grad,) = gradients(output, query)
        assert grad[dropped].isfinite().all()


# Memory


N, TILE = 128, 2**11
PATHS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "causal": {"mask": regard.Causal()},
    "documents": {"mask": regard.Documents([N // 2, N // 2], within=regard.Causal())},
    "padding": {"mask": regard.Padding(100)},
    "union": {"mask": regard.Window(20) | regard.Padding(7)},
    "sparsemax": {"normalize": regard.Sparsemax()},
    "entmax": {"normalize": regard.Entmax(1.3)},
    "sinks": {"normalize": regard.Softmax1(torch.zeros(1, requires_grad=True))},
    "sigmoid": {"normalize": regard.Sigmoid()},
    "softcap": {"score": regard.ScaledDot(softcap=2.0)},
    "gaussian": {"score": regard.Gaussian()},
    "additive": {"score": regard.Additive(4, 4, 3)},
    "concat": {"score": regard.Concat(4, 4)},
    "relative": {"bias": regard.ClippedRelativeBias(nn.Parameter(torch.randn(1, 65)))},
    "alibi and t5": {"bias": [regard.ALiBi(1), regard.T5Bias(1)], "mask": regard.Causal()},
    "bias of keys": {"bias": torch.randn(N, requires_grad=True)},
    "dropout": {"dropout": 0.1},
}


def largest_tensor(implementation: str, **options: Any) -> tuple[int, str]:
    tensors = [normal(1, N, 4, seed=seed, dtype=torch.float32).requires_grad_() for seed in range(3)]
    with tiles_of(TILE), Largest() as seen:
        regard.attention(*tensors, implementation=implementation, **options).square().sum().backward()
    return seen.elements, seen.by


@looped("path", PATHS)
def test_tiles_never_hold_queries_times_keys(path):
    held, operation = largest_tensor("tiled", **PATHS[path])
    assert held <= 2 * TILE, operation  # the matrix is 8 × TILE


def test_the_dense_reference_does():
    held, _ = largest_tensor("reference")
    assert held >= N * N
