"""Grids of matrices. Labels are measured before the layout is computed, so none of them is cut off."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard._util.extras import require
from regard._util.text import pluralize, printable
from regard.errors import ArgumentError, ShapeError
from regard.plot.style import (
    POINTS_PER_INCH,
    Theme,
    check_suffix,
    fit_text,
    plot_style,
    save,
    text_color_on,
    text_size,
    token_label,
    wrap_text,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

    from regard.plot.labels import AxisLabels

MAX_NUMBERED = 12  # maximum number of rows and columns for which each cell shows its weight
MAX_PANELS = 1024
# sizes in points; a matrix is as large as its labels require, within bounds
_CELL, _NUMBERED_CELL, _BARE_CELL = 15.5, 34.0, 6.5  # cells with a token label, a number, or neither
_MIN_SIDE, _MAX_SIDE = 170.0, 1240.0  # bounds for a single matrix
_MIN_GRID_SIDE, _MAX_GRID_WIDTH = 62.0, 1500.0  # bounds for a matrix in a grid and for the whole grid
_PAD, _MARGIN, _GAP = 4.0, 10.0, 9.0
_LINE, _AXIS_NAME = 15.0, 18.0  # heights of a line of text and of an axis name
_COLORBAR = 66.0  # width, including tick labels
_LOG_RANGE = 1e4  # ratio of the largest to the smallest value on a logarithmic color scale
_NOISE = 1e-4  # negative values below this fraction of the largest weight are rounding errors


class Panel(NamedTuple):
    """A matrix to draw, the number of queries and keys it represents, and their tokens."""

    matrix: NDArray[Any]
    rows: int
    columns: int
    queries: Sequence[str] | None = None
    keys: Sequence[str] | None = None
    title: str = ""

    def check(self) -> "Panel":
        """Return the panel; raise a ShapeError unless there is one token for each query and key."""
        for side, tokens, size in (("queries", self.queries, self.rows), ("keys", self.keys, self.columns)):
            if tokens is not None and len(tokens) != size:
                raise ShapeError(
                    f"Got {pluralize(len(tokens), 'token')} for {size:,} {side}; pass one token for each."
                )
        return self


@dataclass(frozen=True)
class GridOptions:
    """Options for drawing a grid of panels.

    axis_names: names of the query axis and the key axis. row_titles: a title for each row of panels.
    shared: whether all panels have the same tokens, which are then shown only at the left and bottom edges.
    colorbar: label of the color bar. legend: colors and their names, instead of a color bar.
    limits: values of the first and last color.
    """

    title: str = ""
    axis_names: tuple[str, str] = ("queries", "keys")
    row_titles: Sequence[str] = ()
    shared: bool = False
    log: bool = False
    dark: bool = False
    colorbar: str = "weight"
    legend: Sequence[tuple[str, str]] = ()
    limits: tuple[float, float] | None = None


def draw_panels(
    panels: Sequence[Sequence[Panel]], options: GridOptions, path: str | os.PathLike[str]
) -> Path:
    """Draw rows of panels and write the picture."""
    check_suffix(path)
    flat = [panel.check() for row in panels for panel in row]
    if not flat or not all(panel.matrix.size for panel in flat):
        raise ArgumentError("Nothing to draw: pass weights with at least one query and one key.")
    if len(flat) > MAX_PANELS:
        raise ArgumentError(f"Cannot draw {len(flat):,} matrices; select at most {MAX_PANELS:,}.")
    texts = [token_label(t) for panel in flat for tokens in (panel.queries, panel.keys) for t in tokens or ()]
    titles = (options.title, *options.row_titles, *(panel.title for panel in flat))
    with plot_style([*texts, *map(printable, titles)], dark=options.dark) as theme:
        return save(_Grid(panels, options, theme).draw(), path)


def draw_matrix(
    axes: "Axes", panel: Panel, norm: "Normalize", colormap: "Colormap", *, numbers: bool
) -> "AxesImage":
    """Draw a panel's matrix on axes, with a number in each cell if requested."""
    axes.grid(False, which="both")
    box = (-0.5, panel.columns - 0.5, panel.rows - 0.5, -0.5)
    image = axes.imshow(
        panel.matrix, cmap=colormap, norm=norm, extent=box, aspect="auto", interpolation="nearest"
    )
    axes.tick_params(length=0 if panel.queries or panel.keys else 3)
    if numbers:
        for (row, column), weight in np.ndenumerate(panel.matrix):
            color = text_color_on(image.to_rgba(np.array([weight]))[0]) if np.isfinite(weight) else None
            axes.text(column, row, f"{weight:.2f}", ha="center", va="center", color=color, fontsize=8)
    return image


