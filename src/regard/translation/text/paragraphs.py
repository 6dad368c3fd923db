"""Find the paragraphs in a plain text by recognizing wrapped lines.

A line was wrapped if the first word of the next line would not have fit. A list marker,
a different indentation or a table begins a new paragraph.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

_QUOTES = re.compile(r"(?:[ \t]{0,3}>[ \t]?)*")  # quoted mail, such as "> > "
_MARK = re.compile(r"[ \t]*(?:(?:[-*+•–]|#{1,6}|\(?\d{1,3}[.)]|\(?[a-zA-Z]\))[ \t]+)*")
_NUMBER = re.compile(r"[ \t]*\d{1,3}\.[ \t]+")
_TABLE = re.compile(r"\S(?:[ \t]{3,}|\t+)\S")
_MIN_WIDTH = 40  # minimum width of a wrapped paragraph, in characters
_FULL = 0.6  # minimum fraction of the width that a wrapped line fills
_UNSPACED = (("\u2e80", "\u9fff"), ("\uf900", "\ufaff"), ("\uff00", "\uff60"), ("\u0e00", "\u0edf"))
_SENTENCE_ENDS = ".!?:…。！？"
_CLOSING = "\"'”’“«»)]*_"
_AFTER_HYPHEN = frozenset("and or to und oder bis et ou y o e".split())  # noqa: SIM905


class Paragraph(NamedTuple):
    """Lines that are translated together.

    prefix: quote markers, indentation and list marker of the first line. indent: the same for other lines.
    text: the joined text. lines: number of lines. width: maximum width of a line; 0 for a single line.
    """

    prefix: str
    indent: str
    text: str
    lines: int
    width: int


class _Line(NamedTuple):
    """A line: its quote markers, its indentation and list markers, and its text."""

    quotes: str
    mark: str
    text: str

    @classmethod
    def of(cls, line: str) -> "_Line":
        quotes = _QUOTES.match(line)[0]  # type: ignore[index]  # matches the empty string
        mark = _MARK.match(line, len(quotes))[0]  # type: ignore[index]
        return cls(quotes, mark, line[len(quotes) + len(mark) :].rstrip())

    @property
    def size(self) -> int:
        return len(self.quotes) + len(self.mark) + len(self.text)

    @property
    def has_mark(self) -> bool:
        return bool(self.mark.strip())

    def without_mark(self) -> "_Line":
        """Return the line with its list marker as part of the text: "3. Mai" is not a list item."""
        indent = self.mark[: len(self.mark) - len(self.mark.lstrip())]
        return _Line(self.quotes, indent, self.mark[len(indent) :] + self.text)

    def ends_sentence(self) -> bool:
        return self.text.rstrip(_CLOSING).endswith(tuple(_SENTENCE_ENDS))


def is_blank(line: str) -> bool:
    """Return whether a line separates paragraphs: it has no text except quote markers.

    >>> from regard.translation.text.paragraphs import is_blank
    >>> is_blank(" > "), is_blank("> Hi")
    (True, False)
    """
    return not line.strip(" \t\r\n>\f\v")


def find_paragraphs(lines: Sequence[str], typical_width: int = 0) -> Iterator[Paragraph]:
    """Yield the paragraphs in consecutive non-blank lines.

    typical_width: typical line width of the document, to recognize a heading above a single line.

    >>> from regard.translation.text.paragraphs import find_paragraphs
    >>> lines = ["- Ein Mann geht mit seinem Hund durch den", "  Park.", "- Eine Frau"]
    >>> for paragraph in find_paragraphs(lines):
    ...     print(paragraph.lines, repr(paragraph.prefix), paragraph.text)
    2 '- ' Ein Mann geht mit seinem Hund durch den Park.
    1 '- ' Eine Frau
    """
    parsed = [_Line.of(line) for line in lines]
    width = _width([(line.text, line.size) for line in parsed])
    if len(lines) < 3:
        width = max(width, typical_width)
    joined: list[_Line] = []
    for line in parsed:
        if joined and _NUMBER.fullmatch(line.mark) and not (joined[0].has_mark or joined[-1].ends_sentence()):
            line = line.without_mark()
        if joined and not _continues(joined, line, width):
            yield from _paragraphs(joined)
            joined = []
        joined.append(line)
    yield from _paragraphs(joined)


def typical_width(blocks: Iterable[Sequence[str]]) -> int:
    """Return the median width of blocks with at least three lines; 0 if there are none."""
    import statistics  # takes milliseconds to import

    widths = [_width([(line.strip(), len(line)) for line in block]) for block in blocks if len(block) > 2]
    return round(statistics.median(widths)) if widths else 0


def _width(lines: Sequence[tuple[str, int]]) -> int:
    """Return the largest size among (text, size) lines, ignoring lines with a single word, such as a URL."""
    spaced = [size for text, size in lines if " " in text]
    return max(spaced or [size for _, size in lines], default=0)


def _continues(paragraph: Sequence[_Line], line: _Line, width: int) -> bool:
    """Return whether a line continues a paragraph."""
    first, last = paragraph[0], paragraph[-1]
    if line.has_mark or line.quotes != first.quotes or first.mark.lstrip().startswith("#"):
        return False
    if not line.text or not last.text or _TABLE.search(line.text) or _TABLE.search(last.text):
        return False
    if not any(map(str.isalnum, line.text)) or not any(map(str.isalnum, last.text)):
        return False  # a horizontal rule, such as "-----"
    indent = len(line.mark.expandtabs())
    if len(paragraph) > 1:
        same_indent = indent == len(last.mark.expandtabs())
    else:  # hanging indent below a list marker, or a first line with a larger indent
        inner = len(first.mark.expandtabs())
        outer = inner - len(first.mark.expandtabs().lstrip()) if first.has_mark else inner
        same_indent = indent in (inner, outer) or (not first.has_mark and indent < inner)
    if not same_indent or width < _MIN_WIDTH or last.size < _FULL * width:
        return False
    return last.size + 1 + len(line.text.split()[0]) > width


def _paragraphs(lines: Sequence[_Line]) -> Iterator[Paragraph]:
    """Yield the lines as one paragraph, or as one paragraph each if they are not running text."""
    if len(lines) > 1 and _is_text(lines):
        prefix, indent = (line.quotes + line.mark for line in lines[:2])
        text = lines[0].text
        for line in lines[1:]:
            text += _separator(text, line.text) + line.text
        yield Paragraph(prefix, indent, text, len(lines), max(line.size for line in lines))
        return
    for line in lines:
        yield Paragraph(line.quotes + line.mark, "", line.text, 1, 0)


def _is_text(lines: Sequence[_Line]) -> bool:
    """Return whether lines are running text rather than separate sentences or headlines."""
    ends = [line.ends_sentence() for line in lines]
    if all(ends[:-1]):
        return False
    return any(ends) or not all(line.text.lstrip(_CLOSING + "„¿¡([")[:1].isupper() for line in lines)


def _separator(text: str, following: str) -> str:
    """Return the text between joined lines: a space, except in a script without spaces or after a hyphen.

    The hyphen stays, because it may be part of the word, as in "well-known".
    """
    if text.endswith("-") and text[-2:-1].isalpha():
        return " " if following.split()[0] in _AFTER_HYPHEN else ""
    return "" if _is_unspaced(text[-1]) and _is_unspaced(following[0]) else " "


def _is_unspaced(character: str) -> bool:
    """Return whether a character belongs to a script without spaces: Chinese, Japanese, Thai, …"""
    return any(first <= character <= last for first, last in _UNSPACED)
