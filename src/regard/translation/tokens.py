"""Text as token numbers and back: vocabularies that SentencePiece learns from the text to be translated.

text  → words → pieces → ids         "Eine Frau" → ▁Ein e ▁Frau → 14 7 102
ids   → pieces → words → text        and each piece knows its word, which alignments of words need
"""

import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from regard._util.checks import check_int, check_number
from regard._util.files import read_regular, write_atomic
from regard.errors import ArgumentError

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

PADDING, START, END, UNKNOWN = range(4)
MARKS = 4  # numbers below it are no pieces
SPACE = "▁"  # with which SentencePiece begins a word
Kind = Literal["unigram", "bpe", "words", "characters"]
_NAMES = {"unigram": "unigram", "bpe": "bpe", "words": "word", "characters": "char"}  # SentencePiece's own
_MOST_LINES = 2_000_000  # that a vocabulary is learned from; of more, a sample
_LONGEST_LINE = 1 << 16  # bytes
_LARGEST = 1 << 28  # bytes of a SentencePiece model: about ten million pieces
MIN_COVERAGE = 0.98  # that SentencePiece accepts
_HALF = (
    "the text has half of a surrogate pair (\\ud800 to \\udfff), which is no character; read it as UTF-8, or "
    "remove it."
)
_NOTHING = (
    f"there is no text to learn a vocabulary from; every line is blank, or has over {_LONGEST_LINE:,} bytes."
)


class Segmentation(NamedTuple):
    """A text cut into pieces; `word_of` gives the number of the word that each piece belongs to.

    words: of the text, as they stand between white space.
    ids, pieces: the numbers of the pieces, and their letters; ▁ is where a word begins.
    unknown: the letters of the pieces that are not in the vocabulary, by their places.

    >>> from regard.translation import Segmentation
    >>> cut = Segmentation(["dogs", "bark"], [5, 6, 7], ["▁dog", "s", "▁bark"], [0, 0, 1], {})
    >>> cut.words[cut.word_of[1]], cut.text
    ('dogs', 'dogs bark')
    """

    words: list[str]
    ids: list[int]
    pieces: list[str]
    word_of: list[int]
    unknown: dict[int, str]

    @property
    def text(self) -> str:
        """The words, one space between them."""
        return " ".join(self.words)


class Tokenizer:
    """A vocabulary: pieces of words ("unigram", "bpe"), whole words, or characters.

    content, kind: a SentencePiece model, and what its pieces are; `Tokenizer.learn` makes both of sentences.

    >>> from regard.translation import Tokenizer
    >>> tokens = Tokenizer.learn(["ein Hund bellt", "eine Frau lacht"] * 10, kind="bpe", size=40)
    >>> tokens.join(tokens.encode("eine Frau bellt")).text
    'eine Frau bellt'
    >>> cut = tokens.segment("ein 漢字")  # what is not in the vocabulary keeps its letters
    >>> cut.word_of[-1], cut.unknown
    (1, {2: '漢字'})
    """

    def __init__(self, content: bytes, kind: Kind) -> None:
        self.content, self.kind = content, kind

    @classmethod
    def learn(
        cls,
        lines: Iterable[str],
        *,
        kind: Kind = "unigram",
        size: int = 8000,
        coverage: float = 1.0,
        seed: int = 0,
    ) -> "Tokenizer":
        """Learn a vocabulary of at most `size` pieces from lines of text.

        kind: what pieces are: "unigram" or "bpe", parts of words; "words"; "characters".
        coverage: the share of all letters that get a number, at least 0.98; the rest, rare ones, are unknown.
        """
        from sentencepiece import SentencePieceTrainer, set_random_generator_seed

        _known(kind)
        check_int("Tokens.learn got size", size, min=MARKS + 1)
        check_number("Tokens.learn got coverage", coverage, min=MIN_COVERAGE, max=1)
        check_int("Tokens.learn got seed", seed)
        set_random_generator_seed(seed % 2**32)
        written, given = io.BytesIO(), _Lines(lines)
        options: dict[str, Any] = {
            "model_type": _NAMES[kind],
            "vocab_size": size,
            "hard_vocab_limit": False,
            "character_coverage": coverage,
            "input_sentence_size": _MOST_LINES,
            "max_sentence_length": _LONGEST_LINE,
            "num_threads": 1,  # so that the same text gives the same vocabulary
            "minloglevel": 2,
            "pad_id": PADDING,
            "bos_id": START,
            "eos_id": END,
            "unk_id": UNKNOWN,
        }
        try:
            SentencePieceTrainer.train(sentence_iterator=iter(given), model_writer=written, **options)
        except RuntimeError as error:
            raise given.failed or ArgumentError(_why(error, kind, size)) from None
        tokens = cls(written.getvalue(), kind)
        if len(tokens) == MARKS:
            raise ArgumentError(_NOTHING)
        return tokens

    @classmethod
    def load(cls, path: str | os.PathLike[str], kind: Kind = "unigram") -> "Tokenizer":
        """Read a vocabulary from a file that `save` wrote."""
        _known(kind)
        tokens = cls(cls.read(path), kind)
        tokens._checked(os.fspath(path))
        return tokens

    @staticmethod
    def read(path: str | os.PathLike[str]) -> bytes:
        """What is in a file that `save` wrote."""
        return read_regular(path, _LARGEST)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the vocabulary, as a SentencePiece model."""
        write_atomic(path, self.content)

    def __len__(self) -> int:
        return self._processor.get_piece_size()

    def __repr__(self) -> str:
        return f"Tokens(<{len(self):,} {'pieces' if self.kind in ('unigram', 'bpe') else self.kind}>)"

    def encode(self, text: str) -> list[int]:
        """The numbers of a text's pieces, without marks."""
        return self.encode_batch([text])[0]

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        """The numbers of the pieces of each line."""
        if self.kind != "words":  # one blank between words: SentencePiece does not know all kinds of them
            return self._encoded([" ".join(line.split()) for line in lines])
        # word by word, as SentencePiece makes one piece of several unknown words
        return [[one for ids in self._encoded(line.split()) for one in ids] for line in lines]

    def cut(self, text: str) -> Segmentation:
        """A text cut into pieces, each with the word that it belongs to; words stand between white space."""
        words = text.split()
        # no piece crosses a space, so that words can be cut one by one
        pieces, ids = self._encoded(words, str), self._encoded(words)
        cut = Segmentation(words, [], [], [], {})
        for word, (some, numbers) in enumerate(zip(pieces, ids, strict=True)):
            for piece, number_ in zip(some, numbers, strict=True):
                if number_ == UNKNOWN:
                    letters = words[word] if self.kind == "words" and len(some) == 1 else piece
                    cut.unknown[len(cut.ids)] = letters.removeprefix(SPACE)
                cut.ids.append(number_)
                cut.pieces.append(piece)
                cut.word_of.append(word)
        return cut

    def join(self, ids: Sequence[int], unknown: Mapping[int, str] | None = None) -> Segmentation:
        """What a model wrote, as text; `unknown` has the letters to put at places of unknown pieces."""
        letters = unknown or {}
        words: list[str] = []
        cut = Segmentation(words, [], [], [], {})
        for place, one in enumerate(ids):
            if one < MARKS and one != UNKNOWN:
                piece = ""
            elif one == UNKNOWN:
                cut.unknown[place] = letters.get(place, "⁇")
                piece = (SPACE if self.kind == "words" else "") + cut.unknown[place]
            else:
                piece = self._pieces[one]
            if piece.startswith(SPACE) or not words:
                words.append("")
            words[-1] += piece.removeprefix(SPACE)
            cut.ids.append(one)
            cut.pieces.append(piece)
            cut.word_of.append(len(words) - 1)
        return _without_empty(cut)

    def _encoded(self, texts: list[str], kind: type = int) -> list[list[Any]]:
        """The numbers of the pieces of each text, or the pieces."""
        try:
            return self._processor.encode(texts, out_type=kind)
        except TypeError:
            raise ArgumentError(_HALF) from None

    @cached_property
    def _pieces(self) -> list[str]:
        return [self._processor.id_to_piece(i) for i in range(len(self))]

    @cached_property
    def _processor(self) -> "SentencePieceProcessor":
        from sentencepiece import SentencePieceProcessor

        return SentencePieceProcessor(model_proto=self.content)

    def _checked(self, name: str) -> None:
        """Refuse what is no SentencePiece model of ours: its marks must have our numbers."""
        try:
            if not self.content:
                raise RuntimeError("empty")
            found = self._processor
            marks = (found.pad_id(), found.bos_id(), found.eos_id(), found.unk_id())
            _ = self._pieces  # each of them text
        except (RuntimeError, UnicodeDecodeError):
            raise ArgumentError(
                f"{name!r} is no SentencePiece model, or a damaged one; it is part of a model folder, so "
                "copy that folder again, or train anew."
            ) from None
        if marks != (PADDING, START, END, UNKNOWN):
            raise ArgumentError(
                f"{name!r} numbers its marks {marks} (padding, start, end, unknown); regard needs "
                f"{(PADDING, START, END, UNKNOWN)}. Learn it anew with Tokenizer.learn."
            )


