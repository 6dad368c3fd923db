"""Attention without a model: lookup in a table, word order, and position encodings."""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from msgspec import Meta
from torch import Tensor, nn

from regard._util.text import pluralize
from regard.app.server.endpoints import endpoint
from regard.app.server.schema import Request, Response
from regard.app.weight_computation import formula
from regard.errors import ArgumentError, ShapeError
from regard.mechanism import reference
from regard.mechanism.biases import RelativeBias
from regard.mechanism.masks.algebra import Mask
from regard.mechanism.masks.by_position import Causal, Window
from regard.mechanism.normalizers import (
    Entmax15,
    Hard,
    Mean,
    Normalizer,
    Relu,
    Sigmoid,
    Softmax,
    Softmax1,
    Sparsemax,
)
from regard.mechanism.operator import attend
from regard.mechanism.scores import Additive, Cosine, Dot, Gaussian, ScaledDot, Score
from regard.models.encoders.words import split_words
from regard.models.layers.attention import watch_layers
from regard.models.layers.blocks import EncoderBlock, TransformerConfig
from regard.models.layers.position_encoding import PositionEncoding, PositionSizes, make_positions
from regard.models.layers.positions import PositionKind, Positions

Number = Annotated[float, Meta(ge=-1e6, le=1e6)]
Row = Annotated[list[Number], Meta(min_length=1, max_length=64)]
Table = Annotated[list[Row], Meta(min_length=1, max_length=64)]
ScoreName = Literal["dot", "scaled", "cosine", "gaussian", "additive"]
NormalizerName = Literal["softmax", "sparsemax", "entmax15", "hard", "mean", "sigmoid", "relu", "softmax1"]
MaskName = Literal["none", "causal", "window"]


class LookupRequest(Request, kw_only=True):
    """Queries, keys and values for a step-by-step computation of attention."""

    query: Table
    key: Table
    value: Table
    score: ScoreName = "scaled"
    normalize: NormalizerName = "softmax"
    temperature: Annotated[
        float, Meta(ge=1e-3, le=1e3, description="Number by which the scores are divided.")
    ] = 1.0
    mask: MaskName = "none"
    window: Annotated[
        int, Meta(ge=0, le=64, description="Number of keys visible on each side of a query.")
    ] = 2


class Formulas(Response, kw_only=True):
    """Formulas of the three steps, for display."""

    score: str
    normalize: str
    output: str


class LookupResponse(Response, kw_only=True):
    """Attention, step by step. scores: the values before the mask and the temperature are applied."""

    scores: list[list[float]]
    masked: list[list[bool]]
    weights: list[list[float]]
    output: list[list[float]]
    tau: list[float]
    formula: Formulas


class OrderRequest(Request, kw_only=True):
    """A sentence and the new order of its words, as indices from 0."""

    sentence: Annotated[str, Meta(min_length=1, max_length=1000)]
    order: Annotated[list[Annotated[int, Meta(ge=0, le=63)]], Meta(min_length=1, max_length=64)]
    positions: Positions = "none"
    seed: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0


class OrderResponse(Response, kw_only=True):
    """Outputs before and after reordering. change: distance between the two outputs of each word."""

    words: list[str]
    shuffled: list[str]
    before: list[list[float]]
    after: list[list[float]]
    change: list[float]
    weights_before: list[list[float]]
    weights_after: list[list[float]]


class PositionsRequest(Request, kw_only=True):
    """Kind and size of a position encoding."""

    kind: PositionKind = "sinusoidal"
    length: Annotated[int, Meta(ge=1, le=512, description="Number of positions.")] = 64
    width: Annotated[
        int, Meta(ge=2, le=512, description="Number of features, or of heads for alibi and t5.")
    ] = 64


class PositionsResponse(Response, kw_only=True):
    """A position encoding as a table. start: the position or distance of the first column."""

    values: list[list[float]]
    rows: str
    columns: str
    start: int


