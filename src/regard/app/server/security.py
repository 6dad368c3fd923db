"""Origin checks, body limits and security headers.

A page on another site can make a browser send requests to localhost. Requests must therefore name this
server as host (a foreign name that resolves to 127.0.0.1 would allow DNS rebinding), must not come from
another origin, and must have a JSON content type, which HTML forms cannot send. Starlette's
TrustedHostMiddleware ignores ports and origins, and cannot accept IP addresses while rejecting names.
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

from regard._util.text import format_bytes, shorten
from regard.app.server.guide import PATH as GUIDE_PATH
from regard.app.server.schema import ErrorResponse

BODY_TIMEOUT = 20.0  # seconds
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
# mkdocs-material writes scripts and styles into the pages of the guide, and live figures are in frames.
GUIDE_HEADERS = SECURITY_HEADERS | {
    "content-security-policy": "default-src 'self' 'unsafe-inline' blob: data:; base-uri 'self'; "
    "form-action 'none'; frame-ancestors 'self'",
    "x-frame-options": "SAMEORIGIN",
}
_DEFAULT_PORTS = {"https": 443, "http": 80}
_OWN_SITE = (None, "same-origin", "none")  # accepted Sec-Fetch-Site values; none: the user typed the address


class RequestError(Exception):
    """An error response: HTTP status, message and extra headers."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


def error_response(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON response with an error message."""
    valid = message.encode(errors="replace").decode()  # a path in the message may contain lone surrogates
    body = msgspec.json.encode(ErrorResponse(error=valid))
    return Response(body, status, headers, media_type="application/json")


class SecurityMiddleware:
    """ASGI middleware that rejects requests from other sites and adds security headers.

    host, port: where the server listens; accepted Host headers are derived from them.
    origin: public address of a proxy, such as "https://regard.example.org".

    >>> from regard.app.server.security import SecurityMiddleware
    >>> sorted(SecurityMiddleware(None, "127.0.0.1", 8000).hosts)
    ['127.0.0.1:8000', '[::1]:8000', 'localhost:8000']
    """

    def __init__(self, app: ASGIApp | None, host: str, port: int, origin: str | None = None) -> None:
        self.app, self.port = app, port
        self.hosts = set(_host_names(host, port))
        self.origins = set()
        if origin is not None:
            scheme, _, name = origin.partition("://")
            default_port = f":{_DEFAULT_PORTS.get(scheme)}"
            name = name.removesuffix(default_port)
            self.origins.add(f"{scheme}://{name}")  # browsers omit the default port
            self.hosts |= {name} if ":" in name else {name, name + default_port}  # some proxies add the port
        self.any_address = _is_wildcard(host)
        self.address = f"http://{_bracketed('127.0.0.1' if self.any_address else host)}:{port}/"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request or reject it."""
        assert self.app is not None
        if scope["type"] != "http":
            return  # not HTTP; uvicorn runs without lifespan and web sockets
        send = _add_headers(send, scope["path"])
        try:
            self._check(scope["method"], scope["path"], Headers(scope=scope))
        except RequestError as error:
            await error_response(error.status, error.message, error.headers)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _check(self, method: str, path: str, headers: Headers) -> None:
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_own_host(hosts[0].lower()):
            host = shorten(hosts[0] if hosts else "", 100)
            raise RequestError(
                HTTPStatus.FORBIDDEN,
                f"Unknown host {host!r}: the address of this server is {self.address}. Open that address.",
            )
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        is_read = method in ("GET", "HEAD")
        own_origins = {None, f"http://{hosts[0]}", f"http://{hosts[0].lower()}", *self.origins}
        is_foreign = site not in _OWN_SITE or origin not in own_origins
        is_navigation = is_read and headers.get("sec-fetch-mode") == "navigate"
        if is_foreign and not is_navigation and (not is_read or path.startswith("/api/")):
            raise RequestError(
                HTTPStatus.FORBIDDEN,
                f"The request comes from another site. Only the page at {self.address} may send requests.",
            )

    def _is_own_host(self, host: str) -> bool:
        if host in self.hosts:
            return True
        name, _, port = host.rpartition(":")
        return self.any_address and port == str(self.port) and _is_ip_address(name.strip("[]"))


def _host_names(host: str, port: int) -> Iterator[str]:
    names = {"localhost", "127.0.0.1", "[::1]", _bracketed(host).lower()}
    if _is_wildcard(host):
        names.add(socket.gethostname().lower())
    for name in names:
        yield f"{name}:{port}"
        if port == 80:
            yield name


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _is_wildcard(host: str) -> bool:
    return host in ("0.0.0.0", "::")


def _is_ip_address(name: str) -> bool:
    """Return whether a host is numeric; unlike names, numeric addresses cannot be rebound."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _add_headers(send: Send, path: str) -> Send:
    added = GUIDE_HEADERS if path.startswith(f"/{GUIDE_PATH}/") else SECURITY_HEADERS
    cached = "no-store" if path.startswith("/api/") else "no-cache"

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=message.setdefault("headers", []))
            for name, value in added.items():
                headers[name] = value
            headers.setdefault("cache-control", cached)
            message["headers"] = headers.raw
        await send(message)

    return send_with_headers


async def read_json(request: Request, max_bytes: int, timeout: float = BODY_TIMEOUT) -> bytes:
    """Return the body of a JSON request; raise RequestError if it is too large or too slow."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise RequestError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"Unsupported content type {shorten(content_type, 100)!r}. Send Content-Type: application/json.",
        )
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise RequestError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"Unsupported content encoding {shorten(encoding, 100)!r}. Send the body uncompressed.",
        )
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdecimal() and (len(length) > 18 or int(length) > max_bytes):
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(timeout):
            return await _read_body(request, max_bytes)
    except TimeoutError:
        raise RequestError(
            HTTPStatus.REQUEST_TIMEOUT,
            f"The body did not arrive within {timeout:g} seconds. Send it without delay.",
            connection="close",
        ) from None


async def _read_body(request: Request, max_bytes: int) -> bytes:
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"The body is larger than {format_bytes(max_bytes)}. Send a smaller request.",
        connection="close",
    )
