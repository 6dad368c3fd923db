"""Matrices side by side on paper: labels are measured first, so that cells are square and nothing is cut."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard._util.text import printable
from regard.errors import ArgumentError, ShapeError
from regard.plot.style import (
    POINTS,
    Theme,
    check_ending,
    drawing,
    extent,
    fitted,
    ink_on,
    label,
    save,
    wrapped,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

    from regard.plot.labels import Labels

NUMBERS = 12  # up to this many rows and columns, each cell shows its weight
MOST = 1024  # panels of a picture
# sizes in points; matrices are as large as their labels need, within bounds
_CELL, _NUMBERED, _BARE = 15.5, 34.0, 6.5  # a cell beside a token; one with a number in it; without either
_LEAST, _LARGEST = 170.0, 1240.0  # the side of a matrix alone
_SMALL, _WIDEST = 62.0, 1500.0  # one of many; and all of them
_PAD, _MARGIN, _GAP = 4.0, 10.0, 9.0
_LINE, _NAME = 15.0, 18.0  # a line of text; the name of an axis
_BAR = 66.0  # the colour bar with its numbers
_DECADES = 1e4  # of weights that logarithmic colours spread
_NOISE = 1e-4  # of the largest weight: what is below 0 by less is 0 but for rounding


class Panel(NamedTuple):
    """A matrix to draw, the number of queries and keys it stands for, and what they are called."""

    matrix: NDArray[Any]
    rows: int
    columns: int
    queries: Sequence[str] | None = None
    keys: Sequence[str] | None = None
    title: str = ""

    def check(self) -> "Panel":
        """Itself, if each query and each key has its own token."""
        for what, tokens, size in (("queries", self.queries, self.rows), ("keys", self.keys, self.columns)):
            if tokens is not None and len(tokens) != size:
                raise ShapeError(f"there are {len(tokens)} tokens for {size} {what}; each needs its own.")
        return self


@dataclass(frozen=True)
class Sheet:
    """How panels are drawn.

    names: of the axes. sides: names of the rows of panels. shared: all panels have the same tokens, which
    stand at the outer edges alone. bar: the name of the colours. key: instead of a bar, colours and what they
    are called.
    """

    title: str = ""
    names: tuple[str, str] = ("queries", "keys")
    sides: Sequence[str] = ()
    shared: bool = False
    log: bool = False
    dark: bool = False
    bar: str = "weight"
    key: Sequence[tuple[str, str]] = ()
    limits: tuple[float, float] | None = None


def draw_panels(panels: Sequence[Sequence[Panel]], sheet: Sheet, path: str | os.PathLike[str]) -> Path:
    """Draw rows of panels and write the picture."""
    check_ending(path)
    some = [panel.check() for row in panels for panel in row]
    if not some or not all(panel.matrix.size for panel in some):
        raise ArgumentError("there is nothing to draw: give weights of at least one query and one key.")
    if len(some) > MOST:
        raise ArgumentError(
            f"a picture of {len(some):,} matrices could not be read; choose some of them, at most {MOST:,}."
        )
    texts = [label(t) for panel in some for side in (panel.queries, panel.keys) for t in side or ()]
    texts += [printable(text) for text in (sheet.title, *sheet.sides, *(panel.title for panel in some))]
    with drawing(texts, dark=sheet.dark) as theme:
        return save(_Paper(panels, sheet, theme).draw(), path)


def paint(
    axes: "Axes", panel: Panel, norm: "Normalize", palette: "Colormap", *, numbers: bool
) -> "AxesImage":
    """A panel's matrix on axes, with a number in each cell if there are few of them."""
    axes.grid(False, which="both")
    box = (-0.5, panel.columns - 0.5, panel.rows - 0.5, -0.5)
    image = axes.imshow(
        panel.matrix, cmap=palette, norm=norm, extent=box, aspect="auto", interpolation="nearest"
    )
    axes.tick_params(length=0 if panel.queries or panel.keys else 3)
    if numbers:
        for (row, column), weight in np.ndenumerate(panel.matrix):
            ink = ink_on(image.to_rgba(np.array([weight]))[0]) if np.isfinite(weight) else None
            axes.text(column, row, f"{weight:.2f}", ha="center", va="center", color=ink, fontsize=8)
    return image


