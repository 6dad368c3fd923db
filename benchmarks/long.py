"""What it takes to look at 65,536 tokens: time and peak memory, each operation in turn."""

import time
from collections.abc import Callable

import torch

import regard
from benchmarks.machine import peak_memory

TOKENS, WIDTH = 65_536, 64


def main(quick: bool = False) -> list[dict[str, object]]:
    """Attend to a long sequence and look at its weights in every way."""
    tokens = TOKENS // 16 if quick else TOKENS
    dense = tokens**2 * 4 / 1e9
    print(f"one head of {tokens:,} tokens, {WIDTH} wide, causal; dense weights would take {dense:.1f} GB")
    torch.manual_seed(0)
    query, key, value = (torch.randn(tokens, WIDTH) for _ in range(3))
    start, results = peak_memory(), []

    def measure(name: str, run: Callable[[], object]) -> object:
        begun = time.perf_counter()
        found = run()
        taken, held = time.perf_counter() - begun, peak_memory() - start
        print(f"  {name:16} {taken:6.1f} s   peak {held:5.0f} MB above the inputs", flush=True)
        results.append({"name": name, "seconds": taken, "peak_mb": held})
        return found

    with torch.no_grad():
        regard.attention(query[:64], key[:64], value[:64])  # warm up
        start = peak_memory()
        _, weights = measure("attend", lambda: regard.attend(query, key, value, mask=regard.Causal()))  # type: ignore[misc]
        measure("topk(5)", lambda: weights.topk(5))
        measure("entropy()", weights.entropy)
        measure("received()", weights.received)
        measure("pool(128, 128)", lambda: weights.pool(128, 128))
        measure("one row", lambda: weights[tokens // 2])
    total = sum(float(str(result["seconds"])) for result in results)
    print(f"  together         {total:6.1f} s")
    return results
