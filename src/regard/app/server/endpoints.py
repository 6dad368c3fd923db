"""The table of endpoints, filled by `endpoint`. Routes and the OpenAPI document are generated from it."""

from collections.abc import Awaitable, Callable
from functools import partial
from inspect import iscoroutinefunction, signature
from typing import Any, Literal, NamedTuple, TypeVar, get_type_hints

import msgspec
import numpy as np
from msgspec import Struct

from regard.app.protocol import encode_array
from regard.app.server.schema import EmptyRequest, Request, Response
from regard.app.server.state import AppState

MAX_BODY = 1_000_000  # bytes of a request

Path = dict[str, str]  # path parameters
Handler = Callable[[AppState, Any, Path], Awaitable[bytes]]
Function = TypeVar("Function", bound=Callable[..., Any])


class Endpoint(NamedTuple):
    """Method, path, types and handler of an endpoint."""

    method: str
    path: str
    summary: str
    request: type[Struct]
    response: type  # a Struct, or bytes for a binary response
    handler: Handler
    max_body: int = MAX_BODY

    @property
    def media_type(self) -> str:
        """Return the content type of a response."""
        return "application/octet-stream" if self.response is bytes else "application/json"

    @property
    def name(self) -> str:
        """Return a unique operation id, such as post_api_translate."""
        parts = (part.strip("{}") for part in self.path.replace(":path", "").split("/"))
        return "_".join([self.method.lower(), *filter(None, parts)]).replace(".", "_")


ENDPOINTS: list[Endpoint] = []


def endpoint(
    method: Literal["GET", "POST"],
    path: str,
    summary: str,
    *,
    pool: Literal["quick", "model"] = "quick",
    response: type[Response] | None = None,
    max_body: int = MAX_BODY,
) -> Callable[[Function], Function]:
    """Register a function as the handler of a path.

    The function takes any of the parameters `state`, `request` and `path` (the path parameters). Its type
    annotations determine the request and response types. It runs in the pool for short work, or in the model
    thread (pool="model"). A coroutine function chooses its own thread. If the function returns encoded
    JSON, pass the response type as `response`.

    >>> from regard.app.server.routes import ENDPOINTS
    >>> next(item.response.__name__ for item in ENDPOINTS if item.path == "/api/lookup")
    'LookupResponse'
    """

    def register(function: Function) -> Function:
        types = get_type_hints(function)
        request = types.get("request", EmptyRequest)
        handler = _handler(function, pool)
        ENDPOINTS.append(
            Endpoint(method, path, summary, request, response or types["return"], handler, max_body)
        )
        return function

    return register


def _handler(function: Callable[..., Any], pool: str) -> Handler:
    names = signature(function).parameters

    async def handle(state: AppState, request: Request, path: Path) -> bytes:
        available = {"state": state, "request": request, "path": path}
        answer = partial(function, **{name: available[name] for name in names})
        if iscoroutinefunction(function):
            return encode(await answer())
        return await (state.worker if pool == "model" else state.quick).run(lambda: encode(answer()))

    return handle


def encode(answer: Any) -> bytes:
    """Encode an answer as JSON, in which NaN and infinity become null. Arrays and bytes stay binary."""
    if isinstance(answer, bytes):
        return answer
    return encode_array(answer) if isinstance(answer, np.ndarray) else msgspec.json.encode(answer)
