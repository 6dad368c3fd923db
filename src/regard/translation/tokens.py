"""Text to token ids and back, with SentencePiece vocabularies learned from the corpus.

text  → words → tokens → ids         "Eine Frau" → ▁Ein e ▁Frau → 14 7 102
ids   → tokens → words → text        each token keeps the index of its word, for alignments
"""

import io
import os
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from regard._util.checks import check_int, check_number
from regard._util.extras import require
from regard._util.files import read_regular, write_atomic
from regard.errors import ArgumentError
from regard.models.generation import SpecialTokens

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

PADDING, START, END, UNKNOWN = range(4)
SPECIAL_TOKENS = 4  # ids below this are special tokens
SPACE = "▁"  # SentencePiece's word boundary
Kind = Literal["unigram", "bpe", "words", "characters"]
_MODEL_TYPES = {"unigram": "unigram", "bpe": "bpe", "words": "word", "characters": "char"}
_MAX_LINES = 2_000_000  # larger corpora are sampled
_MAX_LINE_BYTES = 1 << 16
_MAX_FILE_BYTES = 1 << 28  # the size of a SentencePiece model with about ten million tokens
MIN_COVERAGE = 0.98  # SentencePiece's limit
_MIN_PARALLEL = 64  # SentencePiece starts threads for each list, which is slower if the list is short
_CACHED_WORDS, _CACHED_LENGTH = 2**15, 100  # words, and characters per word, whose tokens are kept
_LONE_SURROGATE = (
    "The text contains a lone surrogate (\\ud800 to \\udfff), which is not a character. Decode the text as "
    "UTF-8, or remove the surrogate."
)
_NO_TEXT = (
    f"No text to learn a vocabulary from: every line is blank or longer than {_MAX_LINE_BYTES:,} bytes. "
    "Pass text with one sentence per line."
)


class Segmentation(NamedTuple):
    """A text split into tokens.

    words: the words in the text, separated by whitespace.
    ids, pieces: token ids, and tokens as text; ▁ marks the beginning of a word.
    word_of: index of the word that each token belongs to.
    unknown: text of the tokens that are not in the vocabulary, by position.

    >>> from regard.translation import Segmentation
    >>> segmentation = Segmentation(["dogs", "bark"], [5, 6, 7], ["▁dog", "s", "▁bark"], [0, 0, 1], {})
    >>> segmentation.words[segmentation.word_of[1]], segmentation.text
    ('dogs', 'dogs bark')
    """

    words: list[str]
    ids: list[int]
    pieces: list[str]
    word_of: list[int]
    unknown: dict[int, str]

    @property
    def text(self) -> str:
        """The words, separated by spaces."""
        return " ".join(self.words)


