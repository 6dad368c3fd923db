"""Attention on grids: every place of an image, a video or a signal looks at every other.

output_i = 1 / C(x) · Σ_j f(x_i, x_j) g(x_j)      Wang et al. 2018, eq. 1
z_i      = W output_i + x_i                       eq. 6

f is a score and 1 / C(x) a normalizer; these two are all that the paper's four kinds differ in.
"""

import math
from typing import Literal, get_args

from torch import Tensor, nn

from regard._util.checks import check_int
from regard.errors import ArgumentError, DTypeError, ShapeError
from regard.mechanism.normalizers import Mean, Normalizer, Sink, Softmax
from regard.mechanism.scores import Concat, Dot, Score
from regard.mechanism.weights.matrix import Weights
from regard.models.layers.attention import Attends

Kind = Literal["gaussian", "embedded", "dot", "concat"]


class NonLocal(Attends):
    """The non-local block of Wang et al. 2018: (b, c, …grid) → (b, c, …grid), for any number of grid axes.

    kind: how two places are compared, with θ and φ linear maps of the channels:
        "gaussian": softmax of x_i · x_j, eq. 2.        "embedded": softmax of θ(x_i) · φ(x_j), eq. 3.
        "dot": θ(x_i) · φ(x_j) / n, eq. 4.              "concat": relu(wᵀ [θ(x_i); φ(x_j)]) / n, eq. 5.
    inner: the width of θ, φ and g, half the channels by default (section 3.3).
    pool: the places looked at are the maxima of cells this large, one size or one for each grid axis (section
        3.3, "subsampling"). What does not fill a cell is left out, as in `nn.MaxPool2d`.
    norm: a batch norm after W, whose scale starts at zero (section 4.1). Without one, W starts at zero. The
        block thus starts as the identity, and may be put into a trained network.
    normalize: another normalizer than the kind's own.

    `regard.watch` sees its weights as (b, 1, n, k), with the n places of the grid in the order of its axes.

    >>> import torch, regard
    >>> from regard.models.layers.nonlocal_block import NonLocal
    >>> block, video = NonLocal(16, pool=(1, 2, 2)), torch.randn(2, 16, 3, 6, 8)
    >>> torch.equal(block(video), video)
    True
    >>> with regard.watch(block) as seen:
    ...     output = block(video)
    >>> seen[0].shape
    torch.Size([2, 1, 144, 36])
    >>> block.attention_map(seen[0], (0, 5, 7), grid=(3, 6, 8)).shape  # what one place looks at, as a picture
    torch.Size([2, 3, 3, 4])
    """

    heads = 1

    def __init__(
        self,
        channels: int,
        kind: Kind = "embedded",
        *,
        inner: int | None = None,
        pool: int | tuple[int, ...] | None = None,
        norm: bool = True,
        normalize: Normalizer | Sink | None = None,
    ) -> None:
        super().__init__()
        check_int("NonLocal got channels", channels, min=1)
        inner = max(channels // 2, 1) if inner is None else inner
        check_int("NonLocal got inner", inner, min=1)
        for size in pool if isinstance(pool, tuple) else (1 if pool is None else pool,):
            check_int("NonLocal got pool", size, min=1)
        if kind not in get_args(Kind):
            raise ArgumentError(f"NonLocal got kind={kind!r}; there are {', '.join(get_args(Kind))}.")
        self.channels, self.kind, self.pool = channels, kind, pool
        self.score: Score = Concat(inner, inner) if kind == "concat" else Dot()
        if normalize is None:
            normalize = Softmax() if kind in ("gaussian", "embedded") else Mean()
        self.normalize = normalize
        self.head_width, self.head_value_width = channels if kind == "gaussian" else inner, inner
        self.query_map: nn.Module = nn.Identity() if kind == "gaussian" else nn.Linear(channels, inner)  # θ
        self.key_map: nn.Module = nn.Identity() if kind == "gaussian" else nn.Linear(channels, inner)  # φ
        self.value_map = nn.Linear(channels, inner)  # g
        self.out_proj = nn.Linear(inner, channels, bias=not norm)  # W
        self.norm = nn.BatchNorm1d(channels) if norm else None
        for zero in self.out_proj.parameters() if self.norm is None else (self.norm.weight,):
            nn.init.zeros_(zero)

    def forward(self, x: Tensor) -> Tensor:
        """(b, c, …grid) → (b, c, …grid)."""
        self._check(x)
        places = x.movedim(1, -1)  # b c … -> b … c
        output = self.attention(
            _rows(self.query_map(places)),
            _rows(self._cells(self.key_map(places))),
            _rows(self._cells(self.value_map(places))),
            score=self.score,
            normalize=self.normalize,
        )
        output = self.out_proj(output.squeeze(1))  # b 1 n e -> b n c
        if self.norm is not None:
            output = self.norm(output.flatten(0, 1)).view_as(output)
        return x + output.mT.unflatten(2, x.shape[2:])

    def attention_map(self, weights: Weights, position: tuple[int, ...], *, grid: tuple[int, ...]) -> Tensor:
        """What one position of a grid looks at, as a picture: (b, …grid), or (b, …cells) with a `pool`."""
        cells = tuple(n // size for n, size in zip(grid, self._sizes(grid), strict=True))
        if weights.shape[-2:] != (math.prod(grid), math.prod(cells)):
            raise ShapeError(
                f"attention_map got weights of {weights.shape[-2]} × {weights.shape[-1]} places, and those of a grid "
                f"of {tuple(grid)} are {math.prod(grid)} × {math.prod(cells)}; the grid is the shape of the "
                "block's input after its channels, x.shape[2:]."
            )
        if len(position) != len(grid):
            raise ArgumentError(
                f"attention_map got the position {position} in a grid of {tuple(grid)}; give one index for each axis."
            )
        row = 0
        for i, n in zip(position, grid, strict=True):
            if not -n <= i < n:
                raise ArgumentError(
                    f"attention_map got the position {position} in a grid of {tuple(grid)}; {i} lies outside of {n}."
                )
            row = row * n + i % n
        return weights[:, 0, row].unflatten(-1, cells)

    def _cells(self, x: Tensor) -> Tensor:
        """The maxima of the cells: b …grid e -> b …cells e."""
        for axis, size in enumerate(self._sizes(x.shape[1:-1]), start=1):
            if size > 1:
                whole = x.narrow(axis, 0, x.shape[axis] // size * size)
                x = whole.unflatten(axis, (-1, size)).amax(axis + 1)
        return x

    def _sizes(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """The size of a cell along each axis of a grid."""
        sizes = self.pool if isinstance(self.pool, tuple) else (self.pool or 1,) * len(grid)
        if len(sizes) != len(grid) or any(size > n for size, n in zip(sizes, grid, strict=True) if size > 1):
            raise ShapeError(
                f"NonLocal pools cells of {sizes} and the grid is {tuple(grid)}; give one size for each grid "
                "axis, none larger than the axis."
            )
        return sizes

    def _check(self, x: Tensor) -> None:
        if not isinstance(x, Tensor):
            raise DTypeError(f"NonLocal got a {type(x).__name__}; give a tensor.")
        if x.dim() < 3 or x.shape[1] != self.channels:
            raise ShapeError(
                f"x has the shape {tuple(x.shape)} and this NonLocal is for (b, {self.channels}, …grid) "
                "with at least one grid axis; the channels come second. For a single image use x[None]."
            )

    def extra_repr(self) -> str:
        pool = "" if self.pool is None else f", pool={self.pool}"
        return f"{self.channels}, {self.kind!r}{pool}"


def _rows(x: Tensor) -> Tensor:
    """The places of a grid as the tokens of one head: b …grid d -> b 1 n d."""
    return x.flatten(1, -2).unsqueeze(1)
