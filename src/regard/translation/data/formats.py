"""Files of sentence pairs, read and written as a stream: two of lines, or one of TSV or JSON lines."""

import gzip
import json
import os
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO, Literal, get_args

from regard._util.files import open_atomic
from regard.errors import ArgumentError
from regard.translation.data.pairs import Pair

Form = Literal["tsv", "jsonl"]
_Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]

_ENDINGS: dict[str, Form] = {
    ".tsv": "tsv",
    ".tab": "tsv",
    ".txt": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
}
_GZIP = b"\x1f\x8b"
_LINE = 2**24  # bytes in a line at most: what is longer is no sentence, and would fill the memory


def read_pairs(source: _Path, target: _Path | None = None, *, form: Form | None = None) -> Iterator[Pair]:
    r"""The pairs of a corpus, one after the other, as they stand in their files.

    Two files: line n of one is the translation of line n of the other. One file, or "-" for standard input:

        tsv    source⇥target; further columns are ignored, and quotation marks are letters like others
        jsonl  {"source": "…", "target": "…"} in each line; further names are ignored

    form: which of the two; unless given, the name tells (.tsv, .tab, .txt; .jsonl, .ndjson, .json; also with
        .gz after it), or else the first line. Any file may be compressed with gzip, whatever its name.

    Text is UTF-8, and only \n or \r\n ends a line. An empty line is a pair of empty sentences, which `clean`
    counts. A mistake in a file is found when it is reached, unequal numbers of lines at the end.

    >>> import pathlib, tempfile
    >>> from regard.translation.data.formats import read_pairs
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "pairs.tsv")
    ...     written = path.write_text("two dogs\tzwei Hunde\n", encoding="utf-8")
    ...     print(*read_pairs(path))
    Pair(source='two dogs', target='zwei Hunde')
    """
    if form is not None and form not in get_args(Form):
        raise ArgumentError(f"form={form!r}; give 'tsv' or 'jsonl'.")
    source = os.fsdecode(source)
    if target is None:
        _check_readable(source)
        return _from_one(source, form)
    if form is not None:
        raise ArgumentError(
            f"there are two files and form={form!r} (--form), which is about one; leave out form, or a file."
        )
    target = os.fsdecode(target)
    if source == target == "-":
        raise ArgumentError(
            "standard input is given twice; give one file, or pairs as TSV in standard input alone."
        )
    _check_readable(source)
    _check_readable(target)
    return _from_two(source, target)


def read_lines(path: _Path) -> Iterator[str]:
    """The lines of one text file, or of "-", standard input: read as `read_pairs` reads them.

    >>> import pathlib, tempfile
    >>> from regard.translation.data.formats import read_lines
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     written = pathlib.Path(folder, "text").write_bytes("two\\u2028dogs\\r\\nbark".encode())
    ...     print(list(read_lines(f"{folder}/text")))
    ['two\\u2028dogs', 'bark']
    """
    path = os.fsdecode(path)
    _check_readable(path)
    return _lines(path)


