"""Views of texts and translations."""

from collections.abc import Sequence
from inspect import getdoc
from typing import Annotated

from msgspec import Meta

from regard.app.first_link import first_link
from regard.app.language_view import look_at_language_model
from regard.app.protocol import QUESTIONS, Question
from regard.app.server.endpoints import ENDPOINTS, Endpoint, Path, encode, endpoint
from regard.app.server.registry import Entry
from regard.app.server.schema import Name, Request, Response, Sentence, ViewResponse
from regard.app.server.state import AppState
from regard.app.view_model import ViewModel, look_at_text, look_at_translation
from regard.errors import ArgumentError
from regard.models.text_model import TextModel
from regard.translation.decoding.strategies import Beam
from regard.translation.translator import Translator

MAX_TOKENS = 40_000  # tokens × beam size of a translation request
EXPENSIVE = 2**20  # questions that read at least this many weights run in the pool for long queries


class LookRequest(Request, kw_only=True):
    """Texts to run through a model; the view includes every layer and head."""

    model: Name
    texts: Annotated[list[Sentence], Meta(min_length=1, max_length=8)]


class FirstLink(Response, kw_only=True):
    """The link to show first: from a pronoun to the word it attends to most, or another strong link."""

    layer: int
    head: int
    query: int
    key: int
    weight: float


class LookResponse(ViewResponse, kw_only=True):
    """A view of texts. first: the link to show first, if the first text has one."""

    first: FirstLink | None


@endpoint("POST", "/api/look", "Run texts through a model and view its attention.", pool="model")
def look(state: AppState, request: LookRequest) -> LookResponse:
    """Run texts through a model."""
    return add_view(state, view_texts(state.registry.entry(request.model), request.texts))


def add_view(state: AppState, view: ViewModel) -> LookResponse:
    """Store a view and find the link to show first."""
    link = first_link(view.inputs[0])
    added = state.views.add(view)
    return LookResponse(
        id=added.id, title=added.title, inputs=added.inputs, first=link and FirstLink(**link._asdict())
    )


@endpoint("GET", "/api/views/{id}", "Description of a view.")
def describe_view(state: AppState, path: Path) -> ViewResponse:
    """Return the description of a view."""
    return state.views.describe(path["id"])


async def _ask(state: AppState, question: Question, path: Path) -> bytes:
    work = state.views.prepare(path["id"], question)
    worker = state.quick if work.cost < EXPENSIVE else state.queries
    return await worker.run(lambda: encode(work.answer()))


for _name, _question in QUESTIONS.items():
    _summary = (getdoc(_question) or "").partition("\n")[0]
    ENDPOINTS.append(
        Endpoint("POST", f"/api/views/{{id}}/{_name}", _summary, _question, _question.answer, _ask)
    )


def check_length(translator: Translator, sentences: Sequence[str], beam: int) -> ArgumentError | None:
    """Return an error if the sentences would block the model thread for too long."""
    tokens = sum(len(translator.tokens.source.segment(sentence).ids) for sentence in sentences)
    if tokens * beam <= MAX_TOKENS:
        return None
    return ArgumentError(
        f"Request too long: {tokens:,} tokens × beam {beam} = {tokens * beam:,}; the limit is "
        f"{MAX_TOKENS:,}. Send fewer sentences or reduce the beam."
    )


def view_texts(entry: Entry, texts: Sequence[str]) -> ViewModel:
    """Return a view of a model that reads texts, or of a translator that translates them."""
    if not entry.attends:
        raise ArgumentError(f"{entry.name!r} has no attention to show. Choose another model.")
    if isinstance(entry.model, Translator):
        if error := check_length(entry.model, texts, Beam().size):
            raise error
        return look_at_translation(entry.model, texts, title=entry.name)
    if isinstance(entry.model, TextModel):
        return look_at_language_model(entry.model, texts, title=entry.name)
    return look_at_text(entry.model, texts, title=entry.name)
