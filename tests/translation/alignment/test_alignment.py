import copy
import json
import pickle
import random
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard.errors import ArgumentError, ShapeError
from regard.models import Transformer, TransformerConfig
from regard.models.layers.attention import Attends
from regard.models.recurrent import RecurrentConfig, RecurrentSeq2Seq
from regard.models.seq2seq import Seq2Seq
from regard.translation import Segmentation, Tokenizer, TokenizerPair
from regard.translation.alignment import cross_attention
from regard.translation.alignment.aer import GoldAlignment, error_rate
from regard.translation.alignment.alignment import Alignment, merge
from regard.translation.alignment.alignment_head import AlignmentHead
from regard.translation.alignment.attention_aligner import align, rate_alignment_heads, select_alignment_head
from regard.translation.alignment.cross_attention import cross_weights
from regard.translation.alignment.links import Links
from regard.translation.tokens import END, START
from tests.cases import looped

SOURCES = [[5, 6, 7, 8, 9], [10, 11], [12], [13, 5, 14]]
TARGETS = [[20, 21, 22], [23, 24, 25, 26, 27, 28, 29], [], [20]]
MODELS = ["transformer", "grouped", "general", "input_feeding", "additive"]


@pytest.fixture(autouse=True)
def _seeded(one_thread: None) -> None:
    torch.manual_seed(0)


def make(kind: str) -> Seq2Seq:
    if kind == "transformer":
        return Transformer((31, 37), TransformerConfig(width=12, heads=3, layers=2, ffn_dim=16))
    if kind == "grouped":
        return Transformer(
            37, TransformerConfig(width=12, heads=3, key_heads=1, layers=2, normalize=regard.Entmax15())
        )
    attention: Any = "general" if kind == "input_feeding" else kind
    return RecurrentSeq2Seq(
        37, RecurrentConfig(width=12, attention=attention, input_feeding=kind == "input_feeding")
    )


def unbatched(model: Seq2Seq, source: list[int], target: list[int], name: str) -> Tensor:
    """Return the weights of one unbatched pair: (heads, 1 + target, source + 1)."""
    model = model.eval()
    with torch.no_grad(), regard.watch(model) as seen:
        model.hidden(torch.tensor([[*source, END]]), torch.tensor([[START, *target]]))
        return seen.joined(name)[0]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("shift", ["input", "output"])
@pytest.mark.sampled(2)
def test_weights_equal_those_of_each_pair_alone(kind, shift):
    model = make(kind)
    layers = list(cross_attention.cross_attention_layers(model))
    for layer, name in enumerate(layers):
        for heads in (None, (0,)) if len(layers) == 1 else (None, (1,), (2, 0)):
            results = cross_weights(model, SOURCES, TARGETS, AlignmentHead(layer, heads, shift))
            for weights, source, target in zip(results, SOURCES, TARGETS, strict=True):
                expected = unbatched(model, source, target, name)
                expected = expected.mean(0) if heads is None else expected[list(heads)].mean(0)
                expected = expected[1:] if shift == "input" else expected[:-1]
                torch.testing.assert_close(weights, expected[:, :-1], atol=1e-5, rtol=1e-4)
                assert not weights.requires_grad


@pytest.mark.parametrize("kind", MODELS)
def test_batches_are_irrelevant(kind, monkeypatch):
    model = make(kind)
    together = cross_weights(model, SOURCES, TARGETS)
    monkeypatch.setattr(cross_attention, "_BATCH_TOKENS", 1)
    apart = cross_weights(model, SOURCES[::-1], TARGETS[::-1])[::-1]
    for batched, single in zip(together, apart, strict=True):
        torch.testing.assert_close(batched, single, atol=1e-5, rtol=1e-4)


def test_batches_are_limited_in_size():
    rng = random.Random(0)
    sources, targets = ([[5] * rng.randint(0, 300) for _ in range(200)] for _ in range(2))
    sources[7] = [5] * 9000
    batches = list(cross_attention._batches(sources, targets))
    assert sorted(i for batch in batches for i in batch) == list(range(200))
    for batch in batches:
        longest = (max(len(side[i]) + 1 for i in batch) for side in (sources, targets))
        assert sum(longest) * len(batch) <= cross_attention._BATCH_TOKENS or batch == [7]


