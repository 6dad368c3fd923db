"""Words in context: one interface to every encoder that gives each word of a sentence a vector per layer.

An encoder sees tokens, which may be parts of words, and marks of its own; people ask for words. So a subclass
of `WordEncoder` gives the vectors of its tokens and the characters that each stands for, and the base merges
them into words.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard._util.checks import check_int
from regard._util.text import bar, shorten
from regard.errors import ArgumentError
from regard.mechanism.weights.matrix import Weights
from regard.models.encoders.words import (
    Span,
    Word,
    WordQuery,
    check_sentences,
    find_word,
    is_word,
    parse_word,
    parse_word_pair,
    split_words,
    tokens_of_words,
)
from regard.models.layers.attention import watch_layers
from regard.models.layers.dropout import eval_mode


@dataclass(frozen=True, eq=False)
class TokenVectors:
    """What an encoder makes of one sentence: a vector per token and layer, and where each token stands.

    vectors: (layers, n, m).
    spans: the characters [start, stop) of each token; None for a mark of the encoder's own, such as [CLS].
    names: of the tokens; those of the marks are shown.
    known: whether the encoder knows each token; if None, it does.

    >>> import regard
    >>> (tokens,) = regard.load_encoder("minilm").token_vectors(["Dogs barked."])
    >>> tokens.names, tokens.spans[1:-1]
    (['[CLS]', 'dogs', 'barked', '.', '[SEP]'], [(0, 4), (5, 11), (11, 12)])
    """

    vectors: Tensor
    spans: Sequence[Span | None]
    names: Sequence[str] | None = None
    known: Sequence[bool] | None = None


@dataclass(frozen=True, eq=False)
class WordVectors:
    """A sentence whose words have vectors: (layers, words, m).

    `embedded["bark"]` is the first "bark" of the sentence, in any case if there is none in this one, and
    `embedded["bark", 1]` the second: its vector at each layer (layers, m).

    words, spans: the words, and the characters [start, stop) of each. A word of which the encoder sees
    nothing, because its tokenizer drops such characters, is left out.
    known: whether the encoder knows all of the word.

    >>> import torch
    >>> from regard.models.encoders.base import WordVectors
    >>> embedded = WordVectors("Dogs bark", ("Dogs", "bark"), ((0, 4), (5, 9)), torch.randn(3, 2, 16))
    >>> embedded["bark"].shape
    torch.Size([3, 16])
    >>> embedded["barks"]
    Traceback (most recent call last):
    regard.errors.ArgumentError: 'barks' is not in 'Dogs bark'; did you mean 'bark'? Its words are: Dogs bark
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
        """The place of a word in `words`."""
        return find_word(word, self.words, self.sentence)

    def __len__(self) -> int:
        return len(self.words)

    def __repr__(self) -> str:
        layers, _, width = self.vectors.shape
        return f"WordVectors({shorten(self.sentence)!r}: {len(self)} words × {layers} layers × {width})"


