"""ViewStore: what they describe, and that each answer is what the dense weights say."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from regard._util import interrupt
from regard.app.view_model import (
    InputView,
    LayerView,
    TextView,
    ViewModel,
    look_at_text,
    look_at_translation,
    look_at_translations,
    view_alignments,
)
from regard.errors import ArgumentError
from regard.models import RecurrentConfig, RecurrentSeq2Seq, Transformer, TransformerConfig
from regard.translation import Alignment, Tokenizer, TokenizerPair, Translation, Translator

H, Q, K, D = 3, 5, 7, 11
HOSTILE = ["</script><img src=x onerror=alert(1)>", "\udc80", "a\u2028b", "", "x" * 10_000, "\0"]


def lazy(heads=H, queries=Q, keys=K, **options) -> regard.Weights:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(heads, n, D, generator=generator) for n in (queries, keys))
    return regard.attend(query, key, key, **options)[1]


def translator(**options) -> Translator:
    torch.manual_seed(0)
    tokens = Tokenizer.learn(["ein Hund bellt laut", "a dog barks"] * 10, kind="characters", size=40)
    model = Transformer(len(tokens), TransformerConfig(width=16, heads=2, layers=2), share=True)
    return Translator(model, TokenizerPair(tokens, tokens), **options)


def of(ours: Translator, source: str, target: str) -> Translation:
    """A translation that somebody else made."""
    return Translation(source, target, -1.0, [], _align=lambda: ours.align([(source, target)])[0])


# Describing


def test_tokens_of_both_sides_are_described():
    view = ViewModel.of(lazy(), queries=list("abcde"), keys=list("ABCDEFG"), title="Letters")
    described = json.loads(json.dumps(view.describe()))
    (one,) = described["inputs"]
    assert described["title"] == "Letters"
    assert [text["tokens"] for text in one["texts"]] == [list("abcde"), list("ABCDEFG")]
    (layer,) = one["layers"]
    assert (layer["kind"], layer["heads"], layer["queries"], layer["keys"]) == ("cross", H, 0, 1)
    assert layer["vectors"] is True


def test_without_keys_the_queries_read_each_other():
    (one,) = ViewModel.of(lazy(keys=Q), queries=list("abcde")).describe()["inputs"]
    assert len(one["texts"]) == 1
    assert (one["layers"][0]["kind"], one["layers"][0]["keys"]) == ("self", 0)


def test_tokens_that_nobody_named_are_numbered():
    (one,) = ViewModel.of(torch.rand(2, 3)).describe()["inputs"]
    assert [text["tokens"] for text in one["texts"]] == [["1", "2"], ["1", "2", "3"]]


@pytest.mark.parametrize("lead", [(), (H,), (1, H), (2, H), (2, 3, H)])
def test_each_of_a_batch_is_an_input(lead):
    x = torch.randn(*lead, Q, D, generator=torch.Generator().manual_seed(1))
    weights = regard.attend(x, x, x)[1]
    for given_ in (weights, weights.dense()):
        view = ViewModel.of(given_)
        assert len(view.inputs) == math.prod(lead[:-1])
        dense = weights.dense().reshape(-1, lead[-1] if lead else 1, Q, Q)
        for number, matrix in enumerate(dense):
            (found,) = view.ask("tile", {"input": number}).arrays
            np.testing.assert_allclose(found, matrix, atol=1e-6)


def test_a_large_batch_must_be_chosen_from():
    with pytest.raises(regard.ArgumentError, match="batch of 65"):
        ViewModel.of(torch.rand(65, 2, 3, 3))


def test_what_was_watched_has_labels_and_tokens():
    model = Transformer(50, TransformerConfig(width=16, heads=2, layers=2))
    with regard.watch(model) as seen:
        model(torch.tensor([[5, 6, 7]]), torch.tensor([[5, 6]]))
    view = ViewModel.of(seen, queries=["t", "u"], keys=["a", "b", "c"])
    layers = view.describe()["inputs"][0]["layers"]
    assert [layer["label"] for layer in layers] == [
        "encoder 0",
        "encoder 1",
        "decoder 0",
        "decoder 0 to source",
        "decoder 1",
        "decoder 1 to source",
    ]
    texts = view.inputs[0].texts
    of = {
        layer.label: (texts[layer.queries].tokens, texts[layer.keys].tokens)
        for layer in view.inputs[0].layers
    }
    assert of["encoder 0"] == (("a", "b", "c"), ("a", "b", "c"))
    assert of["decoder 0 to source"] == (("t", "u"), ("a", "b", "c"))


def test_steps_of_a_decoder_are_joined():
    model = RecurrentSeq2Seq(50, RecurrentConfig(width=16, layers=1, attention="additive"))
    with regard.watch(model) as seen:
        model(torch.tensor([[5, 6, 7]]), torch.tensor([[5, 6]]))
    (layer,) = ViewModel.of(seen).inputs[0].layers
    assert layer.size == (2, 3)


@pytest.mark.parametrize("given_", [3, "text", None, {"a": 1}, {"a": torch.rand(3)}, {}])
def test_what_cannot_be_shown_is_refused(given_):
    with pytest.raises((regard.DTypeError, regard.ArgumentError)):
        ViewModel.of(given_)


def test_each_row_and_column_needs_its_token():
    with pytest.raises(regard.ShapeError, match="4 tokens for 5 queries"):
        ViewModel.of(lazy(), queries=list("abcd"), keys=list("ABCDEFG"))
    with pytest.raises(regard.DTypeError):
        ViewModel.of(lazy(), queries="abcde", keys=list("ABCDEFG"))
    with pytest.raises(regard.ArgumentError, match="Position 2"):
        TextView(("a", "b"), special=(2,))
    with pytest.raises(regard.ArgumentError, match="text 1"):
        InputView("", [TextView(("a",))], [LayerView("", "", "self", torch.ones(1, 1), 0, 1)])


def test_hostile_tokens_are_text_that_json_holds():
    tokens = HOSTILE[:Q]
    described = ViewModel.of(lazy(keys=Q), queries=tokens).describe()
    text = json.dumps(described, ensure_ascii=False).encode()  # UTF-8 holds it
    (found,) = json.loads(text)["inputs"][0]["texts"]
    assert found["tokens"] == [token.replace("\udc80", "?") for token in tokens]


# Questions


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("mask", [None, regard.Causal()])
@pytest.mark.parametrize("normalize", [regard.Softmax(), regard.Entmax15(), regard.Relu()])
def test_a_tile_is_the_mean_of_its_blocks(dense, mask, normalize):
    weights = lazy(mask=mask, normalize=normalize)
    whole = weights.dense()
    view = ViewModel.of(whole if dense else weights)
    (found,) = view.ask(
        "tile", {"heads": [2, 0], "rows": [1, 5], "columns": [1, 7], "height": 2, "width": 3}
    ).arrays
    expected = whole[[2, 0], 1:5, 1:7].reshape(2, 2, 2, 3, 2).mean((2, 4))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert found.dtype == np.float32
    (mean,) = view.ask("tile", {"heads": [2, 0], "mean": True}).arrays
    np.testing.assert_allclose(mean, whole[[2, 0]].mean(0, keepdim=True), atol=1e-6)


@pytest.mark.parametrize("dense", [False, True])
def test_top_of_a_query_and_of_a_key(dense):
    weights = lazy()
    whole = weights.dense().mean(0)
    view = ViewModel.of(weights.dense() if dense else weights)
    for side, line, place in (("query", whole[3], 3), ("key", whole[:, 6], 6)):
        facts = view.ask("topk", {"side": side, "position": place, "k": 4}).facts
        expected = line.topk(4)
        assert facts["positions"] == expected.indices.tolist()
        np.testing.assert_allclose(facts["weights"], expected.values, atol=1e-6)


def test_top_leaves_out_what_is_not_seen():
    facts = (
        ViewModel.of(lazy(keys=Q, mask=regard.Causal()))
        .ask("topk", {"side": "query", "position": 1, "k": 9})
        .facts
    )
    assert sorted(facts["positions"]) == [0, 1]


@pytest.mark.parametrize("dense", [False, True])
def test_received_is_the_sum_over_queries(dense):
    weights = lazy()
    view = ViewModel.of(weights.dense() if dense else weights)
    facts, (bins,) = view.ask("received", {"heads": [1], "k": 2, "bins": 99})
    expected = weights.dense()[1].sum(0)
    np.testing.assert_allclose(bins, expected, atol=1e-5)
    assert facts["positions"] == expected.topk(2).indices.tolist()
    _, (bins,) = view.ask("received", {"heads": [1], "bins": 2})
    np.testing.assert_allclose(bins, [expected[:3].mean(), expected[3:].mean()], atol=1e-5)


def test_heads_have_labels_and_thumbnails():
    facts, (small,) = ViewModel.of(lazy()).ask("heads", {"size": 4})
    assert small.shape == (H, 4, 4)
    assert [head["head"] for head in facts["heads"]] == [0, 1, 2]
    assert json.dumps(facts, allow_nan=False)


@pytest.mark.parametrize(
    ("options", "formula"),
    [
        ({}, lambda score, tau: math.exp(score - tau)),
        ({"mask": regard.Causal()}, lambda score, tau: math.exp(score - tau)),
        ({"normalize": regard.Softmax(2.0)}, lambda score, tau: math.exp((score - tau) / 2)),
        ({"normalize": regard.Sparsemax()}, lambda score, tau: max(score - tau, 0)),
        ({"normalize": regard.Entmax15()}, lambda score, tau: max((score - tau) / 2, 0) ** 2),
        ({"normalize": regard.Sigmoid()}, lambda score, tau: 1 / (1 + math.exp(tau - score))),
        ({"bias": regard.ALiBi(heads=H)}, lambda score, tau: math.exp(score - tau)),
    ],
)
def test_numbers_add_up_to_the_weight(options, formula):
    weights = lazy(**options)
    view = ViewModel.of(weights)
    for query, key in ((1, 0), (4, 3), (0, 6)):
        facts = view.ask("numbers", {"head": 1, "query": query, "key": key}).facts
        product = np.dot(facts["query"], facts["key"]) * facts["scale"] + facts["bias"]
        assert facts["score"] == pytest.approx(product, abs=1e-5)
        assert facts["weight"] == pytest.approx(float(weights[1, query, key]), abs=1e-6)
        if facts["masked"]:
            assert facts["weight"] == 0
        else:
            assert facts["weight"] == pytest.approx(formula(facts["score"], facts["tau"]), abs=1e-5)
        assert json.dumps(facts, allow_nan=False)


def test_numbers_need_vectors():
    view = ViewModel.of(lazy().dense())
    assert view.describe()["inputs"][0]["layers"][0]["vectors"] is False
    with pytest.raises(regard.ArgumentError, match="vectors"):
        view.ask("numbers", {})


def test_shared_key_heads_have_their_own_numbers():
    generator = torch.Generator().manual_seed(2)
    query, key = torch.randn(4, Q, D, generator=generator), torch.randn(2, K, D, generator=generator)
    view = ViewModel.of(regard.attend(query, key, key)[1])
    facts = view.ask("numbers", {"head": 3, "query": 2, "key": 5}).facts
    np.testing.assert_allclose(facts["query"], query[3, 2], atol=1e-6)
    np.testing.assert_allclose(facts["key"], key[1, 5], atol=1e-6)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
NAMES = [
    "input",
    "layer",
    "heads",
    "mean",
    "rows",
    "columns",
    "height",
    "width",
    "side",
    "position",
    "k",
    "bins",
    "size",
    "head",
    "query",
    "key",
    "?",
]


@given(
    st.sampled_from(["tile", "topk", "received", "heads", "numbers", "what"]),
    st.dictionaries(st.sampled_from(NAMES), anything, max_size=4),
)
@settings(max_examples=300)
def test_whatever_is_asked_is_answered_or_refused_in_words(question, arguments):
    view = ViewModel.of(TINY)
    try:
        facts, arrays = view.ask(question, arguments)
    except regard.ArgumentError:
        return
    json.dumps(facts, allow_nan=False)
    assert all(array.dtype == np.float32 for array in arrays)


TINY = lazy(2, 3, 4)


@pytest.mark.parametrize("arguments", [None, [], "x", {"input": 1}, {"layer": -1}, {"layer": True}])
def test_only_what_is_there_is_looked_at(arguments):
    view = ViewModel.of(TINY)
    if arguments is None:
        assert view.ask("tile", arguments).arrays[0].shape == (2, 3, 4)
    else:
        with pytest.raises(regard.ArgumentError):
            view.ask("tile", arguments)


def test_weights_that_are_no_numbers_are_shown_as_nothing():
    query = torch.full((1, 3, 4), math.nan)
    for weights in (regard.attend(query, query, query)[1], torch.full((1, 3, 3), math.nan)):
        view = ViewModel.of(weights)
        assert not view.ask("tile", {}).arrays[0].any()
        for question in ("topk", "received", "heads"):
            facts, arrays = view.ask(question, {})
            json.dumps(facts, allow_nan=False)
            assert all(np.isfinite(array).all() for array in arrays)
    facts = ViewModel.of(regard.attend(query, query, query)[1]).ask("numbers", {}).facts
    assert json.dumps(facts, allow_nan=False)


@pytest.mark.parametrize(("queries", "keys"), [(0, 0), (0, 4), (4, 0), (1, 1), (1, 4), (4, 1)])
@pytest.mark.parametrize("dense", [False, True])
def test_nothing_and_almost_nothing(queries, keys, dense):
    weights = lazy(2, queries, keys)
    view = ViewModel.of(weights.dense() if dense else weights)
    assert view.ask("tile", {}).arrays[0].shape == (2, queries, keys)
    assert view.ask("heads", {}).arrays[0].shape == (2, queries, keys)
    assert view.ask("received", {}).arrays[0].shape == (keys,)
    if queries and keys:
        assert len(view.ask("topk", {}).facts["positions"]) == keys
    else:
        with pytest.raises(regard.ArgumentError, match="there are none"):
            view.ask(
                "numbers" if not dense else "topk",
                {"key": 0} if not dense else {"side": "query" if not queries else "key"},
            )


def test_a_long_input_is_answered_in_linear_memory():
    """32,768 tokens would take 4 GB; a tile, a row and a column are computed alone, and exactly."""
    n = 32_768
    x = torch.randn(1, n, 8, generator=torch.Generator().manual_seed(0))
    weights = regard.attend(x[:, :64], x, x)[1]
    view = ViewModel.of(weights)
    (found,) = view.ask("tile", {"rows": [8, 24], "columns": [30_000, 30_256]}).arrays
    expected = (x[0, 8:24].double() @ x[0].double().T / math.sqrt(8)).softmax(-1)[:, 30_000:30_256]
    np.testing.assert_allclose(found[0], expected, rtol=1e-4)
    facts = view.ask("topk", {"side": "key", "position": 7, "k": 1}).facts
    column = (x[0, :64].double() @ x[0].double().T / math.sqrt(8)).softmax(-1)[:, 7]
    assert facts["positions"] == [int(column.argmax())]


# Translations and texts


def test_translations_show_which_word_came_from_which():
    weights = torch.tensor([[0.9, 0.1], [math.nan, 2.0]])
    read = Alignment(("ein", "Hund"), ("a", "dog"), weights)
    view = view_alignments([Translation("ein Hund", "a dog", -1, [], "copied", _align=lambda: read)])
    (one,) = view.describe()["inputs"]
    assert (one["title"], one["note"]) == ("ein Hund → a dog", "copied")
    assert [text["tokens"] for text in one["texts"]] == [["ein", "Hund"], ["a", "dog"]]
    assert (one["layers"][0]["kind"], one["layers"][0]["queries"]) == ("words", 1)
    np.testing.assert_allclose(view.ask("tile", {}).arrays[0][0], [[0.9, 0.1], [0, 1]])


def test_a_translation_without_attention_says_why():
    def refuse():
        raise regard.ArgumentError("this Recurrent does not attend")

    (one,) = view_alignments([Translation("ein Hund", "a dog", -1, [], _align=refuse)]).describe()["inputs"]
    assert one["layers"] == []
    assert one["note"] == "this Recurrent does not attend"
    assert [text["tokens"] for text in one["texts"]] == [["ein", "Hund"], ["a", "dog"]]


def test_an_alignment_too_large_to_show_is_not_read():
    def fail():
        raise AssertionError("read")

    (one,) = view_alignments([Translation("a " * 5000, "b " * 5000, -1, [], _align=fail)]).inputs
    assert "5,000 source words" in one.note


def test_all_attentions_of_a_translator():
    view = look_at_translations(ours := translator(), [of(ours, "ein Hund", "a dog"), of(ours, "ein", "")])
    assert [len(one.layers) for one in view.inputs] == [7, 6]  # of no words, no alignment
    for one in view.inputs:
        labels = [layer.label for layer in one.layers if layer.kind != "words"]
        assert labels == [
            "encoder 0",
            "encoder 1",
            "decoder 0",
            "decoder 0 to source",
            "decoder 1",
            "decoder 1 to source",
        ]
        cross = next(layer for layer in one.layers if layer.label == "decoder 0 to source")
        source, target = one.texts[cross.keys], one.texts[cross.queries]
        assert (source.tokens[-1], source.special) == ("[END]", (len(source.tokens) - 1,))
        assert (target.tokens[0], target.special) == ("[START]", (0,))
    numbers = [layer.label for layer in view.inputs[0].layers].index("decoder 0")
    (found,) = view.ask("tile", {"layer": numbers}).arrays
    np.testing.assert_allclose(found.sum(-1), 1, atol=1e-5)
    assert not np.triu(found[0], 1).any()  # a decoder does not look ahead
    cross = view.ask("tile", {"layer": numbers + 1, "mean": True}).arrays[0][0]
    words = view.ask("tile", {}).arrays[0][0]
    assert words.shape == (2, 2)
    assert cross.shape == (1 + len("▁a▁dog"), len("▁ein▁Hund") + 1)


def test_the_pieces_of_a_translation_are_those_that_the_model_wrote():
    """A text can be cut in several ways, and a model need not write the pieces that cutting would give."""
    torch.manual_seed(0)
    tokens = Tokenizer.learn(["ein Hund bellt laut", "a dog barks loudly"] * 10, kind="bpe", size=60)
    model = Transformer(len(tokens), TransformerConfig(width=16, heads=2, layers=1), share=True)
    ours = Translator(model, TokenizerPair(tokens, tokens))
    (found,) = ours.translate(["ein Hund bellt"])
    assert tokens.segment(found.text).pieces != found.tokens
    (one,) = look_at_translations(ours, [found]).inputs
    cross = next(layer for layer in one.layers if layer.kind == "cross")
    assert list(one.texts[cross.queries].tokens) == ["[START]", *found.tokens]
    expected = ours._weigh([found._align.args[1][0].part])  # the weights behind alignments
    assert cross.weights.shape[-2] == 1 + len(found.tokens)
    assert all(weights.shape[0] == len(found.tokens) for weights in expected.values())


@pytest.mark.parametrize("weights", [lazy(8), lazy(8).dense()])
def test_some_heads_are_described_as_among_all(weights):
    view = ViewModel.of(weights)
    facts, (pictures,) = view.ask("heads", {"size": 4})
    some, (fewer,) = view.ask("heads", {"size": 4, "heads": [5, 2]})
    assert [one["head"] for one in some["heads"]] == [5, 2]
    assert some["heads"] == [facts["heads"][5], facts["heads"][2]]
    np.testing.assert_allclose(fewer, pictures[[5, 2]], atol=1e-6)


def test_pictures_of_many_heads_have_a_size():
    view = ViewModel.of(torch.rand(20, 512, 512).softmax(-1))
    with pytest.raises(ArgumentError, match=r"20 heads at size 512 have 5,242,880 cells"):
        view.ask("heads", {"size": 512})


@pytest.mark.parametrize(
    ("question", "arguments", "expected"),
    [
        ("tile", {}, H * Q * K),
        ("tile", {"heads": [1], "rows": [1, 3], "columns": [0, 4]}, 8),
        ("topk", {"side": "query", "position": 0}, H * K),
        ("topk", {"side": "key", "position": 0, "heads": [0]}, Q),
        ("received", {"heads": [0, 1]}, 2 * Q * K),
        ("heads", {}, 4 * H * Q * K),
        ("numbers", {"query": 0, "key": 0}, K),
    ],
)
def test_what_a_question_costs(question, arguments, expected):
    assert ViewModel.of(lazy()).cost(question, arguments) == expected


class Enough(Exception):
    """Raised by a check."""


@pytest.mark.parametrize(
    ("question", "asked"), [("tile", {"height": 4}), ("tile", {}), ("received", {}), ("heads", {})]
)
def test_long_answers_are_interrupted_between_parts(question, asked, monkeypatch):
    """Where a part is a few rows, the answer is the same, and each part is preceded by a check."""
    monkeypatch.setattr("regard._util.interrupt._PAIRS", 2000)
    monkeypatch.setattr("regard.app.protocol._BAND", 2000)
    monkeypatch.setattr("regard.mechanism.tiled.budget", lambda problem: 2000)
    monkeypatch.setattr("regard.mechanism.call.problem.MAX_SINGLE_TILE", 2000)
    weights = lazy(2, 200, 50)
    expected = ViewModel.of(weights.dense()).ask(question, asked)
    checks = []
    with interrupt.checked_by(lambda: checks.append(0)):
        found = ViewModel.of(weights).ask(question, asked)
    assert len(checks) > 5
    for one, other in zip(found.arrays, expected.arrays, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)

    def stop():
        checks.pop()
        if not checks:
            raise Enough

    checks[:] = [0] * 3
    with interrupt.checked_by(stop), pytest.raises(Enough):
        ViewModel.of(weights).ask(question, asked)


def test_an_unknown_tau_is_found_in_parts_that_can_be_interrupted(monkeypatch):
    weights = lazy(2, 200, 50)
    problem = weights.problem
    unknown = problem.with_tensors({**problem.tensors, "tau": torch.full_like(problem["tau"], math.nan)})
    view = ViewModel.of(regard.Weights(unknown, None, (2,)))
    assert view.tau_cost() == 2 * 200 * 50
    monkeypatch.setattr("regard._util.interrupt._PAIRS", 2000)
    (found,) = view.ask("tile", {"height": 200}).arrays
    np.testing.assert_allclose(found, weights.dense().numpy(), atol=1e-6)
    assert view.tau_cost() == 0


def test_a_recurrent_translator_looks_step_by_step():
    torch.manual_seed(0)
    tokens = Tokenizer.learn(["ein Hund bellt laut", "a dog barks"] * 10, kind="characters", size=40)
    model = RecurrentSeq2Seq(len(tokens), RecurrentConfig(width=16, layers=1, attention="additive"))
    view = look_at_translation(Translator(model, TokenizerPair(tokens, tokens)), ["ein Hund"])
    layer = view.inputs[0].layers[-1]
    assert (layer.label, layer.kind) == ("decoder to source", "cross")


def test_a_sentence_too_long_for_the_model_is_shown_in_words():
    short = translator(config={"settings": {"corpus": {"max_tokens": 5}}})
    (one,) = look_at_translation(short, ["ein Hund bellt"]).inputs
    assert {layer.kind for layer in one.layers} <= {"words"}
    assert "at most 5" in one.note


def test_an_empty_sentence_has_nothing_to_show():
    (one,) = look_at_translation(translator(), [""]).inputs
    assert list(one.layers) == []


def test_an_encoder_shows_all_layers_and_its_marks(encoder):
    view = look_at_text(encoder, ["Dogs bark.", "Unbelievably, they do not."])
    first, second = view.inputs
    assert list(first.texts[0].tokens) == ["[CLS]", "dogs", "bark", ".", "[SEP]"]
    assert list(second.texts[0].special) == [0, len(second.texts[0].tokens) - 1]
    assert [layer.label for layer in first.layers] == [f"layer {n}" for n in range(6)]
    (found,) = view.ask("tile", {"input": 1, "layer": 5}).arrays
    np.testing.assert_allclose(found.sum(-1), 1, atol=1e-5)


def test_an_encoder_that_does_not_attend_is_refused():
    static = regard.models.StaticEncoder.learn(["dogs bark", "cats do not"], width=2, window=1)
    with pytest.raises(regard.ArgumentError, match="has no attention"):
        look_at_text(static, "dogs bark")


@pytest.fixture(scope="module")
def encoder():
    return regard.load_encoder("minilm")


def test_weights_of_another_kernel_are_pooled_like_our_own():
    """Nobody has told their τ."""
    query, key = torch.randn(2, 1, 3, 50, 8)

    class Foreign(torch.nn.Module):
        def forward(self):
            return torch.nn.functional.scaled_dot_product_attention(query, key, key, is_causal=True)

    model = Foreign()
    with regard.watch(model) as seen:
        model()
    expected = regard.attend(query, key, key, mask=regard.Causal(align="start"))[1]
    assert torch.allclose(seen[0].pool(5, 5), expected.pool(5, 5), atol=1e-6)
    view = ViewModel.of(seen)
    for heads in (None, [1]):
        (tile,) = view.ask("tile", {"rows": [10, 50], "columns": [0, 20], "heads": heads}).arrays
        chosen = [0, 1, 2] if heads is None else heads
        assert np.allclose(tile, expected[0, chosen, 10:50, :20].numpy(), atol=1e-6)
