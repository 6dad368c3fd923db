"""int8 models: close to float32, independent of the batch, for inference only."""

import copy

import pytest
import torch

from regard.errors import ArgumentError, DTypeError, ShapeError
from regard.mechanism import fused
from regard.models import (
    Packed,
    RecurrentConfig,
    RecurrentSeq2Seq,
    Transformer,
    TransformerConfig,
    quantize,
)
from regard.models.inference.quantization import is_quantized
from regard.models.layers.linear import Int8Linear, few_rows_linear, project
from regard.translation.decoding.search import search
from regard.translation.decoding.strategies import Beam

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not fused.available(), reason="int8 needs the kernels"),
]

CONFIGS = {
    "transformer": TransformerConfig(width=32, heads=4, layers=2, ffn_dim=48),
    "narrow, key heads": TransformerConfig(width=12, heads=2, key_heads=1, layers=1, ffn_dim=20),
    "norm after, gelu, alibi": TransformerConfig(
        width=32, heads=4, layers=1, norm_first=False, activation="gelu", positions="alibi"
    ),
    "swiglu, rms, rotary, no bias": TransformerConfig(
        width=32, heads=4, layers=1, activation="swiglu", norm="rms", positions="rotary", linear_bias=False
    ),
    "bahdanau": RecurrentConfig(width=16, attention="additive"),
    "luong": RecurrentConfig(width=16, attention="general", input_feeding=True),
}
SOURCES = [[5, 6, 7, 2], [8, 2], [9, 9, 4, 6, 11, 2]]


def make(name):
    torch.manual_seed(0)
    config = CONFIGS[name]
    kind = Transformer if isinstance(config, TransformerConfig) else RecurrentSeq2Seq
    return kind(50, config).eval()


def test_a_layer_is_the_product_with_its_rounded_weights():
    torch.manual_seed(0)
    with torch.no_grad():
        for rows, inputs, outputs in ((1, 1, 1), (2, 7, 5), (7, 33, 17), (13, 256, 100), (40, 20, 48)):
            layer, x = torch.nn.Linear(inputs, outputs, bias=rows != 2), torch.randn(3, rows, inputs)
            int8 = Int8Linear(layer)
            step = layer.weight.abs().amax(1, keepdim=True) / 127
            assert bool(((int8.weight - layer.weight).abs() <= step * 0.5001).all())
            expected = torch.nn.functional.linear(
                x.double(), int8.weight.double(), None if layer.bias is None else layer.bias.double()
            )
            assert (int8(x) - expected).abs().max() < 3e-4 * inputs**0.5
            part = (x, int8, min(16, outputs - 1), outputs)
            assert torch.equal(project(*part), int8(x)[..., part[2] :])
            assert torch.equal(project(x, int8, 0, 1), int8(x)[..., :1])


def test_the_sums_of_a_deep_layer_do_not_overflow():
    layer, x = torch.nn.Linear(3000, 17, bias=False), torch.ones(2, 3000)
    with torch.no_grad():
        layer.weight.fill_(0.5)
        torch.testing.assert_close(Int8Linear(layer)(x), layer(x), rtol=1e-3, atol=0)


def test_the_result_of_a_row_does_not_depend_on_the_others():
    torch.manual_seed(0)
    int8, x = Int8Linear(torch.nn.Linear(64, 48)), torch.randn(29, 64)
    x[3] *= 1e6
    whole = int8(x)
    for i in range(0, 29, 4):
        assert torch.equal(int8(x[i]), whole[i])


def test_many_rows_equal_few():
    torch.manual_seed(0)
    for depth in (3, 700):  # rows are multiplied in chunks whose size depends on the depth
        int8, x = Int8Linear(torch.nn.Linear(depth, 70)), torch.randn(401, depth)
        assert torch.equal(int8(x), torch.cat([int8(part) for part in x.split(7)]))


