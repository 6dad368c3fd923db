"""The table of what can be asked: from it come the routes and the document that describes them."""

from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec

from regard.app.server import requests, schema
from regard.app.server.routes import lessons, text, training, translation, views
from regard.app.server.security import Refused
from regard.app.server.state import AppState
from regard.app.view_model import ViewModel
from regard.models.encoders.words import counted

BODY = 1_000_000  # bytes of a request
LONG_BODY = 4_000_000

Path = dict[str, str]  # what stands in braces in an address
Reply = Callable[[AppState, Any, Path], Awaitable[bytes]]


class Endpoint(NamedTuple):
    """One thing that can be asked, how, and what comes back."""

    method: str
    path: str
    about: str
    takes: type[requests.Request]
    gives: type[schema.Answer]
    reply: Reply
    most: int = BODY

    @property
    def name(self) -> str:
        """A name for it that no other has: post_api_translate."""
        parts = (part.strip("{}") for part in self.path.replace(":path", "").split("/"))
        return "_".join([self.method.lower(), *filter(None, parts)]).replace(".", "_")


async def _health(house: AppState, asked: requests.Nothing, path: Path) -> bytes:
    models, waiting = len(house.collection.entries), house.worker.waiting
    return msgspec.json.encode(schema.Health(version=house.version, models=models, waiting=waiting))


async def _models(house: AppState, asked: requests.Nothing, path: Path) -> bytes:
    collection = house.collection
    if collection.grows:
        await house.worker.alone(collection.refresh)
    models = [
        schema.Model(
            name=entry.name,
            kind=entry.kind,
            about=entry.about,
            attends=entry.attends,
            layers=entry.layers,
            heads=entry.heads,
            longest=entry.longest,
            languages=entry.languages,
            examples=list(entry.examples),
        )
        for entry in collection.entries.values()
    ]
    recordings = [
        schema.Recording(name=name, id=number, about=_counted(exhibit))
        for name, (number, exhibit) in house.recordings.items()
    ]
    folders = list(collection.trainings())
    return msgspec.json.encode(
        schema.Models(models=models, pending=collection.pending, folders=folders, recordings=recordings)
    )


def _counted(exhibit: ViewModel) -> str:
    """How much a recording holds."""
    inputs = exhibit.inputs
    layers = counted(len(inputs[0].layers), "layer") if inputs else "nothing"
    return layers if len(inputs) == 1 else f"{counted(len(inputs), 'text')}, {layers}"


async def _look(house: AppState, asked: requests.Look, path: Path) -> bytes:
    entry = house.collection.entry(asked.model)
    return await house.by_model(lambda: house.exhibits.keep(views.of_texts(entry, asked.texts)))


async def _long(house: AppState, asked: requests.Long, path: Path) -> bytes:
    if asked.model == "words":
        return await house.by_model(lambda: house.exhibits.keep(views.of_words(asked.text)))
    entry = house.collection.entry(asked.model)
    return await house.by_model(lambda: house.exhibits.keep(views.of_long(entry, asked.text)))


async def _trainings(house: AppState, asked: requests.Nothing, path: Path) -> bytes:
    folders = house.collection.trainings()
    return await house.quickly(
        lambda: schema.Trainings(trainings=[training.training(*each) for each in folders.items()])
    )


async def _training(house: AppState, asked: requests.TrainingAsked, path: Path) -> bytes:
    folders = house.collection.trainings()
    if path["name"] not in folders:
        names = ", ".join(map(repr, list(folders)[:20])) or "none"
        raise Refused(HTTPStatus.NOT_FOUND, f"there is no training of this name; there are: {names}.")
    return await house.quickly(partial(training.rows_after, folders[path["name"]], asked.after))


async def _exhibit(house: AppState, asked: requests.Nothing, path: Path) -> bytes:
    return await house.quick.alone(lambda: msgspec.json.encode(house.exhibits.find(path["id"]).describe()))


def _question(name: str) -> Reply:
    async def reply(house: AppState, asked: requests.Request, path: Path) -> bytes:
        pairs = house.exhibits.pairs(path["id"], name, asked)
        return await house.by_looking(partial(house.exhibits.ask, path["id"], name, asked), pairs)

    return reply


def _of(reply: Callable[[AppState, Any], Awaitable[bytes]]) -> Reply:
    """One that needs nothing of the path."""
    return lambda house, asked, path: reply(house, asked)


def _computed(answer: Callable[[Any], schema.Answer]) -> Reply:
    """One that needs no model."""
    return lambda house, asked, path: house.quickly(partial(answer, asked))


_QUESTIONS: dict[str, tuple[str, type[requests.Request], type[schema.Answer]]] = {
    "tile": ("Means of blocks of a part of the weights.", requests.Tile, schema.TileTold),
    "top": ("The strongest weights of a query or a key.", requests.Top, schema.PlacesTold),
    "received": ("The keys that are read most.", requests.Received, schema.PlacesTold),
    "heads": ("What each head does.", requests.HeadsAsked, schema.HeadsTold),
    "numbers": ("How one weight comes about.", requests.Numbers, schema.NumbersTold),
}

ENDPOINTS = (
    Endpoint("GET", "/api/health", "Is it well?", requests.Nothing, schema.Health, _health),
    Endpoint("GET", "/api/models", "What models are there?", requests.Nothing, schema.Models, _models),
    Endpoint(
        "POST",
        "/api/translate",
        "Translate sentences.",
        requests.Translate,
        schema.Translations,
        _of(translation.translate),
    ),
    Endpoint(
        "POST",
        "/api/align",
        "Align the words of translations.",
        requests.Align,
        schema.Alignments,
        _of(translation.align),
    ),
    Endpoint(
        "POST",
        "/api/embed",
        "Vectors of words in their sentences.",
        requests.Embed,
        schema.Embedded,
        _of(text.embed),
    ),
    Endpoint(
        "POST",
        "/api/compare",
        "How alike a word is in two sentences, layer by layer.",
        requests.Compare,
        schema.Comparisons,
        _of(text.compare),
    ),
    Endpoint(
        "POST",
        "/api/attended",
        "What a word attends to.",
        requests.Attended,
        schema.AttendedWords,
        _of(text.attended),
    ),
    Endpoint("POST", "/api/look", "Look at texts in a model.", requests.Look, schema.Shown, _look),
    Endpoint("POST", "/api/long", "Look at a long text.", requests.Long, schema.Shown, _long, LONG_BODY),
    Endpoint(
        "POST",
        "/api/lookup",
        "Attention over a small table, step by step.",
        requests.Lookup,
        schema.LookedUp,
        _computed(lessons.lookup),
    ),
    Endpoint(
        "POST",
        "/api/order",
        "What another order of words changes.",
        requests.Order,
        schema.Ordered,
        _computed(lessons.order),
    ),
    Endpoint(
        "GET",
        "/api/positions",
        "An encoding of positions.",
        requests.PositionsAsked,
        schema.Encoding,
        _computed(lessons.positions),
    ),
    Endpoint("GET", "/api/training", "The trainings.", requests.Nothing, schema.Trainings, _trainings),
    Endpoint(
        "GET",
        "/api/training/{name:path}",
        "What a training has logged.",
        requests.TrainingAsked,
        schema.TrainingRows,
        _training,
    ),
    Endpoint(
        "GET", "/api/exhibits/{id}", "What is there to see?", requests.Nothing, schema.Described, _exhibit
    ),
    *(
        Endpoint("POST", f"/api/exhibits/{{id}}/{name}", about, takes, gives, _question(name))
        for name, (about, takes, gives) in _QUESTIONS.items()
    ),
)
