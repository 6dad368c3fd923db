"""A line of the source and its parts, as the model reads them: words, tokens and protected spans."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from regard.translation.text.tags import Tag
from regard.translation.tokens import SPACE, Segmentation, Tokenizer


@dataclass(frozen=True)
class SourcePart:
    """A part of a line that is translated as a unit: usually a sentence.

    first_word: index of its first word in the line. segmentation: the words, and the tokens the model reads.
    normalized: the words in the letter case of the training text.
    copies: the text of each protected span, by the word that it belongs to. unknown: the unknown words.
    was_upper: whether each word was uppercase. separator: the whitespace before the part.
    terms: the terms that the translation must contain, if they are not in `copies`.
    replaced: the words that were replaced by a term in `copies`.
    """

    first_word: int
    segmentation: Segmentation
    normalized: list[str]
    copies: dict[int, list[str]]
    unknown: frozenset[int]
    was_upper: list[bool]
    separator: str = ""
    terms: Sequence[str] = ()
    replaced: frozenset[int] = frozenset()

    @property
    def may_need_weights(self) -> bool:
        """Whether its translation may depend on the attention weights: some text is copied or uppercase."""
        return bool(self.copies) or bool(self.segmentation.unknown) or any(self.was_upper)

    @property
    def ids(self) -> list[int]:
        """The token ids that the model reads."""
        return self.segmentation.ids

    @property
    def verbatim(self) -> list[str]:
        """The words as written, except for terms."""
        words = enumerate(zip(self.segmentation.words, self.normalized, strict=True))
        return [normalized if i in self.replaced else word for i, (word, normalized) in words]

    @cached_property
    def has_text(self) -> bool:
        """Whether there is anything to translate apart from the protected spans."""
        return bool(self.ids) and any(
            any(map(str.isalnum, without_copies(word, self.copies.get(number, ()))))
            for number, word in enumerate(self.normalized)
        )

    @property
    def all_upper(self) -> bool:
        """Whether the whole part was uppercase, apart from protected spans."""
        words = enumerate(zip(self.was_upper, self.segmentation.words, strict=True))
        return any(self.was_upper) and all(
            upper or i in self.copies or not any(map(str.isalpha, word)) for i, (upper, word) in words
        )


class SourceLine(NamedTuple):
    """A line as the translator reads it.

    words, ranges: the words, and their character ranges in the text without tags. tags: the removed tags.
    parts: the parts that are translated separately. sentences: number of sentences.
    """

    text: str
    words: list[str]
    ranges: list[tuple[int, int]]
    tags: list[Tag]
    parts: list[SourcePart]
    sentences: int


def without_copies(word: str, copies: Iterable[str]) -> str:
    """Return a word without its protected spans."""
    for text in copies:
        word = word.replace(text, "", 1)
    return word


def segment_words(
    tokenizer: Tokenizer, words: Sequence[str], spans: dict[int, list[tuple[int, int, str]]]
) -> Segmentation:
    """Tokenize words; each span becomes one unknown token.

    >>> from regard.translation import Tokenizer
    >>> from regard.translation.text.source_part import segment_words
    >>> tokenizer = Tokenizer.learn(["Ein Hund bellt um 3."] * 9, kind="characters")
    >>> segment_words(tokenizer, ["um", "15:30."], {1: [(0, 5, "number")]}).pieces
    ['▁', 'u', 'm', '15:30', '.']
    """
    if not spans:
        return tokenizer.segment(" ".join(words))
    result = Segmentation(list(words), [], [], [], {})
    for number, word in enumerate(words):
        if number not in spans:
            _append_segmentation(result, number, tokenizer.segment(word))
            continue
        position = 0
        for start, stop, _ in spans[number]:
            _append(result, number, *_continuation(tokenizer, word[position:start], position == 0))
            result.unknown[len(result.ids)] = word[start:stop]
            _append(result, number, [tokenizer.special.unknown], [word[start:stop]])
            position = stop
        _append(result, number, *_continuation(tokenizer, word[position:], False))
    return result


def _append_segmentation(result: Segmentation, word: int, part: Segmentation) -> None:
    result.unknown.update({len(result.ids) + at: text for at, text in part.unknown.items()})
    _append(result, word, part.ids, part.pieces)


def _append(result: Segmentation, word: int, ids: Sequence[int], pieces: Sequence[str]) -> None:
    result.ids.extend(ids)
    result.pieces.extend(pieces)
    result.word_of.extend([word] * len(ids))


def _continuation(tokenizer: Tokenizer, text: str, at_start: bool) -> tuple[list[int], list[str]]:
    """Tokenize a part of a word, with ▁ only if the part begins the word. Unknown characters are dropped."""
    if not text:
        return [], []
    segmentation, unknown = tokenizer.segment(text), tokenizer.special.unknown
    ids, pieces = list(segmentation.ids), list(segmentation.pieces)
    if not at_start and pieces and pieces[0].startswith(SPACE):
        rest = pieces[0].removeprefix(SPACE)
        tokens = tokenizer.token_ids([rest] if rest else [])
        if unknown in tokens:
            tokens, rest_pieces = tokenizer.token_ids(list(rest)), list(rest)
        else:
            rest_pieces = [rest] if rest else []
        ids, pieces = [*tokens, *ids[1:]], [*rest_pieces, *pieces[1:]]
    known = [(token, piece) for token, piece in zip(ids, pieces, strict=True) if token != unknown]
    return [token for token, _ in known], [piece for _, piece in known]


def cut_spans(part: SourcePart, tokenizer: Tokenizer) -> SourcePart:
    """Remove the protected spans from the model's input; they remain in `copies`.

    Final punctuation is kept and attached to the previous word.
    """
    result = Segmentation(list(part.segmentation.words), [], [], [], {})
    for number, word in enumerate(part.normalized):
        rest = without_copies(word, part.copies.get(number, ()))
        if number not in part.copies or any(map(str.isalnum, rest)) or not result.ids:
            _append_segmentation(result, number, tokenizer.segment(rest))
        else:
            _append(result, number, *_continuation(tokenizer, rest.lstrip("([{\"'„“«»"), False))
    return replace(part, segmentation=result)
