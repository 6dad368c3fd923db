"""The machine: what it is, how fast it multiplies at best, and how much memory this process has held."""

import os
import platform
import resource
import sys
import time
from pathlib import Path

import torch


def describe() -> dict[str, object]:
    """What a reader of the figures needs to know."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "system": platform.platform(),
        "load": os.getloadavg()[0],
    }


def peak(threads: int) -> tuple[float, str]:
    """The most FLOP/s that this many threads reach now, and how that was found."""
    try:
        from regard.mechanism import fused

        return float(fused.peak_flops(threads)), "FMA"
    except (ImportError, AttributeError):  # no kernels here
        return _multiply(), "matmul"


def peak_memory() -> float:
    """The most memory that this process has held so far, in MB."""
    try:  # ru_maxrss also counts the process that started this one
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024
    except (OSError, IndexError):
        unit = 2**20 if sys.platform == "darwin" else 2**10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def _multiply(size: int = 1024, times: int = 5) -> float:
    x, y = torch.randn(size, size), torch.randn(size, size)
    taken = []
    for _ in range(times):
        begun = time.perf_counter()
        torch.mm(x, y)
        taken.append(time.perf_counter() - begun)
    return 2 * size**3 / min(taken)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
