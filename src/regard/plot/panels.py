"""Convert weights and alignments to the panels of a picture: pooling, titles and arrangement."""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard._util.text import pluralize, type_name
from regard.errors import ArgumentError, DTypeError, ShapeError
from regard.inspection.layer_view import pool_dense
from regard.mechanism.weights.weights import Weights
from regard.plot.grids import MAX_PANELS, Panel

MAX_CELLS = 512  # maximum side of a matrix; larger matrices are drawn as block means
MAX_HEADS_IN_ROW = 6  # maximum number of heads in one row; more are drawn as a grid

Tokens = Sequence[str] | None


class AlignmentLike(Protocol):
    """The words of two sentences, and weights with one row per target word and one column per source word."""

    @property
    def source_words(self) -> Sequence[str]: ...
    @property
    def target_words(self) -> Sequence[str]: ...
    @property
    def weights(self) -> Tensor | NDArray[Any]: ...


def as_weights(weights: Any) -> Weights | Tensor:
    """Convert arrays and lists to tensors."""
    if isinstance(weights, Weights | Tensor):
        return weights
    try:
        return torch.as_tensor(np.array(weights))  # a copy: torch does not accept negative strides
    except (TypeError, ValueError, RuntimeError):
        raise DTypeError(
            f"Cannot draw non-numeric values ({type_name(weights)}); pass lazy weights, a tensor or an array."
        ) from None


def make_panel(
    weights: Weights | Tensor, queries: Tokens = None, keys: Tokens = None, title: str = ""
) -> Panel:
    """Create the panel of one matrix, pooled if it is large."""
    rows, columns = weights.shape
    return Panel(pool_weights(weights, MAX_CELLS), rows, columns, queries, keys, title)


def make_panels(
    matrices: NDArray[Any], size: Sequence[int], tokens: Sequence[Tokens], titles: Sequence[str]
) -> list[Panel]:
    """Create one panel for each of several matrices that share their tokens."""
    (rows, columns), (queries, keys) = size, tokens
    pairs = zip(matrices, titles, strict=True)
    return [Panel(matrix, rows, columns, queries, keys, title) for matrix, title in pairs]


def pool_weights(weights: Weights | Tensor, max_cells: int) -> NDArray[Any]:
    """Return weights (…, q, k) as an array, with at most `max_cells` rows and columns of block means."""
    if isinstance(weights, Weights):
        large = max(weights.shape[-2:]) > max_cells
        dense = weights.pool(max_cells, max_cells) if large else weights.dense()
    else:
        dense = pool_dense(weights.detach().cpu().float(), max_cells, max_cells)
    return dense.detach().cpu().float().numpy()


def arrange_grid(panels: list[Panel]) -> list[list[Panel]]:
    """Arrange a few panels in one row, and more in a nearly square grid, with full rows if possible."""
    if len(panels) <= MAX_HEADS_IN_ROW:
        return [panels]
    root = math.ceil(math.sqrt(len(panels)))
    columns = next((width for width in range(root, root + 3) if len(panels) % width == 0), root)
    return split_rows(panels, columns)


def split_rows(panels: list[Panel], columns: int) -> list[list[Panel]]:
    """Split panels into rows of `columns` panels."""
    return [panels[i : i + columns] for i in range(0, len(panels), columns)]


def alignment_panel(alignment: AlignmentLike, title: str) -> Panel:
    """Create the panel of an alignment."""
    weights = checked_weights(alignment)
    sources, targets = alignment.source_words, alignment.target_words
    if not sources or not targets:
        raise ArgumentError(
            f"Cannot draw an alignment of {pluralize(len(targets), 'target word')} and "
            f"{pluralize(len(sources), 'source word')}; each side needs at least one word."
        )
    return make_panel(weights, targets, sources, title)


def checked_weights(alignment: AlignmentLike) -> Tensor:
    """Return the weights of an alignment as floats; raise a ShapeError if their shape is wrong."""
    weights = torch.as_tensor(alignment.weights).detach().cpu().float().nan_to_num(0)
    sources, targets = len(alignment.source_words), len(alignment.target_words)
    if tuple(weights.shape) != (targets, sources):
        raise ShapeError(
            f"An alignment of {pluralize(targets, 'target word')} and {pluralize(sources, 'source word')} "
            f"has weights of shape {tuple(weights.shape)}; it needs {(targets, sources)}."
        )
    return weights


def check_titles(titles: Sequence[str] | None, default: list[str], what: str) -> list[str]:
    """Return the titles, or the default; raise an error unless there is one string per item."""
    if titles is None:
        return default
    if len(titles) != len(default):
        raise ArgumentError(
            f"Got {pluralize(len(titles), 'title')} for {pluralize(len(default), what)}; pass one title for "
            "each."
        )
    for title in titles:
        if not isinstance(title, str):
            raise DTypeError(
                f"Titles must be strings, got {title!r:.40} of type {type(title).__name__}. Pass str(title)."
            )
    return list(titles)


def check_count(count: int) -> None:
    """Raise an error unless this number of matrices can be drawn."""
    if not 1 <= count <= MAX_PANELS:
        raise ArgumentError(f"Cannot draw {count:,} matrices; select 1 to {MAX_PANELS:,}.")
