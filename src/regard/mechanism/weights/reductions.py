"""Reductions of a lazy matrix to one value per row, column or block.

A reduction over queries or keys is computed from products or tiles, in linear memory. A reduction over
leading axes alone results in a full matrix and needs the dense weights, except for the mean over heads.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard._util.name_hints import hint_arguments
from regard.errors import ArgumentError
from regard.mechanism.autocast import in_own_dtype
from regard.mechanism.weights import regions, spectrum
from regard.mechanism.weights.index import SelectableMatrix
from regard.mechanism.weights.tensor_like import dense_arguments


class ReducibleMatrix(SelectableMatrix):
    """A lazy matrix with tensor reductions, such as `sum`, and attention measures, such as `entropy`."""

    def sum(self, dim: Any = None, keepdim: bool = False, **options: Any) -> Tensor:
        """Sum over one or more axes, or over all. Memory is linear if the sum is over queries or keys.

        >>> import torch, regard
        >>> x = torch.randn(8, 5, 4)
        >>> weights = regard.attend(x, x, x)[1]
        >>> weights.sum(-1).shape, weights.sum()  # each of the 40 rows sums to 1
        (torch.Size([8, 5]), tensor(40.))
        """
        dim, options = _numpy_options(dim, options)
        axes = self._axes(dim)
        total = None if options else self._sum_over(axes, keepdim)
        return self.to_dense().sum(axes, keepdim, **options) if total is None else total

    def mean(self, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
        """Average over one or more axes, or over all.

        The mean over the heads, `mean("heads")` or `mean(-3)`, is lazy. A mean over queries or keys is
        a tensor, computed in linear memory.

        >>> import torch, regard
        >>> x = torch.randn(8, 5, 4)
        >>> weights = regard.attend(x, x, x)[1]
        >>> torch.allclose(weights.mean("heads").dense(), weights.dense().mean(0))
        True
        >>> weights.mean(-2).shape, weights.mean()
        (torch.Size([8, 5]), tensor(0.2000))
        """
        dim, options = _numpy_options(dim, options)
        if isinstance(dim, str):
            if dim != "heads":
                raise ArgumentError(f"mean got {dim!r}; pass 'heads' or an axis number.")
            self._require_heads("mean('heads')")
            return self._like(self.problem, self._lead[:-1], "mean")
        axes = self._axes(dim)
        if axes == [len(self._lead) - 1] and self.has_heads and not keepdim and not options:
            return self.mean("heads")
        total = None if options else self._sum_over(axes, keepdim)
        if total is None:
            return self.to_dense().mean(axes, keepdim, **options)
        return total / math.prod(self.shape[axis] for axis in axes)

    def argmax(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """Return the position of the largest weight along an axis; argmax(-1) gives a key for each row.

        As in `torch.argmax`, dim=None gives the position in the flattened matrix.

        >>> import torch, regard
        >>> x = torch.eye(3)
        >>> weights = regard.attend(x, x.flip(0), x)[1]
        >>> weights.argmax(-1), weights.argmax()
        (tensor([2, 1, 0]), tensor(2))
        """
        if dim is not None:
            return self.max(dim, keepdim).indices
        rows = self.max(-1)
        row = int(rows.values.argmax())
        return rows.indices.flatten()[row] + row * self.shape[-1]

    def max(self, dim: Any = None, keepdim: bool = False) -> Any:
        """Return the largest weight, or the largest weights along an axis with their positions.

        >>> import torch, regard
        >>> weights = regard.attend(torch.eye(3), torch.eye(3), torch.eye(3))[1]
        >>> weights.max(), weights.max(-1).indices
        (tensor(0.4711), tensor([0, 1, 2]))
        """
        if dim is None:
            return self.max(-1).values.max()
        if not isinstance(dim, int):
            return self.to_dense().max(dense_arguments(dim))
        (axis,) = self._axes(dim)
        if axis < len(self._lead):
            return self.to_dense().max(dim, keepdim)
        if not self.shape[axis]:
            raise IndexError(f"weights of shape {tuple(self.shape)} have no maximum along axis {dim}")
        values, indices = self.topk(1, dim)
        if not keepdim:
            values, indices = values.squeeze(axis), indices.squeeze(axis)
        return torch.return_types.max((values, indices))

    def amax(self, dim: Any = (), keepdim: bool = False) -> Tensor:
        """Return the largest weight over one or more axes, or over all."""
        axes = self._axes(dim)
        inner = [axis for axis in axes if axis >= len(self._lead)]
        if not inner:
            return self.to_dense().amax(axes, keepdim)
        return self.max(inner[-1], keepdim=True).values.amax(axes, keepdim)

    @in_own_dtype
    def svd(self, k: int, *, niter: int = spectrum.ITERATIONS) -> spectrum.SVD:
        """Return the k largest singular values and their vectors: U (…, q, k), S (…, k) and V (…, keys, k).

        Computed by randomized block Krylov iteration (Musco and Musco 2015) in linear memory. The result has
        no gradient. `svd(k).entropy()` is the spectral entropy.

        niter: number of iterations.

        >>> import torch, regard
        >>> x = torch.randn(50, 4)
        >>> weights = regard.attend(x, x, x)[1]
        >>> U, S, V = weights.svd(3)
        >>> torch.allclose(S, torch.linalg.svdvals(weights.dense())[:3], atol=1e-4)
        True
        """
        return spectrum.svd(self, k, niter)

    def svd_lowrank(self, q: int = 6, niter: int = 2, M: Tensor | None = None) -> Any:
        """Return U, S and V, as `torch.svd_lowrank(weights, q)` does."""
        if M is not None:
            return torch.svd_lowrank(self.to_dense(), q, niter, M)
        return spectrum.svd(self, q, niter)

    def linear_operator(self) -> Any:
        """Return a `scipy.sparse.linalg.LinearOperator` for one matrix (q, k), e.g. for `svds` and `eigs`.

        >>> import torch, regard
        >>> x = torch.zeros(4, 2)
        >>> operator = regard.attend(x, x, x)[1].linear_operator()
        >>> operator.shape, operator.dtype
        ((4, 4), dtype('float32'))
        """
        return spectrum.linear_operator(self)

    @hint_arguments
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
        reader = self.reader()
        result = None if reader is None else reader.entropy()
        if result is None:
            result = self._new(self.shape[-2], 1)
            for tile, block in self.tiles():
                zero = block == 0  # the derivative of w log w is infinite at 0
                terms = torch.where(zero, 0.0, torch.special.entr(torch.where(zero, 1.0, block)))
                result[tile.rows_index] = terms.sum(-1, keepdim=True)
        return self._merge_heads(result)[..., 0]

    @in_own_dtype
    def pool(self, rows: int, columns: int, *, within: tuple[slice, slice] | None = None) -> Tensor:
        """Average-pool the matrix to (…, rows, columns), or fewer if the matrix is smaller.

        Block sizes differ by at most one.

        within: slices of queries and keys; only this part is computed and pooled.

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

    def _sum_over(self, axes: Sequence[int], keepdim: bool) -> Tensor | None:
        """Return the sum over the given axes, or None if they are all leading axes."""
        inner = [axis for axis in axes if axis >= len(self._lead)]
        if not inner:
            return None
        over_keys = inner[-1] == self.ndim - 1
        ones = torch.ones(self.shape[inner[-1]], dtype=self.dtype, device=self.device)
        result = self._product(ones, transposed=not over_keys).unsqueeze(inner[-1])
        return result.sum(tuple(axes), keepdim=keepdim)


def _numpy_options(dim: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Convert arguments from NumPy functions: axis replaces dim, and options that are None are dropped."""
    options = dict(options)
    axis = options.pop("axis", None)
    return (dim if axis is None else axis), {name: x for name, x in options.items() if x is not None}
