"""Training runs that are killed several times, each time in a forked process."""

import os
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fresh import run_fresh
from tests.translation.small import small_config, train_small

# audit events that change a folder; between them only the file being written changes
_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def train_killed(folder: Path, model: str, settings: Sequence[str], *, at: str) -> None:
    """Train to the end, killed at random changes to the folder (at="changes") or times (at="times")."""
    call = f"killing.kill_and_train({str(folder)!r}, {model!r}, {settings!r}, {at!r})"
    done = run_fresh(f"import sacrebleu\nfrom tests.translation import killing\n{call}")
    assert (done.returncode, done.stderr) == (0, "")


def kill_and_train(folder: str, model: str, settings: Sequence[str], at: str) -> None:
    """Fork, train and kill repeatedly; finally, train to the end."""
    rng, kills = random.Random(f"{model} {settings}" if at == "changes" else None), 0
    for events, seconds in [*((rng.randint(1, 40), rng.uniform(0.01, 0.3)) for _ in range(4)), (0, 0.0)]:
        child = os.fork()
        if not child:
            if at == "changes":
                _kill_after(events, folder)
            else:
                signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF kills by default
            train_small(Path(folder), small_config(model, *settings))
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == 0 or (status < 0 and events), status
        kills += status < 0
    assert kills


def _kill_after(events: int, folder: str) -> None:
    left = events

    def count(event: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        if event in _EVENTS and (event != "open" or str(args[0]).startswith(folder)):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
