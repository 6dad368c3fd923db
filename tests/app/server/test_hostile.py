"""Hostile requests to a real server on loopback: every response is a success or a client error."""

import socket
from collections.abc import Iterator
from itertools import product

import httpx
import pytest

from regard.app.server.routes import ENDPOINTS
from regard.app.server.state import AppState
from tests.app.server.live import connected, serving

JSON = {"Content-Type": "application/json"}
PATHS = [
    *["/static/%00.js", "/static/page/%ff%fe.js", "/static/page/%ed%a0%80.js", "/api/training/%00"],
    *[
        "/api/training/%ed%a0%80?after=1",
        "/api/views/%00/tile",
        "//api//models",
        "/api/models/",
        "/%",
        "/?%%%",
    ],
    *(
        f"/api/positions?length={number}"
        for number in ("9" * 5000, "NaN", "1e999", "%ff", "1&width=-1&width=3")
    ),
    "/api/positions?" + "&".join(f"x{number}=1" for number in range(1000)),
    *("/" + "a" * 10_000, "/static/page/" + "a" * 5000 + ".js", "/api/views/" + "x" * 5000),
    *("/static/page/" + "../" * 500 + "etc/passwd", "/api/training/" + "%2e%2e/" * 50),
]
BODIES = [
    *(b"null", b"true", b"NaN", b"-Infinity", b"0" * 5000, b"9" * 100_000, b"1e" + b"9" * 1000, b"\x00"),
    *(b'"\\ud800"', b'{"\\ud800": 1}', b"\xef\xbb\xbf{}", b'{"model": null}', b'{"model": {"model": []}}'),
    *(b"[" * 50_000 + b"]" * 50_000, b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    b"{" + b",".join(b'"k%d":0' % number for number in range(10_000)) + b"}",
]
HEADERS = [
    {"Host": "\u00ff".encode("latin-1")},
    {"Content-Length": "-1"},
    {"Content-Length": "9" * 30},
    {"Transfer-Encoding": "chunked, chunked"},
    {"Content-Type": "application/json; charset=" + "x" * 5000},
    dict.fromkeys(("Sec-WebSocket-Version", "Sec-WebSocket-Key"), "13")
    | {"Connection": "Upgrade", "Upgrade": "websocket"},
    {"Connection": "Upgrade", "Upgrade": "h2c"},
    {"Expect": "100-continue"},
    {"Range": "bytes=0-99999999999999999999"},
    {"Cookie": "x" * 12_000},
    {"Origin": "null"},
    {"If-None-Match": "\x7f"},
]


@pytest.fixture(scope="module")
def address(registry) -> Iterator[str]:
    with serving(AppState(registry)) as server:
        yield server.address


@pytest.fixture(scope="module")
def client(address) -> Iterator[httpx.Client]:
    with connected(address) as client:
        yield client


@pytest.fixture(autouse=True)
def stays_healthy(client: httpx.Client) -> Iterator[None]:
    yield
    assert client.get("/api/health").is_success


def fine(status: int) -> bool:
    return 100 <= status < 300 or 400 <= status < 500


def test_hostile_paths(address):
    for path, method in product(PATHS, ("GET", "POST", "HEAD", "DELETE", "OPTIONS")):
        assert fine(raw(address, method, path)), (method, path[:99])


def test_hostile_bodies(client):
    for item, body in product(ENDPOINTS, BODIES):
        path = item.path.replace("{id}", "none").replace("{name:path}", "none")
        response = client.request(item.method, path, content=body, headers=JSON)
        assert fine(response.status_code), (path, body[:99])
    assert response.json()["error"]


def test_hostile_headers(address):
    for headers, path in product(HEADERS, ("GET /api/models", "GET /", "POST /api/lookup")):
        assert fine(raw(address, *path.split(), headers)), (path, headers)


def test_extreme_numbers(client):
    extremes = (-1, 1, 2**31, 2**53, 2**64, -(2**63), 1e308, 0.5, None, True, "1", [])
    shown = client.post("/api/long", json={"text": "dogs bark at trees that shed bark"}).json()
    # each question gets every third value
    for turn, question in enumerate(("tile", "topk", "received", "heads", "numbers")):
        for name in ("input", "layer", "heads", "rows", "position", "k", "size", "height", "query"):
            for number, value in enumerate(extremes[turn % 3 :: 3]):
                given = (value, [value], [value, value])[number % 3]
                result = client.post(f"/api/views/{shown['id']}/{question}", json={name: given})
                assert fine(result.status_code), (question, name, given, result.text)


def raw(address: str, method: str, path: str, headers: dict | None = None) -> int:
    """Send a request no client library would send; return the status."""
    host, port = address.removeprefix("http://").split(":")
    lines = {"Host": f"{host}:{port}", "Connection": "close", **(headers or {})}
    with socket.create_connection((host, int(port)), timeout=30) as client:
        client.sendall(f"{method} {path} HTTP/1.1\r\n".encode())
        for name, value in lines.items():
            content = value if isinstance(value, bytes) else value.encode()
            client.sendall(name.encode() + b": " + content + b"\r\n")
        client.sendall(b"\r\n")
        result = b""
        while b"\r\n" not in result:
            part = client.recv(65536)
            assert part, "closed without an answer"
            result += part
    return int(result.split()[1])
