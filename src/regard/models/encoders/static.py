"""Static embeddings: one vector per word, independent of its sentence.

The vectors are computed from co-occurrence counts (Levy and Goldberg 2014):

    PPMI(w, c) = max(0, log P(w, c) / (P(w) P'(c)))     positive pointwise mutual information; P' ∝ P^¾
    PPMI ≈ U Σ Vᵀ, vectors = U √Σ                       truncated SVD

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

from regard._util.checks import check_int, check_sentences
from regard._util.files import write_atomic
from regard._util.text import pluralize, shorten, type_name
from regard.errors import ArgumentError, DTypeError, ShapeError
from regard.models.encoders.base import Neighbor, TokenVectors, WordEncoder
from regard.models.encoders.words import (
    Vocabulary,
    WordQuery,
    is_word,
    parse_word,
    split_words,
)

_MAX_LINE = 2**20  # bytes; enough for 50,000 numbers


class StaticEncoder(WordEncoder):
    """An encoder with one vector for each word in a vocabulary: (words, m).

    words: the vocabulary. vectors: one row per word. unknown: vector for all other words; default: the mean.

    Words are first looked up with their exact spelling, then ignoring case. In sentences, unknown words have
    the vector `unknown` and are marked in `WordVectors.known`; comparing them or searching for their
    neighbors raises an error.

    >>> import torch
    >>> from regard.models.encoders.static import StaticEncoder
    >>> encoder = StaticEncoder(["dogs", "bark", "trees"], torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]))
    >>> encoder.compare("Dogs may bark at strangers.", "Trees shed bark in winter.", word="bark").similarity
    1.0
    >>> encoder.nearest("bark", k=2)
    [Neighbor(word='dogs', sentence=None, similarity=0.707...), Neighbor(word='trees', ...)]
    >>> encoder.vector("brak")
    Traceback (most recent call last):
    regard.errors.ArgumentError: StaticEncoder does not know the word 'brak' (did you mean 'bark'?); ...
    """

    layers = 1

    def __init__(self, words: Sequence[str], vectors: Tensor, *, unknown: Tensor | None = None) -> None:
        super().__init__()
        self.vocabulary = Vocabulary(words)
        known = len(self.vocabulary) - 1
        if not isinstance(vectors, Tensor) or not vectors.is_floating_point():
            kind = vectors.dtype if isinstance(vectors, Tensor) else type(vectors).__name__
            raise DTypeError(
                f"StaticEncoder got vectors of type {kind}; pass a floating-point tensor of shape (words, m)."
            )
        if vectors.dim() != 2 or not vectors.numel() or len(vectors) != known:
            raise ShapeError(
                f"StaticEncoder got {known} words and vectors of shape {tuple(vectors.shape)}; pass vectors "
                f"of shape ({known or 'words'}, m)."
            )
        unknown = vectors.mean(0) if unknown is None else unknown
        if unknown.shape != vectors.shape[1:]:
            raise ShapeError(
                f"StaticEncoder got vectors of width {vectors.shape[1]} and unknown of shape "
                f"{tuple(unknown.shape)}; unknown must have shape ({vectors.shape[1]},)."
            )
        self.vectors = nn.Parameter(torch.cat([unknown[None].to(vectors), vectors]).detach())

    def forward(self, ids: Tensor) -> Tensor:
        """Return the vectors (…, m) of word ids (…) from `vocabulary`. Unknown words have id 0."""
        return F.embedding(ids, self.vectors)

    def token_vectors(self, sentences: Sequence[str]) -> Iterator[TokenVectors]:
        for sentence in sentences:
            words = split_words(sentence)
            ids = self.vocabulary.ids([word.text for word in words])
            vectors = self(torch.tensor(ids, dtype=torch.long, device=self.vectors.device))
            spans = [(word.start, word.stop) for word in words]
            yield TokenVectors(vectors[None], spans, known=[i > 0 for i in ids])

    def vector(self, word: str) -> Tensor:
        """Return the vector of a word, (m)."""
        return self.vectors[self._id(word)]

    def nearest(
        self,
        word: WordQuery,
        *,
        sentence: str | None = None,
        among: Sequence[str] | None = None,
        k: int = 5,
        layer: int | None = None,
    ) -> list[Neighbor]:
        """Find the most similar words in the vocabulary, or in the sentences `among`.

        sentence: the sentence that contains the word; it does not affect the vector.
        """
        if among is not None:
            return super().nearest(word, sentence=sentence, among=among, k=k, layer=layer)
        self._layer(layer)
        check_int("nearest got k", k, min=1)
        text = parse_word(word)[0]
        if sentence is not None:
            (query,) = self.embed([sentence])
            text = query.words[query.index(word)]
        index = self._id(text)
        with torch.no_grad():
            units = F.normalize(self.vectors, dim=-1)
            similarities = units @ units[index]
        neighbors: list[Neighbor] = []
        for other in similarities.argsort(descending=True).tolist():
            if other not in (0, index) and is_word(self.vocabulary[other]):
                neighbors.append(Neighbor(self.vocabulary[other], None, float(similarities[other])))
            if len(neighbors) == k:
                break
        return neighbors

    def _id(self, word: str) -> int:
        if not isinstance(word, str):
            raise DTypeError(f"The word is {type_name(word)}; pass a string.")
        index = self.vocabulary.find(word)
        if not index:
            raise self._unknown(word)
        return index

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
        """Compute vectors from co-occurrence counts. This takes seconds for 10,000 sentences.

        width: vector dimension. window: maximum distance between co-occurring words; closer words count more.
        min_count: minimum number of occurrences of a word. max_vocab_size: maximum number of words.
        seed: random seed.

        >>> from regard.models.encoders.static import StaticEncoder
        >>> text = ["dogs chase cats", "cats chase mice", "dogs fear cats", "cats fear mice"]
        >>> encoder = StaticEncoder.learn(text, width=3, window=1)
        >>> [neighbor.word for neighbor in encoder.nearest("chase", k=1)]
        ['fear']
        """
        check_int("StaticEncoder.learn got width", width, min=1)
        check_int("StaticEncoder.learn got window", window, min=1)
        texts = check_sentences(sentences)
        vocabulary = Vocabulary.of(texts, max_size=max_vocab_size, min_count=min_count)
        if len(vocabulary) < 2:
            raise ArgumentError(
                f"StaticEncoder.learn got {pluralize(len(texts), 'sentence')}, but no word occurs at "
                f"least {pluralize(min_count, 'time')}; pass more text, or lower min_count."
            )
        pairs, counts = _cooccurrences(texts, vocabulary, window)
        if not len(counts):
            raise ArgumentError(
                f"StaticEncoder.learn got {pluralize(len(texts), 'sentence')} without co-occurring words; "
                "pass sentences with several words."
            )
        vectors = _factor(_ppmi(pairs, counts, len(vocabulary) - 1), width, seed)
        return cls(vocabulary[1:], vectors)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Save in word2vec's text format: one line with the sizes, then `word v1 v2 …` for each word."""
        words, vectors = list(self.vocabulary), self.vectors.detach().float().cpu().tolist()
        for word in words:
            if not _storable(word):
                raise ArgumentError(f"The word {word!r} cannot be stored in this text format; remove it.")
        lines = [f"{len(words)} {self.vectors.shape[1]}"]
        # nine digits restore a float32 exactly
        lines += [
            " ".join([word, *(f"{x:.9g}" for x in vector)])
            for word, vector in zip(words, vectors, strict=True)
        ]
        return write_atomic(path, ("\n".join(lines) + "\n").encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, limit: int | None = None) -> "StaticEncoder":
        """Load vectors in the text format of word2vec or GloVe: `word v1 v2 …` on each line.

        limit: maximum number of words to read; word vector files are usually sorted by frequency.

        If the file contains `<unk>`, its vector is used for unknown words. Malformed lines raise an error
        with the line number.
        """
        if limit is not None:
            check_int("StaticEncoder.load got limit", limit, min=1)
        words, vectors = _read(path, limit)
        if words == ["<unk>"]:
            raise ArgumentError(
                f"{os.fspath(path)} contains no word except <unk>; pass a file of word vectors."
            )
        if "<unk>" not in words:
            return cls(words, vectors)
        index = words.index("<unk>")
        rest = [*range(index), *range(index + 1, len(words))]
        return cls([words[i] for i in rest], vectors[rest], unknown=vectors[index])

    def extra_repr(self) -> str:
        return f"{len(self.vocabulary) - 1} words, width {self.vectors.shape[1]}"


