"""Read and write files of sentence pairs: two text files, TSV, CSV, JSON lines, Moses or TMX, streamed."""

import gzip
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO, Literal, get_args

from regard._util.files import open_atomic
from regard._util.text import pluralize, shorten
from regard.errors import ArgumentError
from regard.translation.data.pairs import Pair
from regard.translation.data.spreadsheet import parse_csv, write_csv
from regard.translation.data.tmx import Languages, read_tmx, tmx_languages, write_tmx

Format = Literal["tsv", "csv", "jsonl", "moses", "tmx"]
_Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]
_SPREADSHEETS = (".xlsx", ".xls", ".ods", ".numbers")
_GZIP = b"\x1f\x8b"
_SEPARATOR = " ||| "
_MAX_LINE_BYTES = 2**24  # longer lines are not sentences and could exhaust memory


def read_pairs(
    source: _Path,
    target: _Path | None = None,
    *,
    format: Format | None = None,
    languages: Languages | None = None,
) -> Iterator[Pair]:
    r"""Yield the sentence pairs in a corpus.

    Two files: line n of `target` translates line n of `source`. One file, or "-" for standard input:

        tsv    source⇥target; other columns are ignored, and quotes have no special meaning
        csv    a spreadsheet: any separator, with or without quotes and header; see `spreadsheet.parse_csv`
        jsonl  {"source": "…", "target": "…"} on each line; other keys are ignored
        moses  source ||| target, as for fast_align and eflomal
        tmx    a translation memory, TMX 1.4b

    format: one of these names. Default: from the extension (.tsv, .tab, .txt; .csv; .jsonl, .ndjson, .json;
        .src-tgt; .tmx; also with .gz), otherwise from the first line, which cannot identify CSV or TMX. Any
        file may be gzipped, whatever its name.
    languages: source and target languages for a TMX file with more than two, such as ("de", "en").

    Text is UTF-8; lines end with \n or \r\n. An empty line is a pair of empty sentences, which `clean_pairs`
    drops. An invalid line raises an error when it is reached. If the two files have different numbers of
    lines, the error is raised at the end.

    >>> import pathlib, tempfile
    >>> from regard.translation.data.formats import read_pairs
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "pairs.tsv")
    ...     written = path.write_text("two dogs\tzwei Hunde\n", encoding="utf-8")
    ...     print(*read_pairs(path))
    Pair(source='two dogs', target='zwei Hunde')
    """
    if format is not None and format not in get_args(Format):
        raise ArgumentError(
            f"Unknown format {format!r}. Choose from {', '.join(map(repr, get_args(Format)))}."
        )
    source = os.fsdecode(source)
    if target is None:
        _check_readable(source)
        return _from_one(source, format, languages)
    if format is not None:
        raise ArgumentError(
            f"format={format!r} (--format) applies to one file of pairs, but two files were passed. "
            "Remove the format, or pass one file."
        )
    target = os.fsdecode(target)
    if source == target == "-":
        raise ArgumentError(
            "Source and target are both standard input. Pass a file for one of them, or pairs as TSV."
        )
    _check_readable(source)
    _check_readable(target)
    return _from_two(source, target)


def read_lines(path: _Path) -> Iterator[str]:
    """Yield the lines of a text file, or of standard input for "-", by the same rules as `read_pairs`."""
    path = os.fsdecode(path)
    _check_readable(path)
    return _lines(path)


