"""Attention with quantized keys and values equals attention with the dequantized tensors, on every path."""

import copy
import itertools
import math

import pytest
import torch
from torch import Tensor

import regard
from regard import Quantized, quantize
from regard.errors import DTypeError, ShapeError
from regard.mechanism import fused
from tests.cases import instruction_set

pytestmark = pytest.mark.usefixtures("one_thread")

HAS_KERNELS = pytest.mark.skipif(not fused.available(), reason=fused.DESCRIPTION)
IMPLEMENTATIONS = ("reference", "tiled", *(["fused"] if fused.available() else []))
ISAS = fused.KERNELS.available() if fused.KERNELS is not None else []


def inputs(*, b=2, h=3, g=3, q=1, k=13, d=64, e=64, dtype=torch.float32):
    query = torch.randn(b, h, q, d, dtype=dtype)
    key, value = torch.randn(b, g, k, d, dtype=dtype), torch.randn(b, g, k, e, dtype=dtype)
    return query, quantize(key), quantize(value)


def both(query, key, value, **options):
    """Return output and weights for quantized tensors, and for dequantized tensors in float64."""
    output, weights = regard.attend(query, key, value, **options)
    options["implementation"] = "reference"
    exact = [x.dequantize().double() for x in (key, value)]
    return (output, weights.dense()), [
        x.dense() if isinstance(x, regard.Weights) else x
        for x in regard.attend(query.double(), *exact, **options)
    ]


def assert_equal(actual, expected, tolerance=1e-5):
    for ours, exact in zip(actual, expected, strict=True):
        assert ours.dtype is torch.float32
        torch.testing.assert_close(ours.double(), exact, atol=tolerance, rtol=tolerance)


# Values


def test_the_error_is_at_most_half_a_scale():
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        x = (torch.randn(3, 5, 7) * torch.logspace(-4, 4, 5)[:, None]).to(dtype)
        quantized = quantize(x)
        assert quantized.dtype is dtype is quantized.dequantize().dtype
        assert quantized.values.abs().max() == 127
        error = (quantized.values * quantized.scale.double() - x.double()).abs()
        assert (error <= quantized.scale * 0.5001).all()


def test_quantizing_twice_changes_nothing():
    once = quantize(torch.randn(3, 5, 7))
    twice = quantize(once.dequantize())
    assert torch.equal(once.values, twice.values)
    torch.testing.assert_close(once.scale, twice.scale)


def test_special_tokens():
    x = torch.ones(6, 3)
    x[0], x[1, 0], x[2, 1], x[3], x[4] = 0.0, math.nan, -math.inf, 1e-38, 1e38
    actual = quantize(x).dequantize()
    assert actual[[1, 2]].isnan().all()
    torch.testing.assert_close(actual[[0, 3, 4, 5]], torch.stack([0 * x[5], 0 * x[5], x[4], x[5]]))
    for shape in ((0, 3), (3, 0), (2, 0, 3)):
        assert quantize(torch.ones(shape)).dequantize().shape == shape


# Laws


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_output_and_weights_equal_those_of_dequantized_tensors(implementation):
    sizes = [
        {"k": 1},
        {"k": 97, "d": 16, "e": 16},
        {"k": 700, "b": 1, "h": 2, "g": 1},
        {"k": 300, "h": 8, "g": 2, "d": 32, "e": 128},
        {"k": 23, "d": 5, "e": 3},
        {"k": 50, "d": 24, "e": 40, "q": 2},
        {"k": 31, "q": 31, "h": 4, "g": 2, "d": 72, "e": 80},
        {"k": 2000, "b": 1, "h": 1, "g": 1, "d": 128, "e": 64},
    ]
    for size in sizes:
        call = inputs(**size)
        for mask in (None, regard.Causal(), regard.Window(left=4)):
            assert_equal(*both(*call, mask=mask, implementation=implementation))


@HAS_KERNELS
def test_instruction_sets():
    for isa in ISAS:
        with instruction_set(isa):
            for d, k, h in itertools.product((8, 16, 20, 64, 96, 128, 256), (1, 290, 700), (1, 2, 3)):
                assert_equal(*both(*inputs(b=1, h=h, g=1, k=k, d=d, e=d)))
            for d, e, h in itertools.product((16, 64, 128, 256), (48, 80), (4, 5, 6, 7, 8, 9)):  # grouped
                assert_equal(*both(*inputs(b=1, h=h, g=1, k=900, d=d, e=e)))


