"""Slowdown while another process occupies one core. The goal is a factor of at most 2.5.

One of two cores remains, so work on two threads takes at least 1.5 to 2 times as long. Threads that wait for
each other add to this: OpenMP threads spin by default, so a thread that is not running delays the others by a
whole time slice. The worker processes therefore set GOMP_SPINCOUNT, as the command line does; --spin measures
the default.
"""

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from benchmarks.workers import receive, start_workers

LIMIT = 2.5
SECONDS = 4.0  # per task, quiet and busy
Task = Callable[[], object]


def main(quick: bool = False, spin: bool = False) -> list[dict[str, object]]:
    """Measure every task with and without a busy process; return one result per task."""
    print(f"\nbusy: time alongside a process that occupies a core / time alone; 2 threads; goal ≤ {LIMIT}")
    if not spin:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # read by the workers when they import torch
    seconds = 0.3 if quick else SECONDS
    results = []
    with start_workers(work, {"worker": (seconds,)}) as pipes:
        pipe = pipes["worker"]
        for name in receive(pipe):
            quiet = _measure(pipe, name)
            with_load = _measure_under_load(pipe, name)
            ratio = with_load / quiet
            print(f"  {name:32}{quiet * 1e3:9.2f} ms{with_load * 1e3:9.2f} ms{ratio:7.2f} ×", flush=True)
            results.append(
                {
                    "group": "busy",
                    "name": name,
                    "seconds": {"alone": quiet, "busy": with_load},
                    "ratios": {"busy": ratio},
                    "limit": LIMIT,
                    "met": ratio <= LIMIT,
                }
            )
    return results


def _measure(pipe: Connection, name: str) -> float:
    pipe.send(name)
    seconds: float = receive(pipe)
    return seconds


def _measure_under_load(pipe: Connection, name: str) -> float:
    busy = multiprocessing.get_context("spawn").Process(target=occupy, daemon=True)
    busy.start()
    try:
        time.sleep(0.5)  # until the process is running
        return _measure(pipe, name)
    finally:
        busy.terminate()
        busy.join()


def occupy() -> None:
    """Occupy one core."""
    while True:
        pass


def work(pipe: Connection, seconds: float) -> None:
    """Worker process: send the names of the tasks, then measure one per message."""
    tasks = create_tasks()
    pipe.send(list(tasks))
    while True:
        task = tasks[pipe.recv()]
        task()
        times, end = [], time.perf_counter() + seconds
        while time.perf_counter() < end or len(times) < 3:
            start = time.perf_counter()
            task()
            times.append(time.perf_counter() - start)
        pipe.send(statistics.mean(times))  # the mean: delays are rare and long


def create_tasks() -> dict[str, Task]:
    """Create the operator, a training step and translations of a random model."""
    import torch

    import regard
    from regard.models import Packed, Transformer, TransformerConfig, keep_memory, quantize
    from regard.translation.decoding.search import search
    from regard.translation.decoding.strategies import Beam

    keep_memory()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    inputs = [torch.randn(16, 8, 64, 64, requires_grad=True) for _ in range(3)]
    model = Transformer(8_000, TransformerConfig(), share=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = Packed.of([[5 + (i + j) % 7_000 for j in range(10 + i % 20)] for i in range(64)])
    frozen = quantize(model, "float32").eval()
    int8 = quantize(frozen, "int8")

    def forward() -> None:
        with torch.no_grad():
            regard.attention(*inputs)

    def backward() -> None:
        regard.attention(*inputs).sum().backward()

    def train() -> None:
        model.loss(batch, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    def translate(searched: Transformer, sentences: int) -> Task:
        source = Packed.of([[5 + i] * 12 for i in range(sentences)])
        return lambda: search(searched, source, Beam(5), max_new_tokens=12)

    return {
        "attention 16,8,64 forward": forward,
        "attention 16,8,64 with backward": backward,
        "training step": train,
        "translation, batch 64, float32": translate(frozen, 64),
        "translation, batch 64, int8": translate(int8, 64),
        "translation, batch 1, float32": translate(frozen, 1),
        "translation, batch 1, int8": translate(int8, 1),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spin", action="store_true", help="OpenMP's default: threads spin while they wait")
    parser.add_argument("--quick", action="store_true", help="only check that everything runs")
    options = parser.parse_args()
    main(options.quick, options.spin)
