"""Worker processes; each runs one library, so that the libraries do not affect each other."""

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, TypeVar

Name = TypeVar("Name")


@contextmanager
def start_workers(
    work: Callable[..., None], arguments: Mapping[Name, tuple[Any, ...]]
) -> Iterator[dict[Name, Connection]]:
    """For each name, start a process that runs work(pipe, *arguments[name]); yield the pipes by name.

    At the end of the block, the pipes are closed, which ends the processes.
    """
    context = multiprocessing.get_context("spawn")
    pipes: dict[Name, Connection] = {}
    workers = []
    try:
        for name, args in arguments.items():
            pipes[name], remote = context.Pipe()
            workers.append(context.Process(target=_run, args=(work, remote, args), daemon=True))
            workers[-1].start()
            remote.close()
        yield pipes
    finally:
        for pipe in pipes.values():
            pipe.close()
        for worker in workers:
            worker.join(timeout=10)


def _run(work: Callable[..., None], pipe: Connection, args: tuple[Any, ...]) -> None:
    try:
        work(pipe, *args)
    except EOFError:  # the main process has closed the pipe
        return
    except Exception as error:
        pipe.send(error)


def receive(pipe: Connection) -> Any:
    """Receive a worker's result; re-raise its exception if it failed."""
    result = pipe.recv()
    if isinstance(result, Exception):
        raise result
    return result
