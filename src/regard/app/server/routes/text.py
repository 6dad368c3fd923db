"""Words in context: vectors, comparisons and attention weights."""

from typing import Annotated

from msgspec import Meta

from regard._util import interrupt
from regard._util.text import index_range
from regard.app.server.endpoints import endpoint
from regard.app.server.schema import Name, Request, Response, Sentence, Sentences
from regard.app.server.state import AppState
from regard.errors import ArgumentError, RegardError
from regard.models.encoders.base import WordEncoder, WordVectors

MAX_NUMBERS = 2_000_000  # vector components in one response
_BATCH_SIZE = 8  # sentences embedded at a time

Word = Annotated[str, Meta(min_length=1, max_length=200)]
Number = Annotated[int, Meta(ge=-1000, le=1000)]  # number of a layer or head
TwoWords = Annotated[list[Word], Meta(min_length=2, max_length=2)]


class EmbedRequest(Request, kw_only=True):
    """Sentences whose words are embedded."""

    model: Name
    sentences: Sentences
    layer: Annotated[
        Number | None, Meta(description="Default: the layer that separates word senses best.")
    ] = None


class CompareRequest(Request, kw_only=True):
    """A word to compare in two sentences, or two words, one in each sentence."""

    models: Annotated[
        Annotated[list[Name], Meta(min_length=1, max_length=64)] | None,
        Meta(description="Names of encoders. Default: all encoders."),
    ] = None
    first: Sentence
    second: Sentence
    word: Word | TwoWords


class AttentionRequest(Request, kw_only=True):
    """A sentence, and the word in it whose attention weights are returned."""

    model: Name
    sentence: Sentence
    word: Word
    layer: Annotated[Number | None, Meta(description="Counted from 0. Default: mean over layers.")] = None
    head: Annotated[Number | None, Meta(description="Counted from 0. Default: mean over heads.")] = None


class SentenceVectors(Response, kw_only=True):
    """The words of a sentence and their vectors."""

    words: list[str]
    vectors: list[list[float]]


class EmbedResponse(Response, kw_only=True):
    """Word vectors of each sentence."""

    layer: int
    sentences: list[SentenceVectors]


class Comparison(Response, kw_only=True):
    """Cosine similarity of two words by layer, or the reason why it is missing."""

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


@endpoint("POST", "/api/embed", "Contextual word vectors.", pool="model")
def embed(state: AppState, request: EmbedRequest) -> EmbedResponse:
    """Return contextual word vectors."""
    encoder = state.registry.encoder(request.model)
    layer = encoder.best_layer if request.layer is None else request.layer
    if not -encoder.layers <= layer < encoder.layers:
        raise ArgumentError(
            f"Layer {layer} is out of range: {request.model!r} has {index_range('layer', encoder.layers)}; "
            "−1 is the last."
        )
    embedded = _embed_batches(encoder, request.sentences)
    numbers = sum(map(len, embedded)) * embedded[0].vectors.shape[-1]
    if numbers > MAX_NUMBERS:
        raise ArgumentError(
            f"The vectors have {numbers:,} components; the limit is {MAX_NUMBERS:,}. Send fewer sentences."
        )
    return EmbedResponse(
        layer=layer % encoder.layers,
        sentences=[
            SentenceVectors(words=list(sentence.words), vectors=sentence.vectors[layer].tolist())
            for sentence in embedded
        ],
    )


def _embed_batches(encoder: WordEncoder, sentences: list[str]) -> list[WordVectors]:
    """Embed a few sentences at a time to bound memory."""
    embedded = []
    try:
        for start in range(0, len(sentences), _BATCH_SIZE):
            interrupt.check()
            embedded += encoder.embed(sentences[start : start + _BATCH_SIZE])
    except ArgumentError:
        return encoder.embed(sentences)  # raises an error with the sentence's number in the whole request
    return embedded


@endpoint("POST", "/api/compare", "Similarity of a word in two sentences, by layer.", pool="model")
def compare(state: AppState, request: CompareRequest) -> CompareResponse:
    """Compare the words with every requested encoder; raise an error only if all of them fail."""
    names = request.models or state.registry.encoders()
    if not names:
        raise ArgumentError("No encoder is loaded. Start the server with one: regard look minilm.")
    encoders = {name: state.registry.encoder(name) for name in names}  # raises before the first comparison
    comparisons, errors = [], []
    for name, encoder in encoders.items():
        similarities, best, reason = [], encoder.best_layer % encoder.layers, ""
        words = [request.word, request.word] if isinstance(request.word, str) else request.word
        try:
            comparison = encoder.compare(request.first, request.second, word=(words[0], words[1]))
            similarities, words = comparison.similarities.tolist(), list(comparison.words)
        except RegardError as error:
            errors.append(error)
            reason = str(error)
        comparisons.append(
            Comparison(model=name, words=words, similarities=similarities, best_layer=best, reason=reason)
        )
    if len(errors) == len(encoders):
        raise errors[0]
    return CompareResponse(comparisons=comparisons)


@endpoint("POST", "/api/attention", "Attention weights of one word.", pool="model")
def word_attention(state: AppState, request: AttentionRequest) -> AttentionResponse:
    """Return the attention weights of a word."""
    encoder = state.registry.encoder(request.model)
    attended = encoder.attended_words(request.sentence, request.word, layer=request.layer, head=request.head)
    return AttentionResponse(
        attention=[WordWeight(word=other.word, weight=other.weight) for other in attended]
    )
