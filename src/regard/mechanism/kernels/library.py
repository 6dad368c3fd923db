"""The compiled C++ kernels, and their numeric codes for tensors, scores and normalizers.

This module does not import torch; `dtypes` has the codes for torch's dtypes.
"""

import ctypes
import importlib.util
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from regard.errors import ArgumentError


def _load() -> tuple[Any, str]:
    """Return the compiled kernels and their description, or None and the reason why they are missing."""
    isa = os.environ.get("REGARD_ISA")
    try:
        _load_openmp()
        kernels = importlib.import_module("regard.mechanism._kernels")
    except ImportError as error:
        reason = f"the kernels are not available ({error}); install a C++ compiler and reinstall regard"
        if isa:
            raise ArgumentError(f"the environment variable REGARD_ISA is {isa!r}, but {reason}.") from None
        return None, reason
    if isa:
        if isa not in kernels.available():
            raise ArgumentError(
                f"the environment variable REGARD_ISA is {isa!r}; this machine and build support "
                f"{', '.join(kernels.available())}."
            )
        kernels.use(isa)
    return kernels, f"C++ kernels for {isa or kernels.available()[0]}"


def _load_openmp() -> None:
    """Load torch's OpenMP library if torch is not imported yet.

    The kernels and torch must share one library. The system's may be too old for torch.
    """
    spec = None if "torch" in sys.modules else importlib.util.find_spec("torch")
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in Path(folder, "lib").glob("libgomp*.so*"):
            with suppress(OSError):
                ctypes.CDLL(str(path))


KERNELS, DESCRIPTION = _load()
# Numeric codes from kernels/abi.h; empty if the kernels are missing.
SLOTS: dict[str, int] = getattr(KERNELS, "SLOTS", {})
SCORES: dict[str, int] = getattr(KERNELS, "SCORES", {})
NORMALIZERS: dict[str | None, int] = getattr(KERNELS, "NORMALIZERS", {})
MATCHES: int = getattr(KERNELS, "MATCHES", 0)  # token matches per row in `fused.sums`


def peak_flops(threads: int) -> float:
    """Measure the peak multiply-add throughput of this machine, in FLOP/s."""
    if KERNELS is None:
        raise ImportError(DESCRIPTION)
    return KERNELS.peak(threads)
