"""Limit the number of connections and disconnect slow or silent clients.

uvicorn's `limit_concurrency` only counts requests whose headers have arrived. Clients that never finish
their headers or never read the response could otherwise use up all file descriptors.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 512  # fewer if the limit on open files is low
HEADER_TIMEOUT = 10.0  # seconds
WRITE_TIMEOUT = 20.0  # seconds within which a client must read some of its response
ACCEPT_BATCH = 16  # connections accepted at once, before the oldest idle ones are dropped
REPORT_INTERVAL = 10.0  # seconds between two log messages about failed accepts

log = logging.getLogger("regard.look")


def max_connections(limit: int = MAX_CONNECTIONS) -> int:
    """Return the smaller of `limit` and half the number of files that the process may open.

    >>> from regard.app.server.connections import max_connections
    >>> max_connections(100) <= 100
    True
    """
    try:
        import resource
    except ImportError:  # Windows: sockets are not file descriptors
        return limit
    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit if max_files == resource.RLIM_INFINITY else max(min(limit, max_files // 2), 1)


class Connections:
    """The open connections of a server, including those still waiting for a complete request.

    Beyond the limit, the oldest waiting connection is closed, so slow clients never block a client that
    sends its request at once. If no connection is waiting, the new one is closed.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = max_connections() if limit is None else limit
        self.open = 0
        self.receiving: OrderedDict[Connection, None] = OrderedDict()  # waiting for the rest of a request

    def protocol(self, **options: Any) -> "Connection":
        """Create a protocol; uvicorn calls this for each connection."""
        return Connection(self, **options)

    def add(self, connection: "Connection") -> None:
        """Register a new connection."""
        self.open += 1
        self.receiving[connection] = None
        if self.open > self.limit:
            oldest, _ = self.receiving.popitem(last=False)
            oldest.transport.abort()

    def discard(self, connection: "Connection") -> None:
        """Remove a closed connection."""
        self.open -= 1
        self.receiving.pop(connection, None)


class Connection(H11Protocol):
    """uvicorn's protocol with timeouts for request headers and for reading responses.

    `read_json` limits the time for bodies.
    """

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._connections = connections
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout for the first request."""
        super().connection_made(transport)
        self._header_timer = self.loop.call_later(HEADER_TIMEOUT, self._abort)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all timeouts."""
        self._connections.discard(self)
        for timer in (self._header_timer, self._write_timer, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Handle part of a request."""
        super().data_received(data)
        self._update_timer(started=True)

    def on_response_complete(self) -> None:
        """Start the timeout for the next request if part of it has already arrived."""
        super().on_response_complete()
        self._update_timer(started=bool(self.conn.trailing_data[0]))

    def shutdown(self) -> None:
        """Close the connection: at once, or after the response if a whole request has arrived."""
        super().shutdown()
        if self in self._connections.receiving:
            self._abort()

    def _update_timer(self, started: bool) -> None:
        """Run the header timeout while the headers are incomplete."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering and not self.cycle.more_body:
            self._connections.receiving.pop(self, None)
        else:
            self._connections.receiving.setdefault(self)
        if answering or self.transport.is_closing():
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None
        elif started and self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_TIMEOUT, self._abort)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, even if the client has not read its whole last response."""
        super().timeout_keep_alive_handler()
        if self._write_timer is None and self.transport.get_write_buffer_size():
            self._write_timer = self.loop.call_later(WRITE_TIMEOUT, self._abort)

    def _abort(self) -> None:
        self.transport.abort()

    def pause_writing(self) -> None:
        """Start the write timeout, because the client reads more slowly than the server writes."""
        super().pause_writing()
        self._check_progress(self.transport.get_write_buffer_size() + 1)

    def resume_writing(self) -> None:
        """Cancel the write timeout."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _check_progress(self, previous_size: int) -> None:
        size = self.transport.get_write_buffer_size()
        if size >= previous_size:
            self._abort()
        else:
            self._write_timer = self.loop.call_later(WRITE_TIMEOUT, self._check_progress, size)


class ExceptionHandler:
    """Event loop exception handler that limits how often failed accepts are logged.

    asyncio retries every second and would log each attempt with a traceback.
    """

    def __init__(self) -> None:
        self._next_report = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an exception from the event loop."""
        if "accept" not in str(context.get("message", "")):
            loop.default_exception_handler(context)
            return
        now = time.monotonic()
        if now >= self._next_report:
            self._next_report = now + REPORT_INTERVAL
            log.error("a connection could not be accepted: %s", context.get("exception"))
