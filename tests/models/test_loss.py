"""vocabulary_loss equals F.cross_entropy of F.linear, in less memory."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from regard.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from regard.models import loss as module
from regard.models.loss import vocabulary_loss
from tests.recorder import Largest

N, M, V = 13, 5, 11  # rows, features, words

pytestmark = pytest.mark.usefixtures("one_thread")


def problem(n: int = N, m: int = M, v: int = V, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """Return x, weight and bias with requires_grad, and labels."""
    random = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in ((n, m), (v, m), (v,))]
    labels = torch.randint(v, (n,), generator=random)
    return *(t.to(dtype).requires_grad_() for t in tensors), labels


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(F.linear(x, weight, bias).flatten(0, -2), labels.flatten(), **options)


def solve(
    function: Any, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, **options: Any
) -> Any:
    """Return the loss, and the gradients of 3 × loss."""
    loss = function(x, weight, bias, labels, **options)
    tensors = [t for t in (x, weight, bias) if t is not None]
    return loss, *torch.autograd.grad(3 * loss, tensors)


def in_chunks(monkeypatch: pytest.MonkeyPatch, rows: int, v: int = V, itemsize: int = 8) -> None:
    monkeypatch.setattr(module, "_BYTES", rows * v * itemsize)


@given(
    n=st.integers(1, 9),
    m=st.integers(1, 7),
    v=st.integers(1, 11),
    rows=st.integers(1, 10),
    smoothing=st.sampled_from([0.0, 0.1, 0.9]),
    ignored=st.sampled_from([0.0, 0.3, 0.9]),
    biased=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_equals_cross_entropy_over_all_logits(
    n: int, m: int, v: int, rows: int, smoothing: float, ignored: float, biased: bool, seed: int
) -> None:
    x, weight, bias, labels = problem(n, m, v, seed=seed)
    labels[torch.rand(n) < ignored] = -7
    labels[0] = labels[0].clamp(min=0)  # torch returns NaN if all labels are ignored
    given = (x, weight, bias if biased else None, labels)
    with pytest.MonkeyPatch.context() as patch:
        in_chunks(patch, rows, v)
        ours = solve(vocabulary_loss, *given, label_smoothing=smoothing, ignore_index=-7)
    theirs = solve(plain, *given, label_smoothing=smoothing, ignore_index=-7)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("rows", [N - 1, N, N + 1, 1, 4])
def test_block_size_is_irrelevant(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    whole = solve(vocabulary_loss, *problem(), label_smoothing=0.1)
    in_chunks(monkeypatch, rows)
    torch.testing.assert_close(solve(vocabulary_loss, *problem(), label_smoothing=0.1), whole)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_gradcheck(monkeypatch: pytest.MonkeyPatch, biased: bool, smoothing: float) -> None:
    in_chunks(monkeypatch, 4)
    x, weight, bias, labels = problem()
    labels[3] = -100

    def call(*tensors: Tensor) -> Tensor:
        x, weight, bias = tensors if biased else (*tensors, None)
        return vocabulary_loss(x, weight, bias, labels, label_smoothing=smoothing)

    assert torch.autograd.gradcheck(call, (x, weight, bias) if biased else (x, weight))


def test_gradients_only_where_required() -> None:
    x, weight, bias, labels = problem()
    expected = solve(plain, x, weight, bias, labels)[2]
    loss = vocabulary_loss(x.detach(), weight, bias.detach(), labels)
    torch.testing.assert_close(torch.autograd.grad(3 * loss, weight)[0], expected)
    with torch.no_grad():
        assert not vocabulary_loss(x, weight, bias, labels).requires_grad


def test_backward_twice_gives_the_same_gradients() -> None:
    x, weight, bias, labels = problem()
    loss = vocabulary_loss(x, weight, bias, labels)
    first = torch.autograd.grad(loss, (x, weight, bias), retain_graph=True)
    second = torch.autograd.grad(2 * loss, (x, weight, bias))
    torch.testing.assert_close(tuple(2 * g for g in first), second)


def test_second_derivatives_are_rejected() -> None:
    x, weight, bias, labels = problem()
    loss = vocabulary_loss(x, weight, bias, labels)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(ArgumentError, match="does not support second derivatives"):
        gradient.sum().backward()


def test_any_leading_axes() -> None:
    x, weight, bias, labels = problem(2 * 3 * 7)
    folded = solve(vocabulary_loss, x.reshape(2, 3, 7, M), weight, bias, labels.reshape(2, 3, 7))[0]
    torch.testing.assert_close(folded, solve(vocabulary_loss, x, weight, bias, labels)[0])


def test_non_contiguous_input() -> None:
    x, weight, bias, labels = problem(2 * 7)
    turned, wide = x.reshape(2, 7, M).transpose(0, 1), weight.T.contiguous().T
    labels = labels.reshape(7, 2)
    ours = solve(vocabulary_loss, turned, wide, bias, labels)
    torch.testing.assert_close(ours, solve(plain, turned, wide, bias, labels))


@pytest.mark.parametrize("n", [N, 0])
def test_no_labels_give_zero_loss_and_gradient(n: int) -> None:
    x, weight, bias, labels = problem(n)
    for actual in solve(vocabulary_loss, x, weight, bias, labels.fill_(-100)):
        assert torch.equal(actual, torch.zeros_like(actual))


def test_ignored_rows_may_contain_anything() -> None:
    x, weight, bias, labels = problem()
    expected = solve(vocabulary_loss, x[1:], weight, bias, labels[1:])[2]
    spoilt = torch.cat([torch.full((1, M), torch.nan).double(), x[1:]])
    labels[0] = -100
    torch.testing.assert_close(solve(vocabulary_loss, spoilt, weight, bias, labels)[2], expected)


def test_huge_logits_stay_finite() -> None:
    x, weight, bias, labels = problem(dtype=torch.float32)
    ours = solve(vocabulary_loss, x * 1e4, weight, bias, labels, label_smoothing=0.1)
    assert all(actual.isfinite().all() for actual in ours)
    torch.testing.assert_close(ours, solve(plain, x * 1e4, weight, bias, labels, label_smoothing=0.1))


def test_memory_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    n, m, v, rows = 211, 3, 307, 13
    in_chunks(monkeypatch, rows, v)
    x, weight, bias, labels = (t.detach() for t in problem(n, m, v))
    with Largest() as seen:  # inside the autograd node, where modes are off
        module._loss._init_fn(x, weight, bias, labels, 0.1, -100, [True, True, True])
    assert seen.elements == rows * v
    with Largest() as plainly:
        plain(x, weight, bias, labels, label_smoothing=0.1)
    assert plainly.elements >= n * v


def test_unneeded_gradients_are_not_computed() -> None:
    x, weight, bias, labels = (t.detach() for t in problem())
    actual = module._loss(x, weight, bias, labels, 0.0, -100, [False, True, False])
    assert [len(part) for part in actual[2:]] == [0, V, 0]


def test_opcheck() -> None:
    x, weight, bias, labels = problem()
    # test_aot_dispatch_dynamic would differentiate the gradients, which are outputs; the next test compiles
    parts = ("test_schema", "test_autograd_registration", "test_faketensor")
    for some, needs in ((bias, [True, True, True]), (None, [True, True, False])):
        torch.library.opcheck(module._loss, (x, weight, some, labels, 0.1, -100, needs), test_utils=parts)


@pytest.mark.slow
def test_compiles_in_one_graph() -> None:
    x, weight, bias, labels = problem()
    compiled = torch.compile(vocabulary_loss, fullgraph=True, backend="aot_eager")
    ours = solve(compiled, x, weight, bias, labels, label_smoothing=0.1)
    torch.testing.assert_close(ours, solve(plain, x, weight, bias, labels, label_smoothing=0.1))


def test_meta_tensors() -> None:
    x, weight, bias, labels = (t.detach().to("meta") for t in problem())
    loss = vocabulary_loss(x, weight.requires_grad_(), bias, labels)
    loss.backward()
    assert loss.is_meta
    assert loss.shape == ()
    assert weight.grad is not None
    assert weight.grad.shape == (V, M)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_sums_in_float32(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    in_chunks(monkeypatch, 16, itemsize=4)
    x, weight, bias, labels = problem(1009, dtype=dtype)
    ours = solve(vocabulary_loss, x, weight, bias, labels, label_smoothing=0.1)
    assert ours[0].dtype is torch.float32
    assert all(actual.dtype is dtype for actual in ours[1:])
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    theirs = solve(plain, *exact, labels, label_smoothing=0.1)
    torch.testing.assert_close(ours[0].double(), theirs[0], rtol=1e-2, atol=0)
    for actual, right in zip(
        ours[1:], theirs[1:], strict=True
    ):  # summing 63 blocks in bfloat16 would be less accurate
        assert (actual.double() - right).abs().max() <= 0.01 * right.abs().max()


def test_autocast_returns_float32() -> None:
    x, weight, bias, labels = problem(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours = solve(vocabulary_loss, x, weight, bias, labels)
        hidden = solve(vocabulary_loss, x.bfloat16(), weight, bias, labels)
    theirs = solve(plain, x, weight, bias, labels)
    assert all(actual.dtype is torch.float32 for actual in ours)
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(hidden[0], theirs[0], rtol=2e-2, atol=0)


def test_gradients_of_a_shared_matrix_add_up() -> None:
    _, weight, _, labels = problem()
    ours = torch.autograd.grad(vocabulary_loss(weight[labels], weight, None, labels), weight)
    torch.testing.assert_close(ours, torch.autograd.grad(plain(weight[labels], weight, None, labels), weight))


@pytest.mark.parametrize("label", [V, -1, V + 1000])
def test_labels_out_of_range(label: int) -> None:
    x, weight, bias, labels = problem()
    labels[5] = label
    with pytest.raises(
        ArgumentError, match=f"Label {label} is out of range for a vocabulary of {V}.*ignore_index={label}"
    ):
        vocabulary_loss(x, weight, bias, labels)


def test_invalid_arguments() -> None:
    x, weight, bias, labels = problem()
    with pytest.raises(ShapeError, match=r"x has shape \(13, 4\) and weight \(11, 5\)"):
        vocabulary_loss(x[:, :4], weight, bias, labels)
    with pytest.raises(ShapeError, match=r"bias has shape \(10,\)"):
        vocabulary_loss(x, weight, bias[:10], labels)
    with pytest.raises(ShapeError, match=r"labels have shape \(12,\)"):
        vocabulary_loss(x, weight, bias, labels[:12])
    with pytest.raises(DTypeError, match=r"labels have dtype torch.float64"):
        vocabulary_loss(x, weight, bias, labels.double())
    with pytest.raises(DTypeError, match=r"x has dtype torch.float32"):
        vocabulary_loss(x.float(), weight, bias, labels)
    with pytest.raises(DeviceError, match="weight on meta"):
        vocabulary_loss(x, weight.to("meta"), bias, labels)
    with pytest.raises(ArgumentError, match=r"label_smoothing=1\.5"):
        vocabulary_loss(x, weight, bias, labels, label_smoothing=1.5)


def test_functorch_transforms() -> None:
    x, weight, labels = torch.randn(5, 3), torch.randn(7, 3), torch.tensor([0, 6, -100, 2, 3])
    actual = torch.func.grad(lambda w: vocabulary_loss(x, w, None, labels, label_smoothing=0.1))(weight)
    weight.requires_grad_()
    (wanted,) = torch.autograd.grad(vocabulary_loss(x, weight, None, labels, label_smoothing=0.1), weight)
    torch.testing.assert_close(actual, wanted)
    nothing = torch.full((5,), -100)
    assert torch.func.grad(lambda w: vocabulary_loss(x, w, None, nothing))(weight.detach()).eq(0).all()
