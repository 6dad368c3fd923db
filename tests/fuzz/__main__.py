"""The command line of the fuzzer."""

import argparse
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.fuzz import runner
from tests.fuzz.runner import WEIGHTS, Problem
from tests.processor import disable_broken_amx


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz; the exit status is 1 if anything failed."""
    disable_broken_amx()
    options = _parser().parse_args(arguments)
    targets = options.only or list(WEIGHTS)
    if options.list:
        print("\n".join(WEIGHTS))
        return 0
    found: dict[tuple[str, str], list[Problem]] = {}
    with tempfile.TemporaryDirectory(prefix="regard-fuzz-") as shared:
        for target in targets:
            if options.case is not None:
                numbers: Iterator[int] = iter(options.case)
                seconds = float("inf")
            else:
                numbers = itertools.count(options.seed)
                seconds = options.minutes * 60 * WEIGHTS[target] / sum(WEIGHTS[name] for name in targets)
            for problem in _fuzz(target, numbers, seconds, Path(shared)):
                found.setdefault((target, problem.kind), []).append(problem)
    for problems in found.values():
        _print(problems)
    return 1 if found else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz regard.")
    parser.add_argument("--minutes", type=float, default=10, help="time in all, divided among the targets")
    parser.add_argument("--seed", type=int, help="number of the first case; default: random")
    parser.add_argument("--only", nargs="+", metavar="TARGET", choices=list(WEIGHTS), help="these targets")
    parser.add_argument("--case", type=_range, metavar="N or A-B", help="run these cases, in one process")
    parser.add_argument("--list", action="store_true", help="print the names of the targets")
    parser.set_defaults(seed=random.SystemRandom().randrange(10**8))
    return parser


def _range(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def _fuzz(target: str, numbers: Iterator[int], seconds: float, shared: Path) -> list[Problem]:
    """Run a target for a number of seconds, and print the number of cases."""
    begin, count, problems = time.monotonic(), 0, []
    cases = runner.cases(target, numbers, shared)
    for problem in cases:
        count += 1
        if problem is not None:
            problems.append(problem)
        if time.monotonic() - begin > seconds:
            break
    cases.close()  # type: ignore[attr-defined]
    rate = count / (time.monotonic() - begin)
    told = f", {len(problems):,} failed" if problems else ""
    print(f"{target:10}{count:8,} cases, {rate:6.1f} per second{told}", flush=True)
    return problems


def _print(problems: list[Problem]) -> None:
    """Print a failure and how often it occurred."""
    shortest = min(problems, key=lambda problem: (len(problem.notes), problem.number))
    print(f"\nFAILED {shortest.target}: {shortest.kind}" + (f" ({len(problems)} ×)" if problems[1:] else ""))
    print(f"  case    {shortest.notes or '?'}")
    print("  detail  " + shortest.detail.replace("\n", "\n          "))
    print(f"  replay  python -m tests.fuzz --only {shortest.target} --case {shortest.number}")


if __name__ == "__main__":
    sys.exit(main())
