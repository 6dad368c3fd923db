"""The trace of a model equals its forward pass: each step follows from its inputs and the parameters."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import regard
from regard.app import trace_text as trace_text_module
from regard.app.trace import StackTrace, Step, Trace, can_trace, trace_ids
from regard.app.trace_text import check_length, trace_text
from regard.errors import ArgumentError
from regard.models import (
    BertEncoder,
    LanguageModel,
    MaskedLanguageModel,
    RecurrentSeq2Seq,
    Transformer,
    TransformerConfig,
    Vocabulary,
)
from regard.translation import Tokenizer, TokenizerPair, Translator
from tests.browser.visit import needs_encoder
from tests.cases import rotated

SOURCE, TARGET = [5, 6, 7, 8, 2], [1, 9, 10]
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
CONFIGS = {
    "pre": {},
    "post": {"norm_first": False, "activation": "gelu"},
    "rotary": {"positions": "rotary", "norm": "rms", "activation": "swiglu", "linear_bias": False},
    "grouped": {"key_heads": 1, "positions": "alibi"},
    "t5": {"positions": "t5", "norm": "none"},
    "learned": {"positions": "learned", "max_positions": 13},
}


def config(name: str) -> TransformerConfig:
    return TransformerConfig(width=12, heads=2, layers=3, ffn_dim=11, **CONFIGS[name])


def make(kind: str, name: str) -> nn.Module:
    """Return a model with random parameters, including the norms, so that every parameter matters."""
    torch.manual_seed(1)
    model: nn.Module = {
        "decoder": lambda: LanguageModel(17, config(name)),
        "encoder": lambda: MaskedLanguageModel(17, config(name)),
        "encoder-decoder": lambda: Transformer(17, config(name), share=True),
    }[kind]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    return model.eval()


def inputs(kind: str) -> tuple[list[int], list[int] | None]:
    return SOURCE, TARGET if kind == "encoder-decoder" else None


def traced(model: nn.Module, kind: str) -> Trace:
    return trace_ids(model, *inputs(kind))


def run(model: nn.Module, kind: str) -> Tensor:
    return model(*(torch.tensor([ids]) for ids in inputs(kind) if ids is not None))[0]


KINDS = ("decoder", "encoder", "encoder-decoder")
every = rotated(kind=KINDS, name=CONFIGS)


@every
def test_logits_are_the_outputs_of_the_model(kind: str, name: str) -> None:
    model = make(kind, name)
    trace = traced(model, kind)
    assert trace.kind == kind
    if kind == "encoder":
        assert isinstance(model, MaskedLanguageModel)
        torch.testing.assert_close(
            trace.stacks[0].final, model.states(torch.tensor([SOURCE]))[-1][0], **CLOSE
        )
        assert trace.logits is None
    else:
        assert trace.logits is not None
        torch.testing.assert_close(trace.logits, run(model, kind), **CLOSE)
        logits = F.linear(trace.stacks[-1].final, model.output_weight)
        torch.testing.assert_close(trace.logits, logits, **CLOSE)


@every
def test_weights_are_those_that_watch_records(kind: str, name: str) -> None:
    model = make(kind, name)
    with torch.no_grad(), regard.watch(model) as seen:
        run(model, kind)
    for stack in traced(model, kind).stacks:
        for number, steps in enumerate(stack.steps):
            for step in steps:
                if step.kind == "attention":
                    part = "cross" if step.name == "cross" else "attention"
                    expected = seen[f"{stack.name}.blocks.{number}.{part}"].dense()[0]
                    torch.testing.assert_close(step.tensors["weights"], expected, **CLOSE)


@every
def test_each_step_follows_from_the_one_before(kind: str, name: str) -> None:
    model = make(kind, name)
    trace = traced(model, kind)
    for stack in trace.stacks:
        check_embedding(model, stack)
        memory = trace.stacks[0].final
        module = getattr(model, stack.name)
        x = stack.embedding
        for block, steps, output in zip(module.blocks, stack.steps, stack.layers, strict=True):
            for step, result in zip(steps, recomputed(block, x, memory, steps), strict=True):
                torch.testing.assert_close(step.tensors["output"], result, **CLOSE, msg=f"{step.kind}")
            x = output
            torch.testing.assert_close(steps[-1].tensors["output"], output, **CLOSE)
        torch.testing.assert_close(stack.final, module.norm(x), **CLOSE)


def check_embedding(model: nn.Module, stack: StackTrace) -> None:
    ids = torch.tensor(TARGET if len(stack.tokens) == len(TARGET) else SOURCE)
    rows = model.embedding.weight[ids] * math.sqrt(model.embedding.embedding_dim)
    torch.testing.assert_close(stack.token_embedding, rows, **CLOSE)
    total = rows if stack.position_embedding is None else rows + stack.position_embedding
    torch.testing.assert_close(stack.embedding, total, **CLOSE)


def recomputed(block: nn.Module, x: Tensor, memory: Tensor, steps: list[Step]) -> Iterator[Tensor]:
    """Compute the output of each step from the outputs before it, in plain torch."""
    modules = {
        "self": (block.attention, block.attention_residual),
        "cross": (getattr(block, "cross", None), getattr(block, "cross_residual", None)),
        "feed-forward": (block.feed_forward, block.feed_forward_residual),
    }
    y = x
    for step in steps:
        sublayer, residual = modules[step.name]
        if step.kind == "norm":
            torch.testing.assert_close(step.tensors["input"], y, **CLOSE)
            y = residual.norm(y)
            if not residual.norm_first:
                x = y
        elif step.kind == "residual":
            x = y = x + y
        elif step.kind == "feed_forward":
            y = F.linear(step.tensors["hidden"], sublayer.out_proj.weight, sublayer.out_proj.bias)
            torch.testing.assert_close(step.tensors["hidden"], hidden(sublayer, steps, step, x), **CLOSE)
        else:
            check_projections(sublayer, step, y, memory)
            y = attention_output(sublayer, step)
        yield y


def hidden(module: nn.Module, steps: list[Step], step: Step, x: Tensor) -> Tensor:
    before = steps[steps.index(step) - 1]
    h = module.in_proj(before.tensors["output"] if before.kind == "norm" else x)
    if module.activation == "swiglu":
        gate, h = h.chunk(2, -1)
        return F.silu(gate) * h
    return F.gelu(h) if module.activation == "gelu" else F.relu(h)


def check_projections(module: nn.Module, step: Step, y: Tensor, memory: Tensor) -> None:
    """Check the values, which are never rotated: they show whether the right projection was recorded."""
    source = memory if step.name == "cross" else y
    value = F.linear(source, *module.projection(2)).unflatten(-1, (module.key_heads, -1)).transpose(0, 1)
    value = value.repeat_interleave(module.heads // module.key_heads, 0)
    torch.testing.assert_close(step.tensors["value"], value, **CLOSE)
    query = F.linear(y, *module.projection(0)).unflatten(-1, (module.heads, -1)).transpose(0, 1)
    norms = [x.norm(dim=-1) for x in (step.tensors["query"], query)]  # a rotation preserves the norm
    torch.testing.assert_close(*norms, **CLOSE)


def attention_output(module: nn.Module, step: Step) -> Tensor:
    tensors = step.tensors
    plain = step.scale * tensors["query"] @ tensors["key"].mT
    if step.name == "cross":  # relative positions are biases of self-attention only
        torch.testing.assert_close(tensors["scores"], plain, **CLOSE)
    assert step.scale == pytest.approx(tensors["query"].shape[-1] ** -0.5)
    weights = tensors["scores"].masked_fill(~tensors["allowed"], -math.inf).softmax(-1)
    torch.testing.assert_close(tensors["weights"], weights, **CLOSE)
    torch.testing.assert_close(tensors["mixed"], weights @ tensors["value"], **CLOSE)
    return module.out_proj(tensors["mixed"].transpose(0, 1).flatten(1))


def test_scores_contain_the_bias_and_no_mask() -> None:
    model = make("decoder", "grouped")
    step = traced(model, "decoder").stacks[0].steps[0][1]
    plain = step.scale * step.tensors["query"] @ step.tensors["key"].mT
    bias = regard.ALiBi(2).dense(len(SOURCE), len(SOURCE))
    torch.testing.assert_close(step.tensors["scores"], plain + bias, **CLOSE)
    assert torch.equal(step.tensors["allowed"], torch.ones(5, 5).tril().bool())
    assert step.tensors["scores"].isfinite().all()


def test_a_changed_parameter_changes_the_trace() -> None:
    """This proves that the comparisons above can fail."""
    model = make("decoder", "pre")
    before = traced(model, "decoder").stacks[0].steps[1][1].tensors["output"]
    with torch.no_grad():
        model.decoder.blocks[1].attention.out_proj.weight[0, 0] += 0.1
    after = traced(model, "decoder").stacks[0].steps[1][1].tensors["output"]
    assert not torch.allclose(before, after, **CLOSE)


def test_tracing_leaves_the_model_as_it_was() -> None:
    model = make("encoder-decoder", "pre").train()
    names = {name: set(vars(module)) for name, module in model.named_modules()}
    traced(model, "encoder-decoder")
    assert {name: set(vars(module)) for name, module in model.named_modules()} == names
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())


@needs_encoder
def test_minilm() -> None:
    encoder = regard.load_encoder("minilm")
    (stack,) = trace_text(encoder, "Dogs bark at strangers.").trace.stacks
    states = encoder.states(encoder.ids("Dogs bark at strangers."))
    torch.testing.assert_close(stack.embedding, states[0][0], **CLOSE)
    torch.testing.assert_close(torch.stack(stack.layers), torch.cat(states[1:]), **CLOSE)
    with torch.no_grad(), regard.watch(encoder) as seen:
        encoder(encoder.ids("Dogs bark at strangers."))
    for number, steps in enumerate(stack.steps):
        expected = seen[f"blocks.{number}.attention"].dense()[0]
        torch.testing.assert_close(steps[0].tensors["weights"], expected, **CLOSE)
        for step, result in zip(
            steps,
            recomputed(encoder.blocks[number], ([stack.embedding, *stack.layers])[number], None, steps),
            strict=True,
        ):
            torch.testing.assert_close(step.tensors["output"], result, **CLOSE)
    assert stack.tokens[0] == "[CLS]"
    assert "normalized" in stack.position_note


def translator(kind: type = Transformer) -> Translator:
    tokens = Tokenizer.learn(["ein Hund bellt", "a dog barks"] * 10, kind="words")
    torch.manual_seed(0)
    if kind is Transformer:
        model = Transformer(len(tokens), TransformerConfig(width=16, heads=2, layers=1), share=True)
    else:
        model = RecurrentSeq2Seq(len(tokens))
    return Translator(model.eval(), TokenizerPair(tokens, tokens))


def test_a_translation_is_traced_with_its_own_or_a_given_target() -> None:
    model = translator()
    traced = trace_text(model, "ein Hund")
    encoder, decoder = traced.trace.stacks
    assert encoder.tokens == ["▁ein", "▁Hund", "</s>"]
    assert decoder.tokens == ["<s>", *model.translate("ein Hund")[0].tokens]
    given = trace_text(model, "ein Hund", "a dog")
    assert given.trace.stacks[1].tokens == ["<s>", "▁a", "▁dog"]
    (barks,) = model.tokens.target.encode("barks")
    assert given.append(barks) == "a dog barks"
    assert given.token(barks) == "▁barks"
    assert given.token(2) == "</s>"
    assert trace_text(model, "ein Hund", "").trace.stacks[1].tokens == ["<s>"]


def test_bert_encoder() -> None:
    encoder = BertEncoder(
        Vocabulary(["dogs", "bark"], special_tokens=BertEncoder.special_tokens), 8, heads=2, max_positions=5
    ).eval()
    traced = trace_text(encoder, "Dogs bark")
    assert traced.trace.stacks[0].tokens == ["<s>", "dogs", "bark", "</s>"]
    with pytest.raises(ArgumentError, match="does not predict the next token"):
        traced.append(1)
    with pytest.raises(ArgumentError, match="has 6 tokens; this model reads at most 5"):
        trace_text(encoder, "dogs bark dogs bark")


def test_errors_name_the_cause() -> None:
    with pytest.raises(ArgumentError, match=r"Only Transformers can be traced.*RecurrentSeq2Seq"):
        trace_text(translator(RecurrentSeq2Seq), "ein Hund")
    with pytest.raises(ArgumentError, match="LSTM is not a Transformer"):
        trace_ids(nn.LSTM(3, 5), [1])
    assert not can_trace(nn.LSTM(3, 5))
    with pytest.raises(ArgumentError, match="has 66 tokens; a trace covers at most 64"):
        trace_text(translator(), " ".join(["Hund"] * 65))
    with pytest.raises(ArgumentError, match="only a translator reads a target"):
        trace_text(
            BertEncoder(Vocabulary(["a"], special_tokens=BertEncoder.special_tokens), 8, heads=2), "a", "b"
        )
    with pytest.raises(ArgumentError, match="no tokens"):
        trace_text(translator(), " ")
    check_length("The text", range(trace_text_module.MAX_TOKENS))
