"""Trainings in separate processes that are killed at a chosen moment."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.translation.small import small_config, train_small

# audit events that change a folder; between them only the file being written changes
_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}
# a fork server with everything imported
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.translation.killing", "torch._dynamo", "sacrebleu"])


def killed_after(
    folder: Path, model: str, settings: Sequence[str], *, events: int = 0, seconds: float = 0.0
) -> bool:
    """Train; kill the process after this many changes of the folder, or seconds. Return whether it was."""
    process = _processes.Process(target=_train, args=(folder, model, settings, events))
    process.start()
    process.join(seconds or None)
    process.kill()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def _train(folder: Path, model: str, settings: Sequence[str], events: int) -> None:
    left = events

    def count(event: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        if event in _EVENTS and (event != "open" or str(args[0]).startswith(str(folder))):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    if events:
        sys.addaudithook(count)
    train_small(folder, small_config(model, *settings))
