"""Search finds what it says: the best by a plain beam search, by enumeration, and whatever the batch."""

import itertools
import math
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard.models import Packed, RecurrentConfig, RecurrentSeq2Seq, Transformer, TransformerConfig
from regard.models.seq2seq import Seq2Seq, State
from regard.translation.decoding.search import Beam, Greedy, Hypothesis, Sample, _best, _Live, search

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
def made(name: str, words: int = WORDS, seed: int = 0) -> Any:
    """A model in float64 that is sure enough of itself to have its own opinion of each sentence."""
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
    """Log probabilities of each next token after the start mark and after each that is written, t V."""
    target, training = Packed.of([[START, *words] for words in written]), model.training
    with torch.no_grad():
        logits = model.eval()(Packed.of([source] * len(written)), target)
    model.train(training)
    return list(target.split(logits.log_softmax(-1)))


def plainly(
    model: Seq2Seq, source: list[int], beam: Beam, most: int, never: tuple[int, ...] = (PADDING,)
) -> list[Hypothesis]:
    """The same search by lists, one sentence alone, without caches and until nothing is left to extend."""
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    found: list[Hypothesis] = []
    for size in range(1, most + 1):
        if not live:
            break
        extended = []
        rows = follow(model, source, *(written for _, written in live))
        for (total, written), chances in zip(live, rows, strict=True):
            words = [word for word in range(WORDS) if word not in (START, *never)]
            extended += [(total + float(chances[-1, word]), [*written, word]) for word in words]
        extended.sort(key=lambda pair: -pair[0])
        live = []
        for total, written in extended[: beam.size - len(found)]:
            if total < extended[0][0] - beam.within:
                break
            if written[-1] == END:
                found.append(Hypothesis(written[:-1], total / size**beam.length, total, True))
            else:
                live.append((total, written))
    rest = [Hypothesis(written, total / max(most, 1) ** beam.length, total, False) for total, written in live]
    return sorted(found + rest, key=lambda h: (h.finished, h.score), reverse=True)[: beam.best]


def same(found: list[Hypothesis], wanted: list[Hypothesis]) -> None:
    assert [h.tokens for h in found] == [h.tokens for h in wanted]
    assert [h.finished for h in found] == [h.finished for h in wanted]
    assert [h.score for h in found] == pytest.approx([h.score for h in wanted], rel=1e-9)
    assert [h.log_probability for h in found] == pytest.approx([h.log_probability for h in wanted], rel=1e-9)


# Beam search


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_is_searched_as_each_sentence_alone_by_lists(name: str) -> None:
    model, beam, most = made(name), Beam(3, best=3), [6, 4, 7, 5]
    found = search(model, Packed.of(SOURCES), beam, most=most)
    for source, limit, hypotheses in zip(SOURCES, most, found, strict=True):
        same(hypotheses, plainly(model, source, beam, limit))


@settings(max_examples=30)
@given(
    name=st.sampled_from(["transformer", "bahdanau", "general, fed"]),
    seed=st.integers(0, 3),
    sources=st.lists(st.lists(st.integers(2, WORDS - 1), min_size=1, max_size=5), min_size=1, max_size=5),
    size=st.integers(1, 12),
    length=st.sampled_from([0.0, 0.6, 1.0, 2.0]),
    never=st.sampled_from([(), (0,), (0, 4)]),
    data=st.data(),
)
def test_any_beam_is_what_lists_give(
    name: str,
    seed: int,
    sources: list[list[int]],
    size: int,
    length: float,
    never: tuple[int, ...],
    data: st.DataObject,
) -> None:
    within = data.draw(st.sampled_from([math.inf, math.inf, 2.0, 0.0]))
    model, beam = made(name, seed=seed), Beam(size, length, data.draw(st.integers(1, size)), within)
    most = [data.draw(st.integers(0, 6)) for _ in sources]
    found = search(model, Packed.of(sources), beam, most=most, never=never)
    for source, limit, hypotheses in zip(sources, most, found, strict=True):
        same(hypotheses, plainly(model, source, beam, limit, never))


