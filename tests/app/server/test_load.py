"""A real server on loopback: many clients, a full queue, disconnects and shutdown."""

import asyncio
import json
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPConnection

import httpx
import pytest

from regard.app.server import run
from regard.app.server.registry import Registry
from regard.app.server.state import AppState
from regard.app.server.worker import Worker
from regard.translation import Beam
from tests.app.server.live import Gate, connected, process, serving, until

CLIENTS = 100
WORDS = ["ein", "Hund", "bellt", "laut", "zwei", "Katzen", "schlafen", "heute", "gern", "eine", "Frau"]
TRANSLATE = {"model": "small", "sentences": ["ein Hund"]}


def sentence(number: int) -> str:
    """Return a sentence unique to this client."""
    return (
        " ".join(WORDS[(number * step + step) % len(WORDS)] for step in range(1, 3 + number % 4))
        + f" {number}"
    )


def test_many_clients_get_their_own_answers(registry: Registry, one_thread: None):
    payload = [sentence(number) for number in range(CLIENTS)]
    translator = registry.translator("small")
    expected = {item.source: item.text for item in translator.translate(payload, strategy=Beam(1))}
    with serving(AppState(registry)) as server, ExitStack() as stack, connected(server.address) as other:
        clients = [HTTPConnection("127.0.0.1", server.port, timeout=120) for _ in payload]
        for client, text in zip(clients, payload, strict=True):
            stack.callback(client.close)
            body = json.dumps({"model": "small", "sentences": [text], "beam": 1})
            client.request("POST", "/api/translate", body, {"Content-Type": "application/json"})
        for client, text in zip(clients, payload, strict=True):
            response = client.getresponse()
            assert response.status == 200
            (result,) = json.load(response)["translations"]
            assert (result["source"], result["text"]) == (text, expected[text])
        assert other.get("/api/health").json()["waiting"] == 0


def test_a_full_queue_returns_503_with_retry_after(registry, one_thread):
    state, gate = AppState(registry, worker=Worker(max_waiting=3)), Gate()

    async def several(address: str) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=address, timeout=60, verify=False) as client:
            waiting = [asyncio.ensure_future(client.post("/api/translate", json=TRANSLATE)) for _ in range(6)]
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            while len(done) < 3:
                await asyncio.sleep(0.01)
                done = {task for task in waiting if task.done()}
            lookup = {"query": [[1]], "key": [[1]], "value": [[1]]}
            assert (await client.post("/api/lookup", json=lookup)).status_code == 200  # runs in other threads
            assert (await client.get("/api/health")).json()["waiting"] == 3
            gate.opened.set()
            return await asyncio.gather(*waiting)

    with serving(state) as server, gate.occupying(state.worker):
        responses = asyncio.run(several(server.address))
    assert sorted(response.status_code for response in responses) == [200] * 3 + [503] * 3
    refused = [response for response in responses if response.status_code == 503]
    assert all(response.headers["retry-after"] == "1" for response in refused)
    assert "3 requests are waiting" in refused[0].json()["error"]


def test_disconnected_clients_leave_the_queue(registry, one_thread):
    state, gate = AppState(registry, worker=Worker(max_waiting=2)), Gate()
    body = json.dumps(TRANSLATE).encode()
    with serving(state) as server, connected(server.address) as client, gate.occupying(state.worker):
        request = (
            f"POST /api/translate HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode()
        for _ in range(10):  # far more than the queue holds
            with socket.create_connection(("127.0.0.1", server.port)) as gone:
                gone.sendall(request + body)
                until(lambda: state.worker.waiting == 1)
            until(lambda: state.worker.waiting == 0)
        gate.opened.set()
        assert client.post("/api/translate", json=TRANSLATE).is_success


@pytest.mark.parametrize(("host", "status"), [("My-Machine", 200), (None, 403)])
def test_the_host_option_is_an_accepted_host_name(host: str | None, status: int, registry: Registry):
    with serving(AppState(registry), host) as server, connected(server.address) as client:
        other = {"Host": f"my-machine:{server.port}"}
        assert client.get("/api/health", headers=other).status_code == status
        assert client.get("/api/health").status_code == 200


HELD = """
import sys
from regard.app.server import run
from regard.app.server.routes import translation
run.SHUTDOWN_TIMEOUT, run.THREAD_TIMEOUT = float(sys.argv[1]), 0.1
answer = translation.translate_batch
def held(state, asked):
    print("under way", flush=True)
    sys.stdin.readline()  # cannot be interrupted
    return answer(state, asked)
translation.translate_batch = held
from regard.cli import main
main(["look", *sys.argv[2:], "--port", "0", "--no-browser"])
"""


def stops_listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionError:
        return True
    return False


@pytest.mark.parametrize(
    ("signals", "grace", "answered", "status"),
    [
        ([signal.SIGTERM], 60, 200, 0),
        pytest.param([signal.SIGINT, signal.SIGINT], 60, 503, 130, marks=pytest.mark.slow),
        pytest.param([signal.SIGINT], 60, 200, 130, marks=pytest.mark.slow),
        pytest.param([signal.SIGTERM], 1, 503, 0, marks=pytest.mark.slow),
    ],
)
def test_signals_stop_the_server(signals, grace, answered, status, folder):
    """The server finishes a running request, unless its grace period ends or a second Ctrl-C arrives."""
    with process(HELD, str(grace), os.fspath(folder)) as (running, port), ThreadPoolExecutor(1) as pool:
        with connected(f"http://127.0.0.1:{port}") as client:
            response = pool.submit(client.post, "/api/translate", json=TRANSLATE)
            while running.stdout.readline() != "under way\n":
                assert running.poll() is None
            for number in signals:
                running.send_signal(number)
                until(lambda: stops_listening(port), 60)  # two simultaneous signals may be delivered as one
            if answered == 200:
                running.stdin.write("\n")
                running.stdin.flush()
            assert response.result().status_code == answered
        rest = "translations" if answered == 200 else "shutting down"
        assert rest in response.result().text
        _, errors = running.communicate(timeout=120)
        assert running.returncode == status, errors
        late = "ERROR:    Cancel 1 running task(s), timeout graceful shutdown exceeded\n"  # uvicorn's message
        assert errors.removeprefix(late) == ("" if status == 0 else "regard: interrupted.\n")


def test_a_request_that_takes_too_long_does_not_delay_shutdown(registry, one_thread, monkeypatch):
    monkeypatch.setattr(run, "SHUTDOWN_TIMEOUT", 0.1)
    state, gate = AppState(registry), Gate()
    serve = serving(state)
    with (
        serve as server,
        connected(server.address) as client,
        gate.occupying(state.worker),
        ThreadPoolExecutor(1) as pool,
    ):
        response = pool.submit(client.post, "/api/translate", json=TRANSLATE)
        until(lambda: state.worker.waiting == 1)
        server.should_exit = True
        assert "shutting down" in response.result().json()["error"]
        gate.opened.set()