def write_pairs(path: _Path, pairs: Iterable[tuple[str, str]], *, languages: Languages | None = None) -> int:
    """Write pairs to a file atomically; return the number of pairs.

    path: output file; the format is Moses (source ||| target) for .src-tgt, CSV for .csv, TMX for .tmx,
        JSON Lines for .jsonl, otherwise TSV. The file is compressed if its name ends in .gz.
    pairs: any iterable. languages: language tags of source and target in a TMX file.

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
    format = _FORMAT_OF.get(_extension(path))
    separator = _SEPARATOR if format == "moses" else "\t"
    with open_atomic(path) as raw, compressed(raw, path) as file:
        if format == "tmx":
            return write_tmx(file, ((pair, {}) for pair in pairs), languages or ("x-source", "x-target"))
        if format == "csv":
            return write_csv(file, pairs)
        for number, (source, target) in enumerate(pairs, 1):
            if format == "jsonl":
                line = json.dumps({"source": source, "target": target}, ensure_ascii=False)
            else:
                _check_writable(number, source, target, separator)
                line = f"{source}{separator}{target}"
            file.write(f"{line}\n".encode())
    return number


def _check_writable(number: int, source: str, target: str, separator: str) -> None:
    """Raise if a line-based format cannot represent a pair."""
    if any(end in source or end in target for end in "\t\n\r"):
        raise ArgumentError(
            f"Pair {number:,} contains a tab or a line break, which TSV cannot represent. "
            "clean_pairs(pairs) replaces them with spaces."
        )
    if any(separator in f" {side} " for side in (source, target)):
        raise ArgumentError(
            f"Pair {number:,} contains {separator.strip()!r}, which the Moses format cannot represent. Write "
            "TSV or CSV instead."
        )


def contains_pairs(path: str) -> bool:
    """Return whether a file contains pairs, judging by its extension; a .txt file counts as one side only."""
    return _extension(path) in _FORMAT_OF and _extension(path) != ".txt"


def is_tmx(path: _Path) -> bool:
    """Return whether a file contains TMX, judging by its extension; it may be compressed: .tmx.gz.

    >>> from regard.translation.data.formats import is_tmx
    >>> is_tmx("memory.TMX.gz"), is_tmx("memory.tsv")
    (True, False)
    """
    return _FORMAT_OF.get(_extension(os.fsdecode(path))) == "tmx"


def _extension(path: str) -> str:
    return Path(path[:-3] if _is_gzip(path) else path).suffix.lower()


def _is_gzip(name: str) -> bool:
    return name.lower().endswith(".gz")


def compressed(file: BinaryIO, path: str) -> AbstractContextManager[BinaryIO]:
    """Compress output to `file` if `path` ends in .gz; the same content always gives the same bytes."""
    if not _is_gzip(path):
        return nullcontext(file)
    return gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0)  # type: ignore[return-value]


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
        raise ArgumentError(f"No permission to read {name!r}. Change its permissions, or pass another file.")


def _from_two(source: str, target: str) -> Iterator[Pair]:
    sides = _lines(source), _lines(target)
    for line, (first, second) in enumerate(zip_longest(*sides)):
        if first is None or second is None:
            more = line + 1 + sum(1 for side in sides for _ in side)  # one side has ended: count the other
            counts = (line, more) if first is None else (more, line)
            raise ArgumentError(
                f"{source!r} has {pluralize(counts[0], 'line')}, but {target!r} has {counts[1]:,}. Line n of "
                "one file must be the translation of line n of the other."
            )
        yield Pair(first, second)


def read_languages(path: str | os.PathLike[str], format: Format | None = None) -> Languages | None:
    """Return the two languages of a TMX file; None for standard input and for other formats.

    >>> from regard.translation.data.formats import read_languages
    >>> print(read_languages("test.tsv"))
    None
    """
    name = os.fspath(path)
    if name == "-" or (format or _FORMAT_OF.get(_extension(name))) != "tmx":
        return None
    with _open(name) as file, _gzip_errors(_name(name)):
        return tmx_languages(file, _name(name))


def _from_one(path: str, format: Format | None, languages: Languages | None) -> Iterator[Pair]:
    format = format or _FORMAT_OF.get(_extension(path))
    if format == "tmx":
        with _open(path) as file, _gzip_errors(_name(path)):
            yield from read_tmx(file, _name(path), languages)
        return
    if format == "csv":
        yield from parse_csv(_lines(path), _name(path))
        return
    for line, text in enumerate(_lines(path), 1):
        format = format or _guess_format(text)
        where = f"{_name(path)}, line {line:,}"
        yield _PARSERS[format](text, where) if text else Pair("", "")


def _guess_format(line: str) -> Format:
    if line.lstrip().startswith("{"):
        return "jsonl"
    return "moses" if "\t" not in line and _SEPARATOR in f" {line} " else "tsv"


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


def _from_moses(text: str, where: str) -> Pair:
    sides = f" {text} ".split(_SEPARATOR)
    if len(sides) != 2:
        raise ArgumentError(
            f"{where}: expected one {_SEPARATOR.strip()} between source and target, got {len(sides) - 1}. "
            f"Write source{_SEPARATOR}target on each line."
        )
    return Pair(sides[0].strip(), sides[1].strip())


_PARSERS: dict[Format, Callable[[str, str], Pair]] = {  # each takes a line, and its location for errors
    "tsv": _from_tsv,
    "jsonl": _from_json,
    "moses": _from_moses,
}
_FORMAT_OF: dict[str, Format] = {
    ".tsv": "tsv",
    ".tab": "tsv",
    ".txt": "tsv",
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".src-tgt": "moses",
    ".tmx": "tmx",
}


def _lines(path: str) -> Iterator[str]:
    """Yield lines without line breaks; str.splitlines would also split at U+2028 and similar characters."""
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
    with _gzip_errors(_name(path), f" after line {number - 1:,}"):
        line = file.readline(_MAX_LINE_BYTES + 1)
    if len(line) > _MAX_LINE_BYTES:
        raise ArgumentError(
            f"{_name(path)}, line {number:,}: longer than {_MAX_LINE_BYTES:,} bytes. Use text with one "
            "sentence per line."
        )
    return line


@contextmanager
def _gzip_errors(name: str, place: str = "") -> Iterator[None]:
    """Add the file name to errors about corrupted gzip data."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ArgumentError(
            f"{name}: the gzip data is corrupted{place} ({error}). The file may be truncated; copy or "
            "download it again."
        ) from None


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