@looped(
    ("kind", "shift", "known"),
    [
        *(("transformer", "output", 3), ("transformer", "input", 2), ("general", "output", 3)),
        *(("general", "input", 2), ("input_feeding", "output", 3), ("input_feeding", "input", 2)),
        ("additive", "input", 3),  # Bahdanau attention is computed before the token is read
    ],
)
def test_shift_determines_which_tokens_a_row_depends_on(kind, shift, known):
    """The step that predicts a token does not depend on it; the step that reads it does."""
    model, head = make(kind), AlignmentHead(shift=shift)
    targets = [20, 21, 22, 23, 24], [20, 21, 30, 23, 24]
    before, after = (cross_weights(model, [[5, 6, 7, 8]], [tokens], head)[0] for tokens in targets)
    torch.testing.assert_close(before[:known], after[:known])
    assert ((before - after).abs().amax(-1)[known:] > 1e-6).all()


def test_empty_sentences():
    for kind in MODELS:
        results = cross_weights(make(kind), [[], [5], []], [[20, 21], [], []])
        assert [tuple(weights.shape) for weights in results] == [(2, 0), (0, 1), (0, 0)]
    assert cross_weights(make("transformer"), [], []) == []


def test_the_model_is_not_changed():
    model = make("transformer").train()
    cross_weights(model, SOURCES, TARGETS)
    assert all(module.training for module in model.modules())
    assert not any(module.watchers for module in model.modules() if isinstance(module, Attends))
    dropping = cross_weights(model, SOURCES, TARGETS)
    torch.testing.assert_close(dropping, cross_weights(model.eval(), SOURCES, TARGETS))


