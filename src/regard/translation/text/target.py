"""Write a translated part: copy unknown words and protected spans, and restore uppercase.

This module does not import torch.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy

from regard.models.generation import SpecialTokens
from regard.translation.alignment.alignment import Array, merge
from regard.translation.alignment.alignment_head import AlignmentHead, drop_special_tokens
from regard.translation.decoding.hypothesis import Hypothesis
from regard.translation.text.casing import capitals
from regard.translation.text.source_part import SourcePart
from regard.translation.tokens import SPACE, Segmentation, Tokenizer
from regard.translation.unknown_words import (
    Replacements,
    TargetWord,
    insert_words,
    printable_text,
    replace_unknown,
    untranslated_words,
)


class DecodedPart(NamedTuple):
    """A part of a line and its hypothesis."""

    part: SourcePart
    hypothesis: Hypothesis

    @property
    def source(self) -> Segmentation:
        """The source words and tokens."""
        return self.part.segmentation

    def recorded_weights(self, head: AlignmentHead, special: SpecialTokens) -> Array | None:
        """Return the weights (target tokens, source tokens) that the search recorded, or None."""
        weights, finished = self.hypothesis.weights, self.hypothesis.finished
        if weights is None or not (finished or head.shift == "output"):
            return None
        if head.heads is not None:
            if max(head.heads) >= len(weights):
                return None  # computing them is an error
            weights = weights[head.heads[0]] if len(head.heads) == 1 else weights[list(head.heads)]
        matrix = weights if weights.ndim == 2 else weights.mean(0)
        target, source = len(self.hypothesis.tokens), len(self.source.ids)
        return drop_special_tokens(matrix, target, source, head.shift, special)

    def is_unknown(self, word: int) -> bool:
        """Return whether a copied word is unknown, rather than protected for another reason."""
        return word in self.part.unknown or word not in self.part.copies

    def needs_weights(self, unknown: int) -> bool:
        """Return whether the text depends on the alignment: text is copied, or some words are uppercase.

        unknown: the unknown token of the target.
        """
        has_unknown = bool(self.source.unknown) or unknown in self.hypothesis.tokens
        some_upper = any(self.part.was_upper) and not self.part.all_upper
        return bool(self.source.ids) and (has_unknown or bool(self.part.copies) or some_upper)


class TargetPart(NamedTuple):
    """A decoded part as text: the generated tokens, the words including copies, and the token weights."""

    decoded: DecodedPart
    segmentation: Segmentation
    words: list[TargetWord]
    weights: Array | None
    copies: dict[int, int]  # source word of each generated word that is a copy

    def word_weights(self, weights: Array) -> Array:
        """Convert token weights to word weights (target, source); a copy has weight 1 on its source word."""
        generated = merge(self.decoded.source, self.segmentation, weights)
        if [word.position for word in self.words] == [*range(len(generated))] and not self.copies:
            return generated
        # a last row of zeros, for words that were not generated
        generated = numpy.pad(generated, ((0, 1), (0, 0)))
        copied = [
            word.copied if word.position is None else self.copies.get(word.position, word.copied)
            for word in self.words
        ]
        rows = [
            -1 if word.position is None or copy is not None else word.position
            for word, copy in zip(self.words, copied, strict=True)
        ]
        result = generated[rows]
        for row, word in enumerate(copied):
            if word is not None:
                result[row, word] = 1
        return result

    def mean_over_words(self, values: Sequence[float]) -> list[float]:
        """Return the mean token value for each word; 0 for a copied word."""
        sums, counts = [0.0] * len(self.segmentation.words), [0] * len(self.segmentation.words)
        for word, value in zip(self.segmentation.word_of, values, strict=True):
            if sums:
                sums[word] += value
                counts[word] += 1
        return [
            0.0
            if word.position is None or not counts[word.position]
            else sums[word.position] / counts[word.position]
            for word in self.words
        ]


def count_span(text: str, span: str) -> int:
    """Count how often a span occurs in a text, except as part of a longer word or number.

    >>> from regard.translation.text.target import count_span
    >>> count_span("at 3 and 13:30", "3"), count_span("(a@b.de)", "a@b.de")
    (1, 1)
    """
    before = r"(?<!\w)" if span[:1].isalnum() else ""
    after = r"(?![^\W_])" if span[-1:].isalnum() else ""
    return len(re.findall(before + re.escape(span) + after, text))


def lost_spans(part: SourcePart, text: str) -> bool:
    """Return whether a translation lacks one of the protected spans in its source, or repeats one."""
    copies = Counter(copy for texts in part.copies.values() for copy in texts)
    return any(count_span(text, copy) != count for copy, count in copies.items())


def write_part(
    decoded: DecodedPart, weights: Array | None, tokenizer: Tokenizer, *, turkish: bool = False
) -> TargetPart:
    """Convert token ids to words, copy unknown words and protected spans, and restore uppercase."""
    source, ids = decoded.source, decoded.hypothesis.tokens
    if not decoded.part.has_text:
        verbatim = [
            TargetWord(printable_text(word), copied=i) for i, word in enumerate(decoded.part.verbatim)
        ]
        empty = Segmentation([], [], [], [], {})
        return TargetPart(decoded, empty, [word for word in verbatim if word.text], None, {})
    unknown = tokenizer.special.unknown
    replacements = replace_unknown(ids, source, weights, tokenizer.kind, unknown)
    surfaces = _surfaces(ids, source, replacements, tokenizer)
    segmentation = tokenizer.decode(ids, surfaces)
    missing: dict[int, list[str]] = {word: [] for word in untranslated_words(source, replacements.copied)}
    missing |= _missing_copies(decoded.part, segmentation.text, replacements.copied)
    some_upper = any(decoded.part.was_upper) and not decoded.part.all_upper
    needed = weights is not None and bool(source.ids) and (bool(missing) or some_upper)
    word_weights = merge(source, segmentation, weights) if needed and weights is not None else None
    copies = {segmentation.word_of[at]: source.word_of[token] for at, token in replacements.pairs}
    if word_weights is not None:
        for target, word in copies.items():
            word_weights[target, word] = 2  # more than any weight: a missing word follows the copy before it
    words = insert_words(segmentation.words, source, missing, word_weights, copies)
    part = TargetPart(decoded, segmentation, words, weights, copies)
    return part._replace(words=_restore_capitals(part, word_weights, turkish))


def _surfaces(
    ids: Sequence[int], source: Segmentation, replacements: Replacements, tokenizer: Tokenizer
) -> dict[int, str]:
    """Return the text of each unknown target token: ▁ marks where it begins or ends a word.

    A copy from inside a word begins a new word, unless it follows the same character as in the source.
    """
    texts = dict(replacements.texts)
    if tokenizer.kind == "words":
        return texts
    for target, token in replacements.pairs:
        texts[target] = copied_text(source, token)
        previous = texts.get(target - 1) or tokenizer.piece(ids[target - 1]) if target else SPACE
        if not texts[target].startswith(SPACE) and previous[-1:] != source.pieces[token - 1][-1:]:
            texts[target] = SPACE + texts[target]
    # an unknown token with nothing to copy is dropped
    return {at: texts.get(at, "") for at, token in enumerate(ids) if token == tokenizer.special.unknown}


def copied_text(source: Segmentation, token: int) -> str:
    """Return the text of an unknown source token; ▁ marks where a protected span begins or ends a word."""
    text = printable_text(source.unknown[token])
    if source.pieces[token] != source.unknown[token]:  # a piece of a word
        return text
    word_of, last = source.word_of, len(source.ids) - 1
    begins = token == 0 or word_of[token - 1] != word_of[token] or not _joins(source, token - 1)
    ends = token == last or word_of[token + 1] != word_of[token] or not _is_letter(source, token + 1)
    return f"{SPACE if begins else ''}{text}{SPACE if ends else ''}"


def _joins(source: Segmentation, token: int) -> bool:
    """Return whether a token joins the next one: it ends with a letter, digit, hyphen or slash."""
    return source.pieces[token][-1:].isalnum() or source.pieces[token][-1:] in "-/"


def _is_letter(source: Segmentation, token: int) -> bool:
    return source.pieces[token][:1].isalnum()


def _missing_copies(part: SourcePart, text: str, copied: set[int]) -> dict[int, list[str]]:
    """Return the protected spans that were not copied, by source word."""
    source = part.segmentation
    done = Counter((source.word_of[token], source.unknown[token]) for token in copied)
    generated: Counter[str] = Counter()
    missing: dict[int, list[str]] = {}
    for word, texts in part.copies.items():
        for copy in texts:
            if done[word, copy]:
                done[word, copy] -= 1
            elif not source.unknown and generated[copy] < count_span(text, copy):
                generated[copy] += 1  # the model generated it unchanged
            else:
                missing.setdefault(word, []).append(copy)
    return missing


def _restore_capitals(part: TargetPart, weights: Array | None, turkish: bool) -> list[TargetWord]:
    """Convert each word to uppercase if its source word was uppercase."""
    source = part.decoded.part
    if not any(source.was_upper):
        return part.words
    copied = {part.segmentation.word_of[at] for at in part.segmentation.unknown}
    result = []
    for word in part.words:
        upper = word.position is not None and word.position not in copied
        if upper and not source.all_upper:
            row = None if weights is None or word.position is None else weights[word.position]
            upper = row is not None and bool(row.size) and source.was_upper[int(row.argmax())]
        result.append(word._replace(text=capitals(word.text, turkish)) if upper else word)
    return result
