"""Hosts, origins, content types, body sizes and security headers."""

import asyncio
import json

import pytest
from starlette.datastructures import Headers

from regard.app.server.security import CONTENT_SECURITY_POLICY, RequestError, SecurityMiddleware, read_json
from tests.app.server.client import error
from tests.cases import looped

LOOKUP = {"query": [[1]], "key": [[1]], "value": [[1]]}


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost:8000", "LOCALHOST:8000", "[::1]:8000"])
def test_own_host_names_are_accepted(host, client):
    assert client.get("/api/health", headers={"host": host})["status"] == "ok"


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1", "127.0.0.1:80", "localhost.evil.example:8000", ""],
)
def test_foreign_host_names_are_refused(host, client):
    """A foreign name that resolves to 127.0.0.1 must not reach the server."""
    message = error(client.send("GET", "/api/health", headers={"host": host}), 403)
    assert "http://127.0.0.1:8000/" in message
    assert client.send("GET", "/", headers={"host": host}).status_code == 403


def test_requests_with_several_host_names_are_refused():
    guard = SecurityMiddleware(None, "127.0.0.1", 8000)
    own, foreign = (b"host", b"localhost:8000"), (b"host", b"evil.example")
    guard._check("GET", "/", Headers(raw=[own]))
    for raw in ([own, foreign], [foreign, own], [own, own], []):
        with pytest.raises(RequestError, match="Unknown host"):
            guard._check("GET", "/", Headers(raw=raw))


def test_a_wildcard_accepts_ip_addresses_but_no_foreign_names():
    guard = SecurityMiddleware(None, "0.0.0.0", 8000)
    assert guard._is_own_host("192.168.1.7:8000")
    assert guard._is_own_host("[fe80::1]:8000")
    assert not guard._is_own_host("192.168.1.7:8001")
    assert not guard._is_own_host("evil.example:8000")
    assert not SecurityMiddleware(None, "127.0.0.1", 8000)._is_own_host("192.168.1.7:8000")


@looped(
    ("offered", "sent"),
    [
        ("https://x.org:443", "https://x.org"),
        ("http://x.org:80", "http://x.org"),
        ("https://x.org", "https://x.org"),
        ("https://x.org:80", "https://x.org:80"),
        ("http://x.org:443", "http://x.org:443"),
        ("https://x.org:8443", "https://x.org:8443"),
    ],
)
def test_only_the_origin_of_the_proxy_is_accepted_and_default_ports_may_be_omitted(offered, sent):
    guard = SecurityMiddleware(None, "127.0.0.1", 8000, offered)
    for host in {sent.partition("://")[2], offered.partition("://")[2], "127.0.0.1:8000"}:
        guard._check("POST", "/api/translate", Headers({"host": host, "origin": sent}))
    host = sent.partition("://")[2]
    wrong = [("x.org:1", sent), ("x.org.evil.example", sent), (host, "https://x.org:1")]
    for other, origin in [*wrong, (host, "https://elsewhere.example"), (host, f"{sent}.elsewhere.example")]:
        with pytest.raises(RequestError):
            guard._check("POST", "/api/translate", Headers({"host": other, "origin": origin}))


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9000"},
        {"origin": "https://127.0.0.1:8000"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_other_sites_are_refused(headers, client):
    assert "another site" in error(client.send("POST", "/api/lookup", json=LOOKUP, headers=headers), 403)
    assert "another site" in error(client.send("GET", "/api/models", headers=headers), 403)


def test_the_own_page_and_links_from_other_sites_are_accepted(client):
    own = {"origin": "http://127.0.0.1:8000", "sec-fetch-site": "same-origin"}
    assert client.send("POST", "/api/lookup", json=LOOKUP, headers=own).status_code == 200
    linked = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert client.send("GET", "/", headers=linked).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/api/health", 200),
        ("GET", "/", 200),
        ("GET", "/nothing", 404),
        ("PUT", "/api/translate", 405),
        ("OPTIONS", "/api/translate", 405),
        ("POST", "/api/translate", 415),
        ("GET", "/favicon.ico", 204),
    ],
)
def test_every_response_has_security_headers(method, path, status, client):
    response = client.send(method, path)
    assert response.status_code == status
    assert response.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert "frame-ancestors 'none'" in CONTENT_SECURITY_POLICY
    assert "default-src 'none'" in CONTENT_SECURITY_POLICY
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": ""}, 415),
        ({"content-type": "application/jsonx"}, 415),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415),
        ({"content-type": "application/json", "content-length": "9" * 30}, 413),
        ({"content-type": "Application/JSON; charset=utf-8"}, 200),
    ],
)
def test_only_json_of_a_limited_length_is_accepted(headers, status, client):
    response = client.send("POST", "/api/lookup", content=json.dumps(LOOKUP).encode(), headers=headers)
    assert response.status_code == status
    assert status == 200 or error(response, status)


@pytest.mark.parametrize(("path", "most"), [("/api/translate", 1_000_000), ("/api/long", 4_000_000)])
def test_large_bodies_are_refused_while_they_arrive(path, most, client):
    sent = 0

    async def forever():
        nonlocal sent
        while True:
            sent += 100_000
            yield b" " * 100_000

    headers = {"content-type": "application/json"}
    response = client.send("POST", path, content=forever(), headers=headers)
    assert "larger than" in error(response, 413)
    assert response.headers["connection"] == "close"
    assert sent <= most + 200_000


class Trickling:
    """A request whose body never ends."""

    headers = {"content-type": "application/json"}  # noqa: RUF012

    async def stream(self):
        while True:
            yield b" "
            await asyncio.sleep(0.01)


def test_slow_bodies_time_out():
    async def ask():
        with pytest.raises(RequestError) as refused:
            await read_json(Trickling(), 1000, timeout=0.05)  # type: ignore[arg-type]
        return refused.value

    refused = asyncio.run(ask())
    assert refused.status == 408
    assert refused.headers == {"connection": "close"}
