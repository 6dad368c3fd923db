"""A decoder of 8 layers, watched over a long text: what watching costs, and what it takes to look.

python -m benchmarks.watching [tokens]
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

import regard
from benchmarks.machine import peak_memory

TOKENS, LAYERS, HEADS, WIDTH = 32_768, 8, 8, 512
MOST_MEMORY, MOST_TIME = 8192, 1.05  # MB, and times the forward pass alone
STEADY = 1.1  # how much the forward pass alone may vary for that to be told


def main(quick: bool = False) -> dict[str, object]:
    """Run it in a process of its own, whose peak memory nothing else has raised."""
    tokens = TOKENS // 16 if quick else TOKENS
    command = [sys.executable, "-m", "benchmarks.watching", str(tokens)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    *lines, last = done.stdout.splitlines()
    print("\n".join(lines), flush=True)
    found: dict[str, object] = json.loads(last)
    return found


def decoder() -> Any:
    """A Llama-like decoder with random parameters, as it comes: its attention is SDPA."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=1000,
        max_position_embeddings=TOKENS,
    )
    torch.manual_seed(0)
    return LlamaModel(config).eval()


@torch.no_grad()
def measure(tokens: int, threads: int = 2) -> dict[str, object]:
    """Forward passes with and without, in turns; then every question to every layer."""
    torch.set_num_threads(threads)
    model, ids = decoder(), torch.randint(0, 1000, (1, tokens))
    dense = LAYERS * HEADS * tokens**2 * 4 / 1e9
    about = f"a decoder of {LAYERS} layers and {HEADS} heads, {tokens:,} tokens"
    print(f"{about}; dense weights would take {dense:.0f} GB")
    model(ids[:, :256], use_cache=False)  # warm up
    alone, under = [], []
    for _ in range(3):
        alone.append(_seconds(lambda: model(ids, use_cache=False)))
        with regard.watch(model) as seen:
            under.append(_seconds(lambda: model(ids, use_cache=False)))
    ratio = statistics.median(under) / statistics.median(alone)
    forward = statistics.median(alone)
    print(f"  forward          {forward:7.1f} s, watched {ratio:.3f} × as long; peak {peak_memory():.0f} MB")
    questions = {
        "topk(5)": lambda weights: weights.topk(5),
        "entropy()": lambda weights: weights.entropy(),
        "received()": lambda weights: weights.received(),
        "pool(128, 128)": lambda weights: weights.pool(128, 128),
    }
    seconds = {}
    for name, ask in questions.items():
        seconds[name] = sum(_seconds(lambda w=w, ask=ask: ask(w)) for w in seen.values())
        print(
            f"  {name:16} {seconds[name]:7.1f} s for all layers and heads; peak {peak_memory():.0f} MB",
            flush=True,
        )
    small, quick = peak_memory() < MOST_MEMORY, ratio <= MOST_TIME
    print(f"  at most {MOST_MEMORY} MB: {'met' if small else 'MISSED'}")
    if max(alone) > STEADY * min(alone):  # the same work, and nothing else
        spread = max(alone) / min(alone)
        print(f"  at most {MOST_TIME} ×: not told, as the pass alone varied {spread:.1f} ×")
    else:
        print(f"  at most {MOST_TIME} ×: {'met' if quick else 'MISSED'}")
    return {
        "tokens": tokens,
        "ratio": ratio,
        "forward": alone,
        "watched": under,
        "seconds": seconds,
        "peak_mb": peak_memory(),
    }


def _seconds(run: Any) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="watching", description=__doc__.partition("\n")[0])
    parser.add_argument("tokens", nargs="?", type=int, default=TOKENS)
    print(json.dumps(measure(parser.parse_args().tokens)))