def scale(
    matrices: Sequence[NDArray[Any]], *, log: bool, limits: tuple[float, float] | None = None
) -> "Normalize":
    """Colours from 0 to the largest weight; as far below 0 as above it if there are values of both signs; or
    logarithmic ones; or between these limits."""
    from matplotlib.colors import LogNorm, Normalize

    if limits is not None:
        return (LogNorm if log else Normalize)(*_ends(limits, log=log), clip=log)
    finite = [matrix[np.isfinite(matrix)] for matrix in matrices]
    largest = max(float(some.max(initial=0)) for some in finite) or 1.0
    if log:
        return LogNorm(max(largest, 1e-30) / _DECADES, max(largest, 1e-30), clip=True)
    least = min(float(some.min(initial=0)) for some in finite)
    if least < -_NOISE * largest:
        most = max(-least, max(float(some.max(initial=0)) for some in finite))
        return Normalize(-most, most)
    return Normalize(0.0, largest)


def _ends(limits: Any, *, log: bool) -> tuple[float, float]:
    """Limits as two numbers between which there are colours."""
    try:
        low, high = (float(limit) for limit in limits)
    except (TypeError, ValueError):
        raise ArgumentError(
            f"limits are {limits!r:.80}; give two numbers, the values of the first and of the last colour: "
            "limits=(0, 1)."
        ) from None
    if not -math.inf < low < high < math.inf:
        raise ArgumentError(
            f"limits are {low:g} and {high:g}; both must be finite, and the first smaller than the second: "
            "limits=(0, 1)."
        )
    if log and low <= 0:
        raise ArgumentError(
            f"limits are {low:g} and {high:g}, and log=True has no colour for 0 and below; begin above 0, "
            f"limits=({high / _DECADES if high > 0 else 1e-4:g}, {high if high > 0 else 1:g}), or leave log "
            "away."
        )
    return low, high


def has_numbers(panel: Panel, width: float, height: float) -> bool:
    """Whether a number has room in each cell of a panel of so many points."""
    few = max(panel.matrix.shape) <= NUMBERS and panel.matrix.shape == (panel.rows, panel.columns)
    return few and width / panel.columns >= 25 and height / panel.rows >= 12


def write_labels(axes: "Axes", panel: Panel, width: float, height: float) -> None:
    """Tokens along both axes, which are about so many points long."""
    from regard.plot.labels import labels, put, tick_size

    put(axes.yaxis, labels("y", panel.queries, panel.rows, height, tick_size("y")))
    put(axes.xaxis, labels("x", panel.keys, panel.columns, width, tick_size("x")))


class _Placed(NamedTuple):
    """A panel with its size and its labels, and the room that these take around it, all in points."""

    panel: Panel
    width: float
    height: float
    beside: "Labels | None"
    below: "Labels | None"
    left: float
    right: float
    bottom: float
    top: float


