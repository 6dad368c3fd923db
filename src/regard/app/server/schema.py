"""Base classes, field types, views and alignments shared by requests and responses.

The Structs of an endpoint are defined next to its handler in routes/. msgspec rejects unknown, missing,
mistyped and out-of-bounds fields before any work is done. The OpenAPI document is generated from the same
Structs.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

MAX_SENTENCE = 10_000  # characters
MAX_SENTENCES = 64  # per request
Name = Annotated[str, Meta(min_length=1, max_length=1000, description="Name of a model.")]
Sentence = Annotated[str, Meta(min_length=1, max_length=MAX_SENTENCE)]
Sentences = Annotated[list[Sentence], Meta(min_length=1, max_length=MAX_SENTENCES)]


class Request(Struct, forbid_unknown_fields=True):
    """Base class of all requests.

    >>> from regard.app.server.routes.translation import TranslateRequest
    >>> TranslateRequest(model="demo", sentences=["a dog"]).beam
    5
    """


class EmptyRequest(Request, kw_only=True):
    """No parameters."""


class Response(Struct):
    """Base class of all responses.

    >>> from regard.app.server.schema import ErrorResponse
    >>> ErrorResponse(error="unknown model")
    ErrorResponse(error='unknown model')
    """


class ErrorResponse(Response, kw_only=True):
    """An error: what is wrong and how to fix it."""

    error: str


class Alignment(Response, kw_only=True):
    """A word alignment. weights: one row per target word, one column per source word."""

    source_words: list[str]
    target_words: list[str]
    links: str
    weights: list[list[float]]


class Text(Response, kw_only=True):
    """Tokens, and the positions of special tokens."""

    tokens: list[str]
    special: list[int]


class Layer(Response, kw_only=True):
    """An attention layer. queries, keys: indices of texts. vectors: whether query and key vectors exist."""

    name: str
    label: str
    kind: Literal["self", "cross", "words"]
    heads: int
    queries: int
    keys: int
    vectors: bool


class Input(Response, kw_only=True):
    """One input of the model, with its texts and attention layers."""

    title: str
    note: str
    texts: list[Text]
    layers: list[Layer]


class ViewResponse(Response, kw_only=True):
    """A view: inputs with texts and layers. Query its weights at /api/views/{id}."""

    id: str
    title: str
    inputs: list[Input]
