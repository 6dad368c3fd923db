"""Words in context: vectors, comparisons and attention weights."""

from regard._util import interrupt
from regard.app.server.requests import AttentionRequest, CompareRequest, EmbedRequest
from regard.app.server.schema import (
    AttentionResponse,
    CompareResponse,
    Comparison,
    EmbedResponse,
    SentenceVectors,
    WordWeight,
)
from regard.app.server.state import AppState
from regard.errors import ArgumentError, RegardError
from regard.models.encoders.base import WordEncoder, WordVectors

MAX_NUMBERS = 2_000_000  # in one response
_BATCH_SIZE = 8  # sentences


async def embed(state: AppState, request: EmbedRequest) -> bytes:
    """Return contextual word vectors."""
    encoder = state.registry.encoder(request.model)
    return await state.run_model(lambda: _embed(encoder, request))


async def compare(state: AppState, request: CompareRequest) -> bytes:
    """Compare a word in two sentences."""
    names = request.models or state.registry.encoders()
    if not names:
        raise ArgumentError("No encoder is loaded. Start the server with one: regard look minilm.")
    encoders = {name: state.registry.encoder(name) for name in names}
    return await state.run_model(lambda: _compare(encoders, request))


async def word_attention(state: AppState, request: AttentionRequest) -> bytes:
    """Return the attention weights of a word."""
    encoder = state.registry.encoder(request.model)
    return await state.run_model(lambda: _word_attention(encoder, request))


def _embed(encoder: WordEncoder, request: EmbedRequest) -> EmbedResponse:
    layer = encoder.best_layer if request.layer is None else request.layer
    if not -encoder.layers <= layer < encoder.layers:
        raise ArgumentError(
            f"Layer {layer} is out of range: {request.model!r} has layers 0 to {encoder.layers - 1}, or −1 "
            "for the last."
        )
    embedded = _embed_batches(encoder, request.sentences)
    numbers = sum(map(len, embedded)) * embedded[0].vectors.shape[-1]
    if numbers > MAX_NUMBERS:
        raise ArgumentError(
            f"The vectors have {numbers:,} numbers; the limit is {MAX_NUMBERS:,}. Send fewer sentences."
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
        return encoder.embed(sentences)  # raises with the sentence's number in the whole request
    return embedded


def _compare(encoders: dict[str, WordEncoder], request: CompareRequest) -> CompareResponse:
    """Compare with every encoder; raise only if none of them knows the word."""
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


def _word_attention(encoder: WordEncoder, request: AttentionRequest) -> AttentionResponse:
    attended = encoder.attended_words(request.sentence, request.word, layer=request.layer, head=request.head)
    return AttentionResponse(
        attention=[WordWeight(word=other.word, weight=other.weight) for other in attended]
    )
