"""Tiled implementation: runs the reference on blocks of query rows, in linear memory, on any device.

A tile contains all keys visible to its rows, so any normalizer can be applied to a single tile. The backward
pass recomputes the scores of a tile and applies the formula in `gradients`. No q × k tensor is created.
"""

import math

import torch
from torch import Tensor

from regard.mechanism import reference
from regard.mechanism.biases import sum_diagonals
from regard.mechanism.call.problem import Problem, empty_results, kind, tiles
from regard.mechanism.scores import ACTIVATIONS
from regard.mechanism.torch_state import FakeTensor

# Scores per tile. Tiles of 1 to 16 MiB were equally fast on two cores with 2 MiB of L2 cache each.
TILE = 2**20


def budget(problem: Problem) -> int:
    """Return the maximum number of scores per tile."""
    if problem["query"].is_meta or isinstance(problem["query"], FakeTensor):
        return 2**62  # meta and fake tensors use no memory: do not divide the problem
    width = 1 if problem.config.family == "dot" else max(problem["query"].shape[-1], 1)
    return max(TILE // width, 1)


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return the output (…, g, r, q, e) and the row statistic τ (…, g, r, q, 2)."""
    problem = problem.nan_checked()
    output, statistic = empty_results(problem)
    for at in tiles(problem, budget(problem)):
        tile = problem.part(at)
        scores = reference.scores(tile)
        tau = reference.tau(tile, scores)
        weights = reference.weights(tile, scores, tau)
        output[at.rows_index] = reference.product(weights, tile["value"], nan_safe=problem.config.nan_safe)
        statistic[at.rows_index] = tau
    return output, statistic


def backward(
    problem: Problem, tau: Tensor, grad: Tensor, wanted: set[str], *, refit: bool = False
) -> dict[str, Tensor]:
    """Return the gradients of the tensors named in `wanted`, given the gradient of the output.

    refit: recompute τ. Required if τ comes from the kernels, which round scores differently from torch.
    """
    problem = problem.nan_checked(grad, tau)
    grads = {name: torch.zeros_like(problem[name]) for name in wanted}
    for at in tiles(problem, budget(problem)):
        tile_tau = None if refit else tau[at.rows_index]
        tile_grads = gradients(problem.part(at), tile_tau, grad[at.rows_index], wanted)
        for name, part in tile_grads.items():
            view = grads[name][at.slices(name, grads[name].shape)]
            view += part.sum_to_size(view.shape)
    return grads


def gradients(tile: Problem, tau: Tensor | None, grad: Tensor, wanted: set[str]) -> dict[str, Tensor]:
    """Return the gradients of one tile.

    tau: row statistic; computed if None.

    With dP = dO · valueᵀ (after dropout) and g = φ'(scores − τ) / divisor:

        rows that sum to one:   dS = g ∘ (dP − c),  c = Σ_j g dP / Σ_j g     (including the sink)
        other rows:             dS = g ∘ dP
        sink:                   −g_sink · c, because the value of the sink is zero
    """
    nan_safe, normalize = tile.config.nan_safe, tile.config.normalize
    grads: dict[str, Tensor] = {}
    scores = reference.scores(tile)
    tau = reference.tau(tile, scores) if tau is None else tau
    visible = scores != -math.inf
    kept = reference.dropout_factors(tile, scores.dtype) if tile.config.dropout else None

    if nan_safe:  # skip NaN rows whose output gradient is zero
        skipped = (grad == 0).all(-1, keepdim=True) & reference.invalid_rows(scores)
        scores, visible = torch.where(skipped, -math.inf, scores), visible & ~skipped
        tau = torch.where(skipped, 0.0, tau)
    if "value" in wanted:
        grads["value"] = _transposed(reference.weights(tile, scores, tau), grad, nan_safe)
    if wanted == {"value"}:
        return grads

    x = reference.center(scores, tau)
    g = torch.where(visible, normalize.slope(x), 0.0)
    divisor = normalize.divisor(x, visible)
    g = g if divisor is None else g / divisor
    dP = reference.product(grad, tile["value"].mT, nan_safe=nan_safe)
    used = g != 0 if kept is None else (g != 0) & (kept != 0)
    dP = torch.where(used, dP if kept is None else dP * kept, 0.0)
    if normalize.sums_to_one:
        total, sink = g.sum(-1, keepdim=True), tile.get("sink")
        if sink is not None:
            at_sink = normalize.slope(sink - tau[..., :1] - tau[..., 1:])
            total = total + at_sink
        c = (g * dP).sum(-1, keepdim=True) / torch.where(total == 0, 1.0, total)
        if sink is not None and "sink" in wanted:
            grads["sink"] = -(at_sink * c).sum(-2, keepdim=True)
        dP = dP - c
    dS = torch.where(g != 0, g * dP, 0.0)

    for name in wanted:
        if kind(name) == "bias":
            grads[name] = dS
        elif kind(name) == "line":
            grads[name] = _line_gradient(tile, dS, tile[name])
    grads.update(_score_gradients(tile, dS, wanted))
    return {name: grads[name] for name in wanted}


def _line_gradient(tile: Problem, dS: Tensor, line: Tensor) -> Tensor:
    """Sum dS along its diagonals and pad the sums to all distances."""
    offset = tile.first_key + tile.config.queries - tile.first_row - tile.queries
    sums = sum_diagonals(dS)
    return torch.nn.functional.pad(sums, (offset, line.shape[-1] - offset - sums.shape[-1])).unsqueeze(-2)


def _score_gradients(tile: Problem, dS: Tensor, wanted: set[str]) -> dict[str, Tensor]:
    """Backpropagate from the scores to query, key and vector."""
    query, key, nan_safe = tile["query"], tile["key"], tile.config.nan_safe
    if tile.config.softcap is not None:
        capped = torch.tanh(reference.raw_scores(tile) / tile.config.softcap)
        dS = torch.where(dS == 0, 0.0, dS * (1 - capped.square()))
    if tile.config.family == "dot":
        dS = dS if tile.config.scale == 1.0 else dS * tile.config.scale
        return {
            **({"query": reference.product(dS, key, nan_safe=nan_safe)} if "query" in wanted else {}),
            **({"key": _transposed(dS, query, nan_safe)} if "key" in wanted else {}),
        }
    sum_ = query.unsqueeze(-2) + key.unsqueeze(-3)  # … q k d
    activation = ACTIVATIONS[tile.config.family]
    hidden = activation.apply(sum_)
    slope = activation.slope(sum_, hidden)
    # torch.where instead of a product, because a masked pair may contain NaN, and 0 · NaN is NaN
    pair = dS.unsqueeze(-1)
    inner = torch.where(pair == 0, 0.0, pair * slope * tile["vector"].unsqueeze(-2))
    return {
        "query": inner.sum(-2),
        "key": inner.sum((-4, -3)).unsqueeze(-3),
        "vector": torch.where(pair == 0, 0.0, pair * hidden).sum((-3, -2)).unsqueeze(-2),
    }


def _transposed(weights: Tensor, x: Tensor, nan_safe: bool) -> Tensor:
    """Return weightsᵀ · x, summed over query heads: (… g r q k), (… g r q e) → (… g 1 k e)."""
    return reference.product(reference.fold_heads(weights).mT, reference.fold_heads(x), nan_safe=nan_safe)
