"""Meta and fake tensors: results have the right shapes, and nothing is computed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import regard
from tests.cases import looped
from tests.mechanism.functions import (
    CASES,
    DOUBLE,
    READERS,
    SOME_KEYS,
    B,
    D,
    H,
    K,
    Q,
    distinct,
    gradients,
    make,
    qkv,
)

ON_THE_CPU = ("a tensor for a mask", "both", "ALiBi", "everything", "Concat of width 1")  # contain tensors


@pytest.mark.parametrize("name", distinct(name for name in CASES if name not in ON_THE_CPU))
@pytest.mark.sampled(4)
def test_meta_tensors(name: str) -> None:
    case = CASES[name]()
    inputs = tuple(t.to("meta").requires_grad_() for t in case.inputs)
    actual, expected = gradients(case.call, inputs), gradients(case.call, make(name).inputs)
    assert all(t.is_meta for t in actual)
    assert [(t.shape, t.dtype) for t in actual] == [(t.shape, t.dtype) for t in expected]


@looped(
    "build",
    [
        lambda: {"bias": regard.ALiBi(H).to("meta")},
        lambda: {"score": regard.Concat(D, D).to("meta")},
        lambda: {"mask": regard.Causal() & SOME_KEYS.to("meta")},
        lambda: {"mask": regard.Documents([1, 2], torch.tensor([2, 2], device="meta"))},
        lambda: {"normalize": regard.Sink(H).to("meta")},
    ],
    ids=["ALiBi", "Concat", "mask", "Documents", "Sink"],
)
def test_modules_and_masks_on_meta(build: Callable[[], dict[str, Any]]) -> None:
    inputs = tuple(t.to("meta").requires_grad_() for t in qkv())
    actual = gradients(lambda *a: regard.attention(*a, **build()), inputs)
    assert [t.shape for t in actual[1:]] == [t.shape for t in inputs]


@pytest.mark.parametrize("device", ["meta", "fake"])
def test_a_million_tokens_without_values_are_not_computed(device: str) -> None:
    with FakeTensorMode() if device == "fake" else torch.device("meta"):
        x = torch.empty(8, 2**20, 64, requires_grad=True)
        output = regard.attention(x, x, x, mask=regard.Causal(), bias=regard.ALiBi(8), dropout=0.1)
        output.sum().backward()
    assert output.shape == x.grad.shape == x.shape


@pytest.mark.parametrize("name", distinct(CASES, step=2))
@pytest.mark.sampled(3)
def test_fake_tensors(name: str) -> None:
    case = CASES[name]()
    expected = gradients(case.call, make(name).inputs)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        inputs = tuple(mode.from_tensor(t).requires_grad_() for t in case.inputs)
        actual = gradients(case.call, inputs)
    assert [(t.shape, t.dtype) for t in actual] == [(t.shape, t.dtype) for t in expected]


@looped(
    "build",
    [
        lambda n: regard.Padding(n[:B]),
        lambda n: regard.Padding(n[:B], side="left"),
        lambda n: regard.Documents(n, n),
        lambda n: regard.Documents(n, n, within=regard.Causal()),
        lambda n: regard.Causal() & regard.Padding(n[:B]),
        lambda n: regard.Window(2) | (n[:K] > 2),
    ],
    ids=["Padding", "Padding at the left", "Documents", "Documents, causal", "both", "either"],
)
def test_masks_of_fake_lengths(build: Callable[[Tensor], Any]) -> None:
    with FakeTensorMode():
        args = [torch.empty(B, H, n, D, requires_grad=True) for n in (Q, K, K)]
        mask = build(torch.empty(6, dtype=torch.long))
        output = regard.attention(*args, mask=mask)
        output.sum().backward()
        assert output.shape == (B, H, Q, D)
        assert all(t.grad.shape == t.shape for t in args)


def test_a_mask_of_fake_lengths_prints_itself() -> None:
    with FakeTensorMode():
        lengths = torch.empty(2, dtype=torch.long)
        assert "Padding" in repr(regard.Padding(lengths))
        assert "Documents" in repr(regard.Documents(lengths))


@looped("read", READERS)
@looped("device", ["meta", "fake"])
def test_lazy_weights_without_values(read: str, device: str) -> None:
    with FakeTensorMode() if device == "fake" else torch.device("meta"):
        args = [torch.empty(H, n, D, dtype=torch.float64) for n in (Q, K, K)]
        actual = READERS[read](regard.attend(*args, mask=regard.Causal())[1])
    expected = READERS[read](regard.attend(*(torch.zeros(t.shape, dtype=DOUBLE) for t in args))[1])
    assert actual.shape == expected.shape
    assert repr(regard.attend(*args)[1]) if device == "meta" else True
