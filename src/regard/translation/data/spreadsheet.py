"""Sentence pairs from a spreadsheet that was exported as CSV.

Spreadsheets write CSV in different ways: with commas or semicolons, with or without a header, with quotes
around cells that contain the separator, and with line breaks inside such cells.
"""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import IO

from regard._util.text import pluralize, shorten
from regard.errors import ArgumentError
from regard.translation.data.pairs import Pair

_SEPARATORS = ",;\t|"
_SNIFFED = 50  # rows read to find the separator
_SOURCE = {"source", "src", "original", "input", "from"}
_TARGET = {"target", "tgt", "trg", "translation", "output", "to"}
# language codes and names, in English and in the language itself
_LANGUAGE_NAMES = """
    ar arabic العربية bg bulgarian български cs cz czech čeština da danish dansk de german deutsch el greek
    ελληνικά en english es spanish español et estonian eesti fa persian فارسی fi finnish suomi fr french
    français he hebrew עברית hi hindi हिन्दी hr croatian hrvatski hu hungarian magyar indonesian it italian
    italiano ja japanese 日本語 ko korean 한국어 la latin lt lithuanian lietuvių lv latvian latviešu nl dutch
    nederlands nb norwegian norsk pl polish polski pt portuguese português ro romanian română ru russian
    русский sk slovak slovenčina sl slovenian slovenščina sr serbian српски sv swedish svenska sw swahili th
    thai ไทย tr turkish türkçe uk ukrainian українська vi vietnamese zh chinese 中文
"""
_LANGUAGES = frozenset(_LANGUAGE_NAMES.split())


def parse_csv(lines: Iterable[str], name: str) -> Iterator[Pair]:
    r"""Yield the pairs in a CSV file, given its lines without line breaks.

    The separator (comma, semicolon, tab or |) is the one that splits the first rows into the same number of
    columns. A first row with language names, or "source" and "target", is a header that selects the two
    columns. Without a header, the first two are used. Empty rows are pairs of empty sentences.

    >>> from regard.translation.data.spreadsheet import parse_csv
    >>> lines = ["id;German;English", '1;"Ja; bitte.";"Yes, please."']
    >>> list(parse_csv(lines, "sheet.csv"))
    [Pair(source='Ja; bitte.', target='Yes, please.')]
    """
    lines = iter(lines)
    first = list(islice(lines, _SNIFFED))
    separator = _find_separator(first)
    reader = csv.reader((f"{line}\n" for line in chain(first, lines)), delimiter=separator, strict=True)
    columns: tuple[int, int] | None = None
    try:
        for row in reader:
            if columns is None:
                header = _header_columns(row)
                columns = header or (0, 1)
                if header is not None:
                    continue
            yield _pair(row, columns, separator, f"{name}, line {reader.line_num:,}")
    except csv.Error as error:
        raise ArgumentError(
            f"{name}, line {reader.line_num:,}: not valid CSV ({error}). A cell that contains a "
            "quotation mark must be enclosed in quotation marks, with each mark inside it doubled: "
            '"say ""hi""". Export the spreadsheet as CSV again.'
        ) from None


def write_csv(file: IO[bytes], pairs: Iterable[tuple[str, str]]) -> int:
    r"""Write pairs as CSV with a header, for a spreadsheet; return the number of pairs.

    >>> import io
    >>> from regard.translation.data.spreadsheet import write_csv
    >>> file = io.BytesIO()
    >>> write_csv(file, [("Ja, bitte.", "Yes, please.")])
    1
    >>> file.getvalue().decode().splitlines()
    ['"source","target"', '"Ja, bitte.","Yes, please."']
    """
    text = io.TextIOWrapper(file, "utf-8", newline="", write_through=True)
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow(("source", "target"))
    number = 0
    for number, pair in enumerate(pairs, 1):  # noqa: B007 (returned)
        writer.writerow(pair)
    text.detach()
    return number


def _find_separator(lines: Sequence[str]) -> str:
    """Return the separator that gives most rows the same number of columns, at least two."""

    def consistency(separator: str) -> tuple[int, int]:
        try:
            rows = list(csv.reader((f"{line}\n" for line in lines), delimiter=separator))
        except csv.Error:
            return 0, 0
        widths = [len(row) for row in rows if len(row) > 1]
        common = max(set(widths), key=widths.count) if widths else 0
        return widths.count(common) if common else 0, -common

    return max(_SEPARATORS, key=consistency)  # the first one if there is a tie


def _header_columns(row: Sequence[str]) -> tuple[int, int] | None:
    """Return the source and target columns if the row is a header, otherwise None."""
    names = [cell.strip().casefold().replace("_", "-").partition("-")[0] for cell in row]  # "en_US" is "en"
    for sources, targets in ((_SOURCE, _TARGET), (_LANGUAGES, _LANGUAGES)):
        source = next((i for i, name in enumerate(names) if name in sources), None)
        target = next((i for i, name in enumerate(names) if name in targets and i != source), None)
        if source is not None and target is not None:
            return source, target
    return None


def _pair(row: Sequence[str], columns: tuple[int, int], separator: str, where: str) -> Pair:
    if not any(cell.strip() for cell in row):
        return Pair("", "")
    if len(row) <= max(columns):
        raise ArgumentError(
            f"{where}: expected texts in columns {columns[0] + 1} and {columns[1] + 1}, separated by "
            f"{separator!r}, got {pluralize(len(row), 'column')}: {shorten(separator.join(row))!r}. Each row "
            "needs a sentence and its translation."
        )
    return Pair(row[columns[0]], row[columns[1]])
