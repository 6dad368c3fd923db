"""Trace one text through a Transformer: every intermediate result of the model's own forward pass.

    text → ids → embedding + position → blocks (attention, residual, norm, feed-forward) → logits

Hooks record what the model's own modules compute. Only the scores are computed here, with the reference
implementation, because fused attention never stores them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Lock, get_ident
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.mechanism import reference
from regard.mechanism.call.arguments import Call, Layout, prepare
from regard.mechanism.masks.algebra import as_mask
from regard.mechanism.operator import attend
from regard.models.language import LanguageModel, MaskedLanguageModel
from regard.models.layers.attention import Attends
from regard.models.layers.blocks import DecoderBlock, EncoderBlock, FeedForward, Residual, TransformerConfig
from regard.models.layers.dropout import eval_mode
from regard.models.layers.position_encoding import PositionEncoding
from regard.models.transformer import Transformer

Kind = Literal["decoder", "encoder", "encoder-decoder"]
StepKind = Literal["norm", "attention", "residual", "feed_forward"]
_LOCK = Lock()  # allows one trace at a time, because recording replaces a method of the model's layers


@dataclass
class Step:
    """One step of a layer: its kind, a name and its tensors without the batch axis.

    >>> import torch
    >>> from regard.app.trace import Step
    >>> Step("residual", "", {"output": torch.zeros(3, 4)}).tensors["output"].shape
    torch.Size([3, 4])
    """

    kind: StepKind
    name: str
    tensors: dict[str, Tensor]
    scale: float = 1.0  # factor applied to the scores in an attention step


@dataclass
class StackTrace:
    """The intermediate results of one text in a stack of blocks; every matrix has one row per token.

    token_embedding: token vectors. position_embedding: the vectors added to them; None if there are none.
    embedding: input of the first block. layers: output of each block. final: output of the final norm.
    steps: the steps of each block, in the order of computation.

    >>> import regard
    >>> from regard.app.trace import trace_ids
    >>> config = regard.models.TransformerConfig(width=8, heads=2, layers=3)
    >>> (stack,) = trace_ids(regard.models.LanguageModel(11, config), [5, 6, 7]).stacks
    >>> stack.name, stack.embedding.shape, len(stack.steps)
    ('decoder', torch.Size([3, 8]), 3)
    """

    name: Literal["encoder", "decoder"]
    tokens: list[str]
    token_embedding: Tensor
    position_embedding: Tensor | None
    position_note: str
    embedding: Tensor
    layers: list[Tensor]
    final: Tensor
    steps: list[list[Step]] = field(repr=False)


@dataclass
class Trace:
    """Every intermediate result of one forward pass. logits: (n, V), or None without an output vocabulary.

    >>> import torch, regard
    >>> from regard.app.trace import trace_ids
    >>> config = regard.models.TransformerConfig(width=8, heads=2, layers=3)
    >>> trace = trace_ids(regard.models.LanguageModel(11, config), [5, 6, 7])
    >>> trace.kind, len(trace.stacks[0].layers), trace.logits.shape
    ('decoder', 3, torch.Size([3, 11]))
    >>> [step.kind for step in trace.stacks[0].steps[0]]
    ['norm', 'attention', 'residual', 'norm', 'feed_forward', 'residual']
    """

    kind: Kind
    config: TransformerConfig
    stacks: list[StackTrace]
    logits: Tensor | None


class _Parts(NamedTuple):
    """The modules of one stack; `norm` is the final norm, or None."""

    name: Literal["encoder", "decoder"]
    embedding: nn.Module
    positions: nn.Module
    blocks: Sequence[nn.Module]
    norm: nn.Module | None


@torch.no_grad()
def trace_ids(
    model: nn.Module,
    ids: Sequence[int],
    target: Sequence[int] | None = None,
    *,
    tokens: Sequence[str] | None = None,
    target_tokens: Sequence[str] | None = None,
) -> Trace:
    """Trace token ids through a `LanguageModel`, `Transformer`, `MaskedLanguageModel` or pretrained encoder.

    ids: the text, or the source of a `Transformer`.
    target: the target of a `Transformer`, with the start token.
    tokens, target_tokens: the tokens as text; default: the ids.

    >>> import regard
    >>> from regard.app.trace import trace_ids
    >>> model = regard.models.Transformer(11, regard.models.TransformerConfig(width=8, heads=2, layers=1))
    >>> encoder, decoder = trace_ids(model, [5, 6, 7], target=[2, 8]).stacks
    >>> cross = decoder.steps[0][4]
    >>> cross.kind, cross.name, cross.tensors["weights"].shape  # heads, target tokens, source tokens
    ('attention', 'cross', torch.Size([2, 2, 3]))
    """
    kind, config, stacks = _describe(model)
    texts = [list(tokens or map(str, ids))]
    inputs = [torch.tensor([list(ids)], device=next(model.parameters()).device)]
    if kind == "encoder-decoder":
        assert target is not None
        texts.append(list(target_tokens or map(str, target)))
        inputs.append(torch.tensor([list(target)], device=inputs[0].device))
    records = [_Record() for _ in stacks]
    with ExitStack() as stack:
        stack.enter_context(_LOCK)
        stack.enter_context(eval_mode(model))
        for parts, record in zip(stacks, records, strict=True):
            stack.enter_context(_recording(parts, record))
        output = model(*inputs)[0]
    traces = [_stack_trace(*each) for each in zip(stacks, texts, records, strict=True)]
    return Trace(kind, config, traces, None if kind == "encoder" else output)


def _describe(model: nn.Module) -> tuple[Kind, TransformerConfig, list[_Parts]]:
    """Return the kind of a model, its architecture and the modules of its stacks, in order of computation."""
    if isinstance(model, LanguageModel):
        decoder = model.decoder
        parts = _Parts("decoder", model.embedding, decoder.positions, [*decoder.blocks], decoder.norm)
        return "decoder", decoder.config, [parts]
    if isinstance(model, Transformer):
        encoder, decoder = model.encoder, model.decoder
        source = model.source_embedding or model.embedding
        both = [
            _Parts("encoder", source, encoder.positions, [*encoder.blocks], encoder.norm),
            _Parts("decoder", model.embedding, decoder.positions, [*decoder.blocks], decoder.norm),
        ]
        return "encoder-decoder", decoder.config, both
    if isinstance(model, MaskedLanguageModel):
        encoder = model.encoder
        parts = _Parts("encoder", model.embedding, encoder.positions, [*encoder.blocks], encoder.norm)
        return "encoder", encoder.config, [parts]
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.ModuleList) or not all(isinstance(block, EncoderBlock) for block in blocks):
        raise ArgumentError(
            f"{type(model).__name__} is not a Transformer. Only Transformers can be traced: a LanguageModel, "
            "a translator of kind transformer, or a BERT-like encoder such as minilm."
        )
    encoder_model: Any = model
    parts = _Parts("encoder", encoder_model.words, encoder_model.positions, [*blocks], None)
    return "encoder", encoder_model.config, [parts]


def can_trace(model: nn.Module) -> bool:
    """Return whether `trace_ids` supports a model.

    >>> import torch, regard
    >>> from regard.app.trace import can_trace
    >>> can_trace(regard.models.LanguageModel(11)), can_trace(torch.nn.LSTM(3, 5))
    (True, False)
    """
    try:
        _describe(model)
    except ArgumentError:
        return False
    return True


# Recording


class _Record:
    """The arguments and results of the modules of one stack, by module."""

    def __init__(self) -> None:
        self.inputs: dict[nn.Module, Tensor] = {}
        self.outputs: dict[nn.Module, Tensor] = {}
        self.attention: dict[nn.Module, tuple[dict[str, Tensor], float]] = {}


@contextmanager
def _recording(parts: _Parts, record: _Record) -> Iterator[None]:
    """Record the calls to the modules of a stack in this thread."""
    owner = get_ident()
    inside = [module for block in parts.blocks for module in block.modules()]
    hooked = {parts.embedding, parts.positions, parts.norm, *inside} - {None}
    attention = [module for module in inside if isinstance(module, Attends)]

    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if get_ident() != owner or not isinstance(output, Tensor):
            return
        if parts.name == "encoder" and module in record.outputs:
            return  # a shared embedding: keep its first call, which embeds the source
        if inputs and isinstance(inputs[0], Tensor):
            record.inputs[module] = inputs[0]
        record.outputs[module] = output

    with ExitStack() as stack:
        for module in hooked:
            assert module is not None
            stack.callback(module.register_forward_hook(hook).remove)
        for module in attention:
            vars(module)["attention"] = partial(_attend, module.attention, record, module, owner)
            stack.callback(vars(module).pop, "attention")
        yield


def _attend(
    run: Callable[..., Tensor], record: _Record, module: nn.Module, owner: int, *args: Tensor, **options: Any
) -> Tensor:
    """Run the attention of a layer, and record query, key, value, scores, mask and weights for each head."""
    if get_ident() != owner:
        return run(*args, **options)
    query, key, value = args
    output, weights = attend(query, key, value, **options)
    mask, layout = options.pop("mask", None), Layout.of(query, key, value)
    problem = prepare(query, key, value, layout, Call(**options))
    queries, keys = query.shape[-2], key.shape[-2]
    allowed = torch.ones(queries, keys, dtype=torch.bool)
    if mask is not None:
        allowed = as_mask(mask).dense(queries, keys, output.shape[:-2])[0, 0]
    tensors = {
        "query": query,
        "key": key.repeat_interleave(layout.per_group, -3),
        "value": value.repeat_interleave(layout.per_group, -3),
        "scores": layout.merge(reference.scores(problem).expand(*problem.lead(), queries, keys)),
        "weights": weights.dense(),
        "mixed": output,
    }
    record.attention[module] = (
        {name: tensor[0] for name, tensor in tensors.items()} | {"allowed": allowed},
        problem.config.scale,
    )
    return output


# The steps of a recorded stack


def _stack_trace(parts: _Parts, tokens: list[str], record: _Record) -> StackTrace:
    layers = [record.outputs[block][0] for block in parts.blocks]
    positions = record.outputs.get(parts.positions) if isinstance(parts.positions, PositionEncoding) else None
    return StackTrace(
        parts.name,
        tokens,
        record.outputs[parts.embedding][0],
        None if positions is None else positions.reshape(len(tokens), -1),
        _position_note(parts.positions, normalized=parts.norm is None),
        record.inputs[parts.blocks[0]][0],
        layers,
        layers[-1] if parts.norm is None else record.outputs[parts.norm][0],
        [list(_block_steps(block, record)) for block in parts.blocks],
    )


def _position_note(positions: nn.Module, *, normalized: bool) -> str:
    """Describe how positions enter the model."""
    added = "are added to the token vectors" + (", and the sum is normalized" if normalized else "")
    notes = {
        "LearnedPositions": f"Learned position vectors {added}.",
        "SinusoidalPositions": f"Sine and cosine waves of the position {added}.",
        "RotaryPositions": "Positions rotate the queries and keys of every head; nothing is added here.",
        "ALiBi": "Positions enter the scores: each head subtracts a multiple of the distance.",
        "T5Bias": "Positions enter the scores: each head adds a learned number per distance.",
        "PositionEncoding": "The model has no position encoding: without a mask, it ignores word order.",
    }
    return notes.get(type(positions).__name__, f"Positions: {type(positions).__name__}.")


def _block_steps(block: nn.Module, record: _Record) -> Iterator[Step]:
    """Yield the steps of a block in the order of computation."""
    assert isinstance(block, EncoderBlock | DecoderBlock)
    sublayers: list[tuple[str, Residual, nn.Module]] = [("self", block.attention_residual, block.attention)]
    if isinstance(block, DecoderBlock):
        sublayers.append(("cross", block.cross_residual, block.cross))
    sublayers.append(("feed-forward", block.feed_forward_residual, block.feed_forward))
    for name, residual, sublayer in sublayers:
        norm = residual.norm
        step = Step("norm", name, {"input": record.inputs[norm][0], "output": record.outputs[norm][0]})
        norm_steps = [] if isinstance(norm, nn.Identity) else [step]
        sublayer_step = _sublayer_step(name, sublayer, record)
        if residual.norm_first:
            output = Step("residual", name, {"output": record.outputs[residual][0]})
            yield from (*norm_steps, sublayer_step, output)
        else:
            total = Step("residual", name, {"output": record.inputs[norm][0]})
            yield from (sublayer_step, total, *norm_steps)


def _sublayer_step(name: str, sublayer: nn.Module, record: _Record) -> Step:
    output = record.outputs[sublayer][0]
    if isinstance(sublayer, FeedForward):
        return Step("feed_forward", name, {"hidden": record.inputs[sublayer.out_proj][0], "output": output})
    tensors, scale = record.attention[sublayer]
    return Step("attention", name, {**tensors, "output": output}, scale)
