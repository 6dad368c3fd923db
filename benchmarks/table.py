"""Print results as tables."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.harness import Comparison

Result = Mapping[str, Any]
FORMAT = "{:36}{:>10}{:>10}{:>8}{:>8}{:>14}   {}"


def print_header(comparison: Comparison, threads: int) -> None:
    """Print the column titles of a group."""
    peers = "regard's time / attention's" if comparison.limit is not None else "peers' time / regard's"
    title = f"{comparison.group}, {threads} thread{'s' if threads > 1 else ''}"
    print("\n" + FORMAT.format(title, "regard", "GFLOP/s", "% peak", "GB/s", "target", peers), flush=True)


def print_row(result: Result) -> None:
    """Print one result."""
    if "error" in result:
        print(f"  {result['name']:34}failed: {result['error'].splitlines()[0]}", flush=True)
        return
    ratios = "   ".join(
        f"{peer} {1 / ratio if result['limit'] else ratio:5.2f}" for peer, ratio in result["ratios"].items()
    )
    errors = "".join(f"   differs from {peer} by {error:.0e}!" for peer, error in result["wrong"].items())
    cells = (
        format_duration(result["seconds"]["regard"]),
        _format_number(result["flop_rate"], 1e9),
        _format_number(result["share"], 0.01),
        _format_number(result["byte_rate"], 1e9),
        format_target(result),
    )
    print(FORMAT.format("  " + result["name"], *cells, ratios + errors), flush=True)


def format_target(result: Result) -> str:
    """Format the target and whether it was met, such as "≥ 3.5 met"."""
    if result["target"] is None and result["limit"] is None:
        return ""
    bound = f"≤ {result['limit']:g}" if result["limit"] is not None else f"≥ {result['target']:g}"
    return f"{bound} {'met' if result['met'] else 'missed'}"


def format_duration(seconds: float) -> str:
    """Format with about three digits, in ms; in µs below 0.1 ms."""
    if seconds < 1e-4:
        return f"{seconds * 1e6:.1f} µs"
    digits = 3 if seconds < 1e-3 else 2 if seconds < 1e-2 else 1 if seconds < 0.1 else 0
    return f"{seconds * 1e3:.{digits}f} ms"


def print_summary(results: Iterable[Result]) -> dict[str, object]:
    """Print and return the number of met targets, and the missed ones."""
    results = list(results)
    with_target = [result for result in results if result["met"] is not None]
    missed = [result for result in with_target if not result["met"]]
    implementations = Counter(result.get("implementation", "failed") for result in results)
    sources = {result["peak_source"]: result["peak"] for result in results if "peak_source" in result}
    if "matmul" in sources:
        print("\n% peak: relative to a 1024³ matmul in torch (the kernels are not available).")
    elif sources:
        print("\n% peak: relative to a register-only FMA loop, measured before each comparison.")
    print("implementations:", ", ".join(f"{count} {name}" for name, count in implementations.items()))
    print(f"targets: {len(with_target) - len(missed)} of {len(with_target)} met")
    for result in missed:
        threads = f"{result['threads']} thread{'s' if result['threads'] > 1 else ''}"
        print(f"  missed: {result['group']} {result['name']}, {threads}: {_format_miss(result)}")
    names = [f"{result['group']} {result['name']}, {result['threads']}" for result in missed]
    return {"met": len(with_target) - len(missed), "of": len(with_target), "missed": names}


def _format_miss(result: Result) -> str:
    if "error" in result:
        return f"failed: {result['error'].splitlines()[0]}"
    ratio = result.get("ratio") or next(iter(result["ratios"].values()))
    reached = 1 / ratio if result["limit"] is not None else ratio
    mismatch = "; the results differ" if result["wrong"] else ""
    return f"{reached:.2f}, {format_target(result).rpartition(' ')[0]}{mismatch}"


def _format_number(value: float | None, unit: float) -> str:
    return "–" if value is None else f"{value / unit:.0f}" if value >= 10 * unit else f"{value / unit:.1f}"
