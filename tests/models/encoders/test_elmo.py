"""ElmoEncoder: directions, training, and files."""

import json
import random
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from regard.errors import ArgumentError, RegardError, ShapeError
from regard.models.encoders.elmo import ElmoEncoder, ScalarMix
from regard.models.encoders.static import StaticEncoder
from regard.models.encoders.words import Vocabulary
from regard.models.packed import Packed
from tests.cases import looped

pytestmark = pytest.mark.usefixtures("one_thread")

MARKS = ElmoEncoder.special_tokens
WORDS = ["the", "dogs", "bark", "at", "old", "cats"]
TEXT = ["the dogs bark at cats", "the bark of old trees", "dogs", "cats of the old"]


def make(width: int = 5, layers: int = 2, dropout: float = 0.0) -> ElmoEncoder:
    torch.manual_seed(0)
    return ElmoEncoder(Vocabulary.of(TEXT, special_tokens=MARKS), width, layers, dropout=dropout)


def senses() -> tuple[list[str], list[str]]:
    """Return sentences about barking dogs, and sentences about the bark of trees."""
    chance = random.Random(0)
    animals = product(["dogs", "foxes", "wolves"], ["bark", "growl", "howl"], ["cats", "people", "thieves"])
    plants = product(["rough", "brown", "old"], ["bark", "wood", "leaves"], ["oak", "pine", "birch"])
    first = [f"the {a} {b} at {c} {chance.choice(['loudly', 'loaded'])}" for a, b, c in animals]
    return first, [f"the {a} {b} of the {c} {chance.choice(['dries', 'cracks'])}" for a, b, c in plants]


@pytest.mark.slow
def test_context_separates_word_senses():
    animals, plants = senses()
    text = (animals + plants) * 8
    elmo = ElmoEncoder.learn(text, width=32, epochs=8)
    static = StaticEncoder.learn(text, width=24)
    dogs = [sentence for sentence in animals if "bark" in sentence]
    trees = [sentence for sentence in plants if "bark" in sentence]

    def alike(encoder: ElmoEncoder | StaticEncoder, first: list[str], second: list[str]) -> list[float]:
        pairs = [(x, y) for x in first[:4] for y in second[-4:] if x != y]
        return [encoder.compare(x, y, word="bark").similarity for x, y in pairs]

    same = [*alike(elmo, dogs, dogs), *alike(elmo, trees, trees)]
    other = alike(elmo, dogs, trees)
    assert min(same) > max(other) + 0.1
    assert elmo.compare(dogs[0], trees[0], word="bark").similarities[0] == 1.0  # layer 0 has no context
    assert set(alike(static, dogs, trees)) == {1.0}
    near = elmo.nearest("bark", sentence=dogs[0], among=[*dogs[3:6], *trees], k=3)
    assert all(each.word == "bark" and each.sentence in dogs for each in near)


def test_each_direction_sees_one_side():
    encoder = make()
    tokens = torch.randint(len(MARKS), len(encoder.vocabulary), (1, 7))
    changed = tokens.clone()
    changed[0, 3] = (changed[0, 3] - len(MARKS) + 1) % 4 + len(MARKS)
    assert changed[0, 3] != tokens[0, 3]
    differs = (encoder.states(tokens) != encoder.states(changed)).any(0)[0]  # l 2m
    ahead, back = differs[:, :5].any(-1), differs[:, 5:].any(-1)
    assert ahead.tolist() == [False] * 3 + [True] * 4
    assert back.tolist() == [True] * 4 + [False] * 3


