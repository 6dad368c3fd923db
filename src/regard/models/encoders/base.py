"""Contextual word vectors: one interface for all encoders.

An encoder produces vectors for tokens, which may be parts of words or special tokens. Subclasses of
`WordEncoder` return token vectors and the span of each token; the base class merges them into words.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard._util.checks import check_int, check_sentences
from regard._util.name_hints import unknown_attribute
from regard._util.text import bar, shorten
from regard.errors import ArgumentError
from regard.mechanism.weights.weights import Weights
from regard.models.encoders.words import (
    Span,
    Vocabulary,
    Word,
    WordQuery,
    find_word,
    is_word,
    parse_word,
    parse_word_pair,
    split_words,
    suggest,
    tokens_of_words,
)
from regard.models.layers.attention import watch_layers
from regard.models.layers.dropout import eval_mode

_SPECIAL = "(special)"  # shown for special tokens without a name


@dataclass(frozen=True, eq=False)
class TokenVectors:
    """Token vectors of one sentence.

    vectors: the vector of each token at each layer, (layers, n, m).
    spans: the character range [start, stop) of each token, or None for a special token such as [CLS].
    tokens: the tokens as strings, used to label special tokens.
    known: whether each token is in the vocabulary, or None if all tokens are.

    >>> import regard
    >>> (sentence,) = regard.load_encoder("minilm").token_vectors(["Dogs barked."])
    >>> sentence.tokens, sentence.spans[1:-1]
    (['[CLS]', 'dogs', 'barked', '.', '[SEP]'], [(0, 4), (5, 11), (11, 12)])
    """

    vectors: Tensor
    spans: Sequence[Span | None]
    tokens: Sequence[str] | None = None
    known: Sequence[bool] | None = None


@dataclass(frozen=True, eq=False)
class WordVectors:
    """Word vectors (layers, words, m) of one sentence.

    `vectors["bark"]` is the vector of the first "bark" at each layer, (layers, m), ignoring case if there is
    no exact match; `vectors["bark", 1]` is the vector of the second "bark".

    words, spans: the words and their character ranges [start, stop). Words whose characters the tokenizer
    drops are omitted.
    known: whether all tokens of each word are in the encoder's vocabulary.

    >>> import torch
    >>> from regard.models.encoders.base import WordVectors
    >>> vectors = WordVectors("Dogs bark", ("Dogs", "bark"), ((0, 4), (5, 9)), torch.randn(3, 2, 16))
    >>> vectors["bark"].shape
    torch.Size([3, 16])
    >>> vectors["barks"]
    Traceback (most recent call last):
    regard.errors.ArgumentError: 'barks' is not in 'Dogs bark' (did you mean 'bark'?); ...
    """

    sentence: str
    words: tuple[str, ...]
    spans: tuple[Span, ...]
    vectors: Tensor
    known: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "known", tuple(self.known) or (True,) * len(self.words))

    def __getitem__(self, word: WordQuery) -> Tensor:
        return self.vectors[:, self.index(word)]

    def index(self, word: WordQuery) -> int:
        """Return the index of a word in `words`."""
        return find_word(word, self.words, self.sentence)

    def __len__(self) -> int:
        return len(self.words)

    def __repr__(self) -> str:
        layers, _, width = self.vectors.shape
        return f"WordVectors({shorten(self.sentence)!r}: {len(self)} words × {layers} layers × {width})"


@dataclass(frozen=True, eq=False)
class Comparison:
    """Similarity of two words in their sentences.

    words, sentences: the two words and their sentences.
    similarities: cosine similarity of the vectors at each layer; `similarity` is the value at `best_layer`.

    >>> import torch
    >>> from regard.models.encoders.base import Comparison
    >>> Comparison(("bark", "bark"), ("Dogs bark.", "Bark of trees"), torch.tensor([1.0, 0.25]), 1)
    bark in 'Dogs bark.'
    bark in 'Bark of trees'
    layer  cosine
        0   1.000  ████████████████████
        1   0.250  █████                 ← similarity
    """

    words: tuple[str, str]
    sentences: tuple[str, str]
    similarities: Tensor
    best_layer: int

    @property
    def similarity(self) -> float:
        """Cosine similarity at `best_layer`."""
        return float(self.similarities[self.best_layer])

    def __repr__(self) -> str:
        best = self.best_layer % len(self.similarities)
        lines = [f"{word} in {shorten(s)!r}" for word, s in zip(self.words, self.sentences, strict=True)]
        lines.append("layer  cosine")
        for layer, cosine in enumerate(self.similarities.tolist()):
            mark = "  ← similarity" if layer == best and len(self.similarities) > 1 else ""
            lines.append(f"{layer:5}  {cosine:6.3f}  {bar(cosine):{20 if mark else 0}}{mark}".rstrip())
        return "\n".join(lines)


class Neighbor(NamedTuple):
    """A similar word, its sentence (None if the word comes from a vocabulary), and the cosine similarity.

    >>> from regard.models import StaticEncoder
    >>> text = ["dogs chase cats", "cats chase mice", "dogs fear cats", "cats fear mice"]
    >>> (neighbor,) = StaticEncoder.learn(text, width=3, window=1).nearest(
    ...     "chase", among=["who fears mice"], k=1
    ... )
    >>> neighbor.word, neighbor.sentence
    ('mice', 'who fears mice')
    """

    word: str
    sentence: str | None
    similarity: float


class AttendedWord(NamedTuple):
    """A word or special token, and its attention weight.

    >>> import regard
    >>> attended = regard.load_encoder("minilm").attended_words("Dogs may bark.", "bark")
    >>> [word for word, _ in attended], sum(weight for _, weight in attended)
    (['[CLS]', 'Dogs', 'may', 'bark', '.', '[SEP]'], 1.0)
    """

    word: str
    weight: float


class WordEncoder(nn.Module):
    """Base class for encoders that return one vector per layer for each word in a sentence.

    A subclass sets `layers`, the number of vector layers, and implements `token_vectors`. Layer 0 contains
    context-independent vectors. `best_layer` is the layer that best separates word senses; default: the last.

    >>> import torch
    >>> from regard.models.encoders.base import TokenVectors, WordEncoder
    >>> from regard.models.encoders.words import split_words
    >>> class Lengths(WordEncoder):
    ...     layers = 1
    ...
    ...     def token_vectors(self, sentences):
    ...         for sentence in sentences:
    ...             words = split_words(sentence)
    ...             vectors = torch.tensor([[[1.0, len(word.text)] for word in words]])
    ...             yield TokenVectors(vectors, [(word.start, word.stop) for word in words])
    >>> Lengths().embed("Dogs bark")[0]["bark"]
    tensor([[1., 4.]])
    >>> Lengths().compare("Dogs bark", "The cats purr", word=("dogs", "cats")).similarity
    1.0
    """

    layers: int
    best_layer: int = -1
    vocabulary = Vocabulary(())  # words to suggest for a misspelled word

    def __getattr__(self, name: str) -> Any:
        """Return a parameter or submodule. The error for an unknown name suggests a similar name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise unknown_attribute("encoder", name, dir(type(self))) from None

    def token_vectors(self, sentences: Sequence[str]) -> Iterator[TokenVectors] | list[TokenVectors]:
        """Return the token vectors of each sentence, in order. Called in eval mode, without gradients."""
        raise NotImplementedError(f"{type(self).__name__} must implement token_vectors(sentences)")

    def embed(self, sentences: str | Sequence[str]) -> list[WordVectors]:
        """Compute the word vectors of one or more sentences at each layer: means of token vectors."""
        texts = check_sentences(sentences)
        splits = [split_words(text) for text in texts]
        for i, (text, words) in enumerate(zip(texts, splits, strict=True)):
            if not words:
                raise ArgumentError(f"Sentence {i}, {shorten(text)!r}, has no words; remove it.")
        return [
            _merge(*sentence) for sentence in zip(texts, splits, self.eval_token_vectors(texts), strict=True)
        ]

    def compare(
        self, first: str, second: str, *, word: WordQuery | tuple[WordQuery, WordQuery]
    ) -> Comparison:
        """Compare a word in two sentences by the cosine similarity of its vectors at each layer.

        word: a word that occurs in both sentences, or a pair of words. (word, n) is the n-th occurrence,
        counted from 0. Case is ignored if there is no exact match; inflected forms are different words.
        """
        queries = parse_word_pair(word)
        both = self.embed([first, second])
        indices = [self._index(vectors, query) for vectors, query in zip(both, queries, strict=True)]
        pairs = list(zip(both, indices, strict=True))
        similarities = _cosine(*(vectors.vectors[:, i] for vectors, i in pairs))
        words = [vectors.words[i] for vectors, i in pairs]
        return Comparison((words[0], words[1]), (first, second), similarities, self.best_layer)

    def nearest(
        self,
        word: WordQuery,
        *,
        sentence: str | None = None,
        among: Sequence[str] | None = None,
        k: int = 5,
        layer: int | None = None,
    ) -> list[Neighbor]:
        """Find the words with the most similar vectors.

        sentence: the sentence that contains the word; default: the word alone.
        among: sentences to search; the word itself is skipped. k: number of results.
        layer: vector layer; default: `best_layer`.
        """
        check_int("nearest got k", k, min=1)
        if among is None:
            raise ArgumentError(
                f"{type(self).__name__} has vectors only for words in sentences; pass sentences to search: "
                "nearest(word, among=[…])."
            )
        (query,) = self.embed([parse_word(word)[0] if sentence is None else sentence])
        index, layer = self._index(query, word), self._layer(layer)
        candidates = [
            (vectors, i)
            for vectors in self.embed(among)
            for i, (text, known) in enumerate(zip(vectors.words, vectors.known, strict=True))
            if known and is_word(text) and (vectors.sentence, i) != (query.sentence, index)
        ]
        if not candidates:
            return []
        matrix = torch.stack([vectors.vectors[layer, i] for vectors, i in candidates])
        best = _cosine(query.vectors[layer, index], matrix).topk(min(k, len(candidates)))
        results = zip(best.values.tolist(), (candidates[i] for i in best.indices.tolist()), strict=True)
        return [Neighbor(vectors.words[i], vectors.sentence, value) for value, (vectors, i) in results]

    def attended_words(
        self, sentence: str, word: WordQuery, *, layer: int | None = None, head: int | None = None
    ) -> list[AttendedWord]:
        """Return the attention weights from a word to the words in its sentence and to special tokens.

        Weights are summed over the tokens of a key word and averaged over the tokens of the query word.
        layer, head: index from 0, or −1 for the last; default: the mean over all layers or heads. The input
        of attention layer i is vector layer i, and its block computes vector layer i + 1.
        """
        (text,) = check_sentences([sentence])
        seen: list[Weights] = []
        with watch_layers(self, lambda _, weights: seen.append(weights)):
            (tokens,) = self.eval_token_vectors([text])
        if not seen:
            raise ArgumentError(f"{type(self).__name__} has no attention; use an encoder such as BERT.")
        words, parts = tokens_of_words(text, split_words(text), tokens.spans)
        index = find_word(word, [word.text for word in words], text)
        if layer is not None:
            seen = [seen[_check_index("attention layer", layer, len(seen))]]
        rows = [_row(weights, parts[index], head) for weights in seen]
        return _merge_keys(torch.stack(rows).mean(0), tokens, words, parts)

    def tokens(self, sentence: str) -> list[str]:
        """Return the tokens of a sentence, including special tokens.

        >>> import regard
        >>> regard.load_encoder("minilm").tokens("Unbelievably, dogs bark.")
        ['[CLS]', 'un', '##bel', '##ie', '##va', '##bly', ',', 'dogs', 'bark', '.', '[SEP]']
        """
        (tokens,) = self.eval_token_vectors(check_sentences([sentence]))
        return list(tokens.tokens or [sentence[slice(*span)] if span else _SPECIAL for span in tokens.spans])

    def eval_token_vectors(self, sentences: Sequence[str]) -> list[TokenVectors]:
        """Call `token_vectors` in evaluation mode, without gradients, and check the number of results."""
        with torch.no_grad(), eval_mode(self):
            tokens = list(self.token_vectors(sentences))
        assert len(tokens) == len(sentences), f"{len(tokens)} results for {len(sentences)} sentences"
        assert all(sentence.vectors.shape[:2] == (self.layers, len(sentence.spans)) for sentence in tokens)
        return tokens

    def _index(self, vectors: WordVectors, word: WordQuery) -> int:
        """Return the index of a word. Raises an error if the word is not in the encoder's vocabulary."""
        index = vectors.index(word)
        if not vectors.known[index]:
            raise self._unknown(vectors.words[index])
        return index

    def _unknown(self, word: str) -> ArgumentError:
        hint = suggest(word, self.vocabulary[len(self.vocabulary.special_tokens) :])
        return ArgumentError(
            f"{type(self).__name__} does not know the word {word!r}{hint}; choose another word."
        )

    def _layer(self, layer: int | None) -> int:
        return _check_index("layer", self.best_layer if layer is None else layer, self.layers)


