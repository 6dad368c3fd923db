"""Tokenizers of pretrained translators, with the interface of `Tokenizer`.

They read tokenizer.json, or SentencePiece models with or without a vocabulary file. The model's ids are kept.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from regard._util.extras import require
from regard._util.files import read_regular
from regard.errors import ArgumentError
from regard.models.checkpoint_files import read_json, short
from regard.models.encoders.tokenizer import SubwordTokenizer, check_tokenizer_json, guard_tokenizer
from regard.models.generation import SpecialTokens
from regard.translation.tokens import SPACE, Segmentation, Tokenizer

_MAX_MODEL_BYTES = 1 << 28
_CONTROL = re.compile(r"<(?:s|/s|pad|mask|unk|extra_id_\d+)>|>>.+<<|__[a-z]+__")
_MAX_VOCABULARY_BYTES = 1 << 26


class Token(NamedTuple):
    """A token in a text: its id, its piece, the index of its word, and its characters in the text."""

    id: int
    piece: str
    word: int
    text: str


class PretrainedTokenizer(Tokenizer):
    """Base class. Subclasses implement `tokens`, which tokenizes a text.

    ids: id of each piece that can occur in text. special: ids of the special tokens.
    """

    kind = "unigram"

    def __init__(self, ids: Mapping[str, int], special: SpecialTokens, vocab_size: int) -> None:
        self.ids, self.special, self.vocab_size = ids, special, vocab_size
        known = set(ids.values())
        self.controls = {i for i in range(vocab_size) if i not in known}
        self.controls |= {i for piece, i in ids.items() if _CONTROL.fullmatch(piece)}

    def tokens(self, text: str, words: Sequence[str]) -> Iterator[Token]:
        """Tokenize a text that consists of `words`."""
        raise NotImplementedError(f"{type(self).__name__} must implement tokens(text, words)")

    def _is_control(self, token: int) -> bool:
        return token in self.controls

    def __len__(self) -> int:
        return self.vocab_size

    def __repr__(self) -> str:
        return f"{type(self).__name__}(<{len(self):,} subwords>)"

    def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        return self.encode_batch(words)

    def segment(self, text: str) -> Segmentation:
        words = text.split()
        result = Segmentation(words, [], [], [], {})
        for token in self.tokens(text, words):
            if token.id == self.special.unknown:
                result.unknown[len(result.ids)] = token.text
            result.ids.append(token.id)
            result.pieces.append(token.piece)
            result.word_of.append(token.word)
        return result

    @cached_property
    def _pieces(self) -> list[str]:
        pieces = [f"<{i}>" for i in range(self.vocab_size)]
        for piece, i in self.ids.items():
            pieces[i] = piece
        return pieces

    def scored_pieces(self) -> list[tuple[str, float]]:
        return [(piece, 0.0) for piece in self._pieces]

    def token_ids(self, pieces: Sequence[str]) -> list[int]:
        return [self.ids.get(piece, self.special.unknown) for piece in pieces]

    def decode_batch(self, ids: Sequence[Sequence[int]]) -> list[str]:
        return [self.decode(sentence).text for sentence in ids]


class SentencePieceTokenizer(PretrainedTokenizer):
    """A SentencePiece model with the token ids of a pretrained model.

    processor: the model. ids: id of each piece; other pieces are unknown.
    """

    def __init__(
        self, processor: Any, ids: Mapping[str, int], special: SpecialTokens, vocab_size: int
    ) -> None:
        super().__init__(ids, special, vocab_size)
        self._model = processor

    def tokens(self, text: str, words: Sequence[str]) -> Iterator[Token]:
        whole, *parts = self._encode([text, *words], str)
        word_of = [word for word, pieces in enumerate(parts) for _ in pieces]
        if [piece for pieces in parts for piece in pieces] != whole:
            # normalization has added or removed a space: count word-initial pieces
            starts = numpy.cumsum([piece.startswith(SPACE) for piece in whole], dtype=int)
            word_of = (starts - 1).clip(0, len(words) - 1).tolist()
        unknown = self.special.unknown
        for piece, word in zip(whole, word_of, strict=True):
            yield Token(self.ids.get(piece, unknown), piece, word, piece.removeprefix(SPACE))

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        unknown = self.special.unknown
        return [[self.ids.get(piece, unknown) for piece in pieces] for pieces in self._encode([*lines], str)]

    @property
    def _processor(self) -> Any:
        return self._model

    def serialized(self) -> bytes:
        """Return the SentencePiece model."""
        return self._model.serialized_model_proto()


class JsonTokenizer(PretrainedTokenizer):
    """A tokenizer read from tokenizer.json. Special tokens that occur in a text are treated as text."""

    def __init__(self, tokenizer: Any, special: SpecialTokens, vocab_size: int) -> None:
        super().__init__(tokenizer.get_vocab(with_added_tokens=True), special, vocab_size)
        self._tokenizer = tokenizer

    def to_json(self) -> str:
        """Return the content of tokenizer.json, with a decoder that joins tokens into words."""
        settings = json.loads(self._tokenizer.to_str())
        decoder = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True}
        return json.dumps({**settings, "decoder": decoder}, ensure_ascii=False)

    def tokens(self, text: str, words: Sequence[str]) -> Iterator[Token]:
        with guard_tokenizer("Cannot tokenize this text"):
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        word_at = _word_indices(text)
        for token, piece, (begin, end) in zip(encoding.ids, encoding.tokens, encoding.offsets, strict=True):
            surface = text[begin:end]
            first = begin + len(surface) - len(surface.lstrip())  # a token may include the space before it
            yield Token(token, piece, word_at[min(first, len(text) - 1)], surface.strip())

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        with guard_tokenizer("Cannot tokenize these lines"):
            encodings = self._tokenizer.encode_batch_fast(list(lines), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]


def _word_indices(text: str) -> list[int]:
    """Return the word index of each character; a space belongs to the next word."""
    indices, word, in_word = [], 0, False
    for letter in text:
        if letter.isspace():
            word, in_word = word + in_word, False
        else:
            in_word = True
        indices.append(word)
    last = len(text.split()) - 1
    return [min(index, last) for index in indices]


def read_sentencepiece(path: Path) -> Any:
    """Read a SentencePiece model."""
    require("sentencepiece", "load_translator")
    from sentencepiece import SentencePieceProcessor

    try:
        content = read_regular(path, _MAX_MODEL_BYTES)
        if not content:
            raise RuntimeError("empty")
        processor = SentencePieceProcessor(model_proto=content)
        _ = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]  # raises if not UTF-8
    except OSError as error:
        raise ArgumentError(f"Cannot read {path}: {error.strerror}. Copy the whole folder.") from None
    except (RuntimeError, UnicodeDecodeError):
        raise ArgumentError(
            f"{path} is not a SentencePiece model, or it is corrupted. Copy it again."
        ) from None
    return processor


def read_vocabulary(path: Path, vocab_size: int) -> dict[str, int]:
    """Read a vocabulary file: JSON with the id of each piece, below `vocab_size`."""
    ids = read_json(path, _MAX_VOCABULARY_BYTES)
    for piece, i in ids.items():
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab_size:
            raise ArgumentError(
                f"{path} assigns the id {short(i)} to {short(piece)}; config.json has "
                f"vocab_size={vocab_size}, so ids must be integers from 0 to {vocab_size - 1}."
            )
    return ids


def read_tokenizer_json(path: Path, vocab_size: int) -> Any:
    """Read the tokenizer.json of a subword tokenizer that marks the beginning of a word with ▁."""
    settings = read_json(path)
    tokenizer = check_tokenizer_json(path, settings)
    decoder = settings.get("decoder")
    kinds = [part.get("type") for part in [decoder, *(decoder or {}).get("decoders", [])] if part]
    if "Metaspace" not in kinds or settings["model"].get("type") not in ("BPE", "Unigram"):
        raise ArgumentError(
            f"{path} has the model {short(settings['model'].get('type'))} and the decoder {short(kinds)}; "
            f"regard supports only BPE and Unigram with Metaspace, which marks word beginnings with {SPACE}."
        )
    SubwordTokenizer(tokenizer, vocab_size, path.parent)  # checks the ids
    tokenizer.encode_special_tokens = True  # treat special tokens in a text as ordinary text
    return tokenizer
