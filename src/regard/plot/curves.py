"""Curves: how models learn, how they do on short sentences and on long ones, how alike words are, biases."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard._util.text import printable, shorten
from regard.errors import ArgumentError
from regard.models.encoders.base import Comparison
from regard.plot.style import Theme, check_ending, drawing, legend, save, style, tidy
from regard.translation.training.logs import LogRow, best_row, read_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PARTS = 25  # of a curve over which its training loss is smoothed

Log = str | os.PathLike[str] | Sequence[LogRow]


def draw_curves(logs: Mapping[str, Log], path: str | os.PathLike[str], *, dark: bool = False) -> Path:
    """Draw how models learned: loss, dev loss and dev BLEU, over updates and over minutes.

    logs: for each name a log.csv, its folder, or rows that `read_log` has read.
    path: .png, .svg or .pdf.
    dark: on dark paper.

    >>> import tempfile
    >>> from regard.translation.training.logs import LogRow
    >>> from regard.plot.curves import draw_curves
    >>> rows = [LogRow(step, loss=100 / step, seconds=step, dev_loss=120 / step) for step in (10, 20, 30)]
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
    with drawing(list(read), dark=dark) as theme:
        figure = _figure(10, 7.2 if judged else 4.2)
        axes = figure.subplots(1 + judged, 2, sharex="col", sharey="row", squeeze=False)
        for number, rows in enumerate(read.values()):
            for column, places in enumerate((_steps(rows), _minutes(rows))):
                _draw_losses(axes[0, column], places, rows, style(number, theme))
                if judged:
                    _draw_bleu(axes[1, column], places, rows, style(number, theme), theme)
        _label(axes, theme)
        for one in axes[-1]:
            one.set_xlim(left=0)  # from the beginning, also if there is only one point
        if judged:
            axes[1, 0].set_ylim(0, max(1.0, axes[1, 0].get_ylim()[1]))
        legend(figure, list(read), [style(number, theme) for number in range(len(read))])
        return save(figure, path)


def draw_by_length(
    curves: Mapping[str, Sequence[Sequence[Any]]],
    path: str | os.PathLike[str],
    *,
    score: str = "BLEU",
    title: str | None = None,
    dark: bool = False,
) -> Path:
    """Draw how models do on short sentences and on long ones.

    curves: for each model, entries that begin with lengths, a score and a number of sentences, as `by_length`
        gives them.
    path: .png, .svg or .pdf.
    score: what the score is called.
    title: what stands on top.
    dark: on dark paper.

    >>> import tempfile
    >>> from regard.plot.curves import draw_by_length
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
    with drawing([*curves, *names, title or ""], dark=dark) as theme:
        figure = _figure(8, 4.8)
        axes = figure.subplots()
        for number, entries in enumerate(curves.values()):
            places = [lengths.index(entry[0]) for entry in entries]
            axes.plot(
                places, [entry[1] for entry in entries], **style(number, theme), markersize=6, linewidth=2
            )
        axes.set_xticks(range(len(lengths)), names)
        axes.set_xlim(-0.5, len(lengths) - 0.5)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("words of the source sentence (number of sentences)")
        axes.set_ylabel(score)
        axes.set_title(printable(title or ""))
        tidy(axes)
        legend(figure, list(curves), [style(number, theme) for number in range(len(curves))])
        return save(figure, path)


def draw_comparison(
    comparisons: Comparison | Mapping[str, Comparison],
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    dark: bool = False,
) -> Path:
    """Draw how alike two words are, layer by layer: one comparison, or several by name.

    comparisons: what `WordEncoder.compare` found.
    path: .png, .svg or .pdf.
    title: what stands on top.
    dark: on dark paper.

    The layer at which an encoder tells meanings apart best has a star.

    >>> import tempfile, torch
    >>> from regard.models.encoders.base import Comparison
    >>> from regard.plot.curves import draw_comparison
    >>> found = Comparison(("bark", "bark"), ("Dogs bark.", "Bark of trees"), torch.tensor([1.0, 0.25]), 1)
    >>> draw_comparison({"bark": found}, tempfile.mkdtemp() + "/bark.png").name
    'bark.png'
    """
    check_ending(path)
    some = {"": comparisons} if isinstance(comparisons, Comparison) else dict(comparisons)
    if not some:
        raise ArgumentError("draw_comparison got no comparisons; give what encoder.compare found.")
    names = [_compared(name, one) for name, one in some.items()]
    layers = max(len(one.similarities) for one in some.values())
    with drawing([*names, title or ""], dark=dark) as theme:
        figure = _figure(8, 4.4)
        axes = figure.subplots()
        for number, one in enumerate(some.values()):
            values = one.similarities.detach().cpu().tolist()
            look = style(number, theme)
            axes.plot(range(len(values)), values, **look, markersize=5, linewidth=2, clip_on=False)
            if len(values) > 1:
                _star(axes, one.best_layer % len(values), one.similarity, look["color"], theme)
        ticks = range(0, layers, -(-layers // 26))
        axes.set_xticks(ticks, ["embedding" if layer == 0 else str(layer) for layer in ticks])
        axes.set_xlim(-0.5, layers - 0.5)
        low = min(0.0, *(float(one.similarities.min()) for one in some.values()))
        axes.set_ylim(low * 1.08, 1.02)
        axes.set_xlabel("layer")
        axes.set_ylabel("cosine of the two words")
        axes.set_title(printable(title or ""))
        tidy(axes)
        legend(figure, names, [style(number, theme) for number in range(len(names))])
        return save(figure, path)


def draw_by_distance(
    distances: Sequence[float],
    biases: Sequence[Sequence[float]],
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    dark: bool = False,
) -> Path:
    """Draw biases that depend on the distance key − query alone: a line for each head.

    distances, biases: the distances, and for each head a bias for each of them.
    path: .png, .svg or .pdf.
    title: what stands on top.
    dark: on dark paper.

    >>> import tempfile
    >>> from regard.plot.curves import draw_by_distance
    >>> draw_by_distance([-1, 0, 1], [[-0.5, 0, -0.5], [-2, 0, -2]], tempfile.mkdtemp() + "/biases.svg").name
    'biases.svg'
    """
    check_ending(path)
    names = ["all heads"] if len(biases) == 1 else [f"head {head}" for head in range(len(biases))]
    with drawing([title or ""], dark=dark) as theme:
        figure = _figure(6.4, 4 + 0.05 * len(names))
        axes = figure.subplots()
        styles = [{"color": colour} for colour in _shades(len(names), theme)]
        for line, look in zip(biases, styles, strict=True):
            axes.plot(distances, line, **look, linewidth=1.8)
        axes.set_xlabel("distance: key − query")
        axes.set_ylabel("bias of the score")
        axes.set_title(printable(title or ""))
        tidy(axes)
        legend(figure, names, styles)
        return save(figure, path)


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _compared(name: str, one: Comparison) -> str:
    """What is compared: a name, or two words in their sentences."""
    if name:
        return name
    (first, second), sentences = one.words, [shorten(printable(sentence), 44) for sentence in one.sentences]
    return f"{printable(first)} in “{sentences[0]}” and {printable(second)} in “{sentences[1]}”"


def _shades(number: int, theme: Theme) -> list[Any]:
    """Distinct colours for a few lines, and for more the palette's, from one end to the other."""
    if number <= len(theme.lines):
        return list(theme.lines[:number])
    palette, first = theme.palette, 0.3  # without the end that is like the paper
    return [palette(first + (1 - first) * i / (number - 1)) for i in range(number)]


