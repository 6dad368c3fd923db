"""Open the socket, run the server and shut it down gracefully."""

import asyncio
import errno
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import anyio.to_thread
import uvicorn

from regard._util.checks import check_int, check_number
from regard.app.server.app import make_app
from regard.app.server.connections import ACCEPT_BATCH, Connections, ExceptionHandler
from regard.app.server.state import AppState
from regard.errors import ArgumentError

DEFAULT_PORT = 8000
SHUTDOWN_TIMEOUT = 40  # seconds for running requests; a busy machine needs up to 15 more to end the process
THREAD_TIMEOUT = 4.0  # seconds for worker threads to notice an interrupt
BACKLOG = 2048  # connections waiting to be accepted
KEEP_ALIVE = 20  # seconds
FILE_THREADS = 4  # threads that read static files; each reserves address space


def listen(host: str, port: int | None = None) -> socket.socket:
    """Return a listening socket. If no port is given, use 8000, or a free port if 8000 is in use.

    >>> from regard.app.server.run import listen
    >>> sock = listen("127.0.0.1", 0)
    >>> listen("127.0.0.1", sock.getsockname()[1])
    Traceback (most recent call last):
    regard.errors.ArgumentError: Port ... on 127.0.0.1 is in use. ...
    >>> sock.close()
    """
    if port is not None:
        check_int("listen got port", port)
        check_number("listen got port", port, max=65_535)
        return _bind(host, port)
    try:
        return _bind(host, DEFAULT_PORT)
    except ArgumentError as error:
        if getattr(error.__cause__, "errno", None) != errno.EADDRINUSE:
            raise
        return _bind(host, 0)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # without the protocol, asyncio would not disable Nagle's algorithm, which delays responses by 40 ms
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError):
            raise ArgumentError(_bind_message(host, port, error)) from error
        raise
    return sock


def _bind_message(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} on {host} is in use. Choose another; --port 0 picks a free one."
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"No permission to use port {port}. Choose one above 1023: --port {DEFAULT_PORT}."
    return (
        f"Cannot listen on {host!r} ({error.strerror or error}). Use an address of this machine: "
        "--host 127.0.0.1."
    )


class Server(uvicorn.Server):
    """A uvicorn server with connection limits. It calls `ready` when it accepts requests.

    host: accepted Host header, in addition to the names of this machine; default: the socket's address.
    origin: public address of a proxy, such as "https://regard.example.org".
    """

    def __init__(
        self,
        state: AppState,
        sock: socket.socket,
        ready: Callable[[], None],
        host: str | None = None,
        origin: str | None = None,
    ) -> None:
        address, port = sock.getsockname()[:2]
        self.open_connections = Connections()
        config = uvicorn.Config(
            make_app(state, host or address, port, origin),
            http=self.open_connections.protocol,  # type: ignore[arg-type]  # a factory instead of a class
            ws="none",
            loop="asyncio",
            backlog=ACCEPT_BATCH,
            lifespan="off",
            log_level="error",  # uvicorn's warnings are about invalid requests
            access_log=False,
            server_header=False,
            proxy_headers=False,  # clients could forge them
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=SHUTDOWN_TIMEOUT,
        )
        super().__init__(config)
        self._socket, self._ready = sock, ready

    def run_until_signal(self) -> None:
        """Serve until SIGTERM or Ctrl-C; after Ctrl-C, raise KeyboardInterrupt."""
        previous = None
        if threading.current_thread() is threading.main_thread():
            previous = signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn re-raises captured signals
        try:
            self.run(sockets=[self._socket])
        finally:
            if previous is not None:
                signal.signal(signal.SIGTERM, previous)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start serving and call `ready`."""
        asyncio.get_running_loop().set_exception_handler(ExceptionHandler())
        anyio.to_thread.current_default_thread_limiter().total_tokens = FILE_THREADS
        await super().startup(sockets)
        self._socket.listen(BACKLOG)  # asyncio has set the backlog to ACCEPT_BATCH
        self._ready()


def serve(
    state: AppState,
    sock: socket.socket,
    ready: Callable[[], None] = lambda: None,
    host: str | None = None,
    origin: str | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C; call `ready` when requests are accepted.

    host, origin: as in `Server`. On shutdown, running requests have `SHUTDOWN_TIMEOUT` seconds to finish and
    are then interrupted; a second Ctrl-C interrupts them immediately.
    """
    try:
        Server(state, sock, ready, host, origin).run_until_signal()
    finally:
        with suppress(OSError):
            sock.close()
        state.close(THREAD_TIMEOUT)
