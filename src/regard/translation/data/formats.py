"""Read and write files of sentence pairs: two text files, TSV, CSV or JSON lines. Files are streamed."""

import gzip
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, get_args

from regard._util.files import open_atomic
from regard._util.text import pluralize, shorten
from regard.errors import ArgumentError
from regard.translation.data.pairs import Pair
from regard.translation.data.spreadsheet import parse_csv

Format = Literal["tsv", "csv", "jsonl"]
_Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]
_SPREADSHEETS = (".xlsx", ".xls", ".ods", ".numbers")
_GZIP = b"\x1f\x8b"
_MAX_LINE_BYTES = 2**24  # longer lines are not sentences and could exhaust memory


def read_pairs(source: _Path, target: _Path | None = None, *, format: Format | None = None) -> Iterator[Pair]:
    r"""Yield the sentence pairs of a corpus.

    Two files: line n of `target` translates line n of `source`. One file, or "-" for standard input:

        tsv    source⇥target; other columns are ignored, and quotes have no special meaning
        csv    a spreadsheet, see `spreadsheet.parse_csv`: any separator, with or without quotes and header
        jsonl  {"source": "…", "target": "…"} on each line; other keys are ignored

    format: "tsv", "csv" or "jsonl". Default: from the extension (.tsv, .tab, .txt; .csv; .jsonl, .ndjson,
        .json; also with .gz), otherwise from the first line. Any file may be gzipped, whatever its name.

    Text is UTF-8; lines end with \n or \r\n. An empty line is a pair of empty sentences, which `clean_pairs`
    drops. An error is raised when its line is reached; a difference in the number of lines is reported last.

    >>> import pathlib, tempfile
    >>> from regard.translation.data.formats import read_pairs
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "pairs.tsv")
    ...     written = path.write_text("two dogs\tzwei Hunde\n", encoding="utf-8")
    ...     print(*read_pairs(path))
    Pair(source='two dogs', target='zwei Hunde')
    """
    if format is not None and format not in get_args(Format):
        raise ArgumentError(f"Unknown format {format!r}. Use {', '.join(map(repr, get_args(Format)))}.")
    source = os.fsdecode(source)
    if target is None:
        _check_readable(source)
        return _from_one(source, format)
    if format is not None:
        raise ArgumentError(
            f"format={format!r} (--format) applies to one file of pairs, but got two files. Remove the "
            "format, or pass one file."
        )
    target = os.fsdecode(target)
    if source == target == "-":
        raise ArgumentError(
            "Both files are standard input. Pass one file, or pass pairs as TSV on standard input."
        )
    _check_readable(source)
    _check_readable(target)
    return _from_two(source, target)


def read_lines(path: _Path) -> Iterator[str]:
    """Yield the lines of a text file, or of standard input for "-", with the same rules as `read_pairs`."""
    path = os.fsdecode(path)
    _check_readable(path)
    return _lines(path)


def write_pairs(path: _Path, pairs: Iterable[Pair]) -> int:
    """Write pairs as TSV and return their number. The file appears only when complete.

    path: output file; compressed if it ends in .gz.
    pairs: any iterable.

    >>> import tempfile
    >>> from regard.translation.data.pairs import Pair
    >>> from regard.translation.data.formats import read_pairs, write_pairs
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     print(write_pairs(f"{folder}/pairs.tsv", [Pair("two dogs", "zwei Hunde")]))
    ...     print(*read_pairs(f"{folder}/pairs.tsv"))
    1
    Pair(source='two dogs', target='zwei Hunde')
    """
    number = 0
    path = os.fsdecode(path)
    with open_atomic(path) as raw, _compress(raw) if _is_gzip(path) else nullcontext(raw) as file:
        for number, (source, target) in enumerate(pairs, 1):
            if any(end in source or end in target for end in "\t\n\r"):
                raise ArgumentError(
                    f"Pair {number:,} contains a tab or a line break, which TSV cannot represent. "
                    "clean_pairs(pairs) replaces them with spaces."
                )
            file.write(f"{source}\t{target}\n".encode())
    return number


def contains_pairs(path: str) -> bool:
    """Return whether a file contains pairs, judging by its extension; a .txt file counts as one side only."""
    return _extension(path) in _FORMAT_OF and _extension(path) != ".txt"


def _extension(path: str) -> str:
    return Path(path[:-3] if _is_gzip(path) else path).suffix.lower()


def _is_gzip(name: str) -> bool:
    return name.lower().endswith(".gz")


def _compress(file: BinaryIO) -> gzip.GzipFile:
    """Compress without a file name and timestamp, so equal pairs give equal files."""
    return gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0)


def _check_readable(name: str) -> None:
    """Raise ArgumentError early if a file cannot be read; pipes and devices are allowed."""
    if name == "-":
        if sys.stdin is None:
            raise ArgumentError("Standard input is closed. Pipe text into it, or pass a file.")
        return
    if not os.path.exists(name):
        raise ArgumentError(f"No such file: {name!r}.")
    if Path(name).suffix.lower() in _SPREADSHEETS:
        raise ArgumentError(f"{name!r} is a spreadsheet. Export it as CSV in UTF-8, and pass the .csv file.")
    if os.path.isdir(name):
        raise ArgumentError(f"{name!r} is a folder. Pass a file in it.")
    if not os.access(name, os.R_OK):
        raise ArgumentError(f"No permission to read {name!r}. Change its permissions, or copy it.")


