"""Recurrent sequence-to-sequence models: their equations, and invariance to padding, batch and format."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import regard
from regard.errors import ArgumentError, DTypeError, RegardError, ShapeError
from regard.models import Packed
from regard.models.recurrent import RecurrentConfig, RecurrentSeq2Seq
from regard.models.recurrent_cells import SourceAttention
from tests.cases import looped

START, END, SOURCE, TARGET, WIDTH = 1, 2, 11, 13, 14

KINDS = {
    f"{cell} {attention}{' fed' if input_feeding else ''}": RecurrentConfig(
        width=WIDTH, cell=cell, attention=attention, input_feeding=input_feeding, dropout=0.0
    )
    for cell in ("lstm", "gru")
    for attention, input_feeding in (
        ("none", False),
        ("additive", False),
        ("dot", False),
        ("general", False),
        ("concat", False),
        ("dot", True),
        ("general", True),
        ("concat", True),
    )
}
MORE = {
    "deep none": replace(KINDS["lstm none"], layers=3),
    "deep additive": replace(KINDS["lstm additive"], layers=2),
    "deep additive gru": replace(KINDS["gru additive"], layers=2, bidirectional=False),
    "deep fed": replace(KINDS["gru general fed"], layers=2),
    "one way, reversed": replace(KINDS["lstm none"], bidirectional=False, reverse=True, layers=2),
    "one way": replace(KINDS["lstm additive"], bidirectional=False),
    "reversed": replace(KINDS["gru dot"], reverse=True),
}
CONFIGS = KINDS | MORE
FEW = {
    name: CONFIGS[name] for name in ("lstm none", "gru additive", "lstm general", "gru dot fed", "deep fed")
}
ATTENDING = {name: config for name, config in CONFIGS.items() if config.attention != "none"}

every = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
some = pytest.mark.parametrize("config", FEW.values(), ids=FEW)
attending = pytest.mark.parametrize("config", ATTENDING.values(), ids=ATTENDING)

pytestmark = pytest.mark.usefixtures("one_thread")


def make(config: RecurrentConfig, *, share: bool = False) -> RecurrentSeq2Seq:
    torch.manual_seed(0)
    vocabulary = TARGET if share else (SOURCE, TARGET)
    return RecurrentSeq2Seq(vocabulary, config, share=share).double().eval()


def batch() -> tuple[Packed, Packed]:
    generator = torch.Generator().manual_seed(1)

    def draw(lengths: list[int], words: int) -> Packed:
        return Packed(torch.randint(0, words, (sum(lengths),), generator=generator), torch.tensor(lengths))

    return draw([3, 7, 1, 5, 7], SOURCE), draw([5, 2, 3, 1, 2], TARGET)


def padded(packed: Packed, value: int = 0) -> tuple[Tensor, Tensor]:
    return packed.pad(packed.tokens, value), packed.lengths


def steps(model: RecurrentSeq2Seq, source: Tensor, target: Tensor) -> Tensor:
    """Compute the logits step by step, (b, t, V)."""
    state = model.start(source)
    return torch.stack([model.step(tokens, state) for tokens in target.unbind(1)], 1)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


# Learning


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(config, id=name, marks=[pytest.mark.slow] * (name not in FEW))
        for name, config in CONFIGS.items()
    ],
)
@pytest.mark.sampled(3)
def test_model_memorizes_a_few_sentences(config: RecurrentConfig) -> None:
    torch.manual_seed(0)
    sentences = [[3, 4, 5], [5, 4], [6, 7, 8, 9], [7], [8, 3, 8], [9, 6], [4, 4, 6], [3, 9, 7, 5]]
    source = Packed.of(sentences)
    target = Packed.of([[START, *reversed(sentence), END] for sentence in sentences])
    model = RecurrentSeq2Seq(SOURCE, replace(config, width=24))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(150):
        optimizer.zero_grad()
        loss = model.loss(source, target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if loss.item() < 0.05:
            break
    actual = model.eval().greedy(source, start=START, end=END, max_new_tokens=7)
    assert actual == [sentence[::-1] for sentence in sentences]


@every
@pytest.mark.sampled(4)
def test_gradients_reach_every_parameter(config: RecurrentConfig) -> None:
    model = make(config).train()
    source, target = batch()
    model.loss(source, Packed(target.tokens, torch.tensor([5, 2, 2, 2, 2])), label_smoothing=0.1).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(torch.isfinite(parameter.grad).all()), name
        assert bool(parameter.grad.any()), name


@every
@pytest.mark.sampled(3)
def test_gradient_equals_finite_differences(config: RecurrentConfig) -> None:
    model = make(config)
    source, target = batch()
    names = [name for name, _ in model.named_parameters()]
    torch.manual_seed(3)
    direction = [torch.randn_like(parameter) for parameter in model.parameters()]

    def loss(by: float) -> Tensor:
        moved = {
            name: parameter + by * way
            for (name, parameter), way in zip(model.named_parameters(), direction, strict=True)
        }
        logits = torch.func.functional_call(model, moved, (source, target))
        return logits.tanh().sum()

    grads = torch.autograd.grad(loss(0.0), list(model.parameters()), allow_unused=True)
    slope = sum((grad * way).sum() for grad, way in zip(grads, direction, strict=True) if grad is not None)
    assert len(names) == len(grads)
    with torch.no_grad():
        difference = (loss(1e-5) - loss(-1e-5)) / 2e-5
    torch.testing.assert_close(slope, difference, rtol=1e-5, atol=1e-5)


def test_dropout_only_in_training() -> None:
    model = make(replace(CONFIGS["deep fed"], dropout=0.5))
    source, target = batch()
    close(model(source, target), model(source, target))
    model.train()
    assert not torch.allclose(model(source, target), model(source, target))


# Invariances


@every
@pytest.mark.sampled(3)
def test_packed_equals_padded(config: RecurrentConfig) -> None:
    model = make(config)
    source, target = batch()
    (sources, source_lengths), (targets, target_lengths) = padded(source), padded(target)
    at_once = model(source, target)
    assert at_once.shape == (len(target.tokens), TARGET)
    lengths = {"source_lengths": source_lengths, "target_lengths": target_lengths}
    both = model(sources, targets, **lengths)
    assert both.shape == (*targets.shape, TARGET)
    close(both[target.sentences, target.positions], at_once)
    close(model(sources, target, source_lengths=source_lengths), at_once)  # one batch of each kind
    longer = nn.functional.pad(sources, (0, 3), value=4), nn.functional.pad(targets, (0, 2), value=5)
    close(model(*longer, **lengths)[target.sentences, target.positions], at_once)


@every
@pytest.mark.sampled(4)
def test_padding_content_is_irrelevant(config: RecurrentConfig) -> None:
    model = make(config)
    source, target = batch()
    for value in (5, -1, 10**6):
        (sources, source_lengths), (targets, target_lengths) = padded(source, value), padded(target, value)
        actual = model(sources, targets, source_lengths=source_lengths, target_lengths=target_lengths)
        close(actual[target.sentences, target.positions], model(source, target))
        assert torch.isfinite(actual).all()


@every
@pytest.mark.sampled(4)
def test_sentence_does_not_depend_on_the_batch(config: RecurrentConfig) -> None:
    model = make(config)
    source, target = batch()
    together = target.split(model(source, target))
    sources, targets = source.split(source.tokens), target.split(target.tokens)
    for x, y, logits in zip(sources, targets, together, strict=True):
        close(model(x[None], y[None])[0], logits)
    order = [3, 0, 4, 2, 1]
    shuffled = (
        Packed.of([sources[i].tolist() for i in order]),
        Packed.of([targets[i].tolist() for i in order]),
    )
    for i, logits in zip(order, shuffled[1].split(model(*shuffled)), strict=True):
        close(logits, together[i])


@every
@pytest.mark.sampled(3)
def test_decoder_is_causal(config: RecurrentConfig) -> None:
    model = make(config)
    source, target = torch.randint(0, SOURCE, (2, 5)), torch.randint(0, TARGET, (2, 7))
    changed = target.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % TARGET
    close(model(source, changed)[:, :4], model(source, target)[:, :4])
    assert not torch.allclose(model(source, changed)[:, 4:], model(source, target)[:, 4:])


@every
@pytest.mark.sampled(4)
def test_reverse_equals_reversing_the_source(config: RecurrentConfig) -> None:
    model, other = make(replace(config, reverse=False)), make(replace(config, reverse=True))
    source, target = batch()
    turned = Packed(torch.cat([part.flip(0) for part in source.split(source.tokens)]), source.lengths)
    close(other(turned, target), model(source, target))
    close(other(*(x.flip(1) if i == 0 else x for i, x in enumerate(_even()))), model(*_even()))
    assert not torch.allclose(other(source, target), model(source, target))


def _even() -> tuple[Tensor, Tensor]:
    return torch.arange(10).reshape(2, 5), torch.arange(6).reshape(2, 3)


# Step by step


@every
@pytest.mark.sampled(3)
def test_steps_equal_teacher_forcing(config: RecurrentConfig) -> None:
    model = make(config)
    source, target = torch.randint(0, SOURCE, (3, 5)), torch.randint(0, TARGET, (3, 7))
    close(steps(model, source, target), model(source, target))
    packed = Packed.of([[5, 6, 7, 8], [9], [3, 4]])
    state = model.start(packed)
    actual = torch.stack([model.step(tokens, state) for tokens in target.unbind(1)], 1)
    close(actual, model(*padded(packed)[:1], target, source_lengths=packed.lengths))


@every
@pytest.mark.sampled(2)
def test_select_reorders_and_repeats_rows(config: RecurrentConfig) -> None:
    model = make(config)
    source = Packed.of([[5, 6, 7, 8], [9], [3, 4]])
    rows = torch.tensor([2, 0, 2, 1, 0])
    first, then = torch.tensor([3, 4, 5]), torch.tensor([6, 7, 8, 9, 10])
    state = model.start(source)
    model.step(first, state)
    state.select(rows)
    assert len(state) == 5
    actual = model.step(then, state)
    parts = source.split(source.tokens)
    chosen = Packed.of([parts[i].tolist() for i in rows.tolist()])
    expected = model(chosen, Packed.of(torch.stack([first[rows], then], 1).tolist()))
    close(actual, expected[1::2])


# Watching


@attending
@pytest.mark.sampled(2)
def test_weights_can_be_watched(config: RecurrentConfig) -> None:
    model = make(config)
    source, target = batch()
    with regard.watch(model) as seen:
        logits = model(source, target)
    close(logits, model(source, target))
    calls = [weights.dense() for weights in seen.calls("decoder.attention")]
    assert len(calls) == (1 if config.parallel else 5)
    weights = torch.cat(calls, -2)
    assert weights.shape == (5, 1, 5, 7)
    close(weights.sum(-1), torch.ones(5, 1, 5, dtype=torch.float64))
    outside = torch.arange(7) >= source.lengths[:, None]
    assert not weights.masked_select(outside[:, None, None]).any()
    assert (weights.masked_select(~outside[:, None, None]) > 0).all()


@attending
@pytest.mark.sampled(2)
def test_weights_refer_to_the_original_source_order(config: RecurrentConfig) -> None:
    model, other = make(replace(config, reverse=False)), make(replace(config, reverse=True))
    source, target = _even()
    with regard.watch(model) as seen:
        model(source, target)
    with regard.watch(other) as turned:
        other(source.flip(1), target)
    for ours, theirs in zip(seen.values(), turned.values(), strict=True):
        close(ours.dense().flip(-1), theirs.dense())


def test_model_without_attention_has_no_weights() -> None:
    with (
        pytest.raises(ArgumentError, match="without attention layers"),
        regard.watch(make(CONFIGS["lstm none"])),
    ):
        pass


def test_keys_are_projected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, project_source = [], SourceAttention.project_source

    def counted(self: SourceAttention, source: Tensor) -> object:
        made.append(source)
        return project_source(self, source)

    monkeypatch.setattr(SourceAttention, "project_source", counted)
    monkeypatch.setattr(regard.Additive, "prepare", None)  # `prepare` would project the keys in each call
    make(CONFIGS["gru additive"])(*batch())
    assert len(made) == 1


# The papers' equations


def gru(x: Tensor, s: Tensor, rnn: nn.GRU, layer: str) -> Tensor:
    """Compute Cho et al. 2014, with torch's reset after the product."""
    inputs, states = (
        y @ getattr(rnn, f"weight_{name}_l{layer}").T + getattr(rnn, f"bias_{name}_l{layer}")
        for name, y in (("ih", x), ("hh", s))
    )
    (r, z, n), (rs, zs, ns) = inputs.chunk(3, -1), states.chunk(3, -1)
    reset, update = torch.sigmoid(r + rs), torch.sigmoid(z + zs)
    return (1 - update) * torch.tanh(n + reset * ns) + update * s


