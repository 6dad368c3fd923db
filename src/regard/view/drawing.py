"""What all pictures share: colours, light and dark; fonts; texts that fit; and how they are saved."""

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from regard.errors import ArgumentError, DTypeError
from regard.mechanism.files import write_whole
from regard.mechanism.text import plain, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg", ".pdf")
DPI = 150  # of a PNG
PALETTE = "cividis"  # readable for the colour-blind, and in grey
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
)
DARK = Theme(
    "#14171a",
    "#262c31",
    "#e6e9ec",
    "#9aa4ae",
    "#3a424a",
    (_SKY, _ORANGE, _GREEN, _PINK, _AMBER, _BLUE, "#ffffff", _OLIVE),
)


@contextmanager
def drawing(texts: Sequence[str], *, dark: bool = False) -> Iterator[Theme]:
    """Colours, and fonts for these texts, in which $ is a letter like others, for all that is drawn within.

    >>> from matplotlib.figure import Figure
    >>> from regard.view.drawing import drawing
    >>> with drawing(["Hund"], dark=True) as theme:
    ...     figure = Figure()
    >>> figure.get_facecolor() == figure.get_edgecolor(), theme.ink
    (True, '#e6e9ec')
    """
    from matplotlib import rc_context, rcParams

    theme = DARK if dark else LIGHT
    with rc_context(
        {
            "text.parse_math": False,
            "font.family": [*rcParams["font.family"], *fonts("".join(texts))],
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
    ):
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
    return write_whole(path, content.getvalue())


@contextmanager
def missing_letters_are_boxes() -> Iterator[None]:
    """Without a warning for each."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ ", UserWarning)
        yield


def check_ending(path: str | os.PathLike[str]) -> None:
    """Before anything is computed: a picture of a kind that can be written."""
    if Path(path).suffix.lower() not in ENDINGS:
        raise ArgumentError(f"the picture {os.fspath(path)!r} can end in {', '.join(ENDINGS)}.")


# Texts


def label(token: str) -> str:
    """How a token is written along an axis: in one line, not too long, and visible even if it is blank.

    >>> from regard.view.drawing import label
    >>> label("dogs"), label("\\n"), label(""), label("x" * 10_000)
    ('dogs', '␣', '∅', 'xxxxxxxxxxxxxxxxxxx…')
    """
    if not isinstance(token, str):
        raise DTypeError(f"a token is a {type(token).__name__}, {token!r:.40}; give strings: str(token).")
    text = shorten(plain(token[: LONGEST + 1]), LONGEST)
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

    >>> from regard.view.drawing import wrapped
    >>> wrapped("dogs may bark at strangers", 80, 10)
    'dogs may\\nbark at\\nstrangers'
    """
    lines = [""]
    for word in plain(text[:1000]).split():
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
    labels = [fitted(plain(name[:1000]), width - 60, 10) for name in names]
    # a name that begins with an underscore would be left out
    labels = [f" {name}" if name.startswith("_") else name for name in labels]
    widest = max(extent(name, 10)[0] for name in labels)
    columns = max(min(len(names), int(width / (widest + 50))), 1)
    figure.legend(lines, labels, loc="outside upper center", ncols=columns, frameon=False, fontsize=10)
