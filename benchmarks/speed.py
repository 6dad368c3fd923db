"""How long a call takes beside the same call elsewhere: ratios above 1 mean that regard is faster."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import regard
from benchmarks.harness import Contender, race

SHAPES = [(64, 8, 24, 64), (16, 8, 64, 64), (1, 8, 512, 64), (1, 8, 2048, 64)]


def main() -> list[dict[str, object]]:
    """Run every race and print its line."""
    print(f"{torch.get_num_threads()} threads, float32; regard's time, and the peers' as multiples of it")
    results: list[dict[str, object]] = []
    for name, contenders in races():
        times = race(contenders)
        ours = times["regard"]
        ratios = {peer: taken / ours for peer, taken in times.items() if peer != "regard"}
        multiples = "   ".join(f"{peer} {ratio:.2f} ×" for peer, ratio in ratios.items())
        print(f"  {name:44} {ours * 1e3:9.2f} ms   {multiples}")
        results.append({"name": name, "seconds": times, "ratios": ratios})
    return results


def races() -> Iterator[tuple[str, dict[str, Contender]]]:
    """Name and contenders of each race."""
    for shape in SHAPES:
        for causal in (False, True) if shape[2] >= 2048 else (False,):
            what = f"{','.join(map(str, shape))}{' causal' if causal else ''}"
            mask = regard.Causal() if causal else None
            inputs = _inputs(shape)
            calls: dict[str, Callable[..., Tensor]] = {
                "regard": lambda *x, mask=mask: regard.attention(*x, mask=mask),
                "sdpa": lambda *x, causal=causal: scaled_dot_product_attention(*x, is_causal=causal),
                "eager": lambda *x, causal=causal: eager(*x, causal=causal),
            }
            yield f"forward {what}", _forward(calls, inputs)
            yield f"forward + backward {what}", _backward(calls, inputs)
    yield from _sparse_races()
    yield "additive forward + backward 64,24,24,256", _additive_race()


def eager(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """Attention as a textbook writes it, with dense weights."""
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1) @ value


def _sparse_races() -> Iterator[tuple[str, dict[str, Contender]]]:
    try:
        import entmax
    except ImportError:
        print("  (no sparse peers: pip install entmax)")
        return
    inputs = _inputs((1, 8, 1024, 64))
    for name, ours, theirs in (
        ("sparsemax", regard.Sparsemax(), entmax.sparsemax),
        ("entmax15", regard.Entmax15(), entmax.entmax15),
    ):
        calls: dict[str, Callable[..., Tensor]] = {
            "regard": lambda *x, ours=ours: regard.attention(*x, normalize=ours),
            "entmax": lambda q, k, v, theirs=theirs: theirs(q @ k.mT / q.shape[-1] ** 0.5, dim=-1) @ v,
        }
        yield f"{name} forward + backward 1,8,1024,64", _backward(calls, inputs)


def _additive_race() -> dict[str, Contender]:
    query, key, value = _inputs((64, 24, 256))
    score = regard.Additive(256, 256)

    def broadcast(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        left, right = query @ score.query_map.T, key @ score.key_map.T
        return (torch.tanh(left[:, :, None] + right[:, None]) @ score.vector).softmax(-1) @ value

    return _backward(
        {"regard": lambda *x: regard.attention(*x, score=score), "broadcast": broadcast}, (query, key, value)
    )


def _inputs(shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(shape) for _ in range(3))


def _forward(calls: dict[str, Callable[..., Tensor]], inputs: tuple[Tensor, ...]) -> dict[str, Contender]:
    def contender(call: Callable[..., Tensor]) -> Contender:
        def run() -> Tensor:
            with torch.no_grad():
                return call(*inputs)

        return run

    return {name: contender(call) for name, call in calls.items()}


def _backward(calls: dict[str, Callable[..., Tensor]], inputs: tuple[Tensor, ...]) -> dict[str, Contender]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    grad = torch.randn_like(calls["regard"](*inputs))

    def contender(call: Callable[..., Tensor]) -> Contender:
        return lambda: torch.autograd.grad(call(*leaves), leaves, grad)

    return {name: contender(call) for name, call in calls.items()}