@pytest.mark.parametrize("length", [0.0, 0.5, 1.0, 1.7])
@pytest.mark.parametrize("name", ["transformer", "bahdanau"])
def test_a_beam_that_holds_everything_finds_the_best_of_all(name: str, length: float) -> None:
    model, most = made(name), 4
    words = [word for word in range(WORDS) if word not in (PADDING, START, END)]
    everything = Beam(len(words) ** most * 2, length, best=10)
    for source, found in zip(SOURCES, search(model, Packed.of(SOURCES), everything, most=most), strict=True):
        every = []
        for size in range(most):
            written = [list(some) for some in itertools.product(words, repeat=size)]
            for some, rows in zip(written, follow(model, source, *written), strict=True):
                total = float(rows[torch.arange(size + 1), torch.tensor([*some, END])].sum())
                every.append((total / (size + 1) ** length, some))
        every.sort(reverse=True)
        assert [h.tokens for h in found] == [written for _, written in every[:10]]
        assert [h.score for h in found] == pytest.approx([score for score, _ in every[:10]])
        assert all(h.finished for h in found)


@pytest.mark.parametrize("how", [Greedy(), Beam(4, 0.7, best=4), Sample(seed=3, best=4, temperature=2.0)])
@pytest.mark.parametrize("name", ["transformer", "concat, fed"])
def test_log_probabilities_are_the_model_s_own(name: str, how: Any) -> None:
    model = made(name)
    for source, found in zip(SOURCES, search(model, Packed.of(SOURCES), how, most=6), strict=True):
        for hypothesis in found:
            words = [*hypothesis.tokens, END] if hypothesis.finished else hypothesis.tokens
            (rows,) = follow(model, source, words[:-1])
            total = float(rows[torch.arange(len(words)), torch.tensor(words)].sum())
            assert hypothesis.log_probability == pytest.approx(total, rel=1e-9)
            exponent = {Greedy: 1.0, Beam: 0.7, Sample: 0.0}[type(how)]
            assert hypothesis.score == pytest.approx(total / len(words) ** exponent)


@pytest.mark.parametrize("name", MODELS)
def test_hypotheses_are_sorted_distinct_and_within_bounds(name: str) -> None:
    found = search(made(name), Packed.of(SOURCES), Beam(6, best=6), most=5, never=(PADDING, 3))
    for hypotheses in found:
        order = [(h.finished, h.score) for h in hypotheses]
        assert order == sorted(order, reverse=True)
        assert len({(*h.tokens, h.finished) for h in hypotheses}) == len(hypotheses) == 6
        assert not {PADDING, START, END, 3} & {token for h in hypotheses for token in h.tokens}
        assert all(len(h.tokens) <= (4 if h.finished else 5) for h in hypotheses)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_is_a_beam_of_one_and_the_likeliest_each_time(name: str) -> None:
    model, source = made(name), Packed.of(SOURCES)
    found = search(model, source, Greedy(), most=6)
    assert found == search(model, source, Beam(1), most=6)
    for sentence, (hypothesis,) in zip(SOURCES, found, strict=True):
        (chances,) = follow(model, sentence, hypothesis.tokens)
        chances[:, [PADDING, START]] = -math.inf
        likeliest = chances.argmax(-1).tolist()
        assert likeliest[: len(hypothesis.tokens)] == hypothesis.tokens
        assert hypothesis.finished == (len(hypothesis.tokens) < 6)
        assert not hypothesis.finished or likeliest[-1] == END


def test_the_models_own_greedy_says_the_same() -> None:
    model = made("dot")
    with torch.no_grad():
        model.bias[:2] = -1e3  # it does not keep itself from writing marks
    found = [h.tokens for (h,) in search(model, Packed.of(SOURCES), Greedy(), most=6)]
    assert found == model.greedy(Packed.of(SOURCES), start=START, end=END, max_new_tokens=6)
    made.cache_clear()


