"""Curves: how models learn, and how they do on short sentences and on long ones."""

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.errors import ArgumentError
from regard.mechanism.files import write_whole
from regard.mechanism.text import plain
from regard.translation.logs import Row, read_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg", ".pdf")
# Okabe and Ito 2008: distinct for the colour-blind too; the markers are for paper without colours
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")
MARKERS = "osD^vP*X"
PARTS = 25  # of a curve over which its training loss is smoothed

Log = str | os.PathLike[str] | Sequence[Row]


def draw_curves(logs: Mapping[str, Log], path: str | os.PathLike[str]) -> Path:
    """Draw how models learned: loss, dev loss and dev BLEU, over updates and over minutes.

    logs: for each name a log.csv, its folder, or rows that `read_log` has read.

    >>> import tempfile
    >>> from regard.translation.logs import Row
    >>> from regard.view.curves import draw_curves
    >>> rows = [Row(step, loss=100 / step, seconds=step, dev_loss=120 / step) for step in (10, 20, 30)]
    >>> draw_curves({"small": rows}, tempfile.mkdtemp() + "/curves.png").name
    'curves.png'
    """
    if not logs:
        raise ArgumentError("draw_curves got no logs; give at least one: {'small': 'small/log.csv'}.")
    check_ending(path)
    read = {name: read_log(log) if isinstance(log, str | os.PathLike) else log for name, log in logs.items()}
    for name, rows in read.items():
        if not rows:
            raise ArgumentError(f"the log of {name!r} has no rows yet; wait for its first report.")
    judged = any(row.dev_bleu is not None for rows in read.values() for row in rows)
    with drawing((10, 7.2 if judged else 4.2), list(read)) as figure:
        axes = figure.subplots(1 + judged, 2, sharex="col", sharey="row", squeeze=False)
        for number, rows in enumerate(read.values()):
            for column, places in enumerate((_steps(rows), _minutes(rows))):
                _draw_losses(axes[0, column], places, rows, number)
                if judged:
                    _draw_bleu(axes[1, column], places, rows, number)
        _label(axes)
        _legend(figure, list(read))
        return save(figure, path)


def draw_by_length(
    curves: Mapping[str, Sequence[Sequence[Any]]],
    path: str | os.PathLike[str],
    *,
    score: str = "BLEU",
    title: str | None = None,
) -> Path:
    """Draw how models do on short sentences and on long ones.

    curves: for each model, entries that begin with lengths, a score and a number of sentences, as `by_length`
        gives them. score: what the score is called.

    >>> import tempfile
    >>> from regard.view.curves import draw_by_length
    >>> curves = {
    ...     "plain": [("1–5", 30, 99), ("6–9", 10, 80)],
    ...     "attention": [("1–5", 32, 99), ("6–9", 31, 80)],
    ... }
    >>> draw_by_length(curves, tempfile.mkdtemp() + "/lengths.svg").name
    'lengths.svg'
    """
    check_ending(path)
    # in the order of lengths, which are tuples, or in that of their appearance
    lengths = list(dict.fromkeys(entry[0] for entries in curves.values() for entry in entries))
    if not lengths:
        raise ArgumentError("draw_by_length got no lengths; give what by_length found for each model.")
    if all(isinstance(each, tuple) for each in lengths):
        lengths.sort(key=lambda each: each[0])
    counts = {entry[0]: entry[2] for entries in curves.values() for entry in entries}
    names = [f"{each}\n({counts[each]:,})" for each in lengths]
    with drawing((8, 4.8), [*curves, *names]) as figure:
        axes = figure.subplots()
        for number, entries in enumerate(curves.values()):
            places = [lengths.index(entry[0]) for entry in entries]
            axes.plot(places, [entry[1] for entry in entries], **_style(number), markersize=6, linewidth=2)
        axes.set_xticks(range(len(lengths)), names)
        axes.set_xlim(-0.5, len(lengths) - 0.5)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("words of the source sentence (number of sentences)")
        axes.set_ylabel(score)
        axes.set_title(title or "")
        _tidy(axes)
        _legend(figure, list(curves))
        return save(figure, path)


def _steps(rows: Sequence[Row]) -> list[float]:
    return [float(row.step) for row in rows]


def _minutes(rows: Sequence[Row]) -> list[float]:
    """Of each row; a row without a time is not drawn."""
    return [float("nan") if row.seconds is None else row.seconds / 60 for row in rows]


