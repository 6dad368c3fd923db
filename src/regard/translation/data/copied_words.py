"""Words that are the same in both languages. Hiding them in training teaches the model to copy.

A hidden word is replaced by the unknown token on both sides. The model learns to generate the unknown token
where a word should be copied. Names, numbers and other protected text are translated this way.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from regard.translation.tokens import SPACE, UNKNOWN

Ids = Sequence[int] | NDArray[numpy.integer]
COPY_FACTOR = 5  # pairs with copyable words are chosen this many times as often as others
_MIN_COPIED = 3  # minimum number of letters; shorter words are mostly function words
_TWO_WORDS = 0.3  # probability of hiding a second word


class Copyable(NamedTuple):
    """Tokens that can be copied: words with the same letters in both vocabularies, ignoring case.

    source, target: for each token id, a key that identifies its letters; 0 if the token is not a word.
    source_inner, target_inner: whether a token continues a word, so the token before it is not a whole word.
    """

    source: NDArray[numpy.int64]
    target: NDArray[numpy.int64]
    source_inner: NDArray[numpy.bool_]
    target_inner: NDArray[numpy.bool_]

    def common(self, source: Ids, target: Ids) -> list[tuple[int, int]]:
        """Return the positions of the words that occur exactly once on each side of a pair."""
        first = _whole_words(source, self.source, self.source_inner)
        second = _whole_words(target, self.target, self.target_inner)
        return [(first[key], second[key]) for key in sorted(first.keys() & second.keys())]


def find_copyable(source: Sequence[str], target: Sequence[str]) -> Copyable:
    """Find the words that both vocabularies contain.

    source, target: the tokens of each vocabulary, by id.

    >>> from regard.translation.data.copied_words import find_copyable
    >>> tokens = ["<pad>", "<s>", "</s>", "<unk>", "▁Park", "▁park", "s", "."]
    >>> find_copyable(tokens, tokens).common([4, 7], [5, 7])
    [(0, 0)]
    >>> find_copyable(tokens, tokens).common([4, 6], [5, 7])  # "Parks" is not "park"
    []
    """
    keys: dict[str, int] = {}
    numbers, inner = [], []
    for tokens in (source, target):
        words = [_letters(token) for token in tokens]
        numbers.append(
            numpy.array([keys.setdefault(word, len(keys) + 1) if word else 0 for word in words], numpy.int64)
        )
        inner.append(numpy.array([token[:1].isalnum() for token in tokens]))
    return Copyable(numbers[0], numbers[1], inner[0], inner[1])


def _letters(token: str) -> str:
    """Return the letters of a token if it is a word, otherwise an empty string."""
    word = token.removeprefix(SPACE)
    is_word = token.startswith(SPACE) and (word.isdigit() or (len(word) >= _MIN_COPIED and word.isalnum()))
    return word.casefold() if is_word else ""


def _whole_words(ids: Ids, keys: NDArray[numpy.int64], inner: NDArray[numpy.bool_]) -> dict[int, int]:
    """Return the position of each whole word that occurs once, by its key."""
    ids = numpy.asarray(ids)
    token_keys = keys[ids]
    followed = numpy.append(inner[ids[1:]], False)
    positions: dict[int, int] = {}
    repeated = set()
    for position in (token_keys.astype(bool) & ~followed).nonzero()[0].tolist():
        key = int(token_keys[position])
        if key in positions:
            repeated.add(key)
        positions[key] = position
    return {key: position for key, position in positions.items() if key not in repeated}


def hide_words(
    source: list[int],
    target: list[int],
    words: Sequence[tuple[int, int]],
    random: numpy.random.Generator,
    unknown: int = UNKNOWN,
) -> tuple[list[int], list[int]]:
    """Replace one or two words with the unknown token on both sides."""
    count = min(1 + int(random.random() < _TWO_WORDS), len(words))
    for i in random.permutation(len(words))[:count].tolist():
        first, second = words[i]
        source[first] = target[second] = unknown
    return source, target
