"""Static vectors: training, lookup and files."""

from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from regard.errors import ArgumentError, DTypeError, RegardError, ShapeError
from regard.models.encoders import static
from regard.models.encoders.static import StaticEncoder
from tests.cases import looped

WORDS = ["dogs", "bark", "trees", "Paris", ","]
DOGS, TREES = "Dogs may bark at strangers.", "Trees shed bark in winter."


@pytest.fixture
def encoder() -> StaticEncoder:
    torch.manual_seed(0)
    return StaticEncoder(WORDS, torch.randn(5, 7))


def test_word_has_the_same_vector_in_every_sentence(encoder):
    first, second = encoder.embed([DOGS, TREES])
    assert torch.equal(first["bark"], second["bark"])
    assert encoder.compare(DOGS, TREES, word="bark").similarity == 1.0
    assert torch.equal(first["bark"][0], encoder.vector("bark"))
    assert first.vectors.shape == (1, 6, 7)


def test_unknown_words_have_a_vector_but_cannot_be_queried(encoder):
    (embedded,) = encoder.embed("the dogs bark")
    assert embedded.known == (False, True, True)
    torch.testing.assert_close(embedded["the"][0], encoder.vectors[1:].mean(0))
    for ask in (
        lambda: encoder.vector("barks"),
        lambda: encoder.nearest("barks"),
        lambda: encoder.nearest("barks", among=["dogs bark"]),
        lambda: encoder.compare("it barks", "it barks", word="barks"),
    ):
        with pytest.raises(ArgumentError, match="does not know the word 'barks' \\(did you mean 'bark'"):
            ask()
    with pytest.raises(ArgumentError, match="'<unk>'"):
        encoder.vector("<unk>")


def test_nearest_in_the_vocabulary_or_in_sentences(encoder):
    actual = encoder.nearest("dogs", k=100)
    assert sorted(each.word for each in actual) == ["Paris", "bark", "trees"]  # not itself or punctuation
    expected = F.cosine_similarity(encoder.vector("dogs"), encoder.vector(actual[0].word), dim=0)
    assert actual[0].similarity == pytest.approx(expected.item(), abs=1e-6)
    assert actual == sorted(actual, key=lambda each: -each.similarity)
    assert [each.word for each in encoder.nearest("dogs", among=["paris , dogs"], k=1)] == ["dogs"]


def test_nearest_ignores_the_sentence(encoder):
    actual = encoder.nearest("dogs")
    assert encoder.nearest("dogs", sentence="See DOGS bark") == encoder.nearest(("dogs", 0)) == actual
    with pytest.raises(ArgumentError, match="'dogs' is not in 'trees bark'"):
        encoder.nearest("dogs", sentence="trees bark")
    with pytest.raises(ArgumentError, match="layer=7"):
        encoder.nearest("dogs", layer=7)
    with pytest.raises(DTypeError, match="pass a string, or a pair"):
        encoder.nearest(None)


def test_static_encoder_has_no_attention(encoder):
    with pytest.raises(ArgumentError, match="StaticEncoder has no attention"):
        encoder.attended_words("dogs bark", "bark")


@looped(
    ("words", "vectors", "error", "message"),
    [
        (WORDS, torch.ones(4, 7), ShapeError, r"5 words and vectors of shape \(4, 7\)"),
        (WORDS, torch.ones(5), ShapeError, r"\(5,\)"),
        ([], torch.ones(0, 7), ShapeError, "0 words"),
        (WORDS, torch.ones(5, 7, dtype=torch.int), DTypeError, "floating-point"),
        (["a", "a"], torch.ones(2, 7), ArgumentError, "twice, as word 1 and word 2"),
    ],
)
def test_invalid_vectors_are_rejected(words, vectors, error, message):
    with pytest.raises(error, match=message):
        StaticEncoder(words, vectors)
    with pytest.raises(ShapeError, match="unknown of shape"):
        StaticEncoder(WORDS, torch.ones(5, 7), unknown=torch.ones(3))


def corpus() -> list[str]:
    animals, things = ["dogs", "foxes", "wolves"], ["oaks", "pines", "birches"]
    return [
        sentence
        for i in range(20)
        for sentence in (
            f"{animals[i % 3]} {['run', 'hunt'][i % 2]} and bark at cats",
            f"the bark of {things[i % 3]} is {['rough', 'brown'][i % 2]} wood",
        )
    ]


@pytest.mark.usefixtures("one_thread")
def test_words_in_similar_contexts_have_similar_vectors():
    encoder = StaticEncoder.learn(corpus(), width=8)
    assert {each.word for each in encoder.nearest("dogs", k=2)} == {"foxes", "wolves"}
    assert {each.word for each in encoder.nearest("oaks", k=2)} == {"pines", "birches"}
    assert torch.equal(encoder.vectors, StaticEncoder.learn(corpus(), width=8).vectors)
    assert encoder.compare(corpus()[0], corpus()[1], word="bark").similarity == 1.0


