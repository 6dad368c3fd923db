"""The OpenAPI document, generated from the Structs of requests and responses."""

from typing import Any

import msgspec

from regard.app.server.endpoints import Endpoint
from regard.app.server.routes import ENDPOINTS
from regard.app.server.schema import ErrorResponse

_REFERENCE = "#/components/schemas/{name}"
_ERRORS = {
    "400": "The body is not valid JSON.",
    "403": "The request comes from another site, or names another host.",
    "404": "Unknown model, training run or view.",
    "408": "The body arrived too slowly.",
    "413": "The body is too large.",
    "415": "The content type is not application/json.",
    "422": "A value is missing, invalid or out of bounds.",
    "500": "Internal error.",
    "503": "The queue is full; Retry-After gives the seconds to wait.",
}
_BODY_ERRORS = {"400", "408", "413", "415"}


def document(version: str = "") -> dict[str, Any]:
    """Return the API description as OpenAPI 3.1.

    >>> from regard.app.server.openapi import document
    >>> api = document()
    >>> api["openapi"], "post" in api["paths"]["/api/translate"]
    ('3.1.0', True)
    """
    types = {kind for endpoint in ENDPOINTS for kind in (endpoint.request, endpoint.response)} - {bytes}
    _, components = msgspec.json.schema_components({*types, ErrorResponse}, ref_template=_REFERENCE)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in ENDPOINTS:
        methods = paths.setdefault(endpoint.path.replace(":path", ""), {})
        methods[endpoint.method.lower()] = _operation(endpoint, components)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "regard",
            "version": version,
            "description": "API of `regard look`: models, translations, attention.",
        },
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(endpoint: Endpoint, components: dict[str, Any]) -> dict[str, Any]:
    is_post = endpoint.method == "POST"
    query = [] if is_post else _query_parameters(components[endpoint.request.__name__])
    operation: dict[str, Any] = {
        "operationId": endpoint.name,
        "summary": endpoint.summary,
        "parameters": [*_path_parameters(endpoint), *query],
        "responses": {
            "200": {"description": "Success.", "content": _content(endpoint.response)},
            **{
                status: {"description": description, "content": _content(ErrorResponse)}
                for status, description in _ERRORS.items()
                if is_post or status not in _BODY_ERRORS
            },
        },
    }
    if is_post:
        operation["requestBody"] = {"required": True, "content": _content(endpoint.request)}
    return operation


def _content(kind: type) -> dict[str, Any]:
    if kind is bytes:
        return {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    return {"application/json": {"schema": {"$ref": _REFERENCE.format(name=kind.__name__)}}}


def _path_parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    parts = (part for part in endpoint.path.split("/") if part.startswith("{"))
    names = [part.strip("{}").removesuffix(":path") for part in parts]
    schema = {"type": "string", "minLength": 1}
    return [{"name": name, "in": "path", "required": True, "schema": schema} for name in names]


def _query_parameters(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "query", "required": name in schema.get("required", ()), "schema": field}
        for name, field in schema.get("properties", {}).items()
    ]
