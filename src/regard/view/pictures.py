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


def heatmap(
    axes: "Axes",
    weights: Weights | Tensor,
    *,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    title: str | None = None,
) -> "AxesImage":
    """Draw a matrix of weights, a row per query and a column per key, the tokens along both axes.

    >>> import matplotlib.pyplot as plt, torch, regard
    >>> from regard.view.pictures import heatmap
    >>> x = torch.eye(3)
    >>> figure, axes = plt.subplots()
    >>> image = heatmap(axes, regard.attend(x, x, x)[1], queries=list("abc"), keys=list("abc"))
    >>> image.get_array().shape
    (3, 3)
    >>> plt.close(figure)
    """
    dense = weights.dense() if isinstance(weights, Weights) else weights
    if dense.dim() != 2:
        raise ShapeError(
            f"a heat map shows one matrix and got weights of shape {tuple(dense.shape)}; choose a head "
            "first, weights.heads(0) or weights[0, 0]."
        )
    matrix = dense.detach().cpu().float().numpy()
    image = axes.imshow(matrix, cmap=PALETTE, vmin=0, aspect="auto", interpolation="nearest")
    _label(axes.yaxis, queries, matrix.shape[0], "queries")
    _label(axes.xaxis, keys, matrix.shape[1], "keys")
    if max(matrix.shape) <= NUMBERS:
        middle = matrix.max(initial=0) / 2
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
        if size <= NUMBERS:
            axis.set_ticks(range(size))
        return
    if len(tokens) != size:
        raise ShapeError(f"there are {len(tokens)} tokens for {size} {name}; each needs its own.")
    shown = range(0, size, -(-size // LABELS))
    axis.set_ticks(shown, [tokens[i] for i in shown])
    if axis.axis_name == "x" and max(map(len, tokens), default=0) > 4:
        for label in axis.get_ticklabels():
            label.set(rotation=45, horizontalalignment="right")
