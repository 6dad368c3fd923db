"""Word splitting, vocabularies, and the methods of WordEncoder."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard.errors import ArgumentError, DTypeError
from regard.models.encoders.base import Comparison, Neighbor, TokenVectors, WordEncoder, WordVectors
from regard.models.encoders.words import Vocabulary, close_words, fold, split_words
from regard.models.layers.attention import MultiHeadAttention
from tests.cases import looped

WIDTH = 6


class Letters(WordEncoder):
    """An encoder with tokens of up to two letters, special tokens and two attention layers."""

    layers = 3

    def __init__(self, *, lost: str = "") -> None:
        super().__init__()
        self.letters = torch.nn.Embedding(1009, WIDTH)
        self.blocks = torch.nn.ModuleList(MultiHeadAttention(WIDTH, 2, dropout=0.5) for _ in range(2))
        self.lost = lost

    def spans(self, sentence: str) -> list[tuple[int, int] | None]:
        pairs = [
            (i, min(i + 2, word.stop))
            for word in split_words(sentence)
            for i in range(word.start, word.stop, 2)
        ]
        return [None, *((i, j) for i, j in pairs if sentence[i:j] not in self.lost.split()), None]

    def token_vectors(self, sentences: Sequence[str]) -> Iterator[TokenVectors]:
        for sentence in sentences:
            spans = self.spans(sentence)
            texts = ["" if span is None else sentence[span[0] : span[1]] for span in spans]
            x = self.letters(torch.tensor([sum(map(ord, text)) % 1009 for text in texts]))[None]
            layers = [x]
            for block in self.blocks:
                layers.append(block(layers[-1]))
            names = ["[CLS]", *texts[1:-1], "[SEP]"]
            yield TokenVectors(torch.cat(layers), spans, names, [text != "zz" for text in texts])


@pytest.fixture
def encoder() -> Letters:
    torch.manual_seed(0)
    return Letters()


def texts(sentence: str) -> list[str]:
    return [word.text for word in split_words(sentence)]


@looped(
    ("sentence", "words"),
    [
        ("Dogs may bark, loudly.", ["Dogs", "may", "bark", ",", "loudly", "."]),
        ("don't l’été rock-'n'-roll", ["don't", "l’été", "rock", "-", "'", "n", "'", "-", "roll"]),
        ("the dogs' well-known", ["the", "dogs", "'", "well-known"]),
        ("3.14 and 1,000, v2.0", ["3.14", "and", "1,000", ",", "v2.0"]),
        ("end.Start", ["end", ".", "Start"]),
        ("(bark)…“bark”—bark", ["(", "bark", ")", "…", "“", "bark", "”", "—", "bark"]),
        ("हिन्दी में", ["हिन्दी", "में"]),  # vowel signs are marks, which belong to their letters
        ("cafe\u0301!", ["cafe\u0301", "!"]),
        ("我爱你 ok", ["我", "爱", "你", "ok"]),
        ("co\u00adoperate \u200bzero\u200b width\ufeff", ["co\u00adoperate", "zero", "width"]),
        ("می\u200cخواهم", ["می\u200cخواهم"]),
        ("👍🏽 👨\u200d👩", ["👍", "🏽", "👨\u200d👩"]),
        ("_bark_ snake_case", ["_", "bark", "_", "snake_case"]),
        ("\u0301\u200d \t\n\x00", []),
    ],
)
def test_split_words(sentence, words):
    assert texts(sentence) == words


@given(st.text())
def test_words_have_correct_spans_and_cover_all_letters(sentence):
    words = split_words(sentence)
    assert all(sentence[word.start : word.stop] == word.text for word in words)
    assert all(first.stop <= second.start for first, second in pairwise(words))
    held = {place for word in words for place in range(word.start, word.stop)}
    assert all(place in held for place, letter in enumerate(sentence) if letter.isalnum())
    assert not any(sentence[place].isspace() for place in held)


@given(st.lists(st.text("abAB.'"), min_size=1))
def test_vocabulary_finds_its_words_in_any_case(sentences):
    vocabulary = Vocabulary.of(sentences)
    words = [word.text for sentence in sentences for word in split_words(sentence)]
    numbers = vocabulary.ids(words)
    assert 0 not in numbers
    assert [vocabulary[number] for number in numbers] == [fold(word) for word in words]
    assert Vocabulary.of(sentences[::-1]) == vocabulary
    assert "xyzzy" not in vocabulary


def test_vocabulary_prefers_exact_spelling_and_frequent_words():
    assert Vocabulary(["Paris", "paris"]).ids(["paris", "Paris", "PARIS"]) == [2, 1, 1]
    assert list(Vocabulary.of(["a b b c c c"], max_size=2)) == ["<unk>", "c", "b"]
    assert list(Vocabulary.of(["a b b c c c"], min_count=3)) == ["<unk>", "c"]
    with pytest.raises(ArgumentError, match="'a' twice, as word 1 and word 2"):
        Vocabulary(["a", "a"])
    with pytest.raises(DTypeError, match="word 1"):
        Vocabulary([""])
    with pytest.raises(DTypeError, match="one string"):
        Vocabulary.of("a sentence")


def test_close_words_is_fast_in_a_large_vocabulary():
    assert close_words("wrod77", (f"word{i}" for i in range(100_000)))[0] == "word77"


def test_word_vector_is_the_mean_of_its_tokens(encoder):
    sentence = "Dogs may bark, x"
    (embedded,) = encoder.embed(sentence)
    assert embedded.words == ("Dogs", "may", "bark", ",", "x")
    assert [sentence[start:stop] for start, stop in embedded.spans] == list(embedded.words)
    assert embedded.vectors.shape == (3, 5, WIDTH)
    (tokens,) = encoder.eval().token_vectors([sentence])
    torch.testing.assert_close(embedded["bark"], tokens.vectors[:, 5:7].mean(1))
    torch.testing.assert_close(embedded["x"], tokens.vectors[:, 8])


def test_token_spanning_two_words_belongs_to_both():
    class Wide(WordEncoder):
        layers = 1

        def token_vectors(self, sentences: Sequence[str]) -> list[TokenVectors]:
            vectors = torch.tensor([[[1.0], [3.0], [7.0]]])
            return [TokenVectors(vectors, [(0, 4), (3, 6), (6, 6)]) for _ in sentences]  # "one " "␣tw" ""

    (embedded,) = Wide().embed("one two")
    assert embedded.words == ("one", "two")
    torch.testing.assert_close(embedded.vectors, torch.tensor([[[1.0], [3.0]]]))


def test_words_without_tokens_are_omitted():
    encoder = Letters(lost="ab cd")
    (embedded,) = encoder.embed("ab bark cd")
    assert embedded.words == ("bark",)
    assert embedded.vectors.isfinite().all()
    with pytest.raises(ArgumentError, match="drops all characters of 'ab cd'"):
        encoder.embed("ab cd")


def test_embed_has_no_gradients_and_restores_modes(encoder):
    encoder.train()
    encoder.blocks[1].eval()
    first, second = encoder.embed(["Dogs bark"] * 2)
    assert not first.vectors.requires_grad
    assert torch.equal(first.vectors, second.vectors)  # no dropout
    assert encoder.training
    assert encoder.blocks[0].training
    assert not encoder.blocks[1].training


def test_word_lookup():
    vectors = torch.arange(5.0).reshape(1, 5, 1)
    embedded = WordVectors("", ("Bark", "bark", "don’t", "bark", "BARK"), ((0, 0),) * 5, vectors)
    assert [embedded.index(w) for w in ("bark", "Bark", "bArK", "Don't")] == [1, 0, 0, 2]
    assert [embedded.index(w) for w in (("bark", 0), ("bark", 1), ("bark", -1))] == [1, 3, 3]
    assert embedded["bark", 1].item() == 3
    assert len(embedded) == 5
    with pytest.raises(ArgumentError, match=r"Occurrence 2 of 'bark' is out of range: .* occurs 2 times"):
        embedded.index(("bark", 2))
    with pytest.raises(ArgumentError, match=r"'barks' is not in .* \(did you mean 'Bark'"):
        embedded.index("barks")
    for wrong in (3, ("bark", "x"), ("bark", True), None, ("bark",)):
        with pytest.raises(DTypeError, match="pass a string, or a pair"):
            embedded.index(wrong)


def test_compare_is_the_cosine_at_each_layer(encoder):
    first, second = "Dogs may bark at you.", "Trees shed bark and bark"
    one, two = encoder.embed([first, second])
    comparison = encoder.compare(first, second, word="bark")
    expected = torch.cosine_similarity(one["bark"], two["bark"], dim=-1)
    torch.testing.assert_close(comparison.similarities, expected)
    assert comparison.similarity == comparison.similarities[-1].item()
    other = encoder.compare(first, second, word=("dogs", ("bark", 1)))
    assert other.words == ("Dogs", "bark")
    torch.testing.assert_close(
        other.similarities, torch.cosine_similarity(one["Dogs"], two["bark", 1], dim=-1)
    )
    encoder.best_layer = 0
    assert encoder.compare(first, second, word="bark").similarity == 1.0
    assert "← similarity" in repr(comparison)
    assert len(repr(comparison).splitlines()) == 3 + encoder.layers


def test_comparison_repr_of_any_values():
    shown = repr(Comparison(("a", "b"), ("x" * 999, "y"), torch.tensor([-1.0, math.nan, 1.0]), -1))
    assert max(map(len, shown.splitlines())) < 110


@pytest.mark.parametrize("word", [3, None, ("bark",), ("bark", "bark", "bark"), ("bark", None), ["bark"]])
def test_compare_needs_one_or_two_words(encoder, word):
    with pytest.raises(DTypeError, match="a pair"):
        encoder.compare("bark", "bark", word=word)


def test_missing_word_error_lists_the_words(encoder):
    with pytest.raises(ArgumentError, match=r"'cat' is not in 'Dogs bark.'.*has these words: Dogs bark \."):
        encoder.compare("A cat", "Dogs bark.", word="cat")


def test_unknown_word_is_rejected(encoder):
    (embedded,) = encoder.embed("bark zz")
    assert embedded.known == (True, False)
    with pytest.raises(ArgumentError, match="does not know the word 'zz'"):
        encoder.compare("zz", "zz", word="zz")
    with pytest.raises(ArgumentError, match="does not know the word 'zz'"):
        encoder.nearest("zz", among=["bark"])
    assert [each.word for each in encoder.nearest("bark", among=["zz zz", "dog"])] == ["dog"]


def test_nearest_ranks_all_words(encoder):
    query, among = "Dogs bark.", ["Trees shed bark.", "Dogs bark.", "A cat"]
    actual = encoder.nearest("bark", sentence=query, among=among, k=100)
    assert sorted(each.word for each in actual) == [
        "A",
        "Dogs",
        "Trees",
        "bark",
        "cat",
        "shed",
    ]  # no "."
    assert actual == sorted(actual, key=lambda each: -each.similarity)
    for each in actual:
        assert each.sentence is not None
        expected = encoder.compare(query, each.sentence, word=("bark", each.word)).similarity
        assert each.similarity == pytest.approx(expected, abs=1e-6)
    assert encoder.nearest("bark", sentence=query, among=among, k=2) == actual[:2]
    assert encoder.nearest("bark", among=["bark"]) == []
    top = encoder.nearest("bark", sentence=query, among=among, layer=0, k=1)
    assert top == [Neighbor("bark", "Trees shed bark.", 1.0)]


def test_invalid_nearest_arguments(encoder):
    with pytest.raises(ArgumentError, match="pass sentences to search"):
        encoder.nearest("bark")
    with pytest.raises(ArgumentError, match="layer=3 is not valid; pass an integer from 0 to 2"):
        encoder.nearest("bark", among=["dog"], layer=3)
    with pytest.raises(ArgumentError, match="k=0"):
        encoder.nearest("bark", among=["dog"], k=0)
    for wrong in (5, None, ("bark", "x")):
        with pytest.raises(DTypeError, match="pass a string, or a pair"):
            encoder.nearest(wrong, among=["dog"])
    with pytest.raises(DTypeError, match="Sentence 0 is a list"):
        encoder.nearest("bark", sentence=["Dogs bark.", "no"], among=["dog"])


def dense(encoder: Letters, sentence: str) -> Tensor:
    """Return the weights of all attention layers: (layers, h, n, n)."""
    with regard.watch(encoder) as seen, torch.no_grad():
        list(encoder.eval().token_vectors([sentence]))
    return torch.stack([weights.dense()[0] for weights in seen.values()])


@pytest.mark.parametrize(("layer", "head"), [(None, None), (0, None), (1, 1), (-1, 0), (None, -1)])
def test_attended_words_sums_over_keys_and_averages_over_queries(encoder, layer, head):
    sentence = "Dogs bark"  # [CLS] Do gs ba rk [SEP]
    weights = dense(encoder, sentence)
    weights = weights if layer is None else weights[[layer]]
    weights = weights if head is None else weights[:, [head]]
    row = weights.mean((0, 1))[3:5].mean(0)
    actual = encoder.attended_words(sentence, "bark", layer=layer, head=head)
    assert [each.word for each in actual] == ["[CLS]", "Dogs", "bark", "[SEP]"]
    expected = torch.stack([row[0], row[1:3].sum(), row[3:5].sum(), row[5]])
    torch.testing.assert_close(torch.tensor([each.weight for each in actual]), expected)
    assert sum(each.weight for each in actual) == pytest.approx(1, abs=1e-6)


def test_attended_words_keeps_other_watchers(encoder):
    with regard.watch(encoder) as seen:
        encoder.attended_words("Dogs bark", "bark")
        assert len(seen) == 2
        encoder.embed("Dogs")
        assert len(seen) == 4
    assert all("watchers" not in vars(block) for block in encoder.blocks)


@pytest.mark.parametrize("layer", [2, -3, 1.0, True])
def test_layer_out_of_range_is_rejected(encoder, layer):
    with pytest.raises(
        ArgumentError, match=f"attention layer={layer} is not valid; pass an integer from 0 to 1"
    ):
        encoder.attended_words("Dogs bark", "bark", layer=layer)


def test_missing_heads_and_words_are_rejected(encoder):
    with pytest.raises(ArgumentError, match="head=2 is not valid; pass an integer from 0 to 1"):
        encoder.attended_words("Dogs bark", "bark", head=2)
    with pytest.raises(ArgumentError, match="'cat' is not in"):
        encoder.attended_words("Dogs bark", "cat")


@pytest.mark.parametrize(
    ("sentences", "error", "message"),
    [
        ("", ArgumentError, "Sentence 0, ''"),
        (["dog", " \t"], ArgumentError, "Sentence 1, "),
        (["dog", "\u200b"], ArgumentError, "has no words"),
        (["dog", None], DTypeError, "Sentence 1 is None"),
        (3, DTypeError, "sentences is an int; pass a string"),
        (["a \ud800 b"], ArgumentError, "surrogate"),
    ],
)
def test_sentences_without_words_are_rejected(encoder, sentences, error, message):
    with pytest.raises(error, match=message):
        encoder.embed(sentences)


def test_no_sentences_give_no_vectors(encoder):
    assert encoder.embed([]) == []


def test_token_vectors_must_be_implemented():
    with pytest.raises(NotImplementedError, match="token_vectors"):
        WordEncoder().embed("a")
