"""Attention from its formulas: dense, in float64, differentiable by torch, and independent of regard's code.

It reads the kind and the public settings of a score, bias or normalizer; masks are given as boolean tensors.
With `noise` it perturbs scores and inputs by about their own rounding errors; the resulting change in the
output is an estimate of the accuracy that an implementation can reach.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import regard
from tests import naive


class Result(NamedTuple):
    """Output, weights, scores, and the magnitude of the terms that each score sums.

    jump: rounding may change the output a lot. bend: rounding may change the gradient a lot.
    """

    output: Tensor
    weights: Tensor
    scores: Tensor
    size: Tensor
    jump: bool
    bend: bool


@dataclass
class Noise:
    """Random relative errors of the size of one rounding. `grad`: the output gradient, if any."""

    rounding: float
    generator: torch.Generator
    grad: Tensor | None = None

    def on(self, x: Tensor, size: Tensor | None = None) -> Tensor:
        """Return x with errors relative to `size`, or to x itself."""
        random = 2 * torch.rand(x.shape, dtype=x.dtype, generator=self.generator) - 1
        return x + self.rounding * random * (x if size is None else size)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    score: Any,
    normalize: Any,
    seen: Tensor | None = None,
    bias: Any = None,
    noise: Noise | None = None,
    rounding: float = 2.0**-24,
) -> Result:
    """Compute attention; all tensors have one dtype. `rounding`: half a unit in the results' last place."""
    heads = _heads(query, key, value)
    if noise is not None:
        query, key, value = (noise.on(x) for x in (query, key, value))
    query, key, value = (_repeat(x, heads) for x in (query, key, value))
    s, size, bend = _scores(score, query, key, rounding, noise)
    queries, keys = s.shape[-2:]
    for part in bias if isinstance(bias, list | tuple) else [bias]:
        added = _bias(part, heads, queries, keys)
        if query.dim() == 2 and added.dim() == 3:
            added = added[0]  # a call without a head axis
        s, size = s + added, size + added.detach().abs()
    if noise is not None:
        s = noise.on(s, size)
    lead = torch.broadcast_shapes(s.shape[:-2], value.shape[:-2])
    s = s.expand(*lead, queries, keys)
    visible = torch.ones(s.shape, dtype=torch.bool) if seen is None else seen.expand(s.shape)
    visible = visible & (s != -math.inf)
    weights, slope, margin = _normalize(normalize, s, visible)
    weights, slope = torch.where(visible, weights, 0.0), torch.where(visible, slope.detach(), 0.0)
    if noise is not None and noise.grad is not None:
        # backward recomputes the scores and reuses the forward τ, so their errors are independent
        weights = noise.on(weights, slope * size + weights.detach().abs())
        if s.requires_grad:
            terms = slope * (noise.grad.abs() @ value.detach().abs().mT)
            total = slope * terms.sum(-1, keepdim=True) / slope.sum(-1, keepdim=True).clamp(min=1e-30)
            s.register_hook(lambda grad: noise.on(grad, terms + total))
    near = bool((visible & (margin.abs() <= 8 * rounding * (size + 1))).any())
    steep = isinstance(normalize, regard.Entmax) and normalize.alpha > 2
    jump = near and (steep or isinstance(normalize, regard.Hard))
    # if scores err by more than the temperature, any of the best keys may have the largest weight
    temperature = getattr(normalize, "temperature", 1.0)
    jump = jump or bool((visible & (8 * rounding * size > 0.5 * temperature)).any())
    hidden = torch.where(visible, s, -math.inf)
    return Result(weights @ value, weights, hidden, size, jump, near or bend or steep)


def _heads(*tensors: Tensor) -> int:
    counts = [tensor.shape[-3] if tensor.dim() > 2 else 1 for tensor in tensors]
    return 0 if 0 in counts else max(counts)


