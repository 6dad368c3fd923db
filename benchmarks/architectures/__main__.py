"""Check `regard.watch` and the regard backend on small random models of every Hugging Face architecture.

    python -m benchmarks.architectures [name …]

Builds each model type of transformers with small sizes and random parameters, and compares the watched
weights with eager's `output_attentions`, or with the outputs of its softmax functions if it returns none.
Also compares watched with unwatched outputs, and outputs on regard with eager's. Without names, checks all
types in subprocesses and writes docs/reference/architectures.md.
"""

import argparse
import json
import logging
import signal
import subprocess
import sys
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.architectures.checks import Result, check
from regard._util.files import write_atomic

SECONDS = 60  # CPU time limit per model
BATCH = 100  # models per subprocess


def try_check(name: str) -> Result:
    """Return the result, or the reason for its absence."""

    def expire(*_: Any) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    signal.signal(signal.SIGPROF, expire)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        return check(name)
    except Exception as error:
        text = str(error).strip().replace("\n", " ")[:200]
        return Result(name, failed=f"{type(error).__name__}: {text}")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def check_in_subprocesses(names: list[str]) -> list[Result]:
    """Check batches of models in subprocesses, so a crash affects only one model."""
    results: dict[str, Result] = {}
    while pending := [name for name in names if name not in results][:BATCH]:
        with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as file:
            command = [sys.executable, "-m", "benchmarks.architectures", "--to", file.name, *pending]
            process = subprocess.run(command, check=False)
            for line in Path(file.name).read_text().splitlines():
                result = Result(**json.loads(line))
                results[result.name] = result
        rest = [name for name in pending if name not in results]
        if rest:
            results[rest[0]] = Result(rest[0], failed=f"the process ended with status {process.returncode}")
        print(f"{len(results)} of {len(names)}", file=sys.stderr, flush=True)
    return [results[name] for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(prog="architectures", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="name", help="model types [default: all]")
    parser.add_argument("--to", metavar="FILE", help="write the results to a JSON Lines file")
    parser.add_argument("--page", nargs="+", metavar="FILE", help="write the page from such files")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    if arguments.page:
        rows = [json.loads(line) for path in arguments.page for line in Path(path).read_text().splitlines()]
        results = list({row["name"]: Result(**row) for row in rows}.values())
    elif arguments.names:
        for name in arguments.names:
            result = try_check(name)
            if arguments.to:
                with open(arguments.to, "a") as file:
                    file.write(json.dumps(asdict(result)) + "\n")
            else:
                print(result, flush=True)
        return
    else:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        results = check_in_subprocesses(sorted(CONFIG_MAPPING_NAMES))
    from benchmarks.architectures.page import render_page

    results.sort(key=lambda result: result.name)
    print(write_atomic("docs/reference/architectures.md", render_page(results).encode()))
    wrong = [r.name for r in results if not r.failed and (not r.same or r.leak)]
    if wrong:
        sys.exit(f"wrong: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
