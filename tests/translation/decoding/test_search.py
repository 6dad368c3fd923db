"""Search equals a plain beam search with lists and exhaustive enumeration, for any batching."""

import itertools
import math
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard.mechanism import fused
from regard.models import Packed, RecurrentConfig, RecurrentSeq2Seq, Transformer, TransformerConfig, quantize
from regard.models.seq2seq import Seq2Seq, State
from regard.translation.alignment.alignment_head import AlignmentHead, drop_special_tokens
from regard.translation.alignment.cross_attention import cross_weights
from regard.translation.decoding.extenders import _best_extensions, _best_tokens, _first_rows
from regard.translation.decoding.search import Hypothesis, search
from regard.translation.decoding.strategies import Beam, Greedy, Sample

pytestmark = pytest.mark.usefixtures("one_thread")

PADDING, START, END = 0, 1, 2
WORDS = 7
CONFIG = TransformerConfig(width=8, heads=2, layers=2, ffn_dim=12, dropout=0.3)
MODELS: dict[str, Any] = {
    "transformer": CONFIG,
    "rotary, one key head": replace(CONFIG, positions="rotary", key_heads=1),
    "alibi, norm after": replace(CONFIG, positions="alibi", norm_first=False),
    "entmax15": replace(CONFIG, normalize=regard.Entmax15()),
    "plain": RecurrentConfig(width=8, attention="none", layers=2, reverse=True),
    "bahdanau": RecurrentConfig(width=8, attention="additive", cell="gru"),
    "bahdanau lstm": RecurrentConfig(width=8, attention="additive", layers=2),
    "dot": RecurrentConfig(width=8, attention="dot"),
    "general, fed": RecurrentConfig(width=8, attention="general", input_feeding=True),
    "concat, fed": RecurrentConfig(width=8, attention="concat", cell="gru", input_feeding=True),
}
SOURCES = [[5, 6, 2], [4, 2], [3, 3, 4, 6, 5, 2], [2]]


