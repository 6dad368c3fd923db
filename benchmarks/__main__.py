"""Run the groups named, or all but `long`, `watching` and `sharding`, and write benchmarks.json."""

import argparse
import json
import platform
import sys
import time

import torch

import regard
from benchmarks import long, machine, memory, sharding, speed, table, training, translating, watching
from regard._util.files import write_atomic

SPEED = (*speed.GROUPS, "memory", "training", "translating")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("groups", nargs="*", default=["speed"], metavar="group", help=", ".join(_names()))
    parser.add_argument(
        "--quick", action="store_true", help="see that everything runs; the figures mean little"
    )
    asked = parser.parse_args()
    unknown = [name for name in asked.groups if name not in _names()]
    if unknown:
        sys.exit(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(_names())}.")
    groups = [name for name in SPEED if name in asked.groups or "speed" in asked.groups]

    begun, about = time.perf_counter(), machine.describe()
    found: dict[str, object] = {
        "regard": regard.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": about,
        "quick": asked.quick,
    }
    print(f"{about['cpu']}, {about['cores']} cores; torch {torch.__version__}; float32 unless said")
    if "long" in asked.groups:  # first: a process remembers its peak
        found["long"] = long.main(asked.quick)
    if "watching" in asked.groups:
        found["watching"] = watching.main(asked.quick)
    if "sharding" in asked.groups:
        found["sharding"] = sharding.main(asked.quick)
    races = speed.main([name for name in groups if name in speed.GROUPS], asked.quick)
    if "training" in groups:
        races += training.main(asked.quick)
    if "translating" in groups:
        races += translating.main(asked.quick)
    found["races"] = races
    if "memory" in groups:
        found["memory"] = memory.main(asked.quick)
    if races:
        found["targets"] = table.summary(races)
    found["minutes"] = (time.perf_counter() - begun) / 60
    path = write_atomic("benchmarks.json", json.dumps(found, indent=1).encode())
    print(f"written to {path} after {found['minutes']:.1f} minutes")
    if any("error" in result for result in races):
        sys.exit(1)


def _names() -> list[str]:
    return ["speed", *SPEED, "long", "watching", "sharding"]


if __name__ == "__main__":
    main()
