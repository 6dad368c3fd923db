"""Fused dropout: the formula, its gradients, and the fallback to torch."""

import pytest
import torch
from torch import Tensor

from regard.mechanism import fused
from regard.mechanism.reference import _mix
from regard.models.layers.dropout import Dropout

SHAPE = (7, 10_007)  # more than one work item, not a multiple of the vector width
SHARE = 0.3
kernels = pytest.mark.skipif(not fused.available(), reason="there are no kernels")


def drawn(function: object, *given: Tensor) -> tuple[Tensor, Tensor]:
    """Return the expected result and its scale factors."""
    torch.manual_seed(3)
    result = function(*given)  # type: ignore[operator]
    torch.manual_seed(3)
    seed = int(torch.randint(2**63 - 1, ()))
    hashed = _mix(_mix(torch.arange(given[0].numel()) ^ seed & 0xFFFFFFFF) ^ seed >> 32)
    return result, (hashed >= int(SHARE * 2**32)).view(SHAPE) / (1 - SHARE)


def numbers(count: int) -> list[Tensor]:
    return [torch.randn(SHAPE, requires_grad=True) for _ in range(count)]


@kernels
def test_kernels_follow_the_formula_forward_and_backward() -> None:
    (x, y), grad, dropout = numbers(2), torch.randn(SHAPE), Dropout(SHARE)
    result, kept = drawn(dropout.add, x, y)
    torch.testing.assert_close(result, x + y * kept)
    torch.testing.assert_close(torch.autograd.grad(result, (x, y), grad), (grad, grad * kept))
    result, kept = drawn(dropout, y)
    torch.testing.assert_close(result, y * kept)
    torch.testing.assert_close(torch.autograd.grad(result, y, grad)[0], grad * kept)
    result, kept = drawn(dropout.relu, y)
    torch.testing.assert_close(result, y.relu() * kept)
    torch.testing.assert_close(torch.autograd.grad(result, y, grad)[0], grad * kept * (y > 0))


@kernels
def test_bfloat16_is_computed_in_float32_and_rounded_once() -> None:
    low, dropout = torch.bfloat16, Dropout(SHARE)
    (x,), y, grad = numbers(1), torch.randn(SHAPE).to(low).requires_grad_(), torch.randn(SHAPE)
    result, kept = drawn(dropout.add, x, y)  # as under autocast: a float32 residual stream
    torch.testing.assert_close(result, x + y.float() * kept)
    torch.testing.assert_close(
        torch.autograd.grad(result, (x, y), grad), (grad, (grad * kept).to(low)), rtol=0, atol=0
    )
    for function, active in ((dropout, 1), (dropout.relu, y > 0)):
        result, kept = drawn(function, y)
        assert torch.equal(result, (y.float() * active * kept).to(low))
        (actual,) = torch.autograd.grad(result, y, grad.to(low))
        assert torch.equal(actual, (grad.to(low).float() * kept * active).to(low))
    assert dropout.add(y, y).dtype is low


@kernels
def test_second_derivatives() -> None:
    (y,), dropout = numbers(1), Dropout(SHARE)
    for function in (dropout, dropout.relu):
        result, kept = drawn(function, y)
        (first,) = torch.autograd.grad(result.pow(2).sum(), y, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), y)
        active = 1 if function is dropout else y > 0
        torch.testing.assert_close(second, 2 * kept**2 * active)


@kernels
@pytest.mark.parametrize("threads", [1, 2])
def test_result_does_not_depend_on_threads(threads: int) -> None:
    x, before = torch.ones(SHAPE), torch.get_num_threads()
    torch.set_num_threads(threads)
    result, kept = drawn(Dropout(SHARE), x)
    torch.set_num_threads(before)
    torch.testing.assert_close(result, kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # float64 has no kernel
def test_drop_rate_and_mean(dtype: torch.dtype) -> None:
    x, dropout = torch.ones(1_000_000, dtype=dtype), Dropout(SHARE)
    for result in (dropout(x), dropout.add(x, x) - x, dropout.relu(x)):
        assert (result == 0).double().mean() == pytest.approx(SHARE, abs=0.003)  # six standard deviations
        assert result.mean() == pytest.approx(1, abs=0.005)
    assert not torch.equal(dropout(x), dropout(x))


def test_eval_mode_drops_nothing() -> None:
    x = torch.randn(SHAPE)
    for dropout in (Dropout(SHARE).eval(), Dropout(0.0)):
        assert torch.equal(dropout(x), x)
        assert torch.equal(dropout.add(x, x), 2 * x)
        assert torch.equal(dropout.relu(x), x.relu())


def test_nan_is_preserved() -> None:
    dropout = Dropout(SHARE)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.full((1000,), torch.nan, dtype=dtype)
        x[::2] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)  # all bits set
        assert all(result.isnan().any() for result in (dropout(x), dropout.relu(x)))
        assert dropout.add(x, x).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_in_a_batch(dtype: torch.dtype) -> None:
    y, dropout = torch.randn(6, dtype=dtype, requires_grad=True), Dropout(SHARE)
    for function in (dropout, dropout.relu, lambda y: dropout.add(y, y)):
        result = function(y)
        each = [
            torch.autograd.grad(result, y, row, retain_graph=True)[0] for row in torch.eye(6, dtype=dtype)
        ]
        batch = torch.eye(6, dtype=dtype)
        (together,) = torch.autograd.grad(result, y, batch, is_grads_batched=True)
        torch.testing.assert_close(together, torch.stack(each), rtol=2**-7, atol=0)


def test_in_place_and_negative_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(1000, dtype=dtype)
        assert Dropout(SHARE, inplace=True)(x) is x
        assert (x == 0).any()
        assert Dropout(SHARE)(torch._neg_view(torch.ones(1000, dtype=dtype))).max() <= 0


def test_non_contiguous_tensors() -> None:
    x = torch.randn(11, 13).T.requires_grad_()
    dropout = Dropout(SHARE)
    for result, whole in (
        (dropout(x), x),
        (dropout.add(x.detach(), x) - x.detach(), x),
        (dropout.relu(x), x.relu()),
    ):
        kept = (result != 0) / (1 - SHARE)
        torch.testing.assert_close(result, whole * kept)
        torch.testing.assert_close(torch.autograd.grad(result.sum(), x)[0], kept)


def test_compiles() -> None:
    dropout = Dropout(SHARE)
    compiled = torch.compile(lambda x: dropout.add(x, dropout.relu(x)), backend="aot_eager", fullgraph=True)
    x = torch.randn(5, 7, requires_grad=True)
    compiled(x).sum().backward()
    assert x.grad is not None
