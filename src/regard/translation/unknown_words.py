"""What a model cannot read comes through, copied from the source (Luong et al. 2015b, section 3).

A model writes the unknown mark for a piece that it does not know. The source piece that it looks at most
meanwhile tells which letters to put there. A word that it left out altogether is put where it would stand.
"""

import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from regard.translation.tokens import UNKNOWN, Cut, Kind

_READABLE = 2  # letters; a word with no more of them may well be another one


class Letters(NamedTuple):
    """The letters for the unknown marks of a target, by place, and the source pieces that they came from."""

    at: dict[int, str]
    used: set[int]


class Placed(NamedTuple):
    """A target word: the model's own word of this number, or a copy of this source word."""

    text: str
    own: int | None = None
    copied: int | None = None


def letters(ids: Sequence[int], source: Cut, weights: Tensor | None, kind: Kind) -> Letters:
    """What to write for each unknown mark among target ids; `weights` are (target tokens, source tokens).

    Each unknown source piece is used once, where it is looked at most; without weights, they are used in
    order. For further marks, a vocabulary of words takes the word that is looked at most, and others do not.

    >>> import torch
    >>> from regard.translation.unknown_words import letters
    >>> from regard.translation.tokens import UNKNOWN, Cut
    >>> source = Cut(["Λ", "and", "Ω"], [3, 9, 3], ["Λ", "and", "Ω"], [0, 1, 2], {0: "Λ", 2: "Ω"})
    >>> letters([UNKNOWN, 7], source, torch.tensor([[0.1, 0.2, 0.7], [0.1, 0.8, 0.1]]), "bpe")
    Letters(at={0: 'Ω'}, used={2})
    """
    marks = [place for place, one in enumerate(ids) if one == UNKNOWN]
    pieces = list(source.unknown)
    pairs = list(zip(marks, pieces, strict=False))
    if weights is not None and marks and pieces:
        pairs = _strongest(marks, pieces, weights)
    found = {mark: _harmless(source.unknown[piece]) for mark, piece in pairs}
    if weights is not None and kind == "words" and source.ids:
        for mark in marks:
            word = source.words[source.word_of[int(weights[mark].argmax())]]
            found.setdefault(mark, _harmless(word))
    return Letters(found, {piece for _, piece in pairs})


def _strongest(marks: Sequence[int], pieces: Sequence[int], weights: Tensor) -> list[tuple[int, int]]:
    """Marks with pieces by falling weight, each of them once."""
    table = weights[list(marks)][:, list(pieces)]
    rows, columns, pairs = set[int](), set[int](), []
    for flat in table.flatten().argsort(descending=True, stable=True).tolist():
        row, column = divmod(flat, len(pieces))
        if row not in rows and column not in columns:
            rows.add(row)
            columns.add(column)
            pairs.append((marks[row], pieces[column]))
    return pairs


def left_out(source: Cut, used: set[int]) -> list[int]:
    """The source words with unknown pieces, none of which came through."""
    through = {source.word_of[piece] for piece in used}
    words = {source.word_of[piece] for piece, shown in source.unknown.items() if _harmless(shown)}
    return sorted(words - through)


def place(words: Sequence[str], source: Cut, missing: Sequence[int], weights: Tensor | None) -> list[Placed]:
    """The target words with copies of the missing source words; `weights` are (target words, source words).

    A copy replaces a word that is what the model could read of it. Other copies stand behind the target word
    that looks most at the source word before; without weights, about where they stand in the source.

    >>> from regard.translation.unknown_words import place
    >>> from regard.translation.tokens import Cut
    >>> source = Cut(["in", "Łódź"], [9, 3, 8], ["▁in", "Ł", "ódź"], [0, 1, 1], {1: "Ł"})
    >>> [word.text for word in place(["in", "ódź"], source, [1], None)]
    ['in', 'Łódź']
    >>> [word.text for word in place(["there"], source, [1], None)]
    ['there', 'Łódź']
    """
    found = [Placed(word, own=number) for number, word in enumerate(words)]
    behind: dict[int, list[Placed]] = {}
    for word in missing:
        core, readable = _core(source, word)
        if len(readable) > _READABLE and readable in words:
            found[words.index(readable)] = Placed(core, copied=word)
        else:
            before = _before(word, len(words), len(source.words), missing, weights)
            behind.setdefault(before, []).append(Placed(core, copied=word))
    woven = list(behind.get(-1, []))
    for number, own in enumerate(found):
        woven += [own, *behind.get(number, [])]
    return woven


def _core(source: Cut, word: int) -> tuple[str, str]:
    """A source word without the punctuation around it, and what the model can read of that."""
    text = _harmless(source.words[word])
    unknown = {
        letter for piece, shown in source.unknown.items() if source.word_of[piece] == word for letter in shown
    }
    kept = [at for at, letter in enumerate(text) if letter in unknown or letter.isalnum()]
    core = text[kept[0] : kept[-1] + 1] if kept else text
    return core, "".join(letter for letter in core if letter not in unknown)


def _before(word: int, targets: int, sources: int, missing: Sequence[int], weights: Tensor | None) -> int:
    """The target word behind which a missing source word stands, −1 for the beginning."""
    known = [other for other in range(word) if other not in missing]
    if not known or not targets:
        return -1
    if weights is None:
        return -(-word * targets // sources) - 1
    return int(weights[:, known[-1]].argmax())


def _harmless(text: str) -> str:
    """Without control characters, which a terminal would obey."""
    return "".join(letter for letter in text if unicodedata.category(letter) != "Cc")
