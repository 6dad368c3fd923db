"""Who may ask, how much, and what every answer says of safety.

A page on another site can make a browser send requests to localhost. So a request must name this server as
its host (or a name that somebody points at 127.0.0.1 would do: DNS rebinding), must not come from another
origin, and cannot be a simple form, as its content type is JSON.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Iterator
from http import HTTPStatus

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from regard._util.files import readable
from regard._util.text import shorten
from regard.app.server.schema import Problem

SLOW = 20.0  # seconds that a body may take to arrive
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SAFE = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_PORTS = {"https": 443, "http": 80}  # which an address need not name
_OWN = (None, "same-origin", "none")  # values of Sec-Fetch-Site; none: the user has typed the address


class Refused(Exception):
    """A request that is not answered as asked: the status, a sentence with the cure, and headers."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


def refusal(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """The response that says what is wrong."""
    body = msgspec.json.encode(Problem(error=_storable(message)))
    return Response(body, status, headers, media_type="application/json")


def _storable(text: str) -> str:
    """Without half surrogates, which an error may repeat from a path."""
    return text.encode(errors="replace").decode()


class Guard:
    """An ASGI application in front of another: it refuses what others should not ask.

    host, port: where the server listens; the names under which it may be asked follow from them.
    origin: where a proxy offers it, if one does, such as "https://regard.example.org".

    >>> from regard.app.server.security import Guard
    >>> sorted(Guard(None, "127.0.0.1", 8000).names)
    ['127.0.0.1:8000', '[::1]:8000', 'localhost:8000']
    """

    def __init__(self, app: ASGIApp | None, host: str, port: int, origin: str | None = None) -> None:
        self.app, self.port = app, port
        self.names = set(_names(host, port))
        self.origins = set()
        if origin is not None:
            scheme, _, name = origin.partition("://")
            usual = f":{_PORTS.get(scheme)}"
            name = name.removesuffix(usual)
            self.origins.add(f"{scheme}://{name}")  # browsers leave the usual port away
            self.names |= {name} if ":" in name else {name, name + usual}  # and some proxies add it
        self.open = _is_wildcard(host)
        self.address = f"http://{_shown('127.0.0.1' if self.open else host)}:{port}/"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        assert self.app is not None
        if scope["type"] != "http":
            return  # uvicorn runs it without lifespan and web sockets
        safely = _adding(send, private=scope["path"].startswith("/api/"))
        try:
            self._check(scope["method"], scope["path"], Headers(scope=scope))
        except Refused as no:
            await refusal(no.status, no.message, no.headers)(scope, receive, safely)
            return
        await self.app(scope, receive, safely)

    def _check(self, method: str, path: str, headers: Headers) -> None:
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_here(hosts[0].lower()):
            named = shorten(hosts[0] if hosts else "", 100)
            raise Refused(
                HTTPStatus.FORBIDDEN,
                f"the request names the host {named!r}, and this server is {self.address}; open that one.",
            )
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        reads = method in ("GET", "HEAD")
        own = {None, f"http://{hosts[0]}", f"http://{hosts[0].lower()}", *self.origins}
        foreign = site not in _OWN or origin not in own
        opens = reads and headers.get("sec-fetch-mode") == "navigate"
        if foreign and not opens and (not reads or path.startswith("/api/")):
            raise Refused(
                HTTPStatus.FORBIDDEN,
                f"the request comes from another site; only the page at {self.address} may ask.",
            )

    def _is_here(self, host: str) -> bool:
        if host in self.names:
            return True
        name, _, port = host.rpartition(":")
        return self.open and port == str(self.port) and _is_address(name.strip("[]"))


def _names(host: str, port: int) -> Iterator[str]:
    names = {"localhost", "127.0.0.1", "[::1]", _shown(host).lower()}
    if _is_wildcard(host):
        names.add(socket.gethostname().lower())
    for name in names:
        yield f"{name}:{port}"
        if port == 80:
            yield name


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _is_wildcard(host: str) -> bool:
    return host in ("0.0.0.0", "::")


def _is_address(name: str) -> bool:
    """Numbers, which nobody can point elsewhere as names can be."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _adding(send: Send, *, private: bool) -> Send:
    """Send, with the headers of safety on every response."""

    async def safely(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=message.setdefault("headers", []))
            for name, value in SAFE.items():
                headers[name] = value
            headers.setdefault("cache-control", "no-store" if private else "no-cache")
            message["headers"] = headers.raw
        await send(message)

    return safely


async def read_json(request: Request, most: int, seconds: float = SLOW) -> bytes:
    """The body of a request that says it is JSON; refused if it is too large or arrives too slowly."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"the content type is {shorten(kind, 100)!r}; send JSON, with Content-Type: application/json.",
        )
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise Refused(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "the body has a content encoding; send it as it is, without Content-Encoding.",
        )
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdecimal() and (len(length) > 18 or int(length) > most):
        raise _too_large(most)
    try:
        async with asyncio.timeout(seconds):
            return await _body(request, most)
    except TimeoutError:
        raise Refused(
            HTTPStatus.REQUEST_TIMEOUT,
            f"the body had not arrived after {seconds:g} seconds; send it at once.",
            connection="close",
        ) from None


async def _body(request: Request, most: int) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise _too_large(most)
        parts.append(part)
    return b"".join(parts)


def _too_large(most: int) -> Refused:
    return Refused(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"the body is larger than {readable(most)}; send less at once.",
        connection="close",
    )
