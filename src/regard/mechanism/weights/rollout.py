"""Attention rollout over several layers."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from regard._util.text import pluralize
from regard.errors import ArgumentError, ShapeError
from regard.mechanism.weights.weights import Weights


def rollout(
    layers: Sequence[Weights], queries: int | Sequence[int] | Tensor | None = None, *, residual: float = 0.5
) -> Tensor:
    """Compute attention rollout: how much each input token contributes to a position in the last layer.

    Rollout is the product over layers of residual · I + (1 − residual) · W, where W is the mean of the
    weights over heads (Abnar & Zuidema 2020, eq. 1). Memory is linear in the number of tokens.

    queries: one position, for a result (…, n); m positions, for (…, m, n); or None, for the mean over all
        positions, (…, n).
    residual: weight of the residual connection.

    >>> import torch, regard
    >>> x = torch.randn(2, 6, 4)  # 2 heads
    >>> layers = [regard.attend(x, x, x, mask=regard.Causal())[1] for _ in range(3)]
    >>> regard.rollout(layers, queries=0)
    tensor([1., 0., 0., 0., 0., 0.])
    """
    if isinstance(layers, Mapping):
        raise ArgumentError(
            "rollout got a mapping of layers; use seen.rollout(), or rollout(list(seen.values()))."
        )
    if isinstance(layers, Weights):
        raise ArgumentError(
            f"rollout got one Weights of shape {tuple(layers.shape)}; pass a list, one Weights per layer."
        )
    if not layers:
        raise ArgumentError("rollout got no layers; pass at least one.")
    if not 0 <= residual <= 1:
        raise ArgumentError(f"rollout got residual={residual}; it must be between 0 and 1.")
    size = layers[0].shape[-1]
    for index, layer in enumerate(layers):
        if tuple(layer.shape[-2:]) != (size, size):
            raise ShapeError(
                f"layer {index} has weights of shape {layer.shape[-2]} × {layer.shape[-1]}, but layer 0 has "
                f"{pluralize(size, 'key')}; rollout needs self-attention of the same length in all layers."
            )
    last = layers[-1]
    if queries is None:
        contribution = torch.full((size, 1), 1 / max(size, 1), dtype=last.dtype, device=last.device)
    else:
        chosen = torch.as_tensor(queries, dtype=torch.long, device=last.device)
        outside = chosen[(chosen < -size) | (chosen >= size)]
        if outside.numel():
            raise ArgumentError(
                f"rollout got query {int(outside[0])}, but the sequence has {pluralize(size, 'token')}; the "
                f"index must be between {-size} and {size - 1}."
            )
        contribution = torch.zeros(size, chosen.numel(), dtype=last.dtype, device=last.device)
        columns = torch.arange(chosen.numel(), device=last.device)
        contribution[chosen.flatten(), columns] = 1
    for layer in reversed(layers):
        averaged = layer.mean("heads") if layer.has_heads else layer
        contribution = residual * contribution + (1 - residual) * (averaged.T @ contribution)
    return contribution[..., 0] if queries is None or chosen.dim() == 0 else contribution.mT