class TokenizerPair(NamedTuple):
    """The vocabularies of the source and of the target; one and the same if they share it.

    >>> from regard.translation import Tokenizer, TokenizerPair
    >>> source = Tokenizer.learn(["ein Hund bellt"], kind="words")
    >>> target = Tokenizer.learn(["a dog barks loudly"], kind="words")
    >>> TokenizerPair(source, target).sizes(), TokenizerPair(source, source).sizes()  # with four marks each
    ((7, 8), 7)
    """

    source: Tokenizer
    target: Tokenizer

    @property
    def shared(self) -> bool:
        """Whether there is one vocabulary for both."""
        return self.source is self.target

    def sizes(self) -> int | tuple[int, int]:
        """What a model wants to know of them."""
        return len(self.source) if self.shared else (len(self.source), len(self.target))


def _without_empty(cut: Segmentation) -> Segmentation:
    """Words that have no letters, which a model may write, are none; their pieces belong to the next word."""
    kept = [word for word in cut.words if word]
    if len(kept) == len(cut.words):
        return cut
    place, places = 0, []
    for word in cut.words:
        places.append(min(place, max(len(kept) - 1, 0)))
        place += bool(word)
    return cut._replace(words=kept, word_of=[places[word] for word in cut.word_of])


def _known(kind: str) -> None:
    if kind not in get_args(Kind):
        raise ArgumentError(f"Tokens got kind={kind!r}; there are {', '.join(get_args(Kind))}.")


class _Lines(Iterable[str]):
    """Lines on their way through SentencePiece, which would tell nothing of what failed in them."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = lines
        self.failed: BaseException | None = None

    def __iter__(self) -> Iterator[str]:
        try:
            yield from self._lines
        except BaseException as error:
            self.failed = error
            raise


def _why(error: RuntimeError, kind: Kind, size: int) -> str:
    """What SentencePiece refused, in words that help."""
    text = str(error)
    if "Unable to cast" in text:
        return _HALF
    if ".empty()" in text:
        return _NOTHING
    if "Vocabulary size is smaller" in text:
        return (
            f"a vocabulary of {size} is too small for the letters of this text; give a larger one, or a "
            "smaller coverage."
        )
    return f"SentencePiece could not learn a {kind} vocabulary of {size}: {text.strip().splitlines()[-1]}"
