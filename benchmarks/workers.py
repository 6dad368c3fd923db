"""Communication with worker processes; each runs one library."""

from collections.abc import Iterable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any


def receive(pipe: Connection) -> Any:
    """Receive a worker's result; re-raise its exception if it failed."""
    result = pipe.recv()
    if isinstance(result, Exception):
        raise result
    return result


def stop_workers(pipes: Iterable[Connection], workers: Iterable[BaseProcess]) -> None:
    """Close the pipes, which ends the workers, and wait for them."""
    for pipe in pipes:
        pipe.close()
    for worker in workers:
        worker.join(timeout=10)