def _from_two(source: str, target: str) -> Iterator[Pair]:
    sides = _lines(source), _lines(target)
    for line, (first, second) in enumerate(zip_longest(*sides)):
        if first is None or second is None:
            more = line + 1 + sum(1 for side in sides for _ in side)  # one of them has ended
            counts = (line, more) if first is None else (more, line)
            raise ArgumentError(
                f"{source!r} has {pluralize(counts[0], 'line')}, but {target!r} has {counts[1]:,}. Line n of "
                "one file must translate line n of the other."
            )
        yield Pair(first, second)


def _from_one(path: str, format: Format | None) -> Iterator[Pair]:
    format = format or _FORMAT_OF.get(_extension(path))
    if format == "csv":
        yield from parse_csv(_lines(path), _name(path))
        return
    for line, text in enumerate(_lines(path), 1):
        format = format or ("jsonl" if text.lstrip().startswith("{") else "tsv")
        where = f"{_name(path)}, line {line:,}"
        yield _FORMATS[format].parse(text, where) if text else Pair("", "")


def _from_tsv(text: str, where: str) -> Pair:
    source, tab, rest = text.partition("\t")
    if not tab:
        raise ArgumentError(
            f"{where}: no tab. Write source⇥target on each line, or use two files with one sentence per line."
        )
    return Pair(source, rest.partition("\t")[0])


def _from_json(text: str, where: str) -> Pair:
    try:
        item = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(
            f'{where}: not valid JSON ({error}). Write {{"source": "…", "target": "…"}} on each line, or use '
            "format='tsv' (--format tsv)."
        ) from None
    match item:
        case {"source": str(source), "target": str(target)}:
            pair = Pair(source, target)
        case _:
            raise ArgumentError(
                f'{where}: expected {{"source": "…", "target": "…"}} with two strings, got {shorten(text)!r}.'
            )
    try:
        "".join(pair).encode()
    except UnicodeEncodeError:
        raise ArgumentError(
            f"{where}: contains a lone surrogate (\\ud800 to \\udfff), which is not a character. Remove it."
        ) from None
    return pair


class _Format(NamedTuple):
    """File extensions of a format, and its parser: a function of a line and its location (for errors)."""

    extensions: tuple[str, ...]
    parse: Callable[[str, str], Pair]


_FORMATS: dict[Format, _Format] = {
    "tsv": _Format((".tsv", ".tab", ".txt"), _from_tsv),
    "csv": _Format((".csv",), _from_tsv),  # read by parse_csv, because cells may contain line breaks
    "jsonl": _Format((".jsonl", ".ndjson", ".json"), _from_json),
}
_FORMAT_OF = {extension: name for name, (extensions, _) in _FORMATS.items() for extension in extensions}


def _lines(path: str) -> Iterator[str]:
    """Yield lines without line breaks; str.splitlines would also split at U+2028 and similar."""
    with _open(path) as file:
        number = 0
        while line := _next_line(file, path, number + 1):
            number += 1
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            try:
                yield line.removesuffix(b"\n").removesuffix(b"\r").decode()
            except UnicodeDecodeError as error:
                is_utf16 = number == 1 and line[:2] in (b"\xff\xfe", b"\xfe\xff")
                raise ArgumentError(
                    f"{_name(path)}, line {number:,}: not UTF-8; byte {error.start + 1} is "
                    f"0x{line[error.start]:02x}. Convert the file, for example with iconv -f "
                    f"{'UTF-16' if is_utf16 else 'LATIN1'} -t UTF-8."
                ) from None


def _next_line(file: BinaryIO, path: str, number: int) -> bytes:
    try:
        line = file.readline(_MAX_LINE_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ArgumentError(
            f"{_name(path)}: the gzip data is damaged after line {number - 1:,} ({error}). The file may be "
            "truncated; copy or download it again."
        ) from None
    if len(line) > _MAX_LINE_BYTES:
        raise ArgumentError(
            f"{_name(path)}, line {number:,}: longer than {_MAX_LINE_BYTES:,} bytes. Use text with one "
            "sentence per line."
        )
    return line


@contextmanager
def _open(path: str) -> Iterator[BinaryIO]:
    """Open a file or standard input as bytes; decompress gzip."""
    if path == "-":
        yield _decompress(sys.stdin.buffer)
    else:
        with open(path, "rb") as file:
            yield _decompress(file)


def _decompress(file: BinaryIO) -> BinaryIO:
    is_gzip = file.peek(2)[:2] == _GZIP  # type: ignore[attr-defined]  # a buffered reader
    return gzip.GzipFile(fileobj=file) if is_gzip else file  # type: ignore[return-value]


def _name(path: str) -> str:
    return "standard input" if path == "-" else repr(path)
