"""Pairs from files: every form says the same, mistakes are named, nothing is dropped in silence or leaks."""

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
from regard.translation.data.pairs import Pair, fingerprint, split_pairs, tidy

DATA = Path(__file__).parents[3] / "shared" / "data"
PAIRS = [
    Pair("two dogs", "zwei Hunde"),
    Pair("", ""),
    Pair('he said "a\u2028b"', "ä\x0b\x85\x1e ß"),
    Pair("x", ""),
    Pair("the last", "der letzte"),
]

# whatever may stand in a line; a carriage return at its end would be a part of it
letters = st.characters(exclude_categories=("Cs",), exclude_characters="\n\r\t\ufeff")
sentences = st.text(letters, max_size=20)
many_pairs = st.lists(st.builds(Pair, sentences, sentences), max_size=20)


def written(folder: Path, pairs: Sequence[Pair], form: str, end: str = "\n") -> list[Path]:
    """The pairs as files of a form: lines (two files), tsv or jsonl."""
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
    """One for all examples of a test."""
    return tmp_path_factory.mktemp("corpus")


@pytest.mark.parametrize("form", ["lines", "tsv", "jsonl"])
@given(pairs=many_pairs)
def test_every_form_gives_the_same_pairs(form, pairs, folder):
    paths = written(folder, pairs, form)
    assert list(read_pairs(*paths)) == pairs
    for path in paths:
        path.write_bytes(gzip.compress(path.read_bytes()))
    assert list(read_pairs(*paths)) == pairs  # by its content, as its name does not say so


