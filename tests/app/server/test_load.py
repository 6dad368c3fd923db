"""A real server on loopback: many clients, a full queue, disconnects and shutdown."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from regard.app.server.registry import Registry
from regard.app.server.run import Server, listen
from regard.app.server.state import AppState
from regard.app.server.worker import Worker

CLIENTS = 200
WORDS = [
    "ein",
    "Hund",
    "bellt",
    "laut",
    "zwei",
    "Katzen",
    "schlafen",
    "heute",
    "gern",
    "eine",
    "Frau",
    "singt",
    "und",
    "lacht",
]


@contextmanager
def serving(state: AppState, host: str | None = None) -> Iterator[str]:
    """Run a server in a thread; yield its address."""
    listening, ready = listen("127.0.0.1", 0), threading.Event()
    address = f"http://127.0.0.1:{listening.getsockname()[1]}"
    server = Server(state, listening, ready.set, host)
    thread = threading.Thread(target=server.run_until_signal, daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        yield address
    finally:
        server.should_exit = True
        thread.join(20)
        state.close()
        assert not thread.is_alive()


def sentence(number: int) -> str:
    """Return a sentence unique to this client."""
    return (
        " ".join(WORDS[(number * step + step) % len(WORDS)] for step in range(1, 3 + number % 4))
        + f" {number}"
    )


def test_200_clients_get_their_own_answers(registry: Registry, one_thread: None):
    payload = [sentence(number) for number in range(CLIENTS)]
    translator = registry.translator("small")
    expected = {item.source: item.text for item in translator.translate(payload)}
    state = AppState(registry)

    async def all_at_once(address: str) -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(base_url=address, timeout=120, limits=limits) as client:
            return await asyncio.gather(
                *(
                    client.post("/api/translate", json={"model": "small", "sentences": [text]})
                    for text in payload
                )
            )

    with serving(state) as address:
        responses = asyncio.run(all_at_once(address))
        assert httpx.get(f"{address}/api/health").json()["waiting"] == 0
    assert {response.status_code for response in responses} == {200}
    for text, response in zip(payload, responses, strict=True):
        (result,) = response.json()["translations"]
        assert result["source"] == text
        assert result["text"] == expected[text]


class Held:
    """An AppState whose model thread is blocked until it is opened."""

    def __init__(self, registry: Registry, most: int) -> None:
        self.opened, self.begun = threading.Event(), threading.Event()
        self.state = AppState(registry, worker=Worker(max_waiting=most))

    def hold(self) -> None:
        self.begun.set()
        assert self.opened.wait(30)

    def occupy(self) -> threading.Thread:
        """Block the model thread."""
        thread = threading.Thread(target=lambda: asyncio.run(self.state.worker.run(self.hold)), daemon=True)
        thread.start()
        assert self.begun.wait(10)
        return thread


def test_a_full_queue_returns_503_with_retry_after(registry, one_thread):
    held = Held(registry, most=3)
    payload = {"model": "small", "sentences": ["ein Hund"]}

    async def several(address: str) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=address, timeout=60) as client:
            waiting = [asyncio.ensure_future(client.post("/api/translate", json=payload)) for _ in range(6)]
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            while len(done) < 3:
                await asyncio.sleep(0.01)
                done = {task for task in waiting if task.done()}
            lookup = {"query": [[1]], "key": [[1]], "value": [[1]]}
            assert (await client.post("/api/lookup", json=lookup)).status_code == 200  # has its own threads
            assert (await client.get("/api/health")).json()["waiting"] == 3
            held.opened.set()
            return await asyncio.gather(*waiting)

    with serving(held.state) as address:
        busy = held.occupy()
        responses = asyncio.run(several(address))
        busy.join(10)
    assert sorted(response.status_code for response in responses) == [200] * 3 + [503] * 3
    refused = [response for response in responses if response.status_code == 503]
    assert all(response.headers["retry-after"] == "1" for response in refused)
    assert "3 requests are waiting" in refused[0].json()["error"]


def test_disconnected_clients_leave_the_queue(registry, one_thread):
    held = Held(registry, most=2)
    body = b'{"model":"small","sentences":["ein Hund"]}'
    with serving(held.state) as address:
        busy = held.occupy()
        port = int(address.rpartition(":")[2])
        request = (
            f"POST /api/translate HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode()
        for _ in range(10):  # far more than may wait
            with socket.create_connection(("127.0.0.1", port)) as gone:
                gone.sendall(request + body)
                _until(lambda: held.state.worker.waiting == 1)
            _until(lambda: held.state.worker.waiting == 0)
        held.opened.set()
        busy.join(10)
        assert httpx.post(f"{address}/api/translate", json={"model": "small", "sentences": ["a"]}).is_success


def _until(holds) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_incomplete_requests_are_harmless(registry, one_thread):
    with serving(AppState(registry)) as address:
        port = int(address.rpartition(":")[2])
        for junk in (
            b"POST /api/translate HTTP/1.1\r\nHost: x",
            b"\x00\xff" * 100,
            b"GET / HTTP/9.9\r\n\r\n",
        ):
            with socket.create_connection(("127.0.0.1", port)) as half:
                half.sendall(junk)
        assert httpx.get(f"{address}/api/health").is_success


@pytest.mark.parametrize(("host", "status"), [("My-Machine", 200), (None, 403)])
def test_the_host_option_is_an_accepted_host_name(host: str | None, status: int, registry: Registry):
    with serving(AppState(registry), host) as address:
        named = "my-machine:" + address.rpartition(":")[2]
        assert httpx.get(f"{address}/api/health", headers={"Host": named}).status_code == status
        assert httpx.get(f"{address}/api/health").status_code == 200


PROGRAM = """
import sys, threading, time
import torch
torch.set_num_threads(1)
from regard.app.server.registry import Registry
from regard.app.server.state import AppState
from regard.app.server.run import listen, serve
from regard.app.server.routes import translation
fast = translation.translate_batch
def slow(state, asked):
    print("under way", flush=True)
    time.sleep(1.0)
    return fast(state, asked)