@cache
def make(name: str, words: int = WORDS, seed: int = 0) -> Any:
    """Return a float64 model with parameters large enough to make outputs differ between sentences."""
    torch.manual_seed(seed)
    config = MODELS[name]
    model = (Transformer if isinstance(config, TransformerConfig) else RecurrentSeq2Seq)(
        words, config
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.5 * torch.randn_like(parameter)
    return model


def follow(model: Seq2Seq, source: list[int], *written: list[int]) -> list[Tensor]:
    """Return log probabilities, t V, of the token after the start token and each prefix of `written`."""
    target, training = Packed.of([[START, *words] for words in written]), model.training
    with torch.no_grad():
        logits = model.eval()(Packed.of([source] * len(written)), target)
    model.train(training)
    return list(target.split(logits.log_softmax(-1)))


def naive_search(model: Seq2Seq, source: list[int], beam: Beam, limit: int) -> list[Hypothesis]:
    """Beam search with lists: one sentence, no caches, no early stopping."""
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    results: list[Hypothesis] = []
    for size in range(1, limit + 1):
        if not live:
            break
        extended = []
        rows = follow(model, source, *(written for _, written in live))
        for (total, written), log_probabilities in zip(live, rows, strict=True):
            words = [word for word in range(WORDS) if word not in (PADDING, START)]
            extended += [(total + float(log_probabilities[-1, word]), [*written, word]) for word in words]
        extended.sort(key=lambda pair: -pair[0])
        live = []
        for total, written in extended[: beam.size - len(results)]:
            if total < extended[0][0] - beam.prune_threshold:
                break
            if written[-1] == END:
                results.append(Hypothesis(written[:-1], total / size**beam.length_penalty, total, True))
            else:
                live.append((total, written))
    rest = [
        Hypothesis(written, total / max(limit, 1) ** beam.length_penalty, total, False)
        for total, written in live
    ]
    return sorted(results + rest, key=lambda h: (h.finished, h.score), reverse=True)[: beam.n_best]


def assert_equal(actual: list[Hypothesis], expected: list[Hypothesis]) -> None:
    assert [h.tokens for h in actual] == [h.tokens for h in expected]
    assert [h.finished for h in actual] == [h.finished for h in expected]
    assert [h.score for h in actual] == pytest.approx([h.score for h in expected], rel=1e-9)
    assert [h.log_probability for h in actual] == pytest.approx(
        [h.log_probability for h in expected], rel=1e-9
    )


# Beam search


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(3)
def test_a_batch_equals_naive_search_of_each_sentence(name):
    model, beam, limits = make(name), Beam(3, n_best=3), [6, 4, 7, 5]
    results = search(model, Packed.of(SOURCES), beam, max_new_tokens=limits)
    for source, limit, hypotheses in zip(SOURCES, limits, results, strict=True):
        assert_equal(hypotheses, naive_search(model, source, beam, limit))


@settings(max_examples=settings().max_examples // 2)
@given(
    name=st.sampled_from(["transformer", "bahdanau", "general, fed"]),
    seed=st.integers(0, 3),
    sources=st.lists(st.lists(st.integers(2, WORDS - 1), min_size=1, max_size=5), min_size=1, max_size=5),
    data=st.data(),
)
def test_any_beam_equals_naive_search(name, seed, sources, data):
    size, length = data.draw(st.integers(1, 12)), data.draw(st.sampled_from([0.0, 0.6, 1.0, 2.0]))
    threshold = data.draw(st.sampled_from([math.inf, math.inf, 2.0, 0.0]))
    model, beam = make(name, seed=seed), Beam(size, length, data.draw(st.integers(1, size)), threshold)
    limits = [data.draw(st.integers(0, 6)) for _ in sources]
    results = search(model, Packed.of(sources), beam, max_new_tokens=limits)
    for source, limit, hypotheses in zip(sources, limits, results, strict=True):
        assert_equal(hypotheses, naive_search(model, source, beam, limit))


@pytest.mark.parametrize("name", ["transformer", "bahdanau"])
def test_an_unlimited_beam_equals_exhaustive_search(name):
    model, source, limit = make(name), SOURCES[0], 4
    words = [word for word in range(WORDS) if word not in (PADDING, START, END)]
    scored = []
    for size in range(limit):
        written = [list(sequence) for sequence in itertools.product(words, repeat=size)]
        for sequence, rows in zip(written, follow(model, source, *written), strict=True):
            scored.append((float(rows[torch.arange(size + 1), [*sequence, END]].sum()), sequence))
    for length in (0.0, 0.5, 1.0, 1.7):
        everything = Beam(len(words) ** limit * 2, length, n_best=10)
        (results,) = search(model, Packed.of([source]), everything, max_new_tokens=limit)
        best = sorted([(total / (len(words) + 1) ** length, words) for total, words in scored])[:-11:-1]
        assert [h.tokens for h in results] == [tokens for _, tokens in best]
        assert [h.score for h in results] == pytest.approx([score for score, _ in best])
        assert all(h.finished for h in results)


@pytest.mark.parametrize(
    "strategy", [Greedy(), Beam(4, 0.7, n_best=4), Sample(seed=3, n_samples=4, temperature=2.0)]
)
@pytest.mark.parametrize("name", ["transformer", "concat, fed"])
def test_log_probabilities_are_the_models(name, strategy):
    model = make(name)
    for source, results in zip(
        SOURCES, search(model, Packed.of(SOURCES), strategy, max_new_tokens=6), strict=True
    ):
        for hypothesis in results:
            words = [*hypothesis.tokens, END] if hypothesis.finished else hypothesis.tokens
            (rows,) = follow(model, source, words[:-1])
            total = float(rows[torch.arange(len(words)), torch.tensor(words)].sum())
            assert hypothesis.log_probability == pytest.approx(total, rel=1e-9)
            exponent = {Greedy: 1.0, Beam: 0.7, Sample: 1.0}[type(strategy)]
            assert hypothesis.score == pytest.approx(total / len(words) ** exponent)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(2)
def test_hypotheses_are_sorted_distinct_and_within_bounds(name):
    for hypotheses in search(make(name), Packed.of(SOURCES), Beam(6, n_best=6), max_new_tokens=5):
        order = [(h.finished, h.score) for h in hypotheses]
        assert order == sorted(order, reverse=True)
        assert len({(*h.tokens, h.finished) for h in hypotheses}) == len(hypotheses) == 6
        assert not {PADDING, START, END} & {token for h in hypotheses for token in h.tokens}
        assert all(len(h.tokens) <= (4 if h.finished else 5) for h in hypotheses)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(2)
def test_greedy_is_a_beam_of_one_and_the_argmax_of_each_step(name):
    model, source = make(name), Packed.of(SOURCES)
    results = search(model, source, Greedy(), max_new_tokens=6)
    assert results == search(model, source, Beam(1), max_new_tokens=6)
    for sentence, (hypothesis,) in zip(SOURCES, results, strict=True):
        (log_probabilities,) = follow(model, sentence, hypothesis.tokens)
        log_probabilities[:, [PADDING, START]] = -math.inf
        best = log_probabilities.argmax(-1).tolist()
        assert best[: len(hypothesis.tokens)] == hypothesis.tokens
        assert hypothesis.finished == (len(hypothesis.tokens) < 6)
        assert not hypothesis.finished or best[-1] == END


def test_a_subclass_of_a_strategy_searches_as_it_does():
    wide = type("Wide", (Beam,), {})(3)
    first, second = (search(make("dot"), Packed.of(SOURCES), x, max_new_tokens=5) for x in (wide, Beam(3)))
    assert first == second


def test_search_equals_the_models_own_greedy():
    model = make("dot")
    with torch.no_grad():
        model.bias[:2] = -1e3  # model.greedy does not suppress special tokens
    results = [h.tokens for (h,) in search(model, Packed.of(SOURCES), Greedy(), max_new_tokens=6)]
    assert results == model.greedy(Packed.of(SOURCES), start=START, end=END, max_new_tokens=6)
    make.cache_clear()


STRATEGIES = {"beam": Beam(4, n_best=3), "greedy": Greedy(), "sample": Sample(n_samples=3, top_p=0.9)}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[pytest.mark.slow] * (kind != "beam" and name != "transformer"))
        for name in MODELS
        for kind in STRATEGIES
    ],
)
@pytest.mark.sampled(3)
def test_the_batch_is_irrelevant(name, kind):
    strategy = STRATEGIES[kind]
    model = make(name)
    together = search(model, Packed.of(SOURCES), strategy, max_new_tokens=6)
    for source, results in zip(SOURCES, together, strict=True):
        assert_equal(search(model, Packed.of([source]), strategy, max_new_tokens=6)[0], results)
    backwards = search(model, Packed.of(SOURCES[::-1] * 2), strategy, max_new_tokens=6)
    for results, expected in zip(backwards, together[::-1] * 2, strict=True):
        assert_equal(results, expected)