def color_norm(
    matrices: Sequence[NDArray[Any]], *, log: bool, limits: tuple[float, float] | None = None
) -> "Normalize":
    """Return a color scale: from 0 to the largest weight, symmetric for signed values, or within limits."""
    require("matplotlib", "Drawing")
    from matplotlib.colors import LogNorm, Normalize

    if limits is not None:
        return (LogNorm if log else Normalize)(*_check_limits(limits, log=log), clip=log)
    finite = [matrix[np.isfinite(matrix)] for matrix in matrices]
    largest = max(float(values.max(initial=0)) for values in finite)
    smallest = min(float(values.min(initial=0)) for values in finite)
    top = largest or 1.0
    if log:
        return LogNorm(max(top, 1e-30) / _LOG_RANGE, max(top, 1e-30), clip=True)
    if smallest < -_NOISE * top:
        bound = max(-smallest, largest)
        return Normalize(-bound, bound)
    return Normalize(0.0, top)


def _check_limits(limits: Any, *, log: bool) -> tuple[float, float]:
    try:
        low, high = (float(limit) for limit in limits)
    except (TypeError, ValueError):
        raise ArgumentError(
            f"limits={limits!r:.80}: pass two numbers, the values of the first and last color: limits=(0, 1)."
        ) from None
    if not -math.inf < low < high < math.inf:
        raise ArgumentError(
            f"limits=({low:g}, {high:g}): both must be finite, and the first must be smaller than the second."
        )
    if log and low <= 0:
        top = high if high > 0 else 1.0
        raise ArgumentError(
            f"limits=({low:g}, {high:g}): a logarithmic scale needs positive limits, such as "
            f"({top / _LOG_RANGE:g}, {top:g}). Change the limits, or remove log=True."
        )
    return low, high


def fits_numbers(panel: Panel, width: float, height: float) -> bool:
    """Return whether numbers fit in the cells of a panel of the given size, in points."""
    few = max(panel.matrix.shape) <= MAX_NUMBERED and panel.matrix.shape == (panel.rows, panel.columns)
    return few and width / panel.columns >= 25 and height / panel.rows >= 12


def label_axes(axes: "Axes", panel: Panel, width: float, height: float) -> None:
    """Label both axes with their tokens; width and height are in points."""
    from regard.plot.labels import axis_labels, set_labels, tick_fontsize

    set_labels(axes.yaxis, axis_labels("y", panel.queries, panel.rows, height, tick_fontsize("y")))
    set_labels(axes.xaxis, axis_labels("x", panel.keys, panel.columns, width, tick_fontsize("x")))


class _MeasuredPanel(NamedTuple):
    """A panel with its size, its labels, and the space they need around it, in points."""

    panel: Panel
    width: float
    height: float
    query_labels: "AxisLabels | None"
    key_labels: "AxisLabels | None"
    left: float
    right: float
    bottom: float
    top: float


