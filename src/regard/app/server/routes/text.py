"""Words in context as answers: vectors, comparisons, and what a word attends to."""

from regard._util import interrupt
from regard.app.server.requests import Attended, Compare, Embed
from regard.app.server.schema import (
    AttendedWord,
    AttendedWords,
    Comparison,
    Comparisons,
    Embedded,
    Words,
)
from regard.app.server.state import AppState
from regard.errors import ArgumentError, RegardError
from regard.models.encoders.base import WordVectors
from regard.models.encoders.base import WordEncoder

NUMBERS = 2_000_000  # of one answer
_TOGETHER = 8  # sentences that are embedded at once


async def embed(house: AppState, asked: Embed) -> bytes:
    """Wait for the thread of the models."""
    encoder = house.collection.encoder(asked.model)
    return await house.by_model(lambda: _embed(encoder, asked))


async def compare(house: AppState, asked: Compare) -> bytes:
    """Wait for the thread of the models."""
    names = asked.models or house.collection.encoders()
    if not names:
        raise ArgumentError(
            "no encoder was named when the server started; start it with one: regard look minilm."
        )
    encoders = {name: house.collection.encoder(name) for name in names}
    return await house.by_model(lambda: _compare(encoders, asked))


async def attended(house: AppState, asked: Attended) -> bytes:
    """Wait for the thread of the models."""
    encoder = house.collection.encoder(asked.model)
    return await house.by_model(lambda: _attended(encoder, asked))


def _embed(encoder: WordEncoder, asked: Embed) -> Embedded:
    layer = encoder.best_layer if asked.layer is None else asked.layer
    if not -encoder.layers <= layer < encoder.layers:
        raise ArgumentError(
            f"layer is {layer} and {asked.model!r} has layers 0 to {encoder.layers - 1}; −1 is the last."
        )
    found = _embedded(encoder, asked.sentences)
    numbers = sum(len(one) for one in found) * found[0].vectors.shape[-1]
    if numbers > NUMBERS:
        raise ArgumentError(
            f"the vectors of these words have {numbers:,} numbers; at most {NUMBERS:,} are sent at once: "
            "send fewer sentences."
        )
    return Embedded(
        layer=layer % encoder.layers,
        sentences=[Words(words=list(one.words), vectors=one.vectors[layer].tolist()) for one in found],
    )


def _embedded(encoder: WordEncoder, sentences: list[str]) -> list[WordVectors]:
    """A few sentences at once, which bounds the memory they take."""
    found = []
    try:
        for start in range(0, len(sentences), _TOGETHER):
            interrupt.check()
            found += encoder.embed(sentences[start : start + _TOGETHER])
    except ArgumentError:
        return encoder.embed(sentences)  # raises it with the sentence's number among all
    return found


def _compare(encoders: dict[str, WordEncoder], asked: Compare) -> Comparisons:
    """One model may not know a word that others know; if none knows it, that is told."""
    found, errors = [], []
    for name, encoder in encoders.items():
        similarities, best, reason = [], encoder.best_layer % encoder.layers, ""
        words = [asked.word, asked.word] if isinstance(asked.word, str) else asked.word
        try:
            one = encoder.compare(asked.first, asked.second, word=(words[0], words[1]))
            similarities, words = one.similarities.tolist(), list(one.words)
        except RegardError as error:
            errors.append(error)
            reason = str(error)
        found.append(
            Comparison(model=name, words=words, similarities=similarities, best_layer=best, reason=reason)
        )
    if len(errors) == len(encoders):
        raise errors[0]
    return Comparisons(comparisons=found)


def _attended(encoder: WordEncoder, asked: Attended) -> AttendedWords:
    found = encoder.attended_words(asked.sentence, asked.word, layer=asked.layer, head=asked.head)
    return AttendedWords(attended=[AttendedWord(word=one.word, weight=one.weight) for one in found])
