"""Texts of others are printed, and do nothing to the terminal."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard._util.text import plain, shorten


@given(st.text())
def test_a_terminal_gets_nothing_to_obey(text):
    shown = plain(text)
    assert len(shown) == len(text)
    assert all(one.isprintable() or one in "\u200c\u200d" for one in shown)
    assert plain(shown) == shown


@pytest.mark.parametrize("space", ["\t", "\n", "\r", "\u00a0", "\u2009", "\u202f", "\u3000", "\x85"])
def test_spaces_of_all_scripts_stay_spaces(space):
    assert plain(f"a{space}b") == "a b"


@pytest.mark.parametrize("word", ["می\u200cروم", "क्\u200dष", "👩\u200d🔬", "漢字", "naïve"])
def test_words_of_all_scripts_stay_as_they_are(word):
    assert plain(word) == word


@pytest.mark.parametrize("control", ["\x1b", "\x07", "\x00", "\x9b", "\u202e", "\u2066"])
def test_controls_are_shown_as_unreadable(control):
    assert plain(f"a{control}b") == "a�b"


@given(st.text(), st.integers(1, 30))
def test_a_short_text_is_its_beginning(text, most):
    short = shorten(text, most)
    assert len(short) <= most
    assert short == text or (len(text) > most and text.startswith(short.removesuffix("…")))


def test_light_modules_are_light():
    program = (
        "import sys, regard._util.files, regard._util.text; print('torch' in sys.modules, 'numpy' in "
        "sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False False\n", done.stderr