def test_missing_layers_and_heads_are_rejected():
    plain, model = RecurrentSeq2Seq(37, RecurrentConfig(width=12, attention="none")), make("transformer")
    for arguments, message in [
        ((plain, SOURCES, TARGETS), "RecurrentSeq2Seq has no cross-attention.*Train a model with attention"),
        ((model, SOURCES, TARGETS, AlignmentHead(2)), "Layer 2 is out of range: the model has 2 cross-att"),
        ((model, SOURCES, TARGETS, AlignmentHead(-3)), "Layer -3 is out of range"),
        (
            (model, SOURCES, TARGETS, AlignmentHead(0, (0, 3))),
            "Head 3 is out of range: the layer has 3 heads",
        ),
        ((model, SOURCES, TARGETS[:3]), "4 source sentences and 3 target"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            cross_weights(*arguments)


@given(
    st.builds(
        AlignmentHead,
        st.integers(-9, 9),
        st.none() | st.lists(st.integers(0, 9), min_size=1).map(tuple),
        st.sampled_from(["input", "output"]),
    )
)
def test_alignment_heads_round_trip(head):
    assert AlignmentHead.from_dict(head.to_dict()) == head


@looped(
    "values",
    [
        *({"layer": layer} for layer in ("0", True, 1.0)),
        *({"heads": heads} for heads in (1, [], [-1], "01", [[0]])),
        *({"shift": "both"}, {"shift": None}, {"kind": "x"}, [], None),
    ],
)
def test_invalid_alignment_heads(values):
    with pytest.raises(ArgumentError, match=r"AlignmentHead got|is not an alignment head"):
        AlignmentHead.from_dict(values)


# Words


def segmented(word_of: list[int], words: int) -> Segmentation:
    return Segmentation(
        [f"w{i}" for i in range(words)], [9] * len(word_of), ["p"] * len(word_of), word_of, {}
    )


@given(st.lists(st.integers(0, 4), max_size=9), st.lists(st.integers(0, 3), max_size=9), st.integers(0, 99))
def test_merged_weights_sum_over_source_and_average_over_target(target_of, source_of, seed):
    source, target = segmented(sorted(source_of), 4), segmented(sorted(target_of), 5)
    weights = torch.rand(2, len(target_of), len(source_of), generator=torch.Generator().manual_seed(seed))
    merged = torch.from_numpy(merge(source, target, weights.numpy()))
    assert merged.shape == (2, 5, 4)
    for t in range(5):
        for s in range(4):
            rows = [i for i, word in enumerate(target.word_of) if word == t]
            columns = [i for i, word in enumerate(source.word_of) if word == s]
            expected = sum(weights[:, i, j] for i in rows for j in columns) / max(len(rows), 1)
            torch.testing.assert_close(merged[:, t, s], torch.zeros(2) + expected)


def test_weights_of_any_float_type_are_merged():
    source, target = segmented([0, 0, 1], 2), segmented([0], 1)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        weights = torch.tensor([[0.25, 0.25, 0.5]], dtype=dtype, requires_grad=True)
        assert Alignment.of(source, target, weights).weights.tolist() == [[0.5, 0.5]]


def test_tokens_without_a_word_are_dropped():
    """A model may generate tokens that do not form a word."""
    assert Alignment.of(
        segmented([0], 1), Segmentation([], [9], [""], [0], {}), torch.ones(1, 1)
    ).weights.shape == (0, 1)


def test_token_weights_are_merged_into_words():
    lines = ["ein großer Hund bellt laut", "a big dog barks loudly"]
    tokens = Tokenizer.learn(lines * 5, kind="bpe", size=40)
    model = Transformer(len(tokens), TransformerConfig(width=12, heads=3, layers=2))
    pair = ("ein großer Hund bellt", "a dog  barks ")
    (alignment,) = align(model, TokenizerPair(tokens, tokens), [pair])
    assert alignment.source_words == ("ein", "großer", "Hund", "bellt")
    assert alignment.target_words == ("a", "dog", "barks")
    pieces = cross_weights(model, [tokens.encode(pair[0])], [tokens.encode(pair[1])])[0]
    assert pieces.shape[1] > 4  # otherwise nothing is merged
    assert (alignment.weights.sum(-1) <= 1 + 1e-6).all()
    target = tokens.segment(pair[1])
    for word in range(3):
        rows = [i for i, of in enumerate(target.word_of) if of == word]
        torch.testing.assert_close(alignment.weights[word].sum(), pieces[rows].sum() / len(rows))


def test_links():
    weights = torch.tensor([[0.1, 0.5, 0.3], [0.0, 0.0, 0.0], [0.2, 0.2, 0.6]])
    alignment = Alignment(("a", "b", "c"), ("x", "y", "z"), weights)
    assert alignment.argmax() == [1, None, 2]
    assert alignment.links() == {(1, 0), (2, 2)}
    assert alignment.to_pharaoh() == "1-0 2-2"
    assert alignment.links(0.3) == {(1, 0), (2, 0), (2, 2)}
    assert alignment.to_pharaoh(0.9) == ""
    assert repr(alignment) == "Alignment(3 source × 3 target words: 1-0 2-2)"
    assert str(alignment).splitlines() == ["     a    b    c", "x   10   50   30", "y", "z   20   20   60"]
    for threshold in (0.0, 1.00000001, 1.5, -1.0):
        with pytest.raises(ArgumentError, match="links got threshold"):
            alignment.links(threshold)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_alignment_is_json_serializable(dtype):
    weights = torch.tensor([[float("nan"), 0.123456, -0.5], [float("inf"), 1.5, 1 / 3]], dtype=dtype)
    values = Alignment(("a", "b", "漢"), ("x", "y"), weights.requires_grad_()).to_dict()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert values["source_words"] == ["a", "b", "漢"]
    assert values["target_words"] == ["x", "y"]
    expected = [[0, round(weights[0, 1].item(), 4), 0], [0, 1, round(weights[1, 2].item(), 4)]]
    assert values["weights"] == expected
    alignment = Alignment(("a", "b"), ("x", "y"), torch.tensor([[0.1, 0.9], [0.8, 0.2]]))
    assert alignment.to_dict()["links"] == alignment.to_pharaoh()


def test_empty_alignments():
    assert Alignment((), ("a",), torch.zeros(1, 0)).argmax() == [None]
    empty = Alignment((), (), torch.zeros(0, 0))
    assert (empty.to_pharaoh(), str(empty)) == ("", "")
    assert "no links" in repr(empty)
    with pytest.raises(ShapeError, match=r"shape \(1, 2\); 2 target words and 1 source word need \(2, 1\)"):
        Alignment(("a",), ("b", "c"), torch.zeros(1, 2))


# Selecting a head


def planted(layer: int, head: int) -> Transformer:
    """Return a model in which this head attends to the token it reads, the other to the next letter."""
    model = Transformer(
        64, TransformerConfig(width=64, heads=2, layers=3, positions="none", dropout=0.0), share=True
    )
    with torch.no_grad():
        model.embedding.weight.copy_(torch.eye(64))
        for stack in (model.encoder, model.decoder):
            for block in stack.blocks:
                for part in (block.attention, block.feed_forward):  # no influence on the output
                    part.out_proj.weight.zero_()
        for i, block in enumerate(model.decoder.blocks):
            block.cross.out_proj.weight.zero_()
            query, key = block.cross.projection(0)[0], block.cross.projection(1)[0]
            query.zero_()
            if i == layer:
                right, wrong = (slice(32 * which, 32 * which + 32) for which in (head, 1 - head))
                torch.nn.init.orthogonal_(key[right])
                key[wrong] = key[right]
                query[right] = 50 * key[right]
                query[wrong] = query[right].roll(1, 1)
    return model


def shuffled(n: int) -> tuple[list[tuple[str, str]], list[Links]]:
    rng = random.Random(0)
    pairs, links = [], []
    for _ in range(n):
        words = rng.sample("abcdefghijklmnop", rng.randint(2, 6))
        order = rng.sample(range(len(words)), len(words))
        pairs.append((" ".join(words), " ".join(words[i] for i in order)))
        links.append(frozenset((i, position) for position, i in enumerate(order)))
    return pairs, links


@pytest.fixture(scope="module")
def letters() -> TokenizerPair:
    tokens = Tokenizer.learn([" ".join("abcdefghijklmnop")] * 9, kind="words", size=60)
    return TokenizerPair(tokens, tokens)


@pytest.mark.parametrize(("layer", "head"), [(0, 0), (1, 1), (2, 0)])
@pytest.mark.parametrize("with_gold", [True, False])
@pytest.mark.sampled(2)
def test_the_head_that_aligns_is_selected(layer, head, with_gold, letters):
    pairs, links = shuffled(60)
    model = planted(layer, head)
    selected = select_alignment_head(model, letters, pairs, links if with_gold else None)
    assert selected == AlignmentHead(layer, (head,), "input")
    predicted = [alignment.links() for alignment in align(model, letters, pairs, selected)]
    assert error_rate(predicted, links).aer == 0


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.sampled(2)
def test_rates_of_heads_are_those_of_their_links(kind, letters):
    pairs, links = shuffled(10)
    pairs.append(("", "a b"))
    gold = [GoldAlignment(frozenset(sorted(pair)[:2]), pair) for pair in [*links, frozenset()]]
    model = make(kind)
    rated = rate_alignment_heads(model, letters, pairs, gold)
    assert len(rated) == (2 * 2 * 4 if kind in ("transformer", "grouped") else 2 * 2)
    for head, rates in rated.items():
        predicted = [alignment.links() for alignment in align(model, letters, pairs, head)]
        assert rates == pytest.approx(error_rate(predicted, gold))
    assert rated[select_alignment_head(model, letters, pairs, gold)].aer == min(
        rates.aer for rates in rated.values()
    )


def test_a_single_head_is_selected_as_the_mean(letters):
    assert select_alignment_head(make("additive"), letters, *shuffled(5)).heads is None


def test_without_words_the_default_is_selected(letters):
    assert select_alignment_head(make("transformer"), letters, [("", ""), ("a", "")]) == AlignmentHead()
    assert select_alignment_head(make("transformer"), letters, []) == AlignmentHead()


def test_gold_links_that_do_not_fit_are_rejected(letters):
    model = make("transformer")
    with pytest.raises(ArgumentError, match="1 sentence pair and gold links for 2"):
        select_alignment_head(model, letters, [("a", "b")], [frozenset({(0, 0)})] * 2)
    with pytest.raises(
        ArgumentError,
        match=r"Gold link 1-1 of pair 0 is out of range: .* 1 source and 1 target words.*index_base=1",
    ):
        select_alignment_head(model, letters, [("a", "b")], [frozenset({(1, 1)})])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_threshold_is_rounded_like_the_weights(dtype):
    alignment = Alignment(("ein", "Hund"), ("a",), torch.tensor([[0.7, 0.2]], dtype=dtype))
    assert alignment.links(0.7) == {(0, 0)}
    assert alignment.links(0.2) == {(0, 0), (1, 0)}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("change", ["read-only", "reversed", "big-endian", "repeated", "ordinary"])
def test_every_layout_of_an_array_becomes_a_tensor(change):
    array = numpy.array([[0.75, 0.25], [0.75, 0.25]], numpy.float32)
    if change == "read-only":
        array.setflags(write=False)
    elif change == "reversed":
        array = array[::-1, ::-1][:, ::-1]
    elif change == "big-endian":
        array = array.astype(">f4")
    elif change == "repeated":
        array = numpy.broadcast_to(array[0], (2, 2))
    alignment = Alignment(("ein", "Hund"), ("a", "dog"), array)
    assert alignment.weights.tolist() == [[0.75, 0.25], [0.75, 0.25]]
    assert alignment.weights is alignment.weights


@pytest.mark.parametrize("copied", [lambda x: x, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32])
def test_links_follow_changed_weights(dtype, copied):
    weights = torch.tensor([[0.75, 0.25]])
    alignment = Alignment(("ein", "Hund"), ("a",), weights.numpy() if dtype is None else weights.to(dtype))
    assert alignment.weights.shape == (1, 2)
    assert alignment.to_pharaoh() == "0-0"
    alignment = copied(alignment)
    alignment.weights[0, 0] = 0
    assert alignment.to_pharaoh() == "1-0"
    with pytest.raises(AttributeError):
        alignment.weights = weights