translation.translate_batch = slow
listening = listen("127.0.0.1", 0)
serve(AppState(Registry.load(sys.argv[1:])), listening, lambda: print(listening.getsockname()[1], flush=True))
print("ended", flush=True)
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 1)])
def test_signals_finish_running_requests(number, status, folder):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, os.fspath(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        port = process.stdout.readline().strip()
        assert re.fullmatch(r"\d+", port), process.stderr.read()
        result = []

        def ask() -> None:
            payload = {"model": "small", "sentences": ["ein Hund"]}
            result.append(httpx.post(f"http://127.0.0.1:{port}/api/translate", json=payload, timeout=60))

        thread = threading.Thread(target=ask)
        thread.start()
        assert process.stdout.readline() == "under way\n"
        process.send_signal(number)
        thread.join(60)
        assert result
        assert result[0].status_code == 200
        assert result[0].json()["translations"][0]["source"] == "ein Hund"
        rest, errors = process.communicate(timeout=60)
        assert process.returncode in ((0,) if status == 0 else (1, -signal.SIGINT, 130))
        assert rest == ("ended\n" if status == 0 else "")
        assert "Traceback" not in errors or number == signal.SIGINT
    finally:
        process.kill()
        process.communicate()


STUCK = """
import sys, time
from regard.app.server import run
from regard.app.server.routes import translation
run.SHUTDOWN_TIMEOUT, run.THREAD_TIMEOUT = 1, 0.1
def stuck(state, asked):
    print("under way", flush=True)
    time.sleep(1000)  # a kernel that cannot be interrupted
translation.translate_batch = stuck
from regard.cli import main
main(["look", *sys.argv[1:], "--port", "0", "--no-browser"])
"""


@pytest.mark.parametrize(
    ("signals", "status"),
    [([signal.SIGTERM], 0), ([signal.SIGINT], 130), ([signal.SIGINT, signal.SIGINT], 130)],
)
def test_endless_work_does_not_block_shutdown(signals, status, folder):
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK, os.fspath(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        port = next(filter(None, (re.search(r":(\d+)/", line) for line in process.stdout)))[1]
        result = []

        def ask() -> None:
            payload = {"model": "small", "sentences": ["ein Hund"]}
            result.append(httpx.post(f"http://127.0.0.1:{port}/api/translate", json=payload, timeout=60))

        thread = threading.Thread(target=ask)
        thread.start()
        assert process.stdout.readline() == "under way\n"
        for number in signals:
            process.send_signal(number)
            time.sleep(0.3)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == status, errors
        assert "Traceback" not in errors
        thread.join(60)
        assert result[0].status_code == 503
        assert "shutting down" in result[0].json()["error"]
    finally:
        process.kill()
        process.communicate()
