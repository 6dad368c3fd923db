"""What can be asked: the JSON bodies and query strings, with their bounds.

A field that is unknown, missing, of another type or out of bounds is refused by msgspec before any work, and
the same Structs are what the OpenAPI document is made of.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

LONGEST = 10_000  # characters of a sentence
TOGETHER = 64  # sentences of a request
LONG_TEXT = 1_000_000  # characters of a long text

Name = Annotated[str, Meta(min_length=1, max_length=1000, description="The name of a model.")]
Sentence = Annotated[str, Meta(min_length=1, max_length=LONGEST)]
Sentences = Annotated[list[Sentence], Meta(min_length=1, max_length=TOGETHER)]
Word = Annotated[str, Meta(min_length=1, max_length=200)]
Layer = Annotated[int, Meta(ge=-1000, le=1000)]
Number = Annotated[float, Meta(ge=-1e6, le=1e6)]
Row = Annotated[list[Number], Meta(min_length=1, max_length=64)]
Table = Annotated[list[Row], Meta(min_length=1, max_length=64)]
Place = Annotated[int, Meta(ge=0, le=10_000_000)]
# lists and not tuples: msgspec 0.22 reads beyond the end of a union of a bounded string and a tuple
Range = Annotated[list[Place], Meta(min_length=2, max_length=2)]
TwoWords = Annotated[list[Word], Meta(min_length=2, max_length=2)]
Pair = Annotated[list[Sentence], Meta(min_length=2, max_length=2)]
Pixels = Annotated[int, Meta(ge=1, le=2048)]
Most = Annotated[int, Meta(ge=1, le=1000)]
Heads = Annotated[list[Annotated[int, Meta(ge=0, le=10_000)]], Meta(min_length=1, max_length=1000)]


class Request(Struct, forbid_unknown_fields=True):
    """Base of all that is asked.

    >>> from regard.app.server.requests import Translate
    >>> Translate(model="demo", sentences=["a dog"]).beam
    5
    """


class Nothing(Request, kw_only=True):
    """Nothing more than the address itself."""


class Translate(Request, kw_only=True):
    """Sentences to translate."""

    model: Name
    sentences: Sentences
    beam: Annotated[int, Meta(ge=1, le=32, description="How many hypotheses are followed.")] = 5
    best: Annotated[int, Meta(ge=1, le=32, description="How many are given back, at most beam.")] = 1
    alignment: Annotated[bool, Meta(description="Whether to say which word came from which.")] = True
    look: Annotated[bool, Meta(description="Whether to keep every attention inside, to be looked at.")] = (
        False
    )


class Align(Request, kw_only=True):
    """Translations that are there already, whose words are to be aligned."""

    model: Name
    pairs: Annotated[list[Pair], Meta(min_length=1, max_length=TOGETHER)]


class Embed(Request, kw_only=True):
    """Sentences whose words are to get vectors."""

    model: Name
    sentences: Sentences
    layer: Annotated[Layer | None, Meta(description="By default the one that tells meanings apart best.")] = (
        None
    )


class Compare(Request, kw_only=True):
    """A word in two sentences, or two words."""

    models: Annotated[
        Annotated[list[Name], Meta(min_length=1, max_length=64)] | None,
        Meta(description="Of encoders; all of them by default."),
    ] = None
    first: Sentence
    second: Sentence
    word: Word | TwoWords


class Attended(Request, kw_only=True):
    """A word of a sentence, of which one wants to know what it attends to."""

    model: Name
    sentence: Sentence
    word: Word
    layer: Annotated[Layer | None, Meta(description="From 0 on; the mean of all by default.")] = None
    head: Annotated[Layer | None, Meta(description="From 0 on; the mean of all by default.")] = None


class Look(Request, kw_only=True):
    """Texts to be seen through a model: every layer and head."""

    model: Name
    texts: Annotated[list[Sentence], Meta(min_length=1, max_length=8)]


class Long(Request, kw_only=True):
    """A long text; the model "words" learns vectors of words from this very text and has no other limit."""

    model: Name = "words"
    text: Annotated[str, Meta(min_length=1, max_length=LONG_TEXT)]


Score = Literal["dot", "scaled", "cosine", "gaussian", "additive"]
Normalize = Literal["softmax", "sparsemax", "entmax15", "hard", "mean", "sigmoid", "relu", "softmax1"]
Masking = Literal["none", "causal", "window"]


class Lookup(Request, kw_only=True):
    """Queries, keys and values of which attention is computed step by step."""

    query: Table
    key: Table
    value: Table
    score: Score = "scaled"
    normalize: Normalize = "softmax"
    temperature: Annotated[
        float, Meta(ge=1e-3, le=1e3, description="What scores are divided by before they are normalized.")
    ] = 1.0
    mask: Masking = "none"
    window: Annotated[int, Meta(ge=0, le=64, description="How far a query sees to either side.")] = 2


Positions = Literal["none", "sinusoidal", "learned", "rotary", "alibi", "t5"]
Seed = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class Order(Request, kw_only=True):
    """A sentence and another order of its words, numbers from 0."""

    sentence: Annotated[str, Meta(min_length=1, max_length=1000)]
    order: Annotated[list[Annotated[int, Meta(ge=0, le=63)]], Meta(min_length=1, max_length=64)]
    positions: Positions = "none"
    seed: Seed = 0


class PositionsAsked(Request, kw_only=True):
    """Which position encoding to compute, and how much of it."""

    kind: Literal["sinusoidal", "learned", "rotary", "alibi", "t5"] = "sinusoidal"
    length: Annotated[int, Meta(ge=1, le=512, description="How many positions.")] = 64
    width: Annotated[int, Meta(ge=2, le=512, description="How many features; of alibi and t5, heads.")] = 64


class TrainingAsked(Request, kw_only=True):
    """From which step on."""

    after: Annotated[int, Meta(ge=-1, le=2**53, description="Rows of later steps only.")] = -1


class _OfLayer(Request, kw_only=True):
    """A layer of an input of an exhibit, both counted from 0."""

    input: Place = 0
    layer: Place = 0


class Tile(_OfLayer, kw_only=True):
    """A part of a matrix of weights, at the size of so many cells."""

    heads: Heads | None = None
    mean: bool = False
    rows: Range | None = None
    columns: Range | None = None
    height: Pixels = 256
    width: Pixels = 256


class Top(_OfLayer, kw_only=True):
    """What a query reads most, or the queries that read a key most."""

    heads: Heads | None = None
    side: Literal["query", "key"] = "query"
    place: Place
    most: Most = 10


class Received(_OfLayer, kw_only=True):
    """Which keys are read most."""

    heads: Heads | None = None
    most: Most = 10
    bins: Pixels = 256


class HeadsAsked(_OfLayer, kw_only=True):
    """What each head of a layer, or some of them, does, with a small picture of it."""

    heads: Heads | None = None
    size: Annotated[int, Meta(ge=1, le=512)] = 64


class Numbers(_OfLayer, kw_only=True):
    """How one weight comes about."""

    head: Place = 0
    query: Place
    key: Place
