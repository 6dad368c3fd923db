"""Tokenizers: decoding inverts segmentation, and each token is mapped to its word."""

import unicodedata
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from regard.errors import ArgumentError, DTypeError
from regard.translation.tokens import SPECIAL_TOKENS, UNKNOWN, Segmentation, Tokenizer

LINES = [
    "ein Hund bellt laut",
    "eine Frau lacht und singt",
    "die Katze schläft auf dem Sofa",
    "zwei Männer gehen über die Straße",
    "漢字 中 文 und so weiter",
] * 5
KINDS = ("unigram", "bpe", "words", "characters")
LEARNED = {kind: Tokenizer.learn(LINES, kind=kind, size=80) for kind in KINDS}

kinds = pytest.mark.parametrize("kind", KINDS)
# spaces of all kinds, combining marks, joiners, ligatures, and SentencePiece's word boundary
ODD = [
    *("\u0301", "\u0308", "\u200b", "\u200d", "\xa0", "\u3000", "\u2028", "\x85", "\x1c", "\v"),
    *("▁", "ﬁ", "Ⅷ", "ﷺ", "¨", "한", "漢", "😀", "👩‍👩‍👧", "⁇", "▅", "<s>", "</s>", "<unk>", "<pad>"),
]
known = st.sampled_from([word for line in LINES for word in line.split()])
words = st.one_of(known, st.sampled_from(ODD), st.text(max_size=4))
texts = st.lists(st.tuples(words, st.sampled_from(["", " ", "  "])), max_size=8).map(
    lambda parts: "".join(word + blank for word, blank in parts)
)


def round_trip(tokens: Tokenizer, text: str) -> str:
    """Segment and decode a text."""
    segmentation = tokens.segment(text)
    return tokens.decode(segmentation.ids, segmentation.unknown).text


@kinds
@given(text=texts)
@example(text="a\x1cb\x85c Hund")
def test_segmentation_works_word_by_word(kind, text):
    tokens, segmentation = LEARNED[kind], LEARNED[kind].segment(text)
    by_word = [tokens.encode(word) for word in text.split()]
    assert tokens.encode(text) == segmentation.ids == [token for ids in by_word for token in ids]
    assert segmentation.word_of == [word for word, ids in enumerate(by_word) for _ in ids]
    assert segmentation.words == text.split()
    assert len(segmentation.pieces) == len(segmentation.ids)
    unknown = {place for place, token in enumerate(segmentation.ids) if token == UNKNOWN}
    assert unknown == set(segmentation.unknown)
    assert all(token == UNKNOWN or token >= SPECIAL_TOKENS for token in segmentation.ids)


@pytest.mark.parametrize("kind", ["unigram", "bpe", "characters"])
@given(
    text=st.text(
        st.characters(max_codepoint=0x24F, exclude_categories=["Cc"])
        | st.sampled_from("\u0301\u0308\u200d\xa0\u3000▁ﬁⅧﷺ한漢字😀")
    )
)
def test_decoding_returns_the_normal_form(kind, text):
    normal = unicodedata.normalize("NFKC", text).replace("▁", " ")
    # SentencePiece does not compose some marks, such as in Ấ
    assert unicodedata.normalize("NFKC", round_trip(LEARNED[kind], text)) == " ".join(normal.split())


@given(text=texts)
@example(text="Hund a▁b x\u200by laut")
@example(text="einein▁")
def test_unknown_words_keep_their_text(text):
    tokens = LEARNED["words"]
    shown = [word.removeprefix("▁") for word in text.split() if tokens.encode(word) == [UNKNOWN]]
    joined = round_trip(tokens, text).split(" ")
    assert all(word in joined for word in shown)


@kinds
@given(text=st.text() | texts)
def test_a_second_round_trip_changes_nothing(kind, text):
    """Combining marks, which may be composed, and SentencePiece's word boundary are excluded."""
    assume("▁" not in unicodedata.normalize("NFKC", text))
    once = round_trip(LEARNED[kind], text)
    assert unicodedata.normalize("NFKC", round_trip(LEARNED[kind], once)) == unicodedata.normalize(
        "NFKC", once
    )


@kinds
@given(data=st.data())
def test_any_ids_decode_to_words(kind, data):
    tokens = LEARNED[kind]
    ids = data.draw(st.lists(st.integers(0, len(tokens) - 1)))
    joined = tokens.decode(ids)
    assert joined.ids == ids
    assert joined.text == " ".join(joined.words)
    assert all(joined.words)
    assert joined.word_of == sorted(joined.word_of)
    if joined.words:
        assert set(joined.word_of) == set(range(len(joined.words)))
        assert joined.words == [_spelled(joined, word) for word in range(len(joined.words))]


def _spelled(segmentation: Segmentation, word: int) -> str:
    """Join the tokens of a word."""
    return "".join(
        piece for piece, of in zip(segmentation.pieces, segmentation.word_of, strict=True) if of == word
    ).strip("▁")


@kinds
def test_unknown_characters_are_restored(kind):
    tokens = LEARNED[kind]
    segmentation = tokens.segment("Hund щука bellt")
    assert "".join(segmentation.unknown.values()) == "щука"
    assert tokens.decode(segmentation.ids, segmentation.unknown).text == "Hund щука bellt"
    assert tokens.decode(segmentation.ids).text == "Hund ⁇ bellt"
    assert tokens.decode(segmentation.ids, dict.fromkeys(segmentation.unknown, "carpa")).words[1] == "carpa"


