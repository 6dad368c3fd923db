"""The application: requests in, answers out. `make_app` puts together what `regard look` serves."""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive

from regard._util.text import shorten
from regard.app.server.endpoints import ENDPOINTS, Endpoint
from regard.app.server.openapi import document
from regard.app.server.security import Guard, Refused, read_json, refusal
from regard.app.server.state import AppState
from regard.app.server.worker import Worker, stopping
from regard.errors import RegardError

STATIC = Path(__file__).parents[1] / "static"
SERVED = ("page", "attention")  # folders of it
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".txt": "text/plain; charset=utf-8",
}
# what torch and the operating system call it
_NO_MEMORY = re.compile("(allocate|not enough|out of) memory|bad_alloc", re.IGNORECASE)
_GONE = 499  # nobody sees it: who asked is no longer there

log = logging.getLogger("regard.look")


def make_app(house: AppState, host: str = "127.0.0.1", port: int = 8000, origin: str | None = None) -> Guard:
    """An ASGI application that answers for this house at this address, and at that of a proxy."""
    routes = [
        *(Route(one.path, _answering(house, one), methods=[one.method]) for one in ENDPOINTS),
        Route("/api/openapi.json", partial(_openapi, msgspec.json.encode(document(house.version)))),
        Route("/favicon.ico", _no_icon),
        Route("/static/{path:path}", partial(_static, house.quick)),
        Route("/", partial(_index, house.quick)),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _no_route})
    app.router.redirect_slashes = False
    return Guard(app, host, port, origin)


def _answering(house: AppState, one: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    """What Starlette calls: reads the request, waits for the answer, and makes errors of exceptions."""
    decoder = msgspec.json.Decoder(one.takes)

    async def answer(request: Request) -> Response:
        try:
            asked = await _asked(request, one, decoder)
            path = {name: str(value) for name, value in request.path_params.items()}
            body = await _unless_gone(request.receive, one.reply(house, asked, path))
        except asyncio.CancelledError:  # uvicorn cancels what is under way at the end of its grace
            no = stopping()
            return refusal(no.status, no.message)
        except Exception as error:
            return _explained(request, error)
        return Response(body, media_type="application/json")

    return answer


async def _asked(request: Request, one: Endpoint, decoder: msgspec.json.Decoder[Any]) -> Any:
    if one.method == "POST":
        return decoder.decode(await read_json(request, one.most))
    return msgspec.convert(dict(request.query_params), one.takes, strict=False)


async def _unless_gone(receive: Receive, work: Awaitable[bytes]) -> bytes:
    """The answer; given up if the client goes away, so that what still waits is dropped."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _explained(request: Request, error: Exception) -> Response:
    """What is told of an error: the client's own with its cure, and of ours only that it was one."""
    match error:
        case ClientDisconnect():
            return Response(status_code=_GONE)
        case Refused():
            return refusal(error.status, error.message, error.headers)
        case msgspec.ValidationError():
            return refusal(HTTPStatus.UNPROCESSABLE_ENTITY, f"{_sentence(error)} See /api/openapi.json.")
        case msgspec.DecodeError() | UnicodeDecodeError() | RecursionError():
            return refusal(
                HTTPStatus.BAD_REQUEST,
                f"the body is no JSON that can be read: {_sentence(error)} Send UTF-8.",
            )
        case RegardError():
            return refusal(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
    if isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)):
        log.error("out of memory: %s %s", request.method, shorten(request.url.path))
        return refusal(HTTPStatus.SERVICE_UNAVAILABLE, "the server is out of memory; ask for less at once.")
    log.error("%s %s failed", request.method, shorten(request.url.path), exc_info=error)
    return refusal(
        HTTPStatus.INTERNAL_SERVER_ERROR, "regard made a mistake; its terminal shows which. Please report it."
    )


def _sentence(error: Exception) -> str:
    return shorten(str(error), 500).rstrip(".") + "."


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = shorten(request.url.path, 100)
    message = f"there is nothing at {path!r}; /api/openapi.json lists what there is."
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{path!r} does not take {request.method}; it takes {allowed}."
    return refusal(error.status_code, message, dict(error.headers or {}))


async def _openapi(described: bytes, request: Request) -> Response:
    return Response(described, media_type="application/json")


async def _no_icon(request: Request) -> Response:
    return Response(status_code=HTTPStatus.NO_CONTENT)


async def _index(quick: Worker, request: Request) -> Response:
    return await _file(quick, request, "page/index.html")


async def _static(quick: Worker, request: Request) -> Response:
    return await _file(quick, request, request.path_params["path"])


async def _file(quick: Worker, request: Request, path: str) -> Response:
    try:
        content = await quick.alone(partial(read_static, path))
    except Exception as error:
        return _explained(request, error)
    if content is None:
        return refusal(HTTPStatus.NOT_FOUND, f"there is no file {shorten(path, 100)!r} of the page.")
    return Response(content, headers={"content-type": TYPES[Path(path).suffix]})


def read_static(path: str) -> bytes | None:
    """A file of the page; nothing else, whatever the path says.

    >>> from regard.app.server.app import read_static
    >>> read_static("page/../../server/app.py") is None
    True
    """
    parts = path.split("/")
    plain = all(part and set(part) <= _LETTERS and not part.startswith(".") for part in parts)
    short = len(path) <= _LONGEST  # the operating system raises errors about longer ones
    if not plain or not short or parts[0] not in SERVED or Path(path).suffix not in TYPES:
        return None
    file = (STATIC / path).resolve()
    if not file.is_relative_to(STATIC.resolve()) or not file.is_file():
        return None
    return file.read_bytes()


_LONGEST = 200
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
