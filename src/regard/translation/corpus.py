"""Pairs of sentences: read from files as a stream, cleaned with counts, and split so that nothing leaks.

    read_pairs → clean → split → (tokens, store)

Nothing here holds a whole corpus in memory.
"""

import gzip
import json
import math
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, get_args

from regard.errors import ArgumentError, DTypeError
from regard.mechanism.checks import count, number
from regard.mechanism.files import writing

Form = Literal["tsv", "jsonl"]
_Path = str | os.PathLike[str]

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


class Pair(NamedTuple):
    """A sentence and its translation.

    >>> from regard.translation.corpus import Pair
    >>> Pair("two dogs", "zwei Hunde").target
    'zwei Hunde'
    """

    source: str
    target: str


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
    >>> from regard.translation.corpus import read_pairs
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "pairs.tsv")
    ...     written = path.write_text("two dogs\tzwei Hunde\n", encoding="utf-8")
    ...     print(*read_pairs(path))
    Pair(source='two dogs', target='zwei Hunde')
    """
    if form is not None and form not in get_args(Form):
        raise ArgumentError(f"read_pairs got form={form!r}; give 'tsv' or 'jsonl'.")
    if target is None:
        _check_readable(source)
        return _from_one(source, form)
    if form is not None:
        raise ArgumentError(
            f"read_pairs got two files and form={form!r}, which is about one; leave out form, or a file."
        )
    if os.fspath(source) == os.fspath(target) == "-":
        raise ArgumentError(
            "read_pairs got standard input twice; give one file, or pairs as TSV in standard input alone."
        )
    _check_readable(source)
    _check_readable(target)
    return _from_two(source, target)


def read_lines(path: _Path) -> Iterator[str]:
    """The lines of one text file, or of "-", standard input: read as `read_pairs` reads them.

    >>> import pathlib, tempfile
    >>> from regard.translation.corpus import read_lines
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     written = pathlib.Path(folder, "text").write_bytes("two\\u2028dogs\\r\\nbark".encode())
    ...     print(list(read_lines(f"{folder}/text")))
    ['two\\u2028dogs', 'bark']
    """
    _check_readable(path)
    return _lines(path)


def write_pairs(path: _Path, pairs: Iterable[Pair]) -> int:
    """Write pairs as TSV while they come, and say how many they were; the file gets its name at the end.

    >>> import tempfile
    >>> from regard.translation.corpus import Pair, read_pairs, write_pairs
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     print(write_pairs(f"{folder}/pairs.tsv", [Pair("two dogs", "zwei Hunde")]))
    ...     print(*read_pairs(f"{folder}/pairs.tsv"))
    1
    Pair(source='two dogs', target='zwei Hunde')
    """
    written = 0
    with writing(path) as file:
        for written, (source, target) in enumerate(pairs, 1):
            if any(end in source or end in target for end in "\t\n\r"):
                raise ArgumentError(
                    f"pair {written:,} has a tab or the end of a line within a sentence, which a line of TSV "
                    "cannot hold; clean(pairs) makes blanks of them."
                )
            file.write(f"{source}\t{target}\n".encode())
    return written


@dataclass
class Dropped:
    """What limits there are for a pair, and how many pairs were dropped for which reason.

    longest: of a side, at most. ratio, slack: neither side may be longer than `ratio` times the other and
    `slack` more. unit: what is counted.

    >>> from regard.translation.corpus import Dropped
    >>> dropped = Dropped(longest=256, ratio=4, slack=10, unit="pieces")
    >>> [dropped.keeps(*sizes) for sizes in [(7, 9), (0, 2), (3, 300), (3, 23)]]
    [True, False, False, False]
    >>> print(dropped)
    dropped 3 of 4 pairs: 1 with an empty side, 1 longer than 256 pieces, 1 with sides of very unequal length
    """

    longest: int
    ratio: float
    slack: int
    unit: str
    seen: int = 0
    empty: int = 0
    long: int = 0
    unequal: int = 0

    def __post_init__(self) -> None:
        count("longest", self.longest, least=1)
        number("ratio", self.ratio, least=1, below=math.inf)
        count("slack", self.slack)

    @property
    def total(self) -> int:
        """How many were dropped."""
        return self.empty + self.long + self.unequal

    def keeps(self, source: int, target: int) -> bool:
        """Whether a pair whose sides have these sizes is kept; it is counted."""
        shorter, longer = sorted((source, target))
        self.seen += 1
        if not shorter:
            self.empty += 1
        elif longer > self.longest:
            self.long += 1
        elif longer > self.ratio * shorter + self.slack:
            self.unequal += 1
        else:
            return True
        return False

    def __str__(self) -> str:
        reasons = [
            (self.empty, "with an empty side"),
            (self.long, f"longer than {self.longest:,} {self.unit}"),
            (self.unequal, "with sides of very unequal length"),
        ]
        said = ", ".join(f"{many:,} {reason}" for many, reason in reasons if many)
        pairs = f"{self.seen:,} pair{'' if self.seen == 1 else 's'}"
        return f"dropped {self.total:,} of {pairs}: {said}" if said else f"dropped none of {pairs}"


class Cleaned(Iterator[Pair]):
    """Pairs that are worth training on, as they come; `dropped` counts the others.

    >>> from regard.translation.corpus import Cleaned, Dropped, Pair
    >>> pairs = Cleaned([Pair(" two  dogs", "zwei Hunde"), Pair("", "nichts")], Dropped(20, 4, 0, "letters"))
    >>> next(pairs), pairs.dropped.seen
    (Pair(source='two dogs', target='zwei Hunde'), 1)
    """

    def __init__(self, pairs: Iterable[Pair], dropped: Dropped) -> None:
        self.dropped = dropped
        self._pairs = iter(pairs)

    def __next__(self) -> Pair:
        for source, target in self._pairs:
            pair = Pair(tidy(source), tidy(target))
            if self.dropped.keeps(len(pair.source), len(pair.target)):
                return pair
        raise StopIteration


def clean(pairs: Iterable[Pair], *, longest: int = 2000, ratio: float = 4.0) -> Cleaned:
    """Drop pairs with an empty side, over-long ones and wildly unequal ones; white space becomes one blank.

    longest: characters of a sentence at most. ratio: neither side may have more than `ratio` times the
        other's characters and 40 more (short sentences differ much: "Ja." may be "That's what I think too.").

    The result is read once, as it comes, and its `dropped` says how many were dropped and why.

    >>> from regard.translation.corpus import Pair, clean
    >>> pairs = clean([Pair(" two  dogs", "zwei Hunde"), Pair("a dog", ""), Pair("No.", "Nein. " * 20)])
    >>> list(pairs)
    [Pair(source='two dogs', target='zwei Hunde')]
    >>> print(pairs.dropped)
    dropped 2 of 3 pairs: 1 with an empty side, 1 with sides of very unequal length
    """
    return Cleaned(pairs, Dropped(longest, ratio, slack=40, unit="characters"))


def tidy(text: str) -> str:
    """A sentence in one line, with single blanks: no tab, no line break, none of Unicode's other blanks.

    >>> from regard.translation.corpus import tidy
    >>> tidy(" two\\tdogs\\u2028bark ")
    'two dogs bark'
    """
    return " ".join(text.split())


class Parts(NamedTuple):
    """A corpus in three parts without a common source sentence; `train` is read anew whenever it is iterated.

    >>> from regard.translation.corpus import Pair, Parts
    >>> Parts(train=[Pair("two dogs", "zwei Hunde")], dev=[], test=[]).dev
    []
    """

    train: Iterable[Pair]
    dev: list[Pair]
    test: list[Pair]


def split(
    pairs: Sequence[Pair] | Callable[[], Iterable[Pair]], *, dev: int = 1000, test: int = 0, seed: int = 0
) -> Parts:
    """Hold back pairs to judge by; all pairs with one source sentence fall into the same part.

    pairs: a list, or a function that reads the pairs anew: `lambda: clean(read_pairs("a.en", "a.de"))`.
    dev, test: how many distinct source sentences each gets, but never more than a tenth of those there are.

    They are those with the lowest hashes of sentence and seed, whatever the order of the corpus. One pass
    finds them, and `train` is what is left over in the next; only dev and test are kept in memory.

    >>> from regard.translation.corpus import Pair, split
    >>> parts = split([Pair(f"{n // 2} dogs", f"{n} Hunde") for n in range(100)], dev=3, test=1000)
    >>> len(list(parts.train)), len(parts.dev), len(parts.test)
    (84, 6, 10)
    """
    count("split got dev", dev)
    count("split got test", test)
    if isinstance(pairs, Iterator):
        raise DTypeError(
            f"split got a {type(pairs).__name__}, which can be read only once; give a list, or a function "
            "that reads anew: lambda: clean(read_pairs(...))."
        )
    read = pairs if callable(pairs) else lambda: pairs
    held, distinct = _lowest(read(), 10 * max(dev, test), seed)
    test, dev = min(test, distinct // 10), min(dev, distinct // 10)
    ranked = sorted(held)
    parts = [
        [pair for key, some in held.items() if key in keys for pair in some]
        for keys in (set(ranked[:test]), set(ranked[test : test + dev]))
    ]
    bound = ranked[test + dev] if ranked else 0
    return Parts(_Above(read, bound, seed), dev=parts[1], test=parts[0])


@dataclass(frozen=True)
class _Above:
    """The pairs whose source has a hash that is not below a bound."""

    read: Callable[[], Iterable[Pair]]
    bound: int
    seed: int

    def __iter__(self) -> Iterator[Pair]:
        return (pair for pair in self.read() if fingerprint(pair.source, self.seed) >= self.bound)


def fingerprint(sentence: str, seed: int = 0) -> int:
    """A number below 2⁶⁴ that looks random and is the same on every machine, unlike Python's hash.

    >>> from regard.translation.corpus import fingerprint
    >>> fingerprint("two dogs") == fingerprint(" two  dogs ") != fingerprint("two dogs", seed=1)
    True
    """
    return int.from_bytes(blake2b(f"{seed} {tidy(sentence)}".encode(), digest_size=8).digest())


def _lowest(pairs: Iterable[Pair], most: int, seed: int) -> tuple[dict[int, list[Pair]], int]:
    """The pairs of the `most` distinct sources with the lowest hashes, and how many distinct ones there are,
    counted up to `most`."""
    held: dict[int, list[Pair]] = {}
    bound = 2**64 if most else 0
    for pair in pairs:
        key = fingerprint(pair.source, seed)
        if key < bound:
            held.setdefault(key, []).append(pair)
            if len(held) > 2 * most:  # rarely, so that it costs little
                bound = sorted(held)[most]
                held = {key: some for key, some in held.items() if key < bound}
    return held, min(len(held), most)


def _check_readable(path: _Path) -> None:
    """What can be known before a file is opened; pipes and devices are fine."""
    name = os.fspath(path)
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


def _from_two(source: _Path, target: _Path) -> Iterator[Pair]:
    sides = _lines(source), _lines(target)
    for line, (first, second) in enumerate(zip_longest(*sides)):
        if first is None or second is None:
            more = line + 1 + sum(1 for side in sides for _ in side)  # of the two, one has ended
            counts = (line, more) if first is None else (more, line)
            raise ArgumentError(
                f"{os.fspath(source)!r} has {counts[0]:,} lines and {os.fspath(target)!r} {counts[1]:,}; "
                "each line needs its translation in the same line of the other file."
            )
        yield Pair(first, second)


def _from_one(path: _Path, form: Form | None) -> Iterator[Pair]:
    if form is None:
        form = _ENDINGS.get(Path(os.fspath(path).removesuffix(".gz")).suffix.lower())
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
            "form='tsv'."
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


def _lines(path: _Path) -> Iterator[str]:
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


def _next_line(file: BinaryIO, path: _Path, number: int) -> bytes:
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
def _opened(path: _Path) -> Iterator[BinaryIO]:
    """A file, or standard input, as bytes, unpacked."""
    if os.fspath(path) == "-":
        yield _unpacked(sys.stdin.buffer)
    else:
        with open(path, "rb") as file:
            yield _unpacked(file)


def _unpacked(file: BinaryIO) -> BinaryIO:
    packed = file.peek(2)[:2] == _GZIP  # type: ignore[attr-defined]  # both are buffered readers
    return gzip.GzipFile(fileobj=file) if packed else file  # type: ignore[return-value]


def _named(path: _Path) -> str:
    return "standard input" if os.fspath(path) == "-" else repr(os.fspath(path))
