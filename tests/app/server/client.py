"""Requests to an application in this process, as a client on this machine would send them."""

import asyncio
from typing import Any

import httpx
import msgspec

from regard.app.server.app import make_app
from regard.app.server.endpoints import ENDPOINTS
from regard.app.server.state import AppState

ADDRESS = "http://127.0.0.1:8000"


class Client:
    """Asks one thing after the other; each answer is checked against what its endpoint promises."""

    def __init__(self, state: AppState) -> None:
        self.state, self.app = state, make_app(state)

    def send(self, method: str, path: str, **more: Any) -> httpx.Response:
        """Any request."""

        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url=ADDRESS, timeout=60) as client:
                return await client.request(method, path, **more)

        response = asyncio.run(ask())
        if method != "HEAD" and response.status_code == 200 and path.startswith("/api/"):
            check(method, path.partition("?")[0], response.content)
        return response

    def get(self, path: str, **more: Any) -> Any:
        """A GET that succeeds."""
        response = self.send("GET", path, **more)
        assert response.status_code == 200, response.text
        return response.json()

    def post(self, path: str, **asked: Any) -> Any:
        """A POST that succeeds."""
        response = self.send("POST", path, json=asked)
        assert response.status_code == 200, response.text
        return response.json()

    def refused(self, path: str, status: int = 422, **asked: Any) -> str:
        """What is told of a POST that does not."""
        return error(self.send("POST", path, json=asked), status)


def error(response: httpx.Response, status: int) -> str:
    """The one sentence of a refusal."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    told = response.json()
    assert list(told) == ["error"]
    assert told["error"].strip()
    return told["error"]


def check(method: str, path: str, content: bytes) -> None:
    """The answer has the fields and types of its Struct."""
    for one in ENDPOINTS:
        pattern = one.path.replace(":path", "").split("/")
        given = path.split("/")
        fits = len(pattern) == len(given) and all(
            a == b or a.startswith("{") for a, b in zip(pattern, given, strict=True)
        )
        if one.method == method and fits:
            msgspec.json.decode(content, type=one.response)
            known = msgspec.json.decode(content)
            assert set(known) == set(one.response.__struct_fields__)
            return
    assert path == "/api/openapi.json", path
