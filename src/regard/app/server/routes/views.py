"""Views of texts, translations and long texts."""

import math
from collections.abc import Sequence
from inspect import getdoc
from typing import Annotated

from msgspec import Meta
from torch import Tensor
from torch.nn import functional as F

from regard._util.text import shorten
from regard.app.first_link import first_link
from regard.app.language_view import look_at_language_model
from regard.app.protocol import QUESTIONS, Question
from regard.app.server.endpoints import ENDPOINTS, Endpoint, Path, encode, endpoint
from regard.app.server.registry import Entry
from regard.app.server.schema import Name, Request, Response, Sentence, ViewResponse
from regard.app.server.state import AppState
from regard.app.view_model import InputView, LayerView, TextView, ViewModel, look_at_text, look_at_translation
from regard.errors import ArgumentError
from regard.inspection.capture import CapturedCall
from regard.mechanism.operator import attend
from regard.mechanism.scores import ScaledDot
from regard.mechanism.weights.matrix import Weights
from regard.models.encoders.static import StaticEncoder
from regard.models.encoders.words import split_words
from regard.models.text_model import TextModel
from regard.translation.decoding.strategies import Beam
from regard.translation.translator import Translator

MAX_TOKENS = 40_000  # tokens × beam size of a translation request
MAX_WORDS = 40_000  # words of a long text
MAX_TEXT = 1_000_000  # characters of a long text
MAX_LONG_BODY = 4_000_000  # bytes of a request
EXPENSIVE = 2**20  # questions that read at least this many weights run in the pool for long queries
_WIDTH, _HEADS = 64, 8  # of the word vectors for a long text


class LookRequest(Request, kw_only=True):
    """Texts to run through a model; the view includes every layer and head."""

    model: Name
    texts: Annotated[list[Sentence], Meta(min_length=1, max_length=8)]


class LongTextRequest(Request, kw_only=True):
    """A long text. The model "words" learns word vectors from the text and reads up to 40,000 words."""

    model: Name = "words"
    text: Annotated[str, Meta(min_length=1, max_length=MAX_TEXT)]


class FirstLink(Response, kw_only=True):
    """The link to show first: a pronoun and the word it most likely refers to, or another strong link."""

    layer: int
    head: int
    query: int
    key: int
    weight: float


class LookResponse(ViewResponse, kw_only=True):
    """A view of texts; first: the link to show first, if the first text has one."""

    first: FirstLink | None


@endpoint("POST", "/api/look", "Run texts through a model and view its attention.", pool="model")
def look(state: AppState, request: LookRequest) -> LookResponse:
    """Run texts through a model."""
    view = view_texts(state.registry.entry(request.model), request.texts)
    link = first_link(view.inputs[0])
    added = state.views.add(view)
    return LookResponse(
        id=added.id, title=added.title, inputs=added.inputs, first=link and FirstLink(**link._asdict())
    )


@endpoint("POST", "/api/long", "View a long text.", pool="model", max_body=MAX_LONG_BODY)
def long_text(state: AppState, request: LongTextRequest) -> ViewResponse:
    """Run a long text through a model."""
    if request.model == "words":
        return state.views.add(view_words(request.text))
    return state.views.add(view_long_text(state.registry.entry(request.model), request.text))


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


def view_long_text(entry: Entry, text: str) -> ViewModel:
    """Return a view of a model that reads one text."""
    if isinstance(entry.model, Translator):
        tokens = len(entry.model.tokens.source.segment(text).ids)
        if tokens > entry.model.max_tokens:
            raise ArgumentError(
                f"Too long: {tokens:,} tokens; {entry.name!r} reads at most {entry.model.max_tokens}. "
                f'Shorten the text, or use the model "words", which reads up to {MAX_WORDS:,} words.'
            )
    return view_texts(entry, [text])


def view_words(text: str) -> ViewModel:
    """Return a view of parameter-free self-attention over word vectors learned from the text itself.

    >>> from regard.app.server.routes.views import view_words
    >>> view = view_words("the dog barks and the dog sleeps and the cat sleeps")
    >>> [(layer["label"], layer["heads"]) for layer in view.describe()["inputs"][0]["layers"]]
    [('whole vectors', 1), ('8 heads', 8)]
    """
    words = [word.text for word in split_words(text)]
    if not 2 <= len(words) <= MAX_WORDS:
        raise ArgumentError(f"The text has {len(words):,} words; it must have 2 to {MAX_WORDS:,}.")
    # vectors learned from the co-occurrence counts of the text itself
    (tokens,) = StaticEncoder.learn([text], width=_WIDTH).token_vectors([text])
    vectors = tokens.vectors[0].detach()  # (n, m)
    heads = vectors.unflatten(1, (_HEADS, -1)).transpose(0, 1)  # n (h d) -> h n d
    scale = 2 * math.log(len(words))  # keeps the weights concentrated in longer texts
    layers = [
        LayerView("whole", "whole vectors", "self", _lazy_weights(vectors[None], scale)),
        LayerView("heads", f"{_HEADS} heads", "self", _lazy_weights(heads, scale)),
    ]
    note = f"{len(words):,} words. Each attends to words that occur in similar contexts."
    return ViewModel("words", [InputView(shorten(text), [TextView(tuple(words))], layers, note)])


def _lazy_weights(x: Tensor, scale: float) -> Weights:
    """Return the softmax of scale · cosine, lazily; only τ is computed here, row by row."""
    directions = F.normalize(x, dim=-1).contiguous()
    weights = CapturedCall(directions, directions, scale=scale).weights()
    if not weights.compute_tau():  # no kernels available
        return attend(directions, directions, directions[..., :1], score=ScaledDot(scale))[1]
    return Weights(weights.problem, None, x.shape[:-2], tau_from_kernels=True)
