"""Float32 linear layers in the kernels compared with torch's."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from regard.mechanism import fused
from regard.mechanism.kernels import layer_kernels
from regard.models.layers import linear
from regard.models.layers.linear import LinearForward, replace_linear

pytestmark = pytest.mark.skipif(not fused.available(), reason="needs the kernels")

# rows, inputs, outputs: around the rows of a strip and of each path, and the depth and columns of a panel
SIZES = (
    *((1, 16, 5), (2, 48, 64), (8, 33, 17), (9, 16, 16), (24, 32, 65), (191, 48, 130), (192, 16, 1)),
    *((192, 400, 63), (193, 384, 64), (217, 768, 129), (300, 784, 48), (600, 96, 96), (192, 17, 5)),
)


@pytest.fixture(autouse=True)
def preferred(monkeypatch, one_thread):
    """Prefer the kernels on every processor."""
    torch.manual_seed(0)
    monkeypatch.setattr(layer_kernels, "_PREFERS_LINEAR", True)
    monkeypatch.setattr(layer_kernels, "_LANES", 16)


@pytest.fixture
def calls(monkeypatch):
    """Record the number of rows of each product that the kernels compute."""
    rows: list[int] = []
    kernel = layer_kernels.linear

    def recorded(x: Tensor, *args: object, **options: object) -> Tensor:
        rows.append(x.numel() // x.shape[-1])
        return kernel(x, *args, **options)

    monkeypatch.setattr(linear.layer_kernels, "linear", recorded)
    return rows


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SIZES)
def test_the_error_is_at_most_twice_that_of_torch(rows, inputs, outputs, transposed):
    x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    for b in (bias, None):
        exact = F.linear(x.double(), weight.double(), None if b is None else b.double())
        given = weight.T.contiguous() if transposed else weight
        output = layer_kernels.linear(x, given, None, b, outputs, transposed=transposed)
        error, reference = ((y - exact).abs().max() for y in (output, F.linear(x, weight, b)))
        assert error <= 2 * reference + 1e-6 * inputs**0.5


def test_the_number_of_threads_does_not_change_the_result():
    x, weight = torch.randn(700, 96), torch.randn(80, 96)
    whole = layer_kernels.linear(x, weight, None, None, 80)
    torch.set_num_threads(2)
    assert torch.equal(layer_kernels.linear(x, weight, None, None, 80), whole)


def test_nan_and_infinity_stay_in_their_row():
    x, weight = torch.randn(260, 32), torch.randn(70, 32)
    expected = layer_kernels.linear(x, weight, None, None, 70)
    x[3, 5], x[259, 31] = float("nan"), float("inf")
    output = layer_kernels.linear(x, weight, None, None, 70)
    assert not output[[3, 259]].isfinite().any()
    rest = [i for i in range(260) if i not in (3, 259)]
    assert torch.equal(output[rest], expected[rest])


def test_a_replaced_layer_sees_changes_of_its_weight(calls):
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 3, bias=False))
    x = torch.randn(2, 5, 32)
    plain = copy.deepcopy(model)
    replace_linear(model)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(x), plain(x))
            for module in (model, plain):
                module[0].weight.mul_(2)
                module[2].weight = nn.Parameter(module[2].weight + 1)
    assert calls == [10] * 4
    with torch.inference_mode():
        torch.testing.assert_close(model(x.transpose(0, 1)), plain(x.transpose(0, 1)))
    assert len(calls) == 6


def test_calls_that_something_observes_use_torch(calls):
    class Traced(Tensor):
        """A subclass."""

    layer, x = nn.Linear(32, 3), torch.randn(4, 32)
    plain = copy.deepcopy(layer)
    replace_linear(layer)
    layer(x).sum().backward()
    plain(x).sum().backward()
    assert torch.equal(layer.weight.grad, plain.weight.grad)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype is torch.bfloat16
        assert isinstance(layer(x.as_subclass(Traced)), Traced)
        torch.testing.assert_close(torch.vmap(layer)(x), plain(x))
        with FlopCounterMode(display=False) as counter:
            layer(x)
        assert counter.get_total_flops() == 2 * 4 * 32 * 3
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            layer(torch.randn(4, 16))
        assert layer(x[:0]).shape == (0, 3)
        assert layer.double()(x.double()).dtype is torch.float64
    assert not calls
    frozen = copy.deepcopy(plain).requires_grad_(False)
    replace_linear(frozen)
    frozen(x)
    frozen(x.requires_grad_()).sum().backward()
    assert calls == [4]
    assert torch.equal(x.grad, plain.weight.sum(0).expand_as(x))


def test_hooks_and_own_forward_methods_are_kept(calls):
    layer, seen = nn.Linear(32, 3), []
    layer.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    own = nn.Linear(32, 3)
    own.forward = lambda x: x
    model = nn.ModuleList([layer, own])
    replace_linear(model)
    x = torch.randn(4, 32)
    with torch.no_grad():
        model[0](x)
        assert model[1](x) is x
    assert seen == [(4, 3)]
    assert calls == [4]


def test_a_copy_uses_its_own_weights():
    layer, x = nn.Linear(32, 3), torch.randn(4, 32)
    replace_linear(layer)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert isinstance(copied.forward, LinearForward)
        assert copied.forward.layer is copied
        with torch.no_grad():
            torch.testing.assert_close(copied(x), layer(x))
            copied.weight.zero_()
            assert torch.equal(copied(x), copied.bias.expand(4, 3))
            assert layer(x).abs().min() > 0
