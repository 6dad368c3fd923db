"""Transformers: packed, padded and single sentences agree, as do steps and teacher forcing."""

import copy
import itertools
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import regard
from regard.models import (
    Embedding,
    LanguageModel,
    MaskedLanguageModel,
    Packed,
    RecurrentConfig,
    RecurrentSeq2Seq,
    Stack,
    Transformer,
    TransformerConfig,
    mask_tokens,
    pack,
)
from regard.models.layers.positions import Positions
from tests.cases import looped
from tests.models.exact import close

pytestmark = pytest.mark.usefixtures("one_thread")

SLOW = pytest.mark.slow
WORDS = 23
CONFIG = TransformerConfig(width=12, heads=2, layers=2, ffn_dim=17, dropout=0.0, max_positions=11)
CONFIGS: dict[str, TransformerConfig] = {
    **{kind: replace(CONFIG, positions=kind) for kind in get_args(Positions)},
    "norm after": replace(CONFIG, norm_first=False, activation="gelu"),
    "rms norm": replace(CONFIG, norm="rms", activation="swiglu", linear_bias=False),
    "rms norm after": replace(CONFIG, norm="rms", norm_first=False, positions="t5"),
    "one key head": replace(CONFIG, key_heads=1, positions="rotary"),
    "sparsemax": replace(CONFIG, normalize=regard.Sparsemax(), positions="alibi"),
    "entmax15": replace(CONFIG, normalize=regard.Entmax15()),
    "sigmoid": replace(CONFIG, normalize=regard.Sigmoid(), positions="rotary"),
    "sink": replace(CONFIG, normalize=regard.Sink(2)),
}
SOURCE = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
TARGET = [[1, 5, 9, 2], [1, 14, 2], [1, 2]]


def made(kind: Any, config: TransformerConfig = CONFIG, **options: Any) -> Any:
    """Return a float64 model without zero parameters."""
    torch.manual_seed(0)
    model = kind(WORDS, config, **options).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


def padded(batch: Packed, noise: int = 0) -> tuple[Tensor, Tensor]:
    """Return a padded batch, one column longer than needed, and its lengths."""
    tokens = nn.functional.pad(batch.pad(batch.tokens, value=noise), (0, 1), value=noise)
    return tokens, batch.lengths


def rows(x: Tensor, batch: Packed) -> list[Tensor]:
    """Return the values at tokens, excluding padding."""
    return [row[:length] for row, length in zip(x, batch.lengths.tolist(), strict=True)]


# Packed, padded, alone


def seq2seq_ways(model: Transformer, source: Packed, target: Packed) -> list[list[Tensor]]:
    (s, s_lengths), (t, t_lengths) = padded(source), padded(target, noise=3)
    alone = [
        model(one[None], other[None])[0]
        for one, other in zip(source.split(source.tokens), target.split(target.tokens), strict=True)
    ]
    packed = model(source, target)
    pad = model(s, t, source_lengths=s_lengths, target_lengths=t_lengths)
    assert packed.shape == (len(target.tokens), WORDS)
    assert pad.shape == (*t.shape, WORDS)
    return [alone, list(target.split(packed)), rows(pad, target)]


def single_ways(model: LanguageModel | MaskedLanguageModel, batch: Packed) -> list[list[Tensor]]:
    tokens, lengths = padded(batch)
    alone = [model(one[None])[0] for one in batch.split(batch.tokens)]
    packed, pad = model(batch), model(tokens, lengths)
    assert packed.shape == (len(batch.tokens), WORDS)
    assert pad.shape == (*tokens.shape, WORDS)
    return [alone, list(batch.split(packed)), rows(pad, batch)]


def agree(ways: list[list[Tensor]]) -> None:
    for way in ways[1:]:
        for actual, expected in zip(way, ways[0], strict=True):
            close(actual, expected)


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", [LanguageModel, MaskedLanguageModel])
@pytest.mark.sampled(3)
def test_packed_padded_and_single_sentences_agree(kind: Any, name: str) -> None:
    agree(single_ways(made(kind, CONFIGS[name]), Packed.of(SOURCE)))


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.sampled(2)
def test_packed_padded_and_single_translations_agree(name: str) -> None:
    agree(seq2seq_ways(made(Transformer, CONFIGS[name]), Packed.of(SOURCE), Packed.of(TARGET)))


SENTENCE = st.lists(st.integers(0, WORDS - 1), min_size=1, max_size=9)


@torch.no_grad()
@given(pairs=st.lists(st.tuples(SENTENCE, SENTENCE), min_size=1, max_size=5), share=st.booleans())
@settings(max_examples=25)
def test_packed_equals_padded_for_any_sentences(
    pairs: list[tuple[list[int], list[int]]], share: bool
) -> None:
    source, target = (Packed.of(side) for side in zip(*pairs, strict=True))
    agree(seq2seq_ways(made(Transformer, CONFIGS["t5"], share=share), source, target))


