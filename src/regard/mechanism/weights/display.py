"""Display weights with `app` and `plot`, which no other module in `mechanism` may import."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.mechanism.weights.weights import Weights

Tokens = Sequence[str] | None


def show(weights: "Weights", queries: Tokens, keys: Tokens, title: str) -> Any:
    """Open the interactive view as a widget in a notebook, or otherwise as a page in the browser."""
    from regard.app.standalone import show

    return show(weights, queries=queries, keys=keys, title=title)


def to_html(
    weights: "Weights", path: str | os.PathLike[str], queries: Tokens, keys: Tokens, title: str
) -> Path:
    """Write the interactive view to one HTML file."""
    from regard.app.standalone import write_page
    from regard.app.view_model import ViewModel

    return write_page(path, ViewModel.of(weights, queries, keys, title), title=title)


def to_png(
    weights: "Weights",
    path: str | os.PathLike[str],
    queries: Tokens,
    keys: Tokens,
    title: str | None,
    dark: bool,
) -> Path:
    """Draw a heatmap of the weights."""
    from regard.plot.heatmaps import draw_weights

    return draw_weights(weights, path, queries=queries, keys=keys, title=title, dark=dark)
