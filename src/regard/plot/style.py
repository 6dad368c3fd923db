"""Shared style of all pictures: light and dark themes, fonts, text fitting, and output files."""

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard._util.extras import require
from regard._util.files import write_atomic
from regard._util.text import printable, shorten, type_name
from regard.errors import ArgumentError, DTypeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
DPI = 150  # resolution of PNG files
# Weights: shades of blue whose lightness changes evenly from the background to its opposite, so color-blind
# readers can distinguish them. The interactive view uses the same colors.
ON_LIGHT = ("#f7fbfd", "#bedef8", "#86c0ef", "#4e9edb", "#1b77b5", "#07517f", "#002e4d")
ON_DARK = ("#0f1820", "#11334c", "#17517a", "#2574ac", "#4c9cd9", "#91c8f4", "#def1ff")
# Signed values: 0 has the background color, negative values are orange, positive values blue
SIGNED_ON_LIGHT = ("#6b2a00", "#b8560f", "#e8a465", "#f7fbfd", "#93bedd", "#3a80b8", "#0a3a66")
SIGNED_ON_DARK = ("#ffc48f", "#d07a30", "#7a3f10", "#0f1418", "#1b4a70", "#4590c8", "#a9daff")
MARKERS = "osD^vP*X"  # so lines differ in more than their color
MAX_TOKEN_LENGTH = 20  # maximum number of characters in a label
POINTS_PER_INCH = 72
_HINTING = 1.1  # factor by which hinting may widen text


class Theme(NamedTuple):
    """The colors of a picture."""

    background: str
    surface: str  # color of empty areas
    text: str
    muted: str
    border: str
    lines: tuple[str, ...]
    weights: tuple[str, ...]  # colors from the smallest to the largest weight
    signed: tuple[str, ...]  # the same for signed values

    @property
    def colormap(self) -> "Colormap":
        """The colormap for weights; the smallest weights are close to the background color.

        >>> from regard.plot.style import DARK, LIGHT
        >>> [[round(float(part), 2) for part in theme.colormap(0.0)[:3]] for theme in (LIGHT, DARK)]
        [[0.97, 0.98, 0.99], [0.06, 0.09, 0.13]]
        """
        from matplotlib.colors import LinearSegmentedColormap

        return LinearSegmentedColormap.from_list("regard on dark" if self.is_dark else "regard", self.weights)

    def colormap_for(self, norm: "Normalize") -> "Colormap":
        """Return the colormap of weights, or of signed values if the scale starts below 0.

        The signed colormap is cut at the ends of the scale: 0 always has the background color, and values
        at equal distances from 0 have equally strong colors, even on an asymmetric scale.

        >>> from matplotlib.colors import Normalize, to_hex
        >>> from regard.plot.style import LIGHT
        >>> ranges = (-1, 1), (-1, 0)
        >>> [to_hex(LIGHT.colormap_for(Normalize(*limits))(1.0)) for limits in ranges]  # blue, background
        ['#0a3a66', '#f7fbfd']
        """
        if norm.vmin is None or norm.vmax is None or norm.vmin >= 0:
            return self.colormap
        from matplotlib.colors import LinearSegmentedColormap, to_rgb

        values = max(-norm.vmin, norm.vmax) * np.linspace(-1, 1, len(self.signed))
        inside = values[(values > norm.vmin) & (values < norm.vmax)]
        stops = np.array([norm.vmin, *inside, norm.vmax])
        channels = np.array([to_rgb(color) for color in self.signed]).T
        colors = np.stack([np.interp(stops, values, channel) for channel in channels], -1)
        positions = (stops - norm.vmin) / (norm.vmax - norm.vmin)
        return LinearSegmentedColormap.from_list("regard signed", list(zip(positions, colors, strict=True)))

    @property
    def accent(self) -> str:
        """The accent color."""
        return self.lines[0]

    @property
    def is_dark(self) -> bool:
        """Whether the background is darker than the text."""
        return self.background < self.text


# Okabe and Ito 2008: color-blind readers can distinguish these colors
_OKABE_ITO = "#0072B2 #D55E00 #009E73 #CC79A7 #E69F00 #56B4E9 #999933"
_BLUE, _ORANGE, _GREEN, _PINK, _AMBER, _SKY, _OLIVE = _OKABE_ITO.split()
LIGHT = Theme(
    "#ffffff",
    "#eceff2",
    "#1b1f24",
    "#57606a",
    "#d5dae0",
    (_BLUE, _ORANGE, _GREEN, _PINK, _AMBER, _SKY, "#000000", _OLIVE),
    ON_LIGHT,
    SIGNED_ON_LIGHT,
)
DARK = Theme(
    "#14171a",
    "#262c31",
    "#e6e9ec",
    "#9aa4ae",
    "#3a424a",
    (_SKY, _ORANGE, _GREEN, _PINK, _AMBER, _BLUE, "#ffffff", _OLIVE),
    ON_DARK,
    SIGNED_ON_DARK,
)