@torch.no_grad()
def test_padding_content_is_irrelevant() -> None:
    model, source, target = made(Transformer), Packed.of(SOURCE), Packed.of(TARGET)
    outputs = []
    for noise in (0, 7):
        (s, s_lengths), (t, t_lengths) = padded(source, noise), padded(target, noise)
        outputs.append(rows(model(s, t, source_lengths=s_lengths, target_lengths=t_lengths), target))
    for one, other in zip(*outputs, strict=True):
        assert torch.equal(one, other)


@torch.no_grad()
@pytest.mark.parametrize("kind", [LanguageModel, MaskedLanguageModel])
def test_sentences_are_independent(kind: Any) -> None:
    model = made(kind)
    first = model(Packed.of([[5, 6, 7], [8, 9]]))
    second = model(Packed.of([[5, 6, 7], [10, 11]]))
    assert torch.equal(first[:3], second[:3])
    assert (first[3:] != second[3:]).any(-1).all()


@torch.no_grad()
def test_only_the_masked_language_model_sees_the_future() -> None:
    one, other = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[5, 6, 7, 9]])
    causal, both = made(LanguageModel), made(MaskedLanguageModel)
    assert torch.equal(causal(one)[:, :3], causal(other)[:, :3])
    assert (both(one) != both(other)).any(-1).all()


@torch.no_grad()
def test_window_mask_limits_the_receptive_field() -> None:
    model, tokens = made(LanguageModel), torch.arange(5, 13)[None]
    other = tokens.clone()
    other[0, 1] = 20
    near = regard.Window(3)  # two keys back in each of the two layers
    changed = (model(tokens, mask=near) != model(other, mask=near)).any(-1)[0]
    assert changed.tolist() == [False, True, True, True, True, True, False, False]
    packed = model(Packed.of([[3, 4], tokens[0].tolist()]), mask=near)
    close(packed[2:], model(tokens, mask=near)[0])


@torch.no_grad()
def test_target_sees_its_past_and_the_whole_source() -> None:
    model, source = made(Transformer), torch.tensor([[5, 6, 7]])
    before = model(source, torch.tensor([[1, 5, 6]]))
    assert torch.equal(model(source, torch.tensor([[1, 5, 9]]))[:, :2], before[:, :2])
    for place in range(3):
        changed = source.clone()
        changed[0, place] = 13
        assert (model(changed, torch.tensor([[1, 5, 6]])) != before).any(-1).all()


@torch.no_grad()
def test_mixed_formats_give_the_shape_of_the_target() -> None:
    model, source, target = made(Transformer), Packed.of(SOURCE), Packed.of(TARGET)
    (s, s_lengths), (t, t_lengths) = padded(source), padded(target)
    expected = model(source, target)
    close(model(s, target, source_lengths=s_lengths), expected)
    actual = model(source, t, target_lengths=t_lengths)
    assert actual.shape == (*t.shape, WORDS)
    close(torch.cat(rows(actual, target)), expected)


@looped("side", ["source", "target"])
@looped("other", ["packed", "padded"])
def test_packed_batches_reject_lengths(side: str, other: str) -> None:
    batches = {"source": Packed.of(SOURCE), "target": Packed.of(TARGET)}
    given: dict[str, Any] = {
        name: one if name == side or other == "packed" else padded(one)[0] for name, one in batches.items()
    }
    with pytest.raises(regard.ArgumentError, match="already has 3 lengths"):
        made(Transformer)(**given, **{f"{side}_lengths": torch.tensor([1, 1, 1])})


# Losses


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_is_the_cross_entropy_of_the_logits(smoothing: float) -> None:
    source, target = Packed.of(SOURCE), Packed.of(TARGET)
    entropy = nn.CrossEntropyLoss(label_smoothing=smoothing)
    model = made(Transformer)
    expected = entropy(model(source, target.inputs()), target.labels().tokens)
    close(model.loss(source, target, label_smoothing=smoothing), expected)
    (s, s_lengths), (t, t_lengths) = padded(source), padded(target)
    close(
        model.loss(s, t, source_lengths=s_lengths, target_lengths=t_lengths, label_smoothing=smoothing),
        expected,
    )
    causal = made(LanguageModel)
    expected = entropy(causal(target.inputs()), target.labels().tokens)
    close(causal.loss(target, label_smoothing=smoothing), expected)
    close(causal.loss(*padded(target), label_smoothing=smoothing), expected)


def test_masked_loss_averages_over_labels() -> None:
    model, batch = made(MaskedLanguageModel), Packed.of(SOURCE)
    labels = torch.full_like(batch.tokens, -100)
    labels[[0, 4]] = torch.tensor([3, 8])
    expected = nn.functional.cross_entropy(model(batch), labels)
    close(model.loss(batch, labels), expected)
    tokens, lengths = padded(batch)
    spread = nn.functional.pad(batch.pad(labels, value=-100), (0, 1), value=-100)
    close(model.loss(tokens, spread, lengths=lengths), expected)


