"""What the answers are made with: the models, what is looked at, and those who work."""

from collections.abc import Callable
from functools import partial

import msgspec

from regard.view.server.answers import Answer
from regard.view.server.collection import Collection
from regard.view.server.exhibits import Exhibits
from regard.view.server.work import Pool, Worker


class House:
    """All that lives as long as the server; version: that of regard, which those who ask may want to know.

    >>> from regard.view.server.collection import Collection
    >>> from regard.view.server.house import House
    >>> house = House(Collection())
    >>> house.worker.waiting
    0
    >>> house.close()
    """

    def __init__(
        self,
        collection: Collection,
        *,
        worker: Worker | None = None,
        exhibits: Exhibits | None = None,
        version: str = "",
    ) -> None:
        self.collection, self.version = collection, version
        self.exhibits = exhibits or Exhibits()
        self.recordings = {
            name: (self.exhibits.pin(exhibit), exhibit) for name, exhibit in collection.recordings.items()
        }
        self.worker, self.pool = worker or Worker(), Pool()

    async def quickly(self, answer: Callable[[], Answer]) -> bytes:
        """An answer as JSON, made in the pool."""
        return await self.pool.run(partial(encoded, answer))

    async def by_model(self, answer: Callable[[], Answer]) -> bytes:
        """An answer as JSON, made in the thread of the models, when it is free."""
        return await self.worker.alone(partial(encoded, answer))

    def close(self) -> None:
        """End the threads."""
        self.worker.stop()
        self.pool.stop()


def encoded(answer: Callable[[], Answer]) -> bytes:
    """JSON; NaN and infinities are null."""
    return msgspec.json.encode(answer())