def theme_for(axes: "Axes") -> Theme:
    """Return the theme that matches the background of the user's axes.

    >>> import matplotlib.pyplot as plt
    >>> from regard.plot.style import theme_for
    >>> with plt.style.context("dark_background"):
    ...     figure, axes = plt.subplots()
    >>> theme_for(axes).is_dark, theme_for(plt.figure().subplots()).is_dark
    (True, False)
    >>> plt.close("all")
    """
    from matplotlib.colors import to_rgba

    background = np.ones(3)  # white behind transparent colors
    figure = axes.get_figure(root=True)
    for face in ([] if figure is None else [figure.get_facecolor()]) + [axes.get_facecolor()]:
        *color, opacity = to_rgba(face)
        background = opacity * np.array(color) + (1 - opacity) * background
    return DARK if text_color_on(background) == "white" else LIGHT


def text_color_on(color: Sequence[float] | NDArray[Any]) -> str:
    """Return black or white, whichever is easier to read on a color (red, green and blue from 0 to 1).

    The contrast (lighter + 0.05) / (darker + 0.05) is at least 4.5 on any color (WCAG 2, 1.4.3).

    >>> from regard.plot.style import text_color_on
    >>> text_color_on((1, 0.9, 0.3)), text_color_on((0, 0.1, 0.3))
    ('black', 'white')
    """
    return "black" if (luminance(color) + 0.05) ** 2 > 1.05 * 0.05 else "white"


def luminance(color: Sequence[float] | NDArray[Any]) -> float:
    """Return the relative luminance (sRGB) of a color (red, green and blue from 0 to 1)."""
    channels = np.asarray(color, dtype=float)[:3]
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))


@contextmanager
def plot_style(texts: Sequence[str], *, dark: bool = False) -> Iterator[Theme]:
    """Set colors, and fonts that cover the texts, inside a `with` block. A $ does not start math mode.

    The user's own matplotlib style does not apply inside the block.

    >>> from matplotlib.figure import Figure
    >>> from regard.plot.style import plot_style
    >>> with plot_style(["Hund"], dark=True) as theme:
    ...     figure = Figure()
    >>> figure.get_facecolor() == figure.get_edgecolor(), theme.text
    (True, '#e6e9ec')
    """
    require("matplotlib", "Drawing")
    from matplotlib import rcParams, style

    theme = DARK if dark else LIGHT
    with style.context("default"):
        rcParams.update(
            {
                "text.parse_math": False,
                "font.family": [*rcParams["font.family"], *fallback_fonts("".join(texts))],
                "svg.hashsalt": "regard",  # reproducible files
                "svg.fonttype": "none",  # text stays text: searchable and accessible
                "pdf.fonttype": 42,
                "figure.facecolor": theme.background,
                "figure.edgecolor": theme.background,
                "savefig.facecolor": theme.background,
                "axes.facecolor": theme.background,
                "axes.edgecolor": theme.border,
                "axes.labelcolor": theme.muted,
                "axes.titlecolor": theme.text,
                "text.color": theme.text,
                "xtick.color": theme.border,
                "ytick.color": theme.border,
                "xtick.labelcolor": theme.text,
                "ytick.labelcolor": theme.text,
                "grid.color": theme.border,
                "font.size": 10,
                "axes.titlesize": 11,
                "axes.labelsize": 9.5,
                "xtick.labelsize": 9,
                "ytick.labelsize": 9,
            }
        )
        yield theme


def fallback_fonts(text: str) -> list[str]:
    """Return installed fonts for the characters that the default font lacks."""
    from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font

    missing = {ord(character) for character in text if character.isprintable()}
    missing -= get_font(findfont(FontProperties())).get_charmap().keys()
    names = []
    for entry in fontManager.ttflist:
        if not missing:
            break
        regular = entry.style == "normal" and entry.weight in (400, "normal", "regular")
        if regular and not entry.name.startswith("Last Resort"):  # a font with a box for every character
            covered = missing & get_font(entry.fname).get_charmap().keys()
            if covered:
                names.append(entry.name)
                missing -= covered
    return names