@pytest.mark.usefixtures("one_thread")
def test_vectors_factorize_ppmi():
    vocabulary = static.Vocabulary.of(corpus())
    pairs, counts = static._cooccurrences(corpus(), vocabulary, 2)
    size = len(vocabulary) - 1
    table = torch.zeros(size, size, dtype=torch.double)
    for sentence in corpus():  # count pairs one by one
        numbers = [n - 1 for n in vocabulary.ids(sentence.split())]
        for i, first in enumerate(numbers):
            for j, second in enumerate(numbers):
                if 0 < abs(i - j) <= 2:
                    table[first, second] += 1.0 if abs(i - j) == 1 else 0.5
    counted = torch.zeros_like(table)
    counted[tuple(torch.from_numpy(pairs))] = torch.from_numpy(counts)
    torch.testing.assert_close(counted, table)
    smooth = table.sum(0) ** 0.75
    chance = table.sum(1)[:, None] / table.sum() * smooth / smooth.sum()
    ppmi = (table / table.sum() / chance).log().clamp(min=0)
    matrix = static._ppmi(pairs, counts, size)
    torch.testing.assert_close(matrix.to_dense(), ppmi)
    left, strengths, _ = torch.linalg.svd(ppmi)
    vectors = static._factor(matrix, 5, seed=3).double()
    best = left[:, :5] * strengths[:5].sqrt()
    torch.testing.assert_close(vectors @ vectors.T, best @ best.T, atol=1e-5, rtol=1e-4)


@pytest.mark.usefixtures("one_thread")
def test_extra_width_is_zero():
    encoder = StaticEncoder.learn(["dogs bark", "cats purr"], width=11)
    assert encoder.vectors.shape == (5, 11)
    assert encoder.vectors.isfinite().all()


@looped(
    ("sentences", "options", "message"),
    [
        ([], {}, "0 sentences, but no word occurs at least 1 time;"),
        ([" "], {}, "no word occurs"),
        (["a b"], {"min_count": 2}, "no word occurs at least 2 times"),
        (["a", "b"], {}, "without co-occurring words"),
        (["a b"], {"width": 0}, "width=0"),
        (["a b"], {"window": 0}, "window=0"),
        (["a b", None], {}, "Sentence 1 is None"),
    ],
)
def test_too_small_texts_are_rejected(sentences, options, message):
    with pytest.raises(RegardError, match=message):
        StaticEncoder.learn(sentences, **options)


def test_saved_vectors_are_exact(encoder, tmp_path):
    path = encoder.save(tmp_path / "vectors.txt")
    assert path.read_text().splitlines()[0] == "6 7"
    loaded = StaticEncoder.load(path)
    assert torch.equal(loaded.vectors, encoder.vectors)
    assert loaded.vocabulary == encoder.vocabulary
    for word in ("a 1", "a nan", " a", "a\nb", "a\0", "\ud800"):
        with pytest.raises(ArgumentError, match="cannot be stored"):
            StaticEncoder([word], torch.ones(1, 3)).save(path)
    assert StaticEncoder.load(path).vocabulary == encoder.vocabulary  # the old file is unchanged


@given(st.lists(st.text("a1 .-\t\r\u3000´é", min_size=1, max_size=5), min_size=1, max_size=3, unique=True))
def test_saved_files_can_be_loaded(tmp_path_factory, words):
    path: Path = tmp_path_factory.getbasetemp() / "saved.txt"
    encoder = StaticEncoder(words, torch.randn(len(words), 3))
    with suppress(ArgumentError):
        loaded = StaticEncoder.load(encoder.save(path))
        assert loaded.vocabulary == encoder.vocabulary
        assert torch.equal(loaded.vectors, encoder.vectors)


@pytest.mark.usefixtures("one_thread")
def test_standalone_accents_are_saved(tmp_path):
    """The NFKC form of such an accent contains a space."""
    encoder = StaticEncoder.learn(["he said ´ here", "‾ and ¨ ﷺ"] * 3, width=3)
    loaded = StaticEncoder.load(encoder.save(tmp_path / "vectors.txt"))
    assert loaded.vocabulary == encoder.vocabulary
    assert "´" in loaded.vocabulary
    assert not any(" " in word for word in loaded.vocabulary)


GLOVE = b"the 1 2 3\n. . . 4 5 6\nna\xc3\xafve -1e-3 .5 7\n"


