"""The specification: attention in plain, dense torch.

    scores  = score(query, key) + biases           … g r q k, −inf where masked
    weights = φ(scores − τ) / divisor              τ: one number per row
    output  = (weights ∘ dropout) · value          … g r q e

Every operation is one that torch can differentiate, backward and forward, as often as it likes. The
other implementations are measured against this one. Three rules hold everywhere:

- a key that is masked, or whose score is −inf, has weight zero; a row without keys is a row of zeros;
- a weight of zero reads nothing, not even a NaN, forward or backward;
- a row that sees a score of +inf or NaN has no defined weights: its weights, τ and output are NaN. The same
  holds for a match of query and key that overflows, to −inf too: the sign depends on the order of additions.
"""

import math

import torch
from torch import Tensor

from regard.mechanism.call.problem import Problem
from regard.mechanism.dropout import keep
from regard.mechanism.precision import matmul
from regard.mechanism.torch_state import concrete, forward_mode


def attention(problem: Problem) -> tuple[Tensor, Tensor]:
    """The output, (…, g, r, q, e), and the row statistic τ, (…, g, r, q, 2)."""
    careful = problem.rules.careful
    s = scores(problem)
    broken = broken_rows(s) if careful or _biased(problem) else None
    if broken is not None:
        s = torch.where(broken & (s != -math.inf), 0.0, s)
    statistic = tau(problem, s)
    output = product(weights(problem, s, statistic), problem["value"], careful=careful)
    if broken is not None:  # only now, so that no derivative of NaN can reach another row
        output = output + torch.where(broken, math.nan, 0.0)
        statistic = torch.where(broken, math.nan, statistic)
    lead = problem.lead()
    return output.expand(*lead, *output.shape[-2:]), statistic.expand(*lead, *statistic.shape[-2:])


def broken_rows(scores: Tensor) -> Tensor:
    """The rows, (…, q, 1), that see a score of NaN or +inf."""
    return (scores.isnan() | (scores == math.inf)).any(-1, keepdim=True)


def _biased(problem: Problem) -> bool:
    """Whether biases add to the scores, and may hold +inf or NaN."""
    return bool(problem.all("bias") or problem.all("line"))


def weights(problem: Problem, scores: Tensor, tau: Tensor) -> Tensor:
    """The weights, (…, g, r, q, k), that the output is made of: after dropout."""
    before = weigh(problem, scores, tau)
    return before if problem.rules.dropout == 0 else before * keep(problem, before.dtype)


def scores(problem: Problem) -> Tensor:
    """The scores with their biases, −inf where the mask hides a key."""
    s, visible = match(problem), problem.visible()
    if problem.rules.softcap is not None:
        s = s if visible is None else torch.where(visible, s, 0.0)
        s = softcap(s, problem.rules.softcap)
    for bias in (*problem.all("bias"), *(along_diagonals(problem, line) for line in problem.all("line"))):
        s = s + bias
        if problem.rules.careful:  # a bias of −inf hides a key, whatever the key holds
            s = torch.where(bias == -math.inf, -math.inf, s)
    return s if visible is None else torch.where(visible, s, -math.inf)


def match(problem: Problem) -> Tensor:
    """query · key, or vectorᵀ act(query + key), for each pair: (…, g, r, q, k)."""
    query, key, vector = problem["query"], problem["key"], problem.get("vector")
    if problem.rules.scale != 1.0:
        query = query * problem.rules.scale
    plain = _match(query, key, vector, problem.rules.family)
    if not problem.rules.careful:
        return plain
    # the derivative of a masked pair is zero, and zero times NaN must not reach the others
    clean = _match(query.nan_to_num(), key.nan_to_num(), vector, problem.rules.family)
    bad = plain.detach()
    if problem.rules.softcap is None:  # which bounds it; otherwise −inf would look like a masked key
        bad = torch.where(plain == -math.inf, math.nan, bad)
    return torch.where(torch.isfinite(plain), clean, bad)


def _match(query: Tensor, key: Tensor, vector: Tensor | None, family: str) -> Tensor:
    if vector is None:
        return unfold(matmul(fold(query), key.mT), query)
    hidden = activate(query.unsqueeze(-2) + key.unsqueeze(-3), family)  # … q k d
    return (hidden * vector.unsqueeze(-2)).sum(-1)


def activate(x: Tensor, family: str) -> Tensor:
    return torch.tanh(x) if family == "tanh" else torch.relu(x)


