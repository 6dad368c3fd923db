"""TMX files round-trip; unsafe or corrupted files are rejected."""

import gzip
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import ArgumentError
from regard.translation.data import tmx
from regard.translation.data.formats import read_pairs, write_pairs
from regard.translation.data.pairs import Pair, normalize_spaces
from regard.translation.data.tmx import read_tmx, write_tmx

letters = st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="\ufffe\uffff")
sentences = st.text(letters, max_size=20).map(normalize_spaces)


def document(*units: str, doctype: str = "", source: str = "en") -> bytes:
    body = "".join(f"<tu>{unit}</tu>" for unit in units)
    header = f'<header srclang="{source}"/>'
    return f'<?xml version="1.0"?>{doctype}<tmx version="1.4">{header}<body>{body}</body></tmx>'.encode()


def segment(language: str, text: str) -> str:
    return f'<tuv xml:lang="{language}"><seg>{text}</seg></tuv>'


def read(content: bytes, languages: tuple[str, str] | None = None) -> list[Pair]:
    return list(read_tmx(io.BytesIO(content), "x.tmx", languages))


@given(pairs=st.lists(st.builds(Pair, sentences, sentences), max_size=5))
def test_pairs_survive(pairs):
    file = io.BytesIO()
    assert write_tmx(file, [(pair, {"x-alignment": "0-0"}) for pair in pairs], ("de", "en")) == len(pairs)
    assert read(file.getvalue()) == pairs


def test_files_and_chunks(tmp_path, monkeypatch):
    pairs = [Pair(f"Satz {i} <b>", f"sentence {i} &") for i in range(20)]
    for name in ("a.tmx", "a.tmx.gz", "a.src-tgt"):
        assert write_pairs(tmp_path / name, pairs) == 20
        monkeypatch.setattr(tmx, "_CHUNK_BYTES", 7)
        assert list(read_pairs(tmp_path / name)) == pairs
    damaged = tmp_path / "b.tmx.gz"
    damaged.write_bytes(gzip.compress(b"<tmx>" + b" " * 1000)[:-9])
    with pytest.raises(ArgumentError, match="the gzip data is corrupted"):
        list(read_pairs(damaged))


def test_languages_and_formatting_codes():
    german = segment("de-DE", 'ein <bpt i="1">{\\b</bpt><hi>Hund</hi><ept i="1">}</ept>\n  bellt')
    english, french = '<tuv lang="EN"><seg>a dog barks</seg></tuv>', segment("fr", "un chien aboie")
    assert read(document(german + english)) == [("a dog barks", "ein Hund bellt")]  # the header's order
    assert read(document(german + english, source="*all*")) == [("ein Hund bellt", "a dog barks")]
    three = document(german + english + french, german + english, french + english)
    assert read(three, ("fr", "en")) == [("un chien aboie", "a dog barks")] * 2
    for tag in ("de", "de-DE", "de_de"):
        assert read(three, (tag, "en")) == [("ein Hund bellt", "a dog barks")] * 2
    assert read(document(german + english).decode().encode("utf-16")) == [("a dog barks", "ein Hund bellt")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            document(segment("de", "x") + segment("en", "y") + segment("fr", "z")),
            r"3 languages \(de, en, fr\)",
        ),
        (
            document(segment("de", "x") + segment("en", "y"), segment("de", "x")),
            "translation unit 2 has de, but",
        ),
        (document("<tuv><seg>x</seg></tuv>"), "<tuv> has no xml:lang attribute"),
        (document(doctype='<!DOCTYPE tmx [<!ENTITY x SYSTEM "file:///etc/passwd">]>'), "the XML entity 'x'"),
        (document(doctype='<!DOCTYPE tmx [<!ENTITY a "aa"><!ENTITY b "&a;&a;">]>'), "the XML entity 'a'"),
        (document(segment("de", "&x;"), doctype='<!DOCTYPE tmx SYSTEM "tmx14.dtd">'), "the XML entity 'x'"),
        (document(segment("de", "x") + segment("en", "y"))[:-9], "line 1: not valid XML"),
        (document("<a>" * 200), "nested more than 100 levels"),
        (b"", "no element found"),
        (b"<html/>", "the document is <html>, not <tmx>"),
        (b'<?xml version="1.0" encoding="none"?><tmx/>', "unknown encoding"),
    ],
)
def test_errors(content, message):
    with pytest.raises(ArgumentError, match=message):
        read(content)


def test_absent_languages_and_endless_segments(monkeypatch):
    content = document(segment("de", "Hund") + segment("en", "dog"))
    with pytest.raises(
        ArgumentError, match="read 1 translation unit, but found none with segments in both 'it' and 'en'"
    ):
        read(content, ("it", "en"))
    monkeypatch.setattr(tmx, "_MAX_UNIT_CHARACTERS", 5)
    with pytest.raises(ArgumentError, match="a translation unit has more than 5 characters"):
        read(content)
