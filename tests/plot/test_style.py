"""What all pictures share: texts that fit, colours, and files that are the same for the same picture."""

import json
import random
import re
import xml.etree.ElementTree as ET
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import rc_context, rcParams
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from regard.app.bundle import static
from regard.errors import ArgumentError
from regard.plot import labels, style
from regard.plot.curves import draw_curves
from regard.plot.grids import Panel, Sheet, _Paper
from regard.plot.heatmaps import draw_weights, heatmap
from regard.translation.training.logs import LogRow

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
    texts = [style.label(t) for row in panels for p in row for t in [*(p.queries or ()), *(p.keys or ())]]
    with style.drawing(texts), style.missing_letters_are_boxes():
        figure = _Paper(panels, Sheet(**options), style.LIGHT).draw()
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
    with style.missing_letters_are_boxes():
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
    text = style.label(token)
    assert 1 <= len(text) <= style.LONGEST
    assert text.strip()
    assert "\n" not in text
    text.encode("utf-8")


@settings(max_examples=20)
@given(st.text(st.characters(codec="ascii"), max_size=200), st.integers(60, 400))
def test_wrapped_text_fits(text, width):
    lines = style.wrapped(text, width, 10).split("\n")
    assert len(lines) <= 3
    assert all(style.extent(line, 10)[0] <= width for line in lines)


def test_round_steps_of_numbers():
    written = labels.labels("x", None, 32_768, 400.0, 9.0)
    places = written.shown(0, 32_767, 400 / 32_768)
    assert places.step in (1000, 2000, 5000, 10_000)


def test_dark_has_dark_paper(tmp_path):
    from PIL import Image

    for dark, wanted in ((False, style.LIGHT.paper), (True, style.DARK.paper)):
        path = draw_weights(torch.eye(20), tmp_path / "x.png", dark=dark)
        red, green, blue = Image.open(path).convert("RGB").getpixel((2, 2))
        assert f"#{red:02x}{green:02x}{blue:02x}" == wanted


NASTY = {
    "figure.constrained_layout.use": True,
    "axes.grid": True,
    "savefig.bbox": "tight",
    "savefig.pad_inches": 3.0,
    "image.origin": "lower",
    "image.interpolation": "bicubic",
    "font.family": "monospace",
    "axes.linewidth": 9.0,
    "axes.spines.left": False,
    "xtick.top": True,
    "xtick.labelbottom": False,
    "ytick.minor.visible": True,
    "lines.linewidth": 9.0,
    "legend.frameon": True,
    "path.sketch": (4.0, 100.0, 2.0),
}


def test_pictures_do_not_depend_on_a_users_style(tmp_path):
    def draw(name: str) -> list[bytes]:
        rows = [LogRow(step, loss=9 / step, seconds=step, dev_loss=8 / step, dev_bleu=step) for step in (1, 2)]
        drawn = (
            draw_weights(torch.eye(3), tmp_path / f"{name}-weights.svg", queries=list("abc")),
            draw_weights(torch.eye(30), tmp_path / f"{name}-many.svg"),
            draw_curves({"small": rows}, tmp_path / f"{name}-curves.svg"),
        )
        return [path.read_bytes() for path in drawn]

    plain = draw("plain")
    with rc_context(NASTY):
        assert draw("nasty") == plain
        assert rcParams["axes.linewidth"] == 9  # which is the user's own business


def test_a_heat_map_has_no_grid():
    with rc_context({"axes.grid": True, "axes.grid.which": "both"}):
        axes = Figure().subplots()
        heatmap(axes, torch.eye(30))
    axes.figure.canvas.draw()
    assert not any(line.get_visible() for line in (*axes.get_xgridlines(), *axes.get_ygridlines()))


def hexes(name: str) -> list[str]:
    """The colours of this name that the page has for weights."""
    (line,) = re.findall(rf"const {name} = (.*);", static("attention/colours.js"))
    return ["#" + "".join(f"{part:02x}" for part in colour) for colour in json.loads(line)]


def test_weights_have_the_same_colours_in_pictures_and_on_the_page():
    assert list(style.LIGHT.weights) == hexes("ON_LIGHT")
    assert list(style.DARK.weights) == hexes("ON_DARK")