def write_pairs(path: _Path, pairs: Iterable[Pair]) -> int:
    """Write pairs as TSV while they come, and say how many they were; the file gets its name at the end.

    path: of the file to write; one that ends in .gz is compressed.
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
    written = 0
    path = os.fsdecode(path)
    with open_atomic(path) as plain, _packed(plain) if _is_gzip(path) else nullcontext(plain) as file:
        for written, (source, target) in enumerate(pairs, 1):
            if any(end in source or end in target for end in "\t\n\r"):
                raise ArgumentError(
                    f"pair {written:,} has a tab or the end of a line within a sentence, which a line of TSV "
                    "cannot hold; clean_pairs(pairs) makes blanks of them."
                )
            file.write(f"{source}\t{target}\n".encode())
    return written


def _is_gzip(name: str) -> bool:
    return name.lower().endswith(".gz")


def _packed(file: BinaryIO) -> gzip.GzipFile:
    """To write to; without a name and the time, so that equal pairs give equal files."""
    return gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0)


def _check_readable(name: str) -> None:
    """What can be known before a file is opened; pipes and devices are fine."""
    if name == "-":
        if sys.stdin is None:  # closed by who started us
            raise ArgumentError("standard input is closed; give it some text, or name a file.")
        return
    if not os.path.exists(name):
        raise ArgumentError(f"there is no file {name!r}; check the name and the folder.")
    if os.path.isdir(name):
        raise ArgumentError(f"{name!r} is a folder; name a file in it.")
    if not os.access(name, os.R_OK):
        raise ArgumentError(f"{name!r} may not be read; change its permissions, or copy it.")


def _from_two(source: str, target: str) -> Iterator[Pair]:
    sides = _lines(source), _lines(target)
    for line, (first, second) in enumerate(zip_longest(*sides)):
        if first is None or second is None:
            more = line + 1 + sum(1 for side in sides for _ in side)  # of the two, one has ended
            counts = (line, more) if first is None else (more, line)
            raise ArgumentError(
                f"{source!r} has {counts[0]:,} lines and {target!r} {counts[1]:,}; "
                "each line needs its translation in the same line of the other file."
            )
        yield Pair(first, second)


def _from_one(path: str, form: Form | None) -> Iterator[Pair]:
    if form is None:
        form = _ENDINGS.get(Path(path[:-3] if _is_gzip(path) else path).suffix.lower())
    for line, text in enumerate(_lines(path), 1):
        form = form or ("jsonl" if text.lstrip().startswith("{") else "tsv")
        where = f"{_named(path)}, line {line:,}"
        yield (_from_tsv(text, where) if form == "tsv" else _from_json(text, where)) if text else Pair("", "")


def _from_tsv(text: str, where: str) -> Pair:
    source, tab, rest = text.partition("\t")
    if not tab:
        raise ArgumentError(
            f"{where}, has no tab; write source⇥target in each line, or give two files with a sentence in "
            "each line."
        )
    return Pair(source, rest.partition("\t")[0])


def _from_json(text: str, where: str) -> Pair:
    try:
        read = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(
            f'{where}, is not JSON ({error}); write {{"source": "…", "target": "…"}} in each line, or say '
            "form='tsv' (--form tsv)."
        ) from None
    match read:
        case {"source": str(source), "target": str(target)}:
            pair = Pair(source, target)
        case _:
            raise ArgumentError(
                f'{where}, has no source and target; write {{"source": "…", "target": "…"}}, both in quotes.'
            )
    try:
        "".join(pair).encode()
    except UnicodeEncodeError:
        raise ArgumentError(
            f"{where}, has half of a surrogate pair (\\ud800 to \\udfff), which is no character; write the "
            "text anew."
        ) from None
    return pair


def _lines(path: str) -> Iterator[str]:
    """The lines of a text file without their ends; str.splitlines would also cut at U+2028 and others."""
    with _opened(path) as file:
        number = 0
        while line := _next_line(file, path, number + 1):
            number += 1
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            try:
                yield line.removesuffix(b"\n").removesuffix(b"\r").decode()
            except UnicodeDecodeError as error:
                wide = number == 1 and line[:2] in (b"\xff\xfe", b"\xfe\xff")
                raise ArgumentError(
                    f"{_named(path)}, line {number:,}, is not UTF-8: byte {error.start + 1} of it is "
                    f"0x{line[error.start]:02x}. Convert it, for example with iconv -f "
                    f"{'UTF-16' if wide else 'LATIN1'} -t UTF-8."
                ) from None


def _next_line(file: BinaryIO, path: str, number: int) -> bytes:
    try:
        line = file.readline(_LINE + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ArgumentError(
            f"{_named(path)}, compressed with gzip, is broken after line {number - 1:,}: {error}. It may "
            "have been cut off: copy or download it again."
        ) from None
    if len(line) > _LINE:
        raise ArgumentError(
            f"{_named(path)}, line {number:,}, has more than {_LINE:,} bytes; give text with a sentence in "
            "each line."
        )
    return line


@contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    """A file, or standard input, as bytes, unpacked."""
    if path == "-":
        yield _unpacked(sys.stdin.buffer)
    else:
        with open(path, "rb") as file:
            yield _unpacked(file)


def _unpacked(file: BinaryIO) -> BinaryIO:
    packed = file.peek(2)[:2] == _GZIP  # type: ignore[attr-defined]  # both are buffered readers
    return gzip.GzipFile(fileobj=file) if packed else file  # type: ignore[return-value]


def _named(path: str) -> str:
    return "standard input" if path == "-" else repr(path)
