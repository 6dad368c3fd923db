"""Calls to `attend` for the tests of lazy weights, with scores and weights computed from the formulas."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from tests import naive
from tests.cases import Case, Shape, looped

B, G, Q, K, D, E = 2, 3, 5, 7, 11, 13  # sizes of the shape "heads"


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


@dataclass(frozen=True)
class Call:
    """A call to `attend`: a case from the table in a dtype, with dropout and an implementation."""

    case: Case = Case()  # noqa: RUF009 (it is frozen)
    dtype: torch.dtype = torch.float64
    dropout: float = 0.0
    implementation: str | None = None

    def __str__(self) -> str:
        return f"{self.case.name}, {self.dtype}, dropout {self.dropout}, {self.implementation}"

    @property
    def lead(self) -> tuple[int, ...]:
        return self.case.shapes.lead

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.case.tensors(self.dtype)

    def options(self) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(3)
        more = {"dropout": self.dropout, "implementation": self.implementation, "generator": generator}
        return self.case.options(self.dtype) | more

    def attend(self) -> tuple[Tensor, regard.Weights]:
        return regard.attend(*self.inputs(), **self.options())

    def weights(self) -> regard.Weights:
        """Return the weights, computed without gradients."""
        return self.attend()[1].detach()

    @functools.cache  # noqa: B019 (there are few of them)
    def formulas(self) -> tuple[Tensor, Tensor]:
        """Return scores and weights, pair by pair, in float64."""
        options = self.case.options(self.dtype)
        weights = naive.attention(*self.inputs(), **options)[1]
        options.pop("normalize")
        return naive.scores(*self.inputs(), **options), weights

    def visible(self) -> Tensor:
        return self.formulas()[0] != -math.inf


LONG = Shape((4, 5, D), (2, 101, D), (2, 101, E))  # more keys than a tile of the kernels
FEW = [
    Case("no heads"),
    Case(mask="causal"),
    Case("grouped", "scaled dot", "sinks", "union", "alibi"),
    Case("grouped", "additive", "entmax15", "padding"),
    Case(normalize="sparsemax", mask="tensor"),
    Case(normalize="sigmoid", bias="hiding"),
    Case("broadcasting batch", "dot", "relu"),
    Case("broadcasting heads", mask="window"),
    Case("grouped", normalize="softmax1", mask="causal", bias="t5", sizes=LONG),
]
FEW = [
    *(Call(case) for case in FEW),
    *(Call(case, torch.float32) for case in (*FEW[1:4], FEW[-1])),  # on the kernels
    Call(Case(mask="causal"), torch.bfloat16),
]
few = looped("call", FEW, ids=str)
many_tiles = pytest.mark.usefixtures("tile")


def attend(*names: str, **changes: Any) -> regard.Weights:
    """Return the weights of a case by its names: attend("grouped", mask="causal")."""
    return Call(Case(*names, **changes)).weights()


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype = torch.float64) -> None:
    """Check equal shape and values, up to rounding in float64 or float32."""
    precision = 1e-10 if dtype is torch.float64 else 2e-5
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual.to(expected), expected, rtol=precision, atol=precision)


def same(actual: regard.Weights, weights: regard.Weights) -> None:
    """Check bitwise equality if the kernels run; torch's matmul rounding depends on operand alignment."""
    actual, weights = actual.detach(), weights.detach()
    within = 0.0 if weights.compute_tau() else 16 * torch.finfo(weights.dtype).eps
    torch.testing.assert_close(actual.dense(), weights.dense(), rtol=within, atol=within)
    torch.testing.assert_close(actual.topk(3).values, weights.topk(3).values, rtol=within, atol=within)


def entropy(dense: Tensor) -> Tensor:
    return -(dense * torch.where(dense > 0, dense, 1.0).log()).sum(-1)


def pooled(dense: Tensor, rows: int, columns: int) -> Tensor:
    """Return the mean of each block; block sizes differ by at most one."""

    def means(size: int, parts: int) -> Tensor:
        """Return the matrix (parts, size) that averages consecutive tokens."""
        block = ((torch.arange(size) + 1) * min(parts, size) - 1) // size
        blocks = torch.nn.functional.one_hot(block).mT.to(dense)
        return blocks / blocks.sum(-1, keepdim=True)

    return means(dense.shape[-2], rows) @ dense @ means(dense.shape[-1], columns).mT