@pytest.mark.parametrize("how", [Greedy(), Beam(4, best=3), Sample(best=3, top_p=0.9)])
@pytest.mark.parametrize("name", MODELS)
def test_the_batch_does_not_matter(name: str, how: Any) -> None:
    model = made(name)
    together = search(model, Packed.of(SOURCES), how, most=6)
    for source, found in zip(SOURCES, together, strict=True):
        same(search(model, Packed.of([source]), how, most=6)[0], found)
    backwards = search(model, Packed.of(SOURCES[::-1] * 2), how, most=6)
    for found, wanted in zip(backwards, together[::-1] * 2, strict=True):
        same(found, wanted)


def test_no_sentences_and_no_tokens() -> None:
    for how in (Greedy(), Beam(), Sample()):
        assert search(made("dot"), Packed.of([]), how, most=5) == []
        assert search(made("dot"), Packed.of(SOURCES), how, most=0) == [[Hypothesis([], 0.0, 0.0, False)]] * 4
    found = search(made("dot"), Packed.of(SOURCES), most=[0, 3, 0, 2])
    assert [len(h.tokens) > 0 or h.finished for (h,) in found] == [False, True, False, True]


def test_searching_leaves_the_model_as_it_was() -> None:
    model = made("transformer").train()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    assert search(model, Packed.of(SOURCES), most=6) == search(model, Packed.of(SOURCES), most=6)
    assert model.training
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_a_start_mark_may_be_the_end_mark() -> None:
    model = made("transformer")
    found = search(model, Packed.of(SOURCES), Beam(3), start=END, end=END, most=6)
    assert any(h.finished for (h,) in found)
    assert all(END not in h.tokens for (h,) in found)


def test_other_floats_find_much_the_same() -> None:
    exact, model = made("transformer"), Transformer(WORDS, CONFIG)
    model.load_state_dict(exact.state_dict())
    wanted = search(exact, Packed.of(SOURCES), Beam(3), most=6)
    single = search(model, Packed.of(SOURCES), Beam(3), most=6)
    half = search(model.bfloat16(), Packed.of(SOURCES), Beam(3), most=6)
    for (ours,), (other,), (rough,) in zip(wanted, single, half, strict=True):
        assert other.score == pytest.approx(ours.score, rel=1e-4)
        assert rough.score == pytest.approx(ours.score, rel=0.3)


# Who is in the batch


class Told(State):
    """The script of each row."""

    def __init__(self, scripts: list[list[list[float]]]) -> None:
        self.scripts, self.time = scripts, 0

    def select(self, rows: Tensor) -> None:
        self.scripts = [self.scripts[i] for i in rows.tolist()]


class Teller(Seq2Seq):
    """Has chances for each step from a table, whatever is written; counts the rows of each step."""

    def __init__(self, tables: dict[int, list[list[float]]]) -> None:
        super().__init__()
        self.matrix, self.tables, self.rows = torch.nn.Parameter(torch.zeros(WORDS, 1)), tables, list[int]()

    @property
    def output_weight(self) -> Tensor:
        return self.matrix

    def start(self, source: Tensor | Packed, source_lengths: Tensor | None = None) -> Told:
        assert isinstance(source, Packed)
        return Told([self.tables[part.tolist()[0]] for part in source.split(source.tokens)])

    def step(self, tokens: Tensor, state: State) -> Tensor:
        assert isinstance(state, Told)
        self.rows.append(len(tokens))
        time, state.time = state.time, state.time + 1
        return torch.tensor([script[min(time, len(script) - 1)] for script in state.scripts]).log()


def chances(**given: float) -> list[float]:
    """Of the tokens 2 to 6, as e, a, b, c, d."""
    found = [1e-30] * WORDS
    for name, chance in given.items():
        found["eabcd".index(name) + 2] = chance
    return found


