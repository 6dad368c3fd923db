"""Text as words: where they stand in a sentence, and a vocabulary of them."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from functools import cached_property
from typing import NamedTuple

from regard._util.checks import check_int
from regard._util.text import shorten
from regard.errors import ArgumentError, DTypeError

Span = tuple[int, int]  # characters [start, stop) of a sentence
WordQuery = str | tuple[str, int]  # a word, or a word and which of its occurrences, counted from 0


class Word(NamedTuple):
    """A word and where it stands: sentence[start:stop] == text.

    >>> from regard.models.encoders.words import split_words
    >>> split_words("Dogs bark")
    [Word(text='Dogs', start=0, stop=4), Word(text='bark', start=5, stop=9)]
    """

    text: str
    start: int
    stop: int


class _Kinds(dict[int, str]):
    """The kind of each character, by its number, as one letter; filled as characters are met.

    w word, d digit, h a Han character (a word by itself, as in BERT), m mark on the character before it,
    a apostrophe, hyphen or underscore, s separator within numbers, j joiner of no width, p any other, blank.
    """

    def __missing__(self, number: int) -> str:
        self[number] = kind = _kind(chr(number))
        return kind


def _kind(character: str) -> str:
    category = unicodedata.category(character)
    for kind, characters in _KINDS:
        if character in characters:
            return kind
    if category[0] == "L":
        return "h" if unicodedata.name(character, "").startswith("CJK ") else "w"
    return {"N": "d", "M": "m", "Z": " ", "C": "p" if category in ("Cn", "Co") else " "}.get(category[0], "p")


_KINDS = (
    ("a", "'’ʼ-‐‑_"),
    ("s", ".,"),
    ("j", "\u00ad\u200c\u200d\u2060"),  # soft hyphen, non-joiner, joiner, word joiner
)
_kinds = _Kinds()
_PART = "[wd](?:[wdm]|j+(?=[wdm]))*"
_WORD = re.compile(f"{_PART}(?:a{_PART}|(?<=d)s(?=d){_PART})*|hm*|[pas]m*(?:j+pm*)*")


def split_words(sentence: str) -> list[Word]:
    """The words of a sentence, with their characters' places; each punctuation mark is a word too.

    An apostrophe or a hyphen between letters, and a point or comma between digits, stay inside their word.
    Each Han character is a word.

    >>> from regard.models.encoders.words import split_words
    >>> [word.text for word in split_words("Dogs don't bark, well-fed ones (1,000 of them).")]
    ['Dogs', "don't", 'bark', ',', 'well-fed', 'ones', '(', '1,000', 'of', 'them', ')', '.']
    >>> split_words("A dog")[1]
    Word(text='dog', start=2, stop=5)
    """
    kinds = sentence.translate(_kinds)  # one letter for each character, so that places stay
    return [Word(sentence[m.start() : m.end()], m.start(), m.end()) for m in _WORD.finditer(kinds)]


def is_word(text: str) -> bool:
    """Whether it has a letter or a digit, and is not punctuation alone.

    >>> from regard.models.encoders.words import is_word
    >>> is_word("bark"), is_word("?")
    (True, False)
    """
    return any(character.isalnum() for character in text)


def fold(word: str) -> str:
    """What is the same in words that differ in case, apostrophes, blanks, or in how accents are stored.

    >>> from regard.models.encoders.words import fold
    >>> fold("Don’t")
    "don't"
    """
    folded = unicodedata.normalize("NFKC", word).casefold().replace("’", "'").replace("\u00ad", "")
    return "".join(folded.split())  # NFKC makes a blank and a mark of ´


def close_words(word: str, words: Iterable[str], most: int = 5) -> list[str]:
    """The words that are spelled most like this one.

    >>> from regard.models.encoders.words import close_words
    >>> close_words("brak", ["bark", "tree", "bank"])
    ['bark', 'bank']
    """
    folded = fold(word)[:100]
    alike: dict[str, str] = {}
    for other in words:
        if abs(len(other) - len(word)) <= 2:
            alike.setdefault(fold(other), other)
    if len(alike) > 20_000:  # a large vocabulary: comparing with all of it takes seconds
        alike = {key: other for key, other in alike.items() if key[:1] == folded[:1]}
    return [alike[key] for key in get_close_matches(folded, list(alike)[:20_000], n=most, cutoff=0.5)]


def unknown_word_error(who: str, word: str, words: Iterable[str]) -> ArgumentError:
    """The error about a word that an encoder does not know."""
    alike = close_words(word, words, most=3)
    hint = f"did you mean {' or '.join(map(repr, alike))}?" if alike else "nor any word like it."
    return ArgumentError(
        f"{who} does not know the word {word!r}; {hint} It knows the words of its vocabulary."
    )


class Vocabulary(Sequence[str]):
    """Numbered words, marks first: number 0 stands for every word that is not in it.

    >>> from regard.models.encoders.words import Vocabulary
    >>> vocabulary = Vocabulary.of(["The dogs bark.", "The bark of trees"], min_count=2)
    >>> list(vocabulary)
    ['<unk>', 'bark', 'the']
    >>> vocabulary.numbers(["The", "dogs", "bark"])
    [2, 0, 1]
    """

    def __init__(self, words: Iterable[str], *, marks: Sequence[str] = ("<unk>",)) -> None:
        self.marks = tuple(marks)
        if not self.marks:
            raise ArgumentError("Vocabulary got no marks; the first one stands for unknown words.")
        self._words = (*self.marks, *words)
        self._numbers: dict[str, int] = {}
        for number, word in enumerate(self._words):
            if not isinstance(word, str) or not word:
                raise DTypeError(f"Vocabulary got {word!r} as word {number}; a word is a string, not empty.")
            if self._numbers.setdefault(word, number) != number:
                raise ArgumentError(
                    f"Vocabulary got {word!r} as word {self._numbers[word]} and again as word {number}; "
                    "give each word once."
                )

    @classmethod
    def of(
        cls,
        sentences: Iterable[str],
        *,
        max_size: int | None = None,
        min_count: int = 1,
        marks: Sequence[str] = ("<unk>",),
    ) -> "Vocabulary":
        """The words of a text in lower case, the most frequent first.

        max_size: maximum number of words. min_count: minimum number of occurrences.
        """
        if isinstance(sentences, str):
            raise DTypeError("Vocabulary.of got one string; give a list of sentences.")
        if max_size is not None:
            check_int("Vocabulary.of got max_size", max_size, min=1)
        check_int("Vocabulary.of got min_count", min_count, min=1)
        seen = Counter(fold(word.text) for sentence in sentences for word in split_words(sentence))
        # by the alphabet where they are equally frequent, so that the order of the sentences does not matter
        ranked = sorted(seen.items(), key=lambda item: (-item[1], item[0]))
        return cls([word for word, often in ranked if often >= min_count][:max_size], marks=marks)

    def find(self, word: str) -> int | None:
        """The number of a word: as it is spelled, or else in any other case; None if there is none."""
        exact = self._numbers.get(word)
        return self._folded.get(fold(word)) if exact is None else exact

    def numbers(self, words: Iterable[str]) -> list[int]:
        """The numbers of words, 0 for unknown ones."""
        return [self.find(word) or 0 for word in words]

    @cached_property
    def _folded(self) -> dict[str, int]:
        folded: dict[str, int] = {}
        for number, word in enumerate(self._words[len(self.marks) :], len(self.marks)):
            folded.setdefault(fold(word), number)
        return folded

    def __getitem__(self, number):  # type: ignore[no-untyped-def]  # int or slice, as of a tuple
        return self._words[number]

    def __len__(self) -> int:
        return len(self._words)

    def __iter__(self) -> Iterator[str]:
        return iter(self._words)

    def __contains__(self, word: object) -> bool:
        return isinstance(word, str) and self.find(word) is not None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and (self._words, self.marks) == (other._words, other.marks)

    def __hash__(self) -> int:
        return hash(self._words)

    def __repr__(self) -> str:
        return f"Vocabulary(<{len(self)} words>)"


def check_sentences(sentences: str | Sequence[str]) -> list[str]:
    """Sentences that are strings of characters that can be stored."""
    if not isinstance(sentences, str | Sequence):
        raise DTypeError(
            f"the sentences are a {type(sentences).__name__}; give a string or a list of strings."
        )
    given = [sentences] if isinstance(sentences, str) else list(sentences)
    for number, sentence in enumerate(given):
        if not isinstance(sentence, str):
            raise DTypeError(f"sentence {number} is a {type(sentence).__name__}; give strings.")
        if not sentence.isascii():
            try:
                sentence.encode()
            except UnicodeEncodeError as error:
                raise ArgumentError(
                    f"sentence {number} has {sentence[error.start]!r} at character {error.start}, half of a "
                    "surrogate pair, which is no character; decode the text anew."
                ) from None
    return given


def tokens_of_words(
    sentence: str, words: Sequence[Word], spans: Sequence[Span | None]
) -> tuple[list[Word], list[list[int]]]:
    """The words that have tokens, and the tokens of each: those that share a character with it."""
    owner = [-1] * len(sentence)
    for number, word in enumerate(words):
        owner[word.start : word.stop] = [number] * (word.stop - word.start)
    parts: list[list[int]] = [[] for _ in words]
    for token, span in enumerate(spans):
        for number in sorted({*owner[span[0] : span[1]]} - {-1}) if span is not None else ():
            parts[number].append(token)
    kept = [number for number, part in enumerate(parts) if part]
    return [words[number] for number in kept], [parts[number] for number in kept]


def find_word(word: WordQuery, words: Sequence[str], sentence: str) -> int:
    """The place of a word among those of a sentence: as it is spelled, or else in any other case."""
    text, number = parse_word(word)
    places = [place for place, one in enumerate(words) if one == text]
    places = places or [place for place, one in enumerate(words) if fold(one) == fold(text)]
    if not places:
        alike = close_words(text, words, most=3)
        hint = f"did you mean {' or '.join(map(repr, alike))}? Its" if alike else "its"
        listed = " ".join(words[:30]) + (" …" if len(words) > 30 else "")
        raise ArgumentError(f"{text!r} is not in {shorten(sentence)!r}; {hint} words are: {listed}")
    if not -len(places) <= number < len(places):
        raise ArgumentError(
            f"{shorten(sentence)!r} has {text!r} {len(places)} times and occurrence {number} was asked "
            f"for; they count from 0, so give 0 to {len(places) - 1}."
        )
    return places[number]


def parse_word(word: WordQuery) -> tuple[str, int]:
    """A word that was asked for, and which of its occurrences: the first, unless said."""
    match word:
        case str():
            return word, 0
        case (str() as text, int() as number) if not isinstance(number, bool):
            return text, number
    raise DTypeError(
        f"a word was asked for as {word!r}; give a string, or a pair such as ('bark', 1), which is its "
        "second occurrence in the sentence."
    )


def parse_word_pair(word: WordQuery | tuple[WordQuery, WordQuery]) -> tuple[WordQuery, WordQuery]:
    """One word for each of two sentences."""
    match word:
        case str() | (str(), int()):
            return word, word
        case (str() | (str(), int()), str() | (str(), int())):
            return word
    raise DTypeError(
        f"compare got word={word!r}; give a string for both sentences, or a pair of strings, one for each."
    )
