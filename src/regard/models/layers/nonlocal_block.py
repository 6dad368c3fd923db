"""The non-local block: attention between all positions of an image, video or signal.

output_i = 1 / C(x) · Σ_j f(x_i, x_j) g(x_j)      Wang et al. 2018, eq. 1
z_i      = W output_i + x_i                       eq. 6

f is the score and 1 / C(x) the normalizer. The four variants in the paper differ only in f and C.
"""

import math
from typing import Literal, get_args

from torch import Tensor, nn

from regard._util.checks import check_choice, check_int
from regard._util.text import type_name
from regard.errors import ArgumentError, DTypeError, ShapeError
from regard.mechanism.normalizers import Mean, Normalizer, Sink, Softmax
from regard.mechanism.scores import Concat, Dot, Score
from regard.mechanism.weights.weights import Weights
from regard.models.layers.attention import Attends

Kind = Literal["gaussian", "embedded", "dot", "concat"]


class NonLocal(Attends):
    """The non-local block of Wang et al. 2018: (b, c, …grid) → (b, c, …grid), for any number of grid axes.

    kind: how two positions are compared; θ and φ are linear maps of the channels:
        "gaussian": softmax of x_i · x_j, eq. 2.        "embedded": softmax of θ(x_i) · φ(x_j), eq. 3.
        "dot": θ(x_i) · φ(x_j) / n, eq. 4.              "concat": relu(wᵀ [θ(x_i); φ(x_j)]) / n, eq. 5.
    inner: output dimension of θ, φ and the value map g; default: half the number of channels (section 3.3).
    pool: max-pooling size for keys and values, or one size per grid axis (section 3.3, "subsampling").
        Incomplete cells are dropped, as in `nn.MaxPool2d`.
    norm: apply batch norm after the output projection W, with a scale initialized to zero (section 4.1).
        If False, W is initialized to zero. Either way, the block starts as the identity, so it can be
        inserted into a trained network.
    normalize: normalizer to use instead of the default for `kind`.

    `regard.watch` captures weights (b, 1, n, k); the n positions are the flattened grid.

    >>> import torch, regard
    >>> from regard.models.layers.nonlocal_block import NonLocal
    >>> block, video = NonLocal(16, pool=(1, 2, 2)), torch.randn(2, 16, 3, 6, 8)
    >>> torch.equal(block(video), video)
    True
    >>> with regard.watch(block) as seen:
    ...     output = block(video)
    >>> seen[0].shape
    torch.Size([2, 1, 144, 36])
    >>> block.attention_map(seen[0], (0, 5, 7), grid=(3, 6, 8)).shape
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
        check_choice("NonLocal got kind", kind, get_args(Kind))
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
        """Apply the block: (b, c, …grid) → (b, c, …grid)."""
        self._check(x)
        features = x.movedim(1, -1)  # b c … -> b … c
        output = self.attention(
            _rows(self.query_map(features)),
            _rows(self._pool(self.key_map(features))),
            _rows(self._pool(self.value_map(features))),
            score=self.score,
            normalize=self.normalize,
        )
        output = self.out_proj(output.squeeze(1))  # b 1 n e -> b n c
        if self.norm is not None:
            output = self.norm(output.flatten(0, 1)).view_as(output)
        return x + output.mT.unflatten(2, x.shape[2:])

    def attention_map(self, weights: Weights, position: tuple[int, ...], *, grid: tuple[int, ...]) -> Tensor:
        """Return the weights of one grid position as an image: (b, …grid), or (b, …cells) with `pool`."""
        cells = tuple(n // size for n, size in zip(grid, self._pool_sizes(grid), strict=True))
        if weights.shape[-2:] != (math.prod(grid), math.prod(cells)):
            raise ShapeError(
                f"attention_map got weights of {weights.shape[-2]} × {weights.shape[-1]} positions; a grid "
                f"of {tuple(grid)} needs {math.prod(grid)} × {math.prod(cells)}. Pass grid=x.shape[2:], "
                "where x is the block's input."
            )
        if len(position) != len(grid):
            raise ArgumentError(
                f"attention_map got position {position} and a grid of {tuple(grid)}; pass one index per axis."
            )
        row = 0
        for i, n in zip(position, grid, strict=True):
            if not -n <= i < n:
                raise ArgumentError(
                    f"attention_map got position {position} and a grid of {tuple(grid)}; {i} is out of range."
                )
            row = row * n + i % n
        return weights[:, 0, row].unflatten(-1, cells)

    def _pool(self, x: Tensor) -> Tensor:
        """Max-pool: b …grid e -> b …cells e."""
        for axis, size in enumerate(self._pool_sizes(x.shape[1:-1]), start=1):
            if size > 1:
                whole = x.narrow(axis, 0, x.shape[axis] // size * size)
                x = whole.unflatten(axis, (-1, size)).amax(axis + 1)
        return x

    def _pool_sizes(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """Return the pool size along each grid axis."""
        sizes = self.pool if isinstance(self.pool, tuple) else (self.pool or 1,) * len(grid)
        if len(sizes) != len(grid) or any(size > n for size, n in zip(sizes, grid, strict=True) if size > 1):
            raise ShapeError(
                f"NonLocal got pool={sizes} and a grid of {tuple(grid)}; pass one size per grid axis, no "
                "larger than the axis."
            )
        return sizes

    def _check(self, x: Tensor) -> None:
        if not isinstance(x, Tensor):
            raise DTypeError(f"NonLocal got {type_name(x)}; pass a tensor.")
        if x.dim() < 3 or x.shape[1] != self.channels:
            raise ShapeError(
                f"x has shape {tuple(x.shape)}; this NonLocal needs shape (b, {self.channels}, …grid) with "
                "at least one grid axis. For a single image, pass x[None]."
            )

    def extra_repr(self) -> str:
        pool = "" if self.pool is None else f", pool={self.pool}"
        return f"{self.channels}, {self.kind!r}{pool}"


def _rows(x: Tensor) -> Tensor:
    """Flatten grid positions to the tokens of one head: b …grid d -> b 1 n d."""
    return x.flatten(1, -2).unsqueeze(1)
