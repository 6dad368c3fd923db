"""The table of endpoints. Routes and the OpenAPI document are generated from it."""

from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec

from regard._util.text import pluralize
from regard.app.server import requests, schema
from regard.app.server.routes import lessons, text, training, translation, views
from regard.app.server.security import RequestError
from regard.app.server.state import AppState
from regard.app.view_model import ViewModel

MAX_BODY = 1_000_000  # bytes of a request
MAX_LONG_BODY = 4_000_000

Path = dict[str, str]  # path parameters
Handler = Callable[[AppState, Any, Path], Awaitable[bytes]]


class Endpoint(NamedTuple):
    """Method, path, types and handler of an endpoint."""

    method: str
    path: str
    summary: str
    request: type[requests.Request]
    response: type[schema.Response]
    handler: Handler
    max_body: int = MAX_BODY

    @property
    def name(self) -> str:
        """Return a unique operation id, such as post_api_translate."""
        parts = (part.strip("{}") for part in self.path.replace(":path", "").split("/"))
        return "_".join([self.method.lower(), *filter(None, parts)]).replace(".", "_")


async def _health(state: AppState, request: requests.EmptyRequest, path: Path) -> bytes:
    models, waiting = len(state.registry.entries), state.worker.waiting
    return msgspec.json.encode(schema.HealthResponse(version=state.version, models=models, waiting=waiting))


async def _models(state: AppState, request: requests.EmptyRequest, path: Path) -> bytes:
    registry = state.registry
    if registry.can_refresh:
        await state.worker.run(registry.refresh)
    entries = list(registry.entries.values())
    models = msgspec.convert(entries, list[schema.ModelInfo], from_attributes=True)
    recordings = [
        schema.RecordingInfo(name=name, id=view_id, about=_size(view))
        for name, (view_id, view) in state.recordings.items()
    ]
    folders = list(registry.trainings())
    return msgspec.json.encode(
        schema.ModelsResponse(models=models, pending=registry.pending, folders=folders, recordings=recordings)
    )


def _size(view: ViewModel) -> str:
    inputs = view.inputs
    layers = pluralize(len(inputs[0].layers), "layer") if inputs else "empty"
    return layers if len(inputs) == 1 else f"{pluralize(len(inputs), 'text')}, {layers}"


async def _look(state: AppState, request: requests.LookRequest, path: Path) -> bytes:
    entry = state.registry.entry(request.model)
    return await state.run_model(lambda: state.views.add(views.view_texts(entry, request.texts)))


async def _long(state: AppState, request: requests.LongTextRequest, path: Path) -> bytes:
    if request.model == "words":
        return await state.run_model(lambda: state.views.add(views.view_words(request.text)))
    entry = state.registry.entry(request.model)
    return await state.run_model(lambda: state.views.add(views.view_long_text(entry, request.text)))


async def _trainings(state: AppState, request: requests.EmptyRequest, path: Path) -> bytes:
    folders = state.registry.trainings()
    return await state.run_quick(
        lambda: schema.TrainingsResponse(
            trainings=[training.training_info(*item) for item in folders.items()]
        )
    )


async def _training(state: AppState, request: requests.TrainingRequest, path: Path) -> bytes:
    folders, name = state.registry.trainings(), path["name"]
    if name not in folders:
        names = ", ".join(map(repr, list(folders)[:20])) or "none"
        raise RequestError(HTTPStatus.NOT_FOUND, f"Unknown training. Available: {names}.")
    return await state.run_quick(partial(training.rows_after, folders[name], request.after))


async def _view(state: AppState, request: requests.EmptyRequest, path: Path) -> bytes:
    return await state.run_quick(lambda: state.views.describe(path["id"]))


def _ask(question: str) -> Handler:
    async def handler(state: AppState, request: requests.Request, path: Path) -> bytes:
        cost = state.views.cost(path["id"], question, request)
        return await state.run_query(partial(state.views.ask, path["id"], question, request), cost)

    return handler