def _repeat(x: Tensor, heads: int) -> Tensor:
    """Repeat key heads, which consecutive query heads share."""
    return x if x.dim() == 2 or not x.shape[-3] else x.repeat_interleave(heads // x.shape[-3], -3)


# Scores


def _scores(
    score: Any, query: Tensor, key: Tensor, rounding: float, noise: Noise | None
) -> tuple[Tensor, Tensor, bool]:
    """Return the scores, the magnitude of their terms, and whether a relu is near its kink."""
    bend = False
    left, right = query.detach().abs(), key.detach().abs()
    wide = query.unsqueeze(-2), key.unsqueeze(-3)
    match score:
        case regard.Dot():
            s, size = query @ key.mT, left @ right.mT
        case regard.ScaledDot(scale=scale):
            scale = 1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale
            s, size = query @ key.mT * scale, left @ right.mT * abs(scale)
        case regard.Cosine(scale=scale):
            norms = query.norm(dim=-1, keepdim=True) * key.norm(dim=-1).unsqueeze(-2)
            if noise is not None:  # the gradients of product and norms cancel, but their errors do not
                query, key = noise.on(query), noise.on(key)
            s = query @ key.mT / norms * scale
            size = left @ right.mT / norms.detach() * abs(scale)
        case regard.Gaussian(sigma=sigma):
            s = -(wide[0] - wide[1]).square().sum(-1) / (2 * sigma**2)
            size = (left.square().sum(-1, keepdim=True) + right.square().sum(-1).unsqueeze(-2)) * 4 / sigma**2
        case regard.General():
            s = query @ score.weight @ key.mT
            size = left @ score.weight.detach().abs() @ right.mT
        case regard.Additive() | regard.Concat():
            hidden = wide[0] @ score.query_map.mT + wide[1] @ score.key_map.mT
            sizes = wide[0].abs() @ score.query_map.mT.abs() + wide[1].abs() @ score.key_map.mT.abs()
            tanh = isinstance(score, regard.Additive)
            s = (_tanh(hidden, noise) if tanh else torch.relu(hidden)) @ score.vector
            size = (sizes.detach() + 1) @ score.vector.detach().abs()
            bend = not tanh and bool((hidden.abs() <= 8 * rounding * sizes).any())
        case _:
            s = score(query, key)
            size = s.detach().abs() + 1
    cap = getattr(score, "softcap", None)
    return (s if cap is None else cap * _tanh(s / cap, noise)), size + s.detach().abs(), bend


def _tanh(x: Tensor, noise: Noise | None) -> Tensor:
    """Compute tanh; with noise, its derivative has the rounding error of a number near 1.

    torch's derivative, 1 − tanh², is 0 from |x| = 19 on, where tanh rounds to 1; 4 exp(−2 |x|) is not.
    """
    decay = torch.exp(-2 * x.abs())
    if noise is not None and x.requires_grad:
        slope = (4 * decay / (1 + decay) ** 2).detach().clamp(min=1e-300)
        x.register_hook(lambda grad: noise.on(grad, grad.abs() / slope))
    return torch.where(x.abs() < 1, torch.tanh(x), x.sign() * (1 - decay) / (1 + decay))


# Biases


def _bias(bias: Any, heads: int, queries: int, keys: int) -> Tensor:
    """Return a bias as a tensor that broadcasts to (…, heads, queries, keys)."""
    distance = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
    match bias:
        case None:
            return torch.zeros((), dtype=torch.float64)
        case Tensor():
            return bias
        case regard.ClippedRelativeBias(vector=vector):
            reach = (vector.shape[-1] - 1) // 2
            return vector[..., distance.clamp(-reach, reach) + reach]
        case regard.ALiBi():
            slopes = torch.tensor([naive.slope(head, heads) for head in range(heads)], dtype=torch.float32)
            return (-slopes[:, None, None] * distance.abs()).double()  # computed in float32, as in regard
        case regard.T5Bias():
            buckets = [
                naive.bucket(at, bias.buckets, bias.max_distance, bias.bidirectional)
                for at in range(-keys - queries, keys + queries + 1)
            ]
            index = torch.tensor(buckets)[distance + keys + queries]
            return bias.table[index].movedim(-1, 0)
    raise AssertionError(f"no formula for {bias!r}")


# Normalizers


def _normalize(normalize: Any, s: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights, φ' (arbitrary in rows without keys), and each score's distance to a bend or jump."""
    far = torch.full((), math.inf)
    if not s.shape[-1]:
        return s, s, far
    count = visible.sum(-1, keepdim=True).clamp(min=1).to(s.dtype)
    # a row without visible keys would be NaN: treat all as visible, the caller drops the row
    low = torch.where(visible | ~visible.any(-1, keepdim=True), s, -math.inf)
    low = torch.where(low.amax(-1, keepdim=True) == -math.inf, 0.0, low)
    match normalize:
        case regard.Softmax(temperature=temperature):
            weights = torch.softmax(low / temperature, -1)
            return weights, weights / temperature, far
        case regard.Softmax1() | regard.Sink():
            sink = torch.as_tensor(normalize.score, dtype=s.dtype).reshape(-1, 1, 1)
            sink = sink[0] if s.dim() == 2 else sink
            weights = torch.softmax(torch.cat([low, sink.expand(*s.shape[:-1], 1)], -1), -1)[..., :-1]
            return weights, weights, far
        case regard.Entmax(alpha=alpha):
            return _entmax(low, alpha)
        case regard.Mean():
            return s / count, (1 / count).expand(s.shape), far
        case regard.Relu():
            return torch.relu(s) / count, (s > 0) / count, s.detach()
        case regard.Sigmoid(bias=bias):
            weights = torch.sigmoid(s - count.log() if bias is None else s + bias)
            return weights, weights, far  # φ' is w (1 − w), but 1 − w may be rounded to 0
        case regard.Hard():
            gap = low - low.amax(-1, keepdim=True)
            best = (gap == 0).to(s.dtype)
            weights = best / best.sum(-1, keepdim=True)
            return weights, torch.zeros_like(s), torch.where(gap == 0, math.inf, gap)
    raise AssertionError(f"no formula for {normalize!r}")


def _entmax(s: Tensor, alpha: float) -> tuple[Tensor, Tensor, Tensor]:
    """Entmax (Peters et al. 2019, eq. 10): τ by bisection, then a differentiable Newton step."""
    power = 1 / (alpha - 1)
    x = (s - s.detach().amax(-1, keepdim=True)) * (alpha - 1)
    fixed = x.detach()
    low, high = torch.full_like(fixed[..., :1], -1.0), torch.zeros_like(fixed[..., :1])
    for _ in range(55):
        middle = (low + high) / 2
        enough = (fixed - middle).clamp(min=0).pow(power).sum(-1, keepdim=True) >= 1
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    gap = x - low
    inside = gap > 0
    safe = torch.where(inside, gap, 1.0)
    slope = torch.where(inside, safe.detach().pow(power - 1), 0.0)
    excess = torch.where(inside, safe.pow(power), 0.0).sum(-1, keepdim=True) - 1
    step = excess / (power * slope).sum(-1, keepdim=True)
    moved = gap + (step.detach() - step)  # adds the derivative of τ without changing the value
    weights = torch.where(inside, torch.where(inside, moved, 1.0).pow(power), 0.0)
    return weights, slope, (fixed - low) / (alpha - 1)
