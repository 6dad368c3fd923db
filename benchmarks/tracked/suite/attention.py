"""Time and memory of the operator: rows of tests/cases.py at sizes where the kernels matter."""

import sys
from pathlib import Path

import torch

import regard

sys.path.insert(0, str(Path(__file__).parents[3]))  # asv imports the suite without the repository's root

from tests.cases import BIASES, MASKS, NORMALIZERS, SCORES, Case, Shape, leaves, upstream

# batch, heads, queries, keys, width
SIZES = {
    "tiny": (1, 1, 4, 4, 16),
    "sentences": (16, 8, 32, 32, 64),
    "document": (1, 8, 512, 512, 64),
    "decoding": (1, 8, 1, 2048, 64),
}
_VARIED = {"score": SCORES, "normalize": NORMALIZERS, "mask": MASKS, "bias": BIASES}


def shape(size: str) -> Shape:
    """Return the shapes of query, key and value."""
    batch, heads, queries, keys, width = SIZES[size]
    return Shape((batch, heads, queries, width), *[(batch, heads, keys, width)] * 2)


def rows() -> dict[str, Case]:
    """Return the default case and every case that differs from it in one column, by name."""
    cases = {"default": Case()}
    for column, table in _VARIED.items():
        cases |= {f"{column}: {name}": Case(**{column: name}) for name in table}
    return cases


class Operator:
    """`regard.attention` on one row of the table, forward and backward."""

    params = (list(rows()), ["sentences", "document"])
    param_names = ("case", "size")
    timeout = 120

    def setup(self, name: str, size: str) -> None:
        """Draw the tensors and run once, which fills the caches."""
        row = rows()[name]
        case = Case(row.shape, row.score, row.normalize, row.mask, row.bias, sizes=shape(size))
        self.tensors = case.tensors(torch.float32, requires_grad=True)
        self.options = case.options(torch.float32)
        self.inputs = [*self.tensors, *leaves(self.options)]
        self.grad = upstream(regard.attention(*self.tensors, **self.options))

    def time_forward(self, name: str, size: str) -> None:
        """Time without gradients."""
        with torch.no_grad():
            regard.attention(*self.tensors, **self.options)

    def time_forward_backward(self, name: str, size: str) -> None:
        """Time with gradients of all inputs."""
        output = regard.attention(*self.tensors, **self.options)
        torch.autograd.grad(output, self.inputs, self.grad, allow_unused=True)


class Sizes:
    """The default call at all sizes: call overhead, short and long rows, decoding."""

    params = (list(SIZES),)
    param_names = ("size",)

    def setup(self, size: str) -> None:
        """Draw the tensors."""
        self.tensors = Case(sizes=shape(size)).tensors(torch.float32)

    def time_attention(self, size: str) -> None:
        """Time the output alone."""
        regard.attention(*self.tensors)

    def time_attend(self, size: str) -> None:
        """Time the output and lazy weights."""
        regard.attend(*self.tensors)

    def time_one_row(self, size: str) -> None:
        """Time reading one row of the weights."""
        regard.attend(*self.tensors)[1][..., -1, :]


class Memory:
    """Memory held by the lazy weights, in bytes: linear in the number of tokens."""

    params = ([512, 2048, 8192],)
    param_names = ("tokens",)
    unit = "bytes"

    def track_held(self, tokens: int) -> int:
        """Return the bytes held by the weights."""
        x = torch.randn(8, tokens, 64)
        return regard.attend(x, x, x, mask=regard.Causal())[1].held
