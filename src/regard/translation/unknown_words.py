"""Copy unknown words from the source (Luong et al. 2015b, section 3).

For words outside its vocabulary, a model generates the unknown token. Each unknown token is replaced with
the unknown source token that has the largest attention weight. An unknown source word that was not translated
at all is inserted at the matching position.
"""

import math
import unicodedata
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from regard.translation.text.sentence_splitter import sentence_ends
from regard.translation.tokens import UNKNOWN, Kind, Segmentation

if TYPE_CHECKING:
    from regard.translation.alignment.alignment import Array

_SENTENCE_ENDS = ".!?…。！？"
_CLOSING = "\"'»«”“’‘)]}"
_ORDER = 0.25  # minimum difference of attention weights that changes the order of copied words
_CERTAIN = 0.5  # minimum weight of the word before an inserted copy that changes the order of copied words
_MIN_KNOWN = 3  # minimum number of known characters to recognize an unknown source word in the target


class Replacements(NamedTuple):
    """Text for each unknown target token, by position, and the (target, source) positions of each copy."""

    texts: dict[int, str]
    pairs: list[tuple[int, int]]

    @property
    def copied(self) -> set[int]:
        """The source tokens that were copied."""
        return {source for _, source in self.pairs}


class TargetWord(NamedTuple):
    """A target word: its `position` in the model's output, or the source word that it copies."""

    text: str
    position: int | None = None
    copied: int | None = None


def replace_unknown(
    ids: Sequence[int],
    source: Segmentation,
    weights: "Array | None",
    kind: Kind,
    unknown: int = UNKNOWN,
) -> Replacements:
    """Find the text for each unknown token in `ids`.

    weights: (target tokens, source tokens).

    Each unknown source token is copied once, to an unknown target token that attends to it: in source order
    unless the weights clearly differ; without weights, unknown tokens are matched in order. For the remaining
    unknown target tokens, a word vocabulary copies the source word with the largest weight; other
    vocabularies leave them unknown.
    """
    targets = [position for position, token in enumerate(ids) if token == unknown]
    sources = list(source.unknown)
    pairs = list(zip(targets, sources, strict=False))
    if weights is not None and targets and sources:
        pairs = _match(targets, sources, weights)
    texts = {target: printable_text(source.unknown[token]) for target, token in pairs}
    if weights is not None and kind == "words" and source.ids:
        for target in targets:
            word = source.words[source.word_of[int(weights[target].argmax())]]
            texts.setdefault(target, printable_text(word))
    return Replacements(texts, pairs)


def _match(targets: Sequence[int], sources: Sequence[int], weights: "Array") -> list[tuple[int, int]]:
    """Match targets to sources, using each at most once: in source order, unless the weights clearly differ.

    Unknown tokens look alike to the model, so small differences of their weights say little. Starting from
    the best match in source order, targets exchange their sources in cycles in which the weight of each
    increases by at least `_ORDER` (top trading cycles).
    """
    table: list[list[float]] = weights[list(targets)][:, list(sources)].tolist()
    columns = _match_in_order(table)
    free = set(range(len(sources))).difference(columns.values())
    owners = {column: row for row, column in columns.items()}
    path: list[int] = []  # each row prefers the column of the next one
    while owners:
        path = path or [min(owners.values())]
        row = path[-1]
        best = max(sorted(free.union(owners)), key=table[row].__getitem__)
        if table[row][best] - table[row][columns[row]] < _ORDER:
            best = columns[row]
        if best not in free and owners[best] not in path:
            path.append(owners[best])
            continue
        cycle = [row] if best in free else path[path.index(owners[best]) :]
        for member in cycle:
            del owners[columns[member]]
        if best in free:
            free ^= {best, columns[row]}
        wanted = [best] if len(cycle) == 1 else [columns[member] for member in (*cycle[1:], cycle[0])]
        columns.update(zip(cycle, wanted, strict=True))
        del path[-len(cycle) :]
    return [(targets[row], sources[column]) for row, column in columns.items()]


def _match_in_order(table: Sequence[Sequence[float]]) -> dict[int, int]:
    """Match as many rows to columns as possible, both increasing, with the largest total weight."""
    rows, columns = len(table), len(table[0])
    if rows == columns:
        return {row: row for row in range(rows)}
    if rows > columns:
        return {row: column for column, row in _match_in_order([*zip(*table, strict=True)]).items()}
    totals = [[0.0] * (columns + 1)]  # totals[row][column]: of the rows and columns before these
    for weights in table:
        total = [-math.inf]
        for column, weight in enumerate(weights):
            total.append(max(total[column], totals[-1][column] + weight))
        totals.append(total)
    result, column = dict[int, int](), columns
    for row in range(rows, 0, -1):
        while totals[row][column] == totals[row][column - 1]:
            column -= 1
        column -= 1
        result[row - 1] = column
    return dict(sorted(result.items()))


def next_copy(sources: Sequence[int], weights: Sequence[float]) -> int:
    """Return the source token to copy next: the first, unless another one has a clearly larger weight."""
    best = max(sources, key=weights.__getitem__)
    return best if weights[best] - weights[sources[0]] >= _ORDER else sources[0]


