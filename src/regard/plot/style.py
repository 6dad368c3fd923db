"""What all pictures share: colours, light and dark; fonts; texts that fit; and how they are saved."""

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard._util.files import write_atomic
from regard._util.text import printable, shorten
from regard.errors import ArgumentError, DTypeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg", ".pdf")
DPI = 150  # of a PNG
# Weights: from the paper's lightness to its opposite, in even steps, by yellow, grey and blue, which all
# kinds of colour vision tell apart (as cividis: Nuñez, Anderton and Renslow 2018). The page has the same.
ON_LIGHT = ("#fdfbf0", "#f7e794", "#cdbd6e", "#99957a", "#676f79", "#2d4670", "#001c48")
ON_DARK = ("#0f1829", "#083068", "#3e4d6d", "#6d7075", "#989376", "#cbbb69", "#ffea46")
# Values of both signs: 0 is like the paper, orange is below it and blue above, equally far from it
SIGNED_ON_LIGHT = ("#6b2a00", "#b8560f", "#e8a465", "#fdfbf0", "#93bedd", "#3a80b8", "#0a3a66")
SIGNED_ON_DARK = ("#ffc48f", "#d07a30", "#7a3f10", "#0f1418", "#1b4a70", "#4590c8", "#a9daff")
MARKERS = "osD^vP*X"  # for paper without colours
LONGEST = 20  # characters of a token that are shown
POINTS = 72  # to an inch
_HINTED = 1.1  # how much wider letters may come out that are fitted to pixels


class Theme(NamedTuple):
    """The colours of a picture that are not data, and those of its lines."""

    paper: str
    raised: str  # of areas that hold nothing
    ink: str
    quiet: str
    rule: str
    lines: tuple[str, ...]
    weights: tuple[str, ...]  # from the smallest to the largest
    signed: tuple[str, ...]  # the same for values of both signs

    @property
    def palette(self) -> "Colormap":
        """The colours of weights: the smallest are almost paper.

        >>> from regard.plot.style import DARK, LIGHT
        >>> [[round(float(part), 2) for part in theme.palette(0.0)[:3]] for theme in (LIGHT, DARK)]
        [[0.99, 0.98, 0.94], [0.06, 0.09, 0.16]]
        """
        from matplotlib.colors import LinearSegmentedColormap

        return LinearSegmentedColormap.from_list("regard on dark" if self.is_dark else "regard", self.weights)

    def palette_for(self, norm: "Normalize") -> "Colormap":
        """The colours of weights, or of values of both signs if the scale begins below 0.

        Those are cut where the scale ends, so that 0 is like the paper and equal distances from it are
        equally strong, also if the scale goes further to one side than to the other.

        >>> from matplotlib.colors import Normalize, to_hex
        >>> from regard.plot.style import LIGHT
        >>> [to_hex(LIGHT.palette_for(Normalize(*ends))(1.0)) for ends in ((-1, 1), (-1, 0))]  # blue, paper
        ['#0a3a66', '#fdfbf0']
        """
        if norm.vmin is None or norm.vmax is None or norm.vmin >= 0:
            return self.palette
        from matplotlib.colors import LinearSegmentedColormap, to_rgb

        reach = max(-norm.vmin, norm.vmax)
        values = reach * np.linspace(-1, 1, len(self.signed))
        inside = values[(values > norm.vmin) & (values < norm.vmax)]
        shown = np.array([norm.vmin, *inside, norm.vmax])
        parts = np.array([to_rgb(colour) for colour in self.signed]).T
        colours = np.stack([np.interp(shown, values, part) for part in parts], -1)
        places = (shown - norm.vmin) / (norm.vmax - norm.vmin)
        return LinearSegmentedColormap.from_list("regard signed", list(zip(places, colours, strict=True)))

    @property
    def accent(self) -> str:
        """The colour of what stands out."""
        return self.lines[0]

    @property
    def is_dark(self) -> bool:
        """Whether the paper is darker than the ink."""
        return self.paper < self.ink


# Okabe and Ito 2008: distinct for the colour-blind too; what is black on white paper is white on black
_BLUE, _ORANGE, _GREEN, _PINK, _AMBER, _SKY, _OLIVE = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#999933",
)
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


