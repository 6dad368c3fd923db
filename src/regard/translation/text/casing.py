"""Letter case: adapt the source to the training text, and restore uppercase words in the translation."""

from collections.abc import Mapping, Sequence
from functools import cached_property

from regard.translation.text.protected_spans import word_core

_RARE = 0.05  # a letter case found in a smaller fraction of the training lines is normalized
_MIN_TITLE = 4  # minimum number of capitalized words in a headline


def fold(word: str, turkish: bool = False) -> str:
    """Return a key that ignores letter case; "STRASSE" and "Straße" have the same key.

    >>> from regard.translation.text.casing import fold
    >>> fold("STRASSE") == fold("Straße"), fold("ISI", turkish=True), fold("İZ", turkish=True)
    (True, 'ısı', 'iz')
    """
    return _dotless(word, turkish).casefold()


def capitals(text: str, turkish: bool = False) -> str:
    """Return a text in uppercase.

    >>> from regard.translation.text.casing import capitals
    >>> capitals("Straße im Kies"), capitals("izmir", turkish=True)
    ('STRASSE IM KIES', 'İZMİR')
    """
    return (text.replace("i", "İ") if turkish else text).upper()


def is_all_caps(text: str) -> bool:
    """Return whether a text has at least two uppercase letters and no lowercase letters.

    >>> from regard.translation.text.casing import is_all_caps
    >>> is_all_caps("ACHTUNG!"), is_all_caps("A"), is_all_caps("Ein TV"), is_all_caps("漢字")
    (True, False, False, False)
    """
    return text.isupper() and sum(character.isupper() for character in text) > 1


class Casing:
    """How the training text capitalizes words.

    words: counts of the words in the training text, as written.
    lowercase, uppercase: fractions of training lines that are all lowercase and all uppercase.
    initial: fraction of training lines that begin with an uppercase letter.
    turkish: whether the language uses dotless ı.

    >>> from regard.translation.text.casing import Casing
    >>> casing = Casing({"Ein": 9, "Mann": 8, "geht": 7, "Straße": 2, "ein": 10})
    >>> casing.normalize(["EIN", "MANN", "GEHT", "(STRASSE)!"])
    (['Ein', 'Mann', 'geht', '(Straße)!'], [True, True, True, True])
    >>> casing.normalize(["ein", "mann", "geht."])
    (['Ein', 'Mann', 'geht.'], [False, False, False])
    >>> casing.normalize(["Ein", "MANN", "mit", "TV"])  # unknown words are kept
    (['Ein', 'Mann', 'mit', 'TV'], [False, True, False, False])
    """

    def __init__(
        self,
        words: Mapping[str, int],
        *,
        lowercase: float = 0.0,
        uppercase: float = 0.0,
        initial: float = 1.0,
        turkish: bool = False,
    ) -> None:
        self._words, self._turkish = words, turkish
        self._lowercase, self._uppercase, self._initial = lowercase, uppercase, initial

    def normalize(self, words: Sequence[str], first: bool = True) -> tuple[list[str], list[bool]]:
        """Return the words as they appear in the training text, and whether each was uppercase.

        first: whether the first word begins a sentence.

        An all-caps or lowercase sentence is rewritten, unless the training text has such lines, and so is a
        Sentence With Only Capitalized Words. In other sentences, a word is rewritten if the training text
        contains it only in another letter case.
        """
        text = " ".join(words)
        if self._lowercase > 1 - _RARE:  # an uncased corpus
            return [_lower(word, self._turkish) for word in words], [is_all_caps(word) for word in words]
        if is_all_caps(text) and self._uppercase < _RARE:
            return self._rewrite(words, first), [word.isupper() for word in words]
        if text.islower() and self._lowercase < _RARE:
            return self._rewrite(words, first), [False] * len(words)
        if self._is_headline(words):
            return self._capitalize([self._known_spelling(word) for word in words], first), [False] * len(
                words
            )
        rewritten = [self._rewrite_known(word) for word in words]
        return rewritten, [
            new != word and is_all_caps(word) for new, word in zip(rewritten, words, strict=True)
        ]

    def _rewrite(self, words: Sequence[str], first: bool) -> list[str]:
        """Return each word in its most frequent spelling, and capitalize the first word."""
        return self._capitalize([self._most_frequent(word) for word in words], first)

    def _capitalize(self, words: list[str], first: bool) -> list[str]:
        """Capitalize the first word if it begins a sentence, unless the training text does not."""
        if first and words and self._initial > 0.5:
            start, _ = word_core(words[0])
            initial = capitals(words[0][start : start + 1], self._turkish)
            if len(initial) == 1:  # false for "ß", whose uppercase form is "SS"
                words[0] = words[0][:start] + initial + words[0][start + 1 :]
        return words

    def _is_headline(self, words: Sequence[str]) -> bool:
        """Return whether all words are capitalized, unlike some of them in the training text."""
        cores = [word[slice(*word_core(word))] for word in words]
        cores = [core for core in cores if core[:1].isalpha()]
        return (
            len(cores) >= _MIN_TITLE
            and all(core[0].isupper() for core in cores)
            and any(self._known_spelling(core) == _lower(core, self._turkish) for core in cores[1:])
        )

    def _known_spelling(self, word: str) -> str:
        """Return a word in its most frequent spelling in the training text; keep an unknown word."""
        start, stop = word_core(word)
        known = self._variants.get(fold(word[start:stop], self._turkish))
        return word if known is None else word[:start] + known + word[stop:]

    def _most_frequent(self, word: str) -> str:
        start, stop = word_core(word)
        core = word[start:stop]
        if not core.isupper() and not core.islower():
            return word
        known = self._variants.get(fold(core, self._turkish))
        if known is None and "-" in core.strip("-"):
            known = "-".join(self._most_frequent(part) if part else "" for part in core.split("-"))
        if known is None:
            known = _lower(core, self._turkish)
        return word[:start] + known + word[stop:]

    def _rewrite_known(self, word: str) -> str:
        """Return a word as it appears in the training text; keep capitalized words such as "Mann"."""
        core = word[slice(*word_core(word))]
        is_capitalized = core[:1].isupper() and not any(map(str.isupper, core[1:]))
        return word if core in self._words or is_capitalized else self._known_spelling(word)

    @cached_property
    def _variants(self) -> dict[str, str]:
        """The most frequent way to write each word, by its key."""
        best: dict[str, tuple[int, str]] = {}
        for word, count in self._words.items():
            key = fold(word, self._turkish)
            if count > best.get(key, (0, ""))[0]:
                best[key] = count, word
        return {key: word for key, (_, word) in best.items()}


def _dotless(word: str, turkish: bool) -> str:
    return word.replace("I", "ı").replace("İ", "i") if turkish else word


def _lower(word: str, turkish: bool) -> str:
    return _dotless(word, turkish).lower()
