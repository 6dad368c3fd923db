"""Threads behind bounded queues; requests of one kind that wait together are one call.

The threads are daemonic, and what they compute is interrupted between tiles once its client has gone, so that
neither a client that has gone nor the end of the server waits for long work.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar

import torch

from regard._util import interrupt
from regard._util.interrupt import Interrupted
from regard.app.server import memory
from regard.app.server.security import Refused
from regard.errors import RegardError

WAITING = 256  # requests for the models
TOGETHER = 64  # sentences of one call

log = logging.getLogger("regard.look")

T = TypeVar("T")
Together = Callable[[list[Any]], Sequence[Any]]


class _Needed:
    """How much memory the work under way may need, in all threads together."""

    def __init__(self) -> None:
        self.bytes, self._changing = 0, threading.Lock()

    @contextmanager
    def more(self, size: int) -> Iterator[None]:
        """While a piece of work is done."""
        with self._changing:
            self.bytes += size
        try:
            yield
        finally:
            with self._changing:
                self.bytes -= size


_NEEDED = _Needed()


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
    if future.done():  # cancelled, as who asked has gone
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)


class Worker:
    """A thread, or several, and a bounded queue of work for them.

    most: how many requests may wait. together: the parts of requests of one kind that become one call.
    reserve: bytes that each piece of work may need, where the process has a limit.

    >>> import asyncio
    >>> from regard.app.server.worker import Worker
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

    def __init__(
        self,
        most: int = WAITING,
        together: int = TOGETHER,
        threads: int = 1,
        name: str = "models",
        reserve: int = memory.RESERVE,
    ) -> None:
        self._most, self._together, self._reserve = most, together, reserve
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._ending = False
        self._threads = [
            threading.Thread(target=self._work, name=f"regard {name} {number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

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

    def end(self) -> None:
        """Give up what waits, and interrupt what is under way; `stop` waits until that is done."""
        with self._changed:
            self._ending = True
            for job in self._jobs:
                _answer(job, stopping())
            self._jobs.clear()
            self._changed.notify_all()

    def stop(self, seconds: float = 10.0) -> bool:
        """End, and say whether all threads did so within some seconds."""
        self.end()
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0))
        return not any(thread.is_alive() for thread in self._threads)

    def _drop(self, job: _Job) -> None:
        """One that nobody waits for any more."""
        with self._changed:
            for place, other in enumerate(self._jobs):
                if other is job:
                    del self._jobs[place]
                    return

    def _work(self) -> None:
        memory.prepare_thread()
        with torch.no_grad():
            while jobs := self._next():
                with interrupt.checked_by(partial(self._check, jobs)), _NEEDED.more(self._reserve):
                    results = _run(jobs)
                for job, result in zip(jobs, results, strict=True):
                    _answer(job, result)
                del jobs, results

    def _check(self, jobs: list[_Job]) -> None:
        """Interrupt work whose client has gone."""
        if self._ending or all(job.future.cancelled() for job in jobs):
            raise Interrupted

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


def _answer(job: _Job, result: Any) -> None:
    try:
        job.answer(result)
    except RuntimeError:  # the loop has ended
        log.debug("an answer came too late")


def _run(jobs: list[_Job]) -> list[Any]:
    """A result for each, or the exception that it ended with."""
    try:
        interrupt.check()
        memory.check(_NEEDED.bytes)
        found = list(jobs[0].run([job.asked for job in jobs]))
        assert len(found) == len(jobs), f"{len(found)} answers to {len(jobs)} requests"
        return found
    except Interrupted:
        return [stopping() for _ in jobs]
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


def stopping() -> Refused:
    """The answer to what was under way when the server had to end."""
    return Refused(HTTPStatus.SERVICE_UNAVAILABLE, "the server is stopping; ask again when it is back.")
