"""Time and peak memory of attention over 65,536 tokens and of reading its weights."""

import time
from collections.abc import Callable

import torch

import regard
from benchmarks.machine import peak_memory

TOKENS, WIDTH = 65_536, 64


def main(quick: bool = False) -> list[dict[str, object]]:
    """Attend to a long sequence and compute statistics of its weights."""
    tokens = TOKENS // 16 if quick else TOKENS
    dense = tokens**2 * 4 / 1e9
    print(f"one head, {tokens:,} tokens, width {WIDTH}, causal; dense weights would take {dense:.1f} GB")
    torch.manual_seed(0)
    query, key, value = (torch.randn(tokens, WIDTH) for _ in range(3))
    baseline, results = peak_memory(), []

    def measure(name: str, run: Callable[[], object]) -> object:
        start = time.perf_counter()
        output = run()
        seconds, peak = time.perf_counter() - start, peak_memory() - baseline
        print(f"  {name:16} {seconds:6.1f} s   peak {peak:5.0f} MB excluding the inputs", flush=True)
        results.append({"name": name, "seconds": seconds, "peak_mb": peak})
        return output

    with torch.no_grad():
        regard.attention(query[:64], key[:64], value[:64])  # warm up
        baseline = peak_memory()
        _, weights = measure("attend", lambda: regard.attend(query, key, value, mask=regard.Causal()))  # type: ignore[misc]
        measure("topk(5)", lambda: weights.topk(5))
        measure("entropy()", weights.entropy)
        measure("received()", weights.received)
        measure("pool(128, 128)", lambda: weights.pool(128, 128))
        measure("one row", lambda: weights[tokens // 2])
    total = sum(float(str(result["seconds"])) for result in results)
    print(f"  total            {total:6.1f} s")
    return results