def softcap(s: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(s / cap)


def along_diagonals(problem: Problem, line: Tensor) -> Tensor:
    """A relative bias as a matrix: entry (i, j) is the line's at distance j − i."""
    distance = problem.key_numbers() + (problem.rules.queries - 1 - problem["row"].flatten()[:, None])
    return line.squeeze(-2)[..., distance]


def tau(problem: Problem, scores: Tensor) -> Tensor:
    """The row statistic, (…, q, 2): τ is the sum of the two numbers.

    For rows that sum to one the first is the row's maximum, so that a large offset of the scores costs no
    digits. The second is differentiable whatever `Normalizer.tau` does: two steps of Newton's method for
    Σ φ(scores − τ) = 1, which change nothing but carry all derivatives up to the third. Both are NaN
    for a row that sees +inf or NaN.
    """
    normalize, sink = problem.rules.normalize, problem.get("sink")
    row = scores if sink is None else _append(scores, sink)
    if not row.shape[-1]:
        return row.new_zeros(*row.shape[:-1], 2)
    if not normalize.sums_to_one:
        rest = normalize.tau(row.detach())
        first = torch.zeros_like(rest)
        if problem.rules.careful or _biased(problem):
            broken = broken_rows(row.detach())
            first, rest = torch.where(broken, math.nan, first), torch.where(broken, math.nan, rest)
        return torch.cat([first, rest], -1)
    top = row.detach().amax(-1, keepdim=True)
    empty = top == -math.inf  # no key in sight: any τ will do
    top = torch.where(empty, 0.0, torch.where(top < math.inf, top, math.nan))
    row = row - top
    rest = torch.where(empty, 0.0, normalize.tau(row.detach()))
    rest = torch.where(top.isnan(), math.nan, rest)
    if differentiates(row):
        visible = row != -math.inf
        for _ in range(2):
            x = torch.where(visible, row - rest, 0.0)
            excess = torch.where(visible, normalize.phi(x), 0.0).sum(-1, keepdim=True) - 1
            slope = torch.where(visible, normalize.slope(x), 0.0).sum(-1, keepdim=True)
            step = torch.where(slope > 0, excess / torch.where(slope > 0, slope, 1.0), 0.0)
            rest = rest + (step - step.detach())  # τ stays as it is, also where φ is too steep for Newton
    return torch.cat([top, rest], -1)


def _append(scores: Tensor, sink: Tensor) -> Tensor:
    """The sink as one more key."""
    rows = torch.broadcast_shapes(scores.shape[:-1], sink.shape[:-1])
    return torch.cat([scores.expand(*rows, scores.shape[-1]), sink.expand(*rows, 1)], -1)


def differentiates(x: Tensor) -> bool:
    """Whether torch is recording, or carrying along, derivatives with respect to x."""
    if forward_mode() or torch._C._are_functorch_transforms_active():
        return True
    return x.requires_grad and torch.is_grad_enabled()


def weigh(problem: Problem, scores: Tensor, tau: Tensor) -> Tensor:
    """φ(scores − τ) / divisor, zero where nothing is in sight."""
    visible, x = scores != -math.inf, center(scores, tau)
    divisor = problem.rules.normalize.divisor(x.detach(), visible)
    if differentiates(x):
        x = torch.where(visible, x, 0.0)  # zero times what φ' is at −inf might be NaN
    phi = torch.where(visible, problem.rules.normalize.phi(x), 0.0)
    phi = phi if divisor is None else phi / divisor
    broken = tau.detach().isnan().any(-1, keepdim=True)
    if concrete(broken) and not bool(broken.any()):
        return phi
    return torch.where(visible & broken, math.nan, phi)


def center(scores: Tensor, tau: Tensor) -> Tensor:
    """scores − τ, −inf where masked."""
    return (scores - tau[..., :1]) - tau[..., 1:]


def product(weights: Tensor, x: Tensor, *, careful: bool) -> Tensor:
    """weights · x, (… g r q k), (… g 1 k e) → (… g r q e), without repeating x for each query head."""
    return unfold(read(fold(weights), x, careful=careful), weights)


def read(weights: Tensor, x: Tensor, *, careful: bool) -> Tensor:
    """weights · x, where a zero weight reads nothing."""
    if not careful:
        return matmul(weights, x)
    touches = (weights != 0).to(x.dtype) @ (~torch.isfinite(x)).to(x.dtype)
    poison = torch.where(touches > 0, weights.detach() @ x.detach(), 0.0)
    return matmul(weights, x.nan_to_num()) + poison


def fold(x: Tensor) -> Tensor:
    """The query heads of a key head as rows of one matrix: … g r q d -> … g 1 (r q) d."""
    *lead, per_group, rows, width = x.shape
    return x if per_group == 1 else x.reshape(*lead, 1, per_group * rows, width)


def unfold(x: Tensor, like: Tensor) -> Tensor:
    """The way back: … g 1 (r q) d -> … g r q d."""
    return x if like.shape[-3] == 1 else x.reshape(*x.shape[:-3], *like.shape[-3:-1], x.shape[-1])
