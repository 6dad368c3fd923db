"""Lines of text to be translated: cut into pieces, and into runs if they are longer than a model can take."""

from typing import NamedTuple

from regard.translation.tokens import Cut

Run = tuple[int, int]  # pieces [first, stop) of a line

_ENDS = tuple(".!?…。！？؟।")
_PAUSES = tuple(",;:–—、，；：")
_CLOSING = "\"'»«”“’‘)]}›」』"  # what may stand behind the end of a sentence


class Line(NamedTuple):
    """A text, its pieces, and the runs of them that are translated one after the other: one, as a rule."""

    text: str
    cut: Cut
    runs: list[Run]

    @classmethod
    def of(cls, text: str, cut: Cut, longest: int) -> "Line":
        """A line in runs of no more pieces than `longest`."""
        return cls(text, cut, runs(cut, longest))


def runs(cut: Cut, longest: int) -> list[Run]:
    """Runs of at most so many pieces: whole sentences if they are short enough, else whole words.

    >>> from regard.translation.lines import runs
    >>> from regard.translation.tokens import Cut
    >>> words = "One two. Three four, five six seven.".split()
    >>> runs(Cut(words, list(range(7)), words, list(range(7)), {}), longest=3)
    [(0, 2), (2, 4), (4, 7)]
    """
    found, first = [], 0
    while len(cut.ids) - first > longest:
        stop = _stop(cut, first, first + longest)
        found.append((first, stop))
        first = stop
    return [*found, (first, len(cut.ids))] if cut.ids else []


def _stop(cut: Cut, first: int, most: int) -> int:
    """The best place to cut a line that is too long, after `first` and no later than `most`."""
    of = cut.word_of
    between = [at for at in range(most, first, -1) if of[at] != of[at - 1]]  # words, from the last on
    for marks in (_ENDS, _PAUSES):
        for at in between:
            if cut.words[of[at - 1]].rstrip(_CLOSING).endswith(marks):
                return at
    return between[0] if between else most
