"""What it takes to look at 65,536 tokens: time and peak memory, each operation in turn."""

import resource
import time
from collections.abc import Callable

import torch

import regard

TOKENS, WIDTH = 65_536, 64


def main() -> list[dict[str, object]]:
    """Attend to a long sequence and look at its weights in every way."""
    dense = TOKENS**2 * 4 / 1e9
    print(f"one head of {TOKENS:,} tokens, {WIDTH} wide, causal; dense weights would take {dense:.1f} GB")
    torch.manual_seed(0)
    query, key, value = (torch.randn(TOKENS, WIDTH) for _ in range(3))
    start, results = _peak(), []

    def measure(name: str, run: Callable[[], object]) -> object:
        begun = time.perf_counter()
        found = run()
        taken, held = time.perf_counter() - begun, _peak() - start
        print(f"  {name:16} {taken:6.1f} s   peak {held:5.0f} MB above the inputs")
        results.append({"name": name, "seconds": taken, "peak_mb": held})
        return found

    with torch.no_grad():
        regard.attention(query[:64], key[:64], value[:64])  # warm up
        start = _peak()
        _, weights = measure("attend", lambda: regard.attend(query, key, value, mask=regard.Causal()))  # type: ignore[misc]
        measure("top(5)", lambda: weights.top(5))
        measure("entropy()", weights.entropy)
        measure("received()", weights.received)
        measure("pool(128, 128)", lambda: weights.pool(128, 128))
        measure("one row", lambda: weights[TOKENS // 2])
    total = sum(float(str(result["seconds"])) for result in results)
    print(f"  together         {total:6.1f} s")
    return results


def _peak() -> float:
    """The most memory this process has held so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