def test_padded_and_packed_and_single_sentences_agree():
    encoder = make()
    packed = encoder.pack(TEXT)
    padded = packed.pad(packed.tokens, value=6)
    states = encoder.states(padded, packed.lengths)
    together = encoder.states(packed)
    assert states.shape == (3, 4, 7, 10)
    assert together.shape == (3, len(packed.tokens), 10)
    for i, (numbers, part) in enumerate(
        zip(packed.split(packed.tokens), together.split(packed.lengths.tolist(), 1), strict=True)
    ):
        alone = encoder.states(numbers[None])[:, 0]
        torch.testing.assert_close(part, alone)
        torch.testing.assert_close(states[:, i, : len(numbers)], alone)
    torch.testing.assert_close(encoder(packed), encoder(padded, packed.lengths)[padded_places(packed)])


def padded_places(packed: Packed) -> tuple[Tensor, Tensor]:
    return packed.sentences, packed.positions


def test_layers_follow_the_paper():
    encoder = make()
    tokens = encoder.pack(TEXT[:1]).tokens[None]
    states = encoder.states(tokens)
    x = encoder.embedding(tokens)
    torch.testing.assert_close(states[0], torch.cat([x, x], -1))
    first = encoder.forward_lm.lstms[0](x)[0]
    second = encoder.forward_lm.lstms[1](first)[0] + first
    torch.testing.assert_close(states[1:, ..., :5], torch.stack([first, second]))
    first = encoder.backward_lm.lstms[0](x.flip(1))[0]
    second = encoder.backward_lm.lstms[1](first)[0] + first
    torch.testing.assert_close(states[1:, ..., 5:], torch.stack([first, second]).flip(2))


def test_loss_is_the_cross_entropy_of_both_directions():
    encoder = make()
    logs = []
    for sentence in TEXT:
        tokens = encoder.pack(sentence).tokens
        top = encoder.states(tokens[None])[-1, 0]
        ahead, back = encoder.output(top[:-1, :5]), encoder.output(top[1:, 5:])
        logs += [F.cross_entropy(ahead, tokens[1:], reduction="none")]
        logs += [F.cross_entropy(back, tokens[:-1], reduction="none")]
    expected = torch.cat(logs).mean()
    packed = encoder.pack(TEXT)
    torch.testing.assert_close(encoder.loss(TEXT), expected)
    torch.testing.assert_close(encoder.loss(packed), expected)
    torch.testing.assert_close(encoder.loss(packed.pad(packed.tokens, 4), packed.lengths), expected)


def test_mix_is_a_weighted_mean():
    mix, vectors = ScalarMix(3), torch.randn(3, 2, 5)
    torch.testing.assert_close(mix(vectors), vectors.mean(0))
    with torch.no_grad():
        mix.scores.copy_(torch.tensor([0.0, 1.0, -2.0]))
        mix.gamma.fill_(0.7)
    weights = torch.tensor([0.0, 1.0, -2.0]).softmax(0)
    expected = 0.7 * sum(w * v for w, v in zip(weights, vectors, strict=True))
    torch.testing.assert_close(mix(vectors), expected)
    with pytest.raises(ShapeError, match=r"ScalarMix\(3\) got 2 layers"):
        mix(vectors[:2])


def test_gradients_reach_every_parameter():
    encoder = make(dropout=0.1)
    packed = encoder.pack(TEXT)
    (encoder.loss(packed) + encoder(packed).square().mean()).backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_training_overfits_and_is_reproducible():
    losses: list[float] = []
    options = {"width": 16, "min_count": 1, "dropout": 0.0, "epochs": 60, "learning_rate": 2e-2}
    state = torch.random.get_rng_state()
    encoder = ElmoEncoder.learn(TEXT, **options, report=lambda _, loss: losses.append(loss))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert len(losses) == 60
    assert losses[-1] < 0.35 < 2 < losses[0]  # the first words are unpredictable
    assert not encoder.training
    one, again, other = (
        ElmoEncoder.learn(TEXT, **options | {"epochs": 4}, seed=seed).state_dict() for seed in (0, 0, 1)
    )
    assert all(torch.equal(x, again[name]) for name, x in one.items())
    assert not torch.equal(other["embedding.weight"], one["embedding.weight"])


