"""Time attention calls in regard and other libraries. Ratios above 1 mean that regard is faster."""

import statistics
import sys
from collections.abc import Callable, Iterable

import torch

from benchmarks import decoding, dots, encoders, flex, hosted, machine, others, packing, quantized, table
from benchmarks.harness import Comparison, differences, time_calls, tolerance

GROUPS: dict[str, Callable[[], Iterable[Comparison]]] = {
    "forward": dots.forward,
    "backward": dots.backward,
    "decode": dots.decode,
    "quantized": quantized.quantized,
    "packed": others.packed,
    "relative": others.relative,
    "additive": others.additive,
    "sparse": others.sparse,
    "visible": others.visible,
    "shapes": dots.shapes,
    "small": dots.small,
    "stepping": decoding.stepping,
    "encoder": encoders.encoders,
    "padding": packing.packing,
    "hosted": hosted.hosted,
    "flex": flex.flex,
}
SECONDS = {2: 1.5, 1: 0.7}  # per comparison, by number of threads


def main(groups: Iterable[str], quick: bool = False) -> list[dict[str, object]]:
    """Run these groups with two threads, then their single-threaded comparisons."""
    comparisons = [comparison for group in groups for comparison in GROUPS[group]()]
    results, before = [], torch.get_num_threads()
    for threads in (2, 1):
        torch.set_num_threads(threads)
        group = None
        for comparison in comparisons:
            if threads not in (comparison.threads[:1] if quick else comparison.threads):
                continue
            if comparison.group != group:
                group = comparison.group
                table.print_header(comparison, threads)
            seconds, min_rounds = (0.03, 1) if quick else (SECONDS[threads], 3)
            results.append(run(comparison, threads, seconds, min_rounds))
            table.print_row(results[-1])
    torch.set_num_threads(before)
    return results


def run_group(comparisons: Iterable[Comparison], seconds: float, min_rounds: int) -> None:
    """Run one group with two threads and print its table. With --quick, only check that it runs."""
    torch.set_num_threads(2)
    quick, system = "--quick" in sys.argv, machine.describe()
    print(f"{system['cpu']}, load {system['load']:.1f}")
    results: list[dict[str, object]] = []
    for comparison in comparisons:
        if not results:
            table.print_header(comparison, 2)
        results.append(run(comparison, 2, 0.1 if quick else seconds, 1 if quick else min_rounds))
        table.print_row(results[-1])
    table.print_summary(results)


def run(comparison: Comparison, threads: int, seconds: float, min_rounds: int) -> dict[str, object]:
    """Run a comparison and return its entry for benchmarks.json. An exception counts as a missed target."""
    result: dict[str, object] = {"group": comparison.group, "name": comparison.name, "threads": threads}
    result |= {
        "target": comparison.target,
        "limit": comparison.limit,
        "bytes": comparison.bytes,
        "flops": comparison.flops,
    }
    try:
        with torch.set_grad_enabled(comparison.backward):
            return result | measure(comparison, threads, seconds, min_rounds)
    except Exception as error:  # continue with the other comparisons
        missed = None if comparison.target is None and comparison.limit is None else False
        return result | {"error": f"{type(error).__name__}: {error}", "met": missed}


def measure(comparison: Comparison, threads: int, seconds: float, min_rounds: int) -> dict[str, object]:
    """Time the calls and compare their results."""
    candidates = comparison.setup()
    results = {name: call() for name, call in candidates.calls.items()}
    errors, max_error = differences(results), tolerance(results["regard"])
    del results
    peak, source = machine.peak(threads)
    times = time_calls(candidates.calls, seconds, min_rounds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    regard_seconds = medians["regard"]
    ratios = {name: seconds / regard_seconds for name, seconds in medians.items() if name != "regard"}
    wrong = {name: error for name, error in errors.items() if not error <= max_error}  # NaN is wrong
    ratio = comparison.ratio(ratios)
    met = comparison.met(ratio)
    return {
        "implementation": candidates.implementation,
        "seconds": medians,
        "spread": {name: _quartiles(values) for name, values in times.items()},
        "rounds": len(times["regard"]),
        "ratios": ratios,
        "ratio": ratio,
        "flop_rate": comparison.flops / regard_seconds if comparison.flops else None,
        "share": comparison.flops / regard_seconds / peak if comparison.flops else None,
        "byte_rate": comparison.bytes / regard_seconds if comparison.bytes else None,
        "peak": peak,
        "peak_source": source,
        "differences": errors,
        "wrong": wrong,
        "met": met if met is None else met and not wrong,
    }


def _quartiles(times: list[float]) -> list[float]:
    return statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
