"""Translate documents and keep their structure: plain text, HTML and TSV.

A document is split into pieces: text is translated, everything else is copied.
"""
# ruff: noqa: SIM905 (words are easier to read without quotes)

import html
import re
import textwrap
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from regard._util.checks import check_choice, check_int
from regard._util.text import pluralize
from regard.errors import ArgumentError
from regard.translation.text.paragraphs import find_paragraphs, is_blank, typical_width
from regard.translation.text.tags import EXCLUDED, OPAQUE

if TYPE_CHECKING:
    from regard.translation.translator import Translator

Format = Literal["lines", "text", "html", "tsv"]
_EXTENSIONS: dict[str, Format] = {
    ".html": "html",
    ".htm": "html",
    ".xhtml": "html",
    ".tsv": "tsv",
    ".tab": "tsv",
}
# elements that can be part of a sentence; all others separate sentences
_INLINE = frozenset(
    "a abbr acronym b bdi bdo big cite code data del dfn em font i img ins kbd mark q s samp "
    "small span strike strong sub sup time tt u var wbr".split()
)
_MARKUP = re.compile(
    rf"<!--.*?(?:-->|\Z)|<!\[CDATA\[.*?\]\]>|<[!?][^>]*>|{EXCLUDED}|<(?P<opaque>{'|'.join(OPAQUE)})\b[^>]*(?<!/)>.*?(?:</(?P=opaque)\s*>|\Z)"
    r"|</?[A-Za-z][^\s/>]*(?:[^>\"']|\"[^\"]*\"|'[^']*')*>"
    r"|</?[A-Za-z][^<>]*\Z",  # cut off inside a tag
    re.DOTALL | re.IGNORECASE,
)
_NAME = re.compile(r"</?([A-Za-z][^\s/>]*)")
_INNER_SPACE = re.compile(r"(?<=[^\s>;])&(?:nbsp|#160|#xa0);(?=[^\s<&])", re.I)  # separates two words
_KEPT_ENTITY = re.compile(
    r"&(?!(?:amp|lt|gt|quot|apos|nbsp|#160|#xa0|#38|#60|#62|#x26|#x3c|#x3e);)[#\w]+;", re.I
)
_REFERENCE = re.compile(r"&#?\w+;")
# a quoted cell may contain line breaks; a quote inside it is doubled
_QUOTED = r'"(?:[^"\t]|"")*+"(?=[\t\r\n]|\Z)'
_CELL = re.compile(rf"(?:^|(?<=\t))(?:{_QUOTED}|[^\t]*)")
_ROW = re.compile(rf"(?!\Z)(?:(?:{_QUOTED}|[^\t\n]*)\t)*(?:{_QUOTED}(?:\r?\n|\Z)|[^\t\n]*(?:\n|\Z))")
# fenced code, and a line of a table
_BLOCK = re.compile(
    r"^[ \t]*(?P<fence>```+|~~~+)[^\n`]*\n(?:[^\n]*\n)*?[ \t]*(?P=fence)[ \t]*\r?(?:\n|\Z)"
    r"|^[ \t]*\|[^\n]*\|[ \t]*\r?(?:\n|\Z)",
    re.MULTILINE,
)
_PREFIX = re.compile(r"\s*(?:(?:[-*+•>]|#{1,6}|\d{1,3}[.)])\s+)*")


class Piece(NamedTuple):
    """A piece of a document.

    translated: whether it is text to translate. width: line width of the translation; 0 for no wrapping.
    separator: text between its lines. start: column at which its first line starts.
    quoted: whether it is inside a quoted cell, where quotes are doubled.
    """

    text: str
    translated: bool = False
    width: int = 0
    separator: str = "\n"
    start: int = 0
    quoted: bool = False


class Document(NamedTuple):
    """A translated document, and notes on its sentences, each with the text it refers to.

    >>> from regard.translation.text.documents import Document
    >>> Document("A dog.", [("Ein Hund.", "cut off at the maximum length")]).text
    'A dog.'
    """

    text: str
    notes: list[tuple[str, str]]


def format_of(name: str) -> Format:
    """Return the format of a file by its extension; "lines" for other extensions.

    >>> from regard.translation.text.documents import format_of
    >>> format_of("page.HTML"), format_of("test.de")
    ('html', 'lines')
    """
    extension = "." + name.lower().rpartition(".")[2] if "." in name else ""
    return _EXTENSIONS.get(extension, "lines")


def translate_document(
    translator: "Translator", text: str, format: Format = "text", *, column: int = 1, **options: Any
) -> Document:
    """Translate the text in a document; keep everything else unchanged.

    format: "text" keeps blank lines, indentation and list markers, and joins wrapped lines; "lines"
        translates line by line; "html" keeps tags, attributes, scripts and comments; "tsv" translates one
        column.
    column: the column to translate in a TSV file, counted from 1. options: see `Translator.translate`.

    >>> from types import SimpleNamespace
    >>> from regard.translation.text.documents import translate_document
    >>> class Upper:
    ...     def translate(self, texts, **options):
    ...         return [SimpleNamespace(text=text.upper(), note="") for text in texts]
    >>> translate_document(Upper(), "id\\tein Hund", "tsv", column=2).text
    'id\\tEIN HUND'
    >>> translate_document(Upper(), "<p class='x'> ein Hund </p>", "html").text
    "<p class='x'> EIN HUND </p>"
    """
    check_choice("translate_document got format", format, get_args(Format))
    check_int("translate_document got column", column, min=1)
    pieces = list(_tsv(text, column) if format == "tsv" else _PARSERS[format](text))
    texts = [piece.text for piece in pieces if piece.translated]
    translations = iter(translator.translate(texts, **options) if texts else [])
    written, notes = [], []
    for piece in pieces:
        if not piece.translated:
            written.append(piece.text)
            continue
        translation = next(translations)
        if translation.note:
            notes.append((piece.text, translation.note))
        wrapped = _wrap(translation.text, piece)
        written.append(wrapped.replace('"', '""') if piece.quoted else wrapped)
    return Document("".join(written), notes)


