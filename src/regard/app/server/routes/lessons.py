"""Attention without a model: lookup in a table, word order, and position encodings."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard._util.text import pluralize
from regard.app.protocol import formula
from regard.app.server.requests import LookupRequest, OrderRequest, Positions, PositionsRequest
from regard.app.server.schema import Formulas, LookupResponse, OrderResponse, PositionsResponse
from regard.errors import ArgumentError, ShapeError
from regard.mechanism import reference
from regard.mechanism.biases import ALiBi, RelativeBias, T5Bias
from regard.mechanism.mask_algebra import Mask
from regard.mechanism.masks import Causal, Window
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
from regard.models.layers.positions import RotaryPositions, Rotation, SinusoidalPositions

_SCORE_FORMULAS = {
    "dot": "q · k",
    "scaled": "q · k / √d",
    "cosine": "q · k / (‖q‖ ‖k‖)",
    "gaussian": "−‖q − k‖² / 2",
    "additive": "Σ tanh(q + k)",
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
_WIDTH, _HEADS = 16, 4  # of the block that demonstrates word order


def lookup(request: LookupRequest) -> LookupResponse:
    """Return scores, weights and output of a small table, in float64.

    >>> from regard.app.server.requests import LookupRequest
    >>> from regard.app.server.routes.lessons import lookup
    >>> table = LookupRequest(query=[[1, 0]], key=[[1, 0], [0, 1]], value=[[10], [20]], normalize="hard")
    >>> lookup(table).output
    [[10.0]]
    """
    query, key, value = (_table(name, getattr(request, name)) for name in ("query", "key", "value"))
    score = _score(request.score, query.shape[1], key.shape[1])
    normalize, temperature = _NORMALIZERS[request.normalize], request.temperature
    scores = attend(query, key, value, score=score)[1].scores()
    # queries = scores / temperature and keys = identity: gives every normalizer a temperature
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
            score=_SCORE_FORMULAS[request.score],
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


def _score(name: str, query: int, key: int) -> Score:
    if name == "additive":
        if query != key:
            raise ShapeError(
                f"query has {query} features and key has {key}; the additive score needs equal widths."
            )
        additive = Additive(query, key).double()
        with torch.no_grad():  # identity maps: there are no learned parameters here
            additive.query_map.copy_(torch.eye(query))
            additive.key_map.copy_(torch.eye(key))
            additive.vector.fill_(1)
        return additive
    scores: dict[str, Score] = {
        "dot": Dot(),
        "scaled": ScaledDot(),
        "cosine": Cosine(),
        "gaussian": Gaussian(),
    }
    return scores[name]


def _mask(request: LookupRequest) -> Mask | None:
    if request.mask == "window":
        return Window(left=request.window, right=request.window)
    return Causal() if request.mask == "causal" else None


class _PositionInput(NamedTuple):
    """How positions enter a block: added to the words, as a bias of the scores, or as a rotation."""

    added: Tensor | None = None
    bias: RelativeBias | None = None
    rotation: Rotation | None = None


def order(request: OrderRequest) -> OrderResponse:
    """Run a random Transformer block on a sentence and on its reordered words.

    >>> from regard.app.server.requests import OrderRequest
    >>> from regard.app.server.routes.lessons import order
    >>> max(order(OrderRequest(sentence="dog bites man", order=[2, 1, 0])).change) < 1e-9
    True
    >>> max(order(OrderRequest(sentence="dog bites man", order=[2, 1, 0], positions="rotary")).change) < 1e-9
    False
    """
    words = [word.text for word in split_words(request.sentence)]
    if not words or len(words) > 64:
        raise ArgumentError(f"The sentence has {len(words)} words; it needs 1 to 64.")
    if sorted(request.order) != list(range(len(words))):
        raise ArgumentError(
            f"order is {request.order} for {pluralize(len(words), 'word')}; it must have each of 0 to "
            f"{len(words) - 1} once."
        )
    generator = torch.Generator().manual_seed(request.seed)
    block = _random_block(generator)
    vocabulary = sorted(set(words))
    table = torch.randn(len(vocabulary), _WIDTH, generator=generator, dtype=torch.float64)
    x = table[[vocabulary.index(word) for word in words]]
    position_input = _position_input(request.positions, len(words), generator)
    before, weights_before = _run_block(block, x, position_input)
    after, weights_after = _run_block(block, x[request.order], position_input)
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


def _position_input(kind: Positions, length: int, generator: torch.Generator) -> _PositionInput:
    positions = torch.arange(length)
    match kind:
        case "sinusoidal":
            return _PositionInput(added=SinusoidalPositions(_WIDTH)(positions, torch.float64))
        case "learned":
            return _PositionInput(added=torch.randn(length, _WIDTH, generator=generator, dtype=torch.float64))
        case "rotary":
            return _PositionInput(rotation=RotaryPositions(_WIDTH // _HEADS)(positions, torch.float64))
        case "alibi":
            return _PositionInput(bias=ALiBi(_HEADS))
        case "t5":
            return _PositionInput(bias=_random_t5(_HEADS, generator).double())
    return _PositionInput()


def _random_t5(heads: int, generator: torch.Generator) -> T5Bias:
    """Return a bias as large as the scores; the usual initial values are too small to see."""
    bias = T5Bias(heads)
    nn.init.normal_(bias.table, generator=generator)
    return bias


def _run_block(block: EncoderBlock, x: Tensor, position_input: _PositionInput) -> tuple[Tensor, Tensor]:
    """Return the output of a block and the mean weights of its heads."""
    seen: list[Tensor] = []
    x = x if position_input.added is None else x + position_input.added
    with torch.no_grad(), watch_layers(block, lambda _, weights: seen.append(weights.dense())):
        output = block(x, bias=position_input.bias, rotation=position_input.rotation)
    return output, seen[0].mean(0)


def positions(request: PositionsRequest) -> PositionsResponse:
    """Return a position encoding as a table: features by position, or a bias by distance.

    >>> from regard.app.server.requests import PositionsRequest
    >>> from regard.app.server.routes.lessons import positions
    >>> positions(PositionsRequest(kind="alibi", length=3, width=2)).values[0]
    [-0.125, -0.0625, -0.0, -0.0625, -0.125]
    """
    length, width = request.length, request.width
    indices, generator = torch.arange(length), torch.Generator().manual_seed(0)
    if request.kind in ("alibi", "t5"):
        bias = ALiBi(width) if request.kind == "alibi" else _random_t5(width, generator)
        with torch.no_grad():
            values = bias(torch.arange(1 - length, length))
        return PositionsResponse(values=_rounded(values), rows="head", columns="distance", start=1 - length)
    columns = "feature"
    if request.kind == "rotary":
        values = RotaryPositions(width - width % 2)(indices, torch.float64).cos[:, : width // 2]
        columns = "pair of features"
    elif request.kind == "sinusoidal":
        values = SinusoidalPositions(width)(indices, torch.float64)
    else:
        values = torch.randn(length, width, generator=generator) * 0.02  # as LearnedPositions is initialized
    return PositionsResponse(values=_rounded(values), rows="position", columns=columns, start=0)


def _rounded(values: Tensor) -> list[list[float]]:
    return [[round(number, 6) for number in row] for row in values.tolist()]
