"""The ASGI application of `regard look`."""

import asyncio
import logging
import mimetypes
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
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive

from regard._util.text import shorten
from regard.app.server.endpoints import Endpoint
from regard.app.server.guide import PATH as GUIDE_PATH
from regard.app.server.guide import built_guide
from regard.app.server.openapi import document
from regard.app.server.routes import ENDPOINTS
from regard.app.server.security import RequestError, SecurityMiddleware, error_response, read_json
from regard.app.server.state import AppState
from regard.app.server.worker import shutting_down
from regard.errors import RegardError

STATIC = Path(__file__).parents[1] / "static"
STATIC_FOLDERS = ("page", "attention", "shared")
# the system may map .js to another MIME type, and browsers then reject modules
mimetypes.add_type("text/javascript", ".js")
# matches out-of-memory errors of torch and the operating system
_OUT_OF_MEMORY = re.compile("(allocate|not enough|out of) memory|bad_alloc|start new thread", re.IGNORECASE)
_CLIENT_CLOSED_REQUEST = 499  # nginx's code; the client has disconnected and never sees it

log = logging.getLogger("regard.look")


def make_app(
    state: AppState, host: str = "127.0.0.1", port: int = 8000, origin: str | None = None
) -> SecurityMiddleware:
    """Return the ASGI application for a server at an address. origin: public address of a reverse proxy."""
    routes = [
        *(Route(endpoint.path, _route(state, endpoint), methods=[endpoint.method]) for endpoint in ENDPOINTS),
        Route("/api/openapi.json", JSONResponse(document(state.version)), methods=["GET"]),
        Route("/favicon.ico", Response(status_code=HTTPStatus.NO_CONTENT), methods=["GET"]),
        *(Mount(f"/static/{name}", StaticFiles(directory=STATIC / name)) for name in STATIC_FOLDERS),
        *_guide_routes(),
        Route("/", partial(_index, StaticFiles(directory=STATIC))),
    ]
    # errors while serving static files, such as too many open files; endpoints handle their own errors
    failures = dict.fromkeys((OSError, RuntimeError, MemoryError), _explain)
    app = Starlette(routes=routes, exception_handlers={HTTPException: _routing_error, **failures})
    app.router.redirect_slashes = False
    return SecurityMiddleware(app, host, port, origin)


def _guide_routes() -> list[Mount]:
    """Return the route of the guide, if it is built."""
    folder = built_guide()
    return [] if folder is None else [Mount(f"/{GUIDE_PATH}", StaticFiles(directory=folder, html=True))]


def _route(state: AppState, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    """Return the Starlette handler of an endpoint."""
    decoder = msgspec.json.Decoder(endpoint.request)

    async def handle(http_request: Request) -> Response:
        try:
            request = await _decode(http_request, endpoint, decoder)
            path = {name: str(value) for name, value in http_request.path_params.items()}
            response = endpoint.handler(state, request, path)
            body = await _cancel_on_disconnect(http_request.receive, response)
        except asyncio.CancelledError:  # uvicorn cancels running requests after SHUTDOWN_TIMEOUT
            refusal = shutting_down()
            return error_response(refusal.status, refusal.message)
        except Exception as error:
            return await _explain(http_request, error)
        return Response(body, media_type=endpoint.media_type)

    return handle


async def _decode(request: Request, endpoint: Endpoint, decoder: msgspec.json.Decoder[Any]) -> Any:
    if endpoint.method == "POST":
        return decoder.decode(await read_json(request, endpoint.max_body))
    return msgspec.convert(dict(request.query_params), endpoint.request, strict=False)


async def _cancel_on_disconnect(receive: Receive, response: Awaitable[bytes]) -> bytes:
    """Await a response; cancel it if the client disconnects first, so queued work is dropped."""
    answer = asyncio.ensure_future(response)
    disconnect = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({answer, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        return answer.result()
    finally:
        for task in (answer, disconnect):
            task.cancel()
        await asyncio.gather(answer, disconnect, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _explain(request: Request, error: Exception) -> Response:
    """Return the response for an exception. Internal errors are logged; their messages are not sent."""
    match error:
        case ClientDisconnect():
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
        case RequestError():
            return error_response(error.status, error.message, error.headers)
        case msgspec.ValidationError():
            return error_response(
                HTTPStatus.UNPROCESSABLE_ENTITY, f"{_sentence(error)} See /api/openapi.json."
            )
        case msgspec.DecodeError() | UnicodeDecodeError() | RecursionError():
            return error_response(
                HTTPStatus.BAD_REQUEST, f"The body is not valid JSON: {_sentence(error)} Send UTF-8."
            )
        case RegardError():
            return error_response(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
    if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(str(error)):
        log.error("out of memory: %s %s", request.method, shorten(request.url.path))
        return error_response(
            HTTPStatus.SERVICE_UNAVAILABLE, "The server is out of memory. Send a smaller request."
        )
    log.error("%s %s failed", request.method, shorten(request.url.path), exc_info=error)
    return error_response(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "Internal error in regard. See the terminal for details, and please report it.",
    )


def _sentence(error: Exception) -> str:
    return shorten(str(error), 500).rstrip(".") + "."


async def _routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = shorten(request.url.path, 100)
    message = f"Unknown path {path!r}. /api/openapi.json lists all endpoints."
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{path!r} does not accept {request.method}. Use {allowed}."
    return error_response(error.status_code, message, dict(error.headers or {}))


async def _index(files: StaticFiles, request: Request) -> Response:
    return await files.get_response("page/index.html", request.scope)