def test_finished_hypotheses_and_sentences_leave_the_batch() -> None:
    going, ending = chances(a=0.6, b=0.4), chances(e=0.999, a=0.001)
    model = Teller({3: [going, ending], 4: [going, going, going, ending]})
    found = search(model, Packed.of([[3], [4], [3]]), Greedy(), most=9)
    assert [h.tokens for (h,) in found] == [[3], [3, 3, 3], [3]]
    assert model.rows == [3, 3, 1, 1]


def test_a_hypothesis_that_ends_gives_up_its_place() -> None:
    # one of two ends after the first step, and so one place is left
    step = chances(e=0.5, a=0.3, b=0.2)
    model = Teller({3: [step]})
    (found,) = search(model, Packed.of([[3]]), Beam(2, length=0.0, best=2), most=3)
    assert [h.tokens for h in found] == [[], [3]]
    assert model.rows == [1, 1]


def test_a_sentence_leaves_when_nothing_can_beat_what_it_has() -> None:
    # the best ends at once with 0.9; what goes on has at most 0.1, whatever comes
    model = Teller({3: [chances(e=0.9, a=0.1), chances(a=1.0)]})
    (found,) = search(model, Packed.of([[3]]), Beam(2, length=0.0), most=50)
    assert (found[0].tokens, model.rows) == ([], [1])
    # with the mean it can: 0.1 ** (1 / 50) > 0.9
    model = Teller({3: [chances(e=0.9, a=0.1), *[chances(a=1.0)] * 40, chances(e=1.0)]})
    (found,) = search(model, Packed.of([[3]]), Beam(2, length=1.0), most=50)
    assert found[0].tokens == [3] * 41
    assert found[0].score == pytest.approx(math.log(0.1) / 42)
    # but not within 20 tokens: 0.1 ** (1 / 20) < 0.9
    (found,) = search(model, Packed.of([[3]]), Beam(2, length=1.0), most=20)
    assert (found[0].tokens, model.rows) == ([], [1] * 43)
    # two were asked for, and one is still missing
    (found,) = search(model, Packed.of([[3]]), Beam(2, length=1.0, best=2), most=20)
    assert [h.finished for h in found] == [True, False]
    assert [len(h.tokens) for h in found] == [0, 20]


# Sampling


def test_samples_follow_seeds_and_nothing_else() -> None:
    model, source = made("transformer"), Packed.of(SOURCES)
    first = search(model, source, Sample(seed=1), most=6)
    assert first == search(model, source, Sample(seed=1), most=6)
    assert any(first != search(model, source, Sample(seed=seed), most=6) for seed in range(2, 5))
    torch.manual_seed(5)
    assert first == search(model, source, Sample(seed=1), most=6)
    many = search(model, source, Sample(seed=1, best=5), most=6)
    for (one,), several in zip(first, many, strict=True):
        assert one.tokens in [h.tokens for h in several]
        assert [h.score for h in several if h.finished] == sorted(
            (h.score for h in several if h.finished), reverse=True
        )


@pytest.mark.parametrize(
    "how", [Sample(), Sample(temperature=2.0), Sample(temperature=0.5), Sample(top_p=0.6), Sample(top_p=1e-9)]
)
def test_tokens_are_drawn_by_their_chances(how: Sample) -> None:
    given = torch.tensor(chances(e=0.1, a=0.4, b=0.2, c=0.05, d=0.25))
    model, draws = Teller({3: [given.tolist()]}), 4_000
    (found,) = search(model, Packed.of([[3]]), replace(how, best=draws), most=1)
    seen = Counter(END if h.finished else h.tokens[0] for h in found)
    wanted = given ** (1 / how.temperature)
    if how.top_p == 0.6:
        wanted[[2, 4, 5]] = 0  # 0.4 and 0.25 are the first to reach it
    elif how.top_p < 1e-3:
        wanted = (wanted == wanted.max()).float()
    wanted /= wanted.sum()
    for token, share in enumerate(wanted.tolist()):
        spread = math.sqrt(max(share * (1 - share), 1e-9) / draws)
        assert abs(seen[token] / draws - share) <= 5 * spread


