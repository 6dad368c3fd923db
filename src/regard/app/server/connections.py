"""Connections: a bounded number, none that waits forever for a slow or silent client.

uvicorn's own `limit_concurrency` counts requests whose headers have arrived; a client that never finishes its
headers, or never reads its answer, would keep its connection, and 1,000 of them every file descriptor.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST = 512  # connections, if the limit of open files allows
HEADERS = 10.0  # seconds for the headers of a request to arrive
STALLED = 20.0  # seconds in which a client must read some of its answer
ACCEPTED = 16  # connections accepted at once, before the oldest idle ones are dropped
QUIET = 10.0  # seconds between two complaints about failed accepts

log = logging.getLogger("regard.look")


def most_connections(most: int = MOST) -> int:
    """How many connections may be open: at most half of the files that the process may open.

    >>> from regard.app.server.connections import most_connections
    >>> most_connections(100) <= 100
    True
    """
    try:
        import resource
    except ImportError:  # Windows, where sockets are no files
        return most
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if allowed == resource.RLIM_INFINITY else max(min(most, allowed // 2), 1)


class Connections:
    """The open connections of a server: which of them wait for a whole request, oldest first.

    When there are too many, the oldest of those is closed: a client that sends its request at once never
    waits for one that does not. If all are being answered, the new one is closed.
    """

    def __init__(self, most: int | None = None) -> None:
        self.most = most_connections() if most is None else most
        self.open = 0
        self._arriving: OrderedDict[Connection, None] = OrderedDict()

    def protocol(self, **given: Any) -> "Connection":
        """A protocol for a new connection, as uvicorn asks for one."""
        return Connection(self, **given)

    def add(self, one: "Connection") -> None:
        """A new connection."""
        self.open += 1
        self._arriving[one] = None
        if self.open > self.most:
            oldest, _ = self._arriving.popitem(last=False)
            oldest.transport.abort()

    def discard(self, one: "Connection") -> None:
        """One that is closed."""
        self.open -= 1
        self._arriving.pop(one, None)

    def set_arriving(self, one: "Connection", arriving: bool) -> None:
        """Whether a connection waits for (the rest of) a request."""
        if arriving:
            self._arriving.setdefault(one)
        else:
            self._arriving.pop(one, None)


class Connection(H11Protocol):
    """uvicorn's protocol with limits in time: for headers to arrive, and for answers to be read.

    Bodies have their own limit, where they are read.
    """

    def __init__(self, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._all = connections
        self._headers: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first request has to arrive in time."""
        super().connection_made(transport)
        self._headers = self.loop.call_later(HEADERS, self._drop)
        self._all.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """No limit applies any more."""
        self._all.discard(self)
        for timer in (self._headers, self._writing, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Part of a request, or all of it."""
        super().data_received(data)
        self._limit(begun=True)

    def on_response_complete(self) -> None:
        """The next request may follow, and may even have begun to arrive."""
        super().on_response_complete()
        self._limit(begun=bool(self.conn.trailing_data[0]))

    def _limit(self, begun: bool) -> None:
        """Limit the time for headers, if some of them have arrived and others not."""
        answering = self.cycle is not None and not self.cycle.response_complete
        self._all.set_arriving(self, not answering or self.cycle.more_body)
        if answering or self.transport.is_closing():
            if self._headers is not None:
                self._headers.cancel()
                self._headers = None
        elif begun and self._headers is None:
            self._headers = self.loop.call_later(HEADERS, self._drop)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, also if the client has not read all of its last answer."""
        super().timeout_keep_alive_handler()
        if self._writing is None and self.transport.get_write_buffer_size():
            self._writing = self.loop.call_later(STALLED, self._drop)

    def _drop(self) -> None:
        self.transport.abort()

    def pause_writing(self) -> None:
        """The client does not read as fast as it is answered: it has to read something in time."""
        super().pause_writing()
        self._stall(self.transport.get_write_buffer_size() + 1)

    def resume_writing(self) -> None:
        """It has read nearly all."""
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _stall(self, before: int) -> None:
        left = self.transport.get_write_buffer_size()
        if left >= before:
            self._drop()
        else:
            self._writing = self.loop.call_later(STALLED, self._stall, left)


class Complaints:
    """An exception handler of an event loop that reports failed accepts once in a while instead of each.

    asyncio tries again after a second, and reports every attempt with a traceback.
    """

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Report what went wrong in the loop."""
        if "accept" not in str(context.get("message", "")):
            loop.default_exception_handler(context)
            return
        now = time.monotonic()
        if now >= self._next:
            self._next = now + QUIET
            log.error("a connection could not be accepted: %s", context.get("exception"))
