"""Attention maps of long texts."""

from typing import Annotated

from msgspec import Meta

from regard.app.long_text import (
    CO_OCCURRENCE,
    MAX_WORDS,
    STORIES,
    look_at_passages,
    look_at_stories,
    sample_stories,
    view_co_occurrence,
)
from regard.app.server.endpoints import endpoint
from regard.app.server.registry import Entry
from regard.app.server.routes.views import LookResponse, add_view, view_texts
from regard.app.server.schema import Name, Request, Response
from regard.app.server.state import AppState
from regard.app.view_model import ViewModel
from regard.errors import ArgumentError
from regard.models.encoders.pretrained import PretrainedEncoder
from regard.translation.translator import Translator

MAX_TEXT = 1_000_000  # characters
MAX_BODY = 4_000_000  # bytes of a request


class LongTextRequest(Request, kw_only=True):
    """A long text, and the model that reads it in passages.

    Besides the loaded models, there are "stories", the small model shipped with regard, and
    "co-occurrence", which is not a model: it compares words by their co-occurrence in the text itself.
    """

    model: Name = CO_OCCURRENCE
    text: Annotated[str, Meta(min_length=1, max_length=MAX_TEXT)]


class SampleRequest(Request, kw_only=True):
    """The length of a sample text."""

    words: Annotated[int, Meta(ge=1, le=MAX_WORDS)] = 4_000


class SampleResponse(Response, kw_only=True):
    """Short English stories, one per paragraph."""

    text: str


@endpoint("POST", "/api/long", "View a long text.", pool="model", max_body=MAX_BODY)
def long_text(state: AppState, request: LongTextRequest) -> LookResponse:
    """Run a long text through a model."""
    if request.model in state.registry.entries:
        view = _view(state.registry.entry(request.model), request.text)
    elif request.model == CO_OCCURRENCE:
        view = view_co_occurrence(request.text)
    elif request.model == STORIES:
        view = look_at_stories(request.text)
    else:
        view = _view(state.registry.entry(request.model), request.text)  # raises if the model is unknown
    return add_view(state, view)


@endpoint("POST", "/api/long/sample", "Sample text for the long-text models.")
def long_sample(request: SampleRequest) -> SampleResponse:
    """Return stories from the grammar."""
    return SampleResponse(text=sample_stories(request.words))


def _view(entry: Entry, text: str) -> ViewModel:
    if isinstance(entry.model, PretrainedEncoder):
        return look_at_passages(entry.model, text, title=entry.name)
    if isinstance(entry.model, Translator):
        tokens = len(entry.model.tokens.source.segment(text).ids)
        if tokens > entry.model.max_tokens:
            raise ArgumentError(
                f"Too long: {tokens:,} tokens; {entry.name!r} reads at most {entry.model.max_tokens}. "
                f"Shorten the text, or choose {CO_OCCURRENCE!r}, which takes up to {MAX_WORDS:,} words."
            )
    return view_texts(entry, [text])