def _wrap(text: str, piece: Piece) -> str:
    if not piece.width:
        return text
    indent = len(piece.separator.lstrip("\r\n"))
    lines = textwrap.wrap(
        text,
        piece.width,
        initial_indent=" " * piece.start,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    starts = [piece.start, *[indent] * len(lines)]
    return piece.separator.join(line[start:] for line, start in zip(lines, starts, strict=False))


def _line(text: str) -> Iterator[Piece]:
    """Yield a line as indentation and list markers, text, and trailing whitespace."""
    start = len(_PREFIX.match(text)[0])  # type: ignore[index]  # matches the empty string
    stop = max(len(text.rstrip()), start)
    yield from (Piece(text[:start]), Piece(text[start:stop], stop > start), Piece(text[stop:]))


def _lines(text: str) -> Iterator[Piece]:
    for line in text.splitlines(keepends=True):
        yield from _line(line)


def _text(text: str) -> Iterator[Piece]:
    """Yield paragraphs and the cells of Markdown tables; fenced code is copied."""
    last = 0
    for match in _BLOCK.finditer(text):
        yield from _running_text(text[last : match.start()])
        if match["fence"]:
            yield Piece(match[0])
        else:
            for cell in re.split(r"((?<!\\)\|)", match[0]):
                yield from _run(cell)
        last = match.end()
    yield from _running_text(text[last:])


def _running_text(text: str) -> Iterator[Piece]:
    """Yield paragraphs; the lines of a wrapped paragraph are joined."""
    lines = text.splitlines(keepends=True)
    blocks = [list(block) for blank, block in groupby(lines, is_blank) if not blank]
    width = typical_width([[line.rstrip() for line in block] for block in blocks])
    for blank, group in groupby(lines, is_blank):
        block = list(group)
        if blank:
            yield Piece("".join(block))
            continue
        first = 0
        for paragraph in find_paragraphs(block, width):
            last = block[first + paragraph.lines - 1]
            newline = "\r\n" if block[first].endswith("\r\n") else "\n"
            separator, start = newline + paragraph.indent, len(paragraph.prefix)
            yield Piece(paragraph.prefix)
            yield Piece(paragraph.text, bool(paragraph.text), paragraph.width, separator, start)
            yield Piece(last[max(len(last.rstrip()), start if paragraph.lines == 1 else 0) :])
            first += paragraph.lines


def _html(text: str) -> Iterator[Piece]:
    """Yield markup, and the text between block elements with its inline tags."""
    run, written, last = "", "", 0  # written: the run as in the document
    for match in _MARKUP.finditer(text):
        between, last = text[last : match.start()], match.end()
        run, written = run + _unescape(between), written + between
        name = _NAME.match(match[0])
        if name and name[1].lower() in _INLINE and match[0].endswith(">"):
            run, written = run + match[0], written + match[0]
        else:
            yield from _run(run, written)
            yield Piece(match[0])
            run = written = ""
    yield from _run(run + _unescape(text[last:]), written + text[last:])


def _unescape(text: str) -> str:
    """Replace character references, except those for markup characters; escape a bare "<"."""
    text = _INNER_SPACE.sub("\u00a0", text.replace("<", "&lt;"))
    return _KEPT_ENTITY.sub(lambda match: html.unescape(match[0]), text) if "&" in text else text


def _run(text: str, written: str | None = None) -> Iterator[Piece]:
    """Yield the pieces of inline content; content without letters outside tags is copied.

    written: the content before character references were replaced.
    """
    written = text if written is None else written
    if not any(map(str.isalpha, _REFERENCE.sub("", _MARKUP.sub("", written)))):
        yield Piece(written)
        return
    stripped = text.strip()
    start = text.index(stripped)
    stop = start + len(stripped)
    yield from (Piece(text[:start]), Piece(stripped, True), Piece(text[stop:]))


def _tsv(text: str, column: int) -> Iterator[Piece]:
    number = 1
    for match in _ROW.finditer(text):
        row, line = match[0], number
        number += row.count("\n")
        if not row.strip():
            yield Piece(row)
            continue
        cells = list(_CELL.finditer(row.rstrip("\r\n")))
        if len(cells) < column:
            raise ArgumentError(
                f"Line {line:,} has {pluralize(len(cells), 'column')}, so column {column} cannot be "
                "translated. Add the missing tabs, or choose another column."
            )
        start, stop = cells[column - 1].span()
        yield Piece(row[:start])
        yield from _cell(row[start:stop])
        yield Piece(row[stop:])


def _cell(cell: str) -> Iterator[Piece]:
    """Yield the lines of a cell; only a quoted cell can have several."""
    quoted = len(cell) > 1 and re.fullmatch(_QUOTED, cell) is not None
    if quoted:
        yield Piece('"')
        cell = cell[1:-1]
    for line in cell.splitlines(keepends=True):
        content = line.strip()
        start = line.index(content)
        yield Piece(line[:start])
        yield Piece(content.replace('""', '"') if quoted else content, bool(content), quoted=quoted)
        yield Piece(line[start + len(content) :])
    if quoted:
        yield Piece('"')


_PARSERS: dict[Format, Callable[[str], Iterator[Piece]]] = {"lines": _lines, "text": _text, "html": _html}
