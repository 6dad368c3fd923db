"""Axis labels: as many tokens as fit at the current size and zoom without overlap."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import rcParams
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import Formatter, Locator

from regard.plot.style import POINTS_PER_INCH, text_size, token_label

if TYPE_CHECKING:
    from matplotlib.axis import Axis

GAPS = (4.0, 1.0, 14.0)  # points between labels: horizontal tokens, other tokens, numbers
MAX_LABELS = 200  # above this number, labels are thinned out without measuring whether all fit
ANGLES = (0, 45, 90)  # rotations of labels below a matrix, in order of preference


class AxisLabels:
    """The labels of one axis, and their widths and heights in points.

    tokens: the labels; None to use numbers. count: number of positions. fontsize: font size in points.
    angle: rotation of labels below a matrix; −1 for labels to its left.
    """

    def __init__(self, tokens: Sequence[str] | None, count: int, fontsize: float, angle: int) -> None:
        self.tokens, self.count, self.fontsize, self.angle = tokens, count, fontsize, angle
        self._gap = GAPS[2] if tokens is None else GAPS[angle != 0]
        self._sizes: dict[int, tuple[float, float]] = {}

    def text(self, position: int) -> str:
        """Return the label of a position."""
        return f"{position:,}" if self.tokens is None else token_label(self.tokens[position])

    def size(self, position: int) -> tuple[float, float]:
        """Return the width and height of a label before rotation."""
        if position not in self._sizes:
            self._sizes[position] = text_size(self.text(position), self.fontsize)
        return self._sizes[position]

    def length_along(self, position: int) -> float:
        """Return the length that a label takes up along the axis."""
        width, height = self.size(position)
        if self.angle <= 0:
            return width if self.angle == 0 else height
        return height / math.sin(math.radians(self.angle))

    def depth_of(self, position: int) -> float:
        """Return how far a label extends from the axis."""
        width, height = self.size(position)
        if self.angle < 0:
            return width
        angle = math.radians(self.angle)
        return width * math.sin(angle) + height * math.cos(angle)

    def fitting(self, first: int, last: int, cell: float) -> range:
        """Return the positions from `first` to `last` whose labels fit at `cell` points per position."""
        step = max(int(4 / max(cell, 1e-9)), 1)  # no label is smaller than 4 points
        while True:
            step = _round(step, 1 if self.tokens is None else 20)
            positions = range(-(-first // step) * step, last + 1, step)
            if len(positions) < 2:
                return positions
            lengths = np.array([self.length_along(position) for position in positions])
            if float((lengths[1:] + lengths[:-1]).max()) / 2 + self._gap <= step * cell:
                return positions
            step += 1

    def depth(self, length: float) -> float:
        """Return how far the labels extend from an axis of this length."""
        return max((self.depth_of(position) for position in self._fitting(length)), default=0.0)

    def overhang(self, length: float) -> tuple[float, float]:
        """Return how far labels below an axis of this length extend beyond its left and right ends."""
        cell, left, right = length / max(self.count, 1), 0.0, 0.0
        angle = math.radians(self.angle)
        for position in self._fitting(length):
            width, height = self.size(position)
            before = width / 2 if self.angle == 0 else width * math.cos(angle)
            after = width / 2 if self.angle == 0 else height * math.sin(angle)
            left = max(left, before - (position + 0.5) * cell)
            right = max(right, after - (self.count - position - 0.5) * cell)
        return left, right

    def _fitting(self, length: float) -> range:
        return self.fitting(0, self.count - 1, length / max(self.count, 1))

    def all_fit(self, length: float) -> bool:
        """Return whether all labels fit on an axis of this length."""
        return self.count <= MAX_LABELS and len(self._fitting(length)) == self.count

    def properties(self) -> dict[str, Any]:
        """Return the matplotlib text properties of a label."""
        properties: dict[str, Any] = {"parse_math": False, "fontsize": self.fontsize}
        if self.angle > 0:
            properties |= {"rotation": self.angle, "rotation_mode": "anchor", "ha": "right"}
            properties["va"] = "center" if self.angle == 90 else "top"
        return properties


def axis_labels(
    axis: str, tokens: Sequence[str] | None, count: int, length: float, fontsize: float
) -> AxisLabels:
    """Create the labels of an "x" or "y" axis of this length: tokens, or numbers if there are none."""
    if axis == "y" or tokens is None:
        return AxisLabels(tokens, count, fontsize, -1 if axis == "y" else 0)
    rotated = [AxisLabels(tokens, count, fontsize, angle) for angle in ANGLES]
    return next((labels for labels in rotated if labels.all_fit(length)), rotated[-1])


def set_labels(axis: "Axis", labels: AxisLabels) -> None:
    """Set the labels of an axis. Each time the axis is drawn, it shows the labels that fit."""
    axis.set_major_locator(_LabelLocator(labels))
    axis.set_major_formatter(_LabelFormatter(labels))


def tick_fontsize(axis: str) -> float:
    """Return the font size of the tick labels on an "x" or "y" axis, in points."""
    size = rcParams["xtick.labelsize"] if axis == "x" else rcParams["ytick.labelsize"]
    return float(FontProperties(size=size).get_size_in_points())


def _round(step: int, min: int) -> int:
    """Round up to 1, 2 or 5 times a power of ten; steps below `min` stay unchanged."""
    if step < min:
        return step
    unit = 10 ** (len(str(step)) - 1)
    return next(unit * times for times in (1, 2, 5, 10) if unit * times >= step)


class _LabelLocator(Locator):
    def __init__(self, labels: AxisLabels) -> None:
        self.labels = labels

    def __call__(self) -> Any:
        """Return the positions of the labels in the current view."""
        assert self.axis is not None
        low, high = sorted(self.axis.get_view_interval())
        return self.tick_values(low, high)

    def tick_values(self, vmin: float, vmax: float) -> Any:
        axes = self.axis.axes  # type: ignore[union-attr]
        size = axes.bbox.width if self.axis.axis_name == "x" else axes.bbox.height  # type: ignore[union-attr]
        length = size * POINTS_PER_INCH / axes.figure.dpi
        first, last = max(math.ceil(vmin), 0), min(math.floor(vmax), self.labels.count - 1)
        if last < first or length <= 0:
            return np.array([])
        return np.array(self.labels.fitting(first, last, length / (vmax - vmin)), dtype=float)


class _LabelFormatter(Formatter):
    def __init__(self, labels: AxisLabels) -> None:
        self.labels = labels

    def __call__(self, x: float, pos: int | None = None) -> str:
        position = round(x)
        return self.labels.text(position) if 0 <= position < self.labels.count else ""

    def format_ticks(self, values: Any) -> list[str]:
        """Return the labels at the given positions and rotate their ticks, which are created when drawing."""
        for tick in self.axis.get_major_ticks(len(values)):  # type: ignore[union-attr]
            tick.label1.set(**self.labels.properties())
        return [self(value) for value in values]
