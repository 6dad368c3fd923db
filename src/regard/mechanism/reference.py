"""Reference implementation: dense attention in plain torch.

    scores  = score(query, key) + biases           … g r q k, −inf where masked
    weights = φ(scores − τ) / divisor              τ: row statistic
    output  = (weights ∘ dropout) · value          … g r q e

Every operation has derivatives of any order, in reverse and forward mode. This module is the specification:
the other implementations are tested against it. Three rules hold for all implementations:

- masked keys, and keys with a score of −inf, have weight zero; a row without visible keys is all zeros;
- a value with weight zero is ignored in both passes, even if it is NaN;
- a row with a visible score of +inf or NaN has undefined weights: its weights, τ and output are NaN. The same
  holds if query · key overflows, even to −inf, because the sign depends on the order of summation.
"""

import math

import torch
from torch import Tensor

from regard.mechanism.autocast import matmul
from regard.mechanism.call.problem import Problem
from regard.mechanism.scores import ACTIVATIONS
from regard.mechanism.torch_state import concrete, forward_mode, transformed

_BITS = 0xFFFFFFFF


def attention(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return the output (…, g, r, q, e) and the row statistic τ (…, g, r, q, 2)."""
    nan_safe = problem.config.nan_safe
    s = scores(problem)
    invalid = invalid_rows(s) if nan_safe or _has_bias(problem) else None
    if invalid is not None:
        s = torch.where(invalid & (s != -math.inf), 0.0, s)
    statistic = tau(problem, s)
    output = product(weights(problem, s, statistic), problem["value"], nan_safe=nan_safe)
    if invalid is not None:  # applied last, to keep NaN derivatives out of other rows
        output = output + torch.where(invalid, math.nan, 0.0)
        statistic = torch.where(invalid, math.nan, statistic)
    lead = problem.lead()
    return output.expand(*lead, *output.shape[-2:]), statistic.expand(*lead, *statistic.shape[-2:])


def invalid_rows(scores: Tensor) -> Tensor:
    """Return a boolean tensor (…, q, 1): True for rows with a visible score of NaN or +inf."""
    return (scores.isnan() | (scores == math.inf)).any(-1, keepdim=True)


def _has_bias(problem: Problem) -> bool:
    """Whether the problem has biases, which may contain +inf or NaN."""
    return bool(problem.all("bias") or problem.all("line"))


def weights(problem: Problem, scores: Tensor, tau: Tensor) -> Tensor:
    """Return the weights (…, g, r, q, k) after dropout."""
    normalized = apply_normalizer(problem, scores, tau)
    if problem.config.dropout == 0:
        return normalized
    return normalized * dropout_factors(problem, normalized.dtype)


def dropout_factors(problem: Problem, dtype: torch.dtype) -> Tensor:
    """Return 0 for dropped pairs and 1 / (1 − dropout) for the others: (…, g, r, q, k).

    The factors depend on a hash of seed, row and key, not on a stream of random numbers, so each tile can be
    recomputed independently, in any order, in both passes.
    """
    dropout = problem.config.dropout
    row = _mix(problem["head"] * problem.config.queries + problem["row"] ^ problem["seed"])
    second = _mix(row + 0x9E3779B9 & _BITS)
    hashed = _mix(_mix(problem.key_indices() ^ row) ^ second)
    return (hashed >= int(dropout * (_BITS + 1))).to(dtype) / (1 - dropout)


def _mix(x: Tensor) -> Tensor:
    """Compute Wellons' 32-bit hash lowbias32 with 64-bit integers."""
    x = x & _BITS
    x = (x ^ (x >> 16)) * 0x7FEB352D & _BITS
    x = (x ^ (x >> 15)) * 0x846CA68B & _BITS
    return x ^ (x >> 16)


def scores(problem: Problem) -> Tensor:
    """Return the scores, including biases, with −inf for masked keys."""
    s, visible = raw_scores(problem), problem.visible()
    if problem.config.softcap is not None:
        s = s if visible is None else torch.where(visible, s, 0.0)
        s = softcap(s, problem.config.softcap)
    for bias in (*problem.all("bias"), *(_expand_line(problem, line) for line in problem.all("line"))):
        s = s + bias
        if problem.config.nan_safe:  # a bias of −inf masks the key, even if its score is NaN
            s = torch.where(bias == -math.inf, -math.inf, s)
    return s if visible is None else torch.where(visible, s, -math.inf)


def raw_scores(problem: Problem) -> Tensor:
    """Return query · key, or vectorᵀ act(query + key), before softcap, bias and mask: (…, g, r, q, k)."""
    query, key, vector = problem["query"], problem.dequantized("key"), problem.get("vector")
    if problem.config.scale != 1.0:
        query = query * problem.config.scale
    raw = _raw_scores(query, key, vector, problem.config.family)
    if not problem.config.nan_safe:
        return raw
    # the gradient of a masked pair is zero, but zero times NaN would be NaN
    clean = _raw_scores(query.nan_to_num(), key.nan_to_num(), vector, problem.config.family)
    bad = raw.detach()
    if problem.config.softcap is None:  # overflow to −inf must not look like a masked key
        bad = torch.where(raw == -math.inf, math.nan, bad)
    return torch.where(torch.isfinite(raw), clean, bad)


def _raw_scores(query: Tensor, key: Tensor, vector: Tensor | None, family: str) -> Tensor:
    if vector is None:
        return unfold_heads(matmul(fold_heads(query), key.mT), query)
    hidden = ACTIVATIONS[family].apply(query.unsqueeze(-2) + key.unsqueeze(-3))  # … q k d
    return (hidden * vector.unsqueeze(-2)).sum(-1)


def softcap(s: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(s / cap)


def _expand_line(problem: Problem, line: Tensor) -> Tensor:
    """Expand a relative bias to a matrix: entry (i, j) is its value at distance j − i."""
    distance = problem.key_indices() + (problem.config.queries - 1 - problem["row"].flatten()[:, None])
    return line.squeeze(-2)[..., distance]


def tau(problem: Problem, scores: Tensor) -> Tensor:
    """Return the row statistic as two numbers whose sum is τ: (…, q, 2).

    For rows that sum to one, the first number is the row maximum, for numerical stability. Two Newton steps
    for Σ φ(scores − τ) = 1 make the second number differentiable even if `Normalizer.tau` is not. The steps
    add zero, but give correct derivatives up to third order. Both numbers are NaN for a row with a visible
    score of +inf or NaN.
    """
    normalize, sink = problem.config.normalize, problem.get("sink")
    row = scores if sink is None else _append(scores, sink)
    if not row.shape[-1]:
        return row.new_zeros(*row.shape[:-1], 2)
    if not normalize.sums_to_one:
        rest = normalize.tau(row.detach())
        first = torch.zeros_like(rest)
        if problem.config.nan_safe or _has_bias(problem):
            invalid = invalid_rows(row.detach())
            first, rest = torch.where(invalid, math.nan, first), torch.where(invalid, math.nan, rest)
        return torch.cat([first, rest], -1)
    maximum = row.detach().amax(-1, keepdim=True)
    empty = maximum == -math.inf  # no visible key: any τ will do
    maximum = torch.where(empty, 0.0, torch.where(maximum < math.inf, maximum, math.nan))
    row = row - maximum
    rest = torch.where(empty, 0.0, normalize.tau(row.detach()))
    rest = torch.where(maximum.isnan(), math.nan, rest)
    if needs_grad(row):
        visible = row != -math.inf
        for _ in range(2):
            x = torch.where(visible, row - rest, 0.0)
            excess = torch.where(visible, normalize.phi(x), 0.0).sum(-1, keepdim=True) - 1
            slope = torch.where(visible, normalize.slope(x), 0.0).sum(-1, keepdim=True)
            step = torch.where(slope > 0, excess / torch.where(slope > 0, slope, 1.0), 0.0)
            rest = rest + (step - step.detach())  # adds zero, even if Newton's method would diverge
    return torch.cat([maximum, rest], -1)


def _append(scores: Tensor, sink: Tensor) -> Tensor:
    """Append the sink as one more key."""
    rows = torch.broadcast_shapes(scores.shape[:-1], sink.shape[:-1])
    return torch.cat([scores.expand(*rows, scores.shape[-1]), sink.expand(*rows, 1)], -1)


def needs_grad(x: Tensor) -> bool:
    """Whether torch computes derivatives with respect to x, in reverse or forward mode."""
    if forward_mode() or transformed():
        return True
    return x.requires_grad and torch.is_grad_enabled()


def apply_normalizer(problem: Problem, scores: Tensor, tau: Tensor) -> Tensor:
    """Return φ(scores − τ) / divisor, with zero for masked keys."""
    visible, x = scores != -math.inf, center(scores, tau)
    divisor = problem.config.normalize.divisor(x.detach(), visible)
    if needs_grad(x):
        x = torch.where(visible, x, 0.0)  # φ' may be infinite at −inf
    phi = torch.where(visible, problem.config.normalize.phi(x), 0.0)
    phi = phi if divisor is None else phi / divisor
    invalid = tau.detach().isnan().any(-1, keepdim=True)
    if concrete(invalid) and not bool(invalid.any()):
        return phi
    return torch.where(visible & invalid, math.nan, phi)


def center(scores: Tensor, tau: Tensor) -> Tensor:
    """Return scores − τ, with −inf for masked keys."""
    return (scores - tau[..., :1]) - tau[..., 1:]


def product(weights: Tensor, x: Tensor, *, nan_safe: bool) -> Tensor:
    """Return weights · x, (… g r q k), (… g 1 k e) → (… g r q e), without repeating x for each query head."""
    return unfold_heads(weighted_sum(fold_heads(weights), x, nan_safe=nan_safe), weights)


def weighted_sum(weights: Tensor, x: Tensor, *, nan_safe: bool) -> Tensor:
    """Return weights · x. With `nan_safe`, NaN and inf in x are ignored if the weight is zero."""
    if not nan_safe:
        return matmul(weights, x)
    nonfinite = (weights != 0).to(x.dtype) @ (~torch.isfinite(x)).to(x.dtype)
    poison = torch.where(nonfinite > 0, weights.detach() @ x.detach(), 0.0)
    return matmul(weights, x.nan_to_num()) + poison


def fold_heads(x: Tensor) -> Tensor:
    """Merge the query heads of a key head into rows: … g r q d -> … g 1 (r q) d."""
    *lead, per_group, rows, width = x.shape
    return x if per_group == 1 else x.reshape(*lead, 1, per_group * rows, width)


def unfold_heads(x: Tensor, like: Tensor) -> Tensor:
    """Inverse of `fold_heads`: … g 1 (r q) d -> … g r q d."""
    return x if like.shape[-3] == 1 else x.reshape(*x.shape[:-3], *like.shape[-3:-1], x.shape[-1])
