"""Format text, sizes and counts for messages."""

from typing import Any

_JOINERS = "\u200c\u200d"  # zero-width (non-)joiners: not printable, but harmless and used inside words


def printable(text: str) -> str:
    """Replace whitespace with spaces, and control characters, which a terminal would interpret, with "�".

    >>> from regard._util.text import printable
    >>> printable("a\\tdog\\x1b[31m")
    'a dog�[31m'
    """
    return "".join(
        char if char.isprintable() or char in _JOINERS else " " if char.isspace() else "�" for char in text
    )


def shorten(text: str, max_length: int = 80) -> str:
    """Truncate text to `max_length` characters, including a final ellipsis.

    >>> from regard._util.text import shorten
    >>> shorten("a long sentence", 7)
    'a long…'
    """
    return text if len(text) <= max_length else text[: max_length - 1].rstrip() + "…"


def format_bytes(size: float) -> str:
    """Format a number of bytes.

    >>> from regard._util.text import format_bytes
    >>> format_bytes(8_400_000)
    '8.4 MB'
    """
    unit = next(unit for unit in (1e9, 1e6, 1e3) if size >= unit or unit == 1e3)
    return f"{size / unit:.1f} { {1e9: 'GB', 1e6: 'MB', 1e3: 'kB'}[unit] }"


def pluralize(count: int, noun: str) -> str:
    """Format a count and its noun.

    >>> from regard._util.text import pluralize
    >>> pluralize(1, "sentence"), pluralize(2000, "word"), pluralize(2, "query")
    ('1 sentence', '2,000 words', '2 queries')
    """
    plural = f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2] not in "aeiou" else f"{noun}s"
    return f"{int(count):,} {noun if count == 1 else plural}"  # int: count may be a torch.SymInt


def index_range(noun: str, count: int) -> str:
    """Format the valid indices of `count` items, counted from 0.

    >>> from regard._util.text import index_range
    >>> index_range("head", 12), index_range("head", 1)
    ('heads 0 to 11', 'only head 0')
    """
    return f"only {noun} 0" if count == 1 else f"{noun}s 0 to {count - 1}"


def type_name(value: Any) -> str:
    """Return the name of a value's type, with its article.

    >>> from regard._util.text import type_name
    >>> type_name(3), type_name("dogs"), type_name(None)
    ('an int', 'a str', 'None')
    """
    return "None" if value is None else with_article(type(value).__name__)


def with_article(noun: str) -> str:
    """Put "a" or "an" before a noun.

    >>> from regard._util.text import with_article
    >>> with_article("Vocabulary"), with_article("AlignmentHead")
    ('a Vocabulary', 'an AlignmentHead')
    """
    return f"{'an' if noun[0] in 'AEIOUaeiou' else 'a'} {noun}"


def bar(fraction: float, width: int = 20) -> str:
    """Draw a fraction as a bar of at most `width` block characters; NaN gives an empty bar.

    >>> from regard._util.text import bar
    >>> bar(0.5, width=6)
    '███'
    """
    return "█" * round(width * min(max(fraction, 0.0), 1.0)) if fraction == fraction else ""
