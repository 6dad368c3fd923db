"""A socket, a server on it, and its end: what is under way is finished, and then it goes."""

import asyncio
import errno
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import uvicorn

from regard.app.server.app import make_app
from regard.app.server.connections import ACCEPTED, Complaints, Connections
from regard.app.server.state import AppState
from regard.errors import ArgumentError

FIRST = 8000  # the port that is tried first
GRACE = 50  # seconds for what is under way at the end; with what follows, less than a minute
LEAVING = 4.0  # seconds for threads to notice that what they do is given up
BACKLOG = 2048  # connections that wait to be accepted
IDLE = 20  # seconds that a connection may stay without a request


def listen(host: str, port: int | None = None) -> socket.socket:
    """A socket that listens; without a port, at the usual one, or at any other if that is taken.

    >>> from regard.app.server.run import listen
    >>> taken = listen("127.0.0.1", 0)
    >>> listen("127.0.0.1", taken.getsockname()[1])
    Traceback (most recent call last):
    regard.errors.ArgumentError: port ... of 127.0.0.1 is in use; ...
    >>> taken.close()
    """
    tried = [FIRST, 0] if port is None else [port]
    for number in tried:
        try:
            return _bound(host, number)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and number != tried[-1]:
                continue
            raise _explained(host, number, error) from None
    raise AssertionError("no port was tried")


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(BACKLOG)
    except BaseException:
        found.close()
        raise
    return found


def _explained(host: str, port: int, error: OSError) -> ArgumentError:
    if error.errno == errno.EADDRINUSE:
        return ArgumentError(f"port {port} of {host} is in use; give another: --port 0 chooses a free one.")
    if error.errno in (errno.EACCES, errno.EPERM):
        return ArgumentError(f"port {port} may not be used by you; give one above 1023: --port {FIRST}.")
    return ArgumentError(
        f"{host!r} cannot be listened at ({error.strerror or error}); give an address of this machine: "
        "--host 127.0.0.1."
    )


class Server(uvicorn.Server):
    """Uvicorn, which says when it is ready.

    host: the name by which it may be asked, beside those of this machine; by default the socket's address.
    origin: where a proxy offers it, "https://regard.example.org" for example.
    """

    def __init__(
        self,
        house: AppState,
        listening: socket.socket,
        ready: Callable[[], None],
        host: str | None = None,
        origin: str | None = None,
    ) -> None:
        address, port = listening.getsockname()[:2]
        self.open_connections = Connections()
        config = uvicorn.Config(
            make_app(house, host or address, port, origin),
            http=self.open_connections.protocol,  # type: ignore[arg-type]  # makes one, as a class does
            ws="none",
            loop="asyncio",
            backlog=ACCEPTED,
            lifespan="off",
            log_level="error",  # warnings are about what clients send
            access_log=False,
            server_header=False,
            proxy_headers=False,  # nobody stands between, and anybody could write them
            timeout_keep_alive=IDLE,
            timeout_graceful_shutdown=GRACE,
        )
        super().__init__(config)
        self._listening, self._ready = listening, ready

    def serve_until_told(self) -> None:
        """Serve until SIGTERM or Ctrl-C; the former ends quietly, the latter as KeyboardInterrupt."""
        before = None
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn passes on what it got
        try:
            self.run(sockets=[self._listening])
        finally:
            if before is not None:
                signal.signal(signal.SIGTERM, before)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve, and say so."""
        asyncio.get_running_loop().set_exception_handler(Complaints())
        await super().startup(sockets)
        self._listening.listen(BACKLOG)  # asyncio made it as short as what it accepts at once
        self._ready()


def serve(
    house: AppState,
    listening: socket.socket,
    ready: Callable[[], None] = lambda: None,
    host: str | None = None,
    origin: str | None = None,
) -> None:
    """Serve a house at a socket until told to end; `ready` is called when requests are answered.

    host, origin: the name by which it may be asked, if that is not the socket's address, and where a proxy
        offers it.

    What is under way has `GRACE` seconds to finish, and is then interrupted. A second Ctrl-C interrupts it
    at once.
    """
    try:
        Server(house, listening, ready, host, origin).serve_until_told()
    finally:
        with suppress(OSError):
            listening.close()
        house.close(LEAVING)
