"""The loss and greedy decoding of the base class Seq2Seq."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from regard.errors import ArgumentError, DTypeError, ShapeError
from regard.models import Packed, Transformer, TransformerConfig
from regard.models.recurrent import RecurrentConfig, RecurrentSeq2Seq
from regard.models.seq2seq import Seq2Seq, State
from tests.cases import looped

START, END, WORDS = 1, 2, 11

pytestmark = pytest.mark.usefixtures("one_thread")


def make() -> RecurrentSeq2Seq:
    torch.manual_seed(0)
    return RecurrentSeq2Seq(WORDS, RecurrentConfig(width=6, attention="dot", dropout=0.0)).double().eval()


SOURCE = Packed.of([[3, 4, 5], [6], [7, 8]])
TARGET = Packed.of([[START, 5, END], [START, END], [START, 6, 7, 8, END]])


class Told(State):
    """The index of the next token in each row."""

    def __init__(self, scripts: list[list[int]]) -> None:
        self.scripts, self.time = scripts, 0

    def select(self, rows: Tensor) -> None:
        self.scripts = [self.scripts[i] for i in rows.tolist()]


class Teller(Seq2Seq):
    """A model that outputs its source."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.read = torch.nn.Parameter(torch.zeros(WORDS, 1)), list[list[int]]()

    @property
    def output_weight(self) -> Tensor:
        return self.matrix

    def start(self, source: Tensor | Packed, source_lengths: Tensor | None = None) -> Told:
        assert isinstance(source, Packed)
        return Told([part.tolist() for part in source.split(source.tokens)])

    def step(self, tokens: Tensor, state: State) -> Tensor:
        assert isinstance(state, Told)
        self.read.append(tokens.tolist())
        words = [script[state.time] if state.time < len(script) else END for script in state.scripts]
        state.time += 1
        return F.one_hot(torch.tensor(words), WORDS).float()


# The loss


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_is_the_cross_entropy_of_the_logits(smoothing: float) -> None:
    model = make()
    logits = model(SOURCE, TARGET.inputs())
    expected = F.cross_entropy(logits, TARGET.labels().tokens, label_smoothing=smoothing)
    torch.testing.assert_close(model.loss(SOURCE, TARGET, label_smoothing=smoothing), expected)


@pytest.mark.parametrize("value", [0, -100, 10**6])
def test_padding_is_ignored(value: int) -> None:
    model = make()
    sources, targets = SOURCE.pad(SOURCE.tokens, value), TARGET.pad(TARGET.tokens, value)
    actual = model.loss(sources, targets, source_lengths=SOURCE.lengths, target_lengths=TARGET.lengths)
    torch.testing.assert_close(actual, model.loss(SOURCE, TARGET))
    actual.backward()
    padded = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model.loss(SOURCE, TARGET).backward()
    torch.testing.assert_close(padded, [parameter.grad for parameter in model.parameters()])


def test_loss_is_a_mean_over_tokens() -> None:
    model = make()
    parts = [
        model.loss(Packed.of([x.tolist()]), Packed.of([y.tolist()])) * (len(y) - 1)
        for x, y in zip(SOURCE.split(SOURCE.tokens), TARGET.split(TARGET.tokens), strict=True)
    ]
    mean = torch.stack(parts).sum() / (len(TARGET.tokens) - len(TARGET))
    torch.testing.assert_close(model.loss(SOURCE, TARGET), mean)


def test_loss_without_gradients() -> None:
    model = make()
    with torch.no_grad():
        assert not model.loss(SOURCE, TARGET).requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(model.loss(SOURCE, TARGET).item(), make().loss(SOURCE, TARGET).item())


def test_lengths_are_not_modified() -> None:
    lengths = TARGET.lengths.clone()
    make().loss(SOURCE, TARGET.pad(TARGET.tokens), target_lengths=lengths)
    assert torch.equal(lengths, TARGET.lengths)


def test_target_needs_two_tokens() -> None:
    model = make()
    with pytest.raises(ArgumentError, match=r"Target sentence 1 has length 1; .* start and end"):
        model.loss(SOURCE, Packed.of([[1, 2], [1], [1, 2]]))
    with pytest.raises(ArgumentError, match="Target sentence 2 has length 1"):
        model.loss(SOURCE, TARGET.pad(TARGET.tokens), target_lengths=torch.tensor([3, 2, 1]))
    with pytest.raises(DTypeError, match="target is a list"):
        model.loss(SOURCE, [[1, 2]])  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"shape \(3, 1\)"):
        model.loss(SOURCE, torch.ones(3, 1, dtype=torch.long))
    with pytest.raises(ArgumentError, match="Label 11 is out of range for a vocabulary of 11"):
        model.loss(SOURCE, Packed.of([[1, 2], [1, 11], [1, 2]]))
    with pytest.raises(ArgumentError, match=r"target is Packed.* 3 lengths; omit target_lengths"):
        model.loss(SOURCE, TARGET, target_lengths=TARGET.lengths)


