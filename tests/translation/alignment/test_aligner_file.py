"""Saved aligners give equal links; other files give clear errors."""

from contextlib import suppress

import numpy as np
import pytest
from safetensors.numpy import load, save

from regard.errors import ArgumentError
from regard.translation.alignment.aligner_file import FORMAT
from regard.translation.alignment.lexical_aligner import LexicalAligner

PAIRS = [("ein Hund", "a dog"), ("ein Haus", "a house"), ("Hund und Haus", "dog and house")]


@pytest.fixture
def path(tmp_path):
    LexicalAligner.learn(PAIRS).save(tmp_path / "x.aligner")
    return tmp_path / "x.aligner"


def test_a_loaded_aligner_gives_equal_weights(path):
    new = [*PAIRS, ("Hunde Häuser", "dogs Berlin"), ("", "x")]
    for saved, loaded in zip(
        LexicalAligner.learn(PAIRS).align(new), LexicalAligner.load(path).align(new), strict=True
    ):
        np.testing.assert_array_equal(saved.weights, loaded.weights)
        assert saved.score == loaded.score


def test_a_lone_surrogate_is_a_word_like_others(tmp_path):
    pairs = [("ein \ud800", "a \udfff"), ("ein Hund", "a dog")]
    aligner = LexicalAligner.learn(pairs)
    aligner.save(tmp_path / "x.aligner")
    assert LexicalAligner.load(tmp_path / "x.aligner").links(pairs) == aligner.links(pairs)


def test_every_damaged_byte_is_harmless(path):
    """A flipped bit yields another aligner or an ArgumentError, never another exception."""
    content = path.read_bytes()
    for position in range(0, len(content), 97):
        damaged = bytearray(content)
        damaged[position] ^= 0x80
        path.write_bytes(bytes(damaged))
        with suppress(ArgumentError):
            LexicalAligner.load(path).links(PAIRS)
    path.write_bytes(content[:-5])
    with pytest.raises(ArgumentError, match="is corrupted"):
        LexicalAligner.load(path)


@pytest.mark.parametrize(
    ("change", "metadata", "message"),
    [
        ({}, {"format": "pt"}, "is not an aligner. Pass a file written by regard align --save"),
        (
            {},
            {"format": FORMAT, "version": "2"},
            "version 2 of the aligner format; this version of regard reads version 1. Upg",
        ),
        ({"counts": np.zeros(3, np.float32)}, None, "pairs and 3 counts"),
        ({"counts": None}, None, "unexpected arrays"),
        ({"pairs": np.zeros((2, 2), np.int64)}, None, "pairs is a 2-dimensional array"),
        ({"source.null": np.full(4, np.nan)}, None, "source.null contains a value that is not a probability"),
        (
            {"target.jumps": np.full(5, np.inf)},
            None,
            "target.jumps contains a value that is not a probability",
        ),
        ({"source.words": np.frombuffer(b"a\na\nb\nc", np.uint8)}, None, "a word occurs twice"),
    ],
)
def test_other_files_are_rejected(change, metadata, message, path):
    arrays = {name: change.get(name, array) for name, array in load(path.read_bytes()).items()}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    path.write_bytes(save(arrays, metadata or {"format": FORMAT, "version": "1"}))
    with pytest.raises(ArgumentError, match=message):
        LexicalAligner.load(path)


def test_folders_pickles_and_invalid_versions_are_rejected(tmp_path):
    (tmp_path / "pickle").write_bytes(b"\x80\x04\x95")
    header = b'{"__metadata__": {"format": "regard aligner", "version": 1e999}}'
    (tmp_path / "infinite").write_bytes(len(header).to_bytes(8, "little") + header)
    for name in ("pickle", "infinite", "."):
        with pytest.raises(ArgumentError):
            LexicalAligner.load(tmp_path / name)