def _cooccurrences(
    sentences: Sequence[str], vocabulary: Vocabulary, window: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return pairs of co-occurring words (2, n) and their weighted counts."""
    ids = [[i - 1 for i in vocabulary.ids(word.text for word in split_words(s)) if i] for s in sentences]
    tokens = np.array([i for line in ids for i in line], dtype=np.int64)
    owner = np.repeat(np.arange(len(ids)), [len(line) for line in ids])
    size = len(vocabulary) - 1
    keys, weights = [np.empty(0, np.int64)], [np.empty(0)]
    for distance in range(1, min(window, len(tokens) - 1) + 1):
        same_sentence = owner[:-distance] == owner[distance:]
        first, second = tokens[:-distance][same_sentence], tokens[distance:][same_sentence]
        key, n = np.unique(np.concatenate([first * size + second, second * size + first]), return_counts=True)
        keys.append(key)
        weights.append(n * (window - distance + 1) / window)
    unique, inverse = np.unique(np.concatenate(keys), return_inverse=True)
    counts = np.bincount(inverse, np.concatenate(weights), len(unique)).astype(np.float64)
    return np.stack([unique // size, unique % size]), counts


def _ppmi(pairs: NDArray[np.int64], counts: NDArray[np.float64], size: int) -> Tensor:
    """Return the positive pointwise mutual information: (words, words), sparse."""
    marginal = np.bincount(pairs[0], counts, size)
    smoothed = marginal**0.75  # reduces the bias towards rare context words
    independent = (marginal / marginal.sum())[pairs[0]] * (smoothed / smoothed.sum())[pairs[1]]
    values = np.log(counts / counts.sum() / independent)
    keep = values > 0
    indices, kept = torch.from_numpy(pairs[:, keep]), torch.from_numpy(values[keep])
    return torch.sparse_coo_tensor(indices, kept, (size, size), check_invariants=True).coalesce()


def _factor(matrix: Tensor, width: int, seed: int) -> Tensor:
    """Return U √Σ of the truncated SVD, computed by subspace iteration (Halko et al. 2011, algorithm 4.4)."""
    size = len(matrix)
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(size, min(width + 10, size), generator=generator, dtype=matrix.dtype)
    transposed = matrix.t().coalesce()
    basis = torch.linalg.qr(torch.sparse.mm(matrix, start)).Q
    for _ in range(4):
        basis = torch.linalg.qr(torch.sparse.mm(transposed, basis)).Q
        basis = torch.linalg.qr(torch.sparse.mm(matrix, basis)).Q
    left, singular, _ = torch.linalg.svd(torch.sparse.mm(transposed, basis).t(), full_matrices=False)
    vectors = (basis @ left * singular.sqrt())[:, :width]
    return F.pad(vectors, (0, width - vectors.shape[1])).float()


def _read(path: str | os.PathLike[str], limit: int | None) -> tuple[list[str], Tensor]:
    """Read words and vectors (words, m) from an untrusted file."""
    words: dict[str, int] = {}  # word → line number
    numbers = array("f")
    width, declared = 0, None
    for line, fields in _lines(path):
        if line == 1 and len(fields) == 2 and all(_is_size(text) for text in fields):
            declared, width = int(fields[0]), int(fields[1])
            continue
        if limit is not None and len(words) == limit:
            declared = None
            break
        width = width or len(fields) - 1
        word, row = _row(path, line, fields, width)
        if words.setdefault(word, line) != line:
            raise _error(path, line, f"repeats the word {word[:100]!r} from line {words[word]}")
        numbers.extend(row)
    if not words:
        raise _error(path, None, "has no vectors")
    if declared is not None and declared != len(words):
        raise _error(
            path, None, f"declares {pluralize(declared, 'word')} in its first line, but has {len(words):,}"
        )
    vectors = torch.frombuffer(numbers, dtype=torch.float32).reshape(len(words), width).clone()
    bad = (~vectors.isfinite()).any(1).nonzero().flatten()
    if len(bad):
        word = list(words)[int(bad[0])]
        raise _error(path, words[word], f"has NaN or infinite values in the vector of {word[:100]!r}")
    return list(words), vectors


def _open(path: str | os.PathLike[str]) -> BinaryIO:
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(name, str):  # open() treats an int as a file descriptor
        raise DTypeError(f"StaticEncoder.load got {type_name(name)}; pass a file path.")
    try:
        return open(name, "rb")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ArgumentError(
            f"Cannot read {shorten(name, 200)!r}: {reason}. Pass a text file of vectors, as written by "
            "GloVe, word2vec or StaticEncoder.save."
        ) from None


def _lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of each line, counted from 1, and its fields."""
    with _open(path) as file:
        line = 0
        while content := file.readline(_MAX_LINE + 1):
            line += 1
            if line == 1 and content.startswith((b"\x1f\x8b", b"PK\x03\x04", b"BZh", b"\xfd7zXZ")):
                raise _error(path, None, "is compressed; decompress it first")
            if len(content) > _MAX_LINE:
                raise _error(path, line, f"has more than {_MAX_LINE:,} bytes")
            try:
                text = content.decode("utf-8-sig" if line == 1 else "utf-8")
            except UnicodeDecodeError:
                raise _error(path, line, "is not UTF-8 text; binary formats are not supported") from None
            if "\0" in text:
                raise _error(path, line, "contains a null byte; binary formats are not supported")
            yield line, text.rstrip("\r\n").rstrip(" ").split(" ")


def _row(path: str | os.PathLike[str], line: int, fields: list[str], width: int) -> tuple[str, list[float]]:
    """Return the word and the vector of a line. Some words in GloVe files contain spaces, such as ". . ."."""
    words = fields[: max(len(fields) - width, 1)]
    if width < 1 or len(fields) < width + 1 or any(_is_number(text) for text in words[1:]) or not words[0]:
        raise _error(path, line, f"has {pluralize(len(fields) - 1, 'number')}; the vectors have {width:,}")
    try:
        return " ".join(words), [float(text) for text in fields[-width:]]
    except ValueError as error:
        raise _error(path, line, f"has an invalid number ({str(error)[:100]})") from None


def _storable(word: str) -> bool:
    """Whether `_row` can parse this word. It may contain spaces, but no number after a space."""
    first, *rest = word.split(" ")
    valid = first and not set("\n\0") & set(word) and not any(_is_number(text) for text in rest)
    return bool(valid) and word.encode(errors="ignore").decode() == word


def _is_size(text: str) -> bool:
    return text.isascii() and text.isdigit() and 0 < len(text) < 16


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _error(path: str | os.PathLike[str], line: int | None, problem: str) -> ArgumentError:
    where = os.fspath(path) if line is None else f"Line {line} of {os.fspath(path)}"
    return ArgumentError(f"{where} {problem}. Expected lines of text: word v1 v2 …")