# Step by step


@torch.no_grad()
@settings(max_examples=40)
@given(
    config=st.sampled_from(
        [
            TransformerConfig(width=8, heads=2, layers=2, positions="rotary"),
            *(RecurrentConfig(width=8, attention=kind) for kind in ("none", "additive", "concat")),
            RecurrentConfig(width=8, attention="dot", cell="gru", input_feeding=True),
        ]
    ),
    selections=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=7), min_size=1, max_size=5),
)
def test_rows_are_independent_after_select(config: Any, selections: list[list[int]]) -> None:
    torch.manual_seed(0)
    kind = Transformer if isinstance(config, TransformerConfig) else RecurrentSeq2Seq
    model = kind(WORDS, config).double().eval()
    sentences, state = [part.tolist() for part in SOURCE.split(SOURCE.tokens)], model.start(SOURCE)
    rows = [(sentence, [START]) for sentence in sentences]
    for selection in selections:
        chosen = [row % len(rows) for row in selection]
        model.step(torch.tensor([written[-1] for _, written in rows]), state)
        state.select(torch.tensor(chosen))
        rows = [(rows[row][0], [*rows[row][1], 3 + i]) for i, row in enumerate(chosen)]
    assert len(state) == len(rows)
    actual = model.step(torch.tensor([written[-1] for _, written in rows]), state)
    target = Packed.of([written for _, written in rows])
    expected = model(Packed.of([sentence for sentence, _ in rows]), target)[target.ends()]
    torch.testing.assert_close(actual, expected)


# Greedy decoding


def test_greedy_stops_at_the_end_token() -> None:
    scripts = [[5, END, 9, 9], [END, 9], [6, 7, 8], [3, 4, END]]
    model = Teller()
    actual = model.greedy(Packed.of(scripts), start=START, end=END, max_new_tokens=10)
    assert actual == [[5], [], [6, 7, 8], [3, 4]]
    assert model.read == [[START] * 4, [5, 6, 3], [7, 4], [8]]  # only unfinished sentences


@looped("most", [0, 1, 2, 3])
def test_greedy_respects_max_new_tokens(most: int) -> None:
    actual = Teller().greedy(Packed.of([[5, END], [6, 7, 8]]), start=START, end=END, max_new_tokens=most)
    assert actual == [[5][:most], [6, 7, 8][:most]]


def test_greedy_takes_the_argmax() -> None:
    model = make()
    actual = model.greedy(SOURCE, start=START, end=END, max_new_tokens=5)
    padded = model.greedy(
        SOURCE.pad(SOURCE.tokens), source_lengths=SOURCE.lengths, start=START, end=END, max_new_tokens=5
    )
    assert actual == padded
    assert any(actual)
    for tokens, sentence in zip(SOURCE.split(SOURCE.tokens), actual, strict=True):
        said = torch.tensor([[START, *sentence]])
        likeliest = model(tokens[None], said)[0].argmax(-1).tolist()
        assert likeliest[: len(sentence)] == sentence
        assert len(sentence) == 5 or likeliest[-1] == END


def test_invalid_greedy_arguments() -> None:
    with pytest.raises(ArgumentError, match="max_new_tokens=-1"):
        make().greedy(SOURCE, start=START, end=END, max_new_tokens=-1)
    with pytest.raises(DTypeError, match="end=None"):
        make().greedy(SOURCE, start=START, end=None, max_new_tokens=3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="Token 11 is out of range"):
        make().greedy(SOURCE, start=11, end=END, max_new_tokens=3)


def test_base_class_names_missing_methods() -> None:
    model = Seq2Seq()
    assert model.output_bias is None
    for call in (
        lambda: model.output_weight,
        lambda: model.hidden(SOURCE, TARGET),
        lambda: model.start(SOURCE),
        lambda: model.step(torch.tensor([1]), State()),
        lambda: State().select(torch.tensor([0])),
        lambda: len(State()),
    ):
        with pytest.raises(NotImplementedError, match="must implement"):
            call()
