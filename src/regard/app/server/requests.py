"""Request bodies and query strings, with their bounds.

msgspec refuses unknown, missing, mistyped and out-of-bounds fields before any work is done. The OpenAPI
document is generated from the same Structs.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

MAX_SENTENCE = 10_000  # characters
MAX_SENTENCES = 64  # per request
MAX_TEXT = 1_000_000  # characters of a long text

Name = Annotated[str, Meta(min_length=1, max_length=1000, description="Name of a model.")]
Sentence = Annotated[str, Meta(min_length=1, max_length=MAX_SENTENCE)]
Sentences = Annotated[list[Sentence], Meta(min_length=1, max_length=MAX_SENTENCES)]
Word = Annotated[str, Meta(min_length=1, max_length=200)]
Layer = Annotated[int, Meta(ge=-1000, le=1000)]
Number = Annotated[float, Meta(ge=-1e6, le=1e6)]
Row = Annotated[list[Number], Meta(min_length=1, max_length=64)]
Table = Annotated[list[Row], Meta(min_length=1, max_length=64)]
Position = Annotated[int, Meta(ge=0, le=10_000_000)]
# lists, not tuples: msgspec 0.22 reads out of bounds for a union of a bounded string and a tuple
Range = Annotated[list[Position], Meta(min_length=2, max_length=2)]
TwoWords = Annotated[list[Word], Meta(min_length=2, max_length=2)]
Pair = Annotated[list[Sentence], Meta(min_length=2, max_length=2)]
Pixels = Annotated[int, Meta(ge=1, le=2048)]
K = Annotated[int, Meta(ge=1, le=1000)]
Heads = Annotated[list[Annotated[int, Meta(ge=0, le=10_000)]], Meta(min_length=1, max_length=1000)]


class Request(Struct, forbid_unknown_fields=True):
    """Base class of all requests.

    >>> from regard.app.server.requests import TranslateRequest
    >>> TranslateRequest(model="demo", sentences=["a dog"]).beam
    5
    """


class EmptyRequest(Request, kw_only=True):
    """No parameters."""


class TranslateRequest(Request, kw_only=True):
    """Sentences to translate."""

    model: Name
    sentences: Sentences
    beam: Annotated[int, Meta(ge=1, le=32, description="Beam size.")] = 5
    n_best: Annotated[int, Meta(ge=1, le=32, description="Translations per sentence, at most beam.")] = 1
    alignment: Annotated[bool, Meta(description="Return word alignments.")] = True
    view: Annotated[bool, Meta(description="Keep all attention weights as a view.")] = False


class AlignRequest(Request, kw_only=True):
    """Sentence pairs to align."""

    model: Name
    pairs: Annotated[list[Pair], Meta(min_length=1, max_length=MAX_SENTENCES)]


class EmbedRequest(Request, kw_only=True):
    """Sentences whose words are embedded."""

    model: Name
    sentences: Sentences
    layer: Annotated[
        Layer | None, Meta(description="Default: the layer that separates word senses best.")
    ] = None


class CompareRequest(Request, kw_only=True):
    """One word in two sentences, or two words."""

    models: Annotated[
        Annotated[list[Name], Meta(min_length=1, max_length=64)] | None,
        Meta(description="Names of encoders. Default: all encoders."),
    ] = None
    first: Sentence
    second: Sentence
    word: Word | TwoWords


class AttentionRequest(Request, kw_only=True):
    """A word of a sentence whose attention weights are returned."""

    model: Name
    sentence: Sentence
    word: Word
    layer: Annotated[Layer | None, Meta(description="Counted from 0. Default: mean over layers.")] = None
    head: Annotated[Layer | None, Meta(description="Counted from 0. Default: mean over heads.")] = None


class LookRequest(Request, kw_only=True):
    """Texts to run through a model; the view has every layer and head."""

    model: Name
    texts: Annotated[list[Sentence], Meta(min_length=1, max_length=8)]


class LongTextRequest(Request, kw_only=True):
    """A long text. The model "words" learns word vectors from the text itself and has no length limit."""

    model: Name = "words"
    text: Annotated[str, Meta(min_length=1, max_length=MAX_TEXT)]


Score = Literal["dot", "scaled", "cosine", "gaussian", "additive"]
Normalize = Literal["softmax", "sparsemax", "entmax15", "hard", "mean", "sigmoid", "relu", "softmax1"]
MaskName = Literal["none", "causal", "window"]


class LookupRequest(Request, kw_only=True):
    """Queries, keys and values for a step-by-step attention."""

    query: Table
    key: Table
    value: Table
    score: Score = "scaled"
    normalize: Normalize = "softmax"
    temperature: Annotated[float, Meta(ge=1e-3, le=1e3, description="Divides the scores.")] = 1.0
    mask: MaskName = "none"
    window: Annotated[int, Meta(ge=0, le=64, description="Keys visible on each side of a query.")] = 2


Positions = Literal["none", "sinusoidal", "learned", "rotary", "alibi", "t5"]
Seed = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class OrderRequest(Request, kw_only=True):
    """A sentence and a permutation of its words, counted from 0."""

    sentence: Annotated[str, Meta(min_length=1, max_length=1000)]
    order: Annotated[list[Annotated[int, Meta(ge=0, le=63)]], Meta(min_length=1, max_length=64)]
    positions: Positions = "none"
    seed: Seed = 0


class PositionsRequest(Request, kw_only=True):
    """Kind and size of a position encoding."""

    kind: Literal["sinusoidal", "learned", "rotary", "alibi", "t5"] = "sinusoidal"
    length: Annotated[int, Meta(ge=1, le=512, description="Number of positions.")] = 64
    width: Annotated[int, Meta(ge=2, le=512, description="Number of features; of heads for alibi, t5.")] = 64


class TrainingRequest(Request, kw_only=True):
    """First step to return."""

    after: Annotated[int, Meta(ge=-1, le=2**53, description="Return rows after this step.")] = -1


class _LayerRequest(Request, kw_only=True):
    """A layer of an input of a view, both counted from 0."""

    input: Position = 0
    layer: Position = 0


class TileRequest(_LayerRequest, kw_only=True):
    """Part of the weight matrix, pooled to height × width."""

    heads: Heads | None = None
    mean: bool = False
    rows: Range | None = None
    columns: Range | None = None
    height: Pixels = 256
    width: Pixels = 256


class TopkRequest(_LayerRequest, kw_only=True):
    """The k largest weights in the row of a query or the column of a key."""

    heads: Heads | None = None
    side: Literal["query", "key"] = "query"
    position: Position
    k: K = 10


class ReceivedRequest(_LayerRequest, kw_only=True):
    """The k keys that receive most attention."""

    heads: Heads | None = None
    k: K = 10
    bins: Pixels = 256


class HeadsRequest(_LayerRequest, kw_only=True):
    """Statistics and thumbnails of heads."""

    heads: Heads | None = None
    size: Annotated[int, Meta(ge=1, le=512)] = 64


class NumbersRequest(_LayerRequest, kw_only=True):
    """The computation of one weight."""

    head: Position = 0
    query: Position
    key: Position
