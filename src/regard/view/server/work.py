"""One thread for the models, with a bounded queue; requests of one kind that wait together are one call."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar

import torch

from regard.errors import RegardError
from regard.view.server.guard import Refused

WAITING = 256  # requests for the models
TOGETHER = 64  # sentences of one call
THREADS = 2  # of the pool
QUICK_WAITING = 128  # requests for the pool

log = logging.getLogger("regard.look")

T = TypeVar("T")
Together = Callable[[list[Any]], Sequence[Any]]


class _Job(NamedTuple):
    """What waits: jobs of the same kind are run together, as long as they have few parts in all."""

    kind: Hashable
    run: Together
    asked: Any
    parts: int
    future: "asyncio.Future[Any]"
    loop: asyncio.AbstractEventLoop

    def answer(self, result: Any) -> None:
        self.loop.call_soon_threadsafe(_settle, self.future, result)


def _settle(future: "asyncio.Future[Any]", result: Any) -> None:
    if future.cancelled():  # who asked has gone
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)


class Worker:
    """A thread that does one thing after the other, and a queue before it that has an end.

    >>> import asyncio
    >>> from regard.view.server.work import Worker
    >>> async def ask():
    ...     worker = Worker()
    ...     try:
    ...         return await asyncio.gather(*(worker.together("sum", _double, n) for n in range(3)))
    ...     finally:
    ...         worker.stop()
    >>> def _double(numbers):
    ...     return [2 * number for number in numbers]
    >>> asyncio.run(ask())
    [0, 2, 4]
    """

    def __init__(self, most: int = WAITING, together: int = TOGETHER) -> None:
        self._most, self._together = most, together
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._ending = False
        self._thread = threading.Thread(target=self._work, name="regard models", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._jobs)

    async def alone(self, run: Callable[[], T]) -> T:
        """What a function returns that runs when all that was there before is done."""
        return await self.together(object(), lambda _: [run()], None)

    async def together(self, kind: Hashable, run: Together, asked: Any, parts: int = 1) -> Any:
        """What `run` makes of `asked`: it is called with all that wait of this kind, and answers each.

        An answer that is an exception is raised where it was asked for. If `run` itself raises one and got
        several, it is called with each of them alone.
        """
        loop = asyncio.get_running_loop()
        job = _Job(kind, run, asked, parts, loop.create_future(), loop)
        with self._changed:
            if len(self._jobs) >= self._most:
                raise busy(len(self._jobs))
            self._jobs.append(job)
            self._changed.notify()
        try:
            return await job.future
        finally:
            self._drop(job)

    def stop(self, seconds: float = 10.0) -> None:
        """End when the job under way is done; those that wait are given up."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        self._thread.join(seconds)

    def _drop(self, job: _Job) -> None:
        """One that nobody waits for any more."""
        with self._changed:
            for place, other in enumerate(self._jobs):
                if other is job:
                    del self._jobs[place]
                    return

    def _work(self) -> None:
        with torch.no_grad():
            while jobs := self._next():
                for job, result in zip(jobs, _run(jobs), strict=True):
                    try:
                        job.answer(result)
                    except RuntimeError:  # the loop has ended
                        log.debug("an answer came too late")
                del jobs

    def _next(self) -> list[_Job]:
        """The one that has waited longest, and others of its kind; nothing at the end."""
        with self._changed:
            while not self._jobs and not self._ending:
                self._changed.wait()
            if self._ending:
                return []
            first = self._jobs.popleft()
            chosen, left, room = [first], [], self._together - first.parts
            for job in self._jobs:
                if job.kind == first.kind and job.parts <= room:
                    chosen.append(job)
                    room -= job.parts
                else:
                    left.append(job)
            if len(chosen) > 1:
                self._jobs = deque(left)
            return chosen


def _run(jobs: list[_Job]) -> list[Any]:
    """A result for each, or the exception that it ended with."""
    try:
        found = list(jobs[0].run([job.asked for job in jobs]))
        assert len(found) == len(jobs), f"{len(found)} answers to {len(jobs)} requests"
        return found
    except Exception as error:
        if len(jobs) == 1:
            return [error]
        if not isinstance(error, RegardError):
            log.debug("a common call failed, and each is tried alone", exc_info=True)
    return [result for job in jobs for result in _run([job])]


def busy(waiting: int) -> Refused:
    """What is told when no more can wait."""
    return Refused(
        HTTPStatus.SERVICE_UNAVAILABLE,
        f"{waiting} requests are waiting already; ask again in a moment.",
        retry_after="1",
    )


class Pool:
    """A few threads for what is quick, so that it need not wait for the models."""

    def __init__(self, threads: int = THREADS, most: int = QUICK_WAITING) -> None:
        self._threads = ThreadPoolExecutor(threads, "regard quick", initializer=_without_gradients)
        self._most, self._inside = most, 0

    async def run(self, function: Callable[[], T]) -> T:
        """What a function returns, run in one of the threads; refused if too many wait."""
        if self._inside >= self._most:
            raise busy(self._inside)
        self._inside += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, function)
        finally:
            self._inside -= 1

    def stop(self) -> None:
        """End when what is under way is done."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _without_gradients() -> None:
    torch.set_grad_enabled(False)
