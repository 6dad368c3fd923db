"""BertEncoder: training, attention, and files."""

import pytest
import torch

import regard
from regard.errors import ArgumentError, RegardError
from regard.models.encoders.bert import BertEncoder
from regard.models.encoders.static import StaticEncoder
from regard.models.encoders.words import Vocabulary
from tests.models.encoders.test_elmo import TEXT, about, options, senses, tensors

pytestmark = pytest.mark.usefixtures("one_thread")
MARKS = len(BertEncoder.special_tokens)


def make(dropout: float = 0.0) -> BertEncoder:
    torch.manual_seed(0)
    vocabulary = Vocabulary.of(TEXT, special_tokens=BertEncoder.special_tokens)
    return BertEncoder(vocabulary, width=12, layers=2, heads=3, dropout=dropout, max_positions=19)


@pytest.mark.slow
def test_context_separates_word_senses() -> None:
    animals, plants = senses()
    text = (animals + plants) * 8
    bert, static = BertEncoder.learn(text, width=32, heads=2, epochs=12), StaticEncoder.learn(text, width=24)
    dogs = [sentence for sentence in animals if "bark" in sentence]
    trees = [sentence for sentence in plants if "bark" in sentence]
    pairs = [(x, y) for group in (dogs, trees) for x in group[:4] for y in group[-4:] if x != y]
    same = min(bert.compare(x, y, word="bark").similarity for x, y in pairs)
    other = max(bert.compare(x, y, word="bark").similarity for x in dogs[:4] for y in trees[-4:])
    assert same > other + 0.1
    assert static.compare(dogs[0], trees[0], word="bark").similarity == 1.0


def test_packed_and_padded_and_single_sentences_agree() -> None:
    encoder = make().eval()
    packed = encoder.pack(TEXT)
    states = encoder.states(packed)
    assert states.shape == (3, len(packed.tokens), 12)
    padded = encoder.states(packed.pad(packed.tokens, value=6), packed.lengths)
    for i, part in enumerate(states.split(packed.lengths.tolist(), 1)):
        alone = encoder.states(encoder.pack(TEXT[i]))
        torch.testing.assert_close(part, alone)
        torch.testing.assert_close(padded[:, i, : part.shape[1]], alone)
    torch.testing.assert_close(encoder(packed), states[-1])


def test_loss_reaches_every_parameter_and_never_masks_special_tokens() -> None:
    encoder = make()
    torch.manual_seed(1)
    for _ in range(8):  # each call masks different tokens; some parameters get no gradient at first
        encoder.loss(TEXT * 4).backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
    batch = encoder.pack(TEXT * 50)
    _, labels = regard.models.mask_tokens(
        batch, mask_id=3, vocab_size=len(encoder.vocabulary), special_ids=[1, 2]
    )
    assert not torch.isin(labels, torch.tensor([1, 2])).any()
    assert (labels >= MARKS).any()


def test_encoder_memorizes_a_few_sentences() -> None:
    losses: list[float] = []
    BertEncoder.learn(
        TEXT * 8,
        width=32,
        heads=2,
        min_count=1,
        dropout=0.0,
        epochs=40,
        learning_rate=1e-2,
        report=lambda _, loss: losses.append(loss),
    )
    assert losses[-1] < 0.3 * losses[0]


def test_attended_weights_sum_to_one() -> None:
    encoder = make()
    actual = encoder.attended_words(TEXT[0], "bark", layer=1, head=1)
    assert [one.word for one in actual] == ["<s>", *TEXT[0].split(), "</s>"]
    assert sum(one.weight for one in actual) == pytest.approx(1)
    with regard.watch(encoder) as seen:
        encoder.embed(TEXT[0])
    assert list(seen) == ["model.encoder.blocks.0.attention", "model.encoder.blocks.1.attention"]
    place = 1 + TEXT[0].split().index("bark")
    torch.testing.assert_close(torch.tensor([one.weight for one in actual]), seen[1][1, place])


def test_too_long_sentence_is_rejected() -> None:
    with pytest.raises(ArgumentError, match="Position 20 is out of range: LearnedPositions has 19"):
        make().embed("dogs " * 19)


def test_saved_encoder_gives_the_same_vectors(tmp_path) -> None:
    encoder = make().eval()
    encoder.best_layer = 1
    loaded = BertEncoder.load(encoder.save(tmp_path / "bert.safetensors"))
    assert loaded.best_layer == 1
    assert loaded.options == encoder.options
    torch.testing.assert_close(
        loaded.embed(TEXT[0])[0].vectors, encoder.embed(TEXT[0])[0].vectors, rtol=0, atol=0
    )


@pytest.mark.parametrize(
    "spoil",
    [
        about(format="elmo 1"),
        about(best_layer=3),
        options(heads=5),
        options(heads=None),
        options(layers=10**9),
        options(width=10**9),
        options(extra=1),
        options(dropout="a lot"),
        tensors(lambda content: content["model.output_bias"].fill_(torch.nan)),
    ],
)
def test_mismatched_files_are_rejected(tmp_path, spoil) -> None:
    path = make().save(tmp_path / "bert.safetensors")
    spoil(path)
    with pytest.raises(RegardError, match="is not a valid BertEncoder file"):
        BertEncoder.load(path)


def test_old_files_are_rejected_as_old(tmp_path) -> None:
    path = make().save(tmp_path / "bert.safetensors")
    about(format="bert 1")(path)
    with pytest.raises(
        RegardError, match=r"earlier version of regard .*'bert 1'; .* 'bert 2'\)\. Train .* again"
    ):
        BertEncoder.load(path)


@pytest.mark.slow
def test_compile_and_meta_device() -> None:
    encoder = make().eval()
    packed = encoder.pack(TEXT)
    padded = packed.pad(packed.tokens)
    compiled = torch.compile(encoder, backend="eager")
    torch.testing.assert_close(compiled(padded, packed.lengths), encoder(padded, packed.lengths))
    assert encoder.to("meta")(padded.to("meta")).shape == (*padded.shape, 12)
