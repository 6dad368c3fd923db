"""Files of pairs: all formats are equivalent, errors name file and line, splits do not leak."""

import gzip
import io
import json
import os
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import ArgumentError, DTypeError
from regard.translation.data.cleaning import LengthFilter, clean_pairs
from regard.translation.data.formats import read_lines, read_pairs, write_pairs
from regard.translation.data.pairs import Pair, fingerprint, normalize_spaces, split_pairs

DATA = Path(__file__).parents[4] / "shared" / "data"
PAIRS = [
    Pair("two dogs", "zwei Hunde"),
    Pair("", ""),
    Pair('he said "a\u2028b"', "ä\x0b\x85\x1e ß"),
    Pair("x", ""),
    Pair("the last", "der letzte"),
]

# any content of a line; a final carriage return would belong to the line break
letters = st.characters(exclude_categories=("Cs",), exclude_characters="\n\r\t\ufeff")
sentences = st.text(letters, max_size=20)
many_pairs = st.lists(st.builds(Pair, sentences, sentences), max_size=20)


def written(folder: Path, pairs: Sequence[Pair], form: str, end: str = "\n") -> list[Path]:
    """Write pairs as lines (two files), tsv or jsonl."""
    if form == "lines":
        texts = {f"{side}.txt": [getattr(pair, side) for pair in pairs] for side in Pair._fields}
    elif form == "tsv":
        texts = {"pairs.tsv": ["\t".join(pair) for pair in pairs]}
    else:
        texts = {"pairs.jsonl": [json.dumps(pair._asdict()) for pair in pairs]}
    paths = []
    for name, lines in texts.items():
        paths.append(folder / name)
        paths[-1].write_bytes("".join(line + end for line in lines).encode())
    return paths


