"""Lazy weights: the matrix (…, q, k) that an attention used, held in linear memory.

A `Weights` holds query, key, score, mask and the rows' statistic τ, from which any part of the matrix is
computed again, exactly, when somebody looks. It is a linear operator: `weights @ x` is attention itself.
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from regard._util.text import format_bytes
from regard.errors import ArgumentError
from regard.mechanism import reference, tiled
from regard.mechanism.call.problem import Problem, tiles
from regard.mechanism.normalizers import Softmax1
from regard.mechanism.precision import in_own_dtype
from regard.mechanism.torch_state import concrete
from regard.mechanism.weights import display, io, regions
from regard.mechanism.weights.index import Index, as_slice, plain_index
from regard.mechanism.weights.lazy_matrix import LazyMatrix

_SHORT = 64  # the most that `top` keeps in a list per row


class TopK(NamedTuple):
    """The largest weights of each row and the keys they belong to; −1 where a row sees no more keys.

    values: (…, q, k), falling along each row.
    indices: (…, q, k), the key of each value.

    >>> import torch, regard
    >>> x = torch.eye(3)
    >>> regard.attend(x, x, x)[1].topk(1).indices.squeeze(-1)
    tensor([0, 1, 2])
    """

    values: Tensor
    indices: Tensor


class Weights(LazyMatrix):
    """The weights of an attention: a lazy matrix of shape (…, q, k) in linear memory.

    `attend` and `watch` make them, and so does `Weights.load`; nobody calls the constructor.

    >>> import torch, regard
    >>> x = torch.eye(4)
    >>> output, weights = regard.attend(x, x, x, mask=regard.Causal())
    >>> weights
    Weights(4 × 4, float32: ScaledDot, Softmax(temperature=1.0); holds 0.2 kB, dense 0.1 kB)
    >>> weights[1]
    tensor([0.3775, 0.6225, 0.0000, 0.0000])
    >>> weights.topk(1).indices.squeeze(-1)
    tensor([0, 1, 2, 3])
    """

    # What it is

    @property
    def held(self) -> int:
        """Bytes of memory that it keeps alive: query, key, mask and τ, linear in the length.

        The autograd graph of query and key, if they have one, is not counted. Value is not kept.

        >>> import torch, regard
        >>> x = torch.randn(1000, 16)
        >>> regard.attend(x, x, x)[1].held  # and 4,000,000 when dense
        72000
        """
        storages = {t.untyped_storage()._cdata: t for t in self._problem.tensors.values()}
        return sum(t.untyped_storage().nbytes() for t in storages.values())

    def __repr__(self) -> str:
        dense = self.numel() * self.dtype.itemsize
        mean = ", mean of the heads" if self._heads == "mean" else ""
        rules = self._problem.rules
        normalize = "Softmax1" if isinstance(rules.normalize, Softmax1) else repr(rules.normalize)
        return (
            f"Weights({' × '.join(map(str, self.shape))}, {str(self.dtype).removeprefix('torch.')}: "
            f"{rules.score}, {normalize}{mean}; holds {format_bytes(self.held)}, dense {format_bytes(dense)})"
        )

    # Parts of it

    @in_own_dtype
    def __getitem__(self, index: Index) -> Tensor:
        """Any part of the matrix, indexed as a tensor would be."""
        parts = plain_index(index, self.ndim)
        if parts is None:
            return self._pick(index)
        *lead, rows, columns = (as_slice(i, n) for i, n in zip(parts, self.shape, strict=True))
        result = self._part(lead, rows)._collect(columns)
        return result[tuple(0 if isinstance(i, int) else slice(None) for i in parts)]

    @in_own_dtype
    def dense(self) -> Tensor:
        """All of it, as an ordinary tensor: n_q × n_k numbers per head."""
        return self._collect(slice(None))

    @in_own_dtype
    def scores(self) -> Tensor:
        """The scores before the normalizer, with their biases, −inf where masked: dense.

        >>> import torch, regard
        >>> x = torch.eye(2)
        >>> regard.attend(x, x, x, score=regard.Dot(), mask=regard.Causal())[1].scores()
        tensor([[1., -inf],
                [0., 1.]])
        """
        self._check()
        if self._heads == "mean":
            raise ArgumentError("the mean of several heads has no scores; take them before mean('heads').")
        found = self._scores(self._problem)
        return self._merge(found.expand(*self._problem.lead(), *found.shape[-2:]))

    @property
    @in_own_dtype
    def tau(self) -> Tensor:
        """The one number per row, τ in weights = φ(scores − τ): (…, q). For `Softmax` it is log Σ exp.

        >>> import torch, regard
        >>> weights = regard.attend(torch.eye(2), torch.eye(2), torch.eye(2))[1]
        >>> torch.allclose(weights.tau, weights.scores().logsumexp(-1))
        True
        """
        if self._heads == "mean":
            raise ArgumentError("the mean of several heads has no τ; take it before mean('heads').")
        reader = self._reader()
        if reader is not None:
            return self._merge(reader.problem["tau"].sum(-1))
        found = self._rows_of(1, self.dtype, 0)
        problem = self._problem.checked()
        for at in tiles(problem, tiled.budget(problem)):
            part = problem.part(at)
            found[at.rows_index] = reference.tau(part, self._scores(part)).sum(-1, keepdim=True)
        return self._merge(found)[..., 0]

    def mean(self, over: str) -> "Weights":
        """The mean over the heads, still lazy: `mean("heads")`.

        >>> import torch, regard
        >>> x = torch.randn(8, 5, 4)
        >>> weights = regard.attend(x, x, x)[1]
        >>> torch.allclose(weights.mean("heads").dense(), weights.dense().mean(0))
        True
        """
        if over != "heads":
            raise ArgumentError(f"mean got {over!r}; lazy weights can be averaged over 'heads'.")
        self._needs_heads("mean('heads')")
        return self._like(self._problem, self._lead[:-1], "mean")

    # What it says, a row or a column at a time

    @in_own_dtype
    def topk(self, k: int) -> TopK:
        """The n largest weights of each row, and their keys: (values, keys), each (…, q, n).

        There are fewer where there are fewer keys. A row that sees less than n of them is filled up with
        weight 0 and key −1.

        >>> import torch, regard
        >>> x = torch.eye(3)
        >>> values, keys = regard.attend(x, x, x, score=regard.Dot())[1].topk(1)
        >>> keys.squeeze(-1)
        tensor([0, 1, 2])
        """
        if k < 1:
            raise ArgumentError(f"topk got k={k}; it must be at least 1.")
        k = min(k, self.shape[-1])
        reader = self._reader() if 1 <= k <= _SHORT else None
        best = None if reader is None else reader.topk(k)
        if best is not None:
            return TopK(*map(self._merge, best))
        values, keys = self._rows_of(k, self.dtype, 0), self._rows_of(k, torch.long, -1)
        for at, block, visible in self._blocks_in_sight():
            count = min(k, block.shape[-1])
            best = block.masked_fill(~visible, -math.inf).topk(count, -1)
            seen = visible.gather(-1, best.indices)
            values[at.rows_index][..., :count] = torch.where(seen, best.values, 0.0)
            keys[at.rows_index][..., :count] = torch.where(seen, best.indices + at.keys.start, -1)
        return TopK(self._merge(values), self._merge(keys))

    def argmax(self) -> Tensor:
        """The key with the largest weight, for each row: (…, q); −1 for a row that sees none.

        >>> import torch, regard
        >>> x = torch.eye(3)
        >>> regard.attend(x, x.flip(0), x)[1].argmax()
        tensor([2, 1, 0])
        """
        if not self.shape[-1]:
            return torch.full(self.shape[:-1], -1, device=self.device)
        return self.topk(1).indices[..., 0]

    @in_own_dtype
    def entropy(self) -> Tensor:
        """−Σ w log w of each row, in nats, of the weights as they are: (…, q).

        0 for a row that looks at one key, log n for one that looks at n keys equally; −inf for a row with a
        negative weight, which `Mean` can give.

        >>> import torch, regard
        >>> x = torch.zeros(4, 2)
        >>> regard.attend(x, x, x)[1].entropy().exp()
        tensor([4.0000, 4.0000, 4.0000, 4.0000])
        """
        reader = self._reader()
        summed = None if reader is None else reader.entropy()
        if summed is not None:
            return self._merge(summed)[..., 0]
        found = self._rows_of(1, self.dtype, 0)
        for at, block in self._blocks():
            zero = block == 0  # where the derivative would be infinite
            parts = torch.where(zero, 0.0, torch.special.entr(torch.where(zero, 1.0, block)))
            found[at.rows_index] = parts.sum(-1, keepdim=True)
        return self._merge(found)[..., 0]

    def received(self) -> Tensor:
        """How much each key is looked at, summed over the queries: (…, k).

        >>> import torch, regard
        >>> x = torch.zeros(4, 2)
        >>> regard.attend(x, x, x, mask=regard.Causal())[1].received()
        tensor([2.0833, 1.0833, 0.5833, 0.2500])
        """
        ones = torch.ones(self.shape[-2], dtype=self.dtype, device=self.device)
        return self._transposed_product(ones)

    @in_own_dtype
    def pool(self, rows: int, columns: int, *, within: tuple[slice, slice] | None = None) -> Tensor:
        """A small map of the matrix, (…, rows, columns): the mean weight of each block.

        The blocks are as equal as can be, and there are no more of them than queries and keys.
        within: some queries and keys, as slices: the map is that of this part, which alone is computed.

        >>> import torch, regard
        >>> x = torch.zeros(6, 2)
        >>> weights = regard.attend(x, x, x, mask=regard.Causal())[1]
        >>> weights.pool(2, 2)
        tensor([[0.3333, 0.0000],
                [0.2056, 0.1278]])
        >>> weights.pool(1, 3, within=(slice(1, 2), slice(0, 3)))
        tensor([[0.5000, 0.5000, 0.0000]])
        """
        if rows < 1 or columns < 1:
            raise ArgumentError(f"pool got {rows} rows and {columns} columns; a map has at least 1 of each.")
        return regions.pool(self, (rows, columns), within or (slice(None), slice(None)))

    # A linear operator

    @in_own_dtype
    def __matmul__(self, x: Tensor) -> Tensor:
        """weights · x for x of (k) or (…, k, e), whose leading axes broadcast to those of the weights.

        Where query heads share a key head, x may have as many heads as the keys, like `value`.
        """
        columns, vector = self._operand(x, self.shape[-1])
        reader = None if _wants_gradient(columns) else self._reader()
        found = None if reader is None else reader.product(columns)
        if found is not None:
            return self._merge(found)[..., 0] if vector else self._merge(found)
        careful = not (concrete(columns) and bool(torch.isfinite(columns).all()))
        result = self._rows_of(columns.shape[-1], self.dtype, 0)
        for at, block in self._blocks():
            part = columns[at.keys_index]
            result[at.rows_index] = reference.read(block, part, careful=careful)
        return self._merge(result)[..., 0] if vector else self._merge(result)

    @property
    def T(self) -> "TransposedWeights":
        """The transpose, (…, k, q), as an operator: `weights.T @ x`."""
        return TransposedWeights(self)

    mT = T

    @in_own_dtype
    def _transposed_product(self, x: Tensor) -> Tensor:
        columns, vector = self._operand(x, self.shape[-2])
        reader = None if _wants_gradient(columns) else self._reader()
        found = None if reader is None else reader.transposed_product(columns)
        if found is not None:
            return self._merge(found)[..., 0] if vector else self._merge(found)
        careful = not (concrete(columns) and bool(torch.isfinite(columns).all()))
        result = self._new(self.shape[-1], columns.shape[-1])
        for at, block in self._blocks():
            part = reference.read(block.mT, columns[at.rows_index], careful=careful)
            result[at.keys_index] += part
        return self._merge(result)[..., 0] if vector else self._merge(result)

    # Looking at it

    def show(
        self, *, queries: Sequence[str] | None = None, keys: Sequence[str] | None = None, title: str = ""
    ) -> Any:
        """Look at it: a widget in a notebook; elsewhere a page that opens in the browser, whose path it is.

        queries, keys: the tokens of both sides. Without keys, the queries read each other.

        >>> def look(weights, words):
        ...     return weights.show(queries=words)
        """
        return display.show(self, queries, keys, title)

    def to_html(
        self,
        path: str | os.PathLike[str],
        *,
        queries: Sequence[str] | None = None,
        keys: Sequence[str] | None = None,
        title: str = "",
    ) -> Path:
        """Write an interactive page, one file that opens in any browser; very many weights as block means.

        >>> import torch, regard, tempfile
        >>> x = torch.eye(3)
        >>> regard.attend(x, x, x)[1].to_html(tempfile.mkdtemp() + "/dogs.html", queries=list("abc")).name
        'dogs.html'
        """
        return display.to_html(self, path, queries, keys, title)

    def to_png(
        self,
        path: str | os.PathLike[str],
        *,
        queries: Sequence[str] | None = None,
        keys: Sequence[str] | None = None,
        title: str | None = None,
        dark: bool = False,
    ) -> Path:
        """Draw it: a picture with the tokens on both axes, .png, or .svg or .pdf if the path ends so.

        >>> import torch, regard, tempfile
        >>> x = torch.eye(3)
        >>> regard.attend(x, x, x)[1].to_png(tempfile.mkdtemp() + "/dogs.png", title="Dogs").name
        'dogs.png'
        """
        if keys is None and self.shape[-1] == self.shape[-2]:
            keys = queries  # tokens that read each other
        return display.to_png(self, path, queries, keys, title, dark)

    # Keeping it

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the lazy weights to a safetensors file, whole or not at all.

        >>> import torch, regard, tempfile
        >>> x = torch.eye(3)
        >>> weights = regard.attend(x, x, x)[1]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     again = regard.Weights.load(weights.save(f"{folder}/weights.safetensors"))
        >>> torch.equal(again.dense(), weights.dense())
        True
        """
        self._check()
        return io.write(path, self._problem, self._lead, self._heads, self._rows_together())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Weights":
        """Read what `save` wrote."""
        problem, lead, heads, together = io.read(path)
        return cls(problem, None, lead, heads, together=together)

    def detach(self) -> "Weights":
        """The same weights, cut off from the graph that query and key came from."""
        return self._like(self._problem.map(lambda _, tensor: tensor.detach()), self._lead)

    def to(self, device: torch.device | str) -> "Weights":
        """The same weights on another device."""
        if isinstance(device, torch.dtype):
            raise ArgumentError(
                f"weights.to got {device}; it takes a device. For another dtype: weights.dense().to(…)."
            )
        return self._like(self._problem.map(lambda _, tensor: tensor.to(device)), self._lead)

    def numpy(self) -> NDArray[Any]:
        """All of it, as a numpy array."""
        return self.dense().detach().cpu().numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (
            type(self),
            self.detach()._problem,
            self._lead,
            self._heads,
            self._rows_together(),
        )


class TransposedWeights:
    """The transpose of lazy weights, (…, k, q): an operator to multiply with.

    >>> import torch, regard
    >>> x = torch.randn(3, 4)
    >>> weights = regard.attend(x, x, x)[1]
    >>> torch.allclose(weights.T @ x, weights.dense().T @ x, atol=1e-6)
    True
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    @property
    def shape(self) -> torch.Size:
        *lead, queries, keys = self._weights.shape
        return torch.Size((*lead, keys, queries))

    @property
    def T(self) -> Weights:
        return self._weights

    mT = T

    def dense(self) -> Tensor:
        """All of it, as an ordinary tensor."""
        return self._weights.dense().mT

    def __matmul__(self, x: Tensor) -> Tensor:
        return self._weights._transposed_product(x)

    def __repr__(self) -> str:
        return f"transpose of {self._weights!r}"


def _restore(
    kind: type[Weights], problem: Problem, lead: Sequence[int], heads: io.Heads, together: int
) -> Weights:
    """Weights from a pickle: other kernels may have found its τ, so it is found again when it is needed."""
    return kind(problem, None, lead, heads, together=together)


def _wants_gradient(x: Tensor) -> bool:
    return not concrete(x) or (torch.is_grad_enabled() and x.requires_grad)
