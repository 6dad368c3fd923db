"""Measure the peak memory of a few lines of code, in a separate process."""

from textwrap import indent

from tests.fresh import run_fresh

SQUARE = 2**28  # bytes of a boolean 16,384 × 16,384

_PROGRAM = """
import torch, regard
torch.set_num_threads(1)
def most():  # peak memory of this process
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
def work(n):
{}
work(64)
before = most()
work(16384)
print(most() - before)
"""


def peak_at_16384_tokens(lines: str) -> int:
    """Return how many more bytes these lines need for n = 16,384 than for n = 64."""
    done = run_fresh(_PROGRAM.format(indent(lines.strip(), "    ")), timeout=590)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])