def test_max_seconds_ends_training():
    reports: list[int] = []
    encoder = ElmoEncoder.learn(
        TEXT, width=3, epochs=10**9, max_seconds=0.05, min_count=1, report=lambda i, _: reports.append(i)
    )
    assert len(reports) < 10**6
    assert encoder.embed("dogs bark")[0].vectors.shape == (3, 2, 6)


def test_vectors_do_not_depend_on_the_batch():
    encoder = make().eval()
    sentences = [" ".join(random.Random(i).choices(WORDS, k=i % 9 + 1)) for i in range(99)]
    for sentence, embedded in zip(sentences, encoder.embed(sentences), strict=True):
        assert embedded.sentence == sentence
        torch.testing.assert_close(embedded.vectors, encoder.embed(sentence)[0].vectors)


def test_unknown_words_have_a_vector_but_cannot_be_queried():
    encoder = make()
    (embedded,) = encoder.embed("Dogs chase cats")
    assert embedded.known == (True, False, True)
    with pytest.raises(
        ArgumentError, match=r"ElmoEncoder does not know the word 'barked' \(did you mean 'bark'"
    ):
        encoder.compare("dogs barked", "dogs barked", word="barked")
    with pytest.raises(ArgumentError, match="ElmoEncoder has no attention"):
        encoder.attended_words("dogs bark", "bark")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # raised and handled inside torch at a graph break
def test_compile_and_meta_device():
    encoder = make().eval()
    packed = encoder.pack(TEXT)
    padded = packed.pad(packed.tokens)
    compiled = torch.compile(encoder, backend="eager")
    torch.testing.assert_close(compiled(padded, packed.lengths), encoder(padded, packed.lengths))
    meta = make().to("meta")
    assert meta(padded.to("meta"), packed.lengths.to("meta")).shape == (4, 7, 10)
    assert meta.loss(padded.to("meta"), packed.lengths.to("meta")).shape == ()


@looped(
    ("call", "message"),
    [
        (lambda: ElmoEncoder(Vocabulary(["a"])), "with its special tokens"),
        (lambda: ElmoEncoder(Vocabulary([], special_tokens=MARKS)), "with its special tokens"),
        (lambda: ElmoEncoder(["a"]), "with its special tokens"),
        (lambda: make(width=0), "width=0"),
        (lambda: make(layers=0), "layers=0"),
        (lambda: make(dropout=1.0), "dropout=1.0"),
        (lambda: ElmoEncoder.learn([]), "0 sentences with words, but no word occurs at least 2 times"),
        (lambda: ElmoEncoder.learn(["a", " "]), "1 sentence with words"),
        (lambda: ElmoEncoder.learn(TEXT, epochs=0), "epochs=0"),
        (lambda: ElmoEncoder.learn(TEXT, max_seconds=0), "seconds=0"),
        (lambda: ElmoEncoder.learn(TEXT, learning_rate=-1), "learning_rate=-1"),
        (lambda: make().embed(""), "no words"),
        (lambda: make().states(torch.zeros(3, dtype=torch.long)), r"\(3,\)"),
        (
            lambda: make().states(torch.zeros(2, 3, dtype=torch.long), torch.tensor([4, 1])),
            "A length is 4, but the rows have 3 tokens",
        ),
        (lambda: make().loss([3]), "Sentence 0 is an int"),
    ],
)
def test_invalid_input_is_rejected(call, message):
    with pytest.raises(RegardError, match=message):
        call()


def test_saved_encoder_gives_the_same_vectors(tmp_path):
    encoder = make(dropout=0.25)
    encoder.best_layer = 1
    assert encoder.save(tmp_path / "elmo") == tmp_path / "elmo"
    loaded = ElmoEncoder.load(tmp_path / "elmo")
    assert loaded.vocabulary == encoder.vocabulary
    assert (loaded.best_layer, loaded.dropout.p, loaded.training) == (1, 0.25, False)
    assert torch.equal(loaded.embed("dogs bark")[0].vectors, encoder.embed("dogs bark")[0].vectors)
    assert torch.equal(loaded.loss(TEXT), encoder.eval().loss(TEXT))
    loaded.loss(TEXT).backward()  # training can continue
    other = make()
    other.load_state_dict(encoder.state_dict())
    assert torch.equal(other.embed("dogs")[0].vectors, encoder.embed("dogs")[0].vectors)


