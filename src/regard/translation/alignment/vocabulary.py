"""Word ids, stems, endings and spelling for the lexical aligner."""

import unicodedata
from collections.abc import Iterable
from functools import cached_property, lru_cache
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.signedinteger[Any]]

_STEM = 4  # characters per stem; 3 and 5 make more errors on Greek books 40 to 44
_HAN_STEM = 1
_ENDING = 4  # characters per ending; 3 makes slightly more errors
_GRAM = 3  # characters per n-gram
_MAX_GRAMS = 16  # maximum number of n-grams per word
_MASKS = 4
_MIN_ROMANIZED = 3  # shorter words match by chance: romanized Greek articles look like English words
_BATCH_PAIRS = 1 << 14
# Latin spelling of Greek letters, by Unicode name; other letters use the first letter of their name
_GREEK = {"THETA": "th", "PHI": "ph", "CHI": "ch", "PSI": "ps", "XI": "x", "ETA": "e", "FINAL": "s"}


class Vocabulary:
    """The distinct words of one side, ignoring case and accents.

    words: normalized words (`normalize_word`); ids follow the order of first occurrence.

    >>> from regard.translation.alignment.vocabulary import Vocabulary
    >>> vocabulary = Vocabulary([]).extend(["Das Haus", "das Häuschen"])
    >>> list(vocabulary.numbers), vocabulary.encode("HAUS das")
    (['das', 'haus', 'hauschen'], [1, 0])
    """

    def __init__(self, words: Iterable[str]) -> None:
        self.numbers: dict[str, int] = {}
        for word in words:
            self.numbers.setdefault(word, len(self.numbers))

    def __len__(self) -> int:
        return len(self.numbers)

    def extend(self, texts: Iterable[str]) -> "Vocabulary":
        """Return a vocabulary extended by the words in the given texts; known words keep their ids."""
        new = (normalize_word(word) for text in texts for word in text.split())
        return Vocabulary((*self.numbers, *new))

    def encode(self, text: str) -> list[int]:
        """Return the ids of the words in a text. All words must be in the vocabulary."""
        return [self.numbers[normalize_word(word)] for word in text.split()]

    @cached_property
    def stems(self) -> Integers:
        """Stem id of each word, in order of first occurrence, so `extend` keeps the ids."""
        return _number(map(_stem, self.numbers))

    @cached_property
    def stem_count(self) -> int:
        """Number of distinct stems."""
        return int(self.stems.max(initial=-1)) + 1

    @cached_property
    def endings(self) -> Integers:
        """Id of each word's ending, in order of first occurrence. All short words share an id."""
        return _number(word[-_ENDING:] if len(word) > _ENDING else "" for word in self.numbers)

    @cached_property
    def ending_count(self) -> int:
        """Number of distinct endings."""
        return int(self.endings.max(initial=-1)) + 1

    @cached_property
    def _grams(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Hashed n-grams of each word's Latin spelling, padded with 0, and the number of n-grams per word."""
        table = np.zeros((len(self), _MAX_GRAMS), dtype=np.int32)
        for row, word in zip(table, self.numbers, strict=True):
            grams = sorted(_spelling_grams(word))[:_MAX_GRAMS]
            row[: len(grams)] = grams
        return table, (table != 0).sum(1, dtype=np.int32)

    @cached_property
    def _gram_masks(self) -> NDArray[np.uint64]:
        """Bit masks of each word's n-grams. Words that share an n-gram have a common bit in each mask."""
        table = self._grams[0].astype(np.uint64)
        masks = np.zeros((len(self), _MASKS), dtype=np.uint64)
        for mask in range(_MASKS):
            bits = np.uint64(1) << ((table >> np.uint64(6 * mask)) & np.uint64(63))
            masks[:, mask] = np.bitwise_or.reduce(np.where(table == 0, np.uint64(0), bits), axis=1)
        return masks


def spelling_similarity(
    words: tuple[Vocabulary, Vocabulary], source: Integers, target: Integers
) -> NDArray[np.float32]:
    """Return the spelling similarity, from 0 to 1, of each source word and the corresponding target word.

    It is the Dice coefficient of their letter trigrams. Greek and Cyrillic are compared in Latin letters.

    >>> import numpy as np
    >>> from regard.translation.alignment.vocabulary import Vocabulary, spelling_similarity
    >>> words = Vocabulary(["adam", "den"]), Vocabulary(["αδαμ", "the"])
    >>> spelling_similarity(words, np.array([0, 0, 1]), np.array([0, 1, 1])).tolist()
    [1.0, 0.0, 0.0]
    """
    similarity = np.zeros(len(source), dtype=np.float32)
    (first, first_size), (second, second_size) = (vocabulary._grams for vocabulary in words)
    masks, other_masks = (vocabulary._gram_masks for vocabulary in words)
    for start in range(0, len(source), _BATCH_PAIRS):
        part = slice(start, start + _BATCH_PAIRS)
        shared_bits = masks[source[part]] & other_masks[target[part]]
        candidates = np.nonzero(shared_bits.all(1))[0] + start
        source_words, target_words = source[candidates], target[candidates]
        shared = np.zeros(len(candidates), dtype=np.int32)
        for column in range(_MAX_GRAMS):
            gram = first[source_words, column][:, None]
            shared += ((gram == second[target_words]) & (gram != 0)).any(1)
        similarity[candidates] = 2 * shared / (first_size[source_words] + second_size[target_words])
    return similarity


@lru_cache(1 << 16)
def normalize_word(word: str) -> str:
    """Remove accents and convert to lower case."""
    letters = unicodedata.normalize("NFD", word)
    return "".join(letter for letter in letters if not unicodedata.combining(letter)).lower()


def _number(names: Iterable[str]) -> Integers:
    """Return an id for each name, in order of first occurrence."""
    ids: dict[str, int] = {}
    return np.array([ids.setdefault(name, len(ids)) for name in names], dtype=np.int64)


def _stem(word: str) -> str:
    """Return the first four letters of a word; for Chinese characters, only the first."""
    han = "\u2e80" <= word[:1] <= "\u9fff" and not "\u3040" <= word[:1] <= "\u30ff"  # but not kana
    return word[: _HAN_STEM if han else _STEM]


def _spelling_grams(word: str) -> set[int]:
    spelling = "".join(_romanize(letter) for letter in word)
    if not spelling or (spelling != word and len(spelling) < _MIN_ROMANIZED):
        return set()
    marked = f"^{spelling}$"
    grams = (marked[i : i + _GRAM] for i in range(len(marked) - _GRAM + 1))
    codes = (gram.encode(errors="surrogatepass") for gram in grams)  # lone surrogates are letters like others
    return {crc32(code) >> 1 or 1 for code in codes}  # 31 bits; deterministic, unlike hash()


@lru_cache(1 << 12)
def _romanize(letter: str) -> str:
    """Spell a Greek or Cyrillic letter in Latin letters, using its Unicode name; keep other letters."""
    if letter.isascii():
        return letter
    script, _, name = unicodedata.name(letter, "").partition(" ")
    name = name.partition("LETTER ")[2]
    if script == "GREEK" and name:
        return _GREEK.get(name.split()[0], name[0].lower())
    if script == "CYRILLIC" and name:
        name = name.split()[-1].lower()  # "be", "zhe", "el", "a"
        return "".join(sound for sound in name if sound not in "aeiou") or name
    return letter