class Tokenizer:
    """A SentencePiece tokenizer: subwords ("unigram" or "bpe"), words or characters.

    content: serialized SentencePiece model; see `Tokenizer.learn`. kind: the kind of token it produces.

    >>> from regard.translation import Tokenizer
    >>> tokenizer = Tokenizer.learn(["ein Hund bellt", "eine Frau lacht"] * 10, kind="bpe", size=40)
    >>> tokenizer.decode(tokenizer.encode("eine Frau bellt")).text
    'eine Frau bellt'
    >>> segmentation = tokenizer.segment("ein 漢字")  # unknown tokens keep their text
    >>> segmentation.word_of[-1], segmentation.unknown
    (1, {2: '漢字'})
    """

    special = SpecialTokens()
    origin: object = None  # the pretrained folder that the vocabulary belongs to

    def __init__(self, content: bytes, kind: Kind) -> None:
        self.content, self.kind = content, kind
        self._words: dict[str, tuple[list[int], list[str]]] = {}  # see _encode_word

    @classmethod
    def learn(
        cls,
        lines: Iterable[str],
        *,
        kind: Kind = "unigram",
        size: int = 8000,
        character_coverage: float = 1.0,
        seed: int = 0,
    ) -> "Tokenizer":
        """Learn a vocabulary of at most `size` tokens from lines of text.

        kind: "unigram" or "bpe" subwords, "words" or "characters".
        character_coverage: fraction of the text's characters that the vocabulary covers, at least 0.98; rarer
            characters are unknown.
        """
        require("sentencepiece", "Tokenizer.learn")
        from sentencepiece import SentencePieceTrainer, set_random_generator_seed

        _check_kind(kind)
        check_int("Tokenizer.learn got size", size, min=SPECIAL_TOKENS + 1)
        check_number("Tokenizer.learn got character_coverage", character_coverage, min=MIN_COVERAGE, max=1)
        check_int("Tokenizer.learn got seed", seed)
        set_random_generator_seed(seed % 2**32)
        content, source = io.BytesIO(), _ErrorRecorder(lines)
        options: dict[str, Any] = {
            "model_type": _MODEL_TYPES[kind],
            "vocab_size": size,
            "hard_vocab_limit": False,
            "character_coverage": character_coverage,
            "input_sentence_size": _MAX_LINES,
            "max_sentence_length": _MAX_LINE_BYTES,
            "num_threads": 1,  # deterministic
            "minloglevel": 2,
            "pad_id": PADDING,
            "bos_id": START,
            "eos_id": END,
            "unk_id": UNKNOWN,
        }
        try:
            SentencePieceTrainer.train(sentence_iterator=iter(source), model_writer=content, **options)
        except RuntimeError as error:
            raise source.error or ArgumentError(_explain(error, kind, size)) from None
        tokenizer = cls(content.getvalue(), kind)
        if len(tokenizer) == SPECIAL_TOKENS:
            raise ArgumentError(_NO_TEXT)
        return tokenizer

    @classmethod
    def load(cls, path: str | os.PathLike[str], kind: Kind = "unigram") -> "Tokenizer":
        """Load a file written by `save`."""
        _check_kind(kind)
        tokenizer = cls(cls.read(path), kind)
        tokenizer._check_model(os.fspath(path))
        return tokenizer

    @staticmethod
    def read(path: str | os.PathLike[str]) -> bytes:
        """Return the content of a file written by `save`."""
        return read_regular(path, _MAX_FILE_BYTES)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the SentencePiece model to a file."""
        write_atomic(path, self.content)

    def __len__(self) -> int:
        return self._processor.get_piece_size()

    def __repr__(self) -> str:
        return f"Tokenizer(<{len(self):,} {'subwords' if self.kind in ('unigram', 'bpe') else self.kind}>)"

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, excluding special tokens."""
        return self.encode_batch([text])[0]

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each line."""
        if self.kind != "words":  # SentencePiece does not recognize all Unicode whitespace
            return self._encode([" ".join(line.split()) for line in lines])
        # word by word: SentencePiece merges adjacent unknown words
        return [[token for ids in self._encode(line.split()) for token in ids] for line in lines]

    def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each word; faster than `encode_batch` for words that were encoded before.

        >>> from regard.translation import Tokenizer
        >>> tokenizer = Tokenizer.learn(["ein Hund bellt"] * 9, kind="characters")
        >>> tokenizer.encode_words(["ein", "Hund"]) == tokenizer.encode_batch(["ein", "Hund"])
        True
        """
        return [list(self._encode_word(word)[0]) for word in words]

    def segment(self, text: str) -> Segmentation:
        """Split a text into tokens and assign each to its word."""
        words = text.split()
        result = Segmentation(words, [], [], [], {})
        for number, word in enumerate(words):  # no token crosses a space
            ids, pieces = self._encode_word(word)
            if UNKNOWN in ids:
                for at, (token, piece) in enumerate(zip(ids, pieces, strict=True), len(result.ids)):
                    if token == UNKNOWN:
                        surface = word if self.kind == "words" and len(ids) == 1 else piece
                        result.unknown[at] = surface.removeprefix(SPACE)
            result.ids.extend(ids)
            result.pieces.extend(pieces)
            result.word_of.extend([number] * len(ids))
        return result

    def decode(self, ids: Sequence[int], unknown: Mapping[int, str] | None = None) -> Segmentation:
        """Convert token ids to text; `unknown` maps positions of unknown tokens to text.

        Text that begins with ▁ begins a new word; text that ends with ▁ ends its word, unless tokens are
        words.
        """
        surfaces = unknown or {}
        words: list[str] = []
        ends_word, by_word = False, self.kind == "words"
        result = Segmentation(words, [], [], [], {})
        for position, token in enumerate(ids):
            if token == self.special.unknown:
                text = surfaces.get(position, "⁇")
                result.unknown[position] = text.removeprefix(SPACE) if by_word else text.strip(SPACE)
                piece = text if text.startswith(SPACE) or not by_word else SPACE + text
            elif self._is_control(token):
                piece = ""
            else:
                piece = self._pieces[token]
            if piece.startswith(SPACE) or not words or (ends_word and piece[:1].isalnum()):
                words.append("")
            ends_word = token == self.special.unknown and piece.endswith(SPACE) and not by_word
            piece = piece.removesuffix(SPACE) if ends_word else piece
            words[-1] += piece.removeprefix(SPACE)
            result.ids.append(token)
            result.pieces.append(piece)
            result.word_of.append(len(words) - 1)
        return _drop_empty_words(result)

    def nbest(self, word: str, n: int) -> list[list[int]]:
        """Return up to n segmentations of a word as token ids, the most probable first. Unigram only.

        >>> from regard.translation import Tokenizer
        >>> tokenizer = Tokenizer.learn(["ein Hund bellt", "eine Frau lacht"] * 10, size=30)
        >>> {tokenizer.decode(ids).text for ids in tokenizer.nbest("Hund", 3)}
        {'Hund'}
        """
        if self.kind != "unigram":
            raise ArgumentError(
                f"Tokenizer.nbest requires a unigram vocabulary, got kind={self.kind!r}. Learn one with "
                'Tokenizer.learn(lines, kind="unigram").'
            )
        try:
            return self._processor.nbest_encode_as_ids(word, n)
        except TypeError:
            raise ArgumentError(_LONE_SURROGATE) from None

    def _is_control(self, token: int) -> bool:
        """Return whether a token has no text, such as the end token."""
        return token < SPECIAL_TOKENS

    def piece(self, token: int) -> str:
        """Return a token as text, such as "▁dog", or "</s>" for a special token."""
        return self._pieces[token]

    def pieces(self) -> list[str]:
        """Return all tokens as text, by id."""
        return self._pieces

    def decode_batch(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Convert the token ids of several sentences to text, faster than `decode`.

        >>> from regard.translation import Tokenizer
        >>> tokenizer = Tokenizer.learn(["a dog barks"] * 9, kind="bpe", size=20)
        >>> tokenizer.decode_batch([tokenizer.encode("a dog"), []])
        ['a dog', '']
        """
        return self._processor.decode([list(sentence) for sentence in ids])

    def token_ids(self, pieces: Sequence[str]) -> list[int]:
        """Return the id of each piece, or the unknown id if the vocabulary does not contain it.

        >>> from regard.translation import Tokenizer
        >>> Tokenizer.learn(["a dog"] * 9, kind="characters").token_ids(["d", "dog"])
        [6, 3]
        """
        return [self._processor.piece_to_id(piece) for piece in pieces]

    def inner_tokens(self) -> list[int]:
        """Return the tokens that can continue a word, including tokens without text.

        >>> from regard.translation import Tokenizer
        >>> tokenizer = Tokenizer.learn(["ein Hund bellt."] * 10, kind="characters")
        >>> [tokenizer.piece(token) for token in tokenizer.inner_tokens()][:6]
        ['<pad>', '<s>', '<unk>', 'e', 'l', 'n']
        """
        if self.kind == "words":
            return []
        return [
            token
            for token, piece in enumerate(self._pieces)
            if token != self.special.end
            # M: combining marks, such as Hindi vowel signs
            and (self._is_control(token) or unicodedata.category(piece[:1] or " ")[0] in "LNM")
        ]

    def scored_pieces(self) -> list[tuple[str, float]]:
        """Return the text and the SentencePiece score of each token, by id.

        >>> from regard.translation import Tokenizer
        >>> tokenizer = Tokenizer.learn(["ein Hund bellt", "eine Frau lacht"] * 10, kind="bpe", size=40)
        >>> [piece for piece, score in tokenizer.scored_pieces()][:4]
        ['<pad>', '<s>', '</s>', '<unk>']
        """
        return [(piece, self._processor.get_score(i)) for i, piece in enumerate(self._pieces)]

    def _encode(self, texts: list[str], out_type: type = int) -> list[list[Any]]:
        """Return the token ids of each text, or its tokens as text."""
        encode = self._processor.encode
        try:
            if len(texts) < _MIN_PARALLEL:
                return [encode(text, out_type=out_type) for text in texts]
            return encode(texts, out_type=out_type)
        except (TypeError, RuntimeError):
            if any("\ud800" <= character <= "\udfff" for text in texts for character in text):
                raise ArgumentError(_LONE_SURROGATE) from None
            raise

    def _encode_word(self, word: str) -> tuple[list[int], list[str]]:
        """Return the token ids and the tokens of a word. The lists are cached: do not change them."""
        encoded = self._words.get(word)
        if encoded is None:
            encoded = self._encode([word])[0], self._encode([word], str)[0]
            if len(self._words) >= _CACHED_WORDS:
                self._words.clear()
            if len(word) <= _CACHED_LENGTH:
                self._words[word] = encoded
        return encoded

    @cached_property
    def _pieces(self) -> list[str]:
        return [self._processor.id_to_piece(i) for i in range(len(self))]

    @cached_property
    def _processor(self) -> "SentencePieceProcessor":
        require("sentencepiece", "Tokenizer")
        from sentencepiece import SentencePieceProcessor

        return SentencePieceProcessor(model_proto=self.content)

    def _check_model(self, name: str) -> None:
        """Raise ArgumentError unless this is a SentencePiece model with regard's special token ids."""
        expected = (PADDING, START, END, UNKNOWN)
        try:
            if not self.content:
                raise RuntimeError("empty")
            processor = self._processor
            special = (processor.pad_id(), processor.bos_id(), processor.eos_id(), processor.unk_id())
            _ = self._pieces  # raises if a token is not UTF-8
        except (RuntimeError, UnicodeDecodeError):
            raise ArgumentError(
                f"{name!r} is not a SentencePiece model, or it is corrupted. Copy its model folder again, or "
                "train a new one."
            ) from None
        if special != expected:
            raise ArgumentError(
                f"{name!r} has the special token ids {special} (padding, start, end, unknown), but regard "
                f"requires {expected}. Use a vocabulary from Tokenizer.learn."
            )


class TokenizerPair(NamedTuple):
    """Tokenizers for source and target; the same object if they share a vocabulary.

    >>> from regard.translation import Tokenizer, TokenizerPair
    >>> source = Tokenizer.learn(["ein Hund bellt"], kind="words")
    >>> target = Tokenizer.learn(["a dog barks loudly"], kind="words")
    >>> (
    ...     TokenizerPair(source, target).sizes(),
    ...     TokenizerPair(source, source).sizes(),
    ... )  # including 4 special tokens
    ((7, 8), 7)
    """

    source: Tokenizer
    target: Tokenizer

    @property
    def shared(self) -> bool:
        """Whether source and target share a vocabulary."""
        return self.source is self.target

    @property
    def special(self) -> SpecialTokens:
        """Ids of the special tokens, and the tokens added around a sentence."""
        return self.target.special

    def sizes(self) -> int | tuple[int, int]:
        """Return the vocabulary size: one number if shared, otherwise (source, target)."""
        return len(self.source) if self.shared else (len(self.source), len(self.target))


def _drop_empty_words(segmentation: Segmentation) -> Segmentation:
    """Remove empty words, which a model can generate; their tokens are assigned to the next word."""
    words = [word for word in segmentation.words if word]
    if len(words) == len(segmentation.words):
        return segmentation
    index, new_index = 0, []
    for word in segmentation.words:
        new_index.append(min(index, max(len(words) - 1, 0)))
        index += bool(word)
    return segmentation._replace(words=words, word_of=[new_index[word] for word in segmentation.word_of])


def _check_kind(kind: str) -> None:
    if kind not in get_args(Kind):
        raise ArgumentError(f"Unknown tokenizer kind {kind!r}. Choose from {', '.join(get_args(Kind))}.")


class _ErrorRecorder(Iterable[str]):
    """Iterates over lines and records exceptions, which SentencePiece swallows."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = lines
        self.error: BaseException | None = None

    def __iter__(self) -> Iterator[str]:
        try:
            yield from self._lines
        except BaseException as error:
            self.error = error
            raise


def _explain(error: RuntimeError, kind: Kind, size: int) -> str:
    """Return a message that explains a common SentencePiece error and how to fix it."""
    text = str(error)
    if "Unable to cast" in text:
        return _LONE_SURROGATE
    if ".empty()" in text:
        return _NO_TEXT
    if "Vocabulary size is smaller" in text:
        return (
            f"A vocabulary of {size} is too small for the characters in this text. Raise size, or lower "
            "character_coverage."
        )
    return f"SentencePiece cannot learn a {kind} vocabulary of {size}: {text.strip().splitlines()[-1]}"
