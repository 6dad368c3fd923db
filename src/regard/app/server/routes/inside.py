"""Traces of a text through a model: every intermediate result, layer by layer, and the next token."""

import math
from typing import Annotated, Any, Literal

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from regard._util.text import index_range
from regard.app.server.endpoints import endpoint
from regard.app.server.schema import Name, Request, Response, Sentence
from regard.app.server.state import AppState
from regard.app.trace import StackTrace, Step
from regard.app.trace_text import TracedText, trace_text
from regard.errors import ArgumentError
from regard.models.configs import Norm

_PREDICTIONS = 20  # number of most probable tokens to return per position
_DIGITS = 7  # significant decimal digits of the numbers in a response, as in float32

Matrix = list[list[float]]
Stack = Literal["encoder", "decoder"]


class InsideRequest(Request, kw_only=True):
    """A text and the model that reads it."""

    model: Name
    text: Sentence
    target: Annotated[
        Annotated[str, Meta(max_length=10_000)] | None,
        Meta(description="Target text of a translator, at most 10,000 characters. Default: its translation."),
    ] = None


class LayerRequest(InsideRequest, kw_only=True):
    """One layer of a stack, counted from 0."""

    stack: Stack
    layer: Annotated[int, Meta(ge=0, le=1000)]


class NextRequest(InsideRequest, kw_only=True):
    """A text whose next token is sampled at a temperature; at 0, the most probable token is chosen."""

    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    seed: Annotated[int, Meta(ge=0, le=2**53)] = 0


class Candidate(Response, kw_only=True):
    """A possible next token and its probability at the requested temperature."""

    token: str
    id: int
    probability: float


class LogitCandidate(Candidate, kw_only=True):
    """A possible next token with its logit, and its probability at temperature 1."""

    logit: float


class PositionPrediction(Response, kw_only=True):
    """The most probable tokens after a position. total: log Σ exp(logit) over the vocabulary."""

    position: int
    total: float
    top: list[LogitCandidate]


class InsideStack(Response, kw_only=True):
    """The states of one stack; every matrix has one row per token. See `StackTrace`."""

    name: Stack
    tokens: list[str]
    token_embedding: Matrix
    position_embedding: Matrix | None
    position_note: str
    embedding: Matrix
    layers: list[Matrix]
    final: Matrix


class InsideResponse(Response, kw_only=True):
    """A model's architecture and its states for a text. predictions: null without an output vocabulary."""

    model: str
    kind: Literal["decoder", "encoder", "encoder-decoder"]
    width: int
    heads: int
    feed_forward: int
    activation: str
    norm: Literal["pre", "post"]
    norm_type: Norm
    normalize: str
    stacks: list[InsideStack]
    predictions: list[PositionPrediction] | None


class InsideStep(Response, kw_only=True, omit_defaults=True):
    """A step of a layer; which fields it has depends on its kind.

    norm: input, output. attention: all fields from query to output. residual: output. feed_forward: hidden,
    output.
    """

    kind: Literal["norm", "attention", "residual", "feed_forward"]
    name: str
    output: Matrix
    input: Matrix | None = None
    hidden: Matrix | None = None
    query: list[Matrix] | None = None
    key: list[Matrix] | None = None
    value: list[Matrix] | None = None
    scale: float | None = None
    scores: list[Matrix] | None = None
    allowed: list[list[bool]] | None = None
    weights: list[Matrix] | None = None
    mixed: list[Matrix] | None = None


class LayerResponse(Response, kw_only=True):
    """The steps of a layer, in the order of computation."""

    steps: list[InsideStep]


class NextResponse(Response, kw_only=True):
    """The chosen token, the most probable tokens, and the text with the token appended."""

    token: str
    id: int
    probabilities: list[Candidate]
    text: str


@endpoint("POST", "/api/inside", "States of a text in a Transformer, and its predictions.", pool="model")
def inside(state: AppState, request: InsideRequest) -> InsideResponse:
    """Return the states between the layers."""
    traced = _trace(state, request)
    trace, config = traced.trace, traced.trace.config
    return InsideResponse(
        model=request.model,
        kind=trace.kind,
        width=config.width,
        heads=config.heads,
        feed_forward=config.resolved_ffn_dim,
        activation=config.activation,
        norm="pre" if config.norm_first else "post",
        norm_type=config.norm,
        normalize=type(config.normalize).__name__.lower(),
        stacks=[_stack(stack) for stack in trace.stacks],
        predictions=_predictions(traced),
    )


