"""Copy unknown words from the source (Luong et al. 2015b, section 3).

For words outside its vocabulary, a model generates the unknown token. Each unknown token is replaced with
the unknown source token that has the largest attention weight. An unknown source word that was not translated
at all is inserted at the matching position.
"""

import unicodedata
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from regard.translation.tokens import UNKNOWN, Kind, Segmentation

_SENTENCE_ENDS = ".!?…。！？"
_CLOSING = "\"'»«”“’‘)]}"
_ORDER = 0.5  # penalty on attention weights that change the order of words
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
    weights: Tensor | None,
    kind: Kind,
    unknown: int = UNKNOWN,
) -> Replacements:
    """Find the text for each unknown token in `ids`.

    weights: (target tokens, source tokens).

    Each unknown source token is copied once, to the unknown target token that attends to it most; without
    weights, unknown tokens are matched in order. For the remaining unknown target tokens, a word
    vocabulary copies the source word with the largest weight; other vocabularies leave them unknown.
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


def _match(targets: Sequence[int], sources: Sequence[int], weights: Tensor) -> list[tuple[int, int]]:
    """Match targets to sources greedily by descending weight, using each at most once.

    If the weights are similar, source order is preserved.
    """
    table = weights[list(targets)][:, list(sources)]
    rows_at, columns_at = (torch.arange(n, dtype=table.dtype) / max(n - 1, 1) for n in table.shape)
    table = table - _ORDER * (rows_at[:, None] - columns_at).abs()
    rows, columns, pairs = set[int](), set[int](), []
    for flat in table.flatten().argsort(descending=True, stable=True).tolist():
        row, column = divmod(flat, len(sources))
        if row not in rows and column not in columns:
            rows.add(row)
            columns.add(column)
            pairs.append((targets[row], sources[column]))
    return pairs


def untranslated_words(source: Segmentation, copied: set[int]) -> list[int]:
    """Return the source words that have unknown tokens but no copied tokens."""
    translated = {source.word_of[token] for token in copied}
    words = {source.word_of[token] for token, text in source.unknown.items() if printable_text(text)}
    return sorted(words - translated)


def insert_words(
    words: Sequence[str],
    source: Segmentation,
    missing: Mapping[int, Sequence[str]],
    weights: Tensor | None,
    copies: Mapping[int, int] = MappingProxyType({}),
) -> list[TargetWord]:
    """Insert copies of the missing source words.

    missing: for each source word, its parts to copy; if empty, the word without punctuation is copied.
    weights: (target words, source words). copies: the source word of each target word that is a copy.

    If the target contains a word that consists of the missing word's known characters, this target word is
    replaced by a copy of the whole source word. Otherwise, a copy follows the target word that attends most
    to the preceding source word; without weights, the copy keeps its relative position.
    """
    generated = [TargetWord(word, position=number) for number, word in enumerate(words)]
    inserted: dict[int, list[TargetWord]] = {}  # by the preceding target word; −1 for the start
    for word in sorted(missing):
        core, known = _core(source, word)
        if not missing[word] and len(known) >= _MIN_KNOWN and known in words:
            generated[words.index(known)] = TargetWord(core, copied=word)
        else:
            previous = _preceding_word(word, len(words), len(source.words), missing, weights)
            texts = missing[word] or [core]
            inserted.setdefault(previous, []).extend(TargetWord(text, copied=word) for text in texts)
    result = list(inserted.get(-1, []))
    for number, target_word in enumerate(generated):
        result += [target_word, *inserted.get(number, [])]
    return _move_punctuation(result, source, copies)


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
    follows = any(word.rstrip(_CLOSING).endswith(tuple(_SENTENCE_ENDS)) for word in source.words[:first])
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
    word: int, targets: int, sources: int, missing: Mapping[int, Sequence[str]], weights: Tensor | None
) -> int:
    """Return the target word after which to insert a missing source word; −1 for the start."""
    known = [other for other in range(word) if other not in missing]
    if weights is not None and targets:
        known = [other for other in known if weights[:, other].any()]  # words with tokens
    if not known or not targets:
        return -1
    if weights is None:
        return -(-word * targets // sources) - 1
    return int(weights[:, known[-1]].argmax())


def printable_text(text: str) -> str:
    """Remove control characters, which a terminal would interpret."""
    return "".join(letter for letter in text if unicodedata.category(letter) != "Cc")
