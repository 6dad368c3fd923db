"""Attention without a model: a table to look things up in, words in another order, encodings of positions."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.app.server.requests import Lookup, Order, Positions, PositionsAsked
from regard.app.server.schema import Encoding, Formula, LookedUp, Ordered
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
from regard.mechanism.scores import Additive, Cosine, Dot, Gaussian, ScaledDot
from regard.mechanism.scores import Score as Scoring
from regard._util.text import pluralize
from regard.models.encoders.words import split_words
from regard.models.layers.attention import watch_layers
from regard.models.layers.blocks import EncoderBlock, TransformerConfig
from regard.models.layers.positions import RotaryPositions, Rotation, SinusoidalPositions

_SCORES = {
    "dot": "q · k",
    "scaled": "q · k / √d",
    "cosine": "q · k / (‖q‖ ‖k‖)",
    "gaussian": "−‖q − k‖² / 2",
    "additive": "Σ tanh(q + k)",
}
_NORMALIZERS: dict[str, tuple[Normalizer, str]] = {
    "softmax": (Softmax(), "exp(s − τ)"),
    "softmax1": (Softmax1(), "exp(s − τ)"),
    "sparsemax": (Sparsemax(), "max(s − τ, 0)"),
    "entmax15": (Entmax15(), "max((s − τ) / 2, 0)²"),
    "hard": (Hard(), "1 if s = τ, else 0"),
    "mean": (Mean(), "s / n"),
    "sigmoid": (Sigmoid(), "1 / (1 + exp(τ − s))"),
    "relu": (Relu(), "max(s, 0) / n"),
}
_WIDTH, _HEADS = 16, 4  # of the block that shows what order does


def lookup(asked: Lookup) -> LookedUp:
    """Scores, weights and output of a small table, in float64.

    >>> from regard.app.server.requests import Lookup
    >>> from regard.app.server.routes.lessons import lookup
    >>> table = Lookup(query=[[1, 0]], key=[[1, 0], [0, 1]], value=[[10], [20]], normalize="hard")
    >>> lookup(table).output
    [[10.0]]
    """
    query, key, value = (_table(name, getattr(asked, name)) for name in ("query", "key", "value"))
    score = _score(asked.score, query.shape[1], key.shape[1])
    normalize, written = _NORMALIZERS[asked.normalize]
    scores = attend(query, key, value, score=score)[1].scores()
    # a row of scores times the identity is itself: so that any normalizer sees the scores at a temperature
    cooled, unit = scores / asked.temperature, torch.eye(len(key), dtype=torch.float64)
    output, weights = attend(
        cooled, unit, value, score=Dot(), mask=_mask(asked), normalize=normalize, implementation="reference"
    )
    seen = weights.scores()
    tau = reference.tau(weights._problem, seen).sum(-1)
    cooled_score = f"(s / {asked.temperature:g})"
    return LookedUp(
        scores=scores.tolist(),
        masked=(seen == -math.inf).tolist(),
        weights=weights.dense().tolist(),
        output=output.tolist(),
        tau=tau.reshape(-1).tolist(),
        formula=Formula(
            score=_SCORES[asked.score],
            normalize=written if asked.temperature == 1 else written.replace("s", cooled_score, 1),
            output="Σ w v",
        ),
    )


def _table(name: str, rows: Sequence[Sequence[float]]) -> Tensor:
    for number, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise ShapeError(
                f"row 0 of {name} has {pluralize(len(rows[0]), 'number')} and row {number} has {len(row)}; "
                "give each row as many."
            )
    return torch.tensor(rows, dtype=torch.float64)


def _score(name: str, query: int, key: int) -> Scoring:
    if name == "additive":
        if query != key:
            raise ShapeError(
                f"query has {query} features and key has {key}; to be added they need equally many."
            )
        additive = Additive(query, key).double()
        with torch.no_grad():  # the simplest of its kind: nothing is learned here
            additive.query_map.copy_(torch.eye(query))
            additive.key_map.copy_(torch.eye(key))
            additive.vector.fill_(1)
        return additive
    known: dict[str, Scoring] = {
        "dot": Dot(),
        "scaled": ScaledDot(),
        "cosine": Cosine(),
        "gaussian": Gaussian(),
    }
    return known[name]


def _mask(asked: Lookup) -> Mask | None:
    if asked.mask == "window":
        return Window(left=asked.window, right=asked.window)
    return Causal() if asked.mask == "causal" else None


class _Places(NamedTuple):
    """How positions enter a block: added to the words, as a bias of the scores, or as a turn."""

    added: Tensor | None = None
    bias: RelativeBias | None = None
    rotation: Rotation | None = None


def order(asked: Order) -> Ordered:
    """What one Transformer block with random parameters makes of a sentence, and of its words shuffled.

    >>> from regard.app.server.requests import Order
    >>> from regard.app.server.routes.lessons import order
    >>> max(order(Order(sentence="dog bites man", order=[2, 1, 0])).change) < 1e-9
    True
    >>> max(order(Order(sentence="dog bites man", order=[2, 1, 0], positions="rotary")).change) < 1e-9
    False
    """
    words = [word.text for word in split_words(asked.sentence)]
    if not words or len(words) > 64:
        raise ArgumentError(f"the sentence has {len(words)} words; give 1 to 64.")
    if sorted(asked.order) != list(range(len(words))):
        raise ArgumentError(
            f"the order is {asked.order} and the sentence has {pluralize(len(words), 'word')}; give each of "
            f"the numbers 0 to {len(words) - 1} once."
        )
    generator = torch.Generator().manual_seed(asked.seed)
    block = _block(generator)
    different = sorted(set(words))
    table = torch.randn(len(different), _WIDTH, generator=generator, dtype=torch.float64)
    x = table[[different.index(word) for word in words]]
    places = _places(asked.positions, len(words), generator)
    before, weights_before = _through(block, x, places)
    after, weights_after = _through(block, x[asked.order], places)
    moved = torch.empty_like(after)
    moved[asked.order] = after
    return Ordered(
        words=words,
        shuffled=[words[place] for place in asked.order],
        before=before.tolist(),
        after=after.tolist(),
        change=(moved - before).norm(dim=-1).tolist(),
        weights_before=weights_before.tolist(),
        weights_after=weights_after.tolist(),
    )


def _block(generator: torch.Generator) -> EncoderBlock:
    config = TransformerConfig(width=_WIDTH, heads=_HEADS, layers=1, dropout=0.0, positions="none")
    block = EncoderBlock(config).double().eval()
    _draw(block, generator)
    return block


def _draw(module: nn.Module, generator: torch.Generator) -> None:
    """Parameters from this generator alone, so that a seed says all; the norms stay as they are."""
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=generator)
        elif "norm" not in name:
            nn.init.zeros_(parameter)


def _places(kind: Positions, length: int, generator: torch.Generator) -> _Places:
    positions = torch.arange(length)
    if kind == "sinusoidal":
        return _Places(added=SinusoidalPositions(_WIDTH)(positions, torch.float64))
    if kind == "learned":
        return _Places(added=torch.randn(length, _WIDTH, generator=generator, dtype=torch.float64))
    if kind == "rotary":
        return _Places(rotation=RotaryPositions(_WIDTH // _HEADS)(positions, torch.float64))
    if kind == "alibi":
        return _Places(bias=ALiBi(_HEADS))
    if kind == "t5":
        return _Places(bias=_t5(_HEADS, generator).double())
    return _Places()


def _t5(heads: int, generator: torch.Generator) -> T5Bias:
    """With numbers as large as the scores: what was never learned is small, and would not be seen."""
    bias = T5Bias(heads)
    nn.init.normal_(bias.table, generator=generator)
    return bias


def _through(block: EncoderBlock, x: Tensor, places: _Places) -> tuple[Tensor, Tensor]:
    """The vectors of the words behind the block, and the mean of its heads' weights."""
    seen: list[Tensor] = []
    x = x if places.added is None else x + places.added
    with torch.no_grad(), watch_layers(block, lambda _, weights: seen.append(weights.dense())):
        output = block(x, bias=places.bias, rotation=places.rotation)
    return output, seen[0].mean(0)


