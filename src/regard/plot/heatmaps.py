"""Pictures of matrices, with matplotlib: weights, all heads of a model, alignments, masks and positions."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard._util.checks import check_int
from regard.errors import ArgumentError, DTypeError, ShapeError
from regard.inspection.layer_view import pool_dense
from regard.inspection.layers import layer_label
from regard.inspection.watch import Seen
from regard.mechanism.biases import RelativeBias
from regard.mechanism.mask_algebra import Mask, as_mask
from regard.mechanism.normalizers import Sigmoid
from regard.mechanism.operator import attend
from regard.mechanism.weights.matrix import Weights
from regard.models.layers.positions import LearnedPositions, RotaryPositions, SinusoidalPositions
from regard.plot.curves import draw_by_distance
from regard.plot.grids import MOST, Panel, Sheet, draw_panels, has_numbers, paint, scale, write_labels
from regard.plot.style import DARK, LIGHT, POINTS, check_ending, theme_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

CELLS = 512  # weights of more rows or columns than this are drawn as a map of block means
SMALL = 192  # the same, of one of many matrices
ACROSS = 4  # alignments side by side

Tokens = Sequence[str] | None
Positions = SinusoidalPositions | LearnedPositions | RotaryPositions | RelativeBias


class Aligned(Protocol):
    """Words of two sentences, and how much each target word (row) looked at each source word (column)."""

    @property
    def source_words(self) -> Sequence[str]: ...
    @property
    def target_words(self) -> Sequence[str]: ...
    @property
    def weights(self) -> Tensor: ...


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
    """Draw a matrix of weights, a row per query and a column per key, the tokens along both axes.

    axes: where to draw, `plt.subplots()[1]` for example.
    weights: lazy ones, a tensor or an array, (q, k).
    queries, keys: the tokens of the rows and columns.
    names: of the axes, where there are no tokens.
    title: what stands on top.
    limits: the values of the first and the last colour; by default those that the weights have. If the first
        is below 0, they are those of both signs.
    log: spread small weights over the colours, down to a ten-thousandth of the largest.

    Large weights are pooled first, and lazy ones thus never become dense. The smallest weights are almost
    like the paper, be it light or dark, and the largest stand out from it; of values of both signs, 0 is like
    the paper, orange is below and blue above it. Tokens for which there is no room are left out; zooming in
    shows them. A colour bar is added with `figure.colorbar(image)`.

    >>> import matplotlib.pyplot as plt, torch, regard
    >>> from regard.plot.heatmaps import heatmap
    >>> x = torch.eye(3)
    >>> figure, axes = plt.subplots()
    >>> image = heatmap(axes, regard.attend(x, x, x)[1], queries=list("abc"), keys=list("abc"))
    >>> image.get_array().shape
    (3, 3)
    >>> plt.close(figure)
    """
    weights = _numbers(weights)
    if weights.dim() != 2:
        raise ShapeError(
            f"a heat map shows one matrix and got weights of shape {tuple(weights.shape)}; choose one, "
            f"weights[{', '.join('0' * (weights.dim() - 2)) or '…'}], or weights.mean('heads')."
        )
    if not weights.numel():
        raise ShapeError(
            f"a heat map got weights of shape {tuple(weights.shape)}, in which nothing can be drawn; give at "
            "least one query and one key."
        )
    if not isinstance(names, tuple | list) or [type(name) for name in names] != [str, str]:
        raise ArgumentError(
            f"names are {names!r:.80}; give two strings, that of the queries' axis and that of the keys': "
            "names=('queries', 'keys'), or ('', '') for none."
        )
    panel = _panel(weights, CELLS, queries, keys).check()
    dots = axes.figure.dpi / POINTS
    size = axes.bbox.width / dots, axes.bbox.height / dots
    norm = scale([panel.matrix], log=log, limits=limits)
    image = paint(axes, panel, norm, theme_of(axes).palette_for(norm), numbers=has_numbers(panel, *size))
    write_labels(axes, panel, *size)
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
    """Draw weights (…, q, k) and write the picture: .png, .svg or .pdf.

    One matrix is a heat map; several heads are drawn side by side, and what comes before them one below
    the other. Large weights are drawn as maps of block means.

    path: .png, .svg or .pdf.
    queries, keys: the tokens of the rows and columns.
    titles: one for each head; by default its number.
    title: one above all.
    log: colours that tell small weights apart.
    dark: on dark paper.

    >>> import tempfile, torch, regard
    >>> from regard.plot.heatmaps import draw_weights
    >>> x = torch.randn(2, 5, 4)
    >>> weights = regard.attend(x, x, x)[1]
    >>> draw_weights(weights, tempfile.mkdtemp() + "/weights.png", queries="a dog may bark .".split()).name
    'weights.png'
    """
    check_ending(path)
    weights = _numbers(weights)
    if weights.dim() < 2:
        raise ShapeError(f"weights have queries and keys, (…, q, k), and these are {tuple(weights.shape)}.")
    *lead, rows, columns = weights.shape
    _check_number(lead)
    alone = math.prod(lead) == 1
    matrices = _matrices(weights, CELLS if alone else SMALL)
    heads = lead[-1] if lead else 1
    what = "" if isinstance(weights, Weights) and not weights.has_heads else "head "
    matrices = matrices.reshape(math.prod(lead[:-1]), heads, *matrices.shape[-2:])
    names = _titles(titles, ["" if alone else f"{what}{head}" for head in range(heads)], "heads")
    panels = [
        [
            Panel(one, rows, columns, queries, keys, "" if i else name)
            for one, name in zip(some, names, strict=True)
        ]
        for i, some in enumerate(matrices)
    ]
    sides = [str(i) for i in range(len(panels))] if len(panels) > 1 else []
    return draw_panels(panels, Sheet(title or "", sides=sides, shared=not alone, log=log, dark=dark), path)


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
    """Draw every head of every layer: a row per layer, a column per head, all in the same colours.

    layers: what `regard.watch` has seen, or any weights (h, q, k) by name.
    path: .png, .svg or .pdf.
    queries, keys: their tokens, which are the same in each.
    first: the number of the first head.
    titles: what to call the columns instead.
    title: one above all.
    log, dark: as in `draw_weights`.

    >>> import tempfile, torch, regard
    >>> from regard.plot.heatmaps import draw_heads
    >>> model = regard.models.LanguageModel(100, regard.models.TransformerConfig(width=16, heads=2, layers=2))
    >>> with regard.watch(model) as seen:
    ...     logits = model(torch.tensor([[5, 6, 7]]))
    >>> draw_heads(seen, tempfile.mkdtemp() + "/heads.svg", queries=list("abc"), keys=list("abc")).name
    'heads.svg'
    """
    check_ending(path)
    if not isinstance(layers, Mapping):
        raise DTypeError(
            f"draw_heads got layers of the type {type(layers).__name__}; give weights by name, "
            "{'layer 0': weights}, or draw those of one layer with draw_weights."
        )
    if not layers:
        raise ArgumentError("draw_heads got no layers; call the model inside the block of regard.watch.")
    sides = [layer_label(name) for name in layers] if isinstance(layers, Seen) else list(layers)
    layers = {name: _numbers(weights) for name, weights in layers.items()}
    heads = [_count_heads(name, weights) for name, weights in layers.items()]
    _check_number([sum(heads)])
    most = CELLS if sum(heads) == 1 else SMALL
    panels = []
    for row, (weights, number) in enumerate(zip(layers.values(), heads, strict=True)):
        matrices = _matrices(weights, most)
        matrices = matrices.reshape(number, *matrices.shape[-2:])
        names = _titles(titles, [f"head {head}" for head in range(first, first + number)], "heads")
        rows, columns = weights.shape[-2:]
        pairs = zip(matrices, names, strict=True)
        panels.append([Panel(one, rows, columns, queries, keys, "" if row else name) for one, name in pairs])
    sheet = Sheet(title or "", sides=sides, shared=sum(heads) > 1, log=log, dark=dark)
    return draw_panels(panels, sheet, path)


def draw_alignments(
    alignments: Aligned | Sequence[Aligned],
    path: str | os.PathLike[str],
    *,
    titles: Sequence[str] | None = None,
    title: str | None = None,
    across: int = ACROSS,
    dark: bool = False,
) -> Path:
    """Draw which words of two sentences belong together, one alignment or several side by side.

    alignments: `Translation.alignment`, or several.
    path: .png, .svg or .pdf.
    titles: one for each of them.
    title: one above all.
    across: how many stand beside each other, at most.
    dark: on dark paper.

    >>> import tempfile, torch
    >>> from types import SimpleNamespace
    >>> from regard.plot.heatmaps import draw_alignments
    >>> alignment = SimpleNamespace(weights=torch.eye(2), source_words=["a", "b"], target_words=["c", "d"])
    >>> draw_alignments(alignment, tempfile.mkdtemp() + "/alignment.png").name
    'alignment.png'
    """
    check_ending(path)
    some = list(alignments) if isinstance(alignments, Sequence) else [alignments]
    names = _titles(titles, [""] * len(some), "alignments")
    panels = [_aligned(one, name) for one, name in zip(some, names, strict=True)]
    check_int("draw_alignments got across", across, min=1)
    rows = [panels[i : i + across] for i in range(0, len(panels), across)]
    return draw_panels(rows, Sheet(title or "", names=("target", "source"), dark=dark), path)


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
    """Draw which keys each query may look at.

    path: .png, .svg or .pdf.
    queries, keys: how many, or their tokens. By default as many as the mask is for, or 8 of each if it is for
        any number; if only queries are given, there are as many keys.
    lead: the leading axes of the call, if the mask is for some in particular, as that of a batch is.
    titles: one for each of those.
    title: one above all.
    dark: on dark paper.

    >>> import tempfile, regard
    >>> from regard.plot.heatmaps import draw_mask
    >>> draw_mask(regard.Causal() & regard.Window(3), tempfile.mkdtemp() + "/mask.svg", queries=20).name
    'mask.svg'
    >>> draw_mask(regard.Documents([2, 4]), tempfile.mkdtemp() + "/documents.svg").name  # 6 of each
    'documents.svg'
    """
    check_ending(path)
    mask = as_mask(mask)
    if queries is None:
        queries, own_keys = mask.default_size() or (8, 8)
        keys = own_keys if keys is None else keys
    sides = [queries, queries if keys is None else keys]
    sizes = [_size(side) for side in sides]
    tokens = [None if isinstance(side, int) else side for side in sides]
    _check_number(lead)
    seen = _in_sight(mask, (sizes[0], sizes[1]), tuple(lead))
    names = _titles(titles, [str(i) if lead else "" for i in range(len(seen))], "masks")
    panels = [
        Panel(one, sizes[0], sizes[1], tokens[0], tokens[1], name)
        for one, name in zip(seen, names, strict=True)
    ]
    theme = DARK if dark else LIGHT
    key = ((theme.raised, "may not look"), (theme.accent, "may look"))
    rows = [panels[i : i + 8] for i in range(0, len(panels), 8)]
    sheet = Sheet(
        repr(mask) if title is None else title, shared=len(panels) > 1, dark=dark, key=key, limits=(0, 1)
    )
    return draw_panels(rows, sheet, path)


def draw_positions(
    positions: Positions,
    path: str | os.PathLike[str],
    *,
    length: int = 64,
    title: str | None = None,
    dark: bool = False,
) -> Path:
    """Draw position encodings: vectors and angles as matrices, biases as lines over the distance.

    path: .png, .svg or .pdf.
    length: how many positions; of biases, the largest distance to either side.
    title: what stands on top.
    dark: on dark paper.

    >>> import tempfile, regard
    >>> from regard.plot.heatmaps import draw_positions
    >>> draw_positions(regard.models.SinusoidalPositions(64), tempfile.mkdtemp() + "/positions.png").name
    'positions.png'
    >>> draw_positions(regard.ALiBi(8), tempfile.mkdtemp() + "/biases.png").name
    'biases.png'
    """
    check_ending(path)
    check_int("draw_positions got length", length, min=1)
    places = torch.arange(length)
    with torch.no_grad():
        if isinstance(positions, RelativeBias):
            to_the_right = getattr(positions, "bidirectional", True)  # where others never look
            distance = torch.arange(-length, length + 1 if to_the_right else 1)
            biases = positions(distance).detach().cpu().reshape(-1, len(distance))
            return draw_by_distance(distance.tolist(), biases.tolist(), path, title=title, dark=dark)
        if isinstance(positions, RotaryPositions):
            turn = positions(places)
            half = positions.width // 2  # the other half turns with it
            shown = {"cos of the angle": turn.cos[:, :half], "sin of the angle": turn.sin[:, :half]}
        elif isinstance(positions, SinusoidalPositions | LearnedPositions):
            shown = {"": positions(places)}
        else:
            raise DTypeError(
                f"draw_positions got a {type(positions).__name__}; it draws Sinusoidal, Learned, Rotary, and "
                "biases that depend on the distance, such as ALiBi and T5."
            )
    panels = [_panel(one, CELLS, title=name) for name, one in shown.items()]
    names = ("position", "pair of features" if isinstance(positions, RotaryPositions) else "feature")
    return draw_panels([panels], Sheet(title or "", names=names, dark=dark, bar="value"), path)


def _numbers(weights: Any) -> Weights | Tensor:
    """Lazy weights and tensors as they are; arrays and lists as tensors."""
    if isinstance(weights, Weights | Tensor):
        return weights
    try:
        return torch.as_tensor(np.array(weights))  # a copy, as torch takes no array that runs backwards
    except (TypeError, ValueError, RuntimeError):
        raise DTypeError(
            f"the weights to draw are of the type {type(weights).__name__}, and not all of it are numbers; "
            "give lazy weights, a tensor or an array."
        ) from None


def _panel(
    weights: Weights | Tensor, most: int, queries: Tokens = None, keys: Tokens = None, title: str = ""
) -> Panel:
    """Of one matrix."""
    rows, columns = weights.shape
    return Panel(_matrices(weights, most), rows, columns, queries, keys, title)


def _matrices(weights: Weights | Tensor, most: int) -> NDArray[Any]:
    """The weights (…, q, k) as numbers, of large matrices the means of at most so many blocks."""
    if isinstance(weights, Weights):
        large = max(weights.shape[-2:]) > most
        return (weights.pool(most, most) if large else weights.dense()).detach().cpu().float().numpy()
    matrix: NDArray[Any] = weights.detach().cpu().float().numpy()
    for axis in (-2, -1):
        size = matrix.shape[axis]
        if size > most:
            edges = np.arange(most + 1) * size // most
            sums = np.add.reduceat(matrix, edges[:-1], axis)
            sizes = np.diff(edges).astype(np.float32)
            matrix = sums / (sizes if axis == -1 else sizes[:, None])
    return matrix


def _count_heads(name: str, weights: Weights | Tensor) -> int:
    """Of weights (h, q, k), or of one head; of a batch of one too."""
    *batch, heads = weights.shape[:-2] if weights.dim() > 2 else (1,)
    if weights.dim() < 2 or any(size != 1 for size in batch):
        raise ShapeError(
            f"the weights of {name!r} have the shape {tuple(weights.shape)}; heads are drawn of one input, "
            "(h, q, k): choose one, weights[0]."
        )
    return int(heads)


def _aligned(alignment: Aligned, title: str) -> Panel:
    weights = alignment.weights.detach().cpu().float().nan_to_num(0)
    sources, targets = alignment.source_words, alignment.target_words
    if tuple(weights.shape) != (len(targets), len(sources)):
        raise ShapeError(
            f"an alignment of {len(targets)} target words and {len(sources)} source words has weights of "
            f"shape {tuple(weights.shape)}; it needs a row per target word and a column per source word."
        )
    if not sources or not targets:
        raise ArgumentError(
            f"an alignment of {len(targets)} target words and {len(sources)} source words cannot be drawn; "
            "give sentences that have words."
        )
    return _panel(weights, CELLS, targets, sources, title)


def _titles(given: Sequence[str] | None, usual: list[str], what: str) -> list[str]:
    """One for each, or the usual ones."""
    if given is not None and len(given) != len(usual):
        raise ArgumentError(f"there are {len(given)} titles for {len(usual)} {what}; each needs its own.")
    for title in given or ():
        if not isinstance(title, str):
            raise DTypeError(
                f"titles hold {title!r:.40}, of the type {type(title).__name__}; give strings: str(title)."
            )
    return usual if given is None else list(given)


def _size(side: int | Sequence[str]) -> int:
    if not isinstance(side, int):
        return len(side)
    check_int("draw_mask got a number of tokens", side, min=1)
    return side


def _in_sight(mask: Mask, sizes: tuple[int, int], lead: tuple[int, ...]) -> NDArray[Any]:
    """How much of each block may be looked at, in linear memory: of weights that are ½ where it may."""
    query, key = (torch.zeros(*lead, size, 1) for size in sizes)
    weights = attend(query, key, key, mask=mask, normalize=Sigmoid(bias=0.0))[1]
    seen = 2 * _matrices(weights, CELLS)
    return seen.reshape(math.prod(lead), *seen.shape[-2:])


def _check_number(lead: Sequence[int]) -> None:
    """Before they are computed: no more matrices than can be seen, and at least one."""
    number = math.prod(lead)
    if not 1 <= number <= MOST:
        raise ArgumentError(
            f"a picture of {number:,} matrices could not be read; choose 1 to {MOST:,} of them."
        )