@HAS_KERNELS
def test_options():
    query, key, value = inputs(b=2, h=4, g=2, k=300)
    lengths, bias = torch.tensor([300, 17]), torch.randn(4, 1, 300)
    for options in (
        {"mask": regard.Padding(lengths)},
        {"mask": torch.rand(2, 1, 1, 300) > 0.5},
        {"bias": bias},
        {"score": regard.Dot(softcap=3.0)},
        {"normalize": regard.Softmax(temperature=0.5)},
        {"normalize": regard.Softmax1(torch.randn(4))},
        {"normalize": regard.Sigmoid(), "score": regard.ScaledDot(0.1)},
        {"normalize": regard.Entmax15()},
        {"normalize": regard.Sparsemax(), "mask": regard.Padding(lengths)},
        {"normalize": regard.Hard()},
        {"score": regard.Cosine()},
        {"score": lambda query, key: query @ key.mT / 8},
    ):
        assert_equal(*both(query, key, value, **options), tolerance=2e-5)


@HAS_KERNELS
def test_dropout_drops_the_same_pairs():
    query, key, value = inputs(k=300)
    outputs = [
        regard.attention(query, *tensors, dropout=0.3, generator=torch.Generator().manual_seed(0))
        for tensors in ((key, value), (key.dequantize(), value.dequantize()))
    ]
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)


