"""Lines of text to be translated, cut into pieces; and into parts, if a model cannot take them at once."""

from collections.abc import Iterator
from typing import NamedTuple

from regard.translation.tokens import SPACE, Cut

_ENDS = tuple(".!?…。！？؟।")
_PAUSES = tuple(",;:–—、，；：")
_CLOSING = "\"'»«”“’‘)]}›」』"  # what may stand behind the end of a sentence


class Part(NamedTuple):
    """Some pieces of a line, and the number that the first of their words has in the line."""

    word: int
    cut: Cut


class Line(NamedTuple):
    """A text, its words, and the parts that are translated one after the other: one, as a rule."""

    text: str
    words: list[str]
    parts: list[Part]

    @classmethod
    def of(cls, text: str, cut: Cut, longest: int) -> "Line":
        """A line in parts of no more pieces than `longest`: whole sentences if they fit, else whole words.

        >>> from regard.translation.sentence_splitter import Line
        >>> from regard.translation.tokens import Cut
        >>> words = "One two. Three four, five six seven.".split()
        >>> line = Line.of(" ".join(words), Cut(words, list(range(7)), words, list(range(7)), {}), longest=3)
        >>> [part.cut.text for part in line.parts]
        ['One two.', 'Three four,', 'five six seven.']
        """
        return cls(text, cut.words, [_part(cut, first, stop) for first, stop in _runs(cut, longest)])


def _runs(cut: Cut, longest: int) -> Iterator[tuple[int, int]]:
    """Pieces [first, stop) of each part."""
    first = 0
    while len(cut.ids) - first > longest:
        stop = _stop(cut, first, first + longest)
        yield first, stop
        first = stop
    if first < len(cut.ids):
        yield first, len(cut.ids)


def _stop(cut: Cut, first: int, most: int) -> int:
    """The best place to cut a line that is too long, after `first` and no later than `most`."""
    of = cut.word_of
    between = [at for at in range(most, first, -1) if of[at] != of[at - 1]]  # words, from the last on
    for marks in (_ENDS, _PAUSES):
        for at in between:
            if cut.words[of[at - 1]].rstrip(_CLOSING).endswith(marks):
                return at
    return between[0] if between else most


def _part(cut: Cut, first: int, stop: int) -> Part:
    """Pieces with their words; of a word that is too long for a part, the letters that are in it."""
    if (first, stop) == (0, len(cut.ids)):
        return Part(0, cut)
    of = cut.word_of[first:stop]
    words = cut.words[of[0] : of[-1] + 1]
    for word, split in ((of[0], _inside(cut, first)), (of[-1], _inside(cut, stop))):
        if split:
            shown = (
                piece for piece, number in zip(cut.pieces[first:stop], of, strict=True) if number == word
            )
            words[word - of[0]] = "".join(shown).replace(SPACE, "")
    unknown = {at - first: cut.unknown[at] for at in range(first, stop) if at in cut.unknown}
    numbers = [word - of[0] for word in of]
    return Part(of[0], Cut(words, cut.ids[first:stop], cut.pieces[first:stop], numbers, unknown))


def _inside(cut: Cut, at: int) -> bool:
    """Whether a word goes on across this place."""
    return 0 < at < len(cut.ids) and cut.word_of[at] == cut.word_of[at - 1]


def max_translation_tokens(pieces: int) -> int:
    """How many tokens the translation of a source of so many pieces may have, its end mark among them.

    >>> from regard.translation.sentence_splitter import max_translation_tokens
    >>> max_translation_tokens(20)
    50
    """
    return 2 * pieces + 10
