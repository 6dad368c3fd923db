"""Reading lines: a span is never split, and a term belongs to the part in which it begins."""

import pytest

from regard.translation import Tokenizer
from regard.translation.text.profile import TextProfile
from regard.translation.text.source import SourceReader
from regard.translation.text.terms import Terms

URL = "https://example.com/" + "abc/" * 30 + "z"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.learn(["ein Hund bellt um 3 /:", "eine Frau lacht laut."] * 9, kind="characters")


@pytest.mark.parametrize("copies", [True, False])
def test_spans_are_not_split(copies, tokenizer):
    reader = SourceReader(tokenizer, TextProfile(), max_tokens=40, copies=copies)
    for line in (
        URL,
        f"ein Hund 47 {URL} bellt",
        f"{'ein Hund ' * 9}({URL}), 47 {'laut ' * 20} 48 " + "x" * 99,
    ):
        parts = reader.read(line).parts
        copied = [text for part in parts for texts in part.copies.values() for text in texts]
        assert sum(URL in text for text in copied) == 1
        assert [text for text in copied if text.isdigit()] == [w for w in ("47", "48") if w in line.split()]
        assert all(len(part.ids) <= 40 or not part.has_text for part in parts)
        assert "".join(word for part in parts for word in part.segmentation.words) == line.replace(" ", "")


def test_terms_of_a_long_sentence(tokenizer):
    reader = SourceReader(tokenizer, TextProfile(), max_tokens=40, copies=False)
    line = "ein Hund " * 9 + "lacht laut " + "eine Frau " * 9 + "lacht"
    parts = reader.read(line, Terms({"lacht": "laughs", "laut": "loudly"})).parts
    assert len(parts) > 2
    assert not parts[0].terms
    for part in parts:
        expected = {"lacht": "laughs", "laut": "loudly"}
        assert list(part.terms) == [expected[w] for w in part.segmentation.words if w in expected]
