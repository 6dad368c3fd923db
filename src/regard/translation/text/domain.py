"""Warn about text outside a translator's domain: words not in its training text, or a low score."""

import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from regard._util.text import shorten
from regard.errors import ArgumentError
from regard.translation.text.profile import TextProfile
from regard.translation.text.protected_spans import find_spans

_MAX_LISTED = 5
_MARGIN = 0.1  # a score is low if below factor × the lowest validation score − margin
_FALLBACK = -0.5  # lowest expected score per token for an uncalibrated model
_FALLBACK_UNSEEN = 1 / 3  # maximum expected fraction of unseen words
# vowel signs and accents, which are not \w in Python but part of a word
_MARKS = (
    "\u0300-\u036f\u0591-\u05bd\u05bf-\u05c7\u0610-\u061a\u064b-\u065f\u0670"
    "\u0900-\u0963\u0981-\u0dff\u0e31-\u0e4e"
)
_WORD = re.compile(rf"[^\W_](?:[^\W_]|[{_MARKS}])*")
_NUMERIC = frozenset(["number", "code", "currency"])


class Domain(NamedTuple):
    """The domain of a translator: the expected words and scores.

    words: lowercase source words in the training data; None if unknown or too many to collect.
    lowest: the lowest score per token among validation sentences, ignoring the lowest 1%; None if unknown.
    unseen: the largest fraction of words missing from the training data, over all validation sentences.
    factor: scores below factor × lowest − 0.1 are low; 1 if `lowest` is from a calibration, otherwise 2.
    translated: kinds of spans that are translated, so their words count; others, such as URLs, are copied.

    >>> from regard.translation.text.domain import Domain
    >>> Domain(frozenset({"at", "noon"}), -0.1).warning("The weather at noon", -0.2)
    'Outside the training data: “The” and “weather” do not occur in it. Do not trust this translation.'
    >>> Domain(None, -0.1).warning("The weather at noon", -1.5)
    'The model is unsure: score −1.50 per token; validation sentences score −0.10 or more.'
    """

    words: Collection[str] | None
    lowest: float | None
    unseen: float = 0.0
    factor: float = 2.0
    translated: frozenset[str] = _NUMERIC

    @classmethod
    def of(cls, profile: TextProfile, calibration: dict[str, Any] | None) -> "Domain":
        """Return the domain of a model folder.

        calibration: the result of `calibrate` from its config.json, if there is one.

        Without a calibration, a score below −1.1 per token is low, and a third of the words may be new.
        """
        words = None
        if profile.complete:
            words = _TrainingWords(profile)
        if calibration is None:
            return cls(words, _FALLBACK, _FALLBACK_UNSEEN, translated=profile.unprotected)
        try:
            lowest, unseen = float(calibration["lowest"]), float(calibration["unseen"])
        except (LookupError, TypeError, ValueError, OverflowError):
            raise ArgumentError(
                f"The calibration in config.json is {shorten(str(calibration))}; it must have two numbers, "
                "'lowest' and 'unseen'. Copy the model folder again, or remove 'calibration' from the file."
            ) from None
        return cls(words, lowest, unseen, 1.0, profile.unprotected)

    def unseen_words(self, source: str) -> tuple[list[str], float]:
        """Return the distinct words in a sentence that are not in the training data, and their fraction."""
        for span in reversed(find_spans(source, self.translated)):
            source = f"{source[: span.start]} {source[span.stop :]}"
        words = _WORD.findall(unicodedata.normalize("NFKC", source))
        known = self.words
        unseen = [word for word in words if known and not any(form in known for form in _spellings(word))]
        return list(dict.fromkeys(unseen)), len(unseen) / max(len(words), 1)

    def warning(self, source: str, score: float) -> str:
        """Return a warning about a translation with the given score per token; "" if nothing looks wrong."""
        unseen, fraction = self.unseen_words(source)
        if unseen and fraction > self.unseen:
            named = [f"“{shorten(word, 40)}”" for word in unseen]
            if len(named) > _MAX_LISTED + 1:
                named = [*named[:_MAX_LISTED], f"{len(named) - _MAX_LISTED} others"]
            words = " and ".join(filter(None, [", ".join(named[:-1]), named[-1]]))
            verb = "does" if len(named) == 1 else "do"
            return (
                f"Outside the training data: {words} {verb} not occur in it. Do not trust this translation."
            )
        if self.lowest is not None and score < self.factor * self.lowest - _MARGIN:
            shown, lowest = (f"{value:.2f}".replace("-", "−") for value in (score, self.lowest))
            usual = "good translations usually" if self.lowest == _FALLBACK else "validation sentences"
            return f"The model is unsure: score {shown} per token; {usual} score {lowest} or more."
        return ""


class _TrainingWords:
    """The lowercase words of a training text. Hyphenated words are divided when first needed."""

    def __init__(self, profile: TextProfile) -> None:
        self._profile = profile

    def __contains__(self, word: object) -> bool:
        return word in self._profile.known or word in self._parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __bool__(self) -> bool:
        return bool(self._profile.words)

    @cached_property
    def _parts(self) -> frozenset[str]:
        return words_of(self._profile.words)


def _spellings(word: str) -> set[str]:
    """Return the lowercase spellings of a word; in a word in capitals, SS may stand for ß."""
    return {word.lower()} | ({word.lower().replace("ss", "ß")} if word.isupper() else set())


def words_of(texts: Iterable[str]) -> frozenset[str]:
    """Return the lowercase words in the given texts.

    >>> from regard.translation.text.domain import words_of
    >>> sorted(words_of(["Two dogs", "a T-shirt, 5"]))
    ['5', 'a', 'dogs', 'shirt', 't', 'two']
    """
    joined = "\n".join(texts)  # a single pass: a vocabulary has tens of thousands of words
    return frozenset(_WORD.findall(unicodedata.normalize("NFC", joined.lower())))


def calibrate(domain: Domain, sources: Sequence[str], scores: Sequence[float]) -> dict[str, float]:
    """Compute the calibration for config.json from the scores per token of validation sentences.

    >>> from regard.translation.text.domain import Domain, calibrate
    >>> calibrate(Domain(frozenset({"a", "dog"}), None), ["a dog", "a cat"], [-0.2, -0.4])
    {'lowest': -0.4, 'unseen': 0.5}
    """
    unseen = sorted(domain.unseen_words(source)[1] for source in sources)
    drop = len(scores) // 100
    return {"lowest": round(sorted(scores)[drop], 4), "unseen": round(unseen[len(unseen) - 1 - drop], 4)}
