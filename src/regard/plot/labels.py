"""Tokens along an axis: as many as there is room for at the size and zoom in sight, so that none overlap."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import rcParams
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import Formatter, Locator

from regard.plot.style import POINTS, extent, label

if TYPE_CHECKING:
    from matplotlib.axis import Axis

GAPS = (4.0, 1.0, 14.0)  # points between two labels: in a line, above each other; of numbers
MOST = 200  # labels that might all fit
ANGLES = (0, 45, 90)  # of labels below a picture, the best to read first


class Labels:
    """What is written along an axis, at an angle, and how much room each label takes there."""

    def __init__(self, tokens: Sequence[str] | None, count: int, size: float, angle: int) -> None:
        """Of `count` tokens, or numbers, in a font of this size; an angle of −1 is beside the picture."""
        self.tokens, self.count, self.size, self.angle = tokens, count, size, angle
        self._gap = GAPS[2] if tokens is None else GAPS[angle != 0]
        self._extents: dict[int, tuple[float, float]] = {}

    def name(self, place: int) -> str:
        """What is written at a place."""
        return f"{place:,}" if self.tokens is None else label(self.tokens[place])

    def extent(self, place: int) -> tuple[float, float]:
        """Width and height of a label, in points."""
        if place not in self._extents:
            self._extents[place] = extent(self.name(place), self.size)
        return self._extents[place]

    def along(self, place: int) -> float:
        """How much of the axis a label takes."""
        width, height = self.extent(place)
        if self.angle <= 0:
            return width if self.angle == 0 else height
        return height / math.sin(math.radians(self.angle))

    def across(self, place: int) -> float:
        """How far a label reaches away from the axis."""
        width, height = self.extent(place)
        if self.angle < 0:
            return width
        turned = math.radians(self.angle)
        return width * math.sin(turned) + height * math.cos(turned)

    def shown(self, first: int, last: int, cell: float) -> range:
        """The places between these whose labels have room, a token having so many points of the axis."""
        step = max(int(4 / max(cell, 1e-9)), 1)  # no label is smaller than 4 points
        while True:
            step = _round(step, 1 if self.tokens is None else 20)
            places = range(-(-first // step) * step, last + 1, step)
            if len(places) < 2:
                return places
            sizes = np.array([self.along(place) for place in places])
            if float((sizes[1:] + sizes[:-1]).max()) / 2 + self._gap <= step * cell:
                return places
            step += 1

    def reach(self, length: float) -> float:
        """How far the labels that are shown on an axis of so many points reach away from it."""
        return max((self.across(place) for place in self._shown(length)), default=0.0)

    def overhang(self, length: float) -> tuple[float, float]:
        """How far labels below an axis of so many points reach beyond its left and its right end."""
        cell, left, right = length / max(self.count, 1), 0.0, 0.0
        for place in self._shown(length):
            width, height = self.extent(place)
            turned = math.radians(self.angle)
            before = width / 2 if self.angle == 0 else width * math.cos(turned)
            after = width / 2 if self.angle == 0 else height * math.sin(turned)
            left = max(left, before - (place + 0.5) * cell)
            right = max(right, after - (self.count - place - 0.5) * cell)
        return left, right

    def _shown(self, length: float) -> range:
        return self.shown(0, self.count - 1, length / max(self.count, 1))

    def fits(self, length: float) -> bool:
        """Whether all labels have room on an axis of so many points."""
        return self.count <= MOST and len(self._shown(length)) == self.count

    def style(self) -> dict[str, Any]:
        """How matplotlib turns such a label; a token is no formula."""
        style: dict[str, Any] = {"parse_math": False, "fontsize": self.size}
        if self.angle > 0:
            style |= {"rotation": self.angle, "rotation_mode": "anchor", "ha": "right"}
            style["va"] = "center" if self.angle == 90 else "top"
        return style


def labels(axis: str, tokens: Sequence[str] | None, count: int, length: float, size: float) -> Labels:
    """What to write along an axis "x" or "y" of so many points: tokens, or numbers if there are none."""
    if axis == "y" or tokens is None:
        return Labels(tokens, count, size, -1 if axis == "y" else 0)
    turned = [Labels(tokens, count, size, angle) for angle in ANGLES]
    return next((one for one in turned if one.fits(length)), turned[-1])


def put(axis: "Axis", written: Labels) -> None:
    """Write labels along an axis, thinned to what fits whenever it is drawn."""
    axis.set_major_locator(_Places(written))
    axis.set_major_formatter(_Names(written))


def tick_size(axis: str) -> float:
    """The size of the font along an axis "x" or "y", in points."""
    size = rcParams["xtick.labelsize"] if axis == "x" else rcParams["ytick.labelsize"]
    return float(FontProperties(size=size).get_size_in_points())


def _round(step: int, least: int) -> int:
    """Every 100th is shown, say, and not every 97th; small steps are as they are."""
    if step < least:
        return step
    unit = 10 ** (len(str(step)) - 1)
    return next(unit * times for times in (1, 2, 5, 10) if unit * times >= step)


class _Places(Locator):
    def __init__(self, written: Labels) -> None:
        self.written = written

    def __call__(self) -> Any:
        """Where there are labels, of those in sight."""
        assert self.axis is not None
        low, high = sorted(self.axis.get_view_interval())
        return self.tick_values(low, high)

    def tick_values(self, vmin: float, vmax: float) -> Any:
        axes = self.axis.axes  # type: ignore[union-attr]
        box, dots = axes.bbox, axes.figure.dpi
        length = (box.width if self.axis.axis_name == "x" else box.height) * POINTS / dots  # type: ignore[union-attr]
        first, last = max(math.ceil(vmin), 0), min(math.floor(vmax), self.written.count - 1)
        if last < first or length <= 0:
            return np.array([])
        return np.array(self.written.shown(first, last, length / (vmax - vmin)), dtype=float)


class _Names(Formatter):
    def __init__(self, written: Labels) -> None:
        self.written = written

    def __call__(self, x: float, pos: int | None = None) -> str:
        place = round(x)
        return self.written.name(place) if 0 <= place < self.written.count else ""

    def format_ticks(self, values: Any) -> list[str]:
        """The labels at these places; ticks are made when they are needed, so that they are turned here."""
        for tick in self.axis.get_major_ticks(len(values)):  # type: ignore[union-attr]
            tick.label1.set(**self.written.style())
        return [self(value) for value in values]