@pytest.mark.parametrize("theme", [style.LIGHT, style.DARK])
def test_weights_are_even_in_lightness_from_the_papers_to_its_opposite(theme):
    shades = theme.palette(np.linspace(0, 1, 256))
    light = np.array([116 * np.cbrt(style.luminance(shade)) - 16 for shade in shades])  # CIE 1976
    steps = np.diff(light) * (1 if theme.is_dark else -1)
    assert (steps > 0).all()
    assert np.abs(steps - steps.mean()).max() < 0.6 * steps.mean()  # no step is lost in others
    paper = 116 * np.cbrt(style.luminance(to_rgb(theme.paper))) - 16
    assert abs(light[0] - paper) < 3
    assert abs(light[-1] - paper) > 75


@pytest.mark.parametrize("theme", [style.LIGHT, style.DARK])
def test_values_of_both_signs_are_equally_far_from_the_paper(theme):
    axes = Figure(facecolor=theme.paper).subplots()
    axes.set_facecolor(theme.paper)
    image = heatmap(axes, torch.tensor([[-2.0, 0.0, 1.0]]))
    assert image.get_clim() == (-2, 2)
    light = [116 * np.cbrt(style.luminance(image.cmap(x))) - 16 for x in np.linspace(0, 1, 33)]
    paper = 116 * np.cbrt(style.luminance(to_rgb(theme.paper))) - 16
    assert abs(light[16] - paper) < 4
    sign = 1 if theme.is_dark else -1
    assert (np.diff(light)[16:] * sign > 0).all()
    assert (np.diff(light)[:16] * -sign > 0).all()
    assert np.allclose(light, light[::-1], atol=6)


@pytest.mark.parametrize("theme", [style.LIGHT, style.DARK])
@pytest.mark.parametrize("limits", [(-1, 3), (-3, 1), (-2, 0), (-5, -2), (-1, 100)])
def test_uneven_limits_are_a_cut_of_even_ones(theme, limits):
    """0 is like the paper, and what is equally far from it equally strong."""
    axes = Figure(facecolor=theme.paper).subplots()
    axes.set_facecolor(theme.paper)
    reach = max(map(abs, limits))
    values = np.linspace(*limits, 41)
    uneven, even = (heatmap(axes, torch.eye(2), limits=ends) for ends in (limits, (-reach, reach)))
    assert uneven.get_clim() == limits
    np.testing.assert_allclose(uneven.to_rgba(values), even.to_rgba(values), atol=0.03)
    if limits[1] >= 0:
        np.testing.assert_allclose(uneven.to_rgba(0.0)[:3], to_rgb(theme.signed[3]), atol=0.03)
    for value in values[np.abs(values) > 0.1 * reach]:
        red, _, blue, _ = uneven.to_rgba(value)
        assert (red > blue) == (value < 0)  # orange below, blue above


@pytest.mark.parametrize("least", [0.0, -1e-7])
def test_weights_that_are_below_0_by_rounding_are_weights(least):
    image = heatmap(Figure().subplots(), torch.tensor([[least, 0.5]]))
    assert image.get_clim() == (0, 0.5)
    assert to_hex(image.cmap(1.0)) == style.LIGHT.weights[-1]


@pytest.mark.parametrize("theme", [style.LIGHT, style.DARK])
def test_numbers_can_be_read_on_every_colour(theme):
    for shade in theme.palette(np.linspace(0, 1, 256)):
        values = sorted(style.luminance(to_rgb(one)) for one in (shade[:3], style.ink_on(shade)))
        assert (values[1] + 0.05) / (values[0] + 0.05) >= 4.5


@pytest.mark.parametrize(
    ("figure", "axes", "dark"),
    [("white", "white", False), ("black", "black", True), ("black", "none", True), ("black", "white", False)],
)
def test_a_heat_map_suits_the_paper_it_is_on(figure, axes, dark):
    paper = Figure(facecolor=figure).subplots()
    paper.set_facecolor(axes)
    image = heatmap(paper, torch.eye(2))
    theme = style.DARK if dark else style.LIGHT
    assert to_hex(image.cmap(1.0)) == theme.weights[-1]


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
    assert style.fonts("Größe Ελληνικά кот") == []
    assert style.fonts("𝔛")  # STIX, which comes with matplotlib as well, or another


def test_an_unknown_ending_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match=r"x.gif' can end in .png, .svg, .pdf"):
        draw_weights(torch.eye(2), tmp_path / "x.gif")
    assert list(tmp_path.iterdir()) == []