def test_loss_without_labels_is_zero() -> None:
    model, batch = made(MaskedLanguageModel), Packed.of(SOURCE)
    loss = model.loss(batch, torch.full_like(batch.tokens, -100))
    loss.backward()
    assert loss == 0


# Step by step


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.sampled(3)
def test_steps_equal_teacher_forcing(name: str, layout: str) -> None:
    model, source = made(Transformer, CONFIGS[name]), Packed.of(SOURCE)
    target = torch.tensor([[1, 5, 9, 3], [1, 14, 2, 4], [1, 2, 2, 6]])
    tokens, lengths = padded(source)
    state = model.start(source) if layout == "packed" else model.start(tokens, lengths)
    steps = torch.stack([model.step(target[:, i], state) for i in range(4)], 1)
    close(steps, model(tokens, target, source_lengths=lengths))


@torch.no_grad()
def test_state_select() -> None:
    model, source, order = made(Transformer), Packed.of(SOURCE), torch.tensor([2, 2, 0])
    target = torch.tensor([[1, 5, 9], [1, 14, 2], [1, 2, 6]])
    state = model.start(source)
    model.step(target[:, 0], state)
    model.step(target[:, 1], state)
    state.select(order)
    more = torch.tensor([7, 8, 9])
    whole = torch.cat([target[order, :2], more[:, None]], 1)
    chosen = Packed.of([SOURCE[i] for i in order.tolist()])
    tokens, lengths = padded(chosen)
    close(model.step(more, state), model(tokens, whole, source_lengths=lengths)[:, -1])


@torch.no_grad()
def test_source_without_lengths_has_no_padding() -> None:
    model, source = made(Transformer), torch.tensor([[5, 6], [7, 8]])
    state = model.start(source)
    close(model.step(torch.tensor([1, 1]), state), model(source, torch.tensor([[1], [1]]))[:, 0])


def test_steps_have_gradients() -> None:
    model, source = made(Transformer), Packed.of(SOURCE)
    state = model.start(source)
    target = torch.tensor([[1, 5], [1, 14], [1, 2]])
    loss = sum(model.step(target[:, i], state).square().sum() for i in range(2))
    actual = torch.autograd.grad(loss, list(model.parameters()))
    tokens, lengths = padded(source)
    whole = model(tokens, target, source_lengths=lengths).square().sum()
    for ours, theirs in zip(actual, torch.autograd.grad(whole, list(model.parameters())), strict=True):
        close(ours, theirs)


def test_greedy_takes_the_argmax() -> None:
    model, source = made(Transformer), Packed.of(SOURCE)
    for sentence, actual in zip(SOURCE, model.greedy(source, start=1, end=2, max_new_tokens=5), strict=True):
        target = [1]
        for _ in range(5):
            token = int(model(torch.tensor([sentence]), torch.tensor([target]))[0, -1].argmax())
            if token == 2:
                break
            target.append(token)
        assert actual == target[1:]


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.sampled(2)
def test_generation_with_caches_equals_without(name: str) -> None:
    model, tokens, draw = made(LanguageModel, CONFIGS[name]), [5, 6, 0], torch.Generator().manual_seed(1)
    for _ in range(8):
        chances = torch.softmax(model(torch.tensor([tokens]))[0, -1] / 3, -1)
        tokens.append(int(torch.multinomial(chances, 1, generator=draw)))
    options: dict[str, Any] = {"max_new_tokens": 8, "temperature": 3.0, "generator": draw}
    draw.manual_seed(1)
    assert model.generate([5, 6, 0], **options) == tokens
    end = next(token for token in tokens[4:] if token != 0)
    draw.manual_seed(1)
    assert model.generate([5, 6, 0], end=end, **options) == tokens[: tokens.index(end, 3) + 1]


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("mask", [regard.Window(2), regard.Window(3) | regard.Padding(1)], ids=repr)
@pytest.mark.sampled(4)
def test_generation_with_a_mask_equals_the_full_forward_pass(name: str, mask: regard.Mask) -> None:
    model, draw = made(LanguageModel, CONFIGS[name]), torch.Generator().manual_seed(1)
    tokens = [5, 6, 0, 7]
    for _ in range(7):
        logits = model(torch.tensor([tokens]), mask=mask)[0, -1]
        chances = torch.softmax((logits - logits.max()) / 3, -1)
        tokens.append(int(torch.multinomial(chances, 1, generator=draw)))
    draw.manual_seed(1)
    assert model.generate(tokens[:4], max_new_tokens=7, mask=mask, temperature=3.0, generator=draw) == tokens
    # the same values in several calls
    whole, caches = torch.tensor([tokens]), model.decoder.caches()
    pieces = [model(piece, mask=mask, caches=caches) for piece in whole.split([4, *[1] * 7], 1)]
    close(torch.cat(pieces, 1), model(whole, mask=mask))
    assert not torch.allclose(model(whole, mask=mask), model(whole))


