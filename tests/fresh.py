"""Run programs in separate interpreters, forked from one that has imported torch but not regard.

Importing torch, its compiler and its nested tensors takes seconds; a fork takes milliseconds. Tests of code
that runs before torch is imported, or of OMP_NUM_THREADS, which torch reads on import, need a new process
instead. All processes of a test run share one server, which exits after the last of them.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock

# Each connection has a child process, which forks again for every program and reports the program's process
# id and exit status. Programs exit immediately, because an orderly shutdown of torch takes a second.
_SERVER = """
import json, os, socket, sys, warnings
import numpy, torch, torch._dynamo, torch.nested._internal.nested_tensor
listener = socket.socket(fileno=0)
listener.settimeout(1)
connections = set()
while True:
    try:
        connection = listener.accept()[0]
    except TimeoutError:
        connections -= {child for child in connections if os.waitpid(child, os.WNOHANG)[0]}
        if not connections:
            for end in ("", ".lock"):
                os.unlink(listener.getsockname() + end)
            os._exit(0)
        continue
    if child := os.fork():
        connections.add(child)
        connection.close()
    else:
        listener.close()
        break
connection.settimeout(None)
stream = connection.makefile("rw")
for line in stream:
    asked = json.loads(line)
    if child := os.fork():
        print(child, flush=True, file=stream)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True, file=stream)
        continue
    os.close(connection.detach())
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(asked[name], os.O_RDWR), number)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    sys.path.insert(0, asked["folder"])
    if asked["warnings"]:
        warnings.simplefilter(asked["warnings"])
    break
else:
    os._exit(0)
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
def _connection() -> tuple[socket.socket, "subprocess.Popen[bytes] | None"]:
    """Connect to the server of this test run; also return the server if this process started it."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    path = str(Path(tempfile.gettempdir()) / f"regard-{run}")
    connection, server = socket.socket(socket.AF_UNIX), None
    with FileLock(f"{path}.lock"):
        try:
            connection.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            Path(path).unlink(missing_ok=True)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path)
                listener.listen()
                server = subprocess.Popen([sys.executable, "-c", _SERVER], stdin=listener)
            connection.connect(path)
    return connection, server


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
                "folder": os.getcwd(),
                "warnings": warnings,
                "stdin": os.devnull,
                **{stream: str(path) for stream, path in outputs.items()},
            },
            timeout,
        )
        texts = {stream: path.read_text("utf-8") for stream, path in outputs.items()}
    return subprocess.CompletedProcess(program, status, **texts)


def _run(asked: Mapping[str, Any], timeout: float) -> int:
    connection, _ = _connection()
    connection.sendall(json.dumps(asked).encode() + b"\n")
    connection.settimeout(None)
    child = _read_number(connection)
    connection.settimeout(timeout)
    try:
        return _read_number(connection)
    except TimeoutError:
        os.kill(child, signal.SIGKILL)
        connection.settimeout(None)
        _read_number(connection)
        raise subprocess.TimeoutExpired("a program", timeout) from None


def _read_number(connection: socket.socket) -> int:
    line = b""
    while not line.endswith(b"\n"):
        received = connection.recv(1)
        assert received, "the server has ended"
        line += received
    return int(line)
