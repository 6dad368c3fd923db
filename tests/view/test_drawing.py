"""What all pictures share: texts that fit, colours, and files that are the same for the same picture."""

import random
import xml.etree.ElementTree as ET
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from regard.errors import ArgumentError
from regard.view import drawing, labels
from regard.view.panels import Panel, Sheet, _Paper
from regard.view.pictures import draw_weights, heatmap

HOSTILE = [
    "$x_1^$",
    "_a_",
    "a\nb",
    "",
    "  ",
    "שלום עולם",
    "漢字漢字",
    "🎉",
    "\x00\x1b[31m",
    "x" * 10_000,
    "a\u0301" * 60,
    "\u202eabc",
    "</text><script>&amp;",
    "\ud800",
    "\\frac{",
    "--><!--",
    "▁the",
]


def corners(text) -> np.ndarray:
    """The four corners of a label as it is turned, in pixels."""
    angle = text.get_rotation()
    text.set_rotation(0)
    box = text.get_window_extent()
    text.set_rotation(angle)
    x, y = text.get_transform().transform(text.get_position())
    turned = np.deg2rad(angle)
    turn = np.array([[np.cos(turned), -np.sin(turned)], [np.sin(turned), np.cos(turned)]])
    around = np.array([[box.x0, box.y0], [box.x1, box.y0], [box.x1, box.y1], [box.x0, box.y1]]) - (x, y)
    return around @ turn.T + (x, y)


