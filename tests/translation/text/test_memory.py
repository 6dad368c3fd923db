"""Fuzzy matches: the most similar training pairs, ranked by word edit distance."""

import pytest

from regard.errors import ArgumentError
from regard.translation.data.encoded import EncodedCorpus
from regard.translation.text.memory import TranslationMemory
from tests.translation import folders

LINES = ["ein Hund bellt laut", "zwei Katzen schlafen", "eine Frau singt", "ein Hund bellt heute"]


def test_matches(tmp_path):
    tokens = folders.tokens()
    pairs = [(tokens.source.encode(line), tokens.target.encode(f"a {line}")) for line in LINES]
    memory = TranslationMemory(
        tokens, EncodedCorpus.write(tmp_path / "x.ids", pairs, vocabulary=len(tokens.source))
    )
    for line in LINES:
        best = memory.matches(line, 2)[0]
        assert best == (line, f"a {line}", 1.0)
    similar = memory.matches("ein Hund bellt heute gern", 9)
    assert [match.similarity for match in similar] == sorted(
        (match.similarity for match in similar), reverse=True
    )
    assert similar[0].similarity == 0.8
    assert memory.matches("", 3) == memory.matches("Ω", 3) == []


def test_a_folder_without_training_pairs(tmp_path):
    with pytest.raises(ArgumentError, match="has no training pairs to search"):
        TranslationMemory.open(tmp_path, folders.tokens())