def untranslated_words(source: Segmentation, copied: set[int]) -> list[int]:
    """Return the source words that have unknown tokens but no copied tokens."""
    translated = {source.word_of[token] for token in copied}
    words = {source.word_of[token] for token, text in source.unknown.items() if printable_text(text)}
    return sorted(words - translated)


def insert_words(
    words: Sequence[str],
    source: Segmentation,
    missing: Mapping[int, Sequence[str]],
    weights: "Array | None",
    copies: Mapping[int, int] = MappingProxyType({}),
) -> list[TargetWord]:
    """Insert copies of the missing source words.

    missing: for each source word, its parts to copy; if empty, the word without punctuation is copied.
    weights: (target words, source words). copies: the source word of each target word that is a copy.

    If the target contains a word that consists of the missing word's known characters, this target word is
    replaced by a copy of the whole source word. Otherwise, a copy follows the target word that attends most
    to the preceding source word; without weights, the copy keeps its relative position. If this weight is
    small, the copies are kept in source order. Adjacent copies remain adjacent.
    """
    generated = [TargetWord(word, position=number) for number, word in enumerate(words)]
    inserted: dict[int, list[TargetWord]] = {}  # by the preceding target word; −1 for the start
    positions = {word: at for at, word in copies.items()}  # where copies are, or after which, by source word
    for word in sorted(missing):
        core, known = _core(source, word)
        at = None if missing[word] or len(known) < _MIN_KNOWN else _find_generated(known, generated, copies)
        if at is not None:
            generated[at] = TargetWord(core, copied=word)
            positions[word] = at
        else:
            previous, weight = _preceding_word(word, len(words), len(source.words), missing, weights)
            following = next(other for other in range(word, len(source.words) + 1) if other not in missing)
            if following in positions:  # adjacent copies remain adjacent
                previous = positions[following] - 1
            elif weight < _CERTAIN:
                previous = _in_source_order(word, previous, len(words), positions)
            positions[word] = previous
            texts = missing[word] or [core]
            inserted.setdefault(previous, []).extend(TargetWord(text, copied=word) for text in texts)
    result = list(inserted.get(-1, []))
    for number, target_word in enumerate(generated):
        result += [target_word, *inserted.get(number, [])]
    return _move_punctuation(result, source, copies)


def _find_generated(text: str, words: Sequence[TargetWord], copies: Mapping[int, int]) -> int | None:
    """Return the position of the first target word with this text that is not a copy."""
    free = (at for at, word in enumerate(words) if word.copied is None and at not in copies)
    return next((at for at in free if words[at].text == text), None)


def _move_punctuation(
    words: list[TargetWord], source: Segmentation, copies: Mapping[int, int]
) -> list[TargetWord]:
    """Move the final punctuation after copies: "snow. 15:30" becomes "snow 15:30.", unless they follow it."""

    def copied(word: TargetWord) -> int | None:
        return word.copied if word.position is None else copies.get(word.position, word.copied)

    if not words or words[-1].text.endswith(tuple(_SENTENCE_ENDS)):
        return words
    at = first = len(source.words)
    for at in range(len(words) - 1, -1, -1):
        word = copied(words[at])
        if word is None or words[at].text.endswith(tuple(_SENTENCE_ENDS)):
            break
        first = min(first, word)
    text = words[at].text.rstrip(_SENTENCE_ENDS)
    ending = words[at].text[len(text) :]
    follows = len(sentence_ends(" ".join(source.words[: first + 1]))) > 1
    if text and ending and words[at].position is not None and not follows:
        words[at] = words[at]._replace(text=text)
        words[-1] = words[-1]._replace(text=words[-1].text + ending)
    return words


def _core(source: Segmentation, word: int) -> tuple[str, str]:
    """Return a source word without surrounding punctuation, and its known characters."""
    text = printable_text(source.words[word])
    unknown = {
        letter for token, piece in source.unknown.items() if source.word_of[token] == word for letter in piece
    }
    kept = [at for at, letter in enumerate(text) if letter in unknown or letter.isalnum()]
    core = text[kept[0] : kept[-1] + 1] if kept else text
    return core, "".join(letter for letter in core if letter not in unknown)


def _preceding_word(
    word: int, targets: int, sources: int, missing: Mapping[int, Sequence[str]], weights: "Array | None"
) -> tuple[int, float]:
    """Return the target word after which to insert a missing source word, or −1, and its weight."""
    known = [other for other in range(word) if other not in missing]
    if weights is not None and targets:
        known = [other for other in known if weights[:, other].any()]  # words with tokens
    if not known or not targets:
        return -1, 0.0
    if weights is None:
        return -(-word * targets // sources) - 1, 0.0
    column = weights[:, known[-1]]
    previous = int(column.argmax())
    return previous, float(column[previous])


def _in_source_order(word: int, previous: int, targets: int, positions: Mapping[int, int]) -> int:
    """Return the target word after which to insert a missing source word, between the copies around it.

    previous: the preferred target word. positions: the target positions of the copied source words.
    """
    first = max((at for other, at in positions.items() if other < word), default=-1)
    last = min((at for other, at in positions.items() if other > word), default=targets) - 1
    return min(max(previous, first), last) if first <= last else previous


def printable_text(text: str) -> str:
    """Remove control characters, which a terminal would interpret."""
    return "".join(letter for letter in text if unicodedata.category(letter) != "Cc")
