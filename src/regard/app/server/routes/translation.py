"""Translation and alignment; waiting requests are translated as one batch."""

from collections.abc import Sequence
from functools import partial

import msgspec

from regard.app.server.requests import AlignRequest, TranslateRequest
from regard.app.server.routes.views import check_length
from regard.app.server.schema import Alignment, AlignResponse, Alternative, TranslateResponse
from regard.app.server.schema import Translation as TranslationInfo
from regard.app.server.state import AppState
from regard.app.view_model import look_at_translations
from regard.errors import ArgumentError
from regard.translation.decoding.search import Beam
from regard.translation.translator import Translation, Translator

_MAX_ALIGNED = 100_000  # tokens per request
_NO_ATTENTION = "This model has no attention, so there is no alignment to show."


async def translate(state: AppState, request: TranslateRequest) -> bytes:
    """Translate in the model thread, in one batch with waiting requests of the same kind."""
    state.registry.translator(request.model)
    key = ("translate", request.model, request.beam, request.n_best, request.alignment or request.view)
    return await state.worker.run_batched(
        key, partial(translate_batch, state), request, len(request.sentences)
    )


async def align(state: AppState, request: AlignRequest) -> bytes:
    """Align sentence pairs in the model thread."""
    translator = state.registry.translator(request.model)
    return await state.run_model(lambda: _align(translator, request))


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
    view = None
    if request.view and attends:
        view = state.views.add(look_at_translations(translator, translations, title=request.model))
    infos = [_info(translation, request.alignment and attends, reason) for translation in translations]
    return msgspec.json.encode(TranslateResponse(translations=infos, view=view))


def _info(translation: Translation, aligned: bool, reason: str) -> TranslationInfo:
    return TranslationInfo(
        source=translation.source,
        text=translation.text,
        score=translation.score,
        tokens=translation.tokens,
        note=translation.note,
        alternatives=[Alternative(text=other.text, score=other.score) for other in translation.alternatives],
        alignment=Alignment(**translation.alignment.to_dict()) if aligned else None,
        reason=reason,
    )


def _align(translator: Translator, request: AlignRequest) -> AlignResponse:
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
                f"{translator.max_tokens}. Split it."
            )
    alignments = translator.align([(pair[0], pair[1]) for pair in request.pairs])
    return AlignResponse(alignments=[Alignment(**alignment.to_dict()) for alignment in alignments])
