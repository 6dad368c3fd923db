"""Score keys for eviction from key-value caches, using lazy weights instead of eager attention."""

import torch
from torch import Tensor
from torch.nn import functional as F

from regard._util.text import pluralize
from regard.errors import ArgumentError
from regard.mechanism.weights.weights import Weights

METHODS = ("h2o", "snapkv", "tova")


@torch.no_grad()
def key_scores(
    weights: Weights, method: str = "h2o", *, window: int = 32, kernel_size: int = 5, pooling: str = "mean"
) -> Tensor:
    """Return a score for each key of each key head, (…, g, k); the keys with the lowest scores are evicted.

    method: one of
        "h2o": the weight that a key has received from all queries (Zhang et al. 2023).
        "snapkv": the mean weight from the last `window` queries, pooled over `kernel_size` neighboring keys;
            the keys of the window itself are always kept, so their score is inf (Li et al. 2024).
        "tova": the weight from the last query, averaged over heads (Oren et al. 2024).
    pooling: "mean" or "max", for "snapkv". Query heads that share a key head are averaged.

    >>> import torch, regard
    >>> from regard.inspection.measures.key_scores import key_scores
    >>> x = torch.zeros(4, 2)
    >>> key_scores(regard.attend(x, x, x, mask=regard.Causal())[1], "h2o")
    tensor([2.0833, 1.0833, 0.5833, 0.2500])
    """
    if method not in METHODS:
        raise ArgumentError(f"key_scores got method={method!r}; pass one of {', '.join(METHODS)}.")
    if method == "h2o":
        return _per_key_head(weights, weights.received())
    if method == "tova":
        scores = weights.rows(slice(-1, None)).received()
        if not weights.has_heads:
            return scores
        groups = weights.problem.lead()[-2]
        return scores.mean(-2, keepdim=True).expand(*scores.shape[:-2], groups, -1)
    return _snapkv(weights, window, kernel_size, pooling)


def _snapkv(weights: Weights, window: int, kernel_size: int, pooling: str) -> Tensor:
    queries, keys = weights.shape[-2:]
    if pooling not in ("mean", "max"):
        raise ArgumentError(f'key_scores got pooling={pooling!r}; pass "mean" or "max".')
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise ArgumentError(f"key_scores got kernel_size={kernel_size}; pass a positive odd number.")
    if not 0 < window < keys or window > queries:
        largest = min(queries, keys - 1)
        bounds = f"it must be between 1 and {largest}"
        if largest < 1:
            bounds = 'method "snapkv" needs at least one query and two keys'
        raise ArgumentError(
            f"key_scores got window={window} for {pluralize(queries, 'query')} and {pluralize(keys, 'key')}; "
            f"{bounds}."
        )
    received = weights.rows(slice(queries - window, queries)).received()[..., : keys - window] / window
    flat = received.reshape(-1, 1, keys - window)
    if pooling == "mean":
        pooled = F.avg_pool1d(flat, kernel_size, stride=1, padding=kernel_size // 2)
    else:
        pooled = F.max_pool1d(flat, kernel_size, stride=1, padding=kernel_size // 2)
    scores = _per_key_head(weights, pooled.reshape(received.shape))
    return F.pad(scores, (0, window), value=float("inf"))


def _per_key_head(weights: Weights, scores: Tensor) -> Tensor:
    """Average the scores (…, h, k) over the query heads of each key head: (…, g, k)."""
    if not weights.has_heads:
        return scores
    groups, per_group = weights.problem.lead()[-2:]
    return scores.unflatten(-2, (groups, per_group)).mean(-2)
