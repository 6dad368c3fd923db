"""A client that sends requests to an application in this process."""

import asyncio
import re
from typing import Any

import httpx
import msgspec
import numpy as np

from regard.app.server.app import make_app
from regard.app.server.routes import ENDPOINTS
from regard.app.server.state import AppState

ADDRESS = "http://127.0.0.1:8000"


class Client:
    """Checks each response against the Struct of its endpoint."""

    def __init__(self, state: AppState) -> None:
        self.state, self.app = state, make_app(state)

    def send(self, method: str, path: str, **more: Any) -> httpx.Response:
        """Send a request."""

        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url=ADDRESS, timeout=60) as client:
                return await client.request(method, path, **more)

        response = asyncio.run(ask())
        if method != "HEAD" and response.status_code == 200 and path.startswith("/api/"):
            check(method, path.partition("?")[0], response.content)
        return response

    def get(self, path: str, **more: Any) -> Any:
        """Send a GET that must succeed."""
        response = self.send("GET", path, **more)
        assert response.status_code == 200, response.text
        return response.json()

    def post(self, path: str, **payload: Any) -> Any:
        """Send a POST that must succeed; return its JSON, or the array if it is a tile."""
        response = self.send("POST", path, json=payload)
        assert response.status_code == 200, response.text
        return tile(response.content) if path.endswith("/tile") else response.json()

    def refused(self, path: str, status: int = 422, **payload: Any) -> str:
        """Send a POST that must fail; return the error message."""
        return error(self.send("POST", path, json=payload), status)


def tile(content: bytes) -> np.ndarray:
    """Decode an array."""
    return np.frombuffer(content, "<f4", offset=12).reshape(np.frombuffer(content, "<u4", 3))


def error(response: httpx.Response, status: int) -> str:
    """Return the error message of a response."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    message = response.json()
    assert list(message) == ["error"]
    assert message["error"].strip()
    return message["error"]


def check(method: str, path: str, content: bytes) -> None:
    """Check the fields and types of a response."""
    if path == "/api/openapi.json":
        return
    (item,) = (
        item
        for item in ENDPOINTS
        if item.method == method and re.fullmatch(re.sub(r"\{[^}]*\}", "[^/]+", item.path), path)
    )
    if item.response is not bytes:
        msgspec.json.decode(content, type=item.response)
        assert set(msgspec.json.decode(content)) == set(item.response.__struct_fields__)