def test_no_sentences_and_no_tokens():
    for strategy in (Greedy(), Beam(), Sample()):
        assert search(make("dot"), Packed.of([]), strategy, max_new_tokens=5) == []
        assert (
            search(make("dot"), Packed.of(SOURCES), strategy, max_new_tokens=0)
            == [[Hypothesis([], 0.0, 0.0, False)]] * 4
        )
    results = search(make("dot"), Packed.of(SOURCES), max_new_tokens=[0, 3, 0, 2])
    assert [len(h.tokens) > 0 or h.finished for (h,) in results] == [False, True, False, True]


def test_search_does_not_change_the_model():
    model = make("transformer").train()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    assert search(model, Packed.of(SOURCES), max_new_tokens=6) == search(
        model, Packed.of(SOURCES), max_new_tokens=6
    )
    assert model.training
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_other_dtypes_give_similar_scores():
    exact, model = make("transformer"), Transformer(WORDS, CONFIG)
    model.load_state_dict(exact.state_dict())
    expected = search(exact, Packed.of(SOURCES), Beam(3), max_new_tokens=6)
    single = search(model, Packed.of(SOURCES), Beam(3), max_new_tokens=6)
    half = search(model.bfloat16(), Packed.of(SOURCES), Beam(3), max_new_tokens=6)
    for (exact_one,), (single_one,), (half_one,) in zip(expected, single, half, strict=True):
        assert single_one.score == pytest.approx(exact_one.score, rel=1e-4)
        assert half_one.score == pytest.approx(exact_one.score, rel=0.3)


# Active rows in the batch


class ScriptState(State):
    """The script of each row."""

    def __init__(self, scripts: list[list[list[float]]]) -> None:
        self.scripts, self.time = scripts, 0

    def select(self, rows: Tensor) -> None:
        self.scripts = [self.scripts[i] for i in rows.tolist()]