@looped("lengths", [None, torch.tensor([5, 3, 2])])
@looped("mask", [regard.Window(2), torch.eye(4, dtype=torch.bool)], ids=repr)
def test_loss_with_a_mask(lengths: Tensor | None, mask: Any) -> None:
    model = made(LanguageModel, CONFIGS["rotary"])
    tokens = torch.tensor([[5, 6, 7, 8, 9], [3, 4, 5, 0, 0], [9, 8, 0, 0, 0]])
    labels = tokens[:, 1:].clone()
    if lengths is not None:
        labels[torch.arange(4) >= lengths[:, None] - 1] = -100
    logits = model(tokens[:, :-1], None if lengths is None else lengths - 1, mask=mask)
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    close(model.loss(tokens, lengths, mask=mask), expected)
    assert abs(model.loss(tokens, lengths) - expected) > 1e-4
    if lengths is not None and isinstance(mask, regard.Window):
        close(model.loss(pack(tokens, lengths), mask=mask), expected)
    with pytest.raises(regard.ArgumentError, match="at least two tokens"):
        model.loss(tokens[:, :1], mask=mask)


@torch.no_grad()
def test_temperature_zero_takes_the_argmax() -> None:
    model, tokens = made(LanguageModel), [5, 6, 7]
    for parameter in model.decoder.blocks.parameters():
        parameter *= 4  # otherwise the model repeats one token
    for _ in range(8):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    assert len(set(tokens[3:])) > 1
    assert model.generate([5, 6, 7], max_new_tokens=8) == tokens


@torch.no_grad()
@pytest.mark.parametrize("chunks", [[1, 1, 1, 1], [3, 1], [2, 2]])
def test_prompt_may_be_read_in_several_calls(chunks: list[int]) -> None:
    model, tokens = made(LanguageModel, CONFIGS["rotary"]), torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    caches = model.decoder.caches()
    pieces = [model(piece, caches=caches) for piece in tokens.split(chunks, 1)]
    close(torch.cat(pieces, 1), model(tokens))


def test_caches_reject_lengths() -> None:
    model = made(LanguageModel)
    for batch in ((Packed.of(SOURCE),), padded(Packed.of(SOURCE))):
        with pytest.raises(regard.ArgumentError, match=r"equal length, but this batch is [Pp]a"):
            model(*batch, caches=model.decoder.caches())


@pytest.mark.parametrize("tokens", [torch.tensor([1, 1]), torch.tensor([[1], [1], [1]]), torch.tensor(1)])
def test_step_needs_one_token_per_row(tokens: Tensor) -> None:
    model = made(Transformer)
    with pytest.raises(regard.ShapeError, match=r"a state of 3 rows; pass one token per row, \(3,\)"):
        model.step(tokens, model.start(Packed.of(SOURCE)))


def test_step_needs_the_models_own_state() -> None:
    model, other = made(Transformer), RecurrentSeq2Seq(WORDS, RecurrentConfig(width=4))
    with pytest.raises(regard.DTypeError, match=r"a state of type RecurrentState; pass the TransformerState"):
        model.step(torch.tensor([1, 1, 1]), other.start(Packed.of(SOURCE)))
    with pytest.raises(regard.DTypeError, match="tokens of type list"):
        model.step([1, 1, 1], model.start(Packed.of(SOURCE)))


def test_prompt_may_be_a_tensor() -> None:
    model = made(LanguageModel)
    assert model.generate(torch.tensor([5, 6]), max_new_tokens=3) == model.generate([5, 6], max_new_tokens=3)


def test_sampling_with_a_temperature() -> None:
    model = made(LanguageModel)
    for parameter in model.parameters():
        parameter.data *= 3
    draws = [
        model.generate([5], max_new_tokens=4, temperature=t, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
        for t in (1e-3, 5.0)
    ]
    assert draws[0] == draws[4] == model.generate([5], max_new_tokens=4)  # near zero: the argmax
    assert draws[1] == draws[3]  # the same generator state
    assert draws[1] != draws[5]


@looped(
    ("options", "error", "message"),
    [
        ({"prompt": [], "max_new_tokens": 3}, regard.ArgumentError, "empty prompt"),
        ({"prompt": [5], "max_new_tokens": -1}, regard.ArgumentError, "max_new_tokens=-1"),
        ({"prompt": [5], "max_new_tokens": 3, "temperature": -1.0}, regard.ArgumentError, "temperature=-1"),
        ({"prompt": [5], "max_new_tokens": 3, "end": "x"}, regard.DTypeError, "end='x'"),
        (
            {"prompt": [WORDS], "max_new_tokens": 3},
            regard.ArgumentError,
            "Token 23 is out of range for a vocabulary of 23",
        ),
    ],
)
def test_invalid_generate_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        made(LanguageModel).generate(**options)


def test_generate_zero_tokens() -> None:
    assert made(LanguageModel).generate([5, 6], max_new_tokens=0) == [5, 6]


# Training


def trained(model: nn.Module, loss: Callable[[], Tensor], steps: int = 80) -> float:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
    return value.item()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name",
    ["norm after", "entmax15", pytest.param("sinusoidal", marks=SLOW), pytest.param("rms norm", marks=SLOW)],
)
def test_transformer_memorizes_a_few_sentences(name: str) -> None:
    torch.manual_seed(0)
    model = Transformer(WORDS, CONFIGS[name], share=True)
    source, target = Packed.of(SOURCE), Packed.of(TARGET)
    assert trained(model, lambda: model.loss(source, target)) < 0.1
    assert model.eval().greedy(source, start=1, end=2, max_new_tokens=9) == [one[1:-1] for one in TARGET]


