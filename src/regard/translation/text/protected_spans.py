"""Find text that a translation must keep unchanged: URLs, e-mail addresses, numbers, placeholders, emoji.

A span crosses whitespace only in braces or backticks, such as `{{ user.name }}`, around a unit, as in `3,5 %`
or `§ 5`, between groups of digits, as in `10 000` or `+49 30 123456`, and in a calculation: `3 x 4 = 12`.
"""

import re
import unicodedata
from collections.abc import Collection, Sequence
from functools import cache
from typing import NamedTuple

_EMOJI = (
    "[\U0001f1e6-\U0001f1ff]{2}"  # flags
    "|[0-9#*]\ufe0f?\u20e3"  # keycaps
    "|(?:[\u203c\u2049\u2139\u2194-\u21aa\u231a-\u23ff\u24c2\u25aa-\u25fe\u2600-\u27bf\u2934\u2935"
    "\u2b05-\u2b55\u3030\u303d\u3297\u3299\U0001f000-\U0001faff]"
    "[\ufe0e\ufe0f]?[\U0001f3fb-\U0001f3ff]?[\U000e0020-\U000e007f]*\u200d?)+"
)
_EMOTICON = (
    r"(?<![^\s(\"„“])(?:[:;=][-o^'’]?(?:[()]+|[DPp|*/\\\]\[])|<3|\^_*\^|-_+-|(?-i:[xX]D))(?![^\s.,!?…)\"“”])"
)
# ©, ®, ¼, ℃, №, ™, ⅔, ①
_SYMBOLS = "\u00a9\u00ae\u00bc-\u00be\u2103\u2109\u2116\u2117\u2120\u2122\u2150-\u215f\u2460-\u24ff"
_SPACE = "[ \u00a0\u202f\u2009]"
_NUMBER = (  # 12. 3. 2020; 10 000; 1,5 or 24./25 or 3.–5, and 5,- for a price
    rf"(?:\d{{1,2}}\.{_SPACE}\d{{1,2}}\.{_SPACE}(?:\d{{4}}|\d\d)(?!\d)"
    rf"|\d{{1,3}}(?:{_SPACE}\d{{3}})+(?!\d)(?:,\d+)?"
    r"|\d+(?:(?:[.,:'’·×^]|\.?[/–-])\d+)*(?:[.,][-–—]{1,2}(?![\w-]))?)"
)
_CURRENCIES = "(?-i:EUR|USD|CHF|GBP|JPY)"
_MEASURES = (
    "(?-i:km/h|m/s|[kcm]?m[²³]?|[km]?g|[mcdh]?l|[kMGT]B|[kMG]?Hz|[kM]?Wh?|mAh|[km]?[VA]|hPa|mbar|dB|kcal"
    "|ms|min|s|h|KM/H|KM|CM|KG|KW)"
)
_UNIT = (  # "5 %s" and "5 %(n)d" have placeholders, not percentages
    r"(?:[%‰](?!\()|°[CFK]?|[€$£¥₹](?!\w))|[ \u00a0\u202f](?:[%‰](?![\w(])|°[CFK]?|[€$£¥₹](?!\w))"
    rf"|[ \u00a0\u202f](?:{_MEASURES}|{_CURRENCIES})(?![\w-]|\.\w)"
)
_AMOUNT = rf"(?:(?:[$€£¥₹]|§§?|(?<!\w){_CURRENCIES}){_SPACE}?)?{_NUMBER}(?:{_UNIT})?"
_OPERATOR = f"{_SPACE}[-+−–*/:=<>≤≥≈±×·÷x]"
# text before a space after which a span may continue: "€" before " 5", "12. 3." before " 2020"
CONTINUED = (
    rf"(?:(?<!\S)(?:[$€£¥₹§]+|{_CURRENCIES})|(?<!\S)\d{{1,2}}\.(?:{_SPACE}\d{{1,2}}\.)?"
    rf"|[\d%‰€$£¥₹CFK]{_OPERATOR})$"
)
_TOP_LEVEL = (
    "com|org|net|edu|gov|info|io|de|at|ch|fr|uk|eu|nl|it|es|pl|cz|ru|cn|jp|ro|gr|se|dk|no|fi|be|pt|us"
)
_EXTENSIONS = (
    "pdf|jpe?g|png|gif|svg|bmp|tiff?|webp|txt|csv|tsv|docx?|xlsx?|pptx?|odt|html?|xml|json|ya?ml|toml|zip|gz|"
    "tar|rar|mp[34]|wav|avi|exe|dll|py|js|css|java|cpp|ipynb|tex"
)
# superscripts and subscripts too, as in H₂O, and Roman numerals
_DIGIT = "[\\d\u00b2\u00b3\u00b9\u2070-\u2089\u2160-\u2188]"
_NUMBERED = r"(?=[^\W\d_]*+\d)[^\W_]++"  # letters and digits, at least one digit
_CODES = (
    r"(?<!\w)\d++(?:-\d++)++-x(?!\w)",  # an ISBN
    r"(?<!\w)[a-z]{2}\d\d(?: (?=[a-z]*\d)[a-z\d]{4}){2,}(?: \d{1,3})?(?!\w)",  # an IBAN
    # such as 3.12.1-rc2 or 2024-03-15T12:30Z
    rf"(?<!\w)(?=[\d.:_+-]*+[^\W\d_]){_NUMBERED}"
    rf"(?:[.:_+-](?:{_NUMBERED}|(?:alpha|beta|rc|pre|dev|post|snapshot|build)(?![^\W_])))++",
    r"(?<![\w.,])[+−-]?\d+(?:[.,]\d+)*[^\W\d_]{1,4}(?:/[^\W\d_]{1,4})?(?!\w)",  # 3,5kg, 100km/h
    rf"(?<!\w)(?:[^\W\d_]=)?(?=[^\W_]*{_DIGIT})(?=[^\W_]*[^\W\d_])[^\W_]+(?!\w)",  # A380, E=mc²
)
_IDENTIFIERS = (
    r"(?<![\w=])[^\W\d]\w*+=[\w\"'.=+-]*[\w\"']",  # x=1
    # an IPv6 address
    r"(?<![\w:])(?=[a-f\d:]*?(?:::|[a-f]))(?=[a-f:]*+\d)(?:[a-f\d]{0,4}:){2,7}[a-f\d]{0,4}(?![\w:])",
    # std::vector, file_name, getName and print(), but not Fahrer_innen
    r"(?<!\w)[^\W\d]\w*+(?:(?:::|->)\w++)++(?:\(\))?",
    r"(?<!\w)(?!\w*_in(?:nen)?\b)(?=_*+[^\W_]++_++[^\W_])\w++(?:\(\))?",
    r"(?<!\w)(?-i:[a-z][a-z\d]*+[A-Z][a-z]{2,}+\w*+)(?:\(\))?",
    r"(?<!\w)[^\W\d]\w*+\(\)(?!\w)",
    r"(?<!\w)(?-i:[A-Z]{1,3}&[A-Z]{1,3})(?!\w)|(?<!\w)[A-Z](?:\+\+|#)(?!\w)",  # H&M, C++
)
_PATHS = (
    r"(?<!\w)[a-z]:\\[^\s\"<>|]+",
    r"\\\\[\w.-]+\\[^\s\"<>|]+",
    r"(?<![\w/.~])(?:~|\.\.?)?/(?:[\w.-]+/)+[\w.-]*",
    r"(?<![\w/.~])(?:~|\.\.?)/[\w.-]+",
    rf"(?<![\w/.-])(?:[\w-][\w.-]*/)*[\w-]+(?:\.[\w-]+)*\.(?:{_EXTENSIONS})(?!\w)",
)
_KINDS = {  # the first match wins
    "url": (
        r"(?:[a-z][a-z0-9+.-]{1,15}://|www\.|(?<!\w)(?:mailto|tel|sms|doi|arxiv|isbn|urn|magnet):(?=[\w+]))"
        r"[^\s<>\"“”„«»\x00-\x1f]+"
    ),
    # max@a.de, @user@a.social, and git@a.com:b/c.git
    "email": r"(?<![\w.+-])@?[\w.+-]+@[\w-]+(?:\.[\w-]+)+(?::[\w~-][\w.~/-]*[\w/])?",
    "path": "|".join(_PATHS),
    "placeholder": (
        r"\$?\{\{[^{}\n]*\}\}|\$?\{[^{}\s]*\}|%\(\w+\)[a-z]|%\d*\$?[sdifxX@](?![^\W_])|%%|\[\[[^\[\]\s]*\]\]"
        r"|\[\^?\d{1,3}\]"  # a footnote
        r"|\{\w+, ?(?:number|date|time|duration|ordinal|spellout)\b[^{}\n]*\}"  # ICU MessageFormat
        r"|__\w+__|(?<![\w`])`[^`\s](?:[^`\n]*[^`\s])?`(?![\w`])|(?<!\S)```+[\w-]*(?!\S)"
        r"|\\[nrt](?![a-zäöüß])|\\u[\da-f]{4}|(?<!\w):(?-i:[a-z])[\w+-]+:(?!\w)"  # \n, :smile:
    ),
    "entity": r"&(?:#\d+|#[xX][0-9a-fA-F]+|[a-zA-Z]\w*);",
    "domain": (  # "singt.Es" lacks a space; it is not a domain
        rf"(?<![\w.-])(?:[^\W_](?:[\w-]*[^\W_])?\.)+(?-i:{_TOP_LEVEL}|COM|ORG|NET)\b(?:/[^\s<>\"]*)?"
    ),
    "emoji": rf"{_EMOJI}|{_EMOTICON}",
    "mention": r"(?<![\w&])(?:#\w+|@\w+(?:\.(?-i:[a-z\d_])\w*)*)",
    "phone": (
        r"(?<![\w+.,/-])(?=(?:\D{0,3}\d){7})(?:\+\d{1,3}(?: \d(?!\d))?|\(?0\d{1,5}\)?|\(\d{2,5}\))"
        rf"(?:(?:{_SPACE}|[/–-])?\(\d{{1,5}}\){_SPACE}?\d+|(?:{_SPACE}|[/–-])\d{{2,}})+(?!\w)"
    ),
    "identifier": "|".join(_IDENTIFIERS),
    "code": "|".join(_CODES),
    "number": (
        rf"(?<![^\W\d_])[+−±≈~≤≥-]?(?<![\d.,]){_AMOUNT}(?:{_OPERATOR}{_SPACE}[+−-]?{_AMOUNT}(?![^\W_]))*"
        r"(?:(?<=[%‰])|(?![^\W_]))"  # "100%" in "100%ig"
    ),
    "currency": r"[$€£¥₹₽₩](?!\w)",
    "symbol": f"[{_SYMBOLS}]+",
    # a row of equal marks, such as ---- or ====; also !!!!!!, but not ... or ???
    "rule": r"(?P<mark>[^\w\s.!?,;…])(?P=mark){2,}|_{3,}|(?P<end>[.!?,…])(?P=end){5,}",
}
# every span contains one of these; a line without them needs no further search
_TRIGGER = re.compile(
    rf"[\d@#{{%&$€£¥₹₽₩`\\_={_SYMBOLS}]|{_DIGIT}|:[/:\w]|www\.|/[\w.-]+/|[~.]/|\[\[|->|\(\)"
    rf"|([^\w\s])\1\1|{_EMOTICON}|(?-i:[a-z][A-Z][a-z])"
    rf"|\.(?:{_TOP_LEVEL}|{_EXTENSIONS})\b|{_EMOJI}",
    re.IGNORECASE,
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


@cache
def _pattern() -> re.Pattern[str]:
    """Return the pattern of all spans. Compiling it takes as long as translating a short sentence."""
    return re.compile("|".join(f"(?P<{name}>{kind})" for name, kind in _KINDS.items()), re.IGNORECASE)


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
    pattern, position = _pattern(), 0
    while match := pattern.search(text, position):
        kind = match.lastgroup or ""
        start, stop = match.span()
        if kind in ("url", "domain", "path"):
            stop -= _trailing(match[0])
        if kind == "code" and not any(map(str.isalpha, match[0])):
            kind = "number"  # "2-3" in "2-3-jährig"
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
