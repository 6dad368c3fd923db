"""Description of the machine, its peak FLOP/s, and the peak memory of this process."""

import os
import platform
import resource
import sys
import time
from pathlib import Path

import torch


def describe() -> dict[str, object]:
    """Describe the hardware and the current load."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "system": platform.platform(),
        "load": os.getloadavg()[0],
    }


def peak(threads: int) -> tuple[float, str]:
    """Measure the peak FLOP/s of `threads` threads; also return the method, "FMA" or "matmul"."""
    try:
        from regard.mechanism.kernels import library

        return float(library.peak_flops(threads)), "FMA"
    except (ImportError, AttributeError):  # built without the kernels
        return _matmul_flops(), "matmul"


def peak_memory() -> float:
    """Return the peak resident memory of this process, in MB."""
    try:  # ru_maxrss includes the parent process
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024
    except (OSError, IndexError):
        unit = 2**20 if sys.platform == "darwin" else 2**10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def _matmul_flops(size: int = 1024, repeats: int = 5) -> float:
    x, y = torch.randn(size, size), torch.randn(size, size)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        torch.mm(x, y)
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