class _Grid:
    """A figure with rows of panels."""

    def __init__(self, panels: Sequence[Sequence[Panel]], options: GridOptions, theme: Theme) -> None:
        self.options, self.theme = options, theme
        self.columns = max(map(len, panels))
        self.compact = len(panels) * self.columns > 1 and options.shared
        flat = [panel for row in panels for panel in row]
        self.single, longest = len(flat) == 1, max(max(panel.rows, panel.columns) for panel in flat)
        has_tokens = bool(options.legend) or any(panel.queries or panel.keys for panel in flat)
        self.cell = _CELL if has_tokens else _BARE_CELL
        if longest <= MAX_NUMBERED and not options.legend:
            self.cell = _NUMBERED_CELL
        # with more than 160 tokens, only a few have labels, so the matrix can be smaller
        self.max_side = _MAX_SIDE if longest <= 160 and has_tokens else 0.4 * _MAX_SIDE
        self.fontsize = 7.0 if self.compact else 9.0
        self.panels = [
            [
                # a panel is the lowest in its column if the next row is too short to have one below it
                self._measure(panel, column >= len([*panels, []][row + 1]), column == 0)
                for column, panel in enumerate(row_panels)
            ]
            for row, row_panels in enumerate(panels)
        ]
        self.norm = color_norm([panel.matrix for panel in flat], log=options.log, limits=options.limits)
        measured = [panel for row_panels in self.panels for panel in row_panels]
        fits = all(fits_numbers(panel.panel, panel.width, panel.height) for panel in measured)
        self.numbered = fits and not options.legend
        self.side_width = 0.0 if self.numbered else _COLORBAR
        self.colormap = theme.colormap_for(self.norm)
        if options.legend:
            from matplotlib.colors import LinearSegmentedColormap

            self.side_width = 30 + max(text_size(name, 9)[0] for _, name in options.legend)
            colors = [color for color, _ in options.legend]
            self.colormap = LinearSegmentedColormap.from_list("legend", colors)

    def _measure(self, panel: Panel, is_lowest: bool, is_first_column: bool) -> _MeasuredPanel:
        from regard.plot.labels import axis_labels

        width, height = self._size(panel)
        query_labels = key_labels = None
        left = right = bottom = 0.0
        axis_name = 0 if self.compact else _AXIS_NAME
        if is_first_column or not self.options.shared:
            query_labels = axis_labels("y", panel.queries, panel.rows, height, self.fontsize)
            left = query_labels.depth(height) + _PAD + axis_name
        if is_lowest or not self.options.shared:
            key_labels = axis_labels("x", panel.keys, panel.columns, width, self.fontsize)
            bottom = key_labels.depth(width) + _PAD + axis_name
            overhang = key_labels.overhang(width)
            left, right = max(left, overhang[0]), overhang[1]
        top = _LINE + _PAD if panel.title else 0.0
        return _MeasuredPanel(panel, width, height, query_labels, key_labels, left, right, bottom, top)

    def _size(self, panel: Panel) -> tuple[float, float]:
        """Return the width and height of a matrix. Cells are square unless one side is much longer."""
        longest = max(panel.rows, panel.columns)
        if self.compact:
            max_side = min(260.0, max(_MAX_GRID_WIDTH / self.columns, _MIN_GRID_SIDE))
            side = min(max(10.5 * longest, _MIN_GRID_SIDE), max_side)
        else:
            side = min(max(self.cell * longest, _MIN_SIDE if self.single else 0.0), self.max_side)
        return max(side * panel.columns / longest, 28.0), max(side * panel.rows / longest, 28.0)

    def draw(self) -> "Figure":
        """Draw the title, the panels, and the color bar or legend."""
        from matplotlib.figure import Figure

        rows, options = self.panels, self.options
        columns = [[row[j] for row in rows if j < len(row)] for j in range(self.columns)]
        # left edges of the columns and upper edges of the rows, excluding margins
        x_edges = _edges(columns, "left", "width", "right", _LINE if options.row_titles else 0.0)
        right = x_edges[-1]
        width = max(right + self.side_width, 220.0) + 2 * _MARGIN
        title = wrap_text(options.title, width - 2 * _MARGIN, 11)
        title_height = (title.count("\n") + 1) * _LINE + 8 if title else 0.0
        y_edges = _edges(rows, "top", "height", "bottom", title_height)
        caption = _LINE if self.compact else 0.0
        min_height = title_height + 90.0 if self.side_width else 0.0
        height = max(y_edges[-1] + caption, min_height) + 2 * _MARGIN
        self.page = (width, height)
        figure = Figure(figsize=(width / POINTS_PER_INCH, height / POINTS_PER_INCH))
        for y, row in zip(y_edges, rows, strict=False):
            for x, panel in zip(x_edges, row, strict=False):
                image = self._draw_panel(figure, panel, x, y)
        for y, row, text in zip(y_edges, rows, options.row_titles, strict=False):
            text = fit_text(printable(text), row[0].height, 9)
            self._text(figure, text, 0, y + row[0].height / 2, rotation=90, va="center", fontsize=9)
        if title:
            self._text(figure, title, 0, 0, va="top", fontsize=11, linespacing=1.25)
        if self.compact:
            self._draw_caption(figure, (x_edges[0] + right) / 2, y_edges[-1] + caption)
        if options.legend:
            self._draw_legend(figure, right + 14, y_edges[0])
        elif self.side_width:
            bar_height = y_edges[-1] - y_edges[0] - max(panel.bottom for panel in rows[-1])
            self._draw_colorbar(figure, image, right + 14, y_edges[0], min(bar_height, 220))
        return figure

    def _draw_panel(self, figure: "Figure", measured: _MeasuredPanel, x: float, y: float) -> "AxesImage":
        from regard.plot.labels import set_labels

        panel = measured.panel
        axes = self._axes(figure, x, y, measured.width, measured.height)
        image = draw_matrix(axes, panel, self.norm, self.colormap, numbers=self.numbered)
        all_labels = measured.query_labels, measured.key_labels
        names = self.options.axis_names
        for axis, labels, name in zip((axes.yaxis, axes.xaxis), all_labels, names, strict=True):
            if labels is None:
                axis.set_ticks([])
                continue
            set_labels(axis, labels)
            if not self.compact:
                axis.set_label_text(name)
                axis.labelpad = 4
        axes.tick_params(pad=3)
        if self.options.legend and max(panel.rows, panel.columns) <= 64:
            _draw_cell_borders(axes, panel, self.theme.background)
        if panel.title:
            fontsize = 9 if self.compact else 10
            title = fit_text(printable(panel.title), measured.width, fontsize)
            axes.set_title(title, fontsize=fontsize, pad=_PAD)
        return image

    def _draw_caption(self, figure: "Figure", center: float, bottom: float) -> None:
        """Name the axes once, below all panels."""
        rows, columns = self.options.axis_names
        text = fit_text(f"rows: {rows}, columns: {columns}", self.page[0] - 2 * _MARGIN, 8)
        center = max(center, text_size(text, 8)[0] / 2)
        style = {"ha": "center", "va": "bottom", "fontsize": 8, "color": self.theme.muted}
        self._text(figure, text, center, bottom, **style)

    def _draw_colorbar(self, figure: "Figure", image: "AxesImage", x: float, y: float, height: float) -> None:
        from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

        axes = self._axes(figure, x, y, 9, max(height, 60))
        bar = figure.colorbar(image, cax=axes)
        bar.locator = LogLocator(numticks=6) if self.options.log else MaxNLocator(5)
        bar.formatter = FuncFormatter(lambda value, _: f"{value:g}")
        bar.update_ticks()
        bar.ax.minorticks_off()
        bar.outline.set(edgecolor=self.theme.border, linewidth=0.6)  # the lower end has the background color
        bar.ax.tick_params(length=2, pad=2, labelsize=8)
        bar.set_label(self.options.colorbar, fontsize=9, labelpad=3)

    def _draw_legend(self, figure: "Figure", x: float, y: float) -> None:
        for number, (color, name) in enumerate(reversed(self.options.legend)):
            axes = self._axes(figure, x, y + 18 * number, 9, 9)
            axes.set(facecolor=color, xticks=[], yticks=[])
            self._text(figure, name, x + 14, y + 18 * number + 4.5, va="center", fontsize=9)

    def _axes(self, figure: "Figure", x: float, y: float, width: float, height: float) -> "Axes":
        """Add axes at a position in points, measured from the upper left corner inside the margins."""
        page_width, page_height = self.page
        left, bottom = x + _MARGIN, page_height - _MARGIN - y - height
        box = (left / page_width, bottom / page_height, width / page_width, height / page_height)
        return figure.add_axes(box)

    def _text(self, figure: "Figure", text: str, x: float, y: float, **style: Any) -> None:
        width, height = self.page
        figure.text((x + _MARGIN) / width, 1 - (y + _MARGIN) / height, text, **style)


def _edges(
    groups: Sequence[Sequence[_MeasuredPanel]], before: str, size: str, after: str, start: float
) -> list[float]:
    """Return the positions where each row or column of panels starts and where the last one ends."""
    edges = []
    for panels in groups:
        spaces = (max(float(getattr(panel, name)) for panel in panels) for name in (before, size, after))
        space_before, length, space_after = spaces
        edges.append(start + space_before)
        start += space_before + length + space_after + _GAP
    return [*edges, start - _GAP]


def _draw_cell_borders(axes: "Axes", panel: Panel, color: str) -> None:
    axes.hlines(np.arange(panel.rows - 1) + 0.5, -0.5, panel.columns - 0.5, color=color, linewidth=1)
    axes.vlines(np.arange(panel.columns - 1) + 0.5, -0.5, panel.rows - 0.5, color=color, linewidth=1)