def save(figure: "Figure", path: str | os.PathLike[str]) -> Path:
    """Write a figure atomically as .png, .svg or .pdf. Characters without a glyph are shown as boxes."""
    check_suffix(path)
    suffix = Path(path).suffix[1:].lower()
    # no date: identical pictures give identical files
    metadata: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(suffix, {})
    content = BytesIO()
    with ignore_missing_glyphs():
        figure.savefig(content, format=suffix, dpi=DPI, metadata=metadata)
    return write_atomic(path, content.getvalue())


@contextmanager
def ignore_missing_glyphs() -> Iterator[None]:
    """Suppress matplotlib's warnings about missing glyphs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ ", UserWarning)
        yield


def check_suffix(path: str | os.PathLike[str]) -> None:
    """Raise an error unless a path ends in .png, .svg or .pdf. Called before anything is computed."""
    if not isinstance(path, str | os.PathLike):
        raise DTypeError(
            f"path must be a string or a Path, got {path!r:.40} of type {type(path).__name__}. Pass other "
            "arguments by keyword, e.g. title='heads'."
        )
    if Path(path).suffix.lower() not in SUFFIXES:
        extensions = f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
        raise ArgumentError(f"Cannot write {os.fspath(path)!r}: use the extension {extensions}.")


# Text


def token_label(token: str) -> str:
    """Return a token as an axis label: one line, shortened, visible even if it is blank.

    >>> from regard.plot.style import token_label
    >>> token_label("dogs"), token_label("\\n"), token_label(""), token_label("x" * 10_000)
    ('dogs', '␣', '∅', 'xxxxxxxxxxxxxxxxxxx…')
    """
    if not isinstance(token, str):
        raise DTypeError(f"Tokens must be strings, got {type_name(token)}: {token!r:.40}. Pass str(token).")
    text = shorten(printable(token[: MAX_TOKEN_LENGTH + 1]), MAX_TOKEN_LENGTH)
    return text if text.strip() else "␣" * len(text) or "∅"


def text_size(text: str, fontsize: float) -> tuple[float, float]:
    """Return the width and height of a line of text in points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=fontsize)
    with ignore_missing_glyphs():
        width, height, _ = text_to_path.get_text_width_height_descent(text, font, False)
    return width * _HINTING, max(height * _HINTING, 1.25 * fontsize)


def fit_text(text: str, width: float, fontsize: float) -> str:
    """Shorten a line to fit a width in points."""
    length = len(text)
    while length > 1 and (actual := text_size(shorten(text, length), fontsize)[0]) > width:
        length = min(length - 1, int(length * width / actual) + 1)
    return shorten(text, max(length, 1))


def wrap_text(text: str, width: float, fontsize: float, max_lines: int = 3) -> str:
    """Break a text into at most `max_lines` lines that fit a width in points.

    >>> from regard.plot.style import wrap_text
    >>> wrap_text("dogs may bark at strangers", 80, 10)
    'dogs may\\nbark at\\nstrangers'
    """
    lines = [""]
    for word in printable(text[:1000]).split():
        longer = f"{lines[-1]} {word}".lstrip()
        if lines[-1] and text_size(longer, fontsize)[0] > width:
            if len(lines) == max_lines:
                lines[-1] += "…"
                break
            longer = word
            lines.append("")
        lines[-1] = longer
    return "\n".join(fit_text(line, width, fontsize) for line in lines)


# Lines


def line_style(number: int, theme: Theme) -> dict[str, Any]:
    """Return the color and marker of a line."""
    return {"color": theme.lines[number % len(theme.lines)], "marker": MARKERS[number % len(MARKERS)]}


def style_axes(axes: "Axes") -> None:
    """Add a faint grid, and remove the top and right spines."""
    axes.grid(True, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def add_legend(figure: "Figure", names: Sequence[str], styles: Sequence[dict[str, Any]]) -> None:
    """Add a legend above the axes, where it covers no line."""
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], **line) for line in styles]
    width = figure.get_figwidth() * POINTS_PER_INCH - 40
    labels = [fit_text(printable(name[:1000]), width - 60, 10) for name in names]
    # matplotlib omits names that start with an underscore
    labels = [f" {name}" if name.startswith("_") else name for name in labels]
    widest = max(text_size(name, 10)[0] for name in labels)
    columns = max(min(len(names), int(width / (widest + 50))), 1)
    figure.legend(lines, labels, loc="outside upper center", ncols=columns, frameon=False, fontsize=10)