def test_language_model_memorizes_a_few_sentences() -> None:
    torch.manual_seed(0)
    model, batch = LanguageModel(WORDS, CONFIGS["rotary"]), Packed.of([[1, 5, 6, 7, 2], [3, 9, 8, 2]])
    assert trained(model, lambda: model.loss(batch)) < 0.1
    assert model.eval().generate([1], max_new_tokens=9, end=2) == [1, 5, 6, 7, 2]
    assert model.generate([3], max_new_tokens=9, end=2) == [3, 9, 8, 2]


def test_masked_language_model_predicts_masked_tokens() -> None:
    torch.manual_seed(0)
    model = MaskedLanguageModel(WORDS, replace(CONFIG, norm_first=False, activation="gelu"))
    batch = Packed.of([[5, 0, 7, 8], [9, 10, 0]])
    labels = torch.tensor([-100, 6, -100, -100, -100, -100, 11])
    assert trained(model, lambda: model.loss(batch, labels)) < 0.1
    assert model.eval()(batch).argmax(-1)[[1, 6]].tolist() == [6, 11]


MODELS: dict[str, tuple[Callable[[TransformerConfig], Any], Callable[[Any], Tensor]]] = {
    "transformer": (
        lambda config: Transformer((WORDS, 29), config),
        lambda model: model.loss(Packed.of(SOURCE), Packed.of(TARGET)),
    ),
    "shared": (
        lambda config: Transformer(WORDS, config, share=True),
        lambda model: model.loss(Packed.of(SOURCE), Packed.of(TARGET)),
    ),
    "language model": (
        lambda config: LanguageModel(WORDS, config),
        lambda model: model.loss(Packed.of(SOURCE)),
    ),
    "masked language model": (
        lambda config: MaskedLanguageModel(WORDS, config),
        lambda model: model.loss(Packed.of(SOURCE), torch.arange(9)),
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.sampled(4)
def test_gradients_reach_every_parameter(kind: str, name: str) -> None:
    make, loss = MODELS[kind]
    sentences = make(CONFIGS[name])
    loss(sentences).backward()
    for parameter_name, parameter in sentences.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert bool(parameter.grad.any()), parameter_name


@pytest.mark.parametrize("name", ["learned", "t5", "rms norm", "sink"])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.sampled(3)
def test_saved_model_gives_the_same_output(kind: str, name: str, tmp_path: Path) -> None:
    make, loss = MODELS[kind]
    model, other = make(CONFIGS[name]).eval(), make(CONFIGS[name]).eval()
    save_file(model.state_dict(), tmp_path / "model.safetensors")  # rejects shared tensors
    assert not torch.equal(loss(other), loss(model))
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(loss(other), loss(model))
    assert torch.equal(loss(copy.deepcopy(model)), loss(model))


@looped("kind", MODELS)
def test_dropout_only_in_training(kind: str) -> None:
    make, loss = MODELS[kind]
    model = make(replace(CONFIG, dropout=0.3))
    assert not torch.equal(loss(model), loss(model))
    model.eval()
    assert torch.equal(loss(model), loss(model))


def test_shared_and_separate_embeddings() -> None:
    shared, apart = Transformer(WORDS, CONFIG, share=True), Transformer((WORDS, 29), CONFIG)
    assert sum("embedding" in name for name, _ in shared.named_parameters()) == 1
    assert apart.output_weight.shape == (29, 12)
    assert apart(torch.tensor([[5]]), torch.tensor([[28]])).shape == (1, 1, 29)
    with pytest.raises(regard.ArgumentError, match="vocabularies of 23 and 29 tokens and share=True"):
        Transformer((WORDS, 29), CONFIG, share=True)


def test_embeddings_and_positions_have_similar_norms() -> None:
    """Embeddings are scaled by √m, so positions, whose norm is √m, do not dominate them."""
    torch.manual_seed(0)
    embedding = Embedding(1000, 64)
    assert 0.95 < embedding(torch.arange(1000)).std().item() < 1.05
    close(embedding(torch.tensor([3])), embedding.weight[[3]] * math.sqrt(64), within=1e-6)


# Masked tokens


def test_mask_tokens_proportions() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, 1000, (200_000,), generator=generator)
    batch = Packed(tokens, torch.full((2000,), 100))
    seen, labels = mask_tokens(batch, mask_id=1, vocab_size=1000, generator=generator)
    chosen = labels != -100
    assert torch.equal(labels[chosen], tokens[chosen])
    assert torch.equal(seen.tokens[~chosen], tokens[~chosen])
    assert torch.equal(seen.lengths, batch.lengths)
    assert torch.equal(batch.tokens, tokens)

    def share(of: Tensor) -> float:
        return of.float().mean().item()

    masked, same = seen.tokens[chosen] == 1, seen.tokens[chosen] == tokens[chosen]
    assert share(chosen) == pytest.approx(0.15, abs=0.005)
    assert share(masked) == pytest.approx(0.8, abs=0.01)
    assert share(same) == pytest.approx(0.1, abs=0.01)
    anything = seen.tokens[chosen][~masked & ~same]
    assert share(anything < 500) == pytest.approx(0.5, abs=0.05)


@given(SENTENCE, st.floats(0.01, 1.0), st.integers(0, 1000))
def test_mask_tokens_selects_at_least_one_token(sentence: list[int], share: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    _, labels = mask_tokens(
        Packed.of([sentence]), mask_id=1, vocab_size=WORDS, probability=share, generator=generator
    )
    assert bool((labels != -100).any())
    assert share < 1 or bool((labels != -100).all())


def test_mask_tokens_of_an_empty_batch() -> None:
    seen, labels = mask_tokens(Packed.of([]), mask_id=1, vocab_size=WORDS)
    assert len(seen.tokens) == len(labels) == 0


@looped(
    ("options", "message"),
    [
        ({"mask_id": WORDS, "vocab_size": WORDS}, "Token 23 is out of range for a vocabulary of 23"),
        ({"mask_id": -1, "vocab_size": WORDS}, "mask_id=-1"),
        ({"mask_id": 0, "vocab_size": 0}, "vocab_size=0"),
        *(({"probability": share}, "probability=") for share in (0.0, -0.1, 1.1)),
    ],
)
def test_invalid_mask_tokens_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(regard.ArgumentError, match=message):
        mask_tokens(Packed.of(SOURCE), **{"mask_id": 1, "vocab_size": WORDS} | options)


# Other dtypes, devices and compilers


@pytest.mark.parametrize("name", CONFIGS)
def test_float32_is_close_to_float64(name: str) -> None:
    model = made(Transformer, CONFIGS[name])
    wide = model(Packed.of(SOURCE), Packed.of(TARGET))
    narrow = model.float()(Packed.of(SOURCE), Packed.of(TARGET))
    assert (wide.dtype, narrow.dtype) == (torch.float64, torch.float32)
    close(narrow.double(), wide, within=1e-4)


def meta(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.long, device="meta")


@pytest.mark.parametrize("name", ["sinusoidal", "learned", "rotary", "alibi", "t5"])
@pytest.mark.sampled(3)
def test_meta_device_shapes(name: str) -> None:
    config = replace(CONFIGS[name], layers=1)
    with torch.device("meta"):
        model = Transformer(WORDS, config)
        causal, both = LanguageModel(WORDS, config), MaskedLanguageModel(WORDS, config)
    assert all(parameter.is_meta for parameter in model.parameters())
    lengths = {"source_lengths": meta(3), "target_lengths": meta(3)}
    assert model(meta(3, 5), meta(3, 7), **lengths).shape == (3, 7, WORDS)
    assert model(meta(3, 5), meta(3, 7)).is_meta
    source, target = Packed(meta(11), meta(3)), Packed(meta(13), meta(3))
    assert model(source, target).shape == (13, WORDS)
    assert model.loss(source, target).shape == ()
    for one in (causal, both):
        assert one(meta(3, 5), meta(3)).shape == (3, 5, WORDS)
        assert one(source).shape == (11, WORDS)
    assert causal.loss(source).is_meta


def gradients(loss: Tensor, model: nn.Module) -> list[Tensor]:
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


def compiled_equals_eager(model: Any, call: Callable[..., Tensor], *inputs: Any, backend: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(call, backend=backend, fullgraph=True)
    for actual, expected in zip(
        gradients(compiled(*inputs), model), gradients(call(*inputs), model), strict=True
    ):
        close(actual, expected, within=1e-8)


def padded_loss(model: Any) -> Callable[..., Tensor]:
    return lambda s, t, sl, tl: model(s, t, source_lengths=sl, target_lengths=tl).square().mean()


def test_compiled_models_give_the_same_output() -> None:
    """Covers packed and padded batches."""
    model = made(Transformer, replace(CONFIG, layers=1, positions="rotary"))
    compiled_equals_eager(model, model.loss, Packed.of(SOURCE), Packed.of(TARGET), backend="eager")
    causal = made(LanguageModel, replace(CONFIG, layers=1))
    compiled_equals_eager(
        causal,
        lambda tokens, lengths: causal(tokens, lengths).square().mean(),
        *padded(Packed.of(SOURCE)),
        backend="eager",
    )


@SLOW
@pytest.mark.parametrize(
    ("name", "layout"), list(zip(CONFIGS, itertools.cycle(["packed", "padded"]), strict=False))
)
def test_compiled_models_of_all_configs(name: str, layout: str) -> None:
    model, source, target = made(Transformer, CONFIGS[name]), Packed.of(SOURCE), Packed.of(TARGET)
    (s, s_lengths), (t, t_lengths) = padded(source), padded(target)
    if layout == "packed":
        compiled_equals_eager(model, model.loss, source, target, backend="aot_eager")
    else:
        call = padded_loss(model)
        compiled_equals_eager(model, call, s, t, s_lengths, t_lengths, backend="aot_eager")


@SLOW
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # inductor's own
@pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "c++")) is None, reason="inductor needs a C++ compiler"
)
def test_default_compile() -> None:
    model = made(Transformer, replace(CONFIG, layers=1))
    source, target = Packed.of(SOURCE), Packed.of(TARGET)
    (s, s_lengths), (t, t_lengths) = padded(source), padded(target)
    call = padded_loss(model)
    compiled_equals_eager(model, call, s, t, s_lengths, t_lengths, backend="inductor")


