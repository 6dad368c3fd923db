"""Translation and alignment. Requests that wait at the same time are translated as one batch."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta

from regard.app.server.domain import domain_of
from regard.app.server.endpoints import endpoint
from regard.app.server.routes.views import check_length
from regard.app.server.schema import (
    MAX_SENTENCES,
    Alignment,
    Name,
    Request,
    Response,
    Sentence,
    Sentences,
    ViewResponse,
)
from regard.app.server.state import AppState
from regard.app.view_model import look_at_translations
from regard.errors import ArgumentError
from regard.translation.decoding.strategies import Beam
from regard.translation.text.candidate import TOO_LONG
from regard.translation.text.domain import Domain
from regard.translation.translation import Translation
from regard.translation.translator import Translator

_MAX_ALIGNED = 100_000  # tokens to align per request
_NO_ATTENTION = "This model has no attention, so there is no alignment to show."


Pair = Annotated[list[Sentence], Meta(min_length=2, max_length=2)]


class TranslateRequest(Request, kw_only=True):
    """Sentences to translate."""

    model: Name
    sentences: Sentences
    beam: Annotated[int, Meta(ge=1, le=32, description="Beam size.")] = 5
    n_best: Annotated[int, Meta(ge=1, le=32, description="Translations per sentence, at most `beam`.")] = 1
    alignment: Annotated[bool, Meta(description="Return word alignments.")] = True
    view: Annotated[bool, Meta(description="Keep all attention weights as a view.")] = False


class AlignRequest(Request, kw_only=True):
    """Sentence pairs to align."""

    model: Name
    pairs: Annotated[list[Pair], Meta(min_length=1, max_length=MAX_SENTENCES)]


class AlignResponse(Response, kw_only=True):
    """One alignment per sentence pair."""

    alignments: list[Alignment]


class Alternative(Response, kw_only=True):
    """An alternative translation."""

    text: str
    score: float


class TranslationInfo(Response, kw_only=True):
    """A sentence and its translation.

    reason: why a requested alignment is missing. warning: why the translation may be wrong, if the sentence
    is outside the model's domain.
    """

    source: str
    text: str
    score: float
    tokens: list[str]
    note: str
    alternatives: list[Alternative]
    alignment: Alignment | None
    reason: str
    warning: str


class TranslateResponse(Response, kw_only=True):
    """One translation per sentence, and their view if requested."""

    translations: list[TranslationInfo]
    view: ViewResponse | None


@endpoint("POST", "/api/translate", "Translate sentences.", response=TranslateResponse)
async def translate(state: AppState, request: TranslateRequest) -> bytes:
    """Translate in the model thread, in one batch with waiting requests of the same kind."""
    state.registry.translator(request.model)
    key = ("translate", request.model, request.beam, request.n_best, request.alignment or request.view)
    return await state.worker.run_batched(
        key, partial(translate_batch, state), request, len(request.sentences)
    )


def translate_batch(state: AppState, requests: list[TranslateRequest]) -> list[bytes | Exception]:
    """Translate several requests in one call; return a response or an exception for each."""
    first = requests[0]
    entry, translator = state.registry.entry(first.model), state.registry.translator(first.model)
    errors = [check_length(translator, request.sentences, request.beam) for request in requests]
    valid = (request for request, error in zip(requests, errors, strict=True) if error is None)
    translations = iter(
        translator.translate(
            [sentence for request in valid for sentence in request.sentences],
            strategy=Beam(first.beam, n_best=first.n_best),
            alignment=entry.attends and (first.alignment or first.view),
        )
    )
    return [
        error or _response(state, translator, request, [next(translations) for _ in request.sentences])
        for request, error in zip(requests, errors, strict=True)
    ]


def _response(
    state: AppState, translator: Translator, request: TranslateRequest, translations: Sequence[Translation]
) -> bytes:
    attends = state.registry.entry(request.model).attends
    reason = "" if attends or not request.alignment else _NO_ATTENTION
    for translation in translations:  # the page shows the warning above the view, not in it
        translation.note = translation.note.removesuffix(translation.warning).removesuffix("; ")
    view = None
    if request.view and attends:
        view = state.views.add(look_at_translations(translator, translations, title=request.model))
    entry = state.registry.entry(request.model)
    folder = state.registry.folders.get(request.model)
    domain = domain_of(translator, folder, list(entry.examples))
    if domain.words is None and translator.domain is not None:  # without training data, use the profile
        domain = domain._replace(words=translator.domain.words, unseen=translator.domain.unseen)
    infos = [
        _info(translation, request.alignment and attends, reason, domain) for translation in translations
    ]
    return msgspec.json.encode(TranslateResponse(translations=infos, view=view))


def _info(translation: Translation, aligned: bool, reason: str, domain: Domain) -> TranslationInfo:
    warning = domain.warning(translation.source, math.log(max(translation.confidence, 1e-30)))
    if not warning and translation.warning == TOO_LONG:
        warning = f"{TOO_LONG}."
    return TranslationInfo(
        source=translation.source,
        text=translation.text,
        score=translation.score,
        tokens=translation.tokens,
        note=translation.note,
        alternatives=[Alternative(text=other.text, score=other.score) for other in translation.alternatives],
        alignment=Alignment(**translation.alignment.to_dict()) if aligned else None,
        reason=reason,
        warning=warning,
    )


@endpoint("POST", "/api/align", "Align the words of sentence pairs.", pool="model")
def align(state: AppState, request: AlignRequest) -> AlignResponse:
    """Align sentence pairs."""
    translator = state.registry.translator(request.model)
    lengths = [
        [len(side.segment(text).ids) for side, text in zip(translator.tokens, pair, strict=True)]
        for pair in request.pairs
    ]
    total = sum(map(sum, lengths))
    if total > _MAX_ALIGNED:
        raise ArgumentError(
            f"The pairs have {total:,} tokens; the limit is {_MAX_ALIGNED:,}. Send fewer pairs."
        )
    for number, length in enumerate(map(max, lengths)):
        if length > translator.max_tokens:
            raise ArgumentError(
                f"Pair {number} is too long: {length:,} tokens; the model reads at most "
                f"{translator.max_tokens:,}. Split it."
            )
    alignments = translator.align([(pair[0], pair[1]) for pair in request.pairs])
    return AlignResponse(alignments=[Alignment(**alignment.to_dict()) for alignment in alignments])
