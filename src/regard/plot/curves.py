"""Curves: training, scores by sentence length, word similarities by layer, and relative biases."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard._util.text import printable, shorten
from regard.errors import ArgumentError
from regard.models.encoders.base import Comparison
from regard.plot.style import Theme, add_legend, check_suffix, line_style, plot_style, save, style_axes
from regard.translation.training.logs import LogRow, best_row, read_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMOOTHING = 25  # the training loss is smoothed over 1/25 of the curve

Log = str | os.PathLike[str] | Sequence[LogRow]


def draw_curves(logs: Mapping[str, Log], path: str | os.PathLike[str], *, dark: bool = False) -> Path:
    """Draw training curves: training loss, validation loss and BLEU, over updates and over minutes.

    logs: mapping from the name of each run to a log.csv file, its folder, or the rows from `read_log`.
    path: output file, .png, .svg or .pdf.
    dark: dark background.

    >>> import tempfile
    >>> from regard.translation.training.logs import LogRow
    >>> from regard.plot.curves import draw_curves
    >>> rows = [LogRow(step, loss=100 / step, seconds=step, dev_loss=120 / step) for step in (10, 20, 30)]
    >>> draw_curves({"small": rows}, tempfile.mkdtemp() + "/curves.png").name
    'curves.png'
    """
    if not logs:
        raise ArgumentError("draw_curves got no logs; pass at least one: {'small': 'small/log.csv'}.")
    check_suffix(path)
    rows_by_name = {
        name: read_log(log) if isinstance(log, str | os.PathLike) else log for name, log in logs.items()
    }
    for name, rows in rows_by_name.items():
        if not rows:
            raise ArgumentError(f"The log of {name!r} has no rows yet; wait for the first report.")
    names = list(rows_by_name)
    has_bleu = any(row.dev_bleu is not None for rows in rows_by_name.values() for row in rows)
    with plot_style(names, dark=dark) as theme:
        figure = _figure(10, 7.2 if has_bleu else 4.2)
        axes = figure.subplots(1 + has_bleu, 2, sharex="col", sharey="row", squeeze=False)
        styles = [line_style(number, theme) for number in range(len(names))]
        for rows, style in zip(rows_by_name.values(), styles, strict=True):
            for column, x in enumerate(([float(row.step) for row in rows], _minutes(rows))):
                _draw_losses(axes[0, column], x, rows, style)
                if has_bleu:
                    _draw_bleu(axes[1, column], x, rows, style, theme)
        _label_axes(axes)
        for bottom in axes[-1]:
            bottom.set_xlim(left=0)
        if has_bleu:
            axes[1, 0].set_ylim(0, max(1.0, axes[1, 0].get_ylim()[1]))
        add_legend(figure, names, styles)
        _add_line_legend(figure, theme)
        return save(figure, path)


def draw_by_length(
    curves: Mapping[str, Sequence[Sequence[Any]]],
    path: str | os.PathLike[str],
    *,
    score: str = "BLEU",
    title: str | None = None,
    dark: bool = False,
) -> Path:
    """Draw scores by sentence length.

    curves: mapping from the name of each model to the result of `by_length`.
    path: output file, .png, .svg or .pdf.
    score: name of the score.
    title: title of the picture.
    dark: dark background.

    >>> import tempfile
    >>> from regard.plot.curves import draw_by_length
    >>> curves = {
    ...     "plain": [("1–5", 30, 99), ("6–9", 10, 80)],
    ...     "attention": [("1–5", 32, 99), ("6–9", 31, 80)],
    ... }
    >>> draw_by_length(curves, tempfile.mkdtemp() + "/lengths.svg").name
    'lengths.svg'
    """
    check_suffix(path)
    lengths = list(dict.fromkeys(entry[0] for entries in curves.values() for entry in entries))
    if not lengths:
        raise ArgumentError("draw_by_length got no lengths; pass the result of by_length for each model.")
    if all(isinstance(length, tuple) for length in lengths):
        lengths.sort(key=lambda length: length[0])
    counts = {entry[0]: entry[2] for entries in curves.values() for entry in entries}
    ticks = [f"{length}\n({counts[length]:,})" for length in lengths]
    with plot_style([*curves, *ticks, title or ""], dark=dark) as theme:
        figure = _figure(8, 4.8)
        axes = figure.subplots()
        styles = [line_style(number, theme) for number in range(len(curves))]
        for entries, style in zip(curves.values(), styles, strict=True):
            positions = [lengths.index(entry[0]) for entry in entries]
            axes.plot(positions, [entry[1] for entry in entries], **style, markersize=6, linewidth=2)
        axes.set_xticks(range(len(lengths)), ticks)
        axes.set_xlim(-0.5, len(lengths) - 0.5)
        axes.set_ylim(bottom=0)
        labels = "words in the source sentence (number of sentences)", score
        return _save_lines(figure, list(curves), styles, labels, title, path)


def draw_comparison(
    comparisons: Comparison | Mapping[str, Comparison],
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    dark: bool = False,
) -> Path:
    """Draw the similarity of two words by layer.

    comparisons: a result of `WordEncoder.compare`, or a mapping from names to results.
    path: output file, .png, .svg or .pdf.
    title: title of the picture.
    dark: dark background.

    A star marks the layer that distinguishes meanings best.

    >>> import tempfile, torch
    >>> from regard.models.encoders.base import Comparison
    >>> from regard.plot.curves import draw_comparison
    >>> bark = Comparison(("bark", "bark"), ("Dogs bark.", "Bark of trees"), torch.tensor([1.0, 0.25]), 1)
    >>> draw_comparison({"bark": bark}, tempfile.mkdtemp() + "/bark.png").name
    'bark.png'
    """
    check_suffix(path)
    named = {"": comparisons} if isinstance(comparisons, Comparison) else dict(comparisons)
    if not named:
        raise ArgumentError("draw_comparison got no comparisons; pass results of encoder.compare.")
    names = [name or _comparison_name(comparison) for name, comparison in named.items()]
    layers = max(len(comparison.similarities) for comparison in named.values())
    with plot_style([*names, title or ""], dark=dark) as theme:
        figure = _figure(8, 4.4)
        axes = figure.subplots()
        styles = [line_style(number, theme) for number in range(len(names))]
        for comparison, style in zip(named.values(), styles, strict=True):
            values = comparison.similarities.detach().cpu().tolist()
            axes.plot(range(len(values)), values, **style, markersize=5, linewidth=2, clip_on=False)
            if len(values) > 1:
                layer = comparison.best_layer % len(values)
                _draw_star(axes, layer, comparison.similarity, style["color"], theme)
        ticks = range(0, layers, -(-layers // 26))
        axes.set_xticks(ticks, ["embedding" if layer == 0 else str(layer) for layer in ticks])
        axes.set_xlim(-0.5, layers - 0.5)
        low = min(0.0, *(float(comparison.similarities.min()) for comparison in named.values()))
        axes.set_ylim(low * 1.08, 1.02)
        labels = "layer", "cosine similarity of the two words"
        return _save_lines(figure, names, styles, labels, title, path)


def draw_by_distance(
    distances: Sequence[float],
    biases: Sequence[Sequence[float]],
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    dark: bool = False,
) -> Path:
    """Draw relative biases over the distance key − query, one line per head.

    distances: values of key − query. biases: for each head, one bias per distance.
    path: output file, .png, .svg or .pdf.
    title: title of the picture.
    dark: dark background.

    >>> import tempfile
    >>> from regard.plot.curves import draw_by_distance
    >>> draw_by_distance([-1, 0, 1], [[-0.5, 0, -0.5], [-2, 0, -2]], tempfile.mkdtemp() + "/biases.svg").name
    'biases.svg'
    """
    check_suffix(path)
    names = ["all heads"] if len(biases) == 1 else [f"head {head}" for head in range(len(biases))]
    with plot_style([title or ""], dark=dark) as theme:
        figure = _figure(6.4, 4 + 0.05 * len(names))
        axes = figure.subplots()
        styles = [{"color": color} for color in _line_colors(len(names), theme)]
        for values, style in zip(biases, styles, strict=True):
            axes.plot(distances, values, **style, linewidth=1.8)
        labels = "distance: key − query", "bias"
        return _save_lines(figure, names, styles, labels, title, path)


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save_lines(
    figure: "Figure",
    names: Sequence[str],
    styles: Sequence[dict[str, Any]],
    labels: tuple[str, str],
    title: str | None,
    path: str | os.PathLike[str],
) -> Path:
    """Label the axes and the lines, and write the picture."""
    (axes,) = figure.axes
    axes.set(xlabel=labels[0], ylabel=labels[1], title=printable(title or ""))
    style_axes(axes)
    add_legend(figure, names, styles)
    return save(figure, path)


def _comparison_name(comparison: Comparison) -> str:
    first, second = map(printable, comparison.words)
    sentences = [shorten(printable(sentence), 44) for sentence in comparison.sentences]
    return f"{first} in “{sentences[0]}” and {second} in “{sentences[1]}”"


def _line_colors(count: int, theme: Theme) -> list[Any]:
    """Return distinct colors for a few lines, or evenly spaced colors from the colormap for more."""
    if count <= len(theme.lines):
        return list(theme.lines[:count])
    first = 0.3  # smaller values are too close to the background
    return [theme.colormap(first + (1 - first) * i / (count - 1)) for i in range(count)]


def _minutes(rows: Sequence[LogRow]) -> list[float]:
    """Return the time of each row in minutes; rows without a time are NaN, which is not drawn."""
    return [float("nan") if row.seconds is None else row.seconds / 60 for row in rows]


def _draw_losses(axes: "Axes", x: Sequence[float], rows: Sequence[LogRow], style: dict[str, Any]) -> None:
    """Draw the training loss, raw and smoothed, and the validation loss, with markers."""
    training = [(at, row.loss) for at, row in zip(x, rows, strict=True) if row.loss is not None]
    if training:
        steps, loss = (list(values) for values in zip(*training, strict=True))
        axes.plot(steps, loss, color=style["color"], linewidth=0.6, alpha=0.3)
        marker = "." if len(steps) == 1 else None  # a line through one point is invisible
        axes.plot(steps, _smooth(loss), color=style["color"], marker=marker, linewidth=1.2, linestyle="--")
    validation = [(at, row.dev_loss) for at, row in zip(x, rows, strict=True) if row.dev_loss is not None]
    if validation:
        axes.plot(*zip(*validation, strict=True), **style, markersize=4, linewidth=1.8)


def _draw_bleu(
    axes: "Axes", x: Sequence[float], rows: Sequence[LogRow], style: dict[str, Any], theme: Theme
) -> None:
    bleu = [(at, row.dev_bleu) for at, row in zip(x, rows, strict=True) if row.dev_bleu is not None]
    if not bleu:
        return
    axes.plot(*zip(*bleu, strict=True), **style, markersize=4, linewidth=1.8)
    best = best_row(rows)
    if best is None or best.dev_bleu is None:
        return
    point = x[rows.index(best)], best.dev_bleu
    _draw_star(axes, *point, style["color"], theme)
    label = {"textcoords": "offset points", "ha": "center", "color": style["color"], "fontsize": 9}
    axes.annotate(f"{best.dev_bleu:.1f}", point, (0, 8), **label)
    axes.margins(y=0.12)


def _draw_star(axes: "Axes", x: float, y: float, color: str, theme: Theme) -> None:
    """Mark the best point."""
    star = {"marker": "*", "markersize": 14, "color": color, "markeredgecolor": theme.background}
    axes.plot([x], [y], **star, zorder=5, clip_on=False)  # type: ignore[arg-type]


def _smooth(values: Sequence[float]) -> list[float]:
    """Return centered moving averages, over fewer values at both ends."""
    half = len(values) // SMOOTHING // 2
    windows = (values[max(i - half, 0) : i + half + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _label_axes(axes: Any) -> None:
    for axis, name in zip(axes[:, 0], ("loss per token", "validation BLEU"), strict=False):
        axis.set_ylabel(name)
    for axis, name in zip(axes[-1], ("updates", "minutes of training"), strict=True):
        axis.set_xlabel(name)
        axis.xaxis.set_major_formatter("{x:,g}")
    for axis in axes.flat:
        style_axes(axis)


def _add_line_legend(figure: "Figure", theme: Theme) -> None:
    """Add a legend for dashed and solid lines, outside the axes so that it covers no curve."""
    from matplotlib.lines import Line2D

    lines = [
        Line2D([], [], color=theme.muted, linestyle="--"),
        Line2D([], [], color=theme.muted, marker="o"),
    ]
    names = ["training (with dropout and label smoothing)", "validation (without)"]
    figure.legend(lines, names, loc="outside lower center", ncols=2, frameon=False)