# formula and score; None: the additive score, which depends on the width
_SCORES: dict[str, tuple[str, Score | None]] = {
    "dot": ("q · k", Dot()),
    "scaled": ("q · k / √d", ScaledDot()),
    "cosine": ("q · k / (‖q‖ ‖k‖)", Cosine()),
    "gaussian": ("−‖q − k‖² / 2", Gaussian()),
    "additive": ("Σ tanh(q + k)", None),
}
_NORMALIZERS: dict[str, Normalizer] = {
    "softmax": Softmax(),
    "softmax1": Softmax1(),
    "sparsemax": Sparsemax(),
    "entmax15": Entmax15(),
    "hard": Hard(),
    "mean": Mean(),
    "sigmoid": Sigmoid(),
    "relu": Relu(),
}
_WIDTH, _HEADS = 16, 4  # sizes of the block that demonstrates word order


@endpoint("POST", "/api/lookup", "Attention over a small table, step by step.")
def lookup(request: LookupRequest) -> LookupResponse:
    """Return the scores, weights and output for a small table, in float64.

    >>> from regard.app.server.routes.lessons import LookupRequest, lookup
    >>> table = LookupRequest(query=[[1, 0]], key=[[1, 0], [0, 1]], value=[[10], [20]], normalize="hard")
    >>> lookup(table).output
    [[10.0]]
    """
    query, key, value = (_table(name, getattr(request, name)) for name in ("query", "key", "value"))
    score_formula, score = _SCORES[request.score]
    score = score or _additive(query.shape[1], key.shape[1])
    normalize, temperature = _NORMALIZERS[request.normalize], request.temperature
    scores = attend(query, key, value, score=score)[1].scores()
    # with scores / temperature as query and the identity as key, the temperature works with every normalizer
    output, weights = attend(
        scores / temperature,
        torch.eye(len(key), dtype=torch.float64),
        value,
        score=Dot(),
        mask=_mask(request),
        normalize=normalize,
        implementation="reference",
    )
    masked_scores = weights.scores()
    tau = reference.tau(weights.problem, masked_scores).sum(-1)
    return LookupResponse(
        scores=scores.tolist(),
        masked=(masked_scores == -math.inf).tolist(),
        weights=weights.dense().tolist(),
        output=output.tolist(),
        tau=tau.reshape(-1).tolist(),
        formula=Formulas(
            score=score_formula,
            normalize=formula(normalize, "s" if temperature == 1 else f"(s / {temperature:g})"),
            output="Σ w v",
        ),
    )


def _table(name: str, rows: Sequence[Sequence[float]]) -> Tensor:
    for number, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise ShapeError(
                f"{name}: row 0 has {pluralize(len(rows[0]), 'number')} and row {number} has {len(row)}; all "
                "rows must have the same length."
            )
    return torch.tensor(rows, dtype=torch.float64)


def _additive(query: int, key: int) -> Score:
    """Return an additive score with identity maps: there are no learned parameters here."""
    if query != key:
        raise ShapeError(
            f"query has {pluralize(query, 'feature')} and key has {key}; the additive score needs equal "
            "widths. Change one of them, or choose another score."
        )
    additive = Additive(query, key).double()
    with torch.no_grad():
        additive.query_map.copy_(torch.eye(query))
        additive.key_map.copy_(torch.eye(key))
        additive.vector.fill_(1)
    return additive


def _mask(request: LookupRequest) -> Mask | None:
    if request.mask == "window":
        return Window(left=request.window, right=request.window)
    return Causal() if request.mask == "causal" else None