class ScriptedModel(Seq2Seq):
    """Reads the probabilities of each step from a table and counts the rows of each step."""

    def __init__(self, tables: dict[int, list[list[float]]]) -> None:
        super().__init__()
        self.matrix, self.tables, self.rows = torch.nn.Parameter(torch.zeros(WORDS, 1)), tables, list[int]()

    @property
    def output_weight(self) -> Tensor:
        return self.matrix

    def start(self, source: Tensor | Packed, source_lengths: Tensor | None = None) -> ScriptState:
        assert isinstance(source, Packed)
        return ScriptState([self.tables[part.tolist()[0]] for part in source.split(source.tokens)])

    def step(self, tokens: Tensor, state: State) -> Tensor:
        assert isinstance(state, ScriptState)
        self.rows.append(len(tokens))
        time, state.time = state.time, state.time + 1
        return torch.tensor([script[min(time, len(script) - 1)] for script in state.scripts]).log()


def probabilities(**tokens: float) -> list[float]:
    """Return probabilities of the tokens 2 to 6, named e, a, b, c, d."""
    row = [1e-30] * WORDS
    for name, probability in tokens.items():
        row["eabcd".index(name) + 2] = probability
    return row


def test_finished_hypotheses_and_sentences_leave_the_batch():
    going, ending = probabilities(a=0.6, b=0.4), probabilities(e=0.999, a=0.001)
    model = ScriptedModel({3: [going, ending], 4: [going, going, going, ending]})
    results = search(model, Packed.of([[3], [4], [3]]), Greedy(), max_new_tokens=9)
    assert [h.tokens for (h,) in results] == [[3], [3, 3, 3], [3]]
    assert model.rows == [3, 3, 1, 1]


def test_a_finished_hypothesis_frees_its_slot():
    # one of the two ends after the first step, so one slot remains
    step = probabilities(e=0.5, a=0.3, b=0.2)
    model = ScriptedModel({3: [step]})
    (results,) = search(model, Packed.of([[3]]), Beam(2, length_penalty=0.0, n_best=2), max_new_tokens=3)
    assert [h.tokens for h in results] == [[], [3]]
    assert model.rows == [1, 1]


def test_a_sentence_ends_when_nothing_can_beat_its_best():
    # the best hypothesis ends immediately with 0.9; every continuation has at most 0.1
    model = ScriptedModel({3: [probabilities(e=0.9, a=0.1), probabilities(a=1.0)]})
    (results,) = search(model, Packed.of([[3]]), Beam(2, length_penalty=0.0), max_new_tokens=50)
    assert (results[0].tokens, model.rows) == ([], [1])
    # normalized per token, a continuation can still win: 0.1 ** (1 / 50) > 0.9
    model = ScriptedModel(
        {3: [probabilities(e=0.9, a=0.1), *[probabilities(a=1.0)] * 40, probabilities(e=1.0)]}
    )
    (results,) = search(model, Packed.of([[3]]), Beam(2, length_penalty=1.0), max_new_tokens=50)
    assert results[0].tokens == [3] * 41
    assert results[0].score == pytest.approx(math.log(0.1) / 42)
    # but not within 20 tokens: 0.1 ** (1 / 20) < 0.9
    (results,) = search(model, Packed.of([[3]]), Beam(2, length_penalty=1.0), max_new_tokens=20)
    assert (results[0].tokens, model.rows) == ([], [1] * 43)
    # two hypotheses were requested, and one is still missing
    (results,) = search(model, Packed.of([[3]]), Beam(2, length_penalty=1.0, n_best=2), max_new_tokens=20)
    assert [h.finished for h in results] == [True, False]
    assert [len(h.tokens) for h in results] == [0, 20]


# Sampling


def test_samples_depend_only_on_the_seed():
    model, source = make("transformer"), Packed.of(SOURCES)
    first = search(model, source, Sample(seed=1), max_new_tokens=6)
    assert first == search(model, source, Sample(seed=1), max_new_tokens=6)
    assert any(first != search(model, source, Sample(seed=seed), max_new_tokens=6) for seed in range(2, 5))
    torch.manual_seed(5)
    assert first == search(model, source, Sample(seed=1), max_new_tokens=6)
    many = search(model, source, Sample(seed=1, n_samples=5), max_new_tokens=6)
    for (single,), several in zip(first, many, strict=True):
        assert single.tokens in [h.tokens for h in several]
        assert [h.score for h in several if h.finished] == sorted(
            (h.score for h in several if h.finished), reverse=True
        )


