"""Scores: similarities between query and key, before the mask and the normalizer.

There are two families. Scores of the *dot* family are dot products of transformed queries and keys: Dot,
ScaledDot, General, Cosine and Gaussian. Scores of the *additive* family are vᵀ act(query + key), also with
transformed queries and keys: Additive (tanh) and Concat (relu). Any other function of (query, key) is
computed as a dense matrix.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard._util.checks import check_int, check_number
from regard._util.name_hints import hint_arguments
from regard._util.text import pluralize
from regard.errors import ShapeError
from regard.mechanism.torch_state import concrete

ScoreFunction = Callable[[Tensor, Tensor], Tensor]


class Activation(NamedTuple):
    """Activation function of an additive score, which must be increasing and map zero to zero."""

    apply: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]  # derivative, as a function of x and apply(x)


ACTIVATIONS = {
    "tanh": Activation(torch.tanh, lambda x, y: 1 - y.square()),
    "relu": Activation(torch.relu, lambda x, y: (x > 0).to(x.dtype)),
}
FAMILIES = ("dot", *ACTIVATIONS)


class Prepared(NamedTuple):
    """The result of `Score.prepare`: transformed inputs, score family, and biases (…, q, 1) or (…, 1, k)."""

    query: Tensor
    key: Tensor
    family: str = "dot"
    vector: Tensor | None = None
    scale: float = 1.0  # factor for the dot product
    softcap: float | None = None
    biases: tuple[Tensor, ...] = ()


class Score:
    """Base class for scores that need no dense matrix. Subclasses transform query and key in `prepare`.

    >>> import torch, regard
    >>> class Sharper(regard.Score):
    ...     def prepare(self, query, key):
    ...         return regard.Dot().prepare(10 * query, key)
    >>> x = torch.eye(2)
    >>> regard.attend(x, x, x, score=Sharper())[1].scores()
    tensor([[10.,  0.],
            [ 0., 10.]])
    """

    def prepare(self, query: Tensor, key: Tensor) -> Prepared:
        """Transform query (…, q, d) and key (…, k, d) for the score's family."""
        raise NotImplementedError(f"{type(self).__name__} must implement prepare(query, key)")


def _same_width(query: Tensor, key: Tensor) -> None:
    if query.shape[-1] != key.shape[-1]:
        raise ShapeError(
            f"query has {pluralize(query.shape[-1], 'feature')} and key has {int(key.shape[-1]):,}; a dot "
            f"product needs equal widths. Use score=General({query.shape[-1]}, {key.shape[-1]}), or project "
            "one of them."
        )


def _widths(score: str, query: Tensor, key: Tensor, query_width: int, key_width: int) -> None:
    if (query.shape[-1], key.shape[-1]) != (query_width, key_width):
        raise ShapeError(
            f"query has {pluralize(query.shape[-1], 'feature')} and key has {int(key.shape[-1]):,}, but the "
            f"score is {score}({query_width}, {key_width}). Use {score}({query.shape[-1]}, {key.shape[-1]})."
        )


def _check_widths(score: str, query_width: int, key_width: int, width: int = 1) -> None:
    for name, value in (("query_width", query_width), ("key_width", key_width), ("width", width)):
        check_int(f"{score} got {name}", value, min=1)


def check_softcap(what: str, softcap: float | None) -> None:
    """Raise unless softcap is positive, inf or None."""
    if softcap is not None and not (isinstance(softcap, float) and softcap == math.inf):
        check_number(what, softcap, above=0, cure="Use None for no cap.")
        check_number(what, softcap, min=1e-30, below=1e31, cure="Use None for no cap.")  # fits in float32