@endpoint("POST", "/api/inside/layer", "Every step of one layer.", pool="model")
def layer(state: AppState, request: LayerRequest) -> LayerResponse:
    """Return the steps of a layer."""
    stacks = {stack.name: stack for stack in _trace(state, request).trace.stacks}
    if request.stack not in stacks:
        raise ArgumentError(
            f"{request.model!r} has no {request.stack}; choose {' or '.join(map(repr, stacks))}."
        )
    steps = stacks[request.stack].steps
    if request.layer >= len(steps):
        raise ArgumentError(
            f"Layer {request.layer} is out of range: the {request.stack} of {request.model!r} has "
            f"{index_range('layer', len(steps))}."
        )
    return LayerResponse(steps=[_step(step) for step in steps[request.layer]])


@endpoint("POST", "/api/inside/next", "Choose the next token.", pool="model")
def choose_next(state: AppState, request: NextRequest) -> NextResponse:
    """Sample the next token at a temperature."""
    traced = _trace(state, request)
    logits = traced.trace.logits
    if logits is None:
        raise ArgumentError(
            f"{request.model!r} is an encoder, which does not predict the next token. Choose a language "
            "model or a translator."
        )
    probabilities = next_probabilities(logits[-1], request.temperature)
    generator = torch.Generator().manual_seed(request.seed)
    token = int(torch.multinomial(probabilities, 1, generator=generator))
    best = probabilities.topk(min(_PREDICTIONS, len(probabilities)))
    return NextResponse(
        token=traced.token(token),
        id=token,
        probabilities=[
            Candidate(token=traced.token(i), id=i, probability=probability)
            for i, probability in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ],
        text=traced.append(token),
    )


def next_probabilities(logits: Tensor, temperature: float) -> Tensor:
    """Return softmax(logits / temperature); at temperature 0, the largest logit has probability 1.

    >>> import torch
    >>> from regard.app.server.routes.inside import next_probabilities
    >>> next_probabilities(torch.tensor([1.0, 2.0]), temperature=0.0)
    tensor([0., 1.])
    """
    logits = logits - logits.max()
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).to(logits.dtype)
    return torch.softmax(logits.double() / temperature, -1).to(logits.dtype)


def _trace(state: AppState, request: InsideRequest) -> TracedText:
    return trace_text(state.registry.entry(request.model).model, request.text, request.target)


def _stack(stack: StackTrace) -> InsideStack:
    positions = stack.position_embedding
    return InsideStack(
        name=stack.name,
        tokens=stack.tokens,
        token_embedding=_numbers(stack.token_embedding),
        position_embedding=None if positions is None else _numbers(positions),
        position_note=stack.position_note,
        embedding=_numbers(stack.embedding),
        layers=[_numbers(layer) for layer in stack.layers],
        final=_numbers(stack.final),
    )


def _step(step: Step) -> InsideStep:
    scale = step.scale if step.kind == "attention" else None
    values = {
        name: tensor.tolist() if tensor.dtype == torch.bool else _numbers(tensor)
        for name, tensor in step.tensors.items()
    }
    return InsideStep(kind=step.kind, name=step.name, scale=scale, **values)


def _predictions(traced: TracedText) -> list[PositionPrediction] | None:
    logits = traced.trace.logits
    if logits is None:
        return None
    totals, best = logits.logsumexp(-1).tolist(), logits.topk(min(_PREDICTIONS, logits.shape[-1]))
    return [
        PositionPrediction(
            position=position,
            total=total,
            top=[
                LogitCandidate(token=traced.token(i), id=i, logit=logit, probability=math.exp(logit - total))
                for i, logit in zip(ids, values, strict=True)
            ],
        )
        for position, (total, ids, values) in enumerate(
            zip(totals, best.indices.tolist(), best.values.tolist(), strict=True)
        )
    ]


def _numbers(tensor: Tensor) -> list[Any]:
    """Return nested lists of numbers, rounded to the digits of float32 to keep the JSON short."""
    values = tensor.detach().cpu().double().numpy()
    with np.errstate(divide="ignore"):
        exponent = np.where(values == 0, 0, np.floor(np.log10(np.abs(values))))
    factor = 10.0 ** (_DIGITS - 1 - exponent)
    return (np.round(values * factor) / factor).tolist()
