"""The transpose of a lazy matrix."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.mechanism.weights.tensor_like import Index, TensorLike, dense_arguments, split_index


class TransposedWeights(TensorLike):
    """The transpose of lazy weights, (…, k, q), as a linear operator.

    >>> import torch, regard
    >>> x = torch.randn(3, 4)
    >>> weights = regard.attend(x, x, x)[1]
    >>> torch.allclose(weights.T @ x, weights.dense().T @ x, atol=1e-6)
    True
    """

    def __init__(self, matrix: Any) -> None:
        """Wrap a lazy matrix (…, q, k), which must implement `_product(x, transposed=True)`."""
        self._matrix = matrix

    @property
    def shape(self) -> torch.Size:
        *lead, queries, keys = self._matrix.shape
        return torch.Size((*lead, keys, queries))

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._matrix.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        device: torch.device = self._matrix.device
        return device

    @property
    def requires_grad(self) -> bool:
        return bool(self._matrix.requires_grad)

    @property
    def T(self) -> Any:
        return self._matrix

    mT = mH = T

    def dense(self) -> Tensor:
        """Return the full matrix as a dense tensor."""
        dense: Tensor = self._matrix.dense().mT
        return dense

    def __getitem__(self, index: Index) -> Tensor:
        """Return part of the matrix as a dense tensor."""
        split = split_index(index, self.shape)
        if split is None:
            return self.to_dense()[index]
        part: Tensor = self._matrix[(*split.lead, split.columns, split.rows)].mT
        return part[split.dropped]

    def __matmul__(self, x: Any) -> Tensor:
        product: Tensor = self._matrix._product(dense_arguments(x), transposed=True)
        return product

    def __rmatmul__(self, x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return x @ self.numpy()
        return (self._matrix @ x) if x.dim() < 2 else (self._matrix @ x.mT).mT

    def __repr__(self) -> str:
        return f"transpose of {self._matrix!r}"