def _map_finite_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return function(x). Rows of x that contain NaN or inf become NaN and receive no gradient.

    Otherwise, zero times NaN would reach the gradients of parameters, even from masked keys.
    """
    if concrete(x) and math.isfinite(x.sum().item()):
        return function(x)
    bad = ~torch.isfinite(x).all(-1, keepdim=True)
    return torch.where(bad, math.nan, function(torch.where(bad, 0.0, x)))


@dataclass(frozen=True)
class Dot(Score):
    """query · key (Luong et al. 2015, eq. 8, "dot").

    softcap: limit c; scores become c · tanh(score / c), which is between −c and c. None means no limit.

    >>> import torch, regard
    >>> query, key = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])
    >>> regard.attend(query, key, key, score=regard.Dot())[1].scores()
    tensor([[11.]])
    """

    softcap: float | None = None

    def __post_init__(self) -> None:
        check_softcap("the score got softcap", self.softcap)

    def prepare(self, query: Tensor, key: Tensor) -> Prepared:
        _same_width(query, key)
        return Prepared(query, key, softcap=self.softcap)


@hint_arguments
@dataclass(frozen=True)
class ScaledDot(Score):
    """The default score, scale · query · key (Vaswani et al. 2017, eq. 1).

    scale: factor for the dot product; default: 1 / √d, where d is the width of query and key.
    softcap: see `Dot`.

    >>> import torch, regard
    >>> query, key = torch.ones(1, 4), torch.ones(1, 4)
    >>> regard.attend(query, key, key, score=regard.ScaledDot())[1].scores()
    tensor([[2.]])
    """

    scale: float | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        check_softcap("the score got softcap", self.softcap)
        if self.scale is not None:
            check_number("ScaledDot got scale", self.scale)

    def prepare(self, query: Tensor, key: Tensor) -> Prepared:
        _same_width(query, key)
        scale = 1 / math.sqrt(max(query.shape[-1], 1)) if self.scale is None else self.scale
        return Prepared(query, key, scale=float(scale), softcap=self.softcap)


@hint_arguments
@dataclass(frozen=True)
class Cosine(Score):
    """Cosine similarity, scale · cos(query, key).

    scale: maximum absolute score; larger values give sharper weights.
    softcap: see `Dot`.

    >>> import torch, regard
    >>> query, key = torch.tensor([[2.0, 0.0]]), torch.tensor([[3.0, 3.0]])
    >>> regard.attend(query, key, key, score=regard.Cosine())[1].scores()
    tensor([[0.7071]])
    """

    scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        check_softcap("the score got softcap", self.softcap)
        check_number("Cosine got scale", self.scale)

    def prepare(self, query: Tensor, key: Tensor) -> Prepared:
        _same_width(query, key)
        query, key = _map_finite_rows(_unit_vectors, query), _map_finite_rows(_unit_vectors, key)
        return Prepared(query * self.scale, key, softcap=self.softcap)


@hint_arguments
@dataclass(frozen=True)
class Gaussian(Score):
    """−‖query − key‖² / 2σ². With softmax, this is Nadaraya-Watson regression (Watson 1964).

    sigma: kernel width σ.

    The score is computed as query · key / σ² plus a bias for each key and query. The median query is
    subtracted first, to avoid cancellation if queries and keys are far from zero.

    >>> import torch, regard
    >>> query, key = torch.tensor([[1.0]]), torch.tensor([[3.0]])
    >>> regard.attend(query, key, key, score=regard.Gaussian(sigma=2.0))[1].scores()
    tensor([[-0.5000]])
    """

    sigma: float = 1.0

    def __post_init__(self) -> None:
        check_number("Gaussian got sigma", self.sigma, above=0)
        check_number("Gaussian got sigma", self.sigma, min=1e-15, below=1e16)  # 1 / σ² fits in float32

    def prepare(self, query: Tensor, key: Tensor) -> Prepared:
        _same_width(query, key)
        origin = _median(query)
        query, key = query - origin, key - origin
        precision = 1 / self.sigma**2

        def bias(x: Tensor) -> Tensor:
            return (x * x).sum(-1, keepdim=True) * (-precision / 2)  # square() has derivative inf at inf

        return Prepared(
            query * precision, key, biases=(_map_finite_rows(bias, key).mT, _map_finite_rows(bias, query))
        )


def _unit_vectors(x: Tensor) -> Tensor:
    """Return x / ‖x‖, or 0 if x is 0."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / torch.where(length == 0, 1.0, length)


def _median(query: Tensor) -> Tensor:
    """Return the median query of each key head, … g r q d -> … g 1 1 d, or 0 if it is undefined."""
    rows = query.detach().flatten(-3, -2)
    if not rows.shape[-2]:
        return rows.new_zeros(*rows.shape[:-2], 1, 1, rows.shape[-1])
    middle = rows.nanmedian(-2).values.unsqueeze(-2).unsqueeze(-2)
    return torch.where(torch.isfinite(middle), middle, 0.0)


