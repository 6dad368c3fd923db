"""Attention from the papers' formulas, pair by pair: slow, in float64, independent of regard's code.

`attention` reads the kind and the public settings of a score, mask, bias or normalizer and applies the
definition to each query-key pair. Masked keys are omitted.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import regard

Row = list[float]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    score: Any,
    normalize: Any,
    mask: Any = None,
    bias: Any = None,
) -> tuple[Tensor, Tensor]:
    """Return output (…, h, q, e) and weights (…, h, q, k), in float64."""
    s = scores(query, key, value, score=score, mask=mask, bias=bias).numpy()
    output, weights = np.zeros((*s.shape[:-1], value.shape[-1])), np.zeros(s.shape)
    heads = leading(query, key, value)[1]
    for *at, i in np.ndindex(*s.shape[:-1]):
        (seen,) = np.nonzero(s[(*at, i)] != -math.inf)
        weights[(*at, i, seen)] = normalized(normalize, s[(*at, i, seen)].tolist(), tuple(at))
        output[(*at, i)] = weights[(*at, i, seen)] @ of_head(value, tuple(at), heads)[seen]
    return torch.from_numpy(output), torch.from_numpy(weights)


def scores(
    query: Tensor, key: Tensor, value: Tensor, *, score: Any, mask: Any = None, bias: Any = None
) -> Tensor:
    """Return scores (…, h, q, k), including biases, in float64; −inf for masked keys."""
    lead, heads = leading(query, key, value)
    queries, keys = query.shape[-2], key.shape[-2]
    s = np.full((*lead, queries, keys), -math.inf)
    match = pair_score(score)
    for at in indices(lead):
        ours, theirs = (of_head(tensor, at, heads) for tensor in (query, key))
        for i, j in np.ndindex(queries, keys):
            if sees(mask, at, i, j, queries, keys):
                s[(*at, i, j)] = match(ours[i], theirs[j]) + added(bias, at, i, j, queries, keys)
    return torch.from_numpy(s)


# Indices


def leading(*tensors: Tensor) -> tuple[tuple[int, ...], int]:
    """Return the leading axes of the output, including heads, and the number of heads."""
    heads = max(tensor.shape[-3] if tensor.dim() > 2 else 1 for tensor in tensors)
    if max(tensor.dim() for tensor in tensors) == 2:
        return (), 1
    return (*np.broadcast_shapes(*(tensor.shape[:-3] for tensor in tensors)), heads), heads


def indices(lead: Sequence[int]) -> Iterator[tuple[int, ...]]:
    yield from np.ndindex(*lead)


def of_head(tensor: Tensor, at: tuple[int, ...], heads: int) -> np.ndarray:
    """Return the matrix (tokens, features) for the head at this index; consecutive heads share one."""
    array = tensor.detach().double().numpy()
    if array.ndim == 2:
        return array
    *batch, head = at
    sizes = array.shape[:-3]
    own = [
        0 if size == 1 else index for size, index in zip(sizes, batch[len(batch) - len(sizes) :], strict=True)
    ]
    return array[(*own, head * array.shape[-3] // heads)]


def entry(tensor: Tensor, at: tuple[int, ...], *rest: int) -> float:
    """Return the element of a broadcast tensor at this index."""
    place = (*at, *rest)[len(at) + len(rest) - tensor.dim() :]
    return tensor[tuple(0 if size == 1 else i for size, i in zip(tensor.shape, place, strict=True))].item()


# Scores


def pair_score(score: Any) -> Callable[[np.ndarray, np.ndarray], float]:
    """Return the score of one query with one key."""

    def numbers(name: str) -> np.ndarray:
        return getattr(score, name).detach().double().numpy()

    def capped(x: float) -> float:
        cap = getattr(score, "softcap", None)
        return x if cap is None else cap * math.tanh(x / cap)

    match score:
        case regard.Dot():
            return lambda q, k: capped(q @ k)
        case regard.ScaledDot(scale=scale):
            return lambda q, k: capped(q @ k / math.sqrt(len(q)) if scale is None else scale * (q @ k))
        case regard.Cosine(scale=scale):
            return lambda q, k: capped(scale * (q @ k) / math.sqrt((q @ q) * (k @ k)))
        case regard.Gaussian(sigma=sigma):
            return lambda q, k: -((q - k) @ (q - k)) / (2 * sigma**2)
        case regard.General():
            w = numbers("weight")
            return lambda q, k: capped(q @ w @ k)
        case regard.Additive():
            w, u, v = numbers("query_map"), numbers("key_map"), numbers("vector")
            return lambda q, k: v @ np.tanh(w @ q + u @ k)
        case regard.Concat():
            w = np.concatenate([numbers("query_map"), numbers("key_map")], 1)
            v = numbers("vector")
            return lambda q, k: v @ np.maximum(w @ np.concatenate([q, k]), 0)
    return lambda q, k: score(torch.from_numpy(q)[None], torch.from_numpy(k)[None]).item()


# Masks


def sees(mask: Any, at: tuple[int, ...], i: int, j: int, queries: int, keys: int) -> bool:
    """Return whether query i may attend to key j."""
    here = (
        i if getattr(mask, "align", "end") == "start" else i + keys - queries
    )  # the key position of query i
    match mask:
        case None:
            return True
        case Tensor():
            return bool(entry(mask, at, i, j))
        case regard.Causal():
            return j <= here
        case regard.Window(left=left, right=right):
            return (left is None or here - j <= left) and (right is None or j - here <= right)
        case regard.Prefix(length=length):
            return j < length or j <= here
        case regard.Padding(lengths=lengths, side=side):
            length = entry(lengths, at[: lengths.dim()])
            return j < length if side == "right" else j >= keys - length
        case regard.Documents():
            (mine, i, queries), (theirs, j, keys) = document(mask.queries, i), document(mask.keys, j)
            return mine == theirs and sees(mask.within, at, i, j, queries, keys)
    if hasattr(mask, "tensor"):  # a boolean tensor that was combined with another mask
        return sees(mask.tensor, at, i, j, queries, keys)
    either = [sees(side, at, i, j, queries, keys) for side in (mask.first, mask.second)]
    return {"&": all, "|": any}[mask.symbol](either)


def document(lengths: Tensor, token: int) -> tuple[int, int, int]:
    """Return the document of a token, its position there, and the document length."""
    for number, length in enumerate(lengths.tolist()):
        if token < length:
            return number, token, length
        token -= length
    raise AssertionError("a token outside of all documents")


# Biases


def added(bias: Any, at: tuple[int, ...], i: int, j: int, queries: int, keys: int) -> float:
    """Return the sum of all biases for query i and key j."""
    distance = j - (i + keys - queries)
    head = at[-1] if at else 0
    match bias:
        case None:
            return 0.0
        case Tensor():
            return entry(bias, at, i, j)
        case regard.ClippedRelativeBias(vector=vector):
            reach = (vector.shape[-1] - 1) // 2
            vector = vector.expand(max(head + 1, len(torch.atleast_2d(vector))), -1)
            return vector[head, min(max(distance, -reach), reach) + reach].item()
        case regard.ALiBi():
            return -slope(head, len(bias.slopes)) * abs(distance)
        case regard.T5Bias():
            row = bucket(distance, bias.buckets, bias.max_distance, bias.bidirectional)
            return bias.table[row, head].item()
    return sum(added(part, at, i, j, queries, keys) for part in bias)


def slope(head: int, heads: int) -> float:
    """Press et al. 2022: a geometric sequence that starts at its ratio, 2^(−8/n), for n a power of two."""
    power = 1
    while 2 * power <= heads:
        power *= 2
    if head < power:
        return 2 ** (-8 * (head + 1) / power)
    return 2 ** (-8 * (2 * (head - power) + 1) / (2 * power))


def bucket(distance: int, buckets: int, max_distance: int, bidirectional: bool) -> int:
    """Raffel et al. 2020 and their code, in integers only.

    Beyond the first half of a side's buckets, the bucket is exact + m with
    m = ⌊log(far / exact) / log(reach / exact) · rest⌋: the largest m with (reach/exact)^m ≤ (far/exact)^rest.
    """
    first, far = 0, max(-distance, 0)
    if bidirectional:
        buckets //= 2
        first, far = (buckets if distance > 0 else 0), abs(distance)
    exact = buckets // 2
    if far < exact:
        return first + far
    rest, m = buckets - exact, 0
    while m < rest - 1 and max_distance ** (m + 1) * exact ** (rest - m - 1) <= far**rest:
        m += 1
    return first + exact + m


# Normalizers


def normalized(normalize: Any, row: Row, at: tuple[int, ...] = ()) -> Row:
    """Return the weights of a row of unmasked scores."""
    if not row:
        return []
    match normalize:
        case regard.Softmax(temperature=temperature):
            return softmax([score / temperature for score in row])
        case regard.Softmax1() | regard.Sink():
            sink = normalize.score
            if isinstance(sink, Tensor):
                sink = sink.flatten()[at[-1] if at and sink.numel() > 1 else 0].item()
            return softmax([*row, sink])[:-1]
        case regard.Sparsemax():
            return sparsemax(row)
        case regard.Entmax(alpha=alpha):
            return entmax_bisected(row, alpha)
        case regard.Mean():
            return [score / len(row) for score in row]
        case regard.Relu():
            return [max(score, 0.0) / len(row) for score in row]
        case regard.Sigmoid(bias=bias):
            offset = -math.log(len(row)) if bias is None else bias
            return [(1 + math.tanh((score + offset) / 2)) / 2 for score in row]
        case regard.Hard():
            best = [score == max(row) for score in row]
            return [is_best / sum(best) for is_best in best]
    raise AssertionError(f"no formula for {normalize!r}")


def softmax(row: Row) -> Row:
    powers = [math.exp(score - max(row)) for score in row]
    return [power / math.fsum(powers) for power in powers]


def sparsemax(row: Row) -> Row:
    """Martins & Astudillo 2016, algorithm 1."""
    ranked = sorted(row, reverse=True)
    support = max(n for n in range(1, len(row) + 1) if 1 + n * ranked[n - 1] > math.fsum(ranked[:n]))
    tau = (math.fsum(ranked[:support]) - 1) / support
    return [max(score - tau, 0.0) for score in row]


def entmax_bisected(row: Row, alpha: float) -> Row:
    """Peters et al. 2019, algorithm 1: bisect the interval of τ until it converges."""
    x = [(alpha - 1) * (score - max(row)) for score in row]
    low, high = -1.0, 0.0

    def weights(tau: float) -> Row:
        return [max(score - tau, 0.0) ** (1 / (alpha - 1)) for score in x]

    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if math.fsum(weights(middle)) >= 1 else (low, middle)
    return weights(low)


def repeated(tensor: Tensor, heads: int) -> Tensor:
    """Return key or value, repeated for each query head."""
    return tensor if tensor.dim() == 2 else tensor.repeat_interleave(heads // tensor.shape[-3], -3)