@pytest.mark.parametrize(
    "strategy",
    [Sample(), Sample(temperature=2.0), Sample(temperature=0.5), Sample(top_p=0.6), Sample(top_p=1e-9)],
)
def test_tokens_are_sampled_by_their_probabilities(strategy):
    row = torch.tensor(probabilities(e=0.1, a=0.4, b=0.2, c=0.05, d=0.25))
    model, draws = ScriptedModel({3: [row.tolist()]}), 2_000
    (results,) = search(model, Packed.of([[3]]), replace(strategy, n_samples=draws), max_new_tokens=1)
    seen = Counter(END if h.finished else h.tokens[0] for h in results)
    expected = row ** (1 / strategy.temperature)
    if strategy.top_p == 0.6:
        expected[[2, 4, 5]] = 0  # 0.4 + 0.25 reach the threshold
    elif strategy.top_p < 1e-3:
        expected = (expected == expected.max()).float()
    expected /= expected.sum()
    for token, probability in enumerate(expected.tolist()):
        deviation = math.sqrt(max(probability * (1 - probability), 1e-9) / draws)
        assert abs(seen[token] / draws - probability) <= 5 * deviation


def test_a_nucleus_that_reaches_top_p_exactly_is_complete():
    model = ScriptedModel({3: [probabilities(a=0.25, b=0.25, c=0.25, d=0.25)]})
    (results,) = search(model, Packed.of([[3]]), Sample(top_p=0.5, n_samples=50), max_new_tokens=1)
    assert {h.tokens[0] for h in results} == {3, 4}  # among equal probabilities, the first


def test_sampling_at_low_temperature_is_greedy():
    model, source = make("bahdanau"), Packed.of(SOURCES)
    cold = search(model, source, Sample(temperature=1e-4), max_new_tokens=6)
    assert [h.tokens for (h,) in cold] == [
        h.tokens for (h,) in search(model, source, Greedy(), max_new_tokens=6)
    ]


# Best extensions


@given(
    rows=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    columns=st.integers(1, 600),
    k=st.integers(1, 9),
    seed=st.integers(0, 9),
)
def test_the_best_extensions_are_those_of_all_pairs(rows, columns, k, seed):
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(sum(rows), 2 + columns, generator=draw)
    logits[:, 3::5] = -math.inf
    sentences, totals = numpy.repeat(numpy.arange(len(rows)), rows), numpy.linspace(-1, 1, sum(rows))
    x = (logits.double().log_softmax(-1)).numpy()
    x[:, :2] = -math.inf
    values, tokens = (y.numpy() for y in _best_tokens(logits, min(k, columns), (0, 1)))
    best, parents, ranks = _best_extensions(totals, values, _first_rows(sentences), k)
    for sentence, (scores, found) in enumerate(zip(best, parents, strict=True)):
        every = numpy.sort((totals[:, None] + x)[sentences == sentence].flatten())[::-1]
        valid = scores > -math.inf
        numpy.testing.assert_allclose(scores[valid], every[: valid.sum()], atol=1e-5)
        assert valid.sum() == min(k, (every > -math.inf).sum())
        chosen = tokens[found, ranks[sentence]][valid]
        numpy.testing.assert_allclose((totals[:, None] + x)[found[valid], chosen], scores[valid], atol=1e-5)
        assert len(set(zip(found[valid].tolist(), chosen.tolist(), strict=True))) == valid.sum()


def test_the_best_of_equal_and_of_large_logits():
    logits = torch.zeros(2, 200)
    logits[1, 0] = 1000  # suppressed, but part of the sum
    values, tokens = _best_tokens(logits, 3, (0, 1))
    assert tokens.tolist() == [[2, 3, 4]] * 2  # among equal logits, the first
    torch.testing.assert_close(values, logits.log_softmax(-1)[:, 2:5])