@dataclass(frozen=True, eq=False)
class Comparison:
    """How alike two words in their sentences are: the cosine of their vectors at each layer.

    words, sentences: the two of each.
    similarities: a cosine for each layer; `similarity` is that of `best_layer`.

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
        """The cosine at the layer where the encoder tells meanings apart best."""
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
    """A word that is near another; its sentence, if it stands in one; the cosine, `similarity`.

    >>> from regard.models import StaticEncoder
    >>> text = ["dogs chase cats", "cats chase mice", "dogs fear cats", "cats fear mice"]
    >>> (near,) = StaticEncoder.learn(text, width=3, window=1).nearest(
    ...     "chase", among=["who fears mice"], k=1
    ... )
    >>> near.word, near.sentence
    ('mice', 'who fears mice')
    """

    word: str
    sentence: str | None
    similarity: float


class AttendedWord(NamedTuple):
    """A word, or a mark of the encoder's own, and how much weight it gets.

    >>> import regard
    >>> found = regard.load_encoder("minilm").attended_words("Dogs may bark.", "bark")
    >>> [one.word for one in found], sum(one.weight for one in found)
    (['[CLS]', 'Dogs', 'may', 'bark', '.', '[SEP]'], 1.0)
    """

    word: str
    weight: float


class WordEncoder(nn.Module):
    """Gives each word of a sentence a vector per layer, and answers questions about them.

    A subclass sets `layers`, the number of vector layers, of which layer 0 is that without context, and
    implements `token_vectors`. `best_layer` is where it tells meanings apart best: the last, unless set.

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

    def token_vectors(self, sentences: Sequence[str]) -> Iterator[TokenVectors] | list[TokenVectors]:
        """The tokens of each sentence, in order. Called without gradients and in evaluation mode."""
        raise NotImplementedError(f"{type(self).__name__} must say what its token_vectors are.")

    def embed(self, sentences: str | Sequence[str]) -> list[WordVectors]:
        """A vector for each word at each layer: the mean over its tokens. One string is one sentence."""
        given = check_sentences(sentences)
        splits = [split_words(sentence) for sentence in given]
        for number, (sentence, words) in enumerate(zip(given, splits, strict=True)):
            if not words:
                raise ArgumentError(
                    f"sentence {number} is {shorten(sentence)!r}, which has no words; give at least one, or "
                    "leave the sentence out."
                )
        return [_merge(*each) for each in zip(given, splits, self._tokens(given), strict=True)]

    def compare(self, first: str, second: str, *, word: WordQuery | tuple[WordQuery, WordQuery]) -> Comparison:
        """How alike a word is in two sentences: the cosine of its vectors at each layer.

        word: that of both sentences, or a pair, one for each. Instead of a word, (word, n) is its n-th
        occurrence, counted from 0. A word is found as it is spelled, or else in any other case; an inflected
        one is another.
        """
        asked = parse_word_pair(word)
        both = self.embed([first, second])
        places = [self._place(each, one) for each, one in zip(both, asked, strict=True)]
        vectors = [each.vectors[:, place] for each, place in zip(both, places, strict=True)]
        words = [each.words[place] for each, place in zip(both, places, strict=True)]
        return Comparison((words[0], words[1]), (first, second), _cosine(*vectors), self.best_layer)

    def nearest(
        self,
        word: WordQuery,
        *,
        sentence: str | None = None,
        among: Sequence[str] | None = None,
        k: int = 5,
        layer: int | None = None,
    ) -> list[Neighbor]:
        """The words of other sentences whose vectors are most alike to those of a word in its sentence.

        sentence: where the word stands; without it, the word is the whole sentence.
        among: sentences to look in; a word is not compared with itself there.
        layer: whose vectors; `best_layer` by default.
        """
        check_int("nearest got k", k, min=1)
        if among is None:
            raise ArgumentError(
                f"{type(self).__name__} has vectors only for words in sentences; give some to look in: "
                "nearest(word, among=[…])."
            )
        (query,) = self.embed([parse_word(word)[0] if sentence is None else sentence])
        place, layer = self._place(query, word), self._layer(layer)
        others = [
            (candidate, number)
            for candidate in self.embed(among)
            for number, (text, known) in enumerate(zip(candidate.words, candidate.known, strict=True))
            if known and is_word(text) and (candidate.sentence, number) != (query.sentence, place)
        ]
        if not others:
            return []
        vectors = torch.stack([each.vectors[layer, number] for each, number in others])
        similarities = _cosine(query.vectors[layer, place], vectors)
        best = similarities.topk(min(k, len(others))).indices.tolist()
        return [
            Neighbor(others[i][0].words[others[i][1]], others[i][0].sentence, float(similarities[i]))
            for i in best
        ]

    def attended_words(
        self, sentence: str, word: WordQuery, *, layer: int | None = None, head: int | None = None
    ) -> list[AttendedWord]:
        """What a word attends to: the words of the sentence and the encoder's own marks, with their weights.

        The weights of a word's tokens are added where they are attended to, and averaged where they attend.
        layer, head: counted from 0, −1 is the last; by default the mean of all. Attention of layer i reads
        the vectors of layer i and makes those of layer i + 1: of vectors, layer 0 is before any attention.
        """
        (given,) = check_sentences([sentence])
        seen: list[Weights] = []
        with watch_layers(self, lambda _, weights: seen.append(weights)):
            (tokens,) = self._tokens([given])
        if not seen:
            raise ArgumentError(
                f"{type(self).__name__} does not attend, so that no word attends to another; ask an encoder "
                "with attention, such as BERT."
            )
        words, parts = tokens_of_words(given, split_words(given), tokens.spans)
        place = find_word(word, [one.text for one in words], given)
        rows = torch.stack([_rows(weights, parts[place], head) for weights in _chosen(seen, layer)]).mean(0)
        return _columns(rows, tokens, words, parts)

    def tokens(self, sentence: str) -> list[str]:
        """The tokens that the encoder makes of a sentence, its marks included: what its attentions see.

        >>> import regard
        >>> regard.load_encoder("minilm").tokens("Unbelievably, dogs bark.")
        ['[CLS]', 'un', '##bel', '##ie', '##va', '##bly', ',', 'dogs', 'bark', '.', '[SEP]']
        """
        (tokens,) = self._tokens(check_sentences([sentence]))
        return list(tokens.names or [sentence[slice(*span)] if span else "(mark)" for span in tokens.spans])

    def _tokens(self, sentences: Sequence[str]) -> list[TokenVectors]:
        with torch.no_grad(), eval_mode(self):
            tokens = list(self.token_vectors(sentences))
        assert len(tokens) == len(sentences), f"{len(tokens)} results for {len(sentences)} sentences"
        assert all(each.vectors.shape[:2] == (self.layers, len(each.spans)) for each in tokens)
        return tokens

    def _place(self, embedded: WordVectors, word: WordQuery) -> int:
        """Where an asked word stands; one that the encoder does not know has no meaning to ask about."""
        place = embedded.index(word)
        if not embedded.known[place]:
            raise self._unknown(embedded.words[place])
        return place

    def _unknown(self, word: str) -> ArgumentError:
        return ArgumentError(f"{type(self).__name__} does not know the word {word!r}; ask about another one.")

    def _layer(self, layer: int | None) -> int:
        layer = self.best_layer if layer is None else layer
        if isinstance(layer, bool) or not isinstance(layer, int) or not -self.layers <= layer < self.layers:
            raise ArgumentError(
                f"layer is {layer!r} and {type(self).__name__} has layers 0 to {self.layers - 1}."
            )
        return layer