# Unusual and invalid batches


@torch.no_grad()
def test_empty_batch() -> None:
    model, causal, none = made(Transformer), made(LanguageModel), Packed.of([])
    assert model(none, none).shape == (0, WORDS)
    assert causal(none).shape == (0, WORDS)
    empty = torch.zeros(0, 3, dtype=torch.long)
    assert model(empty, empty).shape == (0, 3, WORDS)
    assert causal(empty.T).shape == (3, 0, WORDS)
    assert model.greedy(none, start=1, end=2, max_new_tokens=3) == []


@torch.no_grad()
def test_empty_sentence_does_not_affect_the_others() -> None:
    model = made(Transformer)
    actual = model(Packed.of([[], [5, 6]]), Packed.of([[1, 7], [1, 8]]))
    assert bool(torch.isfinite(actual).all())
    close(actual[2:], model(Packed.of([[5, 6]]), Packed.of([[1, 8]])))
    causal = made(LanguageModel)
    close(causal(Packed.of([[5, 6], [], [7]])), causal(Packed.of([[5, 6], [7]])))


def test_int32_tokens() -> None:
    model, tokens = made(LanguageModel), torch.tensor([[5, 6, 7]])
    assert torch.equal(model(tokens.int()), model(tokens))


@looped(
    ("call", "error", "message"),
    [
        (
            lambda m: m(torch.tensor([[5, 23]])),
            regard.ArgumentError,
            "Token 23 is out of range for a vocabulary of 23",
        ),
        (lambda m: m(torch.tensor([[5, -1]])), regard.ArgumentError, "Token -1 is out of range"),
        (lambda m: m(Packed.of([[5], [40]])), regard.ArgumentError, "Token 40 is out of range"),
        (lambda m: m(torch.tensor([5, 6])), regard.ShapeError, r"shape \(2,\)"),
        (lambda m: m(torch.zeros(1, 2, 3).long()), regard.ShapeError, r"shape \(1, 2, 3\)"),
        (lambda m: m([[5, 6]]), regard.DTypeError, "tokens are a list"),
        (lambda m: m(torch.ones(1, 2)), regard.DTypeError, "tokens have dtype torch.float32"),
        (lambda m: m(torch.ones(1, 2).bool()), regard.DTypeError, "tokens have dtype torch.bool"),
        (
            lambda m: m(Packed.of([[5], [6]]), torch.tensor([1, 1])),
            regard.ArgumentError,
            "Packed, which already has 2 lengths",
        ),
        (
            lambda m: m(torch.tensor([[5, 6]]), torch.tensor([3])),
            regard.ShapeError,
            "length is 3, but the rows have 2 tokens",
        ),
        (
            lambda m: m(torch.tensor([[5, 6]]), torch.tensor([1, 1])),
            regard.ShapeError,
            r"\(1, 2\) and lengths \(2,\)",
        ),
        (lambda m: m(torch.tensor([[5, 6]]), [2]), regard.DTypeError, "lengths of type list"),
    ],
)
@looped("kind", [LanguageModel, MaskedLanguageModel])
def test_invalid_batches(kind: Any, call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(made(kind))


@looped(
    ("source", "target", "error", "message"),
    [
        ([[5], [6]], [[1]], regard.ShapeError, "source has 2 sentences and target has 1"),
        ([[5, 23]], [[1]], regard.ArgumentError, "Token 23 is out of range"),
        ([[5]], [[1, 23]], regard.ArgumentError, "Token 23 is out of range"),
    ],
)
@looped("layout", ["packed", "padded"])
def test_invalid_pairs(layout: str, source: Any, target: Any, error: type[Exception], message: str) -> None:
    batches = [Packed.of(source), Packed.of(target)]
    with pytest.raises(error, match=message):
        made(Transformer)(*(batches if layout == "packed" else [one.pad(one.tokens) for one in batches]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: made(LanguageModel).loss(Packed.of([[5, 6], []])), "Sentence 1 has no tokens"),
        (lambda: made(Transformer).loss(Packed.of([[5], [6]]), Packed.of([[1, 2], []])), "(?i)sentence 1 "),
    ],
)
def test_empty_target_is_rejected(call: Any, message: str) -> None:
    with pytest.raises(regard.ArgumentError, match=message):
        call()