@pytest.mark.parametrize("form", ["tsv", "jsonl"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_standard_input_is_read_and_its_form_found(form, pack, tmp_path, monkeypatch):
    content = written(tmp_path, PAIRS, form)[0].read_bytes()
    standard_input(monkeypatch, pack(content))
    assert list(read_pairs("-")) == PAIRS


def test_a_closed_standard_input_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    for read in (read_pairs, read_lines):
        with pytest.raises(ArgumentError, match="standard input is closed"):
            read("-")


@pytest.mark.parametrize("form", ["lines", "tsv", "jsonl"])
def test_windows_files_and_a_byte_order_mark_make_no_difference(form, tmp_path):
    paths = written(tmp_path, PAIRS, form, end="\r\n")
    for path in paths:
        path.write_bytes(
            b"\xef\xbb\xbf" + path.read_bytes().removesuffix(b"\r\n")
        )  # and no end of the last line
    assert list(read_pairs(*paths)) == PAIRS


def test_the_form_is_told_by_the_name_or_by_the_caller(tmp_path):
    odd = Pair('{"source": "a"', "b")
    for name, form in [("x.tsv", None), ("x.TSV.gz", None), ("x.txt", None), ("x", "tsv"), ("x.json", "tsv")]:
        (tmp_path / name).write_text("\t".join(odd) + "\n", "utf-8")
        assert list(read_pairs(tmp_path / name, form=form)) == [odd]
    with pytest.raises(ArgumentError, match="not JSON"):
        list(read_pairs(written(tmp_path, [odd], "tsv")[0], form="jsonl"))


def test_further_columns_and_names_are_ignored(tmp_path):
    (tmp_path / "x.tsv").write_text("a\tb\tCC BY 2.0\t\n", "utf-8")
    (tmp_path / "x.jsonl").write_text('{"id": 7, "target": "b", "source": "a"}\n\n', "utf-8")
    assert list(read_pairs(tmp_path / "x.tsv")) == [Pair("a", "b")]
    assert list(read_pairs(tmp_path / "x.jsonl")) == [Pair("a", "b"), Pair("", "")]


def test_it_is_a_stream(tmp_path):
    (path,) = written(tmp_path, [Pair("a", "b")] * 10, "tsv")
    with path.open("a") as file:
        file.write("no tab\n")
    pairs = read_pairs(path)
    assert [next(pairs) for _ in range(10)] == [Pair("a", "b")] * 10
    with pytest.raises(ArgumentError, match=r"pairs\.tsv', line 11, has no tab"):
        next(pairs)


def latin(folder: Path) -> list[Path]:
    (folder / "a").write_bytes("one\nzwölf\n".encode("latin1"))
    return [folder / "a", folder / "a"]


def wide(folder: Path) -> list[Path]:
    (folder / "a").write_bytes("one\tzwölf\n".encode("utf-16"))
    return [folder / "a"]


def cut_off(folder: Path) -> list[Path]:
    packed = gzip.compress("".join(f"{n}\t{n * n}\n" for n in range(1000)).encode())
    (folder / "a.gz").write_bytes(packed[: len(packed) // 2])
    return [folder / "a.gz"]


def overwritten(folder: Path) -> list[Path]:
    packed = gzip.compress(bytes(10_000))
    (folder / "a.gz").write_bytes(packed[:10] + bytes(5) + packed[15:])
    return [folder / "a.gz"]


def unequal(folder: Path) -> list[Path]:
    (folder / "a").write_text("1\n2\n3\n")
    (folder / "b").write_text("1\n")
    return [folder / "a", folder / "b"]


def json_lines(line: str) -> Callable[[Path], list[Path]]:
    def write(folder: Path) -> list[Path]:
        (folder / "a.jsonl").write_text('{"source": "a", "target": "b"}\n' + line + "\n", "utf-8")
        return [folder / "a.jsonl"]

    return write


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda folder: [folder / "none"], "there is no file '.*none'; check"),
        (lambda folder: [folder], "is a folder; name a file"),
        (latin, r"a', line 2, is not UTF-8: byte 3 of it is 0xf6\. .*iconv -f LATIN1"),
        (wide, r"a', line 1, is not UTF-8: byte 1 .*iconv -f UTF-16"),
        (unequal, r"a' has 3 lines and '.*b' 1; each line needs"),
        (lambda folder: unequal(folder)[::-1], r"b' has 1 lines and '.*a' 3; each line needs"),
        (cut_off, r"a\.gz', compressed with gzip, is broken after line \d+: .*copy or download it again"),
        (overwritten, r"a\.gz', compressed with gzip, is broken after line 0: "),
        (json_lines('{"source": "a"'), r"a\.jsonl', line 2, is not JSON \(.*form='tsv'"),
        (json_lines("[" * 100_000), r"a\.jsonl', line 2, is not JSON"),
        (json_lines('{"source": "a"}'), r"a\.jsonl', line 2, has no source and target"),
        (json_lines('{"source": "a", "target": 2}'), r"a\.jsonl', line 2, has no source and target"),
        (json_lines('["a", "b"]'), r"a\.jsonl', line 2, has no source and target"),
        (
            json_lines(r'{"source": "\ud800", "target": ""}'),
            r"a\.jsonl', line 2, has half of a surrogate pair",
        ),
    ],
)
def test_a_mistake_in_a_file_is_named_with_its_cure(write, message, tmp_path):
    with pytest.raises(ArgumentError, match=message):
        list(read_pairs(*write(tmp_path)))


def test_a_line_without_end_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("regard.translation.data.formats._LINE", 1000)
    (tmp_path / "a").write_bytes(b"x" * 1000 + b"\ty\n")
    with pytest.raises(ArgumentError, match="line 1, has more than 1,000 bytes"):
        list(read_pairs(tmp_path / "a"))


def test_what_cannot_be_meant_is_refused_at_once(tmp_path):
    (path,) = written(tmp_path, PAIRS, "tsv")
    for arguments, form, message in [
        ([path], "csv", "form='csv'; give 'tsv' or 'jsonl'"),
        ([path, path], "tsv", "two files and form='tsv'"),
        (["-", "-"], None, "standard input is given twice"),
        ([path, tmp_path / "none"], None, "there is no file"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            read_pairs(*arguments, form=form)


@given(pairs=many_pairs, name=st.sampled_from(["pairs.tsv", "pairs.tsv.gz"]))
def test_what_is_written_is_read_again(pairs, name, folder):
    path = folder / "new" / name
    assert write_pairs(path, iter(pairs)) == len(pairs)
    assert list(read_pairs(path)) == pairs
    assert path.read_bytes().startswith(b"\x1f\x8b") == name.endswith(".gz")


def test_equal_pairs_give_equal_files_whatever_their_names_and_the_time(tmp_path, monkeypatch):
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


def test_the_name_tells_the_form_in_capitals_too(tmp_path):
    (tmp_path / "A.TSV.GZ").write_bytes(gzip.compress(b"{a\tb\n"))
    assert list(read_pairs(tmp_path / "A.TSV.GZ")) == [Pair("{a", "b")]


def test_what_does_not_fit_in_a_line_is_not_written(tmp_path):
    for wrong in ("a\tb", "a\nb", "a\r"):
        with pytest.raises(ArgumentError, match="pair 2 has a tab or the end of a line"):
            write_pairs(tmp_path / "x", [PAIRS[0], Pair("a", wrong)])
    assert not list(tmp_path.iterdir())


def test_lines_end_where_editors_end_them(tmp_path):
    (tmp_path / "x").write_bytes("a\u2028b\x85c\r\n\nd\re\x0c".encode())
    assert list(read_lines(tmp_path / "x")) == ["a\u2028b\x85c", "", "d\re\x0c"]
    with pytest.raises(ArgumentError, match="there is no file"):
        read_lines(tmp_path / "y")


# cleaning


@given(pairs=many_pairs, longest=st.integers(1, 30), ratio=st.floats(1, 5))
def test_each_pair_is_kept_or_counted(pairs, longest, ratio):
    cleaned = clean_pairs(pairs, longest=longest, ratio=ratio)
    kept = list(cleaned)
    dropped = cleaned.dropped
    assert (dropped.seen, dropped.total) == (len(pairs), len(pairs) - len(kept))
    assert kept == [pair for pair in (Pair(*map(tidy, pair)) for pair in pairs) if pair in kept]
    assert dropped.empty == sum(not tidy(pair.source) or not tidy(pair.target) for pair in pairs)
    for pair in kept:
        shorter, longer = sorted(map(len, pair))
        assert 0 < longer <= longest
        assert longer <= ratio * shorter + 40
    assert list(clean_pairs(kept, longest=longest, ratio=ratio)) == kept


def test_the_report_says_how_many_and_why():
    pairs = [Pair("a", "b")] * 1000 + [
        Pair(" \u2028", "b"),
        Pair("a" * 2001, "b" * 2000),
        Pair("a", "b" * 99),
    ]
    cleaned = clean_pairs(pairs)
    assert len(list(cleaned)) == 1000
    assert str(cleaned.dropped) == (
        "dropped 3 of 1,003 pairs: 1 with an empty side, 1 longer than 2,000 characters, "
        "1 with sides of very unequal length"
    )
    assert str(LengthFilter(9, 4, 0, "pieces")) == "dropped none of 0 pairs"


@pytest.mark.parametrize(
    "wrong", [{"longest": 0}, {"ratio": 0.5}, {"ratio": float("inf")}, {"ratio": float("nan")}]
)
def test_limits_that_let_nothing_through_are_refused(wrong):
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        clean_pairs([], **wrong)


# splitting


@given(
    sources=st.lists(st.integers(0, 200), max_size=400),
    dev=st.integers(0, 30),
    test=st.integers(0, 30),
    seed=st.integers(),
)
def test_no_source_is_in_two_parts_and_no_pair_is_lost(sources, dev, test, seed):
    pairs = [Pair(f"source {'  ' * (n % 3)}{source}", f"target {n}") for n, source in enumerate(sources)]
    parts = split_pairs(pairs, dev=dev, test=test, seed=seed)
    train = list(parts.train)
    assert sorted([*train, *parts.dev, *parts.test]) == sorted(pairs)
    kinds = [{tidy(pair.source) for pair in part} for part in (train, parts.dev, parts.test)]
    assert sum(map(len, kinds)) == len(set.union(*kinds)) == len(set(sources))
    tenth = len(set(sources)) // 10
    assert (len(kinds[1]), len(kinds[2])) == (min(dev, tenth), min(test, tenth))
    assert list(parts.train) == train  # and again


def test_the_split_does_not_depend_on_the_order():
    pairs = [Pair(f"sentence {n}", f"Satz {n}") for n in range(5000)]
    parts, turned = split_pairs(pairs, dev=100, test=50), split_pairs(pairs[::-1], dev=100, test=50)
    assert (set(parts.dev), set(parts.test)) == (set(turned.dev), set(turned.test))
    assert set(split_pairs(pairs, dev=200, test=50).test) == set(parts.test)
    assert set(split_pairs(pairs, dev=100, test=50, seed=1).dev) != set(parts.dev)


def test_it_is_the_same_on_every_machine():
    assert fingerprint("zwei Hunde", seed=3) == 0x1637FBEBC42853B8  # b2sum -l 64 of "3 zwei Hunde"


def test_splitting_reads_a_function_anew_and_refuses_what_is_read_once():
    def read() -> list[Pair]:
        return [Pair(f"sentence {n}", f"Satz {n}") for n in range(100)]

    parts = split_pairs(read, dev=5)
    assert (len(list(parts.train)), len(list(parts.train)), len(parts.dev)) == (95, 95, 5)
    with pytest.raises(DTypeError, match="a list_iterator, which can be read only once"):
        split_pairs(iter(read()))
    with pytest.raises(ArgumentError, match="split got dev=-1"):
        split_pairs(read, dev=-1)


def test_a_corpus_is_never_held_in_memory():
    def read(size: int) -> Callable[[], object]:
        return lambda: (Pair(f"sentence {n}", f"Satz {n}") for n in range(size))

    peaks = []
    for size in (1000, 8000):
        tracemalloc.start()
        parts = split_pairs(read(size), dev=10)  # type: ignore[arg-type]
        assert sum(1 for _ in clean_pairs(parts.train)) == size - 10
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


def test_real_text_is_read_whole_and_little_of_it_is_dropped():
    folder = DATA / "multi30k"
    if not folder.exists():
        pytest.skip("needs ../shared/data/multi30k")
    pairs = clean_pairs(read_pairs(folder / "train.de", folder / "train.en"))
    assert sum(1 for _ in pairs) == 29_000 - pairs.dropped.total
    assert pairs.dropped.seen == 29_000
    assert pairs.dropped.total <= 3
