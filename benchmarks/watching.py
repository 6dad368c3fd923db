"""Cost of `regard.watch` for a decoder of 8 layers on a long text, and of reading the recorded weights.

python -m benchmarks.watching [tokens]
python -m benchmarks.watching --reads [tokens]   # each measure compared with a forward pass of one layer
python -m benchmarks.watching --eager [tokens]   # compared with output_attentions
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import regard
from benchmarks.machine import peak_memory

TOKENS, LAYERS, HEADS, WIDTH = 32_768, 8, 8, 512
EAGER_TOKENS = 4096  # 4.3 GB of dense weights
MAX_MEMORY, MAX_RATIO = 8192, 1.05  # MB; time relative to the unwatched forward pass
MAX_READ_RATIO = 3.0  # time of a measure relative to a forward pass of the layer
MAX_VARIATION = 1.1  # slowest / fastest unwatched forward pass; beyond this, the ratio is inconclusive


def main(quick: bool = False) -> dict[str, object]:
    """Run `measure` and `measure_reads` in separate processes, so that each has its own peak memory."""
    tokens = str(TOKENS // 16 if quick else TOKENS)
    result: dict[str, object] = {}
    for options in ([], ["--reads"]):
        command = [sys.executable, "-m", "benchmarks.watching", tokens, *options]
        process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        *lines, last = process.stdout.splitlines()
        print("\n".join(lines), flush=True)
        result |= json.loads(last)
    return result


def create_decoder(layers: int = LAYERS) -> Any:
    """Create a Llama-like decoder with random parameters and its default attention, SDPA."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=1000,
        max_position_embeddings=TOKENS,
    )
    torch.manual_seed(0)
    return LlamaModel(config).eval()


@torch.no_grad()
def measure(tokens: int, threads: int = 2) -> dict[str, object]:
    """Time forward passes with and without `watch`, alternating; then every statistic of every layer."""
    torch.set_num_threads(threads)
    model, ids = create_decoder(), torch.randint(0, 1000, (1, tokens))
    dense = LAYERS * HEADS * tokens**2 * 4 / 1e9
    title = f"decoder with {LAYERS} layers and {HEADS} heads, {tokens:,} tokens"
    print(f"{title}; dense weights would take {dense:.0f} GB")
    model(ids[:, :256], use_cache=False)  # warm up
    unwatched, watched = [], []
    for _ in range(3):
        unwatched.append(_seconds(lambda: model(ids, use_cache=False)))
        with regard.watch(model) as seen:
            watched.append(_seconds(lambda: model(ids, use_cache=False)))
    ratio = statistics.median(watched) / statistics.median(unwatched)
    forward = statistics.median(unwatched)
    print(f"  forward          {forward:7.1f} s, watched {ratio:.3f} × as long; peak {peak_memory():.0f} MB")
    reductions = {
        "topk(5)": lambda weights: weights.topk(5),
        "entropy()": lambda weights: weights.entropy(),
        "received()": lambda weights: weights.received(),
        "pool(128, 128)": lambda weights: weights.pool(128, 128),
    }
    seconds = {}
    for name, compute in reductions.items():
        seconds[name] = sum(_seconds(lambda w=w, compute=compute: compute(w)) for w in seen.values())
        print(
            f"  {name:16} {seconds[name]:7.1f} s for all layers and heads; peak {peak_memory():.0f} MB",
            flush=True,
        )
    memory_met, time_met = peak_memory() < MAX_MEMORY, ratio <= MAX_RATIO
    print(f"  at most {MAX_MEMORY} MB: {'met' if memory_met else 'MISSED'}")
    if max(unwatched) > MAX_VARIATION * min(unwatched):
        spread = max(unwatched) / min(unwatched)
        print(f"  at most {MAX_RATIO} ×: inconclusive, because the unwatched pass varied by {spread:.1f} ×")
    else:
        print(f"  at most {MAX_RATIO} ×: {'met' if time_met else 'MISSED'}")
    return {
        "tokens": tokens,
        "ratio": ratio,
        "forward": unwatched,
        "watched": watched,
        "seconds": seconds,
        "peak_mb": peak_memory(),
    }


