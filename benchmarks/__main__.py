"""Run benchmarks and write benchmarks.json.

Default: all groups except long, watching, sharding, flex and busy.
"""

import argparse
import json
import platform
import sys
import time

import torch

import regard
from benchmarks import (
    busy,
    end_to_end,
    long,
    machine,
    memory,
    sharding,
    speed,
    table,
    training,
    translating,
    watching,
)
from regard._util.files import write_atomic
from tests.processor import disable_broken_amx

SPEED = (
    *(name for name in speed.GROUPS if name != "flex"),
    "memory",
    "training",
    "translating",
    "end-to-end",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument(
        "groups", nargs="*", default=["speed"], metavar="group", help=", ".join(_group_names())
    )
    parser.add_argument(
        "--quick", action="store_true", help="only check that everything runs; the timings are meaningless"
    )
    args = parser.parse_args()
    disable_broken_amx()
    unknown = [name for name in args.groups if name not in _group_names()]
    if unknown:
        sys.exit(f"Unknown benchmark {', '.join(unknown)}. Choose from {', '.join(_group_names())}.")
    groups = [name for name in SPEED if name in args.groups or "speed" in args.groups]
    groups += ["flex"] if "flex" in args.groups else []  # torch compiles for minutes

    start, system = time.perf_counter(), machine.describe()
    report: dict[str, object] = {
        "regard": regard.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": system,
        "quick": args.quick,
    }
    print(f"{system['cpu']}, {system['cores']} cores; torch {torch.__version__}; float32 unless noted")
    if "long" in args.groups:  # first: peak memory is measured over the lifetime of the process
        report["long"] = long.main(args.quick)
    if "watching" in args.groups:
        report["watching"] = watching.main(args.quick)
    if "sharding" in args.groups:
        report["sharding"] = sharding.main(args.quick)
    results = speed.main([name for name in groups if name in speed.GROUPS], args.quick)
    if "training" in groups:
        results += training.main(args.quick)
    if "translating" in groups:
        results += translating.main(args.quick)
    if "end-to-end" in groups:
        report["end-to-end"] = end_to_end.main(args.quick)
    if "busy" in args.groups:
        report["busy"] = busy.main(args.quick)
    report["comparisons"] = results
    if "memory" in groups:
        report["memory"] = memory.main(args.quick)
    if results:
        report["targets"] = table.print_summary(results)
    report["minutes"] = (time.perf_counter() - start) / 60
    path = write_atomic("benchmarks.json", json.dumps(report, indent=1).encode())
    print(f"Saved {path} after {report['minutes']:.1f} minutes.")
    if any("error" in result for result in results):
        sys.exit(1)


def _group_names() -> list[str]:
    return ["speed", *SPEED, "long", "watching", "sharding", "flex", "busy"]


if __name__ == "__main__":
    main()
