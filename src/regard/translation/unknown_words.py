"""Copy unknown words from the source (Luong et al. 2015b, section 3).

For words outside its vocabulary, a model generates the unknown token. Each one is replaced with the unknown
source token that has the largest attention weight. An unknown source word that was not translated at all is
inserted at the matching position.
"""

import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from regard.translation.tokens import UNKNOWN, Kind, Segmentation

_MIN_KNOWN = 3  # minimum number of known characters to recognize an unknown source word in the target


class Replacements(NamedTuple):
    """Text for each unknown target token, by position, and the indices of the copied source tokens."""

    texts: dict[int, str]
    copied: set[int]


class TargetWord(NamedTuple):
    """A target word: word `own` of the model's output, or a copy of source word `copied`."""

    text: str
    own: int | None = None
    copied: int | None = None


def replace_unknown(
    ids: Sequence[int],
    source: Segmentation,
    weights: Tensor | None,
    kind: Kind,
    unknown: int = UNKNOWN,
) -> Replacements:
    """Find the text for each unknown token in `ids`; weights: (target tokens, source tokens).

    Each unknown source token is copied once, to the unknown target token that attends to it most; without
    weights, they are matched in order. For the remaining unknown target tokens, a word vocabulary copies the
    source word with the largest weight; other vocabularies leave them unknown.
    """
    targets = [position for position, token in enumerate(ids) if token == unknown]
    sources = list(source.unknown)
    pairs = list(zip(targets, sources, strict=False))
    if weights is not None and targets and sources:
        pairs = _match(targets, sources, weights)
    texts = {target: _printable(source.unknown[token]) for target, token in pairs}
    if weights is not None and kind == "words" and source.ids:
        for target in targets:
            word = source.words[source.word_of[int(weights[target].argmax())]]
            texts.setdefault(target, _printable(word))
    return Replacements(texts, {token for _, token in pairs})


def _match(targets: Sequence[int], sources: Sequence[int], weights: Tensor) -> list[tuple[int, int]]:
    """Match targets to sources greedily by descending weight, using each at most once."""
    table = weights[list(targets)][:, list(sources)]
    rows, columns, pairs = set[int](), set[int](), []
    for flat in table.flatten().argsort(descending=True, stable=True).tolist():
        row, column = divmod(flat, len(sources))
        if row not in rows and column not in columns:
            rows.add(row)
            columns.add(column)
            pairs.append((targets[row], sources[column]))
    return pairs


def untranslated_words(source: Segmentation, copied: set[int]) -> list[int]:
    """Return the source words with unknown tokens, unless one of these tokens was copied."""
    translated = {source.word_of[token] for token in copied}
    words = {source.word_of[token] for token, text in source.unknown.items() if _printable(text)}
    return sorted(words - translated)


def insert_words(
    words: Sequence[str], source: Segmentation, missing: Sequence[int], weights: Tensor | None
) -> list[TargetWord]:
    """Insert copies of the missing source words; weights: (target words, source words).

    A copy replaces the target word that consists of its known characters. Otherwise it follows the target
    word that attends most to the preceding source word; without weights, its relative position is kept.
    """
    own = [TargetWord(word, own=number) for number, word in enumerate(words)]
    inserted: dict[int, list[TargetWord]] = {}  # by the target word they follow; −1 for the start
    for word in missing:
        core, known = _core(source, word)
        if len(known) >= _MIN_KNOWN and known in words:
            own[words.index(known)] = TargetWord(core, copied=word)
        else:
            previous = _preceding_word(word, len(words), len(source.words), missing, weights)
            inserted.setdefault(previous, []).append(TargetWord(core, copied=word))
    result = list(inserted.get(-1, []))
    for number, target_word in enumerate(own):
        result += [target_word, *inserted.get(number, [])]
    return result


def _core(source: Segmentation, word: int) -> tuple[str, str]:
    """Return a source word without surrounding punctuation, and its known characters."""
    text = _printable(source.words[word])
    unknown = {
        letter for token, piece in source.unknown.items() if source.word_of[token] == word for letter in piece
    }
    kept = [at for at, letter in enumerate(text) if letter in unknown or letter.isalnum()]
    core = text[kept[0] : kept[-1] + 1] if kept else text
    return core, "".join(letter for letter in core if letter not in unknown)


def _preceding_word(
    word: int, targets: int, sources: int, missing: Sequence[int], weights: Tensor | None
) -> int:
    """Return the target word after which to insert a missing source word; −1 for the start."""
    known = [other for other in range(word) if other not in missing]
    if not known or not targets:
        return -1
    if weights is None:
        return -(-word * targets // sources) - 1
    return int(weights[:, known[-1]].argmax())


def _printable(text: str) -> str:
    """Remove control characters, which a terminal would interpret."""
    return "".join(letter for letter in text if unicodedata.category(letter) != "Cc")
