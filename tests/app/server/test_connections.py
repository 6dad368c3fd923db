"""Connections on loopback: slow, silent and too many clients."""

import resource
import socket
import time
from contextlib import AbstractContextManager, ExitStack, suppress

import pytest
import torch

from regard.app.server import connections
from regard.app.server.connections import Connections, ExceptionHandler, max_connections
from regard.app.server.registry import Registry
from regard.app.server.run import Server
from regard.app.server.state import AppState
from regard.app.view_model import ViewModel
from tests.app.server.live import Gate, connected, serving, until

HALF = b"GET /api/health HTTP/1.1\r\nHost: 127.0.0.1"
JSON = "Content-Type: application/json\r\nContent-Length: {}\r\n"


def empty(limit: int | None = None) -> AbstractContextManager[Server]:
    """Run a server without models."""
    return serving(AppState(Registry()), limit=limit)


def connect(server: Server, content: bytes = b"") -> socket.socket:
    result = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    result.sendall(content)
    return result


def healthy(server: Server) -> bool:
    with connected(server.address) as client:
        return client.get("/api/health").is_success


def whole(server: Server, path: str = "/api/health", method: str = "GET", more: str = "") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n{more}\r\n".encode()


def received(item: socket.socket) -> bytes:
    """Return the bytes that the server sends until it closes the connection, within the timeout."""
    result = b""
    with suppress(ConnectionError):
        while part := item.recv(65536):
            result += part
    return result


def trickle(item: socket.socket) -> None:
    """Send single bytes until the server disconnects."""
    for _ in range(200):
        item.sendall(b"1")
        time.sleep(0.02)


def test_headers_time_out(monkeypatch):
    """Missing, incomplete and slow headers time out, in the first request and in later ones."""
    with empty() as server, ExitStack() as stack:
        again = stack.enter_context(connect(server, whole(server)))
        assert again.recv(65536).startswith(b"HTTP/1.1 200")
        monkeypatch.setattr(connections, "HEADER_TIMEOUT", 0.3)
        again.sendall(HALF)
        begun = (b"", b"GET", HALF, b"POST /api/lookup HTTP/1.1\r\nX: " + b"y" * 1000)
        slow = [stack.enter_context(connect(server, sent)) for sent in begun]
        with connect(server, HALF) as slower, pytest.raises(ConnectionError):
            trickle(slower)
        assert not any(map(received, slow))
        assert b"HTTP/1.1" not in received(again)  # at most the rest of the first response
        until(lambda: server.open_connections.open == 0)


def test_requests_can_be_pipelined():
    with empty() as server, connect(server, whole(server) * 3) as client:
        result = b""
        while result.count(b'"status":"ok"') < 3:
            result += client.recv(65536)
        assert result.count(b"HTTP/1.1 200") == 3


def test_an_unread_body_does_not_hold_the_connection(monkeypatch):
    monkeypatch.setattr(connections, "HEADER_TIMEOUT", 0.3)
    with empty() as server:
        begun = whole(server, "/api/nothing", "POST", "Content-Length: 100000\r\n")
        with connect(server, begun) as slow, pytest.raises(ConnectionError):
            trickle(slow)


def test_an_unread_response_does_not_hold_the_connection(monkeypatch):
    monkeypatch.setattr(connections, "WRITE_TIMEOUT", 0.3)
    state = AppState(Registry())
    name = state.views.add(ViewModel.of(torch.rand(2048, 2048))).id
    body = b'{"height":2048,"width":2048}'
    with serving(state) as server:
        request = whole(server, f"/api/views/{name}/tile", "POST", JSON.format(len(body))) + body
        with connect(server, request) as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            until(lambda: server.open_connections.open == 1)
            until(lambda: server.open_connections.open == 0)
        assert healthy(server)


def test_the_oldest_incomplete_request_is_closed():
    with empty(limit=5) as server, ExitStack() as stack:
        half = [stack.enter_context(connect(server, HALF)) for _ in range(20)]
        assert healthy(server)
        assert server.open_connections.open <= 5
        assert not any(map(received, half[:10]))
        half[-1].sendall(f":{server.port}\r\n\r\n".encode())
        assert half[-1].recv(65536).startswith(b"HTTP/1.1 200")
        begun = whole(server, "/api/lookup", "POST", JSON.format(1000)) + b"{"
        half = [stack.enter_context(connect(server, begun)) for _ in range(10)]
        assert healthy(server)
        assert received(half[0]) == b""


def test_a_new_connection_is_closed_if_all_are_being_answered():
    state, gate = AppState(Registry()), Gate()
    state.quick.cancel()  # replaced with a blocked worker
    state.quick = held = type(state.quick)(threads=1)
    with serving(state, limit=2) as server, gate.occupying(held), ExitStack() as stack:
        waiting = [stack.enter_context(connect(server, whole(server, "/api/positions"))) for _ in range(2)]
        until(lambda: held.waiting == 2)
        with connect(server, whole(server)) as late:
            assert received(late) == b""
        gate.opened.set()
        assert all(item.recv(65536).startswith(b"HTTP/1.1 200") for item in waiting)


def test_incomplete_requests_do_not_delay_shutdown():
    """`empty` fails if shutdown takes as long as the timeout of a request body."""
    with ExitStack() as stack, empty() as server:
        body = whole(server, "/api/lookup", "POST", JSON.format(1000)) + b"{"
        for content in (b"", HALF, whole(server), body):
            stack.enter_context(connect(server, content))
        until(lambda: server.open_connections.open == 4)


def test_responses_are_sent_at_once():
    """The server disables Nagle's algorithm, which waits 40 ms for the client to acknowledge the headers."""
    with empty() as server, connect(server):
        until(lambda: server.open_connections.open == 1)
        (connection,) = server.open_connections.receiving
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_connections_use_at_most_half_of_the_files(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 4096))
    assert max_connections() == 50
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, 4096))
    assert max_connections() == connections.MAX_CONNECTIONS
    assert Connections(7).limit == 7


def test_failed_accepts_are_logged_rarely(caplog):
    complaints, reported = ExceptionHandler(), []
    loop = type("Loop", (), {"default_exception_handler": lambda _, context: reported.append(context)})()
    for _ in range(100):
        complaints(
            loop, {"message": "socket.accept() out of system resource", "exception": OSError(24, "Too many")}
        )
    assert len(caplog.records) == 1
    assert "Too many" in caplog.text
    other = {"message": "something else"}
    complaints(loop, other)
    assert reported == [other]
