"""What was found, printed for people."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.harness import Race

Result = Mapping[str, Any]
FORMAT = "{:36}{:>10}{:>10}{:>8}{:>8}{:>14}   {}"


def head(race: Race, threads: int) -> None:
    """The head of a group's table."""
    peers = "regard's time / attention's" if race.limit is not None else "peers' time / regard's"
    title = f"{race.group}, {threads} thread{'s' if threads > 1 else ''}"
    print("\n" + FORMAT.format(title, "regard", "GFLOP/s", "% peak", "GB/s", "target", peers), flush=True)


def line(result: Result) -> None:
    """One race."""
    if "error" in result:
        print(f"  {result['name']:34}failed: {result['error'].splitlines()[0]}", flush=True)
        return
    ratios = result["ratios"].items()
    shown = "   ".join(f"{peer} {1 / ratio if result['limit'] else ratio:5.2f}" for peer, ratio in ratios)
    apart = "".join(f"   differs from {peer} by {far:.0e}!" for peer, far in result["wrong"].items())
    cells = (
        duration(result["seconds"]["regard"]),
        _number(result["flop_rate"], 1e9),
        _number(result["share"], 0.01),
        _number(result["byte_rate"], 1e9),
        goal(result),
    )
    print(FORMAT.format("  " + result["name"], *cells, shown + apart), flush=True)


def goal(result: Result) -> str:
    """The target, and whether it was met: ≥ 3.5 met."""
    if result["target"] is None and result["limit"] is None:
        return ""
    bound = f"≤ {result['limit']:g}" if result["limit"] is not None else f"≥ {result['target']:g}"
    return f"{bound} {'met' if result['met'] else 'NOT'}"


def duration(seconds: float) -> str:
    """Three digits of it, in ms, or in µs below 0.1 ms."""
    if seconds < 1e-4:
        return f"{seconds * 1e6:.1f} µs"
    digits = 3 if seconds < 1e-3 else 2 if seconds < 1e-2 else 1 if seconds < 0.1 else 0
    return f"{seconds * 1e3:.{digits}f} ms"


def summary(results: Iterable[Result]) -> dict[str, object]:
    """How many targets were met, and which were not."""
    results = list(results)
    judged = [result for result in results if result["met"] is not None]
    missed = [result for result in judged if not result["met"]]
    ways = Counter(result.get("implementation", "failed") for result in results)
    sources = {result["peak_source"]: result["peak"] for result in results if "peak_source" in result}
    if "matmul" in sources:
        print("\n% peak is of a 1024³ matmul's rate in torch: regard.mechanism.fused is not available.")
    elif sources:
        print("\n% peak is of a register-only FMA loop's rate, measured before each race.")
    print("regard's calls:", ", ".join(f"{count} {way}" for way, count in ways.items()))
    print(f"targets: {len(judged) - len(missed)} of {len(judged)} met")
    for result in missed:
        threads = f"{result['threads']} thread{'s' if result['threads'] > 1 else ''}"
        print(f"  missed: {result['group']} {result['name']}, {threads}: {_reached(result)}")
    names = [f"{result['group']} {result['name']}, {result['threads']}" for result in missed]
    return {"met": len(judged) - len(missed), "of": len(judged), "missed": names}


def _reached(result: Result) -> str:
    if "error" in result:
        return f"failed: {result['error'].splitlines()[0]}"
    ratio = next(iter(result["ratios"].values()))
    reached = 1 / ratio if result["limit"] is not None else ratio
    wrong = ", and the results differ" if result["wrong"] else ""
    return f"{reached:.2f}, {goal(result).rpartition(' ')[0]}{wrong}"


def _number(value: float | None, unit: float) -> str:
    return "–" if value is None else f"{value / unit:.0f}" if value >= 10 * unit else f"{value / unit:.1f}"