def theme_of(axes: "Axes") -> Theme:
    """The theme for axes of somebody else: what their background asks for.

    >>> import matplotlib.pyplot as plt
    >>> from regard.plot.style import theme_of
    >>> with plt.style.context("dark_background"):
    ...     figure, axes = plt.subplots()
    >>> theme_of(axes).is_dark, theme_of(plt.figure().subplots()).is_dark
    (True, False)
    >>> plt.close("all")
    """
    from matplotlib.colors import to_rgba

    seen = np.ones(3)  # where nothing is painted, paper is white
    figure = axes.get_figure(root=True)
    for painted in ([] if figure is None else [figure.get_facecolor()]) + [axes.get_facecolor()]:
        *colour, opacity = to_rgba(painted)
        seen = opacity * np.array(colour) + (1 - opacity) * seen
    return DARK if ink_on(seen) == "white" else LIGHT


def ink_on(colour: Sequence[float] | NDArray[Any]) -> str:
    """Black or white, whichever is easier to read on red, green and blue of 0 to 1.

    Its contrast, (lighter + 0.05) / (darker + 0.05), is at least 4.5 on any colour (WCAG 2, 1.4.3).

    >>> from regard.plot.style import ink_on
    >>> ink_on((1, 0.9, 0.3)), ink_on((0, 0.1, 0.3))
    ('black', 'white')
    """
    return "black" if (luminance(colour) + 0.05) ** 2 > 1.05 * 0.05 else "white"


def luminance(colour: Sequence[float] | NDArray[Any]) -> float:
    """How light red, green and blue of 0 to 1 are together: sRGB's relative luminance."""
    parts = np.asarray(colour, dtype=float)[:3]
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))


@contextmanager
def drawing(texts: Sequence[str], *, dark: bool = False) -> Iterator[Theme]:
    """Colours, and fonts for these texts, in which $ is a letter like others, for all that is drawn within.

    A user's own style, with grids, other sizes or a layout, is put aside meanwhile.

    >>> from matplotlib.figure import Figure
    >>> from regard.plot.style import drawing
    >>> with drawing(["Hund"], dark=True) as theme:
    ...     figure = Figure()
    >>> figure.get_facecolor() == figure.get_edgecolor(), theme.ink
    (True, '#e6e9ec')
    """
    from matplotlib import rcParams, style

    theme = DARK if dark else LIGHT
    with style.context("default"):
        more = fonts("".join(texts))
        rcParams.update(
            {
                "text.parse_math": False,
                "font.family": [*rcParams["font.family"], *more],
                "svg.hashsalt": "regard",  # the same picture is the same file
                "svg.fonttype": "none",  # text stays text, which can be found, read aloud and copied
                "pdf.fonttype": 42,
                "figure.facecolor": theme.paper,
                "figure.edgecolor": theme.paper,
                "savefig.facecolor": theme.paper,
                "axes.facecolor": theme.paper,
                "axes.edgecolor": theme.rule,
                "axes.labelcolor": theme.quiet,
                "axes.titlecolor": theme.ink,
                "text.color": theme.ink,
                "xtick.color": theme.rule,
                "ytick.color": theme.rule,
                "xtick.labelcolor": theme.ink,
                "ytick.labelcolor": theme.ink,
                "grid.color": theme.rule,
                "font.size": 10,
                "axes.titlesize": 11,
                "axes.labelsize": 9.5,
                "xtick.labelsize": 9,
                "ytick.labelsize": 9,
            }
        )
        yield theme


def fonts(text: str) -> list[str]:
    """Fonts of this machine that have the letters which the usual one lacks, where there are such."""
    from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font

    missing = {ord(letter) for letter in text if letter.isprintable()}
    missing -= get_font(findfont(FontProperties())).get_charmap().keys()
    found = []
    for entry in fontManager.ttflist:
        if not missing:
            break
        usual = entry.style == "normal" and entry.weight in (400, "normal", "regular")
        if usual and not entry.name.startswith("Last Resort"):  # which has a box for every letter
            has = missing & get_font(entry.fname).get_charmap().keys()
            if has:
                found.append(entry.name)
                missing -= has
    return found


