"""Static embeddings: one vector for each word, the same in every sentence.

Learned by counting (Levy and Goldberg 2014): words that occur beside the same words get similar vectors.

    PPMI(w, c) = max(0, log P(w, c) / (P(w) P'(c)))     how much more often than by chance; P' ~ P^¾
    PPMI ≈ U Σ Vᵀ, vectors = U √Σ                       its best approximation of low rank

P' and √Σ are from Levy, Goldberg and Dagan 2015, sections 3.2 and 3.3.
"""

import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from regard._util.checks import check_int
from regard._util.files import write_atomic
from regard._util.text import pluralize, shorten
from regard.errors import ArgumentError, DTypeError, ShapeError
from regard.models.encoders.base import Neighbor, TokenVectors, WordEncoder
from regard.models.encoders.words import (
    Vocabulary,
    WordQuery,
    check_sentences,
    is_word,
    parse_word,
    split_words,
    unknown_word_error,
)

_LINE = 2**20  # bytes in a line at most: 50,000 numbers


class StaticEncoder(WordEncoder):
    """One vector for each word of a vocabulary, whatever its sentence: (words, m).

    words, vectors: the vocabulary, and a row for each word of it.

    A word that is not in the vocabulary gets the vector `unknown`, the mean of all unless given, so that a
    sentence with a rare word still has a vector for each word; `WordVectors.known` says which. To ask about
    such a word is an error. A word is looked up as it is spelled, or else in any other case.

    >>> import torch
    >>> from regard.models.encoders.static import StaticEncoder
    >>> encoder = StaticEncoder(["dogs", "bark", "trees"], torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]))
    >>> encoder.compare("Dogs may bark at strangers.", "Trees shed bark in winter.", word="bark").similarity
    1.0
    >>> encoder.nearest("bark", k=2)
    [Neighbor(word='dogs', sentence=None, similarity=0.707...), Neighbor(word='trees', ...)]
    >>> encoder.vector("brak")
    Traceback (most recent call last):
    regard.errors.ArgumentError: StaticEncoder does not know the word 'brak'; did you mean 'bark'? ...
    """

    layers = 1

    def __init__(self, words: Sequence[str], vectors: Tensor, *, unknown: Tensor | None = None) -> None:
        super().__init__()
        self.vocabulary = Vocabulary(words)
        known = len(self.vocabulary) - 1
        if not isinstance(vectors, Tensor) or not vectors.is_floating_point():
            raise DTypeError(
                "StaticEncoder got vectors that are no tensor of floating point; give (words, m)."
            )
        if vectors.dim() != 2 or not vectors.numel() or len(vectors) != known:
            raise ShapeError(
                f"StaticEncoder got {known} words and vectors of shape {tuple(vectors.shape)}; give one "
                f"vector for each word: ({known or 'words'}, m)."
            )
        unknown = vectors.mean(0) if unknown is None else unknown
        if unknown.shape != vectors.shape[1:]:
            raise ShapeError(
                f"StaticEncoder got vectors of width {vectors.shape[1]} and unknown of shape "
                f"{tuple(unknown.shape)}; give ({vectors.shape[1]},)."
            )
        self.vectors = nn.Parameter(torch.cat([unknown[None].to(vectors), vectors]).detach())

    def forward(self, numbers: Tensor) -> Tensor:
        """The vectors of words by their number in `vocabulary`, of which 0 is unknown: (…) → (…, m)."""
        return F.embedding(numbers, self.vectors)

    def token_vectors(self, sentences: Sequence[str]) -> Iterator[TokenVectors]:
        for sentence in sentences:
            words = split_words(sentence)
            numbers = self.vocabulary.ids([word.text for word in words])
            vectors = self(torch.tensor(numbers, dtype=torch.long, device=self.vectors.device))
            spans = [(word.start, word.stop) for word in words]
            yield TokenVectors(vectors[None], spans, known=[number > 0 for number in numbers])

    def vector(self, word: str) -> Tensor:
        """The vector of a word (m)."""
        return self.vectors[self._number(word)]

    def nearest(
        self,
        word: WordQuery,
        *,
        sentence: str | None = None,
        among: Sequence[str] | None = None,
        k: int = 5,
        layer: int | None = None,
    ) -> list[Neighbor]:
        """The words most alike to a word: in the whole vocabulary, unless there are sentences to look in.

        As a word's vector is the same everywhere, its sentence only says how it is spelled there.
        """
        if among is not None:
            return super().nearest(word, sentence=sentence, among=among, k=k, layer=layer)
        self._layer(layer)
        text = parse_word(word)[0]
        if sentence is not None:
            (query,) = self.embed([sentence])
            text = query.words[query.index(word)]
        return self._nearest(self._number(text), k)

    def _nearest(self, number: int, k: int) -> list[Neighbor]:
        check_int("nearest got k", k, min=1)
        with torch.no_grad():
            units = F.normalize(self.vectors, dim=-1)
            similarities = units @ units[number]
        near: list[Neighbor] = []
        for other in similarities.argsort(descending=True).tolist():
            if other not in (0, number) and is_word(self.vocabulary[other]):
                near.append(Neighbor(self.vocabulary[other], None, float(similarities[other])))
            if len(near) == k:
                break
        return near

    def _number(self, word: str) -> int:
        if not isinstance(word, str):
            raise DTypeError(f"the word is a {type(word).__name__}; give a string.")
        number = self.vocabulary.find(word)
        if not number:
            raise self._unknown(word)
        return number

    def _unknown(self, word: str) -> ArgumentError:
        return unknown_word_error(type(self).__name__, word, self.vocabulary)

    @classmethod
    def learn(
        cls,
        sentences: Sequence[str],
        *,
        width: int = 100,
        window: int = 4,
        min_count: int = 1,
        max_vocab_size: int | None = 20_000,
        seed: int = 0,
    ) -> "StaticEncoder":
        """Vectors from a text, by counting which words stand beside which: 10,000 sentences in seconds.

        window: how far apart two words may stand; nearer ones count more. least: how often a word must occur.
        most: how many words at most, the most frequent ones. The same seed gives the same vectors.

        >>> from regard.models.encoders.static import StaticEncoder
        >>> text = ["dogs chase cats", "cats chase mice", "dogs fear cats", "cats fear mice"]
        >>> encoder = StaticEncoder.learn(text, width=3, window=1)
        >>> [near.word for near in encoder.nearest("chase", k=1)]
        ['fear']
        """
        check_int("StaticEncoder.learn got width", width, min=1)
        check_int("StaticEncoder.learn got window", window, min=1)
        given = check_sentences(sentences)
        vocabulary = Vocabulary.of(given, max_size=max_vocab_size, min_count=min_count)
        if len(vocabulary) < 2:
            raise ArgumentError(
                f"StaticEncoder.learn got {pluralize(len(given), 'sentence')}, in which no word occurs "
                f"{pluralize(min_count, 'time')}; give more text, or lower min_count."
            )
        pairs, counts = _cooccurrences(given, vocabulary, window)
        if not len(counts):
            raise ArgumentError(
                f"StaticEncoder.learn got {pluralize(len(given), 'sentence')} in which no two words stand near "
                "each other; give sentences of several words."
            )
        vectors = _factor(_ppmi(pairs, counts, len(vocabulary) - 1), width, seed)
        return cls(vocabulary[1:], vectors)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the vectors as text, as word2vec does: the sizes, then `word v1 v2 …` for each word."""
        words, vectors = list(self.vocabulary), self.vectors.detach().float().cpu().tolist()
        for word in words:
            if not _storable(word):
                raise ArgumentError(
                    f"the word {word!r} could not be read again from a line of text; leave it out."
                )
        lines = [f"{len(words)} {self.vectors.shape[1]}"]
        # nine digits give back the same float32
        lines += [
            " ".join([word, *(f"{x:.9g}" for x in vector)])
            for word, vector in zip(words, vectors, strict=True)
        ]
        return write_atomic(path, ("\n".join(lines) + "\n").encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, limit: int | None = None) -> "StaticEncoder":
        """Read vectors in the text format of word2vec or GloVe: `word v1 v2 …` in each line.

        limit: maximum number of words to read; such files begin with the most frequent ones. A word `<unk>`
        is the vector of unknown words. What cannot be right is refused, with the number of its line.
        """
        if limit is not None:
            check_int("StaticEncoder.load got limit", limit, min=1)
        words, vectors = _read(path, limit)
        if words == ["<unk>"]:
            raise ArgumentError(
                f"{os.fspath(path)} has no word but <unk>; give a file with vectors of words."
            )
        mark = words.index("<unk>") if "<unk>" in words else None
        if mark is None:
            return cls(words, vectors)
        rest = [*range(mark), *range(mark + 1, len(words))]
        return cls([words[i] for i in rest], vectors[rest], unknown=vectors[mark])

    def extra_repr(self) -> str:
        return f"{len(self.vocabulary) - 1} words, width {self.vectors.shape[1]}"


def _cooccurrences(
    sentences: Sequence[str], vocabulary: Vocabulary, window: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Pairs of words (2, n) that stand near each other, and how often; the nearer, the more a pair counts."""
    numbers = [[n - 1 for n in vocabulary.ids(word.text for word in split_words(s)) if n] for s in sentences]
    tokens = np.array([number for line in numbers for number in line], dtype=np.int64)
    owner = np.repeat(np.arange(len(numbers)), [len(line) for line in numbers])
    size = len(vocabulary) - 1
    keys, weights = [np.empty(0, np.int64)], [np.empty(0)]
    for distance in range(1, min(window, len(tokens) - 1) + 1):
        together = owner[:-distance] == owner[distance:]
        first, second = tokens[:-distance][together], tokens[distance:][together]
        key, often = np.unique(
            np.concatenate([first * size + second, second * size + first]), return_counts=True
        )
        keys.append(key)
        weights.append(often * (window - distance + 1) / window)
    found, place = np.unique(np.concatenate(keys), return_inverse=True)
    counts = np.bincount(place, np.concatenate(weights), len(found)).astype(np.float64)
    return np.stack([found // size, found % size]), counts


def _ppmi(pairs: NDArray[np.int64], counts: NDArray[np.float64], size: int) -> Tensor:
    """How much more often than by chance each pair occurs, at least 0: (words, words), sparse."""
    occurs = np.bincount(pairs[0], counts, size)
    smooth = occurs**0.75  # else rare neighbours would seem to tell the most
    chance = (occurs / occurs.sum())[pairs[0]] * (smooth / smooth.sum())[pairs[1]]
    values = np.log(counts / counts.sum() / chance)
    keep = values > 0
    indices, kept = torch.from_numpy(pairs[:, keep]), torch.from_numpy(values[keep])
    return torch.sparse_coo_tensor(indices, kept, (size, size), check_invariants=True).coalesce()


def _factor(matrix: Tensor, width: int, seed: int) -> Tensor:
    """U √Σ of the truncated SVD, by subspace iteration (Halko et al. 2011, algorithm 4.4)."""
    size = len(matrix)
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(size, min(width + 10, size), generator=generator, dtype=matrix.dtype)
    transposed = matrix.t().coalesce()
    basis = torch.linalg.qr(torch.sparse.mm(matrix, start)).Q
    for _ in range(4):
        basis = torch.linalg.qr(torch.sparse.mm(transposed, basis)).Q
        basis = torch.linalg.qr(torch.sparse.mm(matrix, basis)).Q
    left, strengths, _ = torch.linalg.svd(torch.sparse.mm(transposed, basis).t(), full_matrices=False)
    vectors = (basis @ left * strengths.sqrt())[:, :width]
    return F.pad(vectors, (0, width - vectors.shape[1])).float()


def _read(path: str | os.PathLike[str], limit: int | None) -> tuple[list[str], Tensor]:
    """Words and vectors (words, m) of a file that anybody may have written."""
    words: dict[str, int] = {}  # with the numbers of their lines
    numbers = array("f")
    width, promised = 0, None
    for line, fields in _lines(path):
        if line == 1 and len(fields) == 2 and all(_whole(text) for text in fields):
            promised, width = int(fields[0]), int(fields[1])
            continue
        if limit is not None and len(words) == limit:
            promised = None
            break
        width = width or len(fields) - 1
        word, row = _row(path, line, fields, width)
        if words.setdefault(word, line) != line:
            raise _wrong(path, line, f"has the word {word[:100]!r} again, after line {words[word]}")
        numbers.extend(row)
    if not words:
        raise _wrong(path, None, "has no vectors")
    if promised is not None and promised != len(words):
        raise _wrong(path, None, f"promises {promised} words in its first line and has {len(words)}")
    vectors = torch.frombuffer(numbers, dtype=torch.float32).reshape(len(words), width).clone()
    bad = (~vectors.isfinite()).any(1).nonzero().flatten()
    if len(bad):
        word = list(words)[int(bad[0])]
        raise _wrong(path, words[word], f"has a vector of {word[:100]!r} that is not finite")
    return list(words), vectors


def _open(path: str | os.PathLike[str]) -> BinaryIO:
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(name, str):  # a number would be a file that is open already
        raise DTypeError(f"StaticEncoder.load got a {type(name).__name__}; give the path of a file.")
    try:
        return open(name, "rb")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ArgumentError(
            f"{shorten(name, 200)!r} cannot be read: {why}; give a text file of vectors, as GloVe's, "
            "word2vec's or StaticEncoder.save's are."
        ) from None


def _lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, list[str]]]:
    """The lines of a text, numbered from 1, as fields."""
    with _open(path) as file:
        line = 0
        while content := file.readline(_LINE + 1):
            line += 1
            if line == 1 and content.startswith((b"\x1f\x8b", b"PK\x03\x04", b"BZh", b"\xfd7zXZ")):
                raise _wrong(path, None, "is compressed; unpack it first")
            if len(content) > _LINE:
                raise _wrong(path, line, f"has more than {_LINE:,} characters")
            try:
                text = content.decode("utf-8-sig" if line == 1 else "utf-8")
            except UnicodeDecodeError:
                raise _wrong(path, line, "is no UTF-8 text; binary formats are not read") from None
            if "\0" in text:
                raise _wrong(path, line, "has a zero byte; binary formats are not read")
            yield line, text.rstrip("\r\n").rstrip(" ").split(" ")


