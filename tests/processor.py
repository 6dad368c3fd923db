"""Instructions that a processor reports but cannot run."""

import faulthandler
import os

import torch

_BFLOAT16_WITHOUT_AMX = "AVX512_CORE_BF16"


def disable_broken_amx() -> None:
    """Keep torch from using AMX on virtual machines that report it but kill programs that use it.

    There, a product of two bfloat16 matrices kills the process (illegal instruction), with or without regard.
    oneDNN reads the variable at its first product, and processes started later inherit it.
    """
    if "ONEDNN_MAX_CPU_ISA" not in os.environ and torch.cpu._is_amx_tile_supported() and not _amx_runs():
        os.environ["ONEDNN_MAX_CPU_ISA"] = _BFLOAT16_WITHOUT_AMX


def _amx_runs() -> bool:
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        matrix = torch.ones(64, 64, dtype=torch.bfloat16)
        _ = matrix @ matrix
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0
