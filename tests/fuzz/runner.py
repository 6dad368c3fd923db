"""Run the cases of a target in a subprocess, which may crash.

A target may have a function `prepare(folder)`, called when its process starts, with a folder that all
processes of a run share.
"""

import importlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

TIMEOUT, PREPARATION = 90.0, 300.0  # seconds until a case, or a preparation, counts as a hang
TIMEOUTS = {"folders": 40.0}
WEIGHTS: dict[str, float] = {  # shares of the total time
    "operator": 4,
    "weights": 3,
    "custom": 2,
    "mutation": 1,
    "autocast": 1,
    "threads": 2,
    "memory": 1,
    "sdpa": 1,
    "substitution": 0.5,
    "folders": 3,
    "config": 1,
    "http": 2,
}


class Problem(NamedTuple):
    """A failed case. `kind` is equal for equal causes."""

    target: str
    number: int
    kind: str
    detail: str
    notes: str


def cases(target: str, numbers: Iterator[int], shared: Path) -> Iterator[Problem | None]:
    """Run these cases in sequence and yield the failure of each."""
    worker: Worker | None = None
    try:
        for number in numbers:
            worker = worker or Worker.start(target, shared)
            problem = worker.run(target, number)
            if problem is not None and problem.kind.endswith("does not end"):
                worker.alive = False  # the process may still be busy
            if not worker.alive:
                worker.stop()
                worker = None
            yield problem
    finally:
        if worker is not None:
            worker.stop()


@dataclass
class Worker:
    """A process that runs cases, beginning with `first`. `ready`: whether it is prepared."""

    process: multiprocessing.process.BaseProcess
    pipe: Connection
    alive: bool = True
    ready: bool = False
    first: int | None = None

    @classmethod
    def start(cls, target: str, shared: Path) -> "Worker":
        # forked from a server that has imported torch but computed nothing: fast, and without OpenMP threads
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads are slow on a busy machine
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.fuzz.preload"])
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(target, shared, theirs), daemon=False)
        process.start()
        theirs.close()
        return cls(process, ours)

    def run(self, target: str, number: int) -> Problem | None:
        """Run one case; it fails if the process crashes or hangs."""
        self.first = number if self.first is None else self.first
        notes, timeout = "", TIMEOUTS.get(target, TIMEOUT)
        end = time.monotonic() + (timeout if self.ready else PREPARATION)
        try:
            self.pipe.send(number)
            while self.pipe.poll(max(end - time.monotonic(), 0)):
                kind, *content = self.pipe.recv()
                if kind == "note":
                    (notes,) = content
                elif kind == "ready":
                    self.ready, end = True, time.monotonic() + timeout
                else:
                    return Problem(target, number, *content, notes) if content else None
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self.process.join(10)
            self.alive = False
            return Problem(target, number, f"the process died: {self._death()}", self._before(number), notes)
        self.alive = False
        return Problem(target, number, "the case hangs", f"more than {timeout:g} s", notes)

    def _death(self) -> str:
        code = self.process.exitcode
        return signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"

    def _before(self, number: int) -> str:
        """Name the earlier cases of this process, one of which may have corrupted its memory."""
        return "" if self.first == number else f"if not by itself, then after the cases from {self.first}"

    def stop(self) -> None:
        self.pipe.close()
        self.process.join(1)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve(target: str, shared: Path, pipe: Connection) -> None:
    """Run the worker: receive a number, run the case, send the result; until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops the worker
    import torch

    from tests.fuzz.case import Case, Failure, signature

    torch.set_num_threads(1)
    module = importlib.import_module(f"tests.fuzz.targets.{target}")
    if hasattr(module, "prepare"):
        module.prepare(shared)
    with suppress(EOFError, BrokenPipeError):
        pipe.send(("ready",))
        while True:
            number = pipe.recv()
            case = Case(target, number, shared, report=lambda text: pipe.send(("note", text)))
            try:
                module.run(case)
            except (EOFError, BrokenPipeError):
                return
            except BaseException as error:
                detail = str(error) if isinstance(error, Failure) else _last_lines(error)
                pipe.send(("failed", signature(error), detail))
            else:
                pipe.send(("passed",))


def _last_lines(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)[-4:])[-1500:]
