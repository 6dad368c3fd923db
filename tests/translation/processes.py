"""Several processes with torchrun's environment, forked from one that has imported torch."""

import socket
import subprocess

from tests.fresh import run_fresh

# The parent exits with the worst status of its children. If one fails, it kills the others, which would wait.
_START = """
import os, signal, sys, {preload}
children, worst = [], 0
for rank in range({size}):
    child = os.fork()
    if not child:
        os.environ |= {{"RANK": str(rank), "LOCAL_RANK": str(rank)}}
        break
    children.append(child)
else:
    while children:
        child, status = os.wait()
        children.remove(child)
        worst = max(worst, abs(os.waitstatus_to_exitcode(status)))
        for other in children if status else ():
            os.kill(other, signal.SIGKILL)
    sys.exit(worst)
"""


def torchrun_variables(size: int) -> dict[str, str]:
    """Return torchrun's environment variables, excluding the ones that differ between processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def run_together(
    program: str, size: int = 2, preload: str = "sacrebleu"
) -> "subprocess.CompletedProcess[str]":
    """Run a program in several processes; return their worst status and all output.

    preload: modules that are imported once.
    """
    return run_fresh(_START.format(size=size, preload=preload) + program, **torchrun_variables(size))