def _merge(sentence: str, words: Sequence[Word], tokens: TokenVectors) -> WordVectors:
    """Tokens into words: the mean of the vectors."""
    words, parts = tokens_of_words(sentence, words, tokens.spans)
    if not words:
        raise ArgumentError(
            f"the encoder sees no words in {shorten(sentence)!r}: its tokenizer drops all of these "
            "characters; give other words, or leave the sentence out."
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
    """In float64, so that what is equal has a cosine of exactly 1 in float32."""
    return F.cosine_similarity(x.double(), y.double(), dim=-1).clamp(-1, 1).to(x.dtype)


def _chosen(seen: list[Weights], layer: int | None) -> list[Weights]:
    """The attention of one layer, counted from 0, or all of them."""
    if layer is None:
        return seen
    whole = isinstance(layer, int) and not isinstance(layer, bool)
    if not whole or not -len(seen) <= layer < len(seen):
        raise ArgumentError(
            f"attended_words got layer={layer!r} and there are {len(seen)} layers that attend; they count from 0. "
            f"Give 0 to {len(seen) - 1}, or −1, the last."
        )
    return [seen[layer]]


def _rows(weights: Weights, part: Sequence[int], head: int | None) -> Tensor:
    """The weights of one word's tokens, averaged over them and over the heads: (k)."""
    rows = weights[..., list(part), :].flatten(0, -3).mean(-2)  # … h q k -> h k
    if head is None:
        return rows.mean(0)
    if isinstance(head, bool) or not isinstance(head, int) or not -len(rows) <= head < len(rows):
        raise ArgumentError(f"attended_words got head={head!r} and there are {len(rows)} heads; they count from 0.")
    return rows[head]


def _columns(row: Tensor, tokens: TokenVectors, words: Sequence[Word], parts: list[list[int]]) -> list[AttendedWord]:
    """Weights of tokens into weights of words and marks, in the order of the sentence."""
    shares = [sum(token in part for part in parts) for token in range(len(tokens.spans))]
    found = [
        (part[0], AttendedWord(word.text, float(sum(row[token] / shares[token] for token in part))))
        for word, part in zip(words, parts, strict=True)
    ]
    names = tokens.names or ["(mark)"] * len(tokens.spans)
    found += [
        (token, AttendedWord(names[token], float(row[token])))
        for token, span in enumerate(tokens.spans)
        if span is None
    ]
    return [attended_words for _, attended_words in sorted(found, key=lambda item: item[0])]
