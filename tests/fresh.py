"""Run programs in separate interpreters, forked from one that has imported torch but not regard.

Importing torch, its compiler and its nested tensors takes seconds, a fork milliseconds. What a program does
before torch is imported, and OMP_NUM_THREADS, which torch reads then, need a process of their own.
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

# The parent reports the process id and the status of each child. A child leaves the loop, runs its program
# and exits at once, because torch takes a second to shut down in order.
_SERVER = """
import json, os, sys, warnings
import numpy, torch, torch._dynamo, torch.nested._internal.nested_tensor
for line in sys.stdin:
    asked = json.loads(line)
    if child := os.fork():
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(asked[name], os.O_RDWR), number)
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.path[:] = [*asked["path"], *sys.path]
    if asked["warnings"]:
        warnings.simplefilter(asked["warnings"])
    break
else:
    sys.exit()
status = 0
try:
    exec(compile(asked["program"], "<string>", "exec"), {"__name__": "__main__"})
except Exception as error:
    sys.excepthook(type(error), error, error.__traceback__)
    status = 1
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)
"""


@cache
def _server() -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def run_fresh(
    program: str, *, timeout: float = 120, warnings: str = "", **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Run a program with these environment variables added; return its status and output."""
    with tempfile.TemporaryDirectory() as name:
        outputs = {stream: Path(name) / stream for stream in ("stdout", "stderr")}
        for path in outputs.values():
            path.touch()
        status = _run(
            {
                "program": program,
                "environment": {**os.environ, **environment},
                "path": [os.getcwd()],
                "warnings": warnings,
                "stdin": os.devnull,
                **{stream: str(path) for stream, path in outputs.items()},
            },
            timeout,
        )
        texts = {stream: path.read_text("utf-8") for stream, path in outputs.items()}
    return subprocess.CompletedProcess(program, status, **texts)


def _run(asked: Mapping[str, Any], timeout: float) -> int:
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(asked) + "\n")
    server.stdin.flush()
    child = int(server.stdout.readline())
    if not select.select([server.stdout], [], [], timeout)[0]:
        os.kill(child, signal.SIGKILL)
        server.stdout.readline()
        raise subprocess.TimeoutExpired("a program", timeout)
    return int(server.stdout.readline())