def standard_input(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(content))))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One folder for all examples of a test."""
    return tmp_path_factory.mktemp("corpus")


@pytest.mark.parametrize("form", ["lines", "tsv", "jsonl"])
@given(pairs=many_pairs)
def test_every_format_gives_the_same_pairs(form, pairs, folder):
    paths = written(folder, pairs, form)
    assert list(read_pairs(*paths)) == pairs
    for path in paths:
        path.write_bytes(gzip.compress(path.read_bytes()))
    assert list(read_pairs(*paths)) == pairs  # the format is detected from the content


@pytest.mark.parametrize("form", ["tsv", "jsonl"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_the_format_of_standard_input_is_detected(form, pack, tmp_path, monkeypatch):
    content = written(tmp_path, PAIRS, form)[0].read_bytes()
    standard_input(monkeypatch, pack(content))
    assert list(read_pairs("-")) == PAIRS


def test_a_closed_standard_input_is_rejected(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    for read in (read_pairs, read_lines):
        with pytest.raises(ArgumentError, match="Standard input is closed"):
            read("-")


@pytest.mark.parametrize("form", ["lines", "tsv", "jsonl"])
def test_windows_line_breaks_and_byte_order_marks_are_ignored(form, tmp_path):
    paths = written(tmp_path, PAIRS, form, end="\r\n")
    for path in paths:
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().removesuffix(b"\r\n"))  # no final line break
    assert list(read_pairs(*paths)) == PAIRS


def test_the_format_comes_from_the_extension_or_the_argument(tmp_path):
    odd = Pair('{"source": "a"', "b")
    for name, form in [("x.tsv", None), ("x.TSV.gz", None), ("x.txt", None), ("x", "tsv"), ("x.json", "tsv")]:
        (tmp_path / name).write_text("\t".join(odd) + "\n", "utf-8")
        assert list(read_pairs(tmp_path / name, format=form)) == [odd]
    with pytest.raises(ArgumentError, match="not valid JSON"):
        list(read_pairs(written(tmp_path, [odd], "tsv")[0], format="jsonl"))


def test_other_columns_and_keys_are_ignored(tmp_path):
    (tmp_path / "x.tsv").write_text("a\tb\tCC BY 2.0\t\n", "utf-8")
    (tmp_path / "x.jsonl").write_text('{"id": 7, "target": "b", "source": "a"}\n\n', "utf-8")
    assert list(read_pairs(tmp_path / "x.tsv")) == [Pair("a", "b")]
    assert list(read_pairs(tmp_path / "x.jsonl")) == [Pair("a", "b"), Pair("", "")]


def test_pairs_are_streamed(tmp_path):
    (path,) = written(tmp_path, [Pair("a", "b")] * 10, "tsv")
    with path.open("a") as file:
        file.write("no tab\n")
    pairs = read_pairs(path)
    assert [next(pairs) for _ in range(10)] == [Pair("a", "b")] * 10
    with pytest.raises(ArgumentError, match=r"pairs\.tsv', line 11: no tab"):
        next(pairs)


JSON = b'{"source": "a", "target": "b"}\n'
GZIP = gzip.compress("".join(f"{n}\t{n * n}\n" for n in range(1000)).encode())
THREE, ONE = {"a": b"1\n2\n3\n"}, {"b": b"1\n"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"none": None}, "No such file: '.*none'"),
        ({".": None}, "is a folder. Pass a file"),
        (
            {"a": "one\nzwölf\n".encode("latin1"), "b": b""},
            r"a', line 2: not UTF-8; byte 3 is 0xf6\. .*f LATIN1",
        ),
        ({"a": "one\tzwölf\n".encode("utf-16")}, r"a', line 1: not UTF-8; byte 1 .*iconv -f UTF-16"),
        (THREE | ONE, r"a' has 3 lines, but '.*b' has 1\. Line n"),
        (ONE | THREE, r"b' has 1 line, but '.*a' has 3\. Line n"),
        (
            {"a.gz": GZIP[: len(GZIP) // 2]},
            r"a\.gz': the gzip data is corrupted after line \d+ .*copy or download",
        ),
        ({"a.gz": GZIP[:10] + bytes(5) + GZIP[15:]}, r"a\.gz': the gzip data is corrupted after line 0 "),
        ({"a.jsonl": JSON + b'{"source": "a"'}, r"a\.jsonl', line 2: not valid JSON \(.*format='tsv'"),
        ({"a.jsonl": JSON + b"[" * 100_000}, r"a\.jsonl', line 2: not valid JSON"),
        (
            {"a.jsonl": JSON + b'{"source": "a"}'},
            r"a\.jsonl', line 2: expected .*, got '\{\"source\": \"a\"\}'",
        ),
        ({"a.jsonl": JSON + b'{"source": "a", "target": 2}'}, "line 2: expected .* with two strings, got"),
        ({"a.jsonl": JSON + b'["a", "b"]'}, "line 2: expected .* with two strings, got"),
        ({"a.jsonl": JSON + rb'{"source": "\ud800", "target": ""}'}, "line 2: contains a lone surrogate"),
    ],
)
def test_errors_in_files_name_the_line_and_the_cure(files, message, tmp_path):
    for name, content in files.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
    with pytest.raises(ArgumentError, match=message):
        list(read_pairs(*(tmp_path / name for name in files)))


def test_an_endless_line_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("regard.translation.data.formats._MAX_LINE_BYTES", 1000)
    (tmp_path / "a").write_bytes(b"x" * 1000 + b"\ty\n")
    with pytest.raises(ArgumentError, match="line 1: longer than 1,000 bytes"):
        list(read_pairs(tmp_path / "a"))


def test_invalid_arguments_are_rejected_immediately(tmp_path):
    (path,) = written(tmp_path, PAIRS, "tsv")
    for arguments, form, message in [
        ([path], "xml", "Unknown format 'xml'. Choose from 'tsv', 'csv', 'jsonl', 'moses', 'tmx'"),
        ([path, path], "tsv", "format='tsv' .* two files were passed"),
        (["-", "-"], None, "Source and target are both standard input"),
        ([path, tmp_path / "none"], None, "No such file"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            read_pairs(*arguments, format=form)


@given(pairs=many_pairs, name=st.sampled_from(["pairs.tsv", "pairs.tsv.gz", "pairs.jsonl"]))
def test_write_and_read(pairs, name, folder):
    path = folder / "new" / name
    assert write_pairs(path, iter(pairs)) == len(pairs)
    assert list(read_pairs(path)) == pairs
    assert path.read_bytes().startswith(b"\x1f\x8b") == name.endswith(".gz")


def test_equal_pairs_give_equal_files_for_any_name_and_time(tmp_path, monkeypatch):
    now = iter([1e9, 1.5e9, 1.6e9])
    monkeypatch.setattr("gzip.time.time", lambda: next(now))
    names = ["a.tsv.gz", "B.TSV.GZ", os.fsencode("c.Gz")]
    for name in names:
        path = os.path.join(tmp_path if isinstance(name, str) else os.fsencode(tmp_path), name)
        assert write_pairs(path, PAIRS) == len(PAIRS)
        assert list(read_pairs(path)) == PAIRS
        assert len(list(read_lines(path))) == len(PAIRS)
    contents = {path.read_bytes() for path in tmp_path.iterdir()}
    assert len(contents) == 1
    assert contents.pop().startswith(b"\x1f\x8b")


def test_tabs_and_line_breaks_cannot_be_written(tmp_path):
    for wrong in ("a\tb", "a\nb", "a\r"):
        with pytest.raises(ArgumentError, match="Pair 2 contains a tab or a line break"):
            write_pairs(tmp_path / "x", [PAIRS[0], Pair("a", wrong)])
    assert not list(tmp_path.iterdir())


def test_only_line_feeds_end_lines(tmp_path):
    (tmp_path / "x").write_bytes("a\u2028b\x85c\r\n\nd\re\x0c".encode())
    assert list(read_lines(tmp_path / "x")) == ["a\u2028b\x85c", "", "d\re\x0c"]
    with pytest.raises(ArgumentError, match="No such file"):
        read_lines(tmp_path / "y")


# cleaning


@given(pairs=many_pairs, max_length=st.integers(1, 30), max_ratio=st.floats(1, 5))
def test_each_pair_is_kept_or_counted(pairs, max_length, max_ratio):
    cleaned = clean_pairs(pairs, max_length=max_length, max_ratio=max_ratio)
    kept = list(cleaned)
    dropped = cleaned.dropped
    assert (dropped.seen, dropped.total) == (len(pairs), len(pairs) - len(kept))
    assert kept == [pair for pair in (Pair(*map(normalize_spaces, pair)) for pair in pairs) if pair in kept]
    assert dropped.empty == sum(
        not normalize_spaces(pair.source) or not normalize_spaces(pair.target) for pair in pairs
    )
    for pair in kept:
        shorter, longer = sorted(map(len, pair))
        assert 0 < longer <= max_length
        assert longer <= max_ratio * shorter + 40
    assert list(clean_pairs(kept, max_length=max_length, max_ratio=max_ratio)) == kept


def test_the_filter_reports_counts_and_reasons():
    pairs = [Pair("a", "b")] * 1000 + [
        Pair(" \u2028", "b"),
        Pair("a" * 2001, "b" * 2000),
        Pair("a", "b" * 99),
    ]
    cleaned = clean_pairs(pairs)
    assert len(list(cleaned)) == 1000
    assert str(cleaned.dropped) == (
        "dropped 3 of 1,003 pairs: 1 with an empty side, 1 longer than 2,000 characters, "
        "1 with very different lengths"
    )
    assert str(LengthFilter(9, 4, 0, "tokens")) == "dropped none of 0 pairs"


@pytest.mark.parametrize(
    "wrong", [{"max_length": 0}, {"max_ratio": 0.5}, {"max_ratio": float("inf")}, {"max_ratio": float("nan")}]
)
def test_limits_that_drop_everything_are_rejected(wrong):
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        clean_pairs([], **wrong)


# splitting


@given(
    sources=st.lists(st.integers(0, 200), max_size=400),
    dev=st.integers(0, 30),
    test=st.integers(0, 30),
    seed=st.integers(),
)
def test_no_source_is_in_two_splits_and_no_pair_is_lost(sources, dev, test, seed):
    pairs = [Pair(f"source {'  ' * (n % 3)}{source}", f"target {n}") for n, source in enumerate(sources)]
    splits = split_pairs(pairs, dev=dev, test=test, seed=seed)
    train = list(splits.train)
    assert sorted([*train, *splits.dev, *splits.test]) == sorted(pairs)
    kinds = [{normalize_spaces(pair.source) for pair in part} for part in (train, splits.dev, splits.test)]
    assert sum(map(len, kinds)) == len(set.union(*kinds)) == len(set(sources))
    tenth = len(set(sources)) // 10
    assert (len(kinds[1]), len(kinds[2])) == (min(dev, tenth), min(test, tenth))
    assert list(splits.train) == train  # a second iteration gives the same


def test_the_split_does_not_depend_on_the_order():
    pairs = [Pair(f"sentence {n}", f"Satz {n}") for n in range(5000)]
    splits, reversed_splits = split_pairs(pairs, dev=100, test=50), split_pairs(pairs[::-1], dev=100, test=50)
    assert (set(splits.dev), set(splits.test)) == (set(reversed_splits.dev), set(reversed_splits.test))
    assert set(split_pairs(pairs, dev=200, test=50).test) == set(splits.test)
    assert set(split_pairs(pairs, dev=100, test=50, seed=1).dev) != set(splits.dev)


def test_the_fingerprint_is_the_same_on_every_machine():
    assert fingerprint("zwei Hunde", seed=3) == 0x1637FBEBC42853B8  # b2sum -l 64 of "3 zwei Hunde"


def test_split_pairs_accepts_functions_and_rejects_iterators():
    def read() -> list[Pair]:
        return [Pair(f"sentence {n}", f"Satz {n}") for n in range(100)]

    splits = split_pairs(read, dev=5)
    assert (len(list(splits.train)), len(list(splits.train)), len(splits.dev)) == (95, 95, 5)
    with pytest.raises(DTypeError, match="a list_iterator, which can be read only once"):
        split_pairs(iter(read()))
    with pytest.raises(ArgumentError, match="split_pairs got dev=-1"):
        split_pairs(read, dev=-1)


def test_a_corpus_is_never_held_in_memory():
    def read(size: int) -> Callable[[], object]:
        return lambda: (Pair(f"sentence {n}", f"Satz {n}") for n in range(size))

    peaks = []
    for size in (1000, 8000):
        tracemalloc.start()
        splits = split_pairs(read(size), dev=10)
        assert sum(1 for _ in clean_pairs(splits.train)) == size - 10
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


def test_little_of_a_real_corpus_is_dropped():
    folder = DATA / "multi30k"
    if not folder.exists():
        pytest.skip("needs ../shared/data/multi30k")
    pairs = clean_pairs(read_pairs(folder / "train.de", folder / "train.en"))
    assert sum(1 for _ in pairs) == 29_000 - pairs.dropped.total
    assert pairs.dropped.seen == 29_000
    assert pairs.dropped.total <= 3