def test_glove_files_are_read(tmp_path):
    path = tmp_path / "glove.txt"
    path.write_bytes(GLOVE)
    encoder = StaticEncoder.load(path)
    assert list(encoder.vocabulary) == ["<unk>", "the", ". . .", "naïve"]
    torch.testing.assert_close(encoder.vectors[1:].mean(0), encoder.vectors[0])
    torch.testing.assert_close(encoder.vector("Naïve"), torch.tensor([-1e-3, 0.5, 7]))
    assert len(StaticEncoder.load(path, limit=2).vocabulary) == 3
    assert torch.equal(StaticEncoder.load(encoder.save(tmp_path / "again.txt")).vectors, encoder.vectors)
    path.write_bytes(
        b"\xef\xbb\xbf3 3\r\n" + GLOVE.replace(b"\n", b" \r\n")
    )  # the format of word2vec and Windows
    assert torch.equal(StaticEncoder.load(path).vectors, encoder.vectors)
    assert len(StaticEncoder.load(path, limit=2).vocabulary) == 3
    path.write_bytes(GLOVE + b"<unk> 9 9 9")
    assert torch.equal(StaticEncoder.load(path).vectors[0], torch.full((3,), 9.0))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no vectors"),
        (b"2 3\n", "has no vectors"),
        (b"\n", "Line 1 of .* has 0 numbers"),
        (b"word\n", "Line 1 of .* has 0 numbers"),
        (b"a 1 2 3\nb 1 2\n", "Line 2 of .* has 2 numbers; the vectors have 3"),
        (b"a 1 2 3\nb 1 2 3 4\n", "Line 2 of .* has 4 numbers; the vectors have 3"),
        (b"a 1 2 3\n\nb 1 2 3\n", "Line 2"),
        (b"a 1 2 3\n 1 2 3\n", "Line 2"),
        (b"a 1 2 3\nb 1 x 3\n", "Line 2 of .* invalid number"),
        (b"a 1 2 3\nb 1 nan 3\nc 1 2 3\n", "Line 2 of .* NaN or infinite"),
        (b"2 3\na 1 2 3\nb 1 1e99 3\n", "Line 3 of .* NaN or infinite"),
        (b"a 1 2 3\nb 1 2 3\na 1 2 3\n", "Line 3 of .* repeats the word 'a' from line 1"),
        (b"3 3\na 1 2 3\nb 1 2 3\n", "declares 3 words in its first line, but has 2"),
        (b"1 999999999999\na 1 2 3\n", "Line 2 of .* the vectors have 999,999,999,999"),
        (b"1 0\na\n", "Line 2"),
        (b"2 3\na \x00\x00\x80\x3f\x00\x00\x80\x3f", "Line 2 of .* (null byte|UTF-8)"),
        (b"a 1\xff 2\n", "Line 1 of .* UTF-8"),
        (b"a " + b"1 " * 600_000, "Line 1 of .* more than 1,048,576 bytes"),
        (b"\x1f\x8b\x08\x00", "is compressed; decompress it"),
        (b"<unk> 1 2 3\n", "no word except <unk>"),
    ],
)
def test_invalid_files_are_rejected_with_the_line(content, message, tmp_path):
    path = tmp_path / "vectors.txt"
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match=message) as caught:
        StaticEncoder.load(path)
    assert len(str(caught.value)) < 500


def test_invalid_paths_are_rejected(tmp_path):
    with pytest.raises(ArgumentError, match=r"Cannot read .*none\.txt': No such file.* Pass a text file"):
        StaticEncoder.load(tmp_path / "none.txt")
    for path in (tmp_path, "a\0b", "a" * 5000):
        with pytest.raises(ArgumentError, match="Cannot read"):
            StaticEncoder.load(path)
    for number in (5, b"vectors.txt", None):
        with pytest.raises(DTypeError, match="pass a file path"):
            StaticEncoder.load(number)  # type: ignore[arg-type]


@given(st.binary(max_size=60) | st.text("ab 12.\n-e", max_size=60).map(str.encode))
def test_any_file_is_read_or_rejected(tmp_path_factory, content):
    path: Path = tmp_path_factory.getbasetemp() / "any.txt"
    path.write_bytes(content)
    with suppress(ArgumentError):
        assert StaticEncoder.load(path).vectors.isfinite().all()


def test_static_encoder_is_a_module(encoder, one_thread):
    encoder(torch.tensor([[0, 2], [3, 1]])).sum().backward()
    assert encoder.vectors.grad is not None
    assert encoder.vectors.grad.abs().sum(1).tolist() == [7, 7, 7, 7, 0, 0]
    other = StaticEncoder(WORDS, torch.zeros(5, 7))
    other.load_state_dict(encoder.state_dict())
    assert torch.equal(other.vectors, encoder.vectors)
    numbers = torch.tensor([[1, 2, 3]])
    assert torch.equal(torch.compile(encoder, backend="eager", fullgraph=True)(numbers), encoder(numbers))
    assert encoder.to("meta")(numbers.to("meta")).shape == (1, 3, 7)
    assert not encoder.train().eval().training
