"""The OpenAPI document, and random requests checked against it."""

import gc
import re
from typing import Any

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from jsonschema_rs import meta
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from regard.app.long_text import view_co_occurrence
from regard.app.server.app import make_app
from regard.app.server.openapi import document
from regard.app.server.routes import ENDPOINTS
from regard.app.server.security import SecurityMiddleware
from regard.app.server.state import AppState

CHECKS = [
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
    content_type_conformance,
]
OPERATIONS = [result.ok() for result in schemathesis.openapi.from_dict(document()).get_all_operations()]
# endpoints with no invalid input
NOTHING_WRONG = {"GET /api/health", "GET /api/models", "GET /api/training", "GET /api/views/{id}"}


class AsHost:
    """Sets the Host header of every request to the server's own name."""

    def __init__(self, app: SecurityMiddleware) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
            scope = {**scope, "headers": [*headers, (b"host", b"127.0.0.1:8000")]}
        await self.app(scope, receive, send)


@pytest.fixture(scope="module")
def here(registry):
    """An AppState and its application."""
    state = AppState(registry)
    yield state, AsHost(make_app(state))
    state.close()


@pytest.mark.hypothesis  # more examples in `make test-slow`
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["fit", "misfit"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda item: item.label)
def test_random_requests_are_answered_as_described(operation, mode, here):
    state, app = here
    if mode is GenerationMode.NEGATIVE and operation.label in NOTHING_WRONG:
        return

    examples = settings().max_examples // 8

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(case=operation.as_strategy(mode))
    def ask(case):
        named(case, state)
        response = case.call(base_url="http://127.0.0.1:8000", app=app)
        case.validate_response(response, checks=CHECKS)

    ask()


def named(case: schemathesis.Case, state: AppState) -> None:
    """Replace random names with existing ones."""
    body, names = case.body, list(state.registry.entries)
    if isinstance(body, dict):
        if isinstance(body.get("model"), str) and body["model"]:
            body["model"] = names[len(body["model"]) % len(names)]
        if isinstance(body.get("models"), list) and body["models"]:
            body["models"] = ["bert"]
    if case.path_parameters and "id" in case.path_parameters:
        case.path_parameters["id"] = _view_id(state)


def _view_id(state: AppState) -> str:
    if not len(state.views):
        state.views.add(view_co_occurrence("a dog and a cat and a dog"))
    return next(iter(state.views._views))


def test_every_endpoint_is_described_by_valid_schemas():
    api = document()
    operations = [operation for methods in api["paths"].values() for operation in methods.values()]
    assert len(operations) == len({operation["operationId"] for operation in operations}) == len(ENDPOINTS)
    schemas = api["components"]["schemas"]
    for schema in schemas.values():
        meta.validate(schema)
    names = set(re.findall(r"#/components/schemas/(\w+)", str(api)))
    assert "TranslateResponse" in names <= set(schemas)


def test_garbage_collection_of_decoders_is_safe():
    """Some unions of bounded types crash the garbage collector in msgspec 0.22."""
    decoders = [msgspec.json.Decoder(item.request) for item in ENDPOINTS]
    gc.collect()
    decoders.clear()
    gc.collect()
