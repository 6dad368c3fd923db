"""Heatmaps with matplotlib: weights, all heads of a model, alignments, masks and position encodings."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from regard._util.checks import check_int
from regard._util.name_hints import hint_arguments
from regard._util.text import type_name
from regard.errors import ArgumentError, DTypeError, ShapeError
from regard.inspection.layers import layer_label
from regard.inspection.recordings.recording import Seen
from regard.mechanism.biases import RelativeBias
from regard.mechanism.masks.algebra import Mask, as_mask
from regard.mechanism.normalizers import Sigmoid
from regard.mechanism.operator import attend
from regard.mechanism.weights.weights import Weights
from regard.models.layers.position_encoding import PositionEncoding
from regard.plot.curves import draw_by_distance
from regard.plot.grids import (
    GridOptions,
    color_norm,
    draw_matrix,
    draw_panels,
    fits_numbers,
    label_axes,
)
from regard.plot.panels import (
    MAX_CELLS,
    MAX_HEADS_IN_ROW,
    AlignmentLike,
    Tokens,
    alignment_panel,
    arrange_grid,
    as_weights,
    check_count,
    check_titles,
    make_panel,
    make_panels,
    pool_weights,
    split_rows,
)
from regard.plot.style import DARK, LIGHT, POINTS_PER_INCH, check_suffix, theme_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

MAX_GRID_CELLS = 192  # maximum side of a matrix in a grid; larger matrices are drawn as block means
MAX_COLUMNS = 4  # default number of alignments side by side


@hint_arguments
def heatmap(
    axes: "Axes",
    weights: Weights | Tensor | NDArray[Any],
    *,
    queries: Tokens = None,
    keys: Tokens = None,
    title: str | None = None,
    names: tuple[str, str] = ("queries", "keys"),
    limits: tuple[float, float] | None = None,
    log: bool = False,
) -> "AxesImage":
    """Draw a weight matrix on matplotlib axes: one row per query, one column per key.

    axes: matplotlib axes, such as `plt.subplots()[1]`.
    weights: lazy weights, a tensor or an array, (q, k).
    queries, keys: tokens for the rows and columns.
    title: title of the axes.
    names: names of the axes, shown if there are no tokens.
    limits: values of the first and last color; default: from the weights. If the first is negative, the
        colors for signed values are used.
    log: logarithmic color scale, down to 1/10,000 of the largest weight.

    Large matrices are drawn as block means, in linear memory if the weights are lazy. The smallest weights
    are close to the background color, light or dark. For signed values, 0 has the background color; negative
    values are orange and positive values blue. Tokens that do not fit are omitted; zooming in shows them. To
    add a color bar, call `figure.colorbar(image)`.

    >>> import matplotlib.pyplot as plt, torch, regard
    >>> from regard.plot.heatmaps import heatmap
    >>> x = torch.eye(3)
    >>> figure, axes = plt.subplots()
    >>> image = heatmap(axes, regard.attend(x, x, x)[1], queries=list("abc"), keys=list("abc"))
    >>> image.get_array().shape
    (3, 3)
    >>> plt.close(figure)
    """
    weights = as_weights(weights)
    if weights.dim() != 2:
        raise ShapeError(
            f"heatmap draws one matrix, but got weights of shape {tuple(weights.shape)}. Select one: "
            f"weights[{', '.join('0' * (weights.dim() - 2)) or '…'}], or weights.mean('heads')."
        )
    if not weights.numel():
        raise ShapeError(
            f"heatmap got weights of shape {tuple(weights.shape)}; it needs at least one query and one key."
        )
    if not isinstance(names, tuple | list) or [type(name) for name in names] != [str, str]:
        raise ArgumentError(
            f"heatmap got names={names!r:.80}; pass two strings, the names of the query and the key axis."
        )
    panel = make_panel(weights, queries, keys).check()
    dots = axes.figure.dpi / POINTS_PER_INCH
    size = axes.bbox.width / dots, axes.bbox.height / dots
    norm = color_norm([panel.matrix], log=log, limits=limits)
    colormap = theme_for(axes).colormap_for(norm)
    image = draw_matrix(axes, panel, norm, colormap, numbers=fits_numbers(panel, *size))
    label_axes(axes, panel, *size)
    for axis, tokens, name in ((axes.yaxis, queries, names[0]), (axes.xaxis, keys, names[1])):
        if tokens is None:
            axis.set_label_text(name)
    if title:
        axes.set_title(title, parse_math=False)
    return image


def draw_weights(
    weights: Weights | Tensor | NDArray[Any],
    path: str | os.PathLike[str],
    *,
    queries: Tokens = None,
    keys: Tokens = None,
    titles: Sequence[str] | None = None,
    title: str | None = None,
    log: bool = False,
    dark: bool = False,
) -> Path:
    """Draw weights (…, q, k) and save the picture as a .png, .svg or .pdf file.

    Heads are drawn side by side, or as a grid if there are many, and batch entries one below the other. Large
    matrices are drawn as block means.

    path: output file, .png, .svg or .pdf.
    queries, keys: tokens for the rows and columns.
    titles: a title for each head; default: the head number.
    title: title of the picture.
    log: logarithmic colors.
    dark: dark background.

    >>> import tempfile, torch, regard
    >>> from regard.plot.heatmaps import draw_weights
    >>> x = torch.randn(2, 5, 4)
    >>> weights = regard.attend(x, x, x)[1]
    >>> draw_weights(weights, tempfile.mkdtemp() + "/weights.png", queries="a dog may bark .".split()).name
    'weights.png'
    """
    check_suffix(path)
    weights = as_weights(weights)
    if weights.dim() < 2:
        raise ShapeError(f"draw_weights got shape {tuple(weights.shape)}; pass weights of shape (…, q, k).")
    *lead, rows, columns = weights.shape
    check_count(math.prod(lead))
    single = math.prod(lead) == 1
    matrices = pool_weights(weights, MAX_CELLS if single else MAX_GRID_CELLS)
    heads = lead[-1] if lead else 1
    prefix = "" if isinstance(weights, Weights) and not weights.has_heads else "head "
    matrices = matrices.reshape(math.prod(lead[:-1]), heads, *matrices.shape[-2:])
    names = check_titles(titles, ["" if single else f"{prefix}{head}" for head in range(heads)], "head")
    # only the panels of the first row have titles
    panels = [
        make_panels(entry, (rows, columns), (queries, keys), [""] * heads if i else names)
        for i, entry in enumerate(matrices)
    ]
    row_titles = [str(entry) for entry in range(len(panels))] if len(panels) > 1 else []
    if len(panels) == 1:
        panels = arrange_grid(panels[0])
    options = GridOptions(title or "", row_titles=row_titles, shared=not single, log=log, dark=dark)
    return draw_panels(panels, options, path)


def draw_heads(
    layers: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    queries: Tokens = None,
    keys: Tokens = None,
    first: int = 0,
    titles: Sequence[str] | None = None,
    title: str | None = None,
    log: bool = False,
    dark: bool = False,
) -> Path:
    """Draw every head of every layer: one row per layer, one column per head, with a shared color scale.

    Many heads of a single layer are drawn as a grid.

    layers: a `Seen` from `regard.watch`, or a mapping from names to weights (h, q, k).
    path: output file, .png, .svg or .pdf.
    queries, keys: tokens for the rows and columns, the same for all layers.
    first: number of the first head.
    titles: titles of the columns; default: the head numbers.
    title: title of the picture.
    log, dark: as in `draw_weights`.

    >>> import tempfile, torch, regard
    >>> from regard.plot.heatmaps import draw_heads
    >>> model = regard.models.LanguageModel(100, regard.models.TransformerConfig(width=16, heads=2, layers=2))
    >>> with regard.watch(model) as seen:
    ...     logits = model(torch.tensor([[5, 6, 7]]))
    >>> draw_heads(seen, tempfile.mkdtemp() + "/heads.svg", queries=list("abc"), keys=list("abc")).name
    'heads.svg'
    """
    check_suffix(path)
    if not isinstance(layers, Mapping):
        raise DTypeError(
            f"draw_heads got {type_name(layers)}; pass a mapping, {{'layer 0': weights}}, or "
            "draw one layer with draw_weights."
        )
    if not layers:
        raise ArgumentError("draw_heads got no layers; call the model inside the regard.watch block.")
    row_titles = [layer_label(name) for name in layers] if isinstance(layers, Seen) else list(layers)
    layers = {name: as_weights(weights) for name, weights in layers.items()}
    counts = [_count_heads(name, weights) for name, weights in layers.items()]
    check_count(sum(counts))
    max_cells = MAX_CELLS if sum(counts) == 1 else MAX_GRID_CELLS
    panels = []
    for row, (weights, count) in enumerate(zip(layers.values(), counts, strict=True)):
        matrices = pool_weights(weights, max_cells)
        matrices = matrices.reshape(count, *matrices.shape[-2:])
        names = check_titles(titles, [f"head {head}" for head in range(first, first + count)], "head")
        panels.append(
            make_panels(matrices, weights.shape[-2:], (queries, keys), [""] * count if row else names)
        )
    if len(panels) == 1 and counts[0] > MAX_HEADS_IN_ROW:
        panels, title, row_titles = arrange_grid(panels[0]), title or row_titles[0], []
    options = GridOptions(title or "", row_titles=row_titles, shared=sum(counts) > 1, log=log, dark=dark)
    return draw_panels(panels, options, path)


def draw_alignments(
    alignments: AlignmentLike | Sequence[AlignmentLike],
    path: str | os.PathLike[str],
    *,
    titles: Sequence[str] | None = None,
    title: str | None = None,
    columns: int = MAX_COLUMNS,
    dark: bool = False,
) -> Path:
    """Draw one or more word alignments side by side.

    alignments: an alignment, such as `Translation.alignment`, or a list of alignments.
    path: output file, .png, .svg or .pdf.
    titles: a title for each alignment.
    title: title of the picture.
    columns: maximum number of alignments side by side.
    dark: dark background.

    >>> import tempfile, torch
    >>> from types import SimpleNamespace
    >>> from regard.plot.heatmaps import draw_alignments
    >>> alignment = SimpleNamespace(weights=torch.eye(2), source_words=["a", "b"], target_words=["c", "d"])
    >>> draw_alignments(alignment, tempfile.mkdtemp() + "/alignment.png").name
    'alignment.png'
    """
    check_suffix(path)
    alignments = list(alignments) if isinstance(alignments, Sequence) else [alignments]
    names = check_titles(titles, [""] * len(alignments), "alignment")
    panels = [alignment_panel(*pair) for pair in zip(alignments, names, strict=True)]
    check_int("draw_alignments got columns", columns, min=1)
    options = GridOptions(title or "", axis_names=("target", "source"), dark=dark)
    return draw_panels(split_rows(panels, columns), options, path)


def draw_mask(
    mask: Mask | Tensor,
    path: str | os.PathLike[str],
    *,
    queries: int | Sequence[str] | None = None,
    keys: int | Sequence[str] | None = None,
    lead: Sequence[int] = (),
    titles: Sequence[str] | None = None,
    title: str | None = None,
    dark: bool = False,
) -> Path:
    """Draw a mask: which keys each query may attend to.

    path: output file, .png, .svg or .pdf.
    queries, keys: number of queries and keys, or their tokens. Default: the size of the mask, or 8 × 8 if it
        has none. If only queries are given, they are also used as keys.
    lead: leading axes of the call, such as the batch, if the mask depends on them.
    titles: a title for each entry of `lead`.
    title: title of the picture; default: the repr of the mask.
    dark: dark background.

    >>> import tempfile, regard
    >>> from regard.plot.heatmaps import draw_mask
    >>> draw_mask(regard.Causal() & regard.Window(3), tempfile.mkdtemp() + "/mask.svg", queries=20).name
    'mask.svg'
    >>> draw_mask(regard.Documents([2, 4]), tempfile.mkdtemp() + "/documents.svg").name  # 6 × 6
    'documents.svg'
    """
    check_suffix(path)
    mask = as_mask(mask)
    if queries is None:
        queries, default_keys = mask.default_size() or (8, 8)
        keys = default_keys if keys is None else keys
    sides = [queries, queries if keys is None else keys]
    size = _size(sides[0]), _size(sides[1])
    tokens = [None if isinstance(side, int) else side for side in sides]
    check_count(math.prod(lead))
    matrices = _visible(mask, size, tuple(lead))
    names = check_titles(titles, [str(i) if lead else "" for i in range(len(matrices))], "mask")
    panels = make_panels(matrices, size, tokens, names)
    theme = DARK if dark else LIGHT
    options = GridOptions(
        repr(mask) if title is None else title,
        shared=len(panels) > 1,
        dark=dark,
        legend=((theme.surface, "masked"), (theme.accent, "visible")),
        limits=(0, 1),
    )
    return draw_panels(split_rows(panels, 8), options, path)


def draw_positions(
    positions: PositionEncoding | RelativeBias,
    path: str | os.PathLike[str],
    *,
    length: int = 64,
    title: str | None = None,
    dark: bool = False,
) -> Path:
    """Draw position encodings: vectors and angles as matrices, relative biases as lines.

    path: output file, .png, .svg or .pdf.
    length: number of positions; for biases, the largest distance.
    title: title of the picture.
    dark: dark background.

    >>> import tempfile, regard
    >>> from regard.plot.heatmaps import draw_positions
    >>> draw_positions(regard.models.SinusoidalPositions(64), tempfile.mkdtemp() + "/positions.png").name
    'positions.png'
    >>> draw_positions(regard.ALiBi(8), tempfile.mkdtemp() + "/biases.png").name
    'biases.png'
    """
    check_suffix(path)
    check_int("draw_positions got length", length, min=1)
    if not isinstance(positions, PositionEncoding | RelativeBias):
        raise DTypeError(
            f"draw_positions got {type_name(positions)}; pass SinusoidalPositions, LearnedPositions, "
            "RotaryPositions, or a relative bias such as ALiBi or T5Bias."
        )
    with torch.no_grad():
        if isinstance(positions, RelativeBias):
            bidirectional = getattr(positions, "bidirectional", True)
            distance = torch.arange(-length, length + 1 if bidirectional else 1)
            biases = positions(distance).detach().cpu().reshape(-1, len(distance))
            return draw_by_distance(distance.tolist(), biases.tolist(), path, title=title, dark=dark)
        panels = [make_panel(table, title=name) for name, table in positions.tables(length).items()]
    axis_names = ("position", positions.columns)
    options = GridOptions(title or "", axis_names=axis_names, dark=dark, colorbar="value")
    return draw_panels([panels], options, path)


def _count_heads(name: str, weights: Weights | Tensor) -> int:
    *batch, heads = weights.shape[:-2] if weights.dim() > 2 else (1,)
    if weights.dim() < 2 or any(size != 1 for size in batch):
        raise ShapeError(
            f"The weights of {name!r} have shape {tuple(weights.shape)}; draw_heads needs (h, q, k). "
            "Select one entry of the batch: weights[0]."
        )
    return int(heads)


def _size(side: int | Sequence[str]) -> int:
    if not isinstance(side, int):
        return len(side)
    check_int("draw_mask got a number of tokens", side, min=1)
    return side


def _visible(mask: Mask, size: tuple[int, int], lead: tuple[int, ...]) -> NDArray[Any]:
    """Return the fraction of visible pairs in each block of a mask, in linear memory.

    All scores are 0 and sigmoid(0) = 1/2, so the fraction is twice the mean weight.
    """
    query, key = (torch.zeros(*lead, length, 1) for length in size)
    weights = attend(query, key, key, mask=mask, normalize=Sigmoid(bias=0.0))[1]
    visible = 2 * pool_weights(weights, MAX_CELLS)
    return visible.reshape(math.prod(lead), *visible.shape[-2:])
