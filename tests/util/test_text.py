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


@pytest.mark.parametrize(
    ("characters", "shown"),
    [
        ("\t\n\r\u00a0\u2009\u202f\u3000\x85", " "),
        ("\x1b\x07\x00\x9b\u202e\u2066", "�"),
        *((word, word) for word in ("می\u200cروم", "क्\u200dष", "👩\u200d🔬", "漢字", "naïve")),
    ],
)
def test_whitespace_controls_and_words_of_all_scripts(characters, shown):
    if len(shown) > 1:
        assert printable(characters) == shown
    else:
        assert all(printable(f"a{character}b") == f"a{shown}b" for character in characters)


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