def _merge(sentence: str, words: Sequence[Word], tokens: TokenVectors) -> WordVectors:
    """Average the vectors of each word's tokens."""
    words, parts = tokens_of_words(sentence, words, tokens.spans)
    if not words:
        raise ArgumentError(
            f"The tokenizer drops all characters of {shorten(sentence)!r}; remove the sentence."
        )
    device = tokens.vectors.device
    sizes = torch.tensor([len(part) for part in parts], device=device)
    chosen = tokens.vectors[:, torch.tensor([token for part in parts for token in part], device=device)]
    if len(words) < chosen.shape[1]:
        owner = torch.repeat_interleave(torch.arange(len(words), device=device), sizes)
        sums = chosen.new_zeros(chosen.shape[0], len(words), chosen.shape[2]).index_add_(1, owner, chosen)
        chosen = sums / sizes[:, None]
    known = tokens.known
    flags = () if known is None else tuple(all(known[token] for token in part) for part in parts)
    return WordVectors(
        sentence,
        tuple(word.text for word in words),
        tuple((word.start, word.stop) for word in words),
        chosen,
        flags,
    )


def _cosine(x: Tensor, y: Tensor) -> Tensor:
    """Return the cosine similarity, computed in float64 so that equal vectors give exactly 1 in float32."""
    return F.cosine_similarity(x.double(), y.double(), dim=-1).clamp(-1, 1).to(x.dtype)


