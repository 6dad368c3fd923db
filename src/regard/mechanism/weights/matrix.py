"""Lazy attention weights (…, q, k) in linear memory.

`Weights` holds query, key, score, mask and the row statistic τ, and recomputes any part of the matrix exactly
on demand. It is also a linear operator: `weights @ value` is the attention output.
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
from regard.mechanism.weights.index import Index, as_slice, basic_index
from regard.mechanism.weights.lazy_matrix import LazyMatrix

_MAX_KERNEL_K = 64  # largest k that the topk kernel supports


class TopK(NamedTuple):
    """The k largest weights of each row and their keys.

    values: (…, q, k), in descending order, padded with 0 if a row sees fewer than k keys.
    indices: (…, q, k), the key of each value, padded with −1 if a row sees fewer than k keys.

    >>> import torch, regard
    >>> x = torch.eye(3)
    >>> regard.attend(x, x, x)[1].topk(1).indices.squeeze(-1)
    tensor([0, 1, 2])
    """

    values: Tensor
    indices: Tensor


class Weights(LazyMatrix):
    """Attention weights (…, q, k), computed on demand in linear memory.

    Returned by `attend`, `watch` and `Weights.load`.

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

    # Memory

    @property
    def held(self) -> int:
        """Memory used by query, key, mask and τ, in bytes. It is linear in the sequence length.

        The autograd graph of query and key is not counted; value is not stored.

        >>> import torch, regard
        >>> x = torch.randn(1000, 16)
        >>> regard.attend(x, x, x)[1].held  # dense: 4,000,000
        72000
        """
        storages = {t.untyped_storage()._cdata: t for t in self.problem.tensors.values()}
        return sum(t.untyped_storage().nbytes() for t in storages.values())

    def __repr__(self) -> str:
        dense = self.numel() * self.dtype.itemsize
        mean = ", mean over heads" if self.is_head_mean else ""
        config = self.problem.config
        normalize = "Softmax1" if isinstance(config.normalize, Softmax1) else repr(config.normalize)
        return (
            f"Weights({' × '.join(map(str, self.shape))}, {str(self.dtype).removeprefix('torch.')}: "
            f"{config.score}, {normalize}{mean}; holds {format_bytes(self.held)}, "
            f"dense {format_bytes(dense)})"
        )

    # Reading parts

    @in_own_dtype
    def __getitem__(self, index: Index) -> Tensor:
        """Return part of the matrix as a dense tensor. Supports the same indices as a tensor."""
        parts = basic_index(index, self.ndim)
        if parts is None:
            return self._advanced_index(index)
        *lead, rows, columns = (as_slice(i, n) for i, n in zip(parts, self.shape, strict=True))
        result = self.select(lead, rows)._dense_columns(columns)
        return result[tuple(0 if isinstance(i, int) else slice(None) for i in parts)]

    @in_own_dtype
    def dense(self) -> Tensor:
        """Return the full matrix as a dense tensor, with q × k numbers per head."""
        return self._dense_columns(slice(None))

    @in_own_dtype
    def scores(self) -> Tensor:
        """Return the scores as a dense tensor, including biases, with −inf for masked keys.

        >>> import torch, regard
        >>> x = torch.eye(2)
        >>> regard.attend(x, x, x, score=regard.Dot(), mask=regard.Causal())[1].scores()
        tensor([[1., -inf],
                [0., 1.]])
        """
        self.check_inputs()
        if self.is_head_mean:
            raise ArgumentError("a mean over heads has no scores; call scores() before mean('heads').")
        scores = self._scores(self.problem)
        return self._merge_heads(scores.expand(*self.problem.lead(), *scores.shape[-2:]))

    @property
    @in_own_dtype
    def tau(self) -> Tensor:
        """The row statistic τ in weights = φ(scores − τ): (…, q). For `Softmax`, τ = log Σ exp(scores).

        >>> import torch, regard
        >>> weights = regard.attend(torch.eye(2), torch.eye(2), torch.eye(2))[1]
        >>> torch.allclose(weights.tau, weights.scores().logsumexp(-1))
        True
        """
        if self.is_head_mean:
            raise ArgumentError("a mean over heads has no τ; read tau before mean('heads').")
        reader = self._reader()
        if reader is not None:
            return self._merge_heads(reader.problem["tau"].sum(-1))
        result = self._new(self.shape[-2], 1)
        problem = self.problem.nan_checked()
        for tile in tiles(problem, tiled.budget(problem)):
            part = problem.part(tile)
            result[tile.rows_index] = reference.tau(part, self._scores(part)).sum(-1, keepdim=True)
        return self._merge_heads(result)[..., 0]

    def mean(self, over: str) -> "Weights":
        """Average over the heads: `mean("heads")`. The result is lazy.

        >>> import torch, regard
        >>> x = torch.randn(8, 5, 4)
        >>> weights = regard.attend(x, x, x)[1]
        >>> torch.allclose(weights.mean("heads").dense(), weights.dense().mean(0))
        True
        """
        if over != "heads":
            raise ArgumentError(f"mean got {over!r}; lazy weights can only be averaged over 'heads'.")
        self._require_heads("mean('heads')")
        return self._like(self.problem, self._lead[:-1], "mean")

    # Reductions

    @in_own_dtype
    def topk(self, k: int) -> TopK:
        """Return the k largest weights of each row and their keys: values and indices, each (…, q, k).

        A row that sees fewer than k keys is padded with values of 0 and indices of −1.

        >>> import torch, regard
        >>> x = torch.eye(3)
        >>> values, indices = regard.attend(x, x, x, score=regard.Dot())[1].topk(1)
        >>> indices.squeeze(-1)
        tensor([0, 1, 2])
        """
        keys = self.shape[-1]
        if not min(keys, 1) <= k <= keys:
            raise ArgumentError(
                f"topk got k={k} for weights with {keys} keys; k must be between 1 and the number of keys: "
                "topk(min(k, weights.shape[-1]))."
            )
        reader = self._reader() if k <= _MAX_KERNEL_K else None
        best = None if reader is None else reader.topk(k)
        if best is not None:
            return TopK(*map(self._merge_heads, best))
        values = self._new(self.shape[-2], k)
        indices = self._new(self.shape[-2], k, fill=-1, dtype=torch.long)
        for tile, block, visible in self._tiles_with_visible():
            size = min(k, block.shape[-1])
            best = block.masked_fill(~visible, -math.inf).topk(size, -1)
            kept = visible.gather(-1, best.indices)
            values[tile.rows_index][..., :size] = torch.where(kept, best.values, 0.0)
            indices[tile.rows_index][..., :size] = torch.where(kept, best.indices + tile.keys.start, -1)
        return TopK(self._merge_heads(values), self._merge_heads(indices))

    def argmax(self) -> Tensor:
        """Return the key with the largest weight in each row, (…, q), or −1 for a row that sees no keys.

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
        """Return the entropy −Σ w log w of each row, in nats: (…, q).

        The entropy is 0 for a row with a single nonzero weight of 1, log n for n equal weights, and −inf for
        a row with a negative weight (possible with `Mean`).

        >>> import torch, regard
        >>> x = torch.zeros(4, 2)
        >>> regard.attend(x, x, x)[1].entropy().exp()
        tensor([4.0000, 4.0000, 4.0000, 4.0000])
        """
        reader = self._reader()
        entropy = None if reader is None else reader.entropy()
        if entropy is None:
            entropy = self._new(self.shape[-2], 1)
            for tile, block in self.tiles():
                zero = block == 0  # the derivative would be infinite
                terms = torch.where(zero, 0.0, torch.special.entr(torch.where(zero, 1.0, block)))
                entropy[tile.rows_index] = terms.sum(-1, keepdim=True)
        return self._merge_heads(entropy)[..., 0]

    def received(self) -> Tensor:
        """Return the total weight that each key receives, summed over the queries: (…, k).

        >>> import torch, regard
        >>> x = torch.zeros(4, 2)
        >>> regard.attend(x, x, x, mask=regard.Causal())[1].received()
        tensor([2.0833, 1.0833, 0.5833, 0.2500])
        """
        ones = torch.ones(self.shape[-2], dtype=self.dtype, device=self.device)
        return self._product(ones, transposed=True)

    @in_own_dtype
    def pool(self, rows: int, columns: int, *, within: tuple[slice, slice] | None = None) -> Tensor:
        """Average-pool the matrix to (…, rows, columns), or less if the matrix is smaller.

        Block sizes differ by at most one. within: slices of queries and keys; only this part is computed and
        pooled.

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
            raise ArgumentError(f"pool got rows={rows} and columns={columns}; both must be at least 1.")
        return regions.pool(self, (rows, columns), within or (slice(None), slice(None)))

    # Products

    def __matmul__(self, x: Tensor) -> Tensor:
        """Return weights · x, where x has shape (k) or (…, k, e). Leading axes broadcast.

        With grouped-query attention, x may have one head per key head, like `value`.
        """
        return self._product(x)

    @property
    def T(self) -> "TransposedWeights":
        """The transpose (…, k, q) as a linear operator, used as `weights.T @ x`."""
        return TransposedWeights(self)

    mT = T

    @in_own_dtype
    def _product(self, x: Tensor, *, transposed: bool = False) -> Tensor:
        queries, keys = self.shape[-2:]
        columns, is_vector = self._operand(x, queries if transposed else keys)
        reader = None if _requires_grad(columns) else self._reader()
        result = None
        if reader is not None:
            result = reader.transposed_product(columns) if transposed else reader.product(columns)
        if result is None:
            nan_safe = not (concrete(columns) and bool(torch.isfinite(columns).all()))
            result = self._new(keys if transposed else queries, columns.shape[-1])
            for tile, block in self.tiles():
                if transposed:
                    part = reference.weighted_sum(block.mT, columns[tile.rows_index], nan_safe=nan_safe)
                    result[tile.keys_index] += part
                else:
                    part = reference.weighted_sum(block, columns[tile.keys_index], nan_safe=nan_safe)
                    result[tile.rows_index] = part
        result = self._merge_heads(result)
        return result[..., 0] if is_vector else result

    # Display

    def show(
        self, *, queries: Sequence[str] | None = None, keys: Sequence[str] | None = None, title: str = ""
    ) -> Any:
        """Show an interactive view as a widget in a notebook, otherwise as a page that opens in the browser.

        queries, keys: token labels. If keys is None, queries labels both axes (self-attention).
        Returns the widget, or the path of the page.

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
        """Write the interactive view as one HTML file. Large matrices are average-pooled.

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
        """Draw a heatmap with token labels. The extension of `path` must be .png, .svg or .pdf.

        >>> import torch, regard, tempfile
        >>> x = torch.eye(3)
        >>> regard.attend(x, x, x)[1].to_png(tempfile.mkdtemp() + "/dogs.png", title="Dogs").name
        'dogs.png'
        """
        if keys is None and self.shape[-1] == self.shape[-2]:
            keys = queries  # self-attention
        return display.to_png(self, path, queries, keys, title, dark)

    # Saving, moving and converting

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Save the lazy weights to a safetensors file, atomically.

        >>> import torch, regard, tempfile
        >>> x = torch.eye(3)
        >>> weights = regard.attend(x, x, x)[1]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     loaded = regard.Weights.load(weights.save(f"{folder}/weights.safetensors"))
        >>> torch.equal(loaded.dense(), weights.dense())
        True
        """
        self.check_inputs()
        return io.write(path, self.problem, self._lead, self._heads, self._rows_per_key_head())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Weights":
        """Load weights from a file written by `save`."""
        problem, lead, heads, rows = io.read(path)
        return cls(problem, None, lead, heads, rows_per_key_head=rows)

    def detach(self) -> "Weights":
        """Return these weights, detached from the autograd graph of query and key."""
        return self._like(self.problem.map(lambda _, tensor: tensor.detach()), self._lead)

    def to(self, device: torch.device | str) -> "Weights":
        """Return these weights on another device."""
        if isinstance(device, torch.dtype):
            raise ArgumentError(
                f"weights.to got {device}; pass a device. For a dtype, use weights.dense().to({device})."
            )
        return self._like(self.problem.map(lambda _, tensor: tensor.to(device)), self._lead)

    def numpy(self) -> NDArray[Any]:
        """Return the full matrix as a NumPy array."""
        return self.dense().detach().cpu().numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (
            type(self),
            self.detach().problem,
            self._lead,
            self._heads,
            self._rows_per_key_head(),
        )


class TransposedWeights:
    """The transpose of lazy weights, (…, k, q), as a linear operator.

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
        """Return the full matrix as a dense tensor."""
        return self._weights.dense().mT

    def __matmul__(self, x: Tensor) -> Tensor:
        return self._weights._product(x, transposed=True)

    def __repr__(self) -> str:
        return f"transpose of {self._weights!r}"


def _restore(
    cls: type[Weights], problem: Problem, lead: Sequence[int], heads: io.Heads, rows_per_key_head: int
) -> Weights:
    """Unpickle weights. τ may come from other kernels and is therefore recomputed on first use."""
    return cls(problem, None, lead, heads, rows_per_key_head=rows_per_key_head)


def _requires_grad(x: Tensor) -> bool:
    return not concrete(x) or (torch.is_grad_enabled() and x.requires_grad)