@hint_arguments
class General(nn.Module, Score):
    """The bilinear score queryᵀ W key (Luong et al. 2015, eq. 8, "general").

    query_width, key_width: widths of query and key. The matrix W (query_width, key_width) is learned.
    softcap: see `Dot`.

    >>> import torch, regard
    >>> score = regard.General(3, 5)
    >>> regard.attention(torch.randn(2, 3), torch.randn(4, 5), torch.randn(4, 7), score=score).shape
    torch.Size([2, 7])
    """

    def __init__(self, query_width: int, key_width: int, softcap: float | None = None) -> None:
        super().__init__()
        _check_widths("General", query_width, key_width)
        check_softcap("the score got softcap", softcap)
        self.softcap = softcap
        self.weight = nn.Parameter(torch.empty(query_width, key_width))
        nn.init.xavier_uniform_(self.weight)

    def prepare(self, query: Tensor, key: Tensor) -> Prepared:
        _widths("General", query, key, self.weight.shape[0], self.weight.shape[1])
        projected = _map_finite_rows(lambda x: x @ self.weight.to(x.dtype), query)
        return Prepared(projected, key, softcap=self.softcap)

    def extra_repr(self) -> str:
        softcap = "" if self.softcap is None else f", softcap={self.softcap}"
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}{softcap}"


class _AdditiveScore(nn.Module, Score):
    """Base class for vᵀ act(W query + U key). Subclasses define the activation and v."""

    activation: str  # a name in ACTIVATIONS
    vector: Tensor

    def __init__(self, query_width: int, key_width: int, width: int) -> None:
        super().__init__()
        _check_widths(type(self).__name__, query_width, key_width, width)
        self.query_map = nn.Parameter(torch.empty(width, query_width))
        self.key_map = nn.Parameter(torch.empty(width, key_width))
        nn.init.xavier_uniform_(self.query_map)
        nn.init.xavier_uniform_(self.key_map)

    def prepare(self, query: Tensor, key: Tensor) -> Prepared:
        query_map, key_map, vector = (x.to(query.dtype) for x in (self.query_map, self.key_map, self.vector))
        _widths(type(self).__name__, query, key, query_map.shape[1], key_map.shape[1])
        if vector.shape != query_map.shape[:1] or len(query_map) != len(key_map):
            raise ShapeError(
                f"the score has a query_map with {len(query_map)} rows, a key_map with {len(key_map)} and a "
                f"vector of shape {tuple(vector.shape)}; all three must have the same width."
            )
        query = _map_finite_rows(lambda x: x @ query_map.mT, query)
        key = _map_finite_rows(lambda x: x @ key_map.mT, key)
        return Prepared(query, key, self.activation, vector)

    def extra_repr(self) -> str:
        width, query_width = self.query_map.shape
        return f"{query_width}, {self.key_map.shape[1]}, width={width}"


@hint_arguments
class Additive(_AdditiveScore):
    """vᵀ tanh(W query + U key) (Bahdanau et al. 2015, appendix A.1.2, where the weights are called α).

    query_width, key_width: widths of query and key.
    width: length of v; default: key_width.

    >>> import torch, regard
    >>> score = regard.Additive(3, 5, width=16)
    >>> regard.attention(torch.randn(2, 3), torch.randn(4, 5), torch.randn(4, 7), score=score).shape
    torch.Size([2, 7])
    """

    activation = "tanh"

    def __init__(self, query_width: int, key_width: int, width: int | None = None) -> None:
        width = key_width if width is None else width
        super().__init__(query_width, key_width, width)
        self.vector = nn.Parameter(torch.empty(width))
        nn.init.uniform_(self.vector, -1 / math.sqrt(width), 1 / math.sqrt(width))


class Concat(_AdditiveScore):
    """relu(wᵀ [query; key]) (Wang et al. 2018, eq. 5, "concatenation").

    query_width, key_width: widths of query and key.
    width: number of units. If above 1, the score is vᵀ relu(W query + U key), with learned v.

    >>> import torch, regard
    >>> score = regard.Concat(3, 5)
    >>> x, y = torch.randn(2, 3), torch.randn(4, 5)
    >>> regard.attention(x, y, y, score=score, normalize=regard.Mean()).shape
    torch.Size([2, 5])
    """

    activation = "relu"

    def __init__(self, query_width: int, key_width: int, width: int = 1) -> None:
        super().__init__(query_width, key_width, width)
        self.mixture = None if width == 1 else nn.Parameter(torch.full((width,), 1 / width))

    @property
    def vector(self) -> Tensor:  # type: ignore[override]
        """The vector v: learned if width > 1, otherwise constant 1."""
        return self.query_map.new_ones(1) if self.mixture is None else self.mixture


# Score types whose results are not checked. The results of their subclasses are checked.
BUILT_IN = {Dot, ScaledDot, Cosine, Gaussian, General, Additive, Concat}
