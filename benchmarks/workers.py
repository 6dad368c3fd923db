"""Contenders in processes of their own, which answer when they are asked."""

from collections.abc import Iterable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any


def ask(pipe: Connection) -> Any:
    """The answer of a worker; what failed in it is raised here."""
    answer = pipe.recv()
    if isinstance(answer, Exception):
        raise answer
    return answer


def dismiss(pipes: Iterable[Connection], workers: Iterable[BaseProcess]) -> None:
    """End the workers: each does when nobody asks any more."""
    for pipe in pipes:
        pipe.close()
    for worker in workers:
        worker.join(timeout=10)