def test_a_cold_sample_is_the_likeliest() -> None:
    model, source = made("bahdanau"), Packed.of(SOURCES)
    cold = search(model, source, Sample(temperature=1e-4), most=6)
    assert [h.tokens for (h,) in cold] == [h.tokens for (h,) in search(model, source, Greedy(), most=6)]


# The best of a vocabulary


@settings(max_examples=60)
@given(
    rows=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    columns=st.integers(1, 600),
    k=st.integers(1, 9),
    seed=st.integers(0, 9),
)
def test_the_best_by_blocks_are_the_best(rows: list[int], columns: int, k: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(rows), columns, generator=draw)
    x[:, 1::5] = -math.inf
    sentences = torch.arange(len(rows)).repeat_interleave(torch.tensor(rows))
    totals = torch.randn(sum(rows), generator=draw).double()
    first = torch.tensor([sum(rows[:i]) for i in range(len(rows))])
    found = _best(_Live(sentences, sentences, totals, sentences[:, None]), x, first, k)
    every = (totals[:, None] + x).split(rows)
    for wanted, values, parents, tokens in zip(every, *found, strict=True):
        likely = wanted.flatten().sort(descending=True).values[:k]
        assert torch.equal(values[: len(likely)], likely)
        assert bool((values[len(likely) :] == -math.inf).all())
        there = values > -math.inf
        parents, tokens = parents[there], tokens[there]
        assert torch.equal((totals[:, None] + x)[parents, tokens], values[there])
        assert len(set(zip(parents.tolist(), tokens.tolist(), strict=True))) == len(parents)


# What cannot be


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Beam(0), "size=0"),
        (lambda: Beam(2, best=3), "size=2 and best=3"),
        (lambda: Beam(length=-1.0), "length=-1"),
        (lambda: Beam(length=math.nan), "length=nan"),
        (lambda: Beam(within=-1), "within=-1"),
        (lambda: Beam(within=math.nan), "within=nan"),
        (lambda: Sample(temperature=0), r"temperature=0; .*Greedy\(\)"),
        (lambda: Sample(top_p=0.0), "top_p=0.0; it must be above 0 and at most 1"),
        (lambda: Sample(top_p=1.5), "top_p=1.5; it must be above 0 and at most 1"),
        (lambda: Sample(seed=-1), "seed=-1"),
        (lambda: Sample(best=0), "best=0"),
    ],
)
def test_ways_to_search_that_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(regard.ArgumentError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"how": "beam"}, regard.DTypeError, "how='beam'; give Greedy"),
        ({"most": [3, 4]}, regard.ShapeError, "4 sentences and most with 2 numbers"),
        ({"most": -1}, regard.ArgumentError, "most=-1"),
        ({"most": [1, 2, -3, 4]}, regard.ArgumentError, "most=-3"),
        ({"most": 2.5}, regard.DTypeError, "most=2.5"),
        ({"end": WORDS}, regard.ArgumentError, f"token {WORDS} is outside"),
        ({"never": [END]}, regard.ArgumentError, r"end=2 and never=\(2,\); leave it out"),
        ({"never": [99]}, regard.ArgumentError, "token 99 is outside"),
        ({"source": [[5, 6]]}, regard.DTypeError, "a source of type list"),
    ],
)
def test_searches_that_cannot_be(options: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"source": Packed.of(SOURCES), "most": 3} | options
    with pytest.raises(error, match=message):
        search(made("dot"), **arguments)


def test_a_model_with_too_few_logits_is_told() -> None:
    model = Teller({3: [chances(e=1.0)[:-1]]})
    with pytest.raises(regard.ShapeError, match="gave 6 logits, and its output_weight has 7 rows"):
        search(model, Packed.of([[3]]), most=3)


@pytest.mark.parametrize("how", [Greedy(), Beam(3), Sample()])
def test_a_broken_model_is_told(how: Any) -> None:
    model = Teller({3: [[math.nan] * WORDS]})
    with pytest.raises(regard.ArgumentError, match="the model gave NaN"):
        search(model, Packed.of([[3]]), how, most=3)
