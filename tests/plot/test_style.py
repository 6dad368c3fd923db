"""The shared style of pictures: text that fits, colors, and reproducible files."""

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
from regard.plot.grids import GridOptions, Panel, _Grid
from regard.plot.heatmaps import draw_weights, heatmap
from regard.translation.training.logs import LogRow
from tests.cases import looped

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
    """Return the four corners of a rotated label in pixels."""
    angle = text.get_rotation()
    text.set_rotation(0)
    box = text.get_window_extent()
    text.set_rotation(angle)
    x, y = text.get_transform().transform(text.get_position())
    radians = np.deg2rad(angle)
    rotation = np.array([[np.cos(radians), -np.sin(radians)], [np.sin(radians), np.cos(radians)]])
    around = np.array([[box.x0, box.y0], [box.x1, box.y0], [box.x1, box.y1], [box.x0, box.y1]]) - (x, y)
    return around @ rotation.T + (x, y)


def apart(first: np.ndarray, second: np.ndarray) -> bool:
    """Return whether a line parallel to a side of one rectangle separates two rectangles."""
    for sides in (first, second):
        for side in (sides[1] - sides[0], sides[2] - sides[1]):
            a, b = first @ side, second @ side
            if a.max() <= b.min() + 1e-6 or b.max() <= a.min() + 1e-6:
                return True
    return False


def shown(axis) -> list:
    return [label for label in axis.get_ticklabels() if label.get_text()]


def check_labels(figure) -> None:
    """Check that no labels on an axis overlap and that nothing is cut off."""
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
    texts = [
        style.token_label(t) for row in panels for p in row for t in [*(p.queries or ()), *(p.keys or ())]
    ]
    with style.plot_style(texts), style.ignore_missing_glyphs():
        figure = _Grid(panels, GridOptions(**options), style.LIGHT).draw()
        figure.set_dpi(100)
        check_labels(figure)
        return figure


