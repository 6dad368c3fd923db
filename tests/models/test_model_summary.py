"""summary compared with torch's FLOP counter."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard.mechanism import dispatch
from regard.models import (
    DecoderBlock,
    EncoderBlock,
    LanguageModel,
    MaskedLanguageModel,
    MultiHeadAttention,
    Transformer,
    TransformerConfig,
    summary,
)
from regard.models.layers.nonlocal_block import NonLocal
from regard.models.recurrent import RecurrentConfig, RecurrentSeq2Seq

WIDTH, LENGTH, BATCH = 24, 7, 2
CONFIG = TransformerConfig(width=WIDTH, heads=4, layers=2, ffn_dim=40, dropout=0.0)


@pytest.fixture(autouse=True)
def dense(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use the reference implementation, whose matrix products torch counts."""
    monkeypatch.setattr(dispatch, "FROM_ENVIRONMENT", "reference")
    with torch.no_grad():
        yield


def counted(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(50, (BATCH, length))


def vectors(length: int = LENGTH) -> Tensor:
    return torch.randn(BATCH, length, WIDTH)


@pytest.mark.parametrize(
    "make",
    [
        lambda: MultiHeadAttention(WIDTH, 4),
        lambda: MultiHeadAttention(WIDTH, 4, linear_bias=False),
        lambda: MultiHeadAttention(WIDTH, 4, key_heads=2, head_width=(5, 7)),
        lambda: MultiHeadAttention(WIDTH, 4, score=regard.General(6, 6)),
        lambda: MultiHeadAttention(WIDTH, 4, normalize=regard.Entmax15()),
        lambda: EncoderBlock(CONFIG),
        lambda: EncoderBlock(
            TransformerConfig(width=WIDTH, heads=4, activation="swiglu", norm="rms", dropout=0.0)
        ),
        lambda: nn.Sequential(EncoderBlock(CONFIG), nn.Linear(WIDTH, 5)),
        lambda: nn.Sequential(*[EncoderBlock(CONFIG)] * 3),
        lambda: nn.Linear(WIDTH, 5),
    ],
)
def test_cost_per_token(make: Callable[[], nn.Module]) -> None:
    model, x = make(), vectors()
    assert summary(model, length=LENGTH).cost == (counted(lambda: model(x)) / (BATCH * LENGTH),)


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_cost_of_recurrent_layers(cell: Any, bidirectional: bool) -> None:
    model = cell(WIDTH, 10, num_layers=3, bidirectional=bidirectional, batch_first=True)
    model = model.double()  # torch does not count the fused float32 operation
    assert summary(model).cost == (counted(lambda: model(vectors().double())) / (BATCH * LENGTH),)
    assert summary(model).layers == (3,)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary", "alibi", "t5", "none"])
@pytest.mark.parametrize("model", [LanguageModel, MaskedLanguageModel])
def test_cost_includes_the_vocabulary_projection(model: Any, positions: Any) -> None:
    made = model(50, TransformerConfig(width=WIDTH, heads=4, layers=2, positions=positions, dropout=0.0))
    assert summary(made, length=LENGTH).cost == (counted(lambda: made(tokens())) / (BATCH * LENGTH),)


@pytest.mark.parametrize("share", [False, True])
def test_cost_per_source_and_target_token(share: bool) -> None:
    model = Transformer(50, CONFIG, share=share)
    source, target = summary(model, length=LENGTH).cost
    total = counted(lambda: model(tokens(), tokens()))
    assert BATCH * LENGTH * (source + target) == total
    # decoder cost per target token, measured step by step; step k attends to k + 1 cached tokens
    state = model.start(tokens())
    for _ in range(LENGTH - 1):
        model.step(tokens()[:, 0], state)
    assert counted(lambda: model.step(tokens()[:, 0], state)) == BATCH * target
    assert counted(lambda: model.start(tokens())) == BATCH * LENGTH * source


def test_cost_of_torchs_transformer() -> None:
    theirs = nn.Transformer(WIDTH, 4, 2, 2, 40, dropout=0.0, batch_first=True)
    actual = summary(theirs, length=LENGTH)
    ours = summary(Transformer(50, CONFIG), length=LENGTH)
    assert actual.layers == ours.layers == (2, 2)
    assert actual.heads == ours.heads == ((4, 4),)
    assert actual.cost == (ours.cost[0], ours.cost[1] - 2 * 50 * WIDTH)


def test_cost_of_torchs_attention() -> None:
    ours = MultiHeadAttention(WIDTH, 4)
    assert summary(ours.to_torch(), length=5).cost == summary(ours, length=5).cost
    wide = MultiHeadAttention(WIDTH, 4, source_width=(5, 11))
    assert summary(wide.to_torch(), length=5).cost == summary(wide, length=5).cost


def test_decoder_block_costs_both_attentions() -> None:
    block, x = DecoderBlock(CONFIG), vectors()
    total = counted(lambda: block(x, vectors(), mask=regard.Causal()))
    assert summary(block, length=LENGTH).cost == (total / (BATCH * LENGTH),)
    assert summary(block).layers == (1,)


@pytest.mark.parametrize("attention", ["none", "additive", "dot", "general", "concat"])
def test_recurrent_cost_per_source_and_target_token(attention: Any) -> None:
    model = RecurrentSeq2Seq(50, RecurrentConfig(width=WIDTH, layers=2, attention=attention, dropout=0.0))
    actual = summary(model, length=LENGTH)
    model = model.double()
    total = counted(lambda: model(tokens(), tokens()))
    if attention in ("additive", "concat"):
        total += BATCH * LENGTH * 2 * WIDTH * LENGTH  # the product with v, not a matrix product
    if attention == "additive":  # the initial state is computed once per sentence but counted per token
        total += 2 * (WIDTH // 2) * (2 * WIDTH) * BATCH * (LENGTH - 1)
    assert BATCH * LENGTH * sum(actual.cost) == total
    assert actual.layers == (2, 2)
    assert actual.heads == (() if attention == "none" else ((1, 1),))


def test_recurrent_source_token_costs_its_keys() -> None:
    config = RecurrentConfig(width=WIDTH, attention="concat", dropout=0.0)
    model = RecurrentSeq2Seq(50, config).double()
    source, _ = summary(model, length=LENGTH).cost
    assert counted(lambda: model.start(tokens())) == BATCH * LENGTH * source


@pytest.mark.parametrize("kind", ["gaussian", "embedded", "dot"])
def test_cost_of_nonlocal_blocks(kind: Any) -> None:
    block = NonLocal(6, kind)
    total = counted(lambda: block(torch.randn(BATCH, 6, 3, 5)))
    assert summary(block, length=15).cost == (total / (BATCH * 15),)


@pytest.mark.parametrize("score", [regard.Additive(6, 6, width=5), regard.Concat(6, 6, width=3)])
def test_cost_of_additive_scores(score: Any) -> None:
    layer = MultiHeadAttention(WIDTH, 4, score=score)
    total = counted(lambda: layer(vectors())) / (BATCH * LENGTH)
    with_v = 2 * 4 * len(score.vector) * LENGTH  # not a matrix product
    assert summary(layer, length=LENGTH).cost == (total + with_v,)


def test_cost_of_cells_and_convolutions() -> None:
    cell, x = nn.GRUCell(WIDTH, 10), torch.randn(BATCH, WIDTH)
    assert summary(cell).cost == (counted(lambda: cell(x)) / BATCH,)
    assert summary(cell).layers == (1,)
    convolution = nn.Conv1d(WIDTH, 10, 3, padding=1)
    total = counted(lambda: convolution(vectors().mT.contiguous()))
    assert summary(convolution).cost == (total / (BATCH * LENGTH),)


def test_embedding_lookup_is_free() -> None:
    assert summary(nn.Embedding(50, WIDTH)).cost == (0,)
    with_positions = TransformerConfig(
        width=WIDTH, heads=4, layers=2, ffn_dim=40, dropout=0.0, positions="learned"
    )
    assert summary(LanguageModel(50, with_positions)).cost == summary(LanguageModel(50, CONFIG)).cost


def test_shared_parameters_are_counted_once_and_cost_each_use() -> None:
    one = nn.Linear(WIDTH, WIDTH)
    once, twice = summary(nn.Sequential(one)), summary(nn.Sequential(one, one))
    assert twice.parameters == once.parameters == WIDTH * WIDTH + WIDTH
    assert twice.bytes == 4 * twice.parameters
    assert twice.cost == (2 * once.cost[0],)


class Tied(nn.Module):
    """A Linear whose weight is tied to an embedding and named output_weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out_proj = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50, bias=False)
        self.out_proj.weight = self.embedding.weight

    @property
    def output_weight(self) -> Tensor:
        return self.out_proj.weight


def test_vocabulary_matrix_costs_once() -> None:
    assert summary(Tied()).cost == (2 * 50 * WIDTH,)
    assert summary(Tied()).parameters == 50 * WIDTH
    inside = nn.Sequential(LanguageModel(50, CONFIG))
    assert summary(inside).cost == summary(inside[0]).cost


def test_longer_sentences_cost_more() -> None:
    layer = MultiHeadAttention(WIDTH, 4)
    short, long = (summary(layer, length=length).cost[0] for length in (10, 11))
    assert long - short == 4 * WIDTH


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (
            nn.Linear(24, 5, bias=False),
            "Linear: 120 parameters (0.5 kB), 240 FLOP per token",
        ),
        (
            nn.Linear(1000, 1000, bias=False, dtype=torch.bfloat16),
            "Linear: 1.0 M parameters (2.0 MB), 2.0 MFLOP per token",
        ),
        (
            MultiHeadAttention(24, 1, linear_bias=False),
            "MultiHeadAttention: 2.3 k parameters (9.2 kB), 1 layer, 1 head, 16.9 kFLOP per token "
            "at 128 tokens",
        ),
        (
            nn.Sequential(MultiHeadAttention(24, 4, key_heads=2), MultiHeadAttention(24, 8, key_heads=4)),
            "Sequential: 3.6 k parameters (14.4 kB), 2 layers, 4-8 heads over 2-4, 31.5 kFLOP per token "
            "at 128 tokens",
        ),
        (
            Transformer(50, CONFIG),
            "Transformer: 26.5 k parameters (106.0 kB), 2 + 2 layers, 4 heads, "
            "46.1 kFLOP per source token and 73.1 kFLOP per target token at 128 tokens",
        ),
        (nn.LSTM(24, 10), "LSTM: 1.4 k parameters (5.8 kB), 1 layer, 2.7 kFLOP per token"),
        (nn.ReLU(), "ReLU: 0 parameters (0.0 kB), 0 FLOP per token"),
    ],
)
def test_summary_line(model: nn.Module, line: str) -> None:
    assert str(summary(model)) == repr(summary(model)) == line


def test_meta_device() -> None:
    with torch.device("meta"):
        model = Transformer(50_000, TransformerConfig(width=1024, heads=16, layers=100))
    assert summary(model).layers == (100, 100)
    assert summary(model).parameters > 10**9


def test_invalid_summary_arguments() -> None:
    with pytest.raises(regard.DTypeError, match=r"summary got \[1\]; pass a torch.nn.Module"):
        summary([1])  # type: ignore[arg-type]
    with pytest.raises(regard.ArgumentError, match="length=0; it must be at least 1"):
        summary(nn.ReLU(), length=0)
    with pytest.raises(regard.ArgumentError, match="LazyLinear whose weight is uninitialized"):
        summary(nn.LazyLinear(5))


def test_compiled_model_gives_the_same_output():
    model = Transformer(31, CONFIG)
    plain = summary(model)
    assert plain.layers == (2, 2)
    assert summary(torch.compile(model, backend="eager")) == plain
    model.encoder = torch.compile(model.encoder, backend="eager")
    for block in model.decoder.blocks:
        block.cross = torch.compile(block.cross, backend="eager")
    assert summary(model) == plain
    assert summary(torch.compile(model, backend="eager")) == plain  # submodules and model