def _row(path: str | os.PathLike[str], line: int, fields: list[str], width: int) -> tuple[str, list[float]]:
    """The word and the numbers of a line. Some words of GloVe have blanks inside: ". . ."."""
    words = fields[: max(len(fields) - width, 1)]
    if width < 1 or len(fields) < width + 1 or any(_number(text) for text in words[1:]) or not words[0]:
        raise _wrong(path, line, f"has {len(fields) - 1} numbers and the vectors are {width} wide")
    try:
        return " ".join(words), [float(text) for text in fields[-width:]]
    except ValueError as error:
        raise _wrong(path, line, f"has what is no number ({str(error)[:100]})") from None


def _storable(word: str) -> bool:
    """Whether `_row` finds this word again: blanks may be inside, but no numbers behind them."""
    first, *rest = word.split(" ")
    whole = first and not set("\n\0") & set(word) and not any(_number(text) for text in rest)
    return bool(whole) and word.encode(errors="ignore").decode() == word


def _whole(text: str) -> bool:
    return text.isascii() and text.isdigit() and 0 < len(text) < 16


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _wrong(path: str | os.PathLike[str], line: int | None, what: str) -> ArgumentError:
    where = os.fspath(path) if line is None else f"line {line} of {os.fspath(path)}"
    return ArgumentError(f"{where} {what}; give vectors as text, `word v1 v2 …` in each line.")