def _steps(rows: Sequence[LogRow]) -> list[float]:
    return [float(row.step) for row in rows]


def _minutes(rows: Sequence[LogRow]) -> list[float]:
    """Of each row; a row without a time is not drawn."""
    return [float("nan") if row.seconds is None else row.seconds / 60 for row in rows]


def _draw_losses(axes: "Axes", places: Sequence[float], rows: Sequence[LogRow], look: dict[str, Any]) -> None:
    """Training: thin, and smoothed; dev: thick, with markers."""
    trained = [(x, row.loss) for x, row in zip(places, rows, strict=True) if row.loss is not None]
    if trained:
        x, loss = (list(each) for each in zip(*trained, strict=True))
        axes.plot(x, loss, color=look["color"], linewidth=0.6, alpha=0.3)
        alone = "." if len(x) == 1 else None  # of one point, no line could be seen
        axes.plot(x, _smooth(loss), color=look["color"], marker=alone, linewidth=1.2, linestyle="--")
    judged = [(x, row.dev_loss) for x, row in zip(places, rows, strict=True) if row.dev_loss is not None]
    if judged:
        axes.plot(*zip(*judged, strict=True), **look, markersize=4, linewidth=1.8)


def _draw_bleu(
    axes: "Axes", places: Sequence[float], rows: Sequence[LogRow], look: dict[str, Any], theme: Theme
) -> None:
    judged = [(x, row.dev_bleu) for x, row in zip(places, rows, strict=True) if row.dev_bleu is not None]
    if not judged:
        return
    axes.plot(*zip(*judged, strict=True), **look, markersize=4, linewidth=1.8)
    found = best_row(rows)
    if found is None or found.dev_bleu is None:
        return
    x, best = places[rows.index(found)], found.dev_bleu
    _star(axes, x, best, look["color"], theme)
    axes.annotate(
        f"{best:.1f}",
        (x, best),
        (0, 8),
        textcoords="offset points",
        ha="center",
        color=look["color"],
        fontsize=9,
    )
    axes.margins(y=0.12)


def _star(axes: "Axes", x: float, y: float, colour: str, theme: Theme) -> None:
    """Where it is best."""
    axes.plot(
        [x],
        [y],
        marker="*",
        markersize=14,
        color=colour,
        markeredgecolor=theme.paper,
        zorder=5,
        clip_on=False,
    )


def _smooth(values: Sequence[float]) -> list[float]:
    """Means of a few neighbours, fewer at both ends."""
    half = len(values) // PARTS // 2
    parts = (values[max(i - half, 0) : i + half + 1] for i in range(len(values)))
    return [sum(part) / len(part) for part in parts]


def _label(axes: Any, theme: Theme) -> None:
    """What the axes of learning curves are, and what their lines are."""
    from matplotlib.lines import Line2D

    for axis, name in zip(axes[:, 0], ("loss per token", "BLEU on the dev data"), strict=False):
        axis.set_ylabel(name)
    for axis, name in zip(axes[-1], ("updates", "minutes of training"), strict=True):
        axis.set_xlabel(name)
        axis.xaxis.set_major_formatter("{x:,g}")
    for axis in axes.flat:
        tidy(axis)
    grey = theme.quiet
    lines = [Line2D([], [], color=grey, linestyle="--"), Line2D([], [], color=grey, marker="o")]
    names = ["in training, with dropout and smoothed labels", "on the dev data, without"]
    axes[0, 1].legend(lines, names, loc="upper right", frameon=False)