READS: dict[str, Callable[[regard.Seen], object]] = {
    "heads()": lambda seen: seen.heads(frame=False),
    "w[..., 0]": lambda seen: seen[0][..., 0],
    "spans(4)": lambda seen: seen.spans(
        {str(i): (i * _length(seen) // 4, (i + 1) * _length(seen) // 4) for i in range(4)}, frame=False
    ),
    "key_scores(h2o)": lambda seen: seen.key_scores("h2o"),
    "key_scores(snapkv)": lambda seen: seen.key_scores("snapkv"),
    "key_scores(tova)": lambda seen: seen.key_scores("tova"),
}


def _length(seen: regard.Seen) -> int:
    return seen[0].shape[-1]


@torch.no_grad()
def measure_reads(tokens: int, rounds: int = 2, threads: int = 2) -> dict[str, object]:
    """Time each measure of a layer after a forward pass, so that it includes the row statistic τ.

    One token makes up half of the text, as separators or padding may.
    """
    torch.set_num_threads(threads)
    model, ids = create_decoder(layers=1), torch.randint(0, 1000, (1, tokens))
    ids[torch.rand(1, tokens) < 0.5] = 0
    model(ids[:, :256], use_cache=False)  # warm up
    print(f"one layer with {HEADS} heads, {tokens:,} tokens")
    forward, seconds = [], dict[str, list[float]]((name, []) for name in READS)
    for _ in range(rounds):
        for name, read in READS.items():
            with regard.watch(model) as seen:
                forward.append(_seconds(lambda: model(ids, use_cache=False)))
            seconds[name].append(_seconds(lambda read=read, seen=seen: read(seen)))
    layer = statistics.median(forward)
    print(f"  forward            {layer:7.2f} s; peak {peak_memory():.0f} MB")
    ratios = {name: statistics.median(times) / layer for name, times in seconds.items()}
    for name, ratio in ratios.items():
        met = "met" if ratio <= MAX_READ_RATIO else "MISSED"
        print(f"  {name:18} {ratio:7.2f} × the forward pass; at most {MAX_READ_RATIO:.0f} ×: {met}")
    return {"layer": forward, "reads": ratios}


def compare_with_eager(tokens: int) -> None:
    """Time the column sums of all weights of a watched and of an eager model, each in its own process."""
    print(f"column sums of all weights, {LAYERS} layers and {HEADS} heads, {tokens:,} tokens")
    seconds: dict[str, list[float]] = {"watched": [], "eager": []}
    for _ in range(3):
        for way, times in seconds.items():
            command = [sys.executable, "-m", "benchmarks.watching", str(tokens), "--way", way]
            output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            duration, memory = json.loads(output.splitlines()[-1])
            times.append(duration)
            print(f"  {way:8} {duration:6.1f} s; peak {memory:,.0f} MB", flush=True)
    ratio = statistics.median(seconds["eager"]) / statistics.median(seconds["watched"])
    print(f"  medians: eager takes {ratio:.2f} × as long")


@torch.no_grad()
def column_sums(tokens: int, way: str, threads: int = 2) -> tuple[float, float]:
    """Return the seconds that a forward pass and all column sums take, and the peak memory in MB."""
    torch.set_num_threads(threads)
    model, ids = create_decoder(), torch.randint(0, 1000, (1, tokens))
    if way == "eager":
        model.set_attn_implementation("eager")
    model(ids[:, :256], use_cache=False)  # warm up
    start = time.perf_counter()
    if way == "eager":
        for weights in model(ids, use_cache=False, output_attentions=True).attentions:
            weights.sum(-2)
    else:
        with regard.watch(model) as seen:
            model(ids, use_cache=False)
        for weights in seen.values():
            weights.received()
    return time.perf_counter() - start, peak_memory()


def _seconds(run: Any) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="watching", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "tokens",
        nargs="?",
        type=int,
        help=f"text length [default: {TOKENS:,}; {EAGER_TOKENS:,} with --eager]",
    )
    parser.add_argument("--reads", action="store_true", help="compare measures with a forward pass")
    parser.add_argument("--eager", action="store_true", help="compare with output_attentions")
    parser.add_argument("--way", choices=["watched", "eager"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(column_sums(options.tokens, options.way)))
    elif options.reads:
        print(json.dumps(measure_reads(options.tokens or TOKENS)))
    elif options.eager:
        compare_with_eager(options.tokens or EAGER_TOKENS)
    else:
        print(json.dumps(measure(options.tokens or TOKENS)))