def tokens(chance: random.Random, count: int) -> list[str]:
    longest = chance.choice([1, 4, 12, 60])
    return [
        "".join(chance.choice("abWMäß漢$_ ") for _ in range(chance.randint(0, longest))) for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.sampled(3)
def test_labels_neither_overlap_nor_are_cut_off(seed):
    chance = random.Random(seed)
    rows, columns = (chance.choice([1, 2, 5, 13, 30, 90, 250]) for _ in range(2))
    panel = Panel(np.zeros((rows, columns)), rows, columns, tokens(chance, rows), tokens(chance, columns))
    drawn([[panel]], title="a title " * chance.randint(0, 30))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.sampled(2)
def test_labels_of_a_grid_do_not_overlap(seed):
    chance = random.Random(seed)
    size = chance.choice([1, 9, 40])
    names = tokens(chance, size)
    panels = [[Panel(np.zeros((size, size)), size, size, names, names, f"head {j}") for j in range(3)]] * 2
    drawn(panels, title="t", row_titles=["layer 1", "layer " * 50], shared=True)


def test_hostile_tokens_fit():
    n = len(HOSTILE)
    drawn([[Panel(np.zeros((n, n)), n, n, HOSTILE, HOSTILE)]], title="$\\frac{1}{$")


def test_the_check_finds_overlapping_labels():
    figure = Figure(figsize=(2, 2))
    axes = figure.subplots()
    axes.set_xticks(range(30), ["a long label"] * 30)
    with pytest.raises(AssertionError):
        check_labels(figure)


@pytest.mark.parametrize("layout", [None, "constrained"])
@pytest.mark.parametrize("inches", [2, 8])
@pytest.mark.sampled(4)
def test_heatmap_labels_do_not_overlap_on_the_users_axes(inches, layout):
    figure = Figure(figsize=(inches, inches), layout=layout)
    names = tokens(random.Random(0), 40)
    for axes in figure.subplots(1, 2):
        heatmap(axes, torch.zeros(40, 40), queries=names, keys=names)
    with style.ignore_missing_glyphs():
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
def test_a_token_label_is_one_short_visible_line(token):
    text = style.token_label(token)
    assert 1 <= len(text) <= style.MAX_TOKEN_LENGTH
    assert text.strip()
    assert "\n" not in text
    text.encode("utf-8")


@settings(max_examples=20)
@given(st.text(st.characters(codec="ascii"), max_size=200), st.integers(60, 400))
def test_wrapped_text_fits(text, width):
    lines = style.wrap_text(text, width, 10).split("\n")
    assert len(lines) <= 3
    assert all(style.text_size(line, 10)[0] <= width for line in lines)


def test_numbers_have_round_steps():
    numbers = labels.axis_labels("x", None, 32_768, 400.0, 9.0)
    positions = numbers.fitting(0, 32_767, 400 / 32_768)
    assert positions.step in (1000, 2000, 5000, 10_000)


def test_dark_pictures_have_a_dark_background(tmp_path):
    from PIL import Image

    for dark, expected in ((False, style.LIGHT.background), (True, style.DARK.background)):
        path = draw_weights(torch.eye(20), tmp_path / "x.png", dark=dark)
        red, green, blue = Image.open(path).convert("RGB").getpixel((2, 2))
        assert f"#{red:02x}{green:02x}{blue:02x}" == expected


USER_STYLE = {
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
        rows = [
            LogRow(step, loss=9 / step, seconds=step, dev_loss=8 / step, dev_bleu=step) for step in (1, 2)
        ]
        drawn = (
            draw_weights(torch.eye(3), tmp_path / f"{name}-weights.svg", queries=list("abc")),
            draw_weights(torch.eye(30), tmp_path / f"{name}-many.svg"),
            draw_curves({"small": rows}, tmp_path / f"{name}-curves.svg"),
        )
        return [path.read_bytes() for path in drawn]

    plain = draw("plain")
    with rc_context(USER_STYLE):
        assert draw("styled") == plain
        assert rcParams["axes.linewidth"] == 9  # the user's style is restored


def test_a_heatmap_has_no_grid():
    with rc_context({"axes.grid": True, "axes.grid.which": "both"}):
        axes = Figure().subplots()
        heatmap(axes, torch.eye(30))
    axes.figure.canvas.draw()
    assert not any(line.get_visible() for line in (*axes.get_xgridlines(), *axes.get_ygridlines()))


def hexes(name: str) -> list[str]:
    """Return the weight colors of the page."""
    (line,) = re.findall(rf"const {name} = (.*);", static("attention/colors.js"))
    return ["#" + "".join(f"{part:02x}" for part in color) for color in json.loads(line)]


def test_pictures_and_page_have_the_same_colors():
    assert list(style.LIGHT.weights) == hexes("ON_LIGHT")
    assert list(style.DARK.weights) == hexes("ON_DARK")


@pytest.mark.parametrize("theme", [style.LIGHT, style.DARK])
def test_lightness_changes_evenly_from_the_background_to_its_opposite(theme):
    shades = theme.colormap(np.linspace(0, 1, 256))
    light = np.array([116 * np.cbrt(style.luminance(shade)) - 16 for shade in shades])  # CIE 1976
    steps = np.diff(light) * (1 if theme.is_dark else -1)
    assert (steps > 0).all()
    assert np.abs(steps - steps.mean()).max() < 0.6 * steps.mean()  # all steps are visible
    background = 116 * np.cbrt(style.luminance(to_rgb(theme.background))) - 16
    assert abs(light[0] - background) < 3
    assert abs(light[-1] - background) > 75


@pytest.mark.parametrize("theme", [style.LIGHT, style.DARK])
def test_signed_colors_are_symmetric_around_the_background(theme):
    axes = Figure(facecolor=theme.background).subplots()
    axes.set_facecolor(theme.background)
    image = heatmap(axes, torch.tensor([[-2.0, 0.0, 1.0]]))
    assert image.get_clim() == (-2, 2)
    light = [116 * np.cbrt(style.luminance(image.cmap(x))) - 16 for x in np.linspace(0, 1, 33)]
    background = 116 * np.cbrt(style.luminance(to_rgb(theme.background))) - 16
    assert abs(light[16] - background) < 4
    sign = 1 if theme.is_dark else -1
    assert (np.diff(light)[16:] * sign > 0).all()
    assert (np.diff(light)[:16] * -sign > 0).all()
    assert np.allclose(light, light[::-1], atol=6)


@looped("theme", [style.LIGHT, style.DARK])
@looped("limits", [(-1, 3), (-3, 1), (-2, 0), (-5, -2), (-1, 100)])
def test_asymmetric_limits_cut_the_symmetric_colormap(theme, limits):
    """Zero has the background color, and values at equal distances from 0 have equally strong colors."""
    axes = Figure(facecolor=theme.background).subplots()
    axes.set_facecolor(theme.background)
    reach = max(map(abs, limits))
    values = np.linspace(*limits, 41)
    asymmetric, symmetric = (heatmap(axes, torch.eye(2), limits=x) for x in (limits, (-reach, reach)))
    assert asymmetric.get_clim() == limits
    np.testing.assert_allclose(asymmetric.to_rgba(values), symmetric.to_rgba(values), atol=0.03)
    if limits[1] >= 0:
        np.testing.assert_allclose(asymmetric.to_rgba(0.0)[:3], to_rgb(theme.signed[3]), atol=0.03)
    for value in values[np.abs(values) > 0.1 * reach]:
        red, _, blue, _ = asymmetric.to_rgba(value)
        assert (red > blue) == (value < 0)  # orange for negative, blue for positive values


@pytest.mark.parametrize("smallest", [0.0, -1e-7])
def test_tiny_negative_weights_are_rounding_errors(smallest):
    image = heatmap(Figure().subplots(), torch.tensor([[smallest, 0.5]]))
    assert image.get_clim() == (0, 0.5)
    assert to_hex(image.cmap(1.0)) == style.LIGHT.weights[-1]


@pytest.mark.parametrize("theme", [style.LIGHT, style.DARK])
def test_numbers_are_readable_on_every_color(theme):
    for shade in theme.colormap(np.linspace(0, 1, 256)):
        values = sorted(style.luminance(to_rgb(color)) for color in (shade[:3], style.text_color_on(shade)))
        assert (values[1] + 0.05) / (values[0] + 0.05) >= 4.5


@looped(
    ("figure", "axes", "dark"),
    [("white", "white", False), ("black", "black", True), ("black", "none", True), ("black", "white", False)],
)
def test_a_heatmap_fits_its_background(figure, axes, dark):
    subplot = Figure(facecolor=figure).subplots()
    subplot.set_facecolor(axes)
    image = heatmap(subplot, torch.eye(2))
    theme = style.DARK if dark else style.LIGHT
    assert to_hex(image.cmap(1.0)) == theme.weights[-1]


def test_svg_text_is_text_and_files_are_reproducible(tmp_path):
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


@pytest.mark.parametrize("suffix", ["pdf", "png"])
def test_pdf_and_png_files_are_reproducible(suffix, tmp_path):
    first, second = (draw_weights(torch.eye(2), tmp_path / f"{i}.{suffix}").read_bytes() for i in range(2))
    assert first == second


def test_fallback_fonts():
    assert style.fallback_fonts("Größe Ελληνικά кот") == []
    assert style.fallback_fonts("𝔛")  # STIX, which is shipped with matplotlib, or another font


def test_unknown_suffixes_raise(tmp_path):
    with pytest.raises(ArgumentError, match=r"x.gif': use the extension .png, .svg or .pdf"):
        draw_weights(torch.eye(2), tmp_path / "x.gif")
    assert list(tmp_path.iterdir()) == []