def save(figure: "Figure", path: str | os.PathLike[str]) -> Path:
    """Write a figure whole: .png, .svg or .pdf. Letters that no font has are shown as boxes."""
    check_ending(path)
    kind = Path(path).suffix[1:].lower()
    # no date, so that the same picture is the same file
    about: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
    content = BytesIO()
    with missing_letters_are_boxes():
        figure.savefig(content, format=kind, dpi=DPI, metadata=about)
    return write_atomic(path, content.getvalue())


@contextmanager
def missing_letters_are_boxes() -> Iterator[None]:
    """Without a warning for each."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ ", UserWarning)
        yield


def check_ending(path: str | os.PathLike[str]) -> None:
    """Before anything is computed: a picture of a kind that can be written."""
    if not isinstance(path, str | os.PathLike):
        raise DTypeError(
            f"the picture's path is {path!r:.40}, of the type {type(path).__name__}; give one that ends in "
            f"{', '.join(ENDINGS)}, and all else by keyword, such as title=."
        )
    if Path(path).suffix.lower() not in ENDINGS:
        raise ArgumentError(f"the picture {os.fspath(path)!r} can end in {', '.join(ENDINGS)}.")


# Texts


def label(token: str) -> str:
    """How a token is written along an axis: in one line, not too long, and visible even if it is blank.

    >>> from regard.plot.style import label
    >>> label("dogs"), label("\\n"), label(""), label("x" * 10_000)
    ('dogs', '␣', '∅', 'xxxxxxxxxxxxxxxxxxx…')
    """
    if not isinstance(token, str):
        raise DTypeError(f"a token is a {type(token).__name__}, {token!r:.40}; give strings: str(token).")
    text = shorten(printable(token[: LONGEST + 1]), LONGEST)
    return text if text.strip() else "␣" * len(text) or "∅"


def extent(text: str, size: float) -> tuple[float, float]:
    """The width and the height of a line of text, in points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    with missing_letters_are_boxes():
        width, height, _ = text_to_path.get_text_width_height_descent(text, FontProperties(size=size), False)
    return width * _HINTED, max(height * _HINTED, 1.25 * size)


def fitted(text: str, width: float, size: float) -> str:
    """A line of at most so many points: its end is cut if it must be."""
    most = len(text)
    while most > 1 and extent(shorten(text, most), size)[0] > width:
        most = min(most - 1, int(most * width / extent(shorten(text, most), size)[0]) + 1)
    return shorten(text, max(most, 1))


def wrapped(text: str, width: float, size: float, most: int = 3) -> str:
    """A text in lines of at most so many points, and no more lines than that.

    >>> from regard.plot.style import wrapped
    >>> wrapped("dogs may bark at strangers", 80, 10)
    'dogs may\\nbark at\\nstrangers'
    """
    lines = [""]
    for word in printable(text[:1000]).split():
        longer = f"{lines[-1]} {word}".lstrip()
        if lines[-1] and extent(longer, size)[0] > width:
            if len(lines) == most:
                lines[-1] += "…"
                break
            longer = word
            lines.append("")
        lines[-1] = longer
    return "\n".join(fitted(line, width, size) for line in lines)


# Lines


def style(number: int, theme: Theme) -> dict[str, Any]:
    """The colour and the marker of a line."""
    return {"color": theme.lines[number % len(theme.lines)], "marker": MARKERS[number % len(MARKERS)]}


def tidy(axes: "Axes") -> None:
    """A faint grid, and no frame."""
    axes.grid(True, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def legend(figure: "Figure", names: Sequence[str], styles: Sequence[dict[str, Any]]) -> None:
    """Above everything, so that it hides no curve."""
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], **one) for one in styles]
    width = figure.get_figwidth() * POINTS - 40
    labels = [fitted(printable(name[:1000]), width - 60, 10) for name in names]
    # a name that begins with an underscore would be left out
    labels = [f" {name}" if name.startswith("_") else name for name in labels]
    widest = max(extent(name, 10)[0] for name in labels)
    columns = max(min(len(names), int(width / (widest + 50))), 1)
    figure.legend(lines, labels, loc="outside upper center", ncols=columns, frameon=False, fontsize=10)