@kinds
def test_encode_batch_equals_encode(kind):
    tokens = LEARNED[kind]
    assert tokens.encode_batch(LINES[:5]) == [tokens.encode(line) for line in LINES[:5]]
    assert tokens.encode_batch(["", "  ", "Hund"])[:2] == [[], []]
    assert tokens.encode_batch([]) == []


@kinds
def test_the_same_text_gives_the_same_vocabulary(kind):
    assert Tokenizer.learn(iter(LINES), kind=kind, size=80).content == LEARNED[kind].content


@kinds
@pytest.mark.parametrize("size", [45, 60, 8000])
def test_a_vocabulary_never_exceeds_size(kind, size):
    tokens = Tokenizer.learn(LINES, kind=kind, size=size)
    assert SPECIAL_TOKENS < len(tokens) <= size
    assert f"{len(tokens):,}" in repr(tokens)


@kinds
def test_save_and_load(kind, tmp_path):
    LEARNED[kind].save(tmp_path / "tokens.model")
    loaded = Tokenizer.load(tmp_path / "tokens.model", kind)
    assert loaded.content == LEARNED[kind].content
    assert loaded.segment("ein Hund 鳥") == LEARNED[kind].segment("ein Hund 鳥")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vocabulary") / "tokens.model"


@kinds
@given(part=st.floats(0, 0.999))
def test_a_truncated_vocabulary_is_rejected(kind, part, file):
    content = LEARNED[kind].content
    file.write_bytes(content[: int(part * len(content))])
    with suppress(ArgumentError):
        # a file that is cut right after a token can be loaded, but has fewer tokens
        assert len(Tokenizer.load(file, kind)) < len(LEARNED[kind])


@given(content=st.binary(max_size=200))
def test_a_file_that_is_not_a_vocabulary_is_rejected(content, file):
    file.write_bytes(content)
    with pytest.raises(ArgumentError, match="Copy its model folder again"):
        Tokenizer.load(file)


@kinds
@given(data=st.data())
def test_a_damaged_vocabulary_is_rejected_or_works(kind, data, file):
    content = bytearray(LEARNED[kind].content)
    for place in data.draw(st.lists(st.integers(0, 3000), min_size=1, max_size=9)):
        content[place] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    try:
        tokens = Tokenizer.load(file, kind)
    except ArgumentError:
        return
    tokens.decode(range(len(tokens)))
    tokens.segment("ein Hund 鳥")


def test_a_vocabulary_with_other_special_tokens_is_rejected(tmp_path):
    from sentencepiece import SentencePieceTrainer

    with open(tmp_path / "other.model", "wb") as file:
        SentencePieceTrainer.train(
            sentence_iterator=iter(LINES),
            model_writer=file,
            vocab_size=60,
            hard_vocab_limit=False,
            minloglevel=2,
        )
    with pytest.raises(ArgumentError, match=r"\(-1, 1, 2, 0\).*regard requires \(0, 1, 2, 3\)"):
        Tokenizer.load(tmp_path / "other.model")


@kinds
@pytest.mark.parametrize("lines", [[], ["", "  "], ["\u200b", "▁"], ["a" * 70_000]])
def test_learning_from_no_text_raises(kind, lines):
    with pytest.raises(ArgumentError, match="No text to learn a vocabulary from"):
        Tokenizer.learn(lines, kind=kind)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_a_vocabulary_too_small_for_all_characters_is_rejected(kind):
    with pytest.raises(ArgumentError, match="A vocabulary of 12 is too small"):
        Tokenizer.learn(LINES, kind=kind, size=12)


def test_an_error_in_the_lines_is_propagated():
    def broken() -> Iterator[str]:
        yield "ein Hund"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Tokenizer.learn(broken())


def test_a_lone_surrogate_is_rejected():
    with pytest.raises(ArgumentError, match="contains a lone surrogate"):
        Tokenizer.learn(["ein \ud800 Hund"])
    for kind in KINDS:
        for call in (LEARNED[kind].encode, LEARNED[kind].segment):
            with pytest.raises(ArgumentError, match="contains a lone surrogate"):
                call("ein \ud800 Hund")


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (
            {"kind": "letters"},
            "Unknown tokenizer kind 'letters'. Choose from unigram, bpe, words, characters",
        ),
        ({"size": 4}, "size=4; it must be at least 5"),
        ({"character_coverage": 0.9}, "character_coverage=0.9; it must be at least 0.98"),
        ({"character_coverage": 1.1}, "character_coverage=1.1; it must be at least 0.98 and at most 1."),
        ({"seed": -1}, "seed=-1; it must be at least 0"),
    ],
)
def test_invalid_arguments_are_rejected(wrong, why):
    with pytest.raises(ArgumentError, match=why):
        Tokenizer.learn(LINES, **wrong)
    with pytest.raises(DTypeError, match="integer"):
        Tokenizer.learn(LINES, size="many")
    with pytest.raises(ArgumentError, match="Unknown tokenizer kind 'letters'"):
        Tokenizer.load("tokens.model", "letters")