@endpoint("POST", "/api/order", "Effect of reordering words.")
def order(request: OrderRequest) -> OrderResponse:
    """Run a random Transformer block on a sentence and on its reordered words.

    >>> from regard.app.server.routes.lessons import OrderRequest, order
    >>> max(order(OrderRequest(sentence="dog bites man", order=[2, 1, 0])).change) < 1e-9
    True
    >>> max(order(OrderRequest(sentence="dog bites man", order=[2, 1, 0], positions="rotary")).change) < 1e-9
    False
    """
    words = [word.text for word in split_words(request.sentence)]
    if not words or len(words) > 64:
        raise ArgumentError(f"The sentence has {len(words)} words; it must have 1 to 64.")
    if sorted(request.order) != list(range(len(words))):
        raise ArgumentError(
            f"order is {request.order}, but the sentence has {pluralize(len(words), 'word')}; list the index "
            "of each word once, counting from 0."
        )
    generator = torch.Generator().manual_seed(request.seed)
    block = _random_block(generator)
    vocabulary = sorted(set(words))
    table = torch.randn(len(vocabulary), _WIDTH, generator=generator, dtype=torch.float64)
    x = table[[vocabulary.index(word) for word in words]]
    sizes = PositionSizes(_WIDTH, _HEADS, _WIDTH // _HEADS, max_positions=len(words))
    encoding = _random_positions(request.positions, sizes, generator)
    before, weights_before = _run_block(block, x, encoding)
    after, weights_after = _run_block(block, x[request.order], encoding)
    restored = torch.empty_like(after)
    restored[request.order] = after
    return OrderResponse(
        words=words,
        shuffled=[words[index] for index in request.order],
        before=before.tolist(),
        after=after.tolist(),
        change=(restored - before).norm(dim=-1).tolist(),
        weights_before=weights_before.tolist(),
        weights_after=weights_after.tolist(),
    )


def _random_block(generator: torch.Generator) -> EncoderBlock:
    config = TransformerConfig(width=_WIDTH, heads=_HEADS, layers=1, dropout=0.0, positions="none")
    block = EncoderBlock(config).double().eval()
    for name, parameter in block.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=generator)
        elif "norm" not in name:
            nn.init.zeros_(parameter)
    return block


def _random_positions(
    kind: Positions, sizes: PositionSizes, generator: torch.Generator
) -> PositionEncoding | RelativeBias:
    """Return an encoding with parameters as large as the word vectors; the defaults would be too small."""
    encoding = make_positions(kind, sizes)
    for parameter in encoding.parameters():
        nn.init.normal_(parameter, generator=generator)
    return encoding.double()


def _run_block(
    block: EncoderBlock, x: Tensor, encoding: PositionEncoding | RelativeBias
) -> tuple[Tensor, Tensor]:
    """Return the output of a block and the mean weights of its heads."""
    seen: list[Tensor] = []
    with torch.no_grad(), watch_layers(block, lambda _, weights: seen.append(weights.dense())):
        x, options = encoding.encode(x, torch.arange(len(x)))
        output = block(x, **options)
    return output, seen[0].mean(0)


@endpoint("GET", "/api/positions", "A position encoding.")
def positions(request: PositionsRequest) -> PositionsResponse:
    """Return a position encoding as a table: features by position, or a bias by distance.

    >>> from regard.app.server.routes.lessons import PositionsRequest, positions
    >>> positions(PositionsRequest(kind="alibi", length=3, width=2)).values[0]
    [-0.125, -0.0625, -0.0, -0.0625, -0.125]
    """
    length, width = request.length, request.width
    generator = torch.Generator().manual_seed(0)
    sizes = PositionSizes(width, width, width - width % 2, max_positions=length)
    encoding = _random_positions(request.kind, sizes, generator)
    with torch.no_grad():
        if isinstance(encoding, RelativeBias):
            values = encoding(torch.arange(1 - length, length))
            return PositionsResponse(
                values=_rounded(values), rows="head", columns="distance", start=1 - length
            )
        values = next(iter(encoding.tables(length).values()))
    return PositionsResponse(values=_rounded(values), rows="position", columns=encoding.columns, start=0)


def _rounded(values: Tensor) -> list[list[float]]:
    return [[round(number, 6) for number in row] for row in values.tolist()]
