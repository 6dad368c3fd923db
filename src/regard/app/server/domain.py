"""Warn about sentences outside a translator's domain: words not in its training data, or low scores."""

import re
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

from regard._util.text import shorten
from regard.errors import RegardError
from regard.translation.data.encoded import EncodedCorpus
from regard.translation.model_folder import IDS
from regard.translation.translator import Translation, Translator

_MAX_PAIRS = 50_000  # larger corpora are not searched for words
_MAX_LISTED = 5
_FACTOR, _MARGIN = 2.0, 0.1  # a score is low if below factor × the lowest score of an example − margin
_WORD = re.compile(r"[^\W_]+")


class Domain(NamedTuple):
    """The domain of a translator: the words and scores to expect.

    words: lowercase source words of the training data; None if unknown or too many to collect.
    lowest: the lowest score of the validation examples; None without examples.

    >>> from regard.app.server.domain import Domain
    >>> Domain(frozenset({"at", "noon"}), -0.1).warning("The weather at noon", -0.2)
    'Outside the training data: “The” and “weather” do not occur in it. Do not trust this translation.'
    >>> Domain(None, -0.1).warning("The weather at noon", -1.5)
    'The model is unsure: score −1.50 per token, −0.10 or more on validation sentences.'
    """

    words: frozenset[str] | None
    lowest: float | None

    def warning(self, source: str, score: float) -> str:
        """Return a warning about a translation and its score per token; empty if there is none."""
        unknown = [word for word in _WORD.findall(source) if self.words and word.lower() not in self.words]
        if unknown:
            named = [f"“{shorten(word, 40)}”" for word in dict.fromkeys(unknown)]
            if len(named) > _MAX_LISTED:
                named = [*named[:_MAX_LISTED], f"{len(named) - _MAX_LISTED} others"]
            words = " and ".join(filter(None, [", ".join(named[:-1]), named[-1]]))
            verb = "does" if len(named) == 1 else "do"
            return (
                f"Outside the training data: {words} {verb} not occur in it. Do not trust this translation."
            )
        if self.lowest is not None and score < _FACTOR * self.lowest - _MARGIN:
            shown, lowest = (f"{value:.2f}".replace("-", "−") for value in (score, self.lowest))
            return f"The model is unsure: score {shown} per token, {lowest} or more on validation sentences."
        return ""


_DOMAINS: WeakKeyDictionary[Translator, Domain] = WeakKeyDictionary()


def domain_of(translator: Translator, folder: Path | None, examples: list[str]) -> Domain:
    """Return the domain of a translator; computed once, from its training data and validation sentences."""
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
    except (RegardError, OSError, ValueError):  # deleted or damaged
        return None
    if len(corpus) > _MAX_PAIRS:
        return None
    decode = translator.tokens.source.decode
    words = (_WORD.findall(decode(list(source)).text.lower()) for source, _ in corpus)
    return frozenset(word for sentence in words for word in sentence) or None
