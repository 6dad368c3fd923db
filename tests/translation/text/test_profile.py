"""The profile of a training text: its measurements, and rejection of corrupted files."""

import hashlib
import json

import pytest

from regard.errors import ArgumentError
from regard.translation.text.profile import TextProfile


def test_sentences_per_line():
    single, double = ("Ein Hund.", "A dog."), ("Ein Hund. Eine Katze.", "A dog. A cat.")
    assert TextProfile.of([single] * 97 + [double] * 3).max_sentences == 1
    assert TextProfile.of([single] * 50 + [double] * 50).max_sentences == 2
    assert TextProfile.of([]) == TextProfile()


def test_spans_that_are_translated_are_not_protected():
    text = "Ein langer Satz mit Wörtern um {}"
    copied = [(text.format(n), f"at {n}") for n in range(30)]
    translated = [(text.format(n), "at some time") for n in range(30)]
    assert TextProfile.of(copied).unprotected == frozenset()
    assert TextProfile.of(translated).unprotected == {"number"}
    assert TextProfile.of([("1 2 3", "3 2 1")] * 30).unprotected == {"number"}  # the text is about numbers


def test_files(tmp_path):
    profile = TextProfile.of([("Ein Hund um 3.", "A dog at 3.")] * 3, max_tokens=9, tokens=20)
    profile.save(tmp_path / "text.json")
    assert TextProfile.load(tmp_path / "text.json") == profile
    values = json.loads((tmp_path / "text.json").read_text())
    statistics = {name: value for name, value in values.items() if name not in ("format", "sha256")}
    digest = hashlib.sha256(json.dumps(statistics, ensure_ascii=False, sort_keys=True).encode()).hexdigest()
    for same in (
        json.dumps(values, indent=2),
        json.dumps({**values, "sha256": digest}),
    ):  # or as written earlier
        (tmp_path / "text.json").write_text(same)
        assert TextProfile.load(tmp_path / "text.json") == profile
    for damaged in ({**values, "lines": -1}, {**values, "words": []}, {"format": values["format"]}, [], "x"):
        (tmp_path / "text.json").write_text(json.dumps(damaged))
        with pytest.raises(ArgumentError, match="is corrupted, or was written by another version"):
            TextProfile.load(tmp_path / "text.json")
