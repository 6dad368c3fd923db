"""A real server on loopback: many clients, a full queue, disconnects and shutdown."""

import asyncio
import os
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from regard.app.server.registry import Registry
from regard.app.server.state import AppState
from regard.app.server.worker import Worker
from tests.app.server.live import process, serving, until

CLIENTS = 200
WORDS = ["ein", "Hund", "bellt", "laut", "zwei", "Katzen", "schlafen", "heute", "gern", "eine", "Frau"]


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

    with serving(state) as server:
        responses = asyncio.run(all_at_once(server.address))
        assert httpx.get(f"{server.address}/api/health").json()["waiting"] == 0
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

    with serving(held.state) as server:
        busy = held.occupy()
        responses = asyncio.run(several(server.address))
        busy.join(10)
    assert sorted(response.status_code for response in responses) == [200] * 3 + [503] * 3
    refused = [response for response in responses if response.status_code == 503]
    assert all(response.headers["retry-after"] == "1" for response in refused)
    assert "3 requests are waiting" in refused[0].json()["error"]


def test_disconnected_clients_leave_the_queue(registry, one_thread):
    held = Held(registry, most=2)
    body = b'{"model":"small","sentences":["ein Hund"]}'
    with serving(held.state) as server:
        busy = held.occupy()
        request = (
            f"POST /api/translate HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode()
        for _ in range(10):  # far more than may wait
            with socket.create_connection(("127.0.0.1", server.port)) as gone:
                gone.sendall(request + body)
                until(lambda: held.state.worker.waiting == 1)
            until(lambda: held.state.worker.waiting == 0)
        held.opened.set()
        busy.join(10)
        payload = {"model": "small", "sentences": ["a"]}
        assert httpx.post(f"{server.address}/api/translate", json=payload).is_success


def test_incomplete_requests_are_harmless(registry, one_thread):
    with serving(AppState(registry)) as server:
        for junk in (
            b"POST /api/translate HTTP/1.1\r\nHost: x",
            b"\x00\xff" * 100,
            b"GET / HTTP/9.9\r\n\r\n",
        ):
            with socket.create_connection(("127.0.0.1", server.port)) as half:
                half.sendall(junk)
        assert httpx.get(f"{server.address}/api/health").is_success


@pytest.mark.parametrize(("host", "status"), [("My-Machine", 200), (None, 403)])
def test_the_host_option_is_an_accepted_host_name(host: str | None, status: int, registry: Registry):
    with serving(AppState(registry), host) as server:
        health = f"{server.address}/api/health"
        assert httpx.get(health, headers={"Host": f"my-machine:{server.port}"}).status_code == status
        assert httpx.get(health).status_code == 200


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


def ask_and_signal(running: subprocess.Popen[str], port: int, signals: list[int]) -> httpx.Response:
    """Send signals while a translation is under way; return its response."""
    payload = {"model": "small", "sentences": ["ein Hund"]}
    with ThreadPoolExecutor(1) as pool:
        address = f"http://127.0.0.1:{port}/api/translate"
        response = pool.submit(httpx.post, address, json=payload, timeout=120)
        assert running.stdout is not None
        assert running.stdout.readline() == "under way\n"
        for number in signals:
            running.send_signal(number)
            time.sleep(0.3)  # two signals at once may arrive as one
        return response.result()


@pytest.mark.parametrize(("number", "statuses"), [(signal.SIGTERM, {0}), (signal.SIGINT, {1, -2, 130})])
def test_signals_finish_running_requests(number, statuses, folder):
    with process(PROGRAM, os.fspath(folder)) as (running, port):
        response = ask_and_signal(running, port, [number])
        assert response.status_code == 200
        assert response.json()["translations"][0]["source"] == "ein Hund"
        rest, errors = running.communicate(timeout=120)
        assert running.returncode in statuses
        assert rest == ("ended\n" if number == signal.SIGTERM else "")
        assert "Traceback" not in errors or number == signal.SIGINT


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
    [
        ([signal.SIGTERM], 0),
        ([signal.SIGINT, signal.SIGINT], 130),
        pytest.param([signal.SIGINT], 130, marks=pytest.mark.slow),
    ],
)
def test_endless_work_does_not_block_shutdown(signals, status, folder):
    with process(STUCK, os.fspath(folder)) as (running, port):
        response = ask_and_signal(running, port, signals)
        assert response.status_code == 503
        assert "shutting down" in response.json()["error"]
        _, errors = running.communicate(timeout=120)
        assert running.returncode == status, errors
        assert "Traceback" not in errors
