"""Gradients of attention weights, dA = dO · Vᵀ, as lazy low-rank matrices."""

from collections.abc import Sequence

import torch
from torch import Tensor

from regard._util.text import pluralize
from regard.errors import ArgumentError
from regard.inspection.measures.call_record import CallRecord
from regard.inspection.measures.lazy_products import LowRank, WeightProduct, expand_heads
from regard.mechanism.weights.weights import Weights


class Gradients(LowRank):
    """The gradient of the loss with respect to the weights, dA = dO · Vᵀ, as a lazy matrix (…, h, q, k).

    dO is the gradient of the heads' output. Eager attention computes the same matrix densely. The matrix
    includes masked pairs. With dropout, it is the gradient with respect to the weights after dropout.

    >>> import torch, regard
    >>> layer, x = regard.models.MultiHeadAttention(8, 2), torch.randn(5, 8)
    >>> with regard.watch(layer, gradients=True) as seen:
    ...     layer(x).square().sum().backward()
    >>> seen.gradients()[""]
    Gradients(2 × 5 × 5)
    """

    _weights: Weights | None = None

    @classmethod
    def of(cls, weights: Weights, record: CallRecord) -> "Gradients":
        """Return the gradient of recorded weights."""
        if record.gradient is None:
            raise ArgumentError(_missing(record))
        matrix = cls(record.gradient, expand_heads(record.value, weights))
        matrix._weights = weights.detach()  # otherwise every tile would keep its autograd graph alive
        return matrix

    def rows(self, rows: slice | Tensor) -> "Gradients":
        """Select queries. The result is lazy."""
        part = Gradients(self._left[..., rows, :], self._right)
        part._weights = None if self._weights is None else self._weights.rows(rows)
        return part

    def times_weights(self) -> WeightProduct:
        """Return gradient × weight, ∇A ∘ A, as a lazy matrix.

        Its positive part, `times_weights().positive()`, is the matrix H of Barkan et al. 2021 (Grad-SAM,
        section 3) and, averaged over heads, Ā of Chefer et al. 2021 (eq. 5).

        >>> import torch, regard
        >>> layer, x = regard.models.MultiHeadAttention(8, 2), torch.randn(5, 8)
        >>> with regard.watch(layer, gradients=True) as seen:
        ...     layer(x).square().sum().backward()
        >>> seen.gradients()[""].times_weights().positive()
        WeightProduct(2 × 5 × 5)
        """
        assert self._weights is not None
        dtype = self._weights.dtype
        return WeightProduct(self._weights, self._left.to(dtype), self._right.to(dtype))


def _missing(record: CallRecord) -> str:
    layer = record.layer or "the model"
    if not record.watched:
        return f"gradients: {layer} was recorded without gradients. Use watch(model, gradients=True)."
    if record.generated:
        return (
            f"gradients: {layer} was recorded in generate, which runs without gradients. Watch a call to the "
            "model on the generated tokens: model(sequences), then loss.backward()."
        )
    if not record.differentiable:
        return (
            f"gradients: the output of {layer} does not require gradients. Run the model without no_grad, "
            "and with parameters or inputs that require gradients."
        )
    return f"gradients: no gradient has reached {layer}. Call loss.backward() first."


def relevance(
    products: Sequence[WeightProduct], queries: int | Sequence[int] | Tensor | None = None
) -> Tensor:
    """Compute the relevance of each input token (Chefer et al. 2021, eqs. 5 and 6), in linear memory.

    R ← R + Ā R for each layer, starting from R = I, where Ā is the mean over heads of the positive part of
    gradient × weight. Returns the rows of R for `queries`, or the mean over all rows if `queries` is
    None, as `regard.rollout` does.
    """
    size, last = products[0].shape[-1], products[-1]
    if any(tuple(product.shape[-2:]) != (size, size) for product in products):
        shapes = ", ".join(f"{p.shape[-2]} × {p.shape[-1]}" for p in products)
        raise ArgumentError(f"relevance needs self-attention of equal length in all layers; got {shapes}.")
    batch = last.shape[:-3] if last.ndim > 2 else ()
    chosen = None
    if queries is None:
        result = torch.full((*batch, size, 1), 1 / max(size, 1), dtype=last.dtype, device=last.device)
    else:
        chosen = torch.as_tensor(queries, dtype=torch.long, device=last.device)
        outside = chosen[(chosen < -size) | (chosen >= size)]
        if outside.numel():
            raise ArgumentError(
                f"relevance got query {int(outside[0])}, but the sequence has {pluralize(size, 'token')}; "
                f"the index must be between {-size} and {size - 1}."
            )
        columns = torch.arange(chosen.numel(), device=last.device)
        result = torch.zeros(*batch, size, chosen.numel(), dtype=last.dtype, device=last.device)
        result[..., chosen.flatten(), columns] = 1.0
    for product in reversed(products):
        operand = result.unsqueeze(-3) if product.ndim > 2 else result
        update = product.positive().T @ operand.expand(*product.shape[:-2], *result.shape[-2:])
        result = result + (update.mean(-3) if product.ndim > 2 else update)
    return result[..., 0] if chosen is None or chosen.dim() == 0 else result.mT