def _check_index(name: str, index: int, count: int) -> int:
    """Return the index of a layer or head. Raises an error if it is out of range."""
    if isinstance(index, bool) or not isinstance(index, int) or not -count <= index < count:
        valid = f"an integer from 0 to {count - 1}, or −1 for the last" if count > 1 else "0"
        raise ArgumentError(f"{name}={index!r} is not valid; pass {valid}.")
    return index


def _row(weights: Weights, part: Sequence[int], head: int | None) -> Tensor:
    """Return the weights of one word, averaged over its tokens and the heads: (k)."""
    rows = weights[..., list(part), :].flatten(0, -3).mean(-2)  # … h q k -> h k
    return rows.mean(0) if head is None else rows[_check_index("head", head, len(rows))]


def _merge_keys(
    row: Tensor, tokens: TokenVectors, words: Sequence[Word], parts: list[list[int]]
) -> list[AttendedWord]:
    """Sum the token weights of each word and each special token, in sentence order."""
    owners = [sum(token in part for part in parts) for token in range(len(tokens.spans))]
    attended = [
        (part[0], AttendedWord(word.text, float(sum(row[token] / owners[token] for token in part))))
        for word, part in zip(words, parts, strict=True)
    ]
    names = tokens.tokens or [_SPECIAL] * len(tokens.spans)
    attended += [
        (token, AttendedWord(names[token], float(row[token])))
        for token, span in enumerate(tokens.spans)
        if span is None
    ]
    return [word for _, word in sorted(attended, key=lambda item: item[0])]