def grus(x: Tensor, s: Tensor, rnn: nn.GRU) -> Tensor:
    """Return the new states of all layers."""
    states = []
    for layer, before in enumerate(s):
        x = gru(x, before, rnn, str(layer))
        states.append(x)
    return torch.stack(states)


def lstm(x: Tensor, s: Tensor, c: Tensor, rnn: nn.LSTM) -> tuple[Tensor, Tensor]:
    """Compute Hochreiter and Schmidhuber 1997, with a forget gate."""
    gates = x @ rnn.weight_ih_l0.T + rnn.bias_ih_l0 + s @ rnn.weight_hh_l0.T + rnn.bias_hh_l0
    i, f, g, o = gates.chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def embed(embedding: nn.Embedding, tokens: list[int]) -> Tensor:
    return embedding.weight[tokens] * math.sqrt(WIDTH)


def encode(model: RecurrentSeq2Seq, tokens: list[int]) -> list[Tensor]:
    """Compute h_j = [→h_j; ←h_j] for each word, layer by layer: Bahdanau et al. 2015, section 3.2."""
    assert model.source_embedding is not None
    h, layers = embed(model.source_embedding, tokens), []
    for layer in range(model.config.layers):
        s = back = torch.zeros(WIDTH // 2, dtype=torch.float64)
        there, backwards = [], []
        for x in h:
            s = gru(x, s, model.encoder.rnn, str(layer))
            there.append(s)
        for x in h.flip(0):
            back = gru(x, back, model.encoder.rnn, f"{layer}_reverse")
            backwards.append(back)
        h = torch.cat([torch.stack(there), torch.stack(backwards[::-1])], -1)
        layers.append(h)
    return layers


@torch.no_grad()
@pytest.mark.parametrize("layers", [1, 3])
def test_bahdanau_equations(layers: int) -> None:
    model = make(replace(CONFIGS["gru additive"], layers=layers))
    source, target = [3, 5, 8, 4], [START, 6, 9]
    h, decoder = encode(model, source)[-1], model.decoder
    score = decoder.attention.score
    s = torch.tanh(decoder.first.weight @ h[0, WIDTH // 2 :] + decoder.first.bias)  # A.2.2
    s, logits = s.reshape(layers, WIDTH), []
    for y in embed(model.embedding, target):
        scores = torch.tanh(score.query_map @ s[-1] + h @ score.key_map.T) @ score.vector  # A.1.2
        a = torch.softmax(scores, 0) @ h  # eq. 5 and 6
        s = grus(torch.cat([y, a]), s, decoder.rnn)
        read = decoder.readout.weight @ torch.cat([s[-1], y, a]) + decoder.readout.bias
        maxout = torch.stack([torch.maximum(read[2 * i], read[2 * i + 1]) for i in range(WIDTH)])
        logits.append(model.output_weight @ maxout + model.output_bias)
    close(model(torch.tensor([source]), torch.tensor([target]))[0], torch.stack(logits))


@torch.no_grad()
@looped("layers", [1, 3])
@looped("attention", ["dot", "general", "concat"])
@looped("input_feeding", [False, True])
def test_luong_equations(attention: str, input_feeding: bool, layers: int) -> None:
    model = make(replace(CONFIGS[f"gru {attention}{' fed' if input_feeding else ''}"], layers=layers))
    source, target = [3, 5, 8, 4], [START, 6, 9]
    encoded, decoder = encode(model, source), model.decoder
    h, score = encoded[-1], decoder.attention.score
    s = torch.stack([torch.cat([layer[-1, : WIDTH // 2], layer[0, WIDTH // 2 :]]) for layer in encoded])
    fed, logits = torch.zeros(WIDTH, dtype=torch.float64), []
    for y in embed(model.embedding, target):
        s = grus(torch.cat([y, fed]) if input_feeding else y, s, decoder.rnn)
        if attention == "dot":  # eq. 8
            scores = torch.stack([s[-1] @ key for key in h])
        elif attention == "general":
            scores = torch.stack([s[-1] @ score.weight @ key for key in h])
        else:
            matrix = torch.cat([score.query_map, score.key_map], 1)
            scores = torch.stack([score.vector @ torch.tanh(matrix @ torch.cat([s[-1], key])) for key in h])
        a = torch.softmax(scores, 0) @ h  # eq. 7
        fed = torch.tanh(decoder.combine.weight @ torch.cat([a, s[-1]]))  # eq. 5
        logits.append(model.output_weight @ fed + model.output_bias)  # eq. 6
    close(model(torch.tensor([source]), torch.tensor([target]))[0], torch.stack(logits))


@torch.no_grad()
def test_sutskever_equations() -> None:
    model = make(replace(CONFIGS["lstm none"], bidirectional=False, reverse=True))
    assert model.source_embedding is not None
    source, target = [3, 5, 8, 4], [START, 6, 9]
    s = c = torch.zeros(WIDTH, dtype=torch.float64)
    for x in embed(model.source_embedding, source[::-1]):
        s, c = lstm(x, s, c, model.encoder.rnn)
    logits = []
    for y in embed(model.embedding, target):
        s, c = lstm(y, s, c, model.decoder.rnn)
        logits.append(model.output_weight @ s + model.output_bias)
    close(model(torch.tensor([source]), torch.tensor([target]))[0], torch.stack(logits))


# Sharing, saving, compiling


@pytest.mark.parametrize("share", [False, True])
@some
def test_saved_model_gives_the_same_output(config: RecurrentConfig, share: bool, tmp_path: Path) -> None:
    model, other = make(config, share=share), make(config, share=share)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    source, target = batch()
    assert torch.equal(other(source, target), model(source, target))


def test_shared_embedding_matrix() -> None:
    model = make(CONFIGS["gru general"], share=True)
    assert model.source_embedding is None
    assert model.output_weight is model.embedding.weight
    assert sum(parameter.shape == (TARGET, WIDTH) for parameter in model.parameters()) == 1
    source, target = batch()
    model.loss(source, Packed(target.tokens, torch.tensor([5, 2, 2, 2, 2]))).backward()
    assert model.embedding.weight.grad is not None
    with pytest.raises(ArgumentError, match="11 and 13 tokens and share=True"):
        RecurrentSeq2Seq((SOURCE, TARGET), share=True)


# dynamo reads .grad at graph breaks, which nn.LSTM and packed sequences cause
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("name", "form", "backend"),
    [
        ("gru additive", "packed", "eager"),
        pytest.param("lstm general", "packed", "aot_eager", marks=pytest.mark.slow),
        pytest.param("gru additive", "padded", "aot_eager", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_compiled_model_gives_the_same_output(name: str, form: str, backend: str) -> None:
    torch.compiler.reset()
    model, source, target = make(CONFIGS[name]), Packed.of([[5, 6, 7], [8]]), Packed.of([[1, 5], [1, 6]])
    compiled = torch.compile(model, backend=backend)
    if form == "packed":
        close(compiled(source, target), model(source, target))
    else:
        tokens, lengths = padded(source)
        actual = compiled(tokens, padded(target)[0], source_lengths=lengths)
        close(actual.flatten(0, 1), model(source, target))
    torch.compiler.reset()


@some
@pytest.mark.sampled(3)
def test_meta_device_shapes(config: RecurrentConfig) -> None:
    with torch.device("meta"):
        model = RecurrentSeq2Seq((SOURCE, TARGET), config)
        source, target = torch.zeros(3, 5, dtype=torch.long), torch.zeros(3, 7, dtype=torch.long)
        lengths = torch.ones(3, dtype=torch.long)
    assert all(parameter.is_meta for parameter in model.parameters())
    logits = model(source, target, source_lengths=lengths, target_lengths=lengths)
    assert logits.is_meta
    assert logits.shape == (3, 7, TARGET)
    assert model(source, target).shape == (3, 7, TARGET)
    assert model.loss(source, target).shape == ()
    assert model.step(target[:, 0], model.start(source)).shape == (3, TARGET)
    with pytest.raises(ArgumentError, match="Packed on the meta device"):
        model(Packed(source[0], lengths[:1]), target)


def test_precisions_agree() -> None:
    source, target = batch()
    model = make(CONFIGS["deep additive"])
    expected = model(source, target)
    actual = model.float()(source, target)
    assert actual.dtype is torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(source, target).double(), expected, rtol=0.1, atol=0.1)


@given(st.data())
def test_any_lengths_in_any_format(data: st.DataObject) -> None:
    config = data.draw(st.sampled_from(list(CONFIGS.values())))
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), min_size=1, max_size=4))
    source, target = (
        Packed(torch.randint(0, words, (sum(sizes),)), torch.tensor(sizes))
        for words, sizes in zip((SOURCE, TARGET), map(list, zip(*lengths, strict=True)), strict=True)
    )
    model = make(config)
    with torch.no_grad():
        (sources, source_lengths), (targets, target_lengths) = padded(source), padded(target)
        actual = model(sources, targets, source_lengths=source_lengths, target_lengths=target_lengths)
        close(actual[target.sentences, target.positions], model(source, target))


# Errors


@looped(
    ("options", "message"),
    [
        (
            {"input_feeding": True, "attention": "additive"},
            "input_feeding=True and attention='additive'; input feeding needs dot, general or concat",
        ),
        (
            {"input_feeding": True, "attention": "none"},
            "input_feeding=True and attention='none'; input feeding needs",
        ),
        ({"cell": "rnn"}, "cell='rnn'; choose one of lstm, gru"),
        ({"attention": "luong"}, "attention='luong'; choose one of none, additive, dot, general, concat"),
        ({"width": 7}, r"width=7 and bidirectional=True; .* must be even, e\.g\. 8"),
        ({"width": 0}, "width=0; it must be at least 1"),
        ({"layers": 1.5}, "layers=1.5; it must be an integer"),
        ({"dropout": 1.0}, "dropout=1.0; it must be at least 0 and below 1"),
        ({"reverse": "yes"}, "reverse='yes'; it must be True or False"),
    ],
)
def test_invalid_configs(options: dict[str, object], message: str) -> None:
    with pytest.raises(RegardError, match=message):
        RecurrentConfig(**options)  # type: ignore[arg-type]


def test_odd_width_without_bidirectional() -> None:
    config = RecurrentConfig(width=7, bidirectional=False, attention="additive")
    assert RecurrentSeq2Seq(SOURCE, config)(*_even()).shape == (2, 3, SOURCE)


ONES = torch.ones(2, 3, dtype=torch.long)


@looped(
    ("error", "message", "source", "options"),
    [
        (ArgumentError, "Token 11 is out of range for a vocabulary of 11", ONES * 11, {}),
        (ArgumentError, "Token -4 is out of range", ONES * -4, {}),
        (ShapeError, r"source has shape \(0, 3\)", ONES[:0], {}),
        (ShapeError, r"source has shape \(2, 0\)", ONES[:, :0], {}),
        (ShapeError, r"source has shape \(3,\).*tokens\[None\]", ONES[0], {}),
        (ShapeError, "source has 1 sentence and target has 2", ONES[:1], {}),
        (
            ShapeError,
            "A length is 4, but the rows have 3 tokens",
            ONES,
            {"source_lengths": torch.tensor([4, 1])},
        ),
        (ShapeError, r"lengths \(3,\)", ONES, {"source_lengths": torch.tensor([1, 1, 1])}),
        (ArgumentError, "Source sentence 1 has length 0", ONES, {"source_lengths": torch.tensor([3, 0])}),
        (ArgumentError, "Target sentence 0 has length 0", ONES, {"target_lengths": torch.tensor([0, 2])}),
        (
            ShapeError,
            "A length is -1",
            ONES,
            {"source_lengths": torch.tensor([-1, 1])},
        ),
        (DTypeError, "lengths of dtype torch.float32", ONES, {"source_lengths": torch.tensor([1.0, 2.0])}),
        (DTypeError, "lengths of type list", ONES, {"source_lengths": [1, 2]}),
        (DTypeError, "source is a list", [[1, 2], [3, 4]], {}),
        (DTypeError, "tokens have dtype torch.float32", ONES.float(), {}),
        (ShapeError, "source has no sentences", Packed.of([]), {}),
        (ArgumentError, "Source sentence 1 has length 0", Packed.of([[1], []]), {}),
        (ArgumentError, "omit source_lengths", Packed.of([[1], [2]]), {"source_lengths": ONES[:, 0]}),
    ],
)
def test_invalid_batches(
    error: type[Exception], message: str, source: object, options: dict[str, Tensor]
) -> None:
    model = RecurrentSeq2Seq((SOURCE, TARGET), RecurrentConfig(width=4))
    with pytest.raises(error, match=message):
        model(source, ONES, **options)


def test_target_tokens_out_of_range() -> None:
    model = RecurrentSeq2Seq((TARGET, SOURCE), RecurrentConfig(width=4))
    with pytest.raises(ArgumentError, match=r"Token 12 is out of range for a vocabulary of 11"):
        model(ONES * 12, ONES * 12)


def test_invalid_steps() -> None:
    model = RecurrentSeq2Seq(SOURCE, RecurrentConfig(width=4))
    state = model.start(ONES)
    with pytest.raises(ShapeError, match=r"tokens of shape \(3,\) and a state of 2 rows.*\(2,\)"):
        model.step(torch.tensor([1, 2, 3]), state)
    with pytest.raises(DTypeError, match="a state of type int"):
        model.step(ONES[:, 0], 3)  # type: ignore[arg-type]


@looped("vocabulary", [0, -1, 2.5, (5, 0)])
def test_invalid_vocab_sizes(vocabulary: object) -> None:
    with pytest.raises(RegardError, match="vocab_size"):
        RecurrentSeq2Seq(vocabulary)  # type: ignore[arg-type]
