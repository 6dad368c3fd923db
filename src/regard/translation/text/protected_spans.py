"""Find text that a translation must keep unchanged: URLs, e-mail addresses, numbers, placeholders, emoji.

A span never crosses whitespace, except inside braces, such as `{{ user.name }}`, and before a unit: `3,5 %`.
"""

import re
import unicodedata
from collections.abc import Collection, Sequence
from typing import NamedTuple

_EMOJI = (
    "[\U0001f1e6-\U0001f1ff]{2}"  # flags
    "|[0-9#*]\ufe0f?\u20e3"  # keycaps
    "|(?:[\u203c\u2049\u2139\u2194-\u21aa\u231a-\u23ff\u24c2\u25aa-\u25fe\u2600-\u27bf\u2934\u2935"
    "\u2b05-\u2b55\u3030\u303d\u3297\u3299\U0001f000-\U0001faff]"
    "[\ufe0e\ufe0f]?[\U0001f3fb-\U0001f3ff]?[\U000e0020-\U000e007f]*\u200d?)+"
)
_NUMBER = r"\d+(?:[.,:/'’·×–-]\d+)*"
_UNIT = r"[ \u00a0\u202f]?(?:[%‰]|°[CFK]?|[€$£¥₹](?!\w))"
_TOP_LEVEL = (
    "com|org|net|edu|gov|info|io|de|at|ch|fr|uk|eu|nl|it|es|pl|cz|ru|cn|jp|ro|gr|se|dk|no|fi|be|pt|us"
)
_KINDS = {  # the first match wins
    "url": r"(?:[a-z][a-z0-9+.-]{1,15}://|www\.)[^\s<>\"“”„«»\x00-\x1f]+",
    "email": r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+",
    "path": r"(?<!\w)[a-z]:\\[^\s\"<>|]+|(?<![\w/.~])(?:~|\.\.?)?/(?:[\w.-]+/)+[\w.-]*",
    "placeholder": (
        r"\$?\{\{[^{}\n]*\}\}|\$?\{[^{}\s]*\}|%\(\w+\)[a-z]|%\d*\$?[sdifxX@](?![^\W_])|%%|\[\[[^\[\]\s]*\]\]"
        r"|__\w+__"
    ),
    "entity": r"&(?:#\d+|#[xX][0-9a-fA-F]+|[a-zA-Z]\w*);",
    "domain": rf"(?:[a-z0-9-]+\.)+(?:{_TOP_LEVEL})\b(?:/[^\s<>\"]*)?",
    "emoji": _EMOJI,
    "mention": r"(?<![\w&])[@#][^\W\d_]\w*",
    "code": r"(?<!\w)(?=[^\W_]*\d)(?=[^\W_]*[^\W\d_])[^\W_]+(?!\w)",
    "number": rf"(?<![^\W\d_])[+−-]?(?<![\d.,])(?:[$€£¥₹§]?{_NUMBER})(?:{_UNIT})?(?![^\W_])",
    "currency": r"[$€£¥₹₽₩](?!\w)",
}
_PATTERN = re.compile("|".join(f"(?P<{name}>{pattern})" for name, pattern in _KINDS.items()), re.IGNORECASE)
# every span contains one of these; a line without them needs no further search
_TRIGGER = re.compile(
    rf"[\d@#{{%&$€£¥₹₽₩]|://|www\.|:\\|/[\w.-]+/|\[\[|__|\.(?:{_TOP_LEVEL})\b|{_EMOJI}", re.IGNORECASE
)
_TRAILING = ".,;:!?…'’)]}*"  # punctuation that may follow a URL
KINDS = (*_KINDS, "unknown")


class Span(NamedTuple):
    """Characters [start, stop) of a text, to be copied unchanged. kind: the kind of span, such as "url".

    >>> from regard.translation.text.protected_spans import Span
    >>> Span(4, 9, "number").of("Um  15:30")
    '15:30'
    """

    start: int
    stop: int
    kind: str

    def of(self, text: str) -> str:
        """Return the characters of the span."""
        return text[self.start : self.stop]


def find_spans(text: str, unprotected: Collection[str] = ()) -> list[Span]:
    """Return the spans to copy from a text, in order.

    unprotected: kinds of spans to translate like other text.

    >>> from regard.translation.text.protected_spans import find_spans
    >>> text = "Um 15:30 Uhr zahlt {name} 3,50€ auf https://a.de/x?y=1. 👍🏽"
    >>> [span.of(text) for span in find_spans(text)]
    ['15:30', '{name}', '3,50€', 'https://a.de/x?y=1', '👍🏽']
    """
    spans: list[Span] = []
    if not _TRIGGER.search(text):
        return spans
    position = 0
    while match := _PATTERN.search(text, position):
        kind = match.lastgroup or ""
        start, stop = match.span()
        if kind in ("url", "domain", "path"):
            stop -= _trailing(match[0])
        position = max(stop, start + 1)
        if kind not in unprotected and start < stop:
            spans.append(Span(start, stop, kind))
    return spans


def _trailing(url: str) -> int:
    """Return the length of the punctuation after a URL; a bracket opened inside the URL belongs to it."""
    end = len(url)
    while end and url[end - 1] in _TRAILING:
        bracket = {")": "(", "]": "[", "}": "{"}.get(url[end - 1])
        if bracket and url[:end].count(bracket) >= url[:end].count(url[end - 1]):
            break
        end -= 1
    return len(url) - end


def merge_spans(spans: Sequence[Span]) -> list[Span]:
    """Sort spans, drop those inside others, and join adjacent ones; a joined span keeps the first kind.

    >>> from regard.translation.text.protected_spans import Span, merge_spans
    >>> merge_spans([Span(3, 6, "emoji"), Span(0, 3, "number"), Span(1, 2, "code")])
    [Span(start=0, stop=6, kind='number')]
    """
    merged: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.stop)):
        if merged and span.start <= merged[-1].stop:
            last = merged[-1]
            merged[-1] = last._replace(stop=max(last.stop, span.stop))
        else:
            merged.append(span)
    return merged


def split_words(text: str, spans: Sequence[Span]) -> list[tuple[int, int]]:
    """Return the character ranges of the words in a text; whitespace inside a span does not separate words.

    >>> from regard.translation.text.protected_spans import find_spans, split_words
    >>> text = "Hallo {{ user.name }}!"
    >>> [text[start:stop] for start, stop in split_words(text, find_spans(text))]
    ['Hallo', '{{ user.name }}!']
    """
    joined = text
    for span in spans:
        inside = span.of(text)
        if any(character.isspace() for character in inside):
            joined = joined[: span.start] + "x" * len(inside) + joined[span.stop :]
    words, start = [], None
    for at, character in enumerate(joined):
        if character.isspace():
            if start is not None:
                words.append((start, at))
            start = None
        elif start is None:
            start = at
    if start is not None:
        words.append((start, len(joined)))
    return words


def word_core(word: str) -> tuple[int, int]:
    """Return the range of a word without surrounding punctuation; the whole word if it is only punctuation.

    >>> from regard.translation.text.protected_spans import word_core
    >>> word_core("(Kraków),"), word_core("…")
    ((1, 7), (0, 1))
    """
    if word.isalnum():
        return 0, len(word)
    kept = [at for at, character in enumerate(word) if not _is_punctuation(character)]
    return (kept[0], kept[-1] + 1) if kept else (0, len(word))


def _is_punctuation(character: str) -> bool:
    return unicodedata.category(character)[0] in "PCZ"
