"""Alignments in the terminal: every word is at the right position, for any script and width."""

import io
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from regard.errors import ArgumentError, DTypeError, ShapeError
from regard.plot import terminal
from regard.plot.terminal import alignment_lines, draw_alignment

COLOR = re.compile(r"\x1b\[48;(?:2|5);[\d;]+m")
letters = st.characters(exclude_characters="█")
words = st.lists(st.text(letters, min_size=1, max_size=12), min_size=1, max_size=30)


def alignment(sources: list[str], targets: list[str], weights: torch.Tensor | None = None) -> SimpleNamespace:
    """Create an alignment; by default each target word attends to one source word."""
    if weights is None:
        weights = torch.eye(len(sources)).repeat(len(targets), 1)[: len(targets)]
    return SimpleNamespace(source_words=sources, target_words=targets, weights=weights)


DOGS = alignment(["zwei", "große", "Hunde"], ["two", "big", "dogs"])


def drawn(words, **options) -> str:
    stream = io.StringIO()
    draw_alignment(words, Console(file=stream, **options))
    return stream.getvalue()


def test_each_weight_is_in_the_row_of_its_target_and_the_column_of_its_source():
    assert alignment_lines(DOGS) == [
        "       g H",
        "     z r u",
        "     w o n",
        "     e ß d",
        "     i e e",
        "two  ██     zwei",
        "big    ██   große",
        "dogs     ██ Hunde",
    ]


def test_shades_grow_with_the_weight():
    row = torch.linspace(0, 1, 5)[None]
    (line,) = alignment_lines(alignment(list("abcde"), ["x"], row), shades=" .:+#")[1:]
    assert line == "x   ..::++## e"


def test_small_weights_stay_light():
    line = alignment_lines(alignment(list("abcdefgh"), ["x"], torch.full((1, 8), 1 / 8)))[-1]
    assert "░" in line
    assert "█" not in line


def test_a_row_without_weight_names_no_word():
    weights = torch.tensor([[0.0, 0.0], [float("nan"), 1.0]])
    assert alignment_lines(alignment(["a", "b"], ["x", "y"], weights))[1:] == ["x", "y   ██ b"]


@given(words, words, st.integers(terminal.MIN_WIDTH, 100))
def test_every_line_fits_and_every_target_word_has_its_row(sources, targets, width):
    lines = alignment_lines(alignment(sources, targets), width=width)
    assert all(cell_len(line) <= width for line in lines)
    assert all(line.isprintable() or set(line) & {"\u200c", "\u200d"} for line in lines)
    assert sum(line.count("█") for line in lines) == terminal.CELL_WIDTH * len(targets)


def test_more_source_words_than_fit_follow_below():
    sources = [chr(ord("a") + i) for i in range(26)]
    lines = alignment_lines(alignment(sources, ["X"] * 26), width=30)
    heads = [line.split() for line in lines if line and "X" not in line]
    assert [letter for head in heads for letter in head] == sources
    assert sum("██" in line for line in lines) == 26
    assert max(map(len, lines)) <= 30
    assert len(heads) == 2
    assert len(heads[0]) == len(heads[1])  # split evenly


def test_wide_and_combined_characters_keep_the_columns():
    lines = alignment_lines(alignment(["我", "北京", "e\u0301", "x"], ["I", "北京", "e\u0301", "x"]))
    rows = lines[-4:]
    starts = [cell_len(row[: row.index("██")]) for row in rows]
    assert starts == [5, 7, 9, 11]
    assert lines[1] == "     我京e\u0301 x"  # each above its column, two cells wide
    assert lines[0] == "       北"


def test_long_words_are_shortened():
    lines = alignment_lines(alignment(["Donaudampfschifffahrt"], ["a" * 50]), width=40)
    assert len(lines) == terminal.MAX_HEIGHT + 1
    assert lines[terminal.MAX_HEIGHT - 1].strip() == "⋮"
    assert lines[-1].startswith("a" * 17 + "…")


def test_control_characters_are_removed():
    text = drawn(alignment(["\x1b[31m", "[red]"], ["\x07", "[/]"]), width=40, color_system=None)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]" in text
    assert "[/]" in text


@pytest.mark.parametrize(
    ("background", "strongest"), [("", "222;241;255"), ("15;0", "222;241;255"), ("0;15", "0;46;77")]
)
def test_colors_if_the_terminal_has_them(background, strongest, monkeypatch):
    monkeypatch.setenv("COLORFGBG", background)
    text = drawn(DOGS, force_terminal=True, color_system="truecolor", width=60)
    assert len(COLOR.findall(text)) == 9  # every weight
    assert text.count(f"48;2;{strongest}") == 3
    assert "█" not in text


@pytest.mark.parametrize(
    "options", [{"no_color": True}, {"color_system": None}, {"color_system": "standard"}]
)
def test_shades_if_there_are_few_colors(options):
    text = drawn(DOGS, force_terminal=True, width=60, **options)
    assert not COLOR.search(text)
    assert text.count("██") == 3


def test_a_terminal_without_unicode():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    draw_alignment(DOGS, Console(file=stream, color_system=None, width=60))
    stream.flush()
    assert stream.buffer.getvalue().decode("ascii").splitlines()[-2:] == [
        "big    ##   gro?e",
        "dogs     ## Hunde",
    ]


def test_no_words():
    for sources, targets in (([], ["x"]), (["x"], []), ([], [])):
        empty = alignment(sources, targets, torch.zeros(len(targets), len(sources)))
        assert alignment_lines(empty) == ["(no words to align)"]


def test_errors():
    with pytest.raises(ShapeError, match=r"2 target words and 3 source words has weights of shape \(3, 2\)"):
        alignment_lines(alignment(list("abc"), list("de"), torch.zeros(3, 2)))
    with pytest.raises(ArgumentError, match="width=7; it must be at least 8"):
        alignment_lines(DOGS, width=7)
    with pytest.raises(DTypeError, match="must be an integer"):
        alignment_lines(DOGS, width=30.5)
    with pytest.raises(
        ArgumentError, match=r"shades=\'#\'; pass at least two characters, the lightest first"
    ):
        alignment_lines(DOGS, shades="#")