def rewritten(path: Path, change) -> None:
    """Change parameters and metadata in a file."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (no mapping)
        metadata = file.metadata()
    change(tensors, metadata)
    save_file(tensors, path, metadata)


def about(**changes: object):
    def change(_, metadata: dict[str, str]) -> None:
        metadata["about"] = json.dumps({**json.loads(metadata["about"]), **changes})

    return lambda path: rewritten(path, change)


def options(**changes: object):
    def change(_, metadata: dict[str, str]) -> None:
        content = json.loads(metadata["about"])
        content["options"] |= changes
        metadata["about"] = json.dumps(content)

    return lambda path: rewritten(path, change)


def words(changed):
    def change(_, metadata: dict[str, str]) -> None:
        metadata["words"] = json.dumps(changed(json.loads(metadata["words"])))

    return lambda path: rewritten(path, change)


def text(part: str, content: str):
    return lambda path: rewritten(path, lambda _, metadata: metadata.update({part: content}))


def tensors(change):
    return lambda path: rewritten(path, lambda content, _: change(content))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.unlink(), "There is no file"),
        (text("about", "{"), "not a valid"),
        (text("about", "[" * 50_000), "not a valid"),
        (text("about", "[]"), "metadata or its word list is missing"),
        (text("words", "?"), "not a valid"),
        (
            lambda path: rewritten(path, lambda _, metadata: metadata.clear()),
            "metadata or its word list is missing",
        ),
        (about(format="elmo 3"), "its format is 'elmo 3', not 'elmo 2'"),
        (about(format="elmo 1"), r"earlier version of regard .*'elmo 1'; .* 'elmo 2'\)\. Train .* again"),
        (options(code="evil.py"), "options are .*code"),
        (options(width=10**12), "overflowed|has shape"),
        (options(width="5"), "integer"),
        (options(width=7), r"has shape .*; the settings require"),
        (options(layers=10**9), "layers=1000000000, but it has only"),
        (options(layers=3), "missing or unexpected"),
        (options(layers=True), "integer"),
        (options(dropout=2), "dropout=2"),
        (about(best_layer=3), "best_layer is 3, but it has 3 layers"),
        (about(best_layer=None), "best_layer"),
        (words(lambda content: content[:-1]), "has shape"),
        (words(lambda content: [*content[:-1], content[0]]), "twice"),
        (words(lambda content: [*content[:-1], 3]), "pass non-empty strings"),
        (words(lambda content: {"a": 1}), "word list is missing"),
        (lambda path: path.write_bytes(b""), "not a valid"),
        (lambda path: path.write_bytes(b"\x80\x04pickle"), "not a valid"),
        (lambda path: path.write_bytes(path.read_bytes()[:-7]), "not a valid"),
        (tensors(lambda content: content.pop("mix.gamma")), "missing or unexpected"),
        (tensors(lambda content: content.update(extra=torch.ones(1))), "missing or unexpected"),
        (tensors(lambda content: content["output.bias"].fill_(float("nan"))), "output.bias has NaN"),
        (tensors(lambda content: content.update({"mix.scores": torch.ones(3).int()})), "int32"),
        (tensors(lambda content: content.update({"mix.scores": torch.ones(4)})), "mix.scores has shape"),
    ],
)
def test_damaged_files_are_rejected(spoil, message, tmp_path):
    path = make().save(tmp_path / "elmo.safetensors")
    spoil(path)
    with pytest.raises(ArgumentError, match=message) as caught:
        ElmoEncoder.load(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 700
