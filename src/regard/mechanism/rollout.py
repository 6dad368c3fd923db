"""Attention rollout: how much of each input reaches a position after several layers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.errors import ArgumentError, ShapeError
from regard.mechanism.weights.matrix import Weights


def rollout(
    layers: Sequence[Weights], queries: int | Sequence[int] | Tensor | None = None, *, residual: float = 0.5
) -> Tensor:
    """How much each input token contributes to positions of the last layer: Abnar & Zuidema 2020, eq. 1.

    Each layer passes on `residual` of a token itself and 1 − residual of what its heads, averaged, look
    at; the layers are multiplied, first layer first. Done with vectors, not matrices: memory is linear.

    queries: one position → (…, n); several → (…, m, n); None → the mean over all positions, (…, n).

    >>> import torch, regard
    >>> x = torch.randn(2, 6, 4)  # 2 heads
    >>> layers = [regard.attend(x, x, x, mask=regard.Causal())[1] for _ in range(3)]
    >>> regard.rollout(layers, queries=0)
    tensor([1., 0., 0., 0., 0., 0.])
    """
    if isinstance(layers, Weights):
        raise ArgumentError(f"rollout got one Weights of {tuple(layers.shape)}; it takes a list of layers.")
    if not layers:
        raise ArgumentError("rollout got no layers; it needs at least one.")
    if not 0 <= residual <= 1:
        raise ArgumentError(f"rollout got residual={residual}; it is a share, between 0 and 1.")
    size = layers[0].shape[-1]
    for number, layer in enumerate(layers):
        if tuple(layer.shape[-2:]) != (size, size):
            raise ShapeError(
                f"layer {number} has weights of {layer.shape[-2]} × {layer.shape[-1]} and layer 0 has {size} "
                "keys; rollout needs self-attention of one length throughout."
            )
    start = layers[-1]
    if queries is None:
        mixed = torch.full((size, 1), 1 / max(size, 1), dtype=start.dtype, device=start.device)
    else:
        chosen = torch.as_tensor(queries, dtype=torch.long, device=start.device)
        outside = chosen[(chosen < -size) | (chosen >= size)]
        if outside.numel():
            raise ArgumentError(
                f"rollout got the query {int(outside[0])} and the layers have {size} tokens; "
                f"it must lie between {-size} and {size - 1}."
            )
        mixed = torch.zeros(size, chosen.numel(), dtype=start.dtype, device=start.device)
        mixed[chosen.flatten(), torch.arange(chosen.numel(), device=start.device)] = 1  # a column per query
    for layer in reversed(layers):
        averaged = layer.mean("heads") if layer.has_heads else layer
        mixed = residual * mixed + (1 - residual) * (averaged.T @ mixed)
    return mixed[..., 0] if queries is None or chosen.dim() == 0 else mixed.mT