@HAS_KERNELS
def test_only_one_of_key_and_value_is_quantized():
    query, key, value = inputs(k=300)
    expected = regard.attention(query, key.dequantize(), value.dequantize())
    for tensors in ((key, value.dequantize()), (key.dequantize(), value)):
        for _ in range(2):  # the second call is cached
            torch.testing.assert_close(regard.attention(query, *tensors), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(regard.attend(query, *tensors)[0], expected, atol=1e-5, rtol=1e-5)


def test_views_of_a_larger_buffer():
    """A cache passes slices of its buffer, in any memory order."""
    query, key, value = inputs(b=2, h=4, g=4, k=400)
    expected = regard.attention(query, *(x.map(lambda t: t[:, :, 20:320].clone()) for x in (key, value)))
    for order in ((0, 1, 2, 3), (0, 2, 1, 3), (2, 1, 0, 3)):
        inverse = [order.index(axis) for axis in range(4)]
        views = [x.map(lambda t: t.permute(order).contiguous().permute(inverse)) for x in (key, value)]  # noqa: B023
        actual = regard.attention(query, *(x[:, :, 20:320] for x in views))
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


def test_low_precision_queries():
    for dtype in (torch.bfloat16, torch.float16):
        query, key, value = inputs(dtype=dtype)
        output = regard.attention(query, key, value)
        exact = regard.attention(query.float(), *(x.values * x.scale for x in (key, value)))
        assert output.dtype is dtype
        torch.testing.assert_close(output, exact.to(dtype), atol=1e-2, rtol=1e-2)


@HAS_KERNELS
def test_the_result_does_not_depend_on_the_number_of_threads():
    for size in ({"b": 1, "h": 1, "g": 1, "k": 5000}, {"b": 2, "h": 8, "g": 2, "k": 1000}):
        call = inputs(**size)
        outputs = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            outputs.append(regard.attention(*call))
        assert torch.equal(outputs[0], outputs[1])
        assert torch.equal(outputs[0], outputs[2])


def test_no_keys_or_no_queries():
    for size in ({"k": 0}, {"q": 0}, {"b": 0}):
        query, key, value = inputs(**size)
        output, weights = regard.attend(query, key, value)
        assert torch.equal(output, torch.zeros(query.shape))
        assert weights.dense().shape == (*query.shape[:-1], key.shape[-2])


@pytest.mark.parametrize("implementation", [None, *IMPLEMENTATIONS])
def test_nan_in_a_hidden_token_is_ignored_and_in_a_visible_one_it_is_not(implementation):
    query, key, value = torch.randn(1, 2, 1, 64), torch.randn(1, 2, 9, 64), torch.randn(1, 2, 9, 64)
    hidden = torch.arange(9) != 4
    expected = regard.attention(query, quantize(key), quantize(value), mask=hidden)
    for name, x in (("key", key), ("value", value)):
        tensors = {"key": key, "value": value}
        tensors[name] = x.clone()
        tensors[name][:, 0, 4, 7] = math.nan
        tensors = {name: quantize(x) for name, x in tensors.items()}
        actual = regard.attention(query, **tensors, mask=hidden, implementation=implementation)
        torch.testing.assert_close(actual, expected)
        visible = regard.attention(query, **tensors, implementation=implementation)
        assert visible[:, 0].isnan().all()
        assert not visible[:, 1].isnan().any()


# Weights


@HAS_KERNELS
def test_lazy_weights():
    query, key, value = inputs(b=2, h=4, g=2, k=500)
    output, weights = regard.attend(query, key, value)
    expected = regard.attend(query, key.dequantize(), value.dequantize())[1].dense()
    assert weights.problem["key"].dtype is torch.int8  # not dequantized
    dense = weights.dense()
    torch.testing.assert_close(dense, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(dense.sum(-1), torch.ones(2, 4, 1))
    assert torch.equal(weights[1, 2, 0], dense[1, 2, 0])
    torch.testing.assert_close(weights.entropy(), torch.special.entr(dense).sum(-1), atol=1e-4, rtol=1e-4)
    best = weights.topk(3)
    torch.testing.assert_close(best.values, dense.topk(3).values)
    assert torch.equal(best.indices, dense.topk(3).indices)
    values = value.dequantize().repeat_interleave(2, 1)
    torch.testing.assert_close(weights @ values, output, atol=1e-5, rtol=1e-5)
    x = torch.randn(2, 4, 1, 7)
    torch.testing.assert_close(weights.mT @ x, dense.mT @ x, atol=1e-5, rtol=1e-5)
    assert torch.equal(weights.argmax(-1), dense.argmax(-1))
    torch.testing.assert_close(weights.received(), dense.sum(-2), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(weights.scores().softmax(-1), dense, atol=1e-5, rtol=1e-5)


def test_saved_weights(tmp_path):
    query, key, value = inputs(k=50)
    weights = regard.attend(query, key, value)[1]
    weights.save(tmp_path / "w.safetensors")
    loaded = regard.Weights.load(tmp_path / "w.safetensors")
    torch.testing.assert_close(loaded.dense(), weights.dense(), atol=1e-6, rtol=1e-5)


@HAS_KERNELS
def test_weights_of_overwritten_keys_are_refused():
    query, key, value = inputs()
    weights = regard.attend(query, key, value)[1]
    key.values.zero_()
    with pytest.raises(regard.StaleError, match="key was modified in place"):
        weights.dense()


# Gradients and transforms


def test_gradients_equal_those_of_dequantized_tensors():
    query, key, value = inputs(b=1, h=2, g=2, q=3, k=7, d=8, e=8)
    grads = []
    for tensors in ((key, value), (key.dequantize(), value.dequantize())):
        leaf, bias = query.clone().requires_grad_(), torch.zeros(3, 7, requires_grad=True)
        output = regard.attention(leaf, *tensors, bias=bias)
        grads.append(torch.autograd.grad(output.square().sum(), (leaf, bias)))
    torch.testing.assert_close(*grads)
    leaf = query.clone().requires_grad_()
    assert "gradient" in str(regard.explain(leaf, key, value))
    weights = regard.attend(leaf, key, value)[1]
    assert torch.autograd.grad(weights.dense().square().sum(), leaf)[0].abs().sum() > 0


def test_transforms():
    query, key, value = inputs(b=1, h=2, g=2, q=3, k=7, d=8, e=8)
    expected = regard.attention(query, key.dequantize(), value.dequantize())
    with torch.autocast("cpu", torch.bfloat16):
        assert regard.attention(query, key, value).dtype is torch.bfloat16
    mapped = torch.func.vmap(lambda query: regard.attention(query, key, value))(query)
    torch.testing.assert_close(mapped[0], expected)
    tangent = torch.func.jvp(lambda query: regard.attention(query, key, value), (query,), (query,))[1]
    assert tangent.abs().sum() > 0
    meta = [Quantized(x.values.to("meta"), x.scale.to("meta")) for x in (key, value)]
    assert regard.attention(query.to("meta"), *meta).shape == expected.shape


def test_float64():
    query, key, value = inputs(dtype=torch.float64, d=8, e=8)
    expected = regard.attention(query, key.dequantize(), value.dequantize())
    torch.testing.assert_close(regard.attention(query, key, value), expected)


# explain, copies and errors


@HAS_KERNELS
def test_explain():
    query, key, value = inputs()
    assert "read int8 keys and values in place" in str(regard.explain(query, key, value))
    for options, reason in (
        ({"score": regard.Cosine()}, "only Dot and ScaledDot"),
        ({"normalize": regard.Hard()}, "Hard has no kernel"),
        ({"implementation": "tiled"}, "tiled was requested"),
    ):
        explanation = str(regard.explain(query, key, value, **options))
        assert f"dequantized to 39.9 kB first, because {reason}" in explanation


def test_copies():
    x = quantize(torch.randn(2, 5, 4))
    for other in (copy.deepcopy(x), x.clone(), x[:]):
        assert torch.equal(other.values, x.values)
        assert torch.equal(other.scale, x.scale)
    assert x.clone().values.data_ptr() != x.values.data_ptr()
    assert x[:, 1:3].shape == (2, 2, 4)
    assert x.nbytes == 2 * 5 * (4 + 4)


def test_errors():
    query, key, value = inputs()
    attention, mismatch = regard.attention, "query has dtype torch.float32 and key has torch.bfloat16"
    narrow = quantize(torch.randn(2, 3, 13, 64).bfloat16())
    for error, message, call in (
        (DTypeError, "quantize got a list; pass a tensor", lambda: quantize([1.0])),
        (DTypeError, "quantize got dtype torch.int64", lambda: quantize(torch.ones(2, 3, dtype=torch.long))),
        (ShapeError, r"quantize got shape \(3,\)", lambda: quantize(torch.ones(3))),
        (DTypeError, "must be torch.int8", lambda: Quantized(key.scale, key.scale)),
        (ShapeError, r"scale of shape \(2, 3, 13\)", lambda: Quantized(key.values, key.scale[..., 0])),
        (ShapeError, "must be", lambda: key[..., 0]),
        (DTypeError, "query is .*Quantized.*; pass a tensor", lambda: attention(key, key, value)),
        (
            DTypeError,
            mismatch,
            lambda: attention(query, narrow, value),
        ),
        (ShapeError, "13 tokens and value has 5", lambda: attention(query, key, value[:, :, :5])),
        (ShapeError, "64 features and key has 8", lambda: attention(query, inputs(d=8)[1], value)),
        (ShapeError, "heads", lambda: attention(query, *inputs(g=2)[1:])),
        (DTypeError, 'set_attn_implementation."regard".', lambda: torch.matmul(query, key)),
        (
            DTypeError,
            "scaled_dot_product_attention got a Quantized",
            lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value),
        ),
        (AttributeError, "no attribute 'mT': only regard.attention", lambda: key.mT),
        (AttributeError, "no attribute 'nonsense'.$", lambda: key.nonsense),
    ):
        with pytest.raises(error, match=message):
            call()


def test_isinstance_of_results():
    assert isinstance(quantize(torch.ones(2, 3)).dequantize(), Tensor)


def test_the_largest_number_stays_finite():
    for dtype in (torch.float32, torch.float64):
        x = torch.full((1, 3, 4), torch.finfo(dtype).max, dtype=dtype)
        assert quantize(x).dequantize().isfinite().all()


def test_a_scale_that_requires_grad_receives_it():
    x = quantize(torch.randn(1, 3, 4))
    scale = x.scale.clone().requires_grad_()
    key = regard.Quantized(x.values, scale)
    regard.attention(torch.randn(1, 2, 4), key, key).sum().backward()
    assert scale.grad is not None


def test_features_cannot_be_selected():
    with pytest.raises(ShapeError, match="selects features"):
        quantize(torch.randn(2, 1, 4))[..., 0]
