"""Word splitting, word lookup and vocabularies."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from functools import cached_property
from typing import NamedTuple

from regard._util.checks import check_int
from regard._util.text import pluralize, shorten
from regard.errors import ArgumentError, DTypeError

Span = tuple[int, int]  # character range [start, stop) in a sentence
WordQuery = str | tuple[str, int]  # a word, or (word, n) for its n-th occurrence, counted from 0


class Word(NamedTuple):
    """A word and its position: sentence[start:stop] == text.

    >>> from regard.models.encoders.words import split_words
    >>> split_words("Dogs bark")
    [Word(text='Dogs', start=0, stop=4), Word(text='bark', start=5, stop=9)]
    """

    text: str
    start: int
    stop: int


class _CharacterClasses(dict[int, str]):
    """A mapping from code points to one-letter classes, filled on demand.

    w: letter; d: digit; h: Han character (each is a word, as in BERT); m: combining mark; a: apostrophe,
    hyphen or underscore; s: separator within numbers; j: zero-width joiner; p: other; blank: whitespace.
    """

    def __missing__(self, code: int) -> str:
        self[code] = name = _character_class(chr(code))
        return name


def _character_class(character: str) -> str:
    category = unicodedata.category(character)
    for name, characters in _CLASSES:
        if character in characters:
            return name
    if category[0] == "L":
        return "h" if unicodedata.name(character, "").startswith("CJK ") else "w"
    return {"N": "d", "M": "m", "Z": " ", "C": "p" if category in ("Cn", "Co") else " "}.get(category[0], "p")


_CLASSES = (
    ("a", "'’ʼ-‐‑_"),
    ("s", ".,"),
    ("j", "\u00ad\u200c\u200d\u2060"),  # soft hyphen, non-joiner, joiner, word joiner
)
_character_classes = _CharacterClasses()
_PART = "[wd](?:[wdm]|j+(?=[wdm]))*"
_WORD = re.compile(f"{_PART}(?:a{_PART}|(?<=d)s(?=d){_PART})*|hm*|[pas]m*(?:j+pm*)*")


def split_words(sentence: str) -> list[Word]:
    """Split a sentence into words. Each punctuation mark is a word.

    Apostrophes and hyphens between letters, and periods and commas between digits, are part of the word. Each
    Han character is a word.

    >>> from regard.models.encoders.words import split_words
    >>> [word.text for word in split_words("Dogs don't bark, well-fed ones (1,000 of them).")]
    ['Dogs', "don't", 'bark', ',', 'well-fed', 'ones', '(', '1,000', 'of', 'them', ')', '.']
    >>> split_words("A dog")[1]
    Word(text='dog', start=2, stop=5)
    """
    classes = sentence.translate(_character_classes)  # one letter per character, so offsets are preserved
    return [Word(sentence[m.start() : m.end()], m.start(), m.end()) for m in _WORD.finditer(classes)]


def is_word(text: str) -> bool:
    """Whether the text contains a letter or a digit.

    >>> from regard.models.encoders.words import is_word
    >>> is_word("bark"), is_word("?")
    (True, False)
    """
    return any(character.isalnum() for character in text)


def fold(word: str) -> str:
    """Normalize case, apostrophes, spaces and accents for comparison.

    >>> from regard.models.encoders.words import fold
    >>> fold("Don’t")
    "don't"
    """
    folded = unicodedata.normalize("NFKC", word).casefold().replace("’", "'").replace("\u00ad", "")
    return "".join(folded.split())  # NFKC turns ´ into a space and a combining mark


def close_words(word: str, words: Iterable[str], n: int = 5) -> list[str]:
    """Return the words with the most similar spelling.

    >>> from regard.models.encoders.words import close_words
    >>> close_words("brak", ["bark", "tree", "bank"])
    ['bark', 'bank']
    """
    folded = fold(word)[:100]
    candidates: dict[str, str] = {}
    for other in words:
        if abs(len(other) - len(word)) <= 2:
            candidates.setdefault(fold(other), other)
    if len(candidates) > 20_000:  # comparing with a large vocabulary takes seconds
        candidates = {key: other for key, other in candidates.items() if key[:1] == folded[:1]}
    matches = get_close_matches(folded, list(candidates)[:20_000], n=n, cutoff=0.5)
    return [candidates[key] for key in matches]


def suggest(word: str, words: Iterable[str]) -> str:
    """Return a hint with words of similar spelling for an error message, or "" if there are none.

    >>> from regard.models.encoders.words import suggest
    >>> suggest("brak", ["bark", "tree"])
    " (did you mean 'bark'?)"
    """
    close = close_words(word, words, n=3)
    return f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""


class Vocabulary(Sequence[str]):
    """A mapping from words to ids. Special tokens come first; id 0 represents unknown words.

    >>> from regard.models.encoders.words import Vocabulary
    >>> vocabulary = Vocabulary.of(["The dogs bark.", "The bark of trees"], min_count=2)
    >>> list(vocabulary)
    ['<unk>', 'bark', 'the']
    >>> vocabulary.ids(["The", "dogs", "bark"])
    [2, 0, 1]
    """

    def __init__(self, words: Iterable[str], *, special_tokens: Sequence[str] = ("<unk>",)) -> None:
        self.special_tokens = tuple(special_tokens)
        if not self.special_tokens:
            raise ArgumentError("Vocabulary got no special_tokens; pass at least a token for unknown words.")
        self._words = (*self.special_tokens, *words)
        self._ids: dict[str, int] = {}
        for i, word in enumerate(self._words):
            if not isinstance(word, str) or not word:
                raise DTypeError(f"Vocabulary got {word!r} as word {i}; pass non-empty strings.")
            if self._ids.setdefault(word, i) != i:
                raise ArgumentError(
                    f"Vocabulary got {word!r} twice, as word {self._ids[word]} and word {i}; remove one."
                )

    @classmethod
    def of(
        cls,
        sentences: Iterable[str],
        *,
        max_size: int | None = None,
        min_count: int = 1,
        special_tokens: Sequence[str] = ("<unk>",),
    ) -> "Vocabulary":
        """Build a vocabulary from the lowercased words of sentences, in order of descending frequency.

        max_size: maximum number of words. min_count: minimum number of occurrences of a word.
        """
        if isinstance(sentences, str):
            raise DTypeError("Vocabulary.of got one string; pass a list of sentences.")
        if max_size is not None:
            check_int("Vocabulary.of got max_size", max_size, min=1)
        check_int("Vocabulary.of got min_count", min_count, min=1)
        counts = Counter(fold(word.text) for sentence in sentences for word in split_words(sentence))
        # ties are broken alphabetically, so the order of the sentences does not matter
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        return cls([word for word, n in ranked if n >= min_count][:max_size], special_tokens=special_tokens)

    def find(self, word: str) -> int | None:
        """Return the id of a word, ignoring case if there is no exact match, or None if it is unknown."""
        exact = self._ids.get(word)
        return self._folded.get(fold(word)) if exact is None else exact

    def ids(self, words: Iterable[str]) -> list[int]:
        """Return the ids of words, with 0 for unknown words."""
        return [self.find(word) or 0 for word in words]

    @cached_property
    def _folded(self) -> dict[str, int]:
        folded: dict[str, int] = {}
        for i, word in enumerate(self._words[len(self.special_tokens) :], len(self.special_tokens)):
            folded.setdefault(fold(word), i)
        return folded

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # int or slice
        return self._words[index]

    def __len__(self) -> int:
        return len(self._words)

    def __iter__(self) -> Iterator[str]:
        return iter(self._words)

    def __contains__(self, word: object) -> bool:
        return isinstance(word, str) and self.find(word) is not None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Vocabulary):
            return False
        return (self._words, self.special_tokens) == (other._words, other.special_tokens)

    def __hash__(self) -> int:
        return hash(self._words)

    def __repr__(self) -> str:
        return f"Vocabulary(<{len(self)} words>)"


def tokens_of_words(
    sentence: str, words: Sequence[Word], spans: Sequence[Span | None]
) -> tuple[list[Word], list[list[int]]]:
    """Return the words that have tokens and, for each word, the tokens that overlap it."""
    owner = [-1] * len(sentence)
    for i, word in enumerate(words):
        owner[word.start : word.stop] = [i] * (word.stop - word.start)
    parts: list[list[int]] = [[] for _ in words]
    for token, span in enumerate(spans):
        for i in sorted({*owner[span[0] : span[1]]} - {-1}) if span is not None else ():
            parts[i].append(token)
    kept = [i for i, part in enumerate(parts) if part]
    return [words[i] for i in kept], [parts[i] for i in kept]


def find_word(query: WordQuery, words: Sequence[str], sentence: str) -> int:
    """Return the index of a word in `words`, ignoring case if there is no exact match."""
    text, n = parse_word(query)
    matches = [i for i, word in enumerate(words) if word == text]
    matches = matches or [i for i, word in enumerate(words) if fold(word) == fold(text)]
    if not matches:
        listed = " ".join(words[:30]) + (" …" if len(words) > 30 else "")
        raise ArgumentError(
            f"{text!r} is not in {shorten(sentence)!r}{suggest(text, words)}; the sentence has these words: "
            f"{listed}"
        )
    if not -len(matches) <= n < len(matches):
        raise ArgumentError(
            f"Occurrence {n} of {text!r} is out of range: the word occurs {pluralize(len(matches), 'time')} "
            f"in {shorten(sentence)!r}, and occurrences are counted from 0."
        )
    return matches[n]


def parse_word(query: WordQuery) -> tuple[str, int]:
    """Split a query into a word and the index of its occurrence, which is 0 by default."""
    match query:
        case str():
            return query, 0
        case (str() as text, int() as n) if not isinstance(n, bool):
            return text, n
    raise DTypeError(
        f"The word is {query!r}; pass a string, or a pair such as ('bark', 1) for the second occurrence."
    )


def parse_word_pair(query: WordQuery | tuple[WordQuery, WordQuery]) -> tuple[WordQuery, WordQuery]:
    """Return the queries for two sentences; a single query applies to both."""
    match query:
        case str() | (str(), int()):
            return query, query
        case (str() | (str(), int()), str() | (str(), int())):
            return query
    raise DTypeError(f"compare got word={query!r}; pass a string, or a pair of strings, one per sentence.")