def positions(asked: PositionsAsked) -> Encoding:
    """An encoding as a table: features of each position, or a bias for each distance.

    >>> from regard.app.server.requests import PositionsAsked
    >>> from regard.app.server.routes.lessons import positions
    >>> positions(PositionsAsked(kind="alibi", length=3, width=2)).values[0]
    [-0.125, -0.0625, -0.0, -0.0625, -0.125]
    """
    places, generator = torch.arange(asked.length), torch.Generator().manual_seed(0)
    if asked.kind in ("alibi", "t5"):
        bias = ALiBi(asked.width) if asked.kind == "alibi" else _t5(asked.width, generator)
        first = 1 - asked.length
        with torch.no_grad():
            values = bias(torch.arange(first, asked.length))
        return Encoding(values=_rounded(values), rows="head", columns="distance", start=first)
    if asked.kind == "rotary":
        rotation = RotaryPositions(asked.width - asked.width % 2)(places, torch.float64)
        half = rotation.cos[:, : asked.width // 2]
        return Encoding(values=_rounded(half), rows="position", columns="pair of features", start=0)
    if asked.kind == "sinusoidal":
        values = SinusoidalPositions(asked.width)(places, torch.float64)
    else:
        values = (
            torch.randn(asked.length, asked.width, generator=generator) * 0.02
        )  # as `LearnedPositions` begins
    return Encoding(values=_rounded(values), rows="position", columns="feature", start=0)


def _rounded(values: Tensor) -> list[list[float]]:
    """Six digits behind the point: it is for looking at."""
    return [[round(number, 6) for number in row] for row in values.tolist()]