@pytest.mark.parametrize("shape", [(), (3,), (1, 2, 3)])
def test_pairs_of_invalid_shapes(shape: tuple[int, ...]) -> None:
    wrong, right = torch.zeros(shape, dtype=torch.long), torch.tensor([[5, 6]])
    for pair in ((wrong, right), (right, wrong), (wrong, wrong)):
        with pytest.raises(regard.ShapeError, match=r"has shape .*; pass a padded batch \(b, l\)"):
            made(Transformer)(*pair)


def test_packed_language_model_batch_rejects_lengths() -> None:
    with pytest.raises(regard.ArgumentError, match="already has 3 lengths"):
        made(LanguageModel).loss(Packed.of(SOURCE), torch.tensor([1, 1, 1]))


def test_vocab_size_must_be_one_or_two_numbers() -> None:
    with pytest.raises(regard.ArgumentError, match=r"got vocab_size=\(.*\); pass one size"):
        Transformer((5, 6, 7), CONFIG)  # type: ignore[arg-type]


def test_mask_tokens_needs_packed() -> None:
    with pytest.raises(regard.DTypeError, match=r"mask_tokens got a Tensor; .* pack\(tokens, lengths\)"):
        mask_tokens(torch.tensor([[5, 6]]), mask_id=1, vocab_size=WORDS)  # type: ignore[arg-type]
    with pytest.raises(regard.DTypeError, match="tokens are a list"):
        made(MaskedLanguageModel).loss([[5, 6]], torch.tensor([[5, 6]]))


