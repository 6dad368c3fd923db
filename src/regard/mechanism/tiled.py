"""Attention over tiles: the reference, a block of query rows at a time, in linear memory on any device.

A tile holds all the keys that its rows can see, so each row is finished within its tile, whatever the
normalizer. Backward, the scores of a tile are computed again and the formula below is applied to them.
No tensor of n_q × n_k is ever held, unless the caller gave one.
"""

import math

import torch
from torch import Tensor

from regard.mechanism import reference
from regard.mechanism.biases import gather_diagonals
from regard.mechanism.call.problem import Problem, kind, tiles
from regard.mechanism.dropout import keep
from regard.mechanism.torch_state import FakeTensor

# Scores per tile. 1 MiB to 16 MiB of them were equally fast on two cores with 2 MiB of L2 cache each.
TILE = 2**20


def budget(problem: Problem) -> int:
    """How many scores a tile of this problem may have."""
    if problem["query"].is_meta or isinstance(problem["query"], FakeTensor):
        return 2**62  # nothing is held, so nothing needs to be cut
    width = 1 if problem.rules.family == "dot" else max(problem["query"].shape[-1], 1)
    return max(TILE // width, 1)


def empty(problem: Problem) -> tuple[Tensor, Tensor]:
    """Room for output and τ. Like torch's, the output has its heads inside the tokens where the query has."""
    query, (*batch, groups, per_group) = problem["query"], problem.lead()
    tokens, width = problem.queries, problem["value"].shape[-1]
    if groups * per_group > 1 and heads_inside(query):
        output = query.new_empty(*batch, tokens, groups, per_group, width).movedim(-4, -2)
    else:
        output = query.new_empty(*batch, groups, per_group, tokens, width)
    return output, query.new_empty(*batch, groups, per_group, tokens, 2)


def heads_inside(x: Tensor) -> bool:
    """Whether the heads of x (…, g, r, n, ·) are laid out inside its tokens, as projections give them."""
    sizes = zip(x.shape[-4:-2], x.stride()[-4:-2], strict=True)
    return all(n == 1 or n * step <= x.stride(-2) for n, step in sizes)


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """The output (…, g, r, q, e) and the row statistic τ (…, g, r, q, 2)."""
    problem = problem.checked()
    output, statistic = empty(problem)
    for at in tiles(problem, budget(problem)):
        tile = problem.part(at)
        scores = reference.scores(tile)
        tau = reference.tau(tile, scores)
        weights = reference.weights(tile, scores, tau)
        output[at.rows_index] = reference.product(weights, tile["value"], careful=problem.rules.careful)
        statistic[at.rows_index] = tau
    return output, statistic


def backward(problem: Problem, tau: Tensor, grad: Tensor, wanted: set[str]) -> dict[str, Tensor]:
    """The gradients of the wanted tensors, given that of the output."""
    problem = problem.checked(grad, tau)
    grads = {name: torch.zeros_like(problem[name]) for name in wanted}
    for at in tiles(problem, budget(problem)):
        found = gradients(problem.part(at), tau[at.rows_index], grad[at.rows_index], wanted)
        for name, part in found.items():
            view = grads[name][at.cut(name, grads[name].shape)]
            view += part.sum_to_size(view.shape)
    return grads


def gradients(tile: Problem, tau: Tensor, grad: Tensor, wanted: set[str]) -> dict[str, Tensor]:
    """The gradients of one tile.

    With dP = dO · valueᵀ (after dropout) and g = φ'(scores − τ) / divisor:

        rows that sum to one:   dS = g ∘ (dP − c),  c = Σ_j g dP / Σ_j g     (a sink counts in Σ g)
        the others:             dS = g ∘ dP
        the sink:               −g_sink · c, its value being zero
    """
    careful, normalize = tile.rules.careful, tile.rules.normalize
    found: dict[str, Tensor] = {}
    scores = reference.scores(tile)
    visible = scores != -math.inf
    kept = keep(tile, scores.dtype) if tile.rules.dropout else None

    if careful:  # a row that has become NaN has no say if nobody asks for its output
        silent = (grad == 0).all(-1, keepdim=True) & reference.broken_rows(scores)
        scores, visible = torch.where(silent, -math.inf, scores), visible & ~silent
        tau = torch.where(silent, 0.0, tau)
    if "value" in wanted:
        found["value"] = _transposed(reference.weights(tile, scores, tau), grad, careful)
    if wanted == {"value"}:
        return found

    x = reference.center(scores, tau)
    g = torch.where(visible, normalize.slope(x), 0.0)
    divisor = normalize.divisor(x, visible)
    g = g if divisor is None else g / divisor
    dP = reference.product(grad, tile["value"].mT, careful=careful)
    reads = g != 0 if kept is None else (g != 0) & (kept != 0)
    dP = torch.where(reads, dP if kept is None else dP * kept, 0.0)
    if normalize.sums_to_one:
        total, sink = g.sum(-1, keepdim=True), tile.get("sink")
        if sink is not None:
            at_sink = normalize.slope(sink - tau[..., :1] - tau[..., 1:])
            total = total + at_sink
        c = (g * dP).sum(-1, keepdim=True) / torch.where(total == 0, 1.0, total)
        if sink is not None and "sink" in wanted:
            found["sink"] = -(at_sink * c).sum(-2, keepdim=True)
        dP = dP - c
    dS = torch.where(g != 0, g * dP, 0.0)

    for name in wanted:
        if kind(name) == "bias":
            found[name] = dS
        elif kind(name) == "line":
            found[name] = _line_gradient(tile, dS, tile[name])
    found.update(_match_gradients(tile, dS, wanted))
    return {name: found[name] for name in wanted}


def _line_gradient(tile: Problem, dS: Tensor, line: Tensor) -> Tensor:
    """The sums along the diagonals, put where this tile stands among all distances."""
    begin = tile.first_key + tile.rules.queries - tile.first_row - tile.queries
    sums = gather_diagonals(dS)
    return torch.nn.functional.pad(sums, (begin, line.shape[-1] - begin - sums.shape[-1])).unsqueeze(-2)


def _match_gradients(tile: Problem, dS: Tensor, wanted: set[str]) -> dict[str, Tensor]:
    """From the gradient of the scores to that of query, key and vector."""
    query, key, careful = tile["query"], tile["key"], tile.rules.careful
    if tile.rules.softcap is not None:
        bound = torch.tanh(reference.match(tile) / tile.rules.softcap)
        dS = torch.where(dS == 0, 0.0, dS * (1 - bound.square()))
    if tile.rules.family == "dot":
        dS = dS if tile.rules.scale == 1.0 else dS * tile.rules.scale
        return {
            **({"query": reference.product(dS, key, careful=careful)} if "query" in wanted else {}),
            **({"key": _transposed(dS, query, careful)} if "key" in wanted else {}),
        }
    sum_ = query.unsqueeze(-2) + key.unsqueeze(-3)  # … q k d
    hidden = reference.activate(sum_, tile.rules.family)
    slope = 1 - hidden.square() if tile.rules.family == "tanh" else (sum_ > 0).to(sum_.dtype)
    # zero times NaN is zero here: what a masked pair holds is nobody's business
    pair = dS.unsqueeze(-1)
    inner = torch.where(pair == 0, 0.0, pair * slope * tile["vector"].unsqueeze(-2))
    return {
        "query": inner.sum(-2),
        "key": inner.sum((-4, -3)).unsqueeze(-3),
        "vector": torch.where(pair == 0, 0.0, pair * hidden).sum((-3, -2)).unsqueeze(-2),
    }


def _transposed(weights: Tensor, x: Tensor, careful: bool) -> Tensor:
    """weightsᵀ · x, (… g r q k), (… g r q e) → (… g 1 k e): the query heads of a key head add up."""
    return reference.product(reference.fold(weights).mT, reference.fold(x), careful=careful)
