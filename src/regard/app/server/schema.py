"""Response bodies."""

from typing import Any, Literal

from msgspec import Struct


class Response(Struct):
    """Base class of all responses.

    >>> from regard.app.server.schema import ErrorResponse
    >>> ErrorResponse(error="unknown model")
    ErrorResponse(error='unknown model')
    """


class ErrorResponse(Response, kw_only=True):
    """What is wrong and how to fix it."""

    error: str


class HealthResponse(Response, kw_only=True):
    """Server status. waiting: requests in the queue of the models."""

    status: Literal["ok"] = "ok"
    version: str
    models: int
    waiting: int


class ModelInfo(Response, kw_only=True):
    """A loaded model."""

    name: str
    kind: Literal["translator", "encoder"]
    about: str
    attends: bool
    layers: int
    heads: int
    max_tokens: int | None
    languages: str
    examples: list[str]


class RecordingInfo(Response, kw_only=True):
    """A recording made with `Seen.save`; id: of its view, which never expires."""

    name: str
    id: str
    about: str


class ModelsResponse(Response, kw_only=True):
    """Models and recordings. pending: models in training. folders: training runs with a log."""

    models: list[ModelInfo]
    pending: list[str]
    folders: list[str]
    recordings: list[RecordingInfo]


class Alignment(Response, kw_only=True):
    """A word alignment; weights: target words × source words."""

    source_words: list[str]
    target_words: list[str]
    links: str
    weights: list[list[float]]


class AlignResponse(Response, kw_only=True):
    """One alignment per sentence pair."""

    alignments: list[Alignment]


class Alternative(Response, kw_only=True):
    """An alternative translation."""

    text: str
    score: float


class Translation(Response, kw_only=True):
    """A sentence and its translation; reason: why a requested alignment is missing."""

    source: str
    text: str
    score: float
    tokens: list[str]
    note: str
    alternatives: list[Alternative]
    alignment: Alignment | None
    reason: str


class Text(Response, kw_only=True):
    """Tokens, and the positions of special tokens."""

    tokens: list[str]
    special: list[int]


class Layer(Response, kw_only=True):
    """An attention layer; queries, keys: indices of texts. vectors: query and key vectors are available."""

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


class TranslateResponse(Response, kw_only=True):
    """One translation per sentence, and their view if requested."""

    translations: list[Translation]
    view: ViewResponse | None


class SentenceVectors(Response, kw_only=True):
    """The words of a sentence and their vectors."""

    words: list[str]
    vectors: list[list[float]]


class EmbedResponse(Response, kw_only=True):
    """Word vectors of each sentence."""

    layer: int
    sentences: list[SentenceVectors]


class Comparison(Response, kw_only=True):
    """Cosine similarity of two words by layer; reason: why it is missing."""

    model: str
    words: list[str]
    similarities: list[float]
    best_layer: int
    reason: str


class CompareResponse(Response, kw_only=True):
    """One comparison per model."""

    comparisons: list[Comparison]


class WordWeight(Response, kw_only=True):
    """A word or special token and its attention weight."""

    word: str
    weight: float


class AttentionResponse(Response, kw_only=True):
    """Attention weights of one word over its sentence."""

    attention: list[WordWeight]


class Formulas(Response, kw_only=True):
    """Formulas of the three steps, for display."""

    score: str
    normalize: str
    output: str


class LookupResponse(Response, kw_only=True):
    """Attention step by step; scores: before mask and temperature."""

    scores: list[list[float]]
    masked: list[list[bool]]
    weights: list[list[float]]
    output: list[list[float]]
    tau: list[float]
    formula: Formulas


class OrderResponse(Response, kw_only=True):
    """Outputs before and after reordering; change: distance of each word's outputs, in original order."""

    words: list[str]
    shuffled: list[str]
    before: list[list[float]]
    after: list[list[float]]
    change: list[float]
    weights_before: list[list[float]]
    weights_after: list[list[float]]


class PositionsResponse(Response, kw_only=True):
    """A position encoding as a table; start: the position or distance of the first column."""

    values: list[list[float]]
    rows: str
    columns: str
    start: int


State = Literal["running", "finished", "stopped"]


class TrainingInfo(Response, kw_only=True):
    """A training run with a log; stopped: before it was finished."""

    name: str
    steps: int
    state: State


class TrainingsResponse(Response, kw_only=True):
    """The training runs in the folders given at startup."""

    trainings: list[TrainingInfo]


class LogRow(Response, kw_only=True):
    """A row of the training log."""

    step: int
    loss: float | None
    dev_loss: float | None
    dev_bleu: float | None
    learning_rate: float | None
    tokens_per_second: float | None
    seconds: float | None


class Sample(Response, kw_only=True):
    """A validation sentence and its translation at one step."""

    step: int
    source: str
    text: str
    reference: str
    alignment: Alignment | None


class TrainingResponse(Response, kw_only=True):
    """Log rows and samples after the requested step, and the current state."""

    steps: int
    state: State
    rows: list[LogRow]
    samples: list[Sample]


class Array(Response, kw_only=True):
    """Shape, and little-endian float32 values in base64."""

    shape: list[int]
    data: str


class NoFacts(Response, kw_only=True):
    """Empty."""


class Ranking(Response, kw_only=True):
    """Token positions and their weights in decreasing order."""

    positions: list[int]
    weights: list[float]


class HeadInfo(Response, kw_only=True):
    """Label and measures of a head."""

    head: int
    label: str
    measures: dict[str, float]


class HeadList(Response, kw_only=True):
    """Label and measures of each head."""

    heads: list[HeadInfo]


class WeightComputation(Response, kw_only=True):
    """The steps from query and key to one weight."""

    query: list[float | None]
    key: list[float | None]
    scale: float
    bias: float | None
    softcap: float | None
    score: float | None
    masked: bool
    tau: float | None
    weight: float
    normalizer: str
    formula: str


class AnswerResponse(Response, kw_only=True):
    """Facts and arrays about a layer of a view."""

    facts: dict[str, Any]
    arrays: list[Array]


class TileResponse(Response, kw_only=True):
    """Block means of the weights, one matrix per head."""

    facts: NoFacts
    arrays: list[Array]


class RankingResponse(Response, kw_only=True):
    """Positions ranked by weight; for "received", also all sums in bins."""

    facts: Ranking
    arrays: list[Array]


class HeadsResponse(Response, kw_only=True):
    """Statistics of heads, and their thumbnails."""

    facts: HeadList
    arrays: list[Array]


class NumbersResponse(Response, kw_only=True):
    """The computation of one weight."""

    facts: WeightComputation
    arrays: list[Array]
