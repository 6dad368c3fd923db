"""Worker threads behind bounded queues. Waiting jobs with the same key run as one batch.

Threads are daemons, and a job is interrupted between tiles once all its clients have disconnected. Abandoned
jobs therefore end soon, and shutdown does not block for long. anyio's CapacityLimiter bounds only the running
jobs: it neither rejects jobs when too many are waiting, nor batches or interrupts them.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar

import torch

from regard._util import interrupt
from regard._util.interrupt import Interrupted
from regard.app.server import memory
from regard.app.server.security import RequestError
from regard.errors import RegardError

MAX_WAITING = 256  # requests in the model queue
BATCH_SIZE = 64  # sentences per batch

log = logging.getLogger("regard.look")

T = TypeVar("T")
BatchFunction = Callable[[list[Any]], Sequence[Any]]


_RESERVED: deque[int] = deque()  # bytes reserved by each running job, across all threads; appends are atomic


class _Job(NamedTuple):
    """A queued request. size: its number of sentences; the batch size limits the sum of sizes."""

    key: Hashable
    run: BatchFunction
    request: Any
    size: int
    future: "asyncio.Future[Any]"
    loop: asyncio.AbstractEventLoop

    def finish(self, result: Any) -> None:
        try:
            self.loop.call_soon_threadsafe(_set_result, self.future, result)
        except RuntimeError:  # the event loop is closed
            log.debug("a result arrived after the event loop was closed")


def _set_result(future: "asyncio.Future[Any]", result: Any) -> None:
    if future.done():  # cancelled: the client has disconnected
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)


class Worker:
    """Threads with a bounded job queue.

    max_waiting: queue size. batch_size: maximum total size of jobs that run as one call.
    reserve: bytes that each job may need; checked if the process has a memory limit.

    >>> import asyncio
    >>> from regard.app.server.worker import Worker
    >>> async def main():
    ...     worker = Worker()
    ...     try:
    ...         return await asyncio.gather(*(worker.run_batched("double", _double, n) for n in range(3)))
    ...     finally:
    ...         worker.stop()
    >>> def _double(numbers):
    ...     return [2 * number for number in numbers]
    >>> asyncio.run(main())
    [0, 2, 4]
    """

    def __init__(
        self,
        max_waiting: int = MAX_WAITING,
        batch_size: int = BATCH_SIZE,
        threads: int = 1,
        name: str = "models",
        reserve: int = memory.RESERVE,
    ) -> None:
        self._max_waiting, self._batch_size, self._reserve = max_waiting, batch_size, reserve
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._cancelled = False
        self._threads = [
            threading.Thread(target=self._work, name=f"regard {name} {number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Number of queued jobs."""
        return len(self._jobs)

    async def run(self, function: Callable[[], T]) -> T:
        """Call a function in a worker thread."""
        return await self.run_batched(object(), lambda _: [function()], None)

    async def run_batched(self, key: Hashable, run: BatchFunction, request: Any, size: int = 1) -> Any:
        """Call `run` with the requests of all waiting jobs with this key; return the result of `request`.

        If the result is an exception, it is raised here. If `run` itself raises, `run` is called again for
        each request separately.
        """
        loop = asyncio.get_running_loop()
        job = _Job(key, run, request, size, loop.create_future(), loop)
        with self._changed:
            if len(self._jobs) >= self._max_waiting:
                raise RequestError(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    f"The queue is full: {len(self._jobs)} requests are waiting. Retry in a moment.",
                    retry_after="1",
                )
            self._jobs.append(job)
            self._changed.notify()
        try:
            return await job.future
        finally:
            self._discard(job)

    def cancel(self) -> None:
        """Reject all queued jobs and interrupt the running ones, without waiting for them."""
        with self._changed:
            self._cancelled = True
            for job in self._jobs:
                job.finish(shutting_down())
            self._jobs.clear()
            self._changed.notify_all()

    def stop(self, seconds: float = 10.0) -> bool:
        """Cancel all jobs; return whether all threads ended in time."""
        self.cancel()
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0))
        return not any(thread.is_alive() for thread in self._threads)

    def _discard(self, job: _Job) -> None:
        """Remove a job from the queue if its client has disconnected."""
        with self._changed:
            for index, other in enumerate(self._jobs):
                if other is job:
                    del self._jobs[index]
                    return

    def _work(self) -> None:
        memory.prepare_thread()
        with torch.no_grad():
            while jobs := self._next_batch():
                _RESERVED.append(self._reserve)
                with interrupt.checked_by(partial(self._check, jobs)):
                    results = _run(jobs)
                _RESERVED.remove(self._reserve)
                for job, result in zip(jobs, results, strict=True):
                    job.finish(result)
                del jobs, results

    def _check(self, jobs: list[_Job]) -> None:
        """Raise Interrupted if all clients have disconnected or the server is stopping."""
        if self._cancelled or all(job.future.cancelled() for job in jobs):
            raise Interrupted

    def _next_batch(self) -> list[_Job]:
        """Return the oldest job and other waiting jobs with the same key; an empty list on shutdown."""
        with self._changed:
            while not self._jobs and not self._cancelled:
                self._changed.wait()
            if self._cancelled:
                return []
            first = self._jobs.popleft()
            batch, rest, free = [first], [], self._batch_size - first.size
            for job in self._jobs:
                if job.key == first.key and job.size <= free:
                    batch.append(job)
                    free -= job.size
                else:
                    rest.append(job)
            if len(batch) > 1:
                self._jobs = deque(rest)
            return batch


def _run(jobs: list[_Job]) -> list[Any]:
    """Return the result or the exception of each job."""
    try:
        interrupt.check()
        memory.check(sum(_RESERVED.copy()))
        results = list(jobs[0].run([job.request for job in jobs]))
        assert len(results) == len(jobs), f"{len(results)} results for {len(jobs)} requests"
        return results
    except Interrupted:
        return [shutting_down() for _ in jobs]
    except Exception as error:
        if len(jobs) == 1:
            return [error]
        if not isinstance(error, RegardError):
            log.debug("a batch failed; running its requests one by one", exc_info=True)
    return [result for job in jobs for result in _run([job])]


def shutting_down() -> RequestError:
    """Return the error for jobs cancelled by shutdown."""
    return RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "The server is shutting down. Retry when it is back.")