def _without_path(handler: Callable[[AppState, Any], Awaitable[bytes]]) -> Handler:
    return lambda state, request, path: handler(state, request)


def _without_model(answer: Callable[[Any], schema.Response]) -> Handler:
    return lambda state, request, path: state.run_quick(partial(answer, request))


_QUESTIONS: dict[str, tuple[str, type[requests.Request], type[schema.Response]]] = {
    "tile": ("Block means of part of the weights.", requests.TileRequest, schema.TileResponse),
    "topk": ("The largest weights of a query or a key.", requests.TopkRequest, schema.RankingResponse),
    "received": (
        "The keys that receive most attention.",
        requests.ReceivedRequest,
        schema.RankingResponse,
    ),
    "heads": ("Statistics and thumbnails of heads.", requests.HeadsRequest, schema.HeadsResponse),
    "numbers": ("The computation of one weight.", requests.NumbersRequest, schema.NumbersResponse),
}

ENDPOINTS = (
    Endpoint("GET", "/api/health", "Server status.", requests.EmptyRequest, schema.HealthResponse, _health),
    Endpoint("GET", "/api/models", "Loaded models.", requests.EmptyRequest, schema.ModelsResponse, _models),
    Endpoint(
        "POST",
        "/api/translate",
        "Translate sentences.",
        requests.TranslateRequest,
        schema.TranslateResponse,
        _without_path(translation.translate),
    ),
    Endpoint(
        "POST",
        "/api/align",
        "Align the words of sentence pairs.",
        requests.AlignRequest,
        schema.AlignResponse,
        _without_path(translation.align),
    ),
    Endpoint(
        "POST",
        "/api/embed",
        "Contextual word vectors.",
        requests.EmbedRequest,
        schema.EmbedResponse,
        _without_path(text.embed),
    ),
    Endpoint(
        "POST",
        "/api/compare",
        "Similarity of a word in two sentences, by layer.",
        requests.CompareRequest,
        schema.CompareResponse,
        _without_path(text.compare),
    ),
    Endpoint(
        "POST",
        "/api/attention",
        "Attention weights of one word.",
        requests.AttentionRequest,
        schema.AttentionResponse,
        _without_path(text.word_attention),
    ),
    Endpoint("POST", "/api/look", "View texts in a model.", requests.LookRequest, schema.ViewResponse, _look),
    Endpoint(
        "POST",
        "/api/long",
        "View a long text.",
        requests.LongTextRequest,
        schema.ViewResponse,
        _long,
        MAX_LONG_BODY,
    ),
    Endpoint(
        "POST",
        "/api/lookup",
        "Attention over a small table, step by step.",
        requests.LookupRequest,
        schema.LookupResponse,
        _without_model(lessons.lookup),
    ),
    Endpoint(
        "POST",
        "/api/order",
        "Effect of reordering words.",
        requests.OrderRequest,
        schema.OrderResponse,
        _without_model(lessons.order),
    ),
    Endpoint(
        "GET",
        "/api/positions",
        "A position encoding.",
        requests.PositionsRequest,
        schema.PositionsResponse,
        _without_model(lessons.positions),
    ),
    Endpoint(
        "GET",
        "/api/training",
        "Training runs.",
        requests.EmptyRequest,
        schema.TrainingsResponse,
        _trainings,
    ),
    Endpoint(
        "GET",
        "/api/training/{name:path}",
        "Log of a training run.",
        requests.TrainingRequest,
        schema.TrainingResponse,
        _training,
    ),
    Endpoint("GET", "/api/views/{id}", "A view.", requests.EmptyRequest, schema.ViewResponse, _view),
    *(
        Endpoint("POST", f"/api/views/{{id}}/{name}", summary, request, response, _ask(name))
        for name, (summary, request, response) in _QUESTIONS.items()
    ),
)
