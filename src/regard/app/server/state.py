"""What the answers are made with: the models, what is looked at, and those who work."""

import time
from collections.abc import Callable
from functools import partial

import msgspec

from regard.app.server.memory import LITTLE
from regard.app.server.registry import Registry
from regard.app.server.schema import Answer
from regard.app.server.view_store import ViewStore
from regard.app.server.worker import Worker

THREADS = 2  # for what is quick, and for questions about many weights
QUICK_WAITING = 128  # requests for each of them
COSTLY = 2**20  # weights of a question that is not quick


class AppState:
    """All that lives as long as the server; version: that of regard, which those who ask may want to know.

    >>> from regard.app.server.registry import Registry
    >>> from regard.app.server.state import AppState
    >>> house = AppState(Registry())
    >>> house.worker.waiting
    0
    >>> house.close()
    True
    """

    def __init__(
        self,
        collection: Registry,
        *,
        worker: Worker | None = None,
        exhibits: ViewStore | None = None,
        version: str = "",
    ) -> None:
        self.collection, self.version = collection, version
        self.exhibits = exhibits or ViewStore()
        self.recordings = {
            name: (self.exhibits.pin(exhibit), exhibit) for name, exhibit in collection.recordings.items()
        }
        self.worker = worker or Worker()
        self.quick = Worker(QUICK_WAITING, threads=THREADS, name="quick", reserve=LITTLE)
        self.looking = Worker(QUICK_WAITING, threads=THREADS, name="looking")

    async def quickly(self, answer: Callable[[], Answer]) -> bytes:
        """An answer as JSON, made in a thread that nothing long keeps busy."""
        return await self.quick.alone(partial(encoded, answer))

    async def by_looking(self, answer: Callable[[], Answer], pairs: int) -> bytes:
        """An answer as JSON that reads so many weights; many of them have threads of their own."""
        worker = self.quick if pairs < COSTLY else self.looking
        return await worker.alone(partial(encoded, answer))

    async def by_model(self, answer: Callable[[], Answer]) -> bytes:
        """An answer as JSON, made in the thread of the models, when it is free."""
        return await self.worker.alone(partial(encoded, answer))

    def close(self, seconds: float = 10.0) -> bool:
        """Interrupt what is under way, and say whether all threads have ended within some seconds."""
        workers = (self.worker, self.quick, self.looking)
        for worker in workers:
            worker.end()
        end = time.monotonic() + seconds
        return all(worker.stop(max(end - time.monotonic(), 0)) for worker in workers)


def encoded(answer: Callable[[], Answer]) -> bytes:
    """JSON; NaN and infinities are null."""
    return msgspec.json.encode(answer())
