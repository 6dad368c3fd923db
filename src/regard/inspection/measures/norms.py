"""Norms of the vectors that attention adds: ‖α f(x)‖ (Kobayashi et al. 2020)."""

import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.inspection.measures.call_record import CallRecord
from regard.inspection.measures.lazy_products import WeightProduct, expand_heads, row_blocks
from regard.mechanism.weights.weights import Weights


class Norms(WeightProduct):
    """‖α f(x)‖: the norm of the vector that each key adds to each query, as a lazy matrix (…, h, q, k).

    f(x) = (x W_V + b_V) W_O is the value of a key after the output projection of its head (Kobayashi et al.
    2020, section 3), so ‖α f(x)‖ = α ‖f(x)‖: each column of the weights is scaled.

    >>> import torch, regard
    >>> layer, x = regard.models.MultiHeadAttention(8, 2), torch.randn(5, 8)
    >>> with regard.watch(layer, values=True) as seen:
    ...     output = layer(x)
    >>> seen.norms()[""]
    Norms(2 × 5 × 5)
    """

    def __init__(self, weights: Weights, record: CallRecord, *, project: bool = True) -> None:
        weights = weights.detach()  # otherwise every tile would keep its autograd graph alive
        self._value = expand_heads(record.value, weights).to(weights.dtype)  # … h k e
        self._projection = _projection(record, self._value) if project else None
        vectors = self._value
        if self._projection is not None:
            # ‖v Wᵀ‖ = ‖v Rᵀ‖ with W = Q R, so vectors have e instead of m components
            triangle = torch.linalg.qr(self._projection.float(), mode="r").R
            vectors = vectors @ triangle.mT.to(vectors.dtype)
        norms = vectors.norm(dim=-1, keepdim=True)  # … h k 1
        super().__init__(weights, norms.new_ones(weights.shape[-2], 1), norms)

    @property
    def values(self) -> Tensor:
        """‖f(x)‖ of each key, (…, h, k).

        >>> import torch, regard
        >>> layer, x = regard.models.SelfAttention(), torch.eye(3)
        >>> with regard.watch(layer, values=True) as seen:
        ...     output = layer(x)
        >>> seen.norms(project=False)[""].values
        tensor([[1., 1., 1.]])
        """
        return self._right[..., 0]

    def _product(self, x: Tensor, *, transposed: bool = False) -> Tensor:
        """Return norms · x, or normsᵀ · x, with the kernels: the columns of the weights are only scaled."""
        columns = (x[:, None] if x.dim() == 1 else x).to(self.dtype)
        if transposed:
            result = self._right * (self._weights.T @ columns)
        else:
            result = self._weights @ (self._right * columns)
        return result[..., 0] if x.dim() == 1 else result

    def summed(self) -> Tensor:
        """Return ‖Σ_h α f(x)‖, the norm of the sum over heads, as a dense tensor (…, q, k).

        Kobayashi et al. 2020, section 3. Use `summed_rows` for some of the queries.
        """
        return self.summed_rows(slice(None))

    def summed_rows(self, rows: slice | Tensor) -> Tensor:
        """Return ‖Σ_h α f(x)‖ for some queries, (…, rows, k), in memory linear in the keys.

        >>> import torch, regard
        >>> layer, x = regard.models.MultiHeadAttention(8, 2), torch.randn(5, 8)
        >>> with regard.watch(layer, values=True) as seen:
        ...     output = layer(x)
        >>> seen.norms()[""].summed_rows(slice(0, 1)).shape
        torch.Size([1, 5])
        """
        if not self._weights.has_heads:
            raise ArgumentError("summed() needs a heads axis; these weights belong to one head.")
        gram = self._gram()
        weights = self._weights.rows(rows)
        *lead, heads, queries, keys = weights.shape
        result = gram.new_zeros(*lead, queries, keys)
        for block in row_blocks(queries, heads * keys * max(result.shape[0] if lead else 1, 1)):
            dense = weights.rows(block).dense()
            squares = torch.einsum("...hqk,...khg,...gqk->...qk", dense, gram, dense)
            result[..., block, :] = squares.clamp(min=0).sqrt()
        return result

    def _gram(self) -> Tensor:
        """Return, for each key, the dot products between the vectors of all heads, (…, k, h, h)."""
        value = self._value
        heads, keys, _ = value.shape[-3:]
        gram = value.new_zeros(*value.shape[:-3], keys, heads, heads)
        width = value.shape[-1] if self._projection is None else self._projection.shape[-2]
        for block in row_blocks(keys, heads * width):
            vectors = value[..., block, :]
            if self._projection is not None:
                vectors = vectors @ self._projection.mT.to(vectors.dtype)  # … h k m
            vectors = vectors.transpose(-3, -2)
            gram[..., block, :, :] = vectors @ vectors.mT
        return gram


def _projection(record: CallRecord, value: Tensor) -> Tensor:
    """Return the output projection of each head, (h, m, e)."""
    if record.projection is None:
        raise ArgumentError(
            f"norms: no output projection was recognized in {record.layer or 'the model'}. For the norms of "
            "the values before the projection, use norms(project=False)."
        )
    width = value.shape[-1]
    heads = record.projection.weight.shape[-1] // width
    weight = record.projection.per_head(heads, width)
    return weight if record.heads is None else weight[list(record.heads)]
