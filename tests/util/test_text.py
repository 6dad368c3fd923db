"""Untrusted text is printed without control characters."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard._util.text import printable, shorten


@given(st.text())
def test_control_characters_are_replaced(text):
    shown = printable(text)
    assert len(shown) == len(text)
    assert all(char.isprintable() or char in "\u200c\u200d" for char in shown)
    assert printable(shown) == shown


@pytest.mark.parametrize("space", ["\t", "\n", "\r", "\u00a0", "\u2009", "\u202f", "\u3000", "\x85"])
def test_all_whitespace_becomes_a_space(space):
    assert printable(f"a{space}b") == "a b"


@pytest.mark.parametrize("word", ["می\u200cروم", "क्\u200dष", "👩\u200d🔬", "漢字", "naïve"])
def test_words_of_all_scripts_are_unchanged(word):
    assert printable(word) == word


@pytest.mark.parametrize("control", ["\x1b", "\x07", "\x00", "\x9b", "\u202e", "\u2066"])
def test_controls_become_replacement_characters(control):
    assert printable(f"a{control}b") == "a�b"


@given(st.text(), st.integers(1, 30))
def test_a_shortened_text_is_a_prefix(text, max_length):
    short = shorten(text, max_length)
    assert len(short) <= max_length
    assert short == text or (len(text) > max_length and text.startswith(short.removesuffix("…")))


def test_files_and_text_import_neither_torch_nor_numpy():
    program = (
        "import sys, regard._util.files, regard._util.text; print('torch' in sys.modules, 'numpy' in "
        "sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False False\n", done.stderr
