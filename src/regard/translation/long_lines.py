"""Split lines that are too long for a model: at sentence ends, otherwise at pauses or between words."""

from collections.abc import Iterator
from typing import NamedTuple

from regard.translation.tokens import SPACE, Segmentation

_SENTENCE_ENDS = tuple(".!?…。！？؟।")
_PAUSES = tuple(",;:–—、，；：")
_CLOSING = "\"'»«”“’‘)]}›」』"  # may follow the end of a sentence


class Part(NamedTuple):
    """A tokenized part of a line; `first_word` is the index of its first word in the line."""

    first_word: int
    segmentation: Segmentation


def split_tokens(segmentation: Segmentation, max_tokens: int) -> list[Part]:
    """Split a tokenized text into parts of up to `max_tokens` tokens, preferably at sentence ends.

    >>> from regard.translation import Segmentation
    >>> from regard.translation.long_lines import split_tokens
    >>> segmentation = Segmentation(["a", "dog.", "two"], [5, 6, 7], ["▁a", "▁dog.", "▁two"], [0, 1, 2], {})
    >>> [part.segmentation.text for part in split_tokens(segmentation, 2)]
    ['a dog.', 'two']
    """
    return [_part(segmentation, first, stop) for first, stop in _spans(segmentation, max_tokens)]


def _spans(segmentation: Segmentation, max_tokens: int) -> Iterator[tuple[int, int]]:
    """Yield the token range [first, stop) of each part."""
    first = 0
    while len(segmentation.ids) - first > max_tokens:
        stop = _split_point(segmentation, first, first + max_tokens)
        yield first, stop
        first = stop
    if first < len(segmentation.ids):
        yield first, len(segmentation.ids)


def _split_point(segmentation: Segmentation, first: int, last: int) -> int:
    """Return the best token index at which to split a line, after `first` and up to `last`."""
    word_of = segmentation.word_of
    boundaries = [
        at for at in range(last, first, -1) if word_of[at] != word_of[at - 1]
    ]  # word boundaries, last first
    for marks in (_SENTENCE_ENDS, _PAUSES):
        for at in boundaries:
            if segmentation.words[word_of[at - 1]].rstrip(_CLOSING).endswith(marks):
                return at
    return boundaries[0] if boundaries else last


def _part(segmentation: Segmentation, first: int, stop: int) -> Part:
    """Return tokens [first, stop) with their words; a split word keeps only the characters in this part."""
    if (first, stop) == (0, len(segmentation.ids)):
        return Part(0, segmentation)
    word_of, pieces = segmentation.word_of[first:stop], segmentation.pieces[first:stop]
    words = segmentation.words[word_of[0] : word_of[-1] + 1]
    for word, is_split in (
        (word_of[0], _splits_word(segmentation, first)),
        (word_of[-1], _splits_word(segmentation, stop)),
    ):
        if is_split:
            fragment = (piece for piece, number in zip(pieces, word_of, strict=True) if number == word)
            words[word - word_of[0]] = "".join(fragment).replace(SPACE, "")
    unknown = {
        at - first: segmentation.unknown[at] for at in range(first, stop) if at in segmentation.unknown
    }
    numbers = [word - word_of[0] for word in word_of]
    return Part(word_of[0], Segmentation(words, segmentation.ids[first:stop], pieces, numbers, unknown))


def _splits_word(segmentation: Segmentation, at: int) -> bool:
    return 0 < at < len(segmentation.ids) and segmentation.word_of[at] == segmentation.word_of[at - 1]


def max_translation_tokens(source_tokens: int) -> int:
    """Return the maximum length of a translation, including its end token."""
    return 2 * source_tokens + 10
