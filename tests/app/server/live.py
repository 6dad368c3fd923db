"""A real server on loopback, in a thread or in a separate process."""

import asyncio
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx

from regard.app.server.run import Server, listen
from regard.app.server.security import BODY_TIMEOUT
from regard.app.server.state import AppState
from regard.app.server.worker import Worker


def connected(address: str) -> httpx.Client:
    """Return a client that does not load the system's certificates, which takes longer than a test."""
    return httpx.Client(base_url=address, timeout=120, verify=False)


@contextmanager
def serving(state: AppState, host: str | None = None, limit: int | None = None) -> Iterator[Server]:
    """Run a server in a thread, at `server.port` and `server.address`. limit: maximum connection count."""
    listening, ready = listen("127.0.0.1", 0), threading.Event()
    server = Server(state, listening, ready.set, host)
    if limit is not None:
        server.open_connections.limit = limit
    server.port = listening.getsockname()[1]  # type: ignore[attr-defined]
    server.address = f"http://127.0.0.1:{server.port}"  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.run_until_signal, daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join(BODY_TIMEOUT - 5)
        assert state.close()
        assert not thread.is_alive()


@contextmanager
def process(program: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run a program that prints the port of its server, or its address; yield the process and the port."""
    command = [sys.executable, "-c", program, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as running:
        try:
            assert running.stdout is not None
            assert running.stderr is not None
            ports = (re.search(r"(?:^|:)(\d+)(?:/|$)", line) for line in running.stdout)
            port = next(filter(None, ports), None)
            assert port is not None, running.stderr.read()
            yield running, int(port[1])
        finally:
            running.kill()


def until(holds: Callable[[], bool], seconds: float = 20) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


class Gate:
    """A job that blocks until the gate is opened."""

    def __init__(self) -> None:
        self.begun, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.opened.wait(60)
        return "gate"

    @contextmanager
    def occupying(self, worker: Worker) -> Iterator[None]:
        """Occupy a thread of a worker; the block must open the gate."""
        thread = threading.Thread(target=lambda: asyncio.run(worker.run(self)), daemon=True)
        thread.start()
        assert self.begun.wait(20)
        yield
        thread.join(20)