def _draw_losses(axes: "Axes", places: Sequence[float], rows: Sequence[Row], number: int) -> None:
    """Training: thin, and smoothed; dev: thick, with markers."""
    style = _style(number)
    trained = [(x, row.loss) for x, row in zip(places, rows, strict=True) if row.loss is not None]
    if trained:
        x, loss = (list(each) for each in zip(*trained, strict=True))
        axes.plot(x, loss, color=style["color"], linewidth=0.6, alpha=0.3)
        alone = "." if len(x) == 1 else None  # of one point, no line could be seen
        axes.plot(x, _smooth(loss), color=style["color"], marker=alone, linewidth=1.2, linestyle="--")
    judged = [(x, row.dev_loss) for x, row in zip(places, rows, strict=True) if row.dev_loss is not None]
    if judged:
        axes.plot(*zip(*judged, strict=True), **style, markersize=4, linewidth=1.8)


def _draw_bleu(axes: "Axes", places: Sequence[float], rows: Sequence[Row], number: int) -> None:
    judged = [(x, row.dev_bleu) for x, row in zip(places, rows, strict=True) if row.dev_bleu is not None]
    if not judged:
        return
    axes.plot(*zip(*judged, strict=True), **_style(number), markersize=4, linewidth=1.8)
    x, best = max(judged, key=lambda one: one[1])
    colour = _style(number)["color"]
    axes.plot([x], [best], marker="*", markersize=14, color=colour, markeredgecolor="white", zorder=5)
    axes.annotate(
        f"{best:.1f}", (x, best), (0, 8), textcoords="offset points", ha="center", color=colour, fontsize=9
    )
    axes.margins(y=0.12)


def _smooth(values: Sequence[float]) -> list[float]:
    """Means of a few neighbours, fewer at both ends."""
    half = len(values) // PARTS // 2
    parts = (values[max(i - half, 0) : i + half + 1] for i in range(len(values)))
    return [sum(part) / len(part) for part in parts]


def _style(number: int) -> dict[str, Any]:
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}


def _label(axes: Any) -> None:
    """What the axes of learning curves are, and what their lines are."""
    from matplotlib.lines import Line2D

    for axis, name in zip(axes[:, 0], ("loss per token", "BLEU on the dev data"), strict=False):
        axis.set_ylabel(name)
    for axis, name in zip(axes[-1], ("updates", "minutes of training"), strict=True):
        axis.set_xlabel(name)
        axis.xaxis.set_major_formatter("{x:,g}")
    for axis in axes.flat:
        _tidy(axis)
    lines = [Line2D([], [], color="0.4", linestyle="--"), Line2D([], [], color="0.4", marker="o")]
    axes[0, 1].legend(lines, ["in training", "on the dev data"], loc="upper right", frameon=False)


def _tidy(axes: "Axes") -> None:
    axes.grid(True, color="0.88", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: "Figure", names: Sequence[str]) -> None:
    """Above everything, so that it hides no curve."""
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], **_style(number)) for number in range(len(names))]
    # a name that begins with an underscore would be left out
    labels = [f" {plain(name)}" if name.startswith("_") else plain(name) for name in names]
    longest = max(map(len, labels))
    columns = max(min(len(names), 80 // (longest + 8)), 1)
    figure.legend(lines, labels, loc="outside upper center", ncols=columns, frameon=False)


@contextmanager
def drawing(size: tuple[float, float], texts: Sequence[str]) -> Iterator["Figure"]:
    """A figure to draw on, with fonts for these texts, in which $ is a letter like others."""
    from matplotlib import rc_context, rcParams
    from matplotlib.figure import Figure

    fonts = [*rcParams["font.family"], *_fonts("".join(texts))]
    with rc_context({"text.parse_math": False, "svg.hashsalt": "regard", "font.family": fonts}):
        yield Figure(figsize=size, layout="constrained")


def _fonts(text: str) -> list[str]:
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
    content = BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ ", UserWarning)
        figure.savefig(content, format=Path(path).suffix[1:].lower(), dpi=150)
    return write_whole(path, content.getvalue())


def check_ending(path: str | os.PathLike[str]) -> None:
    """Before anything is computed: a picture of a kind that can be written."""
    if Path(path).suffix.lower() not in ENDINGS:
        raise ArgumentError(f"the picture {os.fspath(path)!r} can end in {', '.join(ENDINGS)}.")
