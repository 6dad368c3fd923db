"""How long a call takes beside the same call elsewhere: ratios above 1 mean that regard is faster."""

import statistics
from collections.abc import Callable, Iterable

import torch

from benchmarks import decoding, dots, encoders, hosted, machine, others, table
from benchmarks.harness import Race, differences, race, tolerance

GROUPS: dict[str, Callable[[], Iterable[Race]]] = {
    "forward": dots.forward,
    "backward": dots.backward,
    "decode": dots.decode,
    "packed": others.packed,
    "relative": others.relative,
    "additive": others.additive,
    "sparse": others.sparse,
    "visible": others.visible,
    "shapes": dots.shapes,
    "small": dots.small,
    "stepping": decoding.stepping,
    "encoder": encoders.encoders,
    "hosted": hosted.hosted,
}
SECONDS = {2: 1.5, 1: 0.7}  # per race, by threads


def main(groups: Iterable[str], quick: bool = False) -> list[dict[str, object]]:
    """Run the races of these groups on two threads, then those that are also about one on one."""
    races = [race for group in groups for race in GROUPS[group]()]
    results, before = [], torch.get_num_threads()
    for threads in (2, 1):
        torch.set_num_threads(threads)
        group = None
        for one in races:
            if threads not in (one.threads[:1] if quick else one.threads):
                continue
            if one.group != group:
                group = one.group
                table.head(one, threads)
            results.append(run(one, threads, 0.03 if quick else SECONDS[threads], least=1 if quick else 3))
            table.line(results[-1])
    torch.set_num_threads(before)
    return results


def run(one: Race, threads: int, seconds: float, least: int) -> dict[str, object]:
    """One race, as a line of the table and of benchmarks.json. One that fails has missed its target."""
    found: dict[str, object] = {"group": one.group, "name": one.name, "threads": threads}
    found |= {"target": one.target, "limit": one.limit, "bytes": one.bytes, "flops": one.flops}
    try:
        with torch.set_grad_enabled(one.backward):
            return found | measure(one, threads, seconds, least)
    except Exception as error:  # the other races are worth running
        missed = None if one.target is None and one.limit is None else False
        return found | {"error": f"{type(error).__name__}: {error}", "met": missed}


def measure(one: Race, threads: int, seconds: float, least: int) -> dict[str, object]:
    """Time the contenders, and see that they agree."""
    lineup = one.contenders()
    results = {name: call() for name, call in lineup.contenders.items()}
    apart, enough = differences(results), tolerance(results["regard"])
    del results
    peak, source = machine.peak(threads)
    times = race(lineup.contenders, seconds, least)
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    ours = medians["regard"]
    ratios = {name: taken / ours for name, taken in medians.items() if name != "regard"}
    wrong = {name: distance for name, distance in apart.items() if not distance <= enough}  # NaN is wrong
    met = one.met(next(iter(ratios.values())))
    return {
        "implementation": lineup.implementation,
        "seconds": medians,
        "spread": {name: _spread(taken) for name, taken in times.items()},
        "rounds": len(times["regard"]),
        "ratios": ratios,
        "flop_rate": one.flops / ours if one.flops else None,
        "share": one.flops / ours / peak if one.flops else None,
        "byte_rate": one.bytes / ours if one.bytes else None,
        "peak": peak,
        "peak_source": source,
        "differences": apart,
        "wrong": wrong,
        "met": met if met is None else met and not wrong,
    }


def _spread(times: list[float]) -> list[float]:
    """The quartiles."""
    return statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
