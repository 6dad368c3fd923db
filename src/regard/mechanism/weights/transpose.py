"""The transpose of lazy weights."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from regard.mechanism.weights.index import Index, as_slice, basic_index
from regard.mechanism.weights.tensor_like import TensorLike, dense_arguments

if TYPE_CHECKING:
    from regard.mechanism.weights.matrix import Weights


class TransposedWeights(TensorLike):
    """The transpose of lazy weights, (…, k, q), as a linear operator.

    >>> import torch, regard
    >>> x = torch.randn(3, 4)
    >>> weights = regard.attend(x, x, x)[1]
    >>> torch.allclose(weights.T @ x, weights.dense().T @ x, atol=1e-6)
    True
    """

    def __init__(self, weights: "Weights") -> None:
        self._weights = weights

    @property
    def shape(self) -> torch.Size:
        *lead, queries, keys = self._weights.shape
        return torch.Size((*lead, keys, queries))

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.dtype

    @property
    def device(self) -> torch.device:
        return self._weights.device

    @property
    def requires_grad(self) -> bool:
        return self._weights.requires_grad

    @property
    def T(self) -> "Weights":
        return self._weights

    mT = mH = T

    def dense(self) -> Tensor:
        """Return the full matrix as a dense tensor."""
        return self._weights.dense().mT

    def __getitem__(self, index: Index) -> Tensor:
        """Return part of the matrix as a dense tensor."""
        parts = basic_index(index, self.ndim)
        if parts is None:
            return self.to_dense()[index]
        *lead, rows, columns = (as_slice(i, n) for i, n in zip(parts, self.shape, strict=True))
        part = self._weights[(*lead, columns, rows)].mT
        return part[tuple(0 if isinstance(i, int) else slice(None) for i in parts)]

    def __matmul__(self, x: Any) -> Tensor:
        return self._weights._product(dense_arguments(x), transposed=True)

    def __rmatmul__(self, x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return x @ self.numpy()
        return (self._weights @ x) if x.dim() < 2 else (self._weights @ x.mT).mT

    def __repr__(self) -> str:
        return f"transpose of {self._weights!r}"
