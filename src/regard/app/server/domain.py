"""The domain of a served translator; see `regard.translation.text.domain`, which defines the warnings."""

from pathlib import Path
from weakref import WeakKeyDictionary

from regard.errors import RegardError
from regard.translation.data.encoded import EncodedCorpus
from regard.translation.model_folder import CALIBRATION, IDS
from regard.translation.text.domain import Domain, words_of
from regard.translation.translation import Translation
from regard.translation.translator import Translator

_MAX_PAIRS = 50_000  # the words of larger corpora are not collected


_DOMAINS: WeakKeyDictionary[Translator, Domain] = WeakKeyDictionary()


def domain_of(translator: Translator, folder: Path | None, examples: list[str]) -> Domain:
    """Return the domain of a translator, as recorded in its folder during training.

    For folders written by earlier versions, it is computed once from training data and validation sentences.
    """
    if translator.config.get(CALIBRATION) and translator.domain is not None:
        return translator.domain
    if translator not in _DOMAINS:
        scores = [translation.score for translation in _translate(translator, examples)]
        words = None if folder is None else _source_words(translator, folder)
        _DOMAINS[translator] = Domain(words, min(scores, default=None))
    return _DOMAINS[translator]


def _translate(translator: Translator, examples: list[str]) -> list[Translation]:
    return translator.translate(examples) if examples else []


def _source_words(translator: Translator, folder: Path) -> frozenset[str] | None:
    try:
        corpus = EncodedCorpus(folder / IDS)
    except (RegardError, OSError, ValueError):  # the token ids are missing or corrupted
        return None
    if len(corpus) > _MAX_PAIRS:
        return None
    decode = translator.tokens.source.decode
    return words_of(decode(list(source)).text for source, _ in corpus) or None
