"""Pictures of weights, with matplotlib."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from regard.errors import ShapeError
from regard.mechanism.weights import Weights

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

PALETTE = "cividis"  # readable for the colour-blind, and in grey
LABELS = 40  # more tokens than this along an axis are thinned out
NUMBERS = 12  # up to this many rows and columns, each cell shows its weight
CELLS = 512  # weights of more rows or columns than this are drawn as a map of block means


def heatmap(
    axes: "Axes",
    weights: Weights | Tensor,
    *,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    title: str | None = None,
    log: bool = False,
) -> "AxesImage":
    """Draw a matrix of weights, a row per query and a column per key, the tokens along both axes.

    Large lazy weights are pooled first, so that they never become dense. `log` spreads small weights
    over the colours, down to a ten-thousandth of the largest.

    >>> import matplotlib.pyplot as plt, torch, regard
    >>> from regard.view.pictures import heatmap
    >>> x = torch.eye(3)
    >>> figure, axes = plt.subplots()
    >>> image = heatmap(axes, regard.attend(x, x, x)[1], queries=list("abc"), keys=list("abc"))
    >>> image.get_array().shape
    (3, 3)
    >>> plt.close(figure)
    """
    if weights.dim() != 2:
        raise ShapeError(
            f"a heat map shows one matrix and got weights of shape {tuple(weights.shape)}; choose one, "
            f"weights[{', '.join('0' * (weights.dim() - 2)) or '…'}], or weights.mean('heads')."
        )
    rows, columns = weights.shape
    if isinstance(weights, Weights):
        weights = weights.pool(CELLS, CELLS) if max(rows, columns) > CELLS else weights.dense()
    matrix = weights.detach().cpu().float().numpy()
    colours: dict[str, Any] = {"vmin": 0}
    if log:
        from matplotlib.colors import LogNorm

        largest = max(float(matrix.max(initial=0)), 1e-30)
        colours = {"norm": LogNorm(largest / 1e4, largest, clip=True)}
    box = (-0.5, columns - 0.5, rows - 0.5, -0.5)
    image = axes.imshow(matrix, cmap=PALETTE, extent=box, aspect="auto", interpolation="nearest", **colours)
    _label(axes.yaxis, queries, rows, "queries")
    _label(axes.xaxis, keys, columns, "keys")
    if max(matrix.shape) <= NUMBERS:
        middle = 0.55 * matrix.max(initial=0)  # where this palette turns light
        for (row, column), weight in np.ndenumerate(matrix):
            colour = "white" if weight < middle else "black"
            axes.text(column, row, f"{weight:.2f}", ha="center", va="center", color=colour, fontsize=8)
    if title:
        axes.set_title(title)
    return image


def _label(axis: Any, tokens: Sequence[str] | None, size: int, name: str) -> None:
    """Tokens along an axis, thinned so that they do not overlap; without tokens, the axis' name."""
    if tokens is None:
        axis.set_label_text(name)
        step = max(size // 4, 1) if size > NUMBERS else 1
        axis.set_ticks(range(0, size, step))
        return
    if len(tokens) != size:
        raise ShapeError(f"there are {len(tokens)} tokens for {size} {name}; each needs its own.")
    shown = range(0, size, -(-size // LABELS))
    axis.set_ticks(shown, [tokens[i] for i in shown])
    if axis.axis_name == "x" and sum(map(len, (tokens[i] for i in shown))) > 40:
        for label in axis.get_ticklabels():
            label.set(rotation=45, horizontalalignment="right")