# Errors


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Beam(0), "size=0"),
        (lambda: Beam(2, n_best=3), "Beam got size=2 and n_best=3; n_best cannot exceed size. Use size=3."),
        (lambda: Beam(length_penalty=-1.0), "length_penalty=-1"),
        (lambda: Beam(length_penalty=1000), "length_penalty=1000; it must be at least 0 and at most 100"),
        (lambda: Beam(length_penalty=math.nan), "length_penalty=nan"),
        (lambda: Beam(prune_threshold=-1), "prune_threshold=-1"),
        (lambda: Beam(prune_threshold=math.nan), "prune_threshold=nan"),
        (lambda: Sample(temperature=0), "temperature=0; .*decode greedily"),
        (lambda: Sample(top_p=0.0), "top_p=0.0; it must be above 0 and at most 1"),
        (lambda: Sample(top_p=1.5), "top_p=1.5; it must be above 0 and at most 1"),
        (lambda: Sample(seed=-1), "seed=-1"),
        (lambda: Sample(n_samples=0), "n_samples=0"),
    ],
)
def test_invalid_strategies(make, message):
    with pytest.raises(regard.ArgumentError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"strategy": "beam"}, regard.DTypeError, "strategy='beam'; pass Greedy"),
        ({"max_new_tokens": [3, 4]}, regard.ShapeError, "4 sentences and 2 values for max_new_tokens"),
        ({"max_new_tokens": -1}, regard.ArgumentError, "max_new_tokens=-1"),
        ({"max_new_tokens": [1, 2, -3, 4]}, regard.ArgumentError, "max_new_tokens=-3"),
        ({"max_new_tokens": 2.5}, regard.DTypeError, "max_new_tokens=2.5"),
        ({"source": [[5, 6]]}, regard.DTypeError, "a source of type list"),
    ],
)
def test_invalid_arguments(options, error, message):
    arguments: dict[str, Any] = {"source": Packed.of(SOURCES), "max_new_tokens": 3} | options
    with pytest.raises(error, match=message):
        search(make("dot"), **arguments)


@pytest.mark.parametrize("strategy", [Greedy(), Beam(3), Sample()])
def test_models_that_return_nan_or_too_few_logits(strategy):
    for row, error, message in (
        ([math.nan] * WORDS, regard.ArgumentError, "The model returned NaN"),
        (probabilities(e=1.0)[:-1], regard.ShapeError, "6 logits per row, but output_weight has 7 rows"),
    ):
        with pytest.raises(error, match=message):
            search(ScriptedModel({3: [row]}), Packed.of([[3]]), strategy, max_new_tokens=3)


# Cross-attention weights


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_recorded_weights_equal_those_of_forced_decoding(precision):
    if not fused.available():
        pytest.skip("queries are recorded by fast decoding steps, which need the kernels")
    torch.manual_seed(0)
    model = quantize(Transformer(WORDS, replace(CONFIG, key_heads=1)).eval(), precision)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    sources = [*SOURCES, [4, 5, 2], [6, 6, 6, 2]]
    for strategy in (Greedy(), Beam(4, n_best=3), Sample(n_samples=2)):
        results = search(model, Packed.of(sources), strategy, max_new_tokens=6, attention_layer=-2)
        plain = search(model, Packed.of(sources), strategy, max_new_tokens=6)
        assert [[h[:4] for h in ranked] for ranked in results] == [[h[:4] for h in row] for row in plain]
        pairs = [
            (source, h) for source, ranked in zip(sources, results, strict=True) for h in ranked if h.tokens
        ]
        targets = [h.tokens for _, h in pairs]
        for shift in ("input", "output"):
            head = AlignmentHead(layer=-2, heads=(1,), shift=shift)
            expected = cross_weights(model, [source[:-1] for source, _ in pairs], targets, head)
            for (source, h), matrix in zip(pairs, expected, strict=True):
                if h.finished or shift == "output":
                    rows = drop_special_tokens(h.weights[1], len(h.tokens), len(source) - 1, shift)
                    torch.testing.assert_close(torch.from_numpy(rows), matrix, atol=1e-5, rtol=1e-4)


def test_models_that_record_nothing_return_no_weights():
    for name in ("bahdanau", "entmax15"):
        (ranked,) = search(make(name), Packed.of(SOURCES[:1]), max_new_tokens=3, attention_layer=0)
        assert ranked[0].weights is None
