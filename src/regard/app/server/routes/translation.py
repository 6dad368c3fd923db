"""Translations and alignments as answers; what waits together is translated together."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from regard.app.server.requests import Align, Translate
from regard.app.server.routes.views import too_much
from regard.app.server.schema import Aligned, Alignments, Alternative, Translation, Translations
from regard.app.server.state import AppState
from regard.app.view_model import look_at_translations
from regard.errors import ArgumentError
from regard.translation.alignment.alignment import Alignment
from regard.translation.decoding.search import Beam
from regard.translation.translator import Translation as Found
from regard.translation.translator import Translator

_ALIGNED = 100_000  # pieces of a request


async def translate(house: AppState, asked: Translate) -> bytes:
    """Wait for the thread of the models, with others who ask the same of the same model."""
    house.collection.translator(asked.model)
    kind = ("translate", asked.model, asked.beam, asked.best, asked.alignment or asked.look)
    return await house.worker.together(kind, partial(together, house), asked, len(asked.sentences))


async def align(house: AppState, asked: Align) -> bytes:
    """Wait for the thread of the models."""
    translator = house.collection.translator(asked.model)
    return await house.by_model(lambda: _align(translator, asked))


def together(house: AppState, all_asked: list[Translate]) -> list[bytes | Exception]:
    """Several requests for the same in one call: for each its answer, or what is wrong with it."""
    first = all_asked[0]
    entry, translator = house.collection.entry(first.model), house.collection.translator(first.model)
    how = Beam(first.beam, n_best=first.best)
    checked = (too_much(translator, asked.sentences, asked.beam) for asked in all_asked)
    wrong = {place: no for place, no in enumerate(checked) if no}
    fine = [asked for place, asked in enumerate(all_asked) if place not in wrong]
    found = iter(
        translator.translate(
            [sentence for asked in fine for sentence in asked.sentences],
            strategy=how,
            alignment=entry.attends and (first.alignment or first.look),
        )
    )
    answers: list[bytes | Exception] = []
    for place, asked in enumerate(all_asked):
        if place in wrong:
            answers.append(wrong[place])
            continue
        answers.append(_answer(house, translator, asked, [next(found) for _ in asked.sentences]))
    return answers


def _answer(house: AppState, translator: Translator, asked: Translate, found: Sequence[Found]) -> bytes:
    attends = house.collection.entry(asked.model).attends
    reason = "" if attends or not asked.alignment else _REASON
    shown = None
    if asked.look and attends:
        shown = house.exhibits.keep(look_at_translations(translator, found, title=asked.model))
    translations = [_translation(one, asked.alignment and attends, reason) for one in found]
    return msgspec.json.encode(Translations(translations=translations, exhibit=shown))


_REASON = "this model has no attention, so that it cannot say which word came from which."


def _translation(one: Found, aligned: bool, reason: str) -> Translation:
    return Translation(
        source=one.source,
        text=one.text,
        score=one.score,
        tokens=one.tokens,
        note=one.note,
        alternatives=[Alternative(text=other.text, score=other.score) for other in one.alternatives],
        alignment=_aligned(one.alignment) if aligned else None,
        reason=reason,
    )


def _aligned(alignment: Alignment) -> Aligned:
    known: dict[str, Any] = alignment.to_dict()
    return Aligned(**known)


def _align(translator: Translator, asked: Align) -> Alignments:
    pieces = sum(
        len(side.cut(text).ids)
        for pair in asked.pairs
        for side, text in zip(translator.tokens, pair, strict=True)
    )
    if pieces > _ALIGNED:
        raise ArgumentError(
            f"the pairs have {pieces:,} pieces; at most {_ALIGNED:,} are aligned at once: send fewer pairs."
        )
    for number, pair in enumerate(asked.pairs):
        for side, text in zip(translator.tokens, pair, strict=True):
            if len(side.cut(text).ids) > translator.longest:
                raise ArgumentError(
                    f"pair {number} has a side of {len(side.cut(text).ids):,} pieces and the model reads "
                    f"{translator.longest} at once; send it in parts."
                )
    return Alignments(
        alignments=[_aligned(one) for one in translator.align([(pair[0], pair[1]) for pair in asked.pairs])]
    )