def apart(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether some line parallel to a side of either lies between two rectangles."""
    for sides in (first, second):
        for side in (sides[1] - sides[0], sides[2] - sides[1]):
            a, b = first @ side, second @ side
            if a.max() <= b.min() + 1e-6 or b.max() <= a.min() + 1e-6:
                return True
    return False


def shown(axis) -> list:
    return [label for label in axis.get_ticklabels() if label.get_text()]


def check_labels(figure) -> None:
    """No two labels of an axis overlap, and nothing is cut off."""
    figure.canvas.draw()
    page = figure.bbox
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            boxes = [corners(label) for label in shown(axis)]
            assert all(apart(a, b) for a, b in pairwise(boxes))
    for box in [
        *(axes.get_tightbbox() for axes in figure.axes),
        *(t.get_window_extent() for t in figure.texts),
    ]:
        assert page.x0 - 1 <= box.x0 <= box.x1 <= page.x1 + 1
        assert page.y0 - 1 <= box.y0 <= box.y1 <= page.y1 + 1


def drawn(panels: list[list[Panel]], **options) -> Figure:
    texts = [drawing.label(t) for row in panels for p in row for t in [*(p.queries or ()), *(p.keys or ())]]
    with drawing.drawing(texts), drawing.missing_letters_are_boxes():
        figure = _Paper(panels, Sheet(**options), drawing.LIGHT).draw()
        figure.set_dpi(100)
        check_labels(figure)
        return figure


def tokens(chance: random.Random, number: int) -> list[str]:
    longest = chance.choice([1, 4, 12, 60])
    return [
        "".join(chance.choice("abWMäß漢$_ ") for _ in range(chance.randint(0, longest)))
        for _ in range(number)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_no_labels_overlap_and_nothing_is_cut(seed):
    chance = random.Random(seed)
    rows, columns = (chance.choice([1, 2, 5, 13, 30, 90, 250]) for _ in range(2))
    panel = Panel(np.zeros((rows, columns)), rows, columns, tokens(chance, rows), tokens(chance, columns))
    drawn([[panel]], title="a title " * chance.randint(0, 30))


@pytest.mark.parametrize("seed", range(3))
def test_no_labels_of_many_panels_overlap(seed):
    chance = random.Random(seed)
    size = chance.choice([1, 9, 40])
    names = tokens(chance, size)
    panels = [[Panel(np.zeros((size, size)), size, size, names, names, f"head {j}") for j in range(3)]] * 2
    drawn(panels, title="t", sides=["layer 1", "layer " * 50], shared=True)


def test_hostile_tokens_fit():
    n = len(HOSTILE)
    drawn([[Panel(np.zeros((n, n)), n, n, HOSTILE, HOSTILE)]], title="$\\frac{1}{$")


def test_the_checker_finds_labels_that_overlap():
    figure = Figure(figsize=(2, 2))
    axes = figure.subplots()
    axes.set_xticks(range(30), ["a long label"] * 30)
    with pytest.raises(AssertionError):
        check_labels(figure)


@pytest.mark.parametrize("layout", [None, "constrained"])
@pytest.mark.parametrize("inches", [2, 8])
def test_labels_of_a_heat_map_on_axes_of_others_do_not_overlap(inches, layout):
    figure = Figure(figsize=(inches, inches), layout=layout)
    names = tokens(random.Random(0), 40)
    for axes in figure.subplots(1, 2):
        heatmap(axes, torch.zeros(40, 40), queries=names, keys=names)
    with drawing.missing_letters_are_boxes():
        figure.canvas.draw()
        for axes in figure.axes:
            for axis in (axes.xaxis, axes.yaxis):
                boxes = [corners(label) for label in shown(axis)]
                assert boxes
                assert all(apart(a, b) for a, b in combinations(boxes, 2))


def test_zooming_in_shows_more_labels():
    axes = Figure(figsize=(3, 3)).subplots()
    names = [f"token {i}" for i in range(300)]
    heatmap(axes, torch.zeros(300, 300), queries=names, keys=names)
    before = len(shown(axes.yaxis))
    axes.set_ylim(110.5, 99.5)
    assert [label.get_text() for label in shown(axes.yaxis)] == names[100:111]
    assert before < 30


@given(st.text(max_size=40))
def test_a_label_is_one_short_visible_line(token):
    text = drawing.label(token)
    assert 1 <= len(text) <= drawing.LONGEST
    assert text.strip()
    assert "\n" not in text
    text.encode("utf-8")


@settings(max_examples=20)
@given(st.text(st.characters(codec="ascii"), max_size=200), st.integers(60, 400))
def test_wrapped_text_fits(text, width):
    lines = drawing.wrapped(text, width, 10).split("\n")
    assert len(lines) <= 3
    assert all(drawing.extent(line, 10)[0] <= width for line in lines)


def test_round_steps_of_numbers():
    written = labels.labels("x", None, 32_768, 400.0, 9.0)
    places = written.shown(0, 32_767, 400 / 32_768)
    assert places.step in (1000, 2000, 5000, 10_000)


def test_dark_has_dark_paper(tmp_path):
    from PIL import Image

    for dark, wanted in ((False, drawing.LIGHT.paper), (True, drawing.DARK.paper)):
        path = draw_weights(torch.eye(20), tmp_path / "x.png", dark=dark)
        red, green, blue = Image.open(path).convert("RGB").getpixel((2, 2))
        assert f"#{red:02x}{green:02x}{blue:02x}" == wanted


def test_text_is_text_in_an_svg_and_the_same_picture_is_the_same_file(tmp_path):
    n = len(HOSTILE)
    files = [
        draw_weights(torch.eye(n), tmp_path / f"{i}.svg", queries=HOSTILE, keys=HOSTILE, title="<b>&$x$")
        for i in range(2)
    ]
    first, second = (file.read_bytes() for file in files)
    assert first == second
    root = ET.fromstring(first)
    texts = ["".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "$x_1^$" in texts
    assert "</text><script>&amp…" in texts or any(text.startswith("</text>") for text in texts)
    assert "<b>&$x$" in texts
    assert not list(root.iter("{http://www.w3.org/2000/svg}script"))


@pytest.mark.parametrize("ending", ["pdf", "png"])
def test_other_files_are_the_same_too(ending, tmp_path):
    first, second = (draw_weights(torch.eye(2), tmp_path / f"{i}.{ending}").read_bytes() for i in range(2))
    assert first == second


def test_other_fonts_help_out():
    assert drawing.fonts("Größe Ελληνικά кот") == []
    assert drawing.fonts("𝔛")  # STIX, which comes with matplotlib as well, or another


def test_an_unknown_ending_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match=r"x.gif' can end in .png, .svg, .pdf"):
        draw_weights(torch.eye(2), tmp_path / "x.gif")
    assert list(tmp_path.iterdir()) == []