def test_unusual_inputs_of_a_layer():
    int8 = Int8Linear(torch.nn.Linear(5, 3))
    x = torch.ones(4, 5)
    x[0], x[1, 2], x[2, 0] = 0, float("nan"), float("inf")
    output = int8(x)
    assert torch.equal(output[0], int8.bias[:3])
    assert output[1:3].isnan().all()
    assert output[3].isfinite().all()
    assert int8(x[:0]).shape == (0, 3)
    with torch.no_grad():
        zero = torch.nn.Linear(5, 3)
        zero.weight.zero_()
        assert torch.equal(Int8Linear(zero)(x[3:]), zero(x[3:]))
        zero.weight[0, 0] = float("nan")
    with pytest.raises(ArgumentError, match="cannot be quantized to int8"):
        Int8Linear(zero)


def test_few_rows_equal_torch():
    torch.manual_seed(0)
    with torch.no_grad():
        for rows, inputs, outputs in ((1, 3, 5), (2, 8, 7), (5, 33, 64), (8, 256, 31), (9, 16, 16)):
            x, weight, bias = (
                torch.randn(rows, inputs),
                torch.randn(outputs, inputs),
                torch.randn(outputs),
            )
            expected = torch.nn.functional.linear(x, weight, bias)
            torch.testing.assert_close(few_rows_linear(x, weight, bias), expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_models_are_close_to_float32_and_stay_unchanged(name):
    model = make(name)
    before = copy.deepcopy(model.state_dict())
    int8 = quantize(model, "int8")
    assert is_quantized(int8)
    assert not is_quantized(model)
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())
    assert not any(p.requires_grad for p in int8.parameters())
    source, target = Packed.of(SOURCES), Packed.of([[1, 4, 5], [1], [1, 9, 9, 9]])
    with torch.no_grad():
        expected, actual = model(source, target), int8(source, target)
    assert 0 < (actual - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("name", ["transformer", "narrow, key heads", "luong"])
def test_an_int8_search_does_not_depend_on_the_batch(name):
    int8 = quantize(make(name), "int8")
    together = search(int8, Packed.of(SOURCES), Beam(3, n_best=2), max_new_tokens=8)
    for source, expected in zip(SOURCES, together, strict=True):
        (alone,) = search(int8, Packed.of([source]), Beam(3, n_best=2), max_new_tokens=8)
        assert [h.tokens for h in alone] == [h.tokens for h in expected]
        assert [h.score for h in alone] == pytest.approx([h.score for h in expected], rel=1e-5)


def test_bfloat16_converts_the_parameters():
    model = make("transformer")
    assert {p.dtype for p in quantize(model, "bfloat16").parameters()} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_errors():
    model = quantize(make("transformer"), "int8")
    with pytest.raises(ArgumentError, match="Train the float32 model"):
        model.train()
    with pytest.raises(ArgumentError, match="no gradients"):
        model.decoder.blocks[0].feed_forward(torch.randn(2, 32, requires_grad=True))
    with pytest.raises(DTypeError, match=r"got an input of dtype torch\.float64"):
        model.decoder.blocks[0].feed_forward(torch.randn(2, 32).double())
    with pytest.raises(ArgumentError, match="'int4'; choose one of float32, bfloat16, int8"):
        quantize(model, "int4")


def test_a_layer_refuses_inputs_and_conversions_that_the_kernels_cannot_read():
    layer = Int8Linear(torch.nn.Linear(64, 32))
    with torch.no_grad():
        for width in (63, 65, 1000):
            with pytest.raises(ShapeError, match=f"{width}\\); the last axis must have size 64"):
                layer(torch.randn(3, width))
        for target in (torch.float16, torch.float64, "meta"):
            with pytest.raises(DTypeError, match="must stay in float32 on the CPU"):
                copy.deepcopy(layer).to(target)(torch.randn(3, 64))
        x = torch.randn(3, 64)
        assert torch.equal(project(x, layer, 0, 5), layer(x)[:, :5])
        assert project(x, layer, 0, 5).is_contiguous()
        assert project(x, layer, 3, 32).is_contiguous()
