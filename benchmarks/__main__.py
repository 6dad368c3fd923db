"""Run the benchmarks named on the command line, or all, and write what they found to benchmarks.json."""

import json
import platform
import sys

import torch

import regard
from benchmarks import long, speed
from regard.mechanism.files import write_whole

BENCHMARKS = {"long": long.main, "speed": speed.main}  # memory first: a process remembers its peak


def main() -> None:
    names = sys.argv[1:] or list(BENCHMARKS)
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        sys.exit(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}.")
    about = {"regard": regard.__version__, "torch": torch.__version__, "python": platform.python_version()}
    found = {name: BENCHMARKS[name]() for name in names}
    print("written to", write_whole("benchmarks.json", json.dumps({**about, **found}, indent=1).encode()))


if __name__ == "__main__":
    main()
