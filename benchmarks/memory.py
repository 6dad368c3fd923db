"""Peak memory of a long attention call, excluding its inputs. Each call runs in a separate process."""

import json
import subprocess
import sys

import torch
from torch.nn.functional import scaled_dot_product_attention

import regard
from benchmarks.machine import peak_memory

CALLS = {"attention": regard.attention, "attend": regard.attend, "sdpa": scaled_dot_product_attention}
RUNS = ("attention", "attend", "sdpa", "attention + backward", "sdpa + backward")


def main(quick: bool = False) -> list[dict[str, object]]:
    """Measure the peak memory of regard and SDPA with 8 heads and 8,192 tokens."""
    tokens = 2048 if quick else 8192
    dense = 8 * tokens**2 * 4 / 1e6
    print(f"\nmemory excluding the inputs, 1,8,{tokens}, in MB; dense weights would take {dense:.0f}")
    results: list[dict[str, object]] = []
    for name in RUNS:
        command = [sys.executable, "-m", "benchmarks.memory", name, str(tokens)]
        process = subprocess.run(command, capture_output=True, text=True)
        if process.returncode:
            print(f"  {name:34}failed: {process.stderr.strip().splitlines()[-1]}")
            results.append({"name": name, "error": process.stderr})
            continue
        peak_mb = json.loads(process.stdout)
        print(f"  {name:34}{peak_mb:10.0f}", flush=True)
        results.append({"name": name, "tokens": tokens, "peak_mb": peak_mb})
    return results


def measure(name: str, tokens: int) -> float:
    """Run one call in this fresh process and return its peak memory excluding the inputs, in MB."""
    torch.set_num_threads(2)
    backward = name.endswith("backward")
    call = CALLS[name.split()[0]]
    inputs = [torch.randn(1, 8, tokens, 64).requires_grad_(backward) for _ in range(3)]
    grad = torch.randn(1, 8, tokens, 64) if backward else torch.empty(0)

    def run(size: int) -> object:
        leaves = [x[:, :, :size] for x in inputs]
        output = call(*leaves)
        if not backward:
            return output
        return torch.autograd.grad(output, leaves, grad[:, :, :size])

    with torch.set_grad_enabled(backward):
        run(64)  # warm up: libraries and threads allocate their memory
        start = peak_memory()
        _output = run(tokens)  # keeps the result alive
    return peak_memory() - start


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