class _Paper:
    """A figure with panels: where each stands, and everything around them."""

    def __init__(self, panels: Sequence[Sequence[Panel]], sheet: Sheet, theme: Theme) -> None:
        self.sheet, self.theme = sheet, theme
        self.columns = max(map(len, panels))
        self.many = len(panels) * self.columns > 1 and sheet.shared
        some = [panel for row in panels for panel in row]
        self.alone, most = len(some) == 1, max(max(panel.rows, panel.columns) for panel in some)
        named = sheet.key or any(panel.queries or panel.keys for panel in some)
        self.cell = _NUMBERED if most <= NUMBERS and not sheet.key else _CELL if named else _BARE
        self.largest = _LARGEST if most <= 160 and named else 0.4 * _LARGEST  # of more, few can be named
        self.font = 7.0 if self.many else 9.0
        self.placed = [
            [self._measure(panel, row == len(panels) - 1, column == 0) for column, panel in enumerate(some)]
            for row, some in enumerate(panels)
        ]
        self.norm = scale([panel.matrix for panel in some], log=sheet.log, limits=sheet.limits)
        numbered = all(has_numbers(one.panel, one.width, one.height) for row in self.placed for one in row)
        self.numbered = numbered and not sheet.key
        self.bar = 0.0 if self.numbered else _BAR
        self.palette = theme.palette_for(self.norm)
        if sheet.key:
            from matplotlib.colors import LinearSegmentedColormap

            self.bar = 30 + max(extent(name, 9)[0] for _, name in sheet.key)
            self.palette = LinearSegmentedColormap.from_list("key", [colour for colour, _ in sheet.key])

    def _measure(self, panel: Panel, last: bool, first: bool) -> _Placed:
        from regard.plot.labels import labels

        width, height = self._size(panel)
        beside = below = None
        left = right = bottom = 0.0
        if first or not self.sheet.shared:
            beside = labels("y", panel.queries, panel.rows, height, self.font)
            left = beside.reach(height) + _PAD + (0 if self.many else _NAME)
        if last or not self.sheet.shared:
            below = labels("x", panel.keys, panel.columns, width, self.font)
            bottom = below.reach(width) + _PAD + (0 if self.many else _NAME)
            over = below.overhang(width)
            left, right = max(left, over[0]), over[1]
        top = _LINE + _PAD if panel.title else 0.0
        return _Placed(panel, width, height, beside, below, left, right, bottom, top)

    def _size(self, panel: Panel) -> tuple[float, float]:
        """Of a matrix: square cells, unless one side has far more of them."""
        most = max(panel.rows, panel.columns)
        if self.many:
            side = min(max(10.5 * most, _SMALL), 260.0, max(_WIDEST / self.columns, _SMALL))
        else:
            side = min(max(self.cell * most, _LEAST if self.alone else 0.0), self.largest)
        return max(side * panel.columns / most, 28.0), max(side * panel.rows / most, 28.0)

    def draw(self) -> "Figure":
        """The figure: title, panels, and what the colours mean."""
        from matplotlib.figure import Figure

        rows, sheet = self.placed, self.sheet
        columns = [[row[j] for row in rows if j < len(row)] for j in range(self.columns)]
        # where each column and each row of matrices begins, from the left and from the top
        side = _LINE if sheet.sides else 0.0
        across = _spread([(_most(c, "left"), _most(c, "width"), _most(c, "right")) for c in columns], side)
        inner = across[-1]
        width = max(inner + self.bar, 220.0) + 2 * _MARGIN
        title = wrapped(sheet.title, width - 2 * _MARGIN, 11)
        head = (title.count("\n") + 1) * _LINE + 8 if title else 0.0
        down = _spread([(_most(r, "top"), _most(r, "height"), _most(r, "bottom")) for r in rows], head)
        name = _LINE if self.many else 0.0
        height = max(down[-1] + name, head + 90.0 if self.bar else 0.0) + 2 * _MARGIN
        self.page = (width, height)
        figure = Figure(figsize=(width / POINTS, height / POINTS))
        for y, row in zip(down, rows, strict=False):
            for x, one in zip(across, row, strict=False):
                image = self._panel(figure, one, x, y)
        for y, row, text in zip(down, rows, sheet.sides, strict=False):
            text = fitted(printable(text), row[0].height, 9)
            self._text(figure, text, 0, y + row[0].height / 2, rotation=90, va="center", fontsize=9)
        if title:
            self._text(figure, title, 0, 0, va="top", fontsize=11, linespacing=1.25)
        if self.many:
            middle = (across[0] + inner) / 2
            about = f"a row for each of the {sheet.names[0]}, a column for each of the {sheet.names[1]}"
            about = fitted(about, width - 2 * _MARGIN, 8)
            middle = max(middle, extent(about, 8)[0] / 2)
            colour = self.theme.quiet
            self._text(
                figure, about, middle, down[-1] + name, ha="center", va="bottom", fontsize=8, color=colour
            )
        if sheet.key:
            self._key(figure, inner + 14, down[0])
        elif self.bar:
            self._bar(
                figure, image, inner + 14, down[0], min(down[-1] - down[0] - _most(rows[-1], "bottom"), 220)
            )
        return figure

    def _panel(self, figure: "Figure", one: _Placed, x: float, y: float) -> "AxesImage":
        from regard.plot.labels import put

        axes = self._axes(figure, x, y, one.width, one.height)
        image = paint(axes, one.panel, self.norm, self.palette, numbers=self.numbered)
        for axis, written, name in zip(
            (axes.yaxis, axes.xaxis), (one.beside, one.below), self.sheet.names, strict=True
        ):
            if written is None:
                axis.set_ticks([])
                continue
            put(axis, written)
            if not self.many:
                axis.set_label_text(name)
                axis.labelpad = 4
        axes.tick_params(pad=3)
        if self.sheet.key and max(one.panel.rows, one.panel.columns) <= 64:
            _lines(axes, one.panel, self.theme.paper)
        if one.panel.title:
            size = 9 if self.many else 10
            axes.set_title(fitted(printable(one.panel.title), one.width, size), fontsize=size, pad=_PAD)
        return image

    def _bar(self, figure: "Figure", image: "AxesImage", x: float, y: float, height: float) -> None:
        """What the colours mean, at the right."""
        from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

        axes = self._axes(figure, x, y, 9, max(height, 60))
        bar = figure.colorbar(image, cax=axes)
        bar.locator = LogLocator(numticks=6) if self.sheet.log else MaxNLocator(5)
        bar.formatter = FuncFormatter(lambda value, _: f"{value:g}")
        bar.update_ticks()
        bar.ax.minorticks_off()
        bar.outline.set(edgecolor=self.theme.rule, linewidth=0.6)  # its lower end is like the paper
        bar.ax.tick_params(length=2, pad=2, labelsize=8)
        bar.set_label(self.sheet.bar, fontsize=9, labelpad=3)

    def _key(self, figure: "Figure", x: float, y: float) -> None:
        """Colours and their names, at the right."""
        for number, (colour, name) in enumerate(reversed(self.sheet.key)):
            axes = self._axes(figure, x, y + 18 * number, 9, 9)
            axes.set(facecolor=colour, xticks=[], yticks=[])
            self._text(figure, name, x + 14, y + 18 * number + 4.5, va="center", fontsize=9)

    def _axes(self, figure: "Figure", x: float, y: float, width: float, height: float) -> "Axes":
        """Axes at a place of the page, in points from its upper left corner, margins not counted."""
        across, down = self.page
        left, bottom = x + _MARGIN, down - _MARGIN - y - height
        return figure.add_axes((left / across, bottom / down, width / across, height / down))

    def _text(self, figure: "Figure", text: str, x: float, y: float, **style: Any) -> None:
        across, down = self.page
        figure.text((x + _MARGIN) / across, 1 - (y + _MARGIN) / down, text, **style)


def _most(some: Sequence[_Placed], what: str) -> float:
    return max(float(getattr(one, what)) for one in some)


def _spread(rooms: Sequence[tuple[float, float, float]], start: float) -> list[float]:
    """Where each begins, of things that need room before and after them; and where the last room ends."""
    places = []
    for before, size, after in rooms:
        places.append(start + before)
        start += before + size + after + _GAP
    return [*places, start - _GAP]


def _lines(axes: "Axes", panel: Panel, colour: str) -> None:
    """Between cells."""
    axes.hlines(np.arange(panel.rows - 1) + 0.5, -0.5, panel.columns - 0.5, color=colour, linewidth=1)
    axes.vlines(np.arange(panel.columns - 1) + 0.5, -0.5, panel.rows - 0.5, color=colour, linewidth=1)