def test_labels_need_the_shape_of_the_tokens() -> None:
    with pytest.raises(regard.ShapeError, match=r"shape \(9,\) and labels \(8,\)"):
        made(MaskedLanguageModel).loss(Packed.of(SOURCE), torch.arange(8))


def test_generation_beyond_learned_positions_is_rejected() -> None:
    model = made(LanguageModel, CONFIGS["learned"])
    assert len(model.generate([5], max_new_tokens=11)) == 12
    with pytest.raises(regard.ArgumentError, match="Position 11 is out of range: LearnedPositions has 11"):
        model.generate([5], max_new_tokens=12)


@looped("words", [0, -3])
@looped("kind", [Transformer, LanguageModel, MaskedLanguageModel])
def test_invalid_vocab_sizes(kind: Any, words: int) -> None:
    with pytest.raises(regard.ArgumentError, match="vocab_size"):
        kind(words, CONFIG)


@looped("config", CONFIGS.values(), ids=CONFIGS)
def test_stack_continues_after_its_caches(config: TransformerConfig) -> None:
    torch.manual_seed(0)
    stack, x = Stack(config, causal=True).double().eval(), torch.randn(3, 7, 12, dtype=torch.float64)
    caches = stack.caches()
    with torch.no_grad():
        close(torch.cat([stack(part, caches=caches) for part in x.split((2, 1, 4), 1)], 1), stack(x))


def test_stack_has_its_config() -> None:
    assert Stack(CONFIG).config is CONFIG


@pytest.mark.parametrize("lengths", [None, torch.tensor([4, 2])])
def test_language_model_losses_on_the_meta_device(lengths: Tensor | None) -> None:
    tokens = torch.zeros(2, 4, dtype=torch.long, device="meta")
    lengths = None if lengths is None else lengths.to("meta")
    with torch.device("meta"):
        language, masked = LanguageModel(WORDS, CONFIG), MaskedLanguageModel(WORDS, CONFIG)
    assert language.loss(tokens, lengths).shape == ()
    assert masked.loss(tokens, tokens, lengths=lengths).shape == ()


@pytest.mark.parametrize("model", [Transformer, LanguageModel, MaskedLanguageModel])
def test_config_of_another_type_is_rejected(model: Any) -> None:
    with pytest.raises(regard.DTypeError, match=f"{model.__name__} got a config of type dict"):
        model(WORDS, {"width": 16})
