"""The static site's tokenizers match Python's on generated sentences with rare characters."""

import json
from pathlib import Path
from random import Random

import pytest
from hypothesis import settings

from regard.app.site.models import _export_word_piece, export_tokenizer
from regard.translation import Tokenizer
from tests.app.site.backend import needs_deno, run_script
from tests.browser.visit import needs_encoder
from tests.cases import looped

pytestmark = needs_deno
KINDS = ("unigram", "bpe", "words", "characters")
WORDS = "the dogs bark at red moon Mond dreiundzwanzig fünf Straße naïve café l'été 1,234.5 well-fed"
# ligatures, full width, combining marks, spaces of all kinds, control characters, emoji, other scripts
RARE = (
    *("ﬁ", "ｱ", "Ⅳ", "①", "é", "e\u0301", "½", "™", "…", "～", "▁"),
    *("\u200b", "\u00ad", "\u2009", "\x07", "\t"),
    *("漢字", "한글", "مرحبا", "😀", "👩\u200d👧", "İ", "ß", "Ω", "ﷺ", "\ufeff", "\x85", "\xa0", "\u3000"),
)


def make_lines() -> list[str]:
    """Return random sentences from words, pieces of words and rare characters; more in `make test-slow`."""
    random, count = Random(0), 16 * settings().max_examples

    def word() -> str:
        text = random.choice(WORDS.split())
        if random.random() < 0.3:
            text = text[: random.randint(1, len(text))] + random.choice(WORDS.split())
        if random.random() < 0.15:
            at = random.randint(0, len(text))
            text = text[:at] + random.choice(RARE) + text[at:]
        return text

    return [" ".join(word() for _ in range(random.randint(1, 9))) for _ in range(count)]


@pytest.mark.hypothesis
def test_sentencepiece(tmp_path: Path) -> None:
    lines = make_lines()
    learned = [Tokenizer.learn([WORDS] * 50, kind=kind, size=90) for kind in KINDS]
    (tmp_path / "vocabularies.json").write_text(json.dumps([export_tokenizer(each) for each in learned]))
    (tmp_path / "lines.json").write_text(json.dumps(lines))
    run_script("segment.js", tmp_path)
    for tokenizer, answers in zip(
        learned, json.loads((tmp_path / "segmented.json").read_text()), strict=True
    ):
        for line, answer in zip(lines, answers, strict=True):
            expected = tokenizer.segment(line)
            where = f"{tokenizer.kind}: {line!r}"
            assert answer["words"] == expected.words, where
            assert answer["pieces"] == expected.pieces, where
            assert answer["ids"] == expected.ids, where
            assert answer["wordOf"] == expected.word_of, where
            assert dict(answer["unknown"]) == expected.unknown, where
            assert answer["decoded"] == tokenizer.decode(expected.ids, expected.unknown).words, where


@needs_encoder
@pytest.mark.hypothesis
def test_word_piece(tmp_path: Path) -> None:
    import regard

    encoder, lines = regard.load_encoder("minilm"), make_lines()
    (tmp_path / "vocabularies.json").write_text(json.dumps([_export_word_piece(encoder, "minilm")]))
    (tmp_path / "lines.json").write_text(json.dumps(lines))
    run_script("segment.js", tmp_path)
    (answers,) = json.loads((tmp_path / "segmented.json").read_text())
    for line, answer, expected in zip(lines, answers, encoder.tokenizer(lines), strict=True):
        assert answer["tokens"] == expected.tokens, repr(line)
        assert answer["ids"] == expected.ids, repr(line)


@looped("kind", KINDS)
def test_vocabularies_are_exported_whole(kind: str) -> None:
    tokenizer = Tokenizer.learn([WORDS] * 50, kind=kind, size=90)
    exported = export_tokenizer(tokenizer)
    assert exported["kind"] == kind
    assert [piece for piece, _ in exported["pieces"]] == tokenizer._pieces
