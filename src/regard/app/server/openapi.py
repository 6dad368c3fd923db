"""The document that describes the API, made of the very Structs that requests are read with."""

from typing import Any

import msgspec

from regard.app.server.endpoints import ENDPOINTS, Endpoint
from regard.app.server.schema import Problem

_REFERENCE = "#/components/schemas/{name}"
_REFUSALS = {
    "400": "The body is no JSON.",
    "403": "The request comes from another site, or names another host.",
    "404": "There is no such model, training or exhibit.",
    "408": "The body arrived too slowly.",
    "413": "The body is too large.",
    "415": "The body does not say that it is JSON.",
    "422": "A value is missing, wrong or out of bounds.",
    "500": "A mistake of regard's own.",
    "503": "Too many requests wait; Retry-After says when to ask again.",
}
_OF_BODIES = {"400", "408", "413", "415"}


def document(version: str = "") -> dict[str, Any]:
    """OpenAPI 3.1.

    >>> from regard.app.server.openapi import document
    >>> found = document()
    >>> found["openapi"], "post" in found["paths"]["/api/translate"]
    ('3.1.0', True)
    """
    kinds = {kind.__name__: kind for one in ENDPOINTS for kind in (one.takes, one.gives)}
    kinds["Problem"] = Problem
    _, components = msgspec.json.schema_components(kinds.values(), ref_template=_REFERENCE)
    paths: dict[str, dict[str, Any]] = {}
    for one in ENDPOINTS:
        paths.setdefault(one.path.replace(":path", ""), {})[one.method.lower()] = _operation(one, components)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "regard",
            "version": version,
            "description": "What the page of `regard look` asks: models, translations, attention.",
        },
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(one: Endpoint, components: dict[str, Any]) -> dict[str, Any]:
    posts = one.method == "POST"
    operation: dict[str, Any] = {
        "operationId": one.name,
        "summary": one.about,
        "parameters": [*_in_path(one), *([] if posts else _in_query(components[one.takes.__name__]))],
        "responses": {
            "200": {"description": "The answer.", "content": _json(one.gives)},
            **{
                status: {"description": what, "content": _json(Problem)}
                for status, what in _REFUSALS.items()
                if posts or status not in _OF_BODIES
            },
        },
    }
    if posts:
        operation["requestBody"] = {"required": True, "content": _json(one.takes)}
    return operation


def _json(kind: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REFERENCE.format(name=kind.__name__)}}}


def _in_path(one: Endpoint) -> list[dict[str, Any]]:
    names = [part.strip("{}").removesuffix(":path") for part in one.path.split("/") if part.startswith("{")]
    schema = {"type": "string", "minLength": 1}
    return [{"name": name, "in": "path", "required": True, "schema": schema} for name in names]


def _in_query(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The fields of a Struct, one by one."""
    return [
        {"name": name, "in": "query", "required": name in schema.get("required", ()), "schema": field}
        for name, field in schema.get("properties", {}).items()
    ]
