"""A candidate: one translation of a line, with a hypothesis for each part of the line."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from regard._util.text import shorten
from regard.translation.decoding.hypothesis import Hypothesis
from regard.translation.text.source_part import SourceLine, SourcePart
from regard.translation.text.target import DecodedPart, TargetPart

# warning about a sentence that was split into parts
TOO_LONG = "Longer than any training sentence: translated in parts, which may not fit together"
_MAX_LISTED = 5  # maximum number of copied words listed in a note


class Candidate(NamedTuple):
    """One translation of a line: a hypothesis for each of its parts."""

    parts: list[DecodedPart]

    def score(self) -> float:
        """Return the score of the hypothesis; for several parts, the mean score weighted by length."""
        scores = [part.hypothesis.score for part in self.parts]
        if len(scores) == 1:
            return scores[0]
        lengths = [len(part.hypothesis.tokens) + 1 for part in self.parts]
        return sum(score * n for score, n in zip(scores, lengths, strict=True)) / max(sum(lengths), 1)

    def mean_log_probability(self) -> float:
        """Return the log probability per token of the parts with text, including end tokens."""
        translated = [part.hypothesis for part in self.parts if part.part.has_text]
        length = sum(len(hypothesis.tokens) + hypothesis.finished for hypothesis in translated)
        return sum(hypothesis.log_probability for hypothesis in translated) / max(length, 1)

    def notes(self, line: SourceLine, texts: Sequence[TargetPart]) -> Iterator[str]:
        """Yield notes about anything unusual. texts: the translated parts."""
        lengths = [len(part.source.ids) for part in self.parts if part.part.has_text]
        if len(lengths) > 1:
            sentences = f"{line.sentences} sentences, " if line.sentences > 1 else ""
            yield (
                f"{sentences}{sum(lengths)} tokens, translated in {len(lengths)} parts of up to "
                f"{max(lengths)}"
            )
        if not all(part.hypothesis.finished for part in self.parts):
            yield "cut off at the maximum length"
        copied = [
            repr(shorten(word.text))
            for text in texts
            for word in text.words
            if word.copied is not None
            and text.decoded.is_unknown(word.copied)
            and any(map(str.isalnum, word.text))
        ]
        if copied:
            more = " …" if len(copied) > _MAX_LISTED else ""
            yield f"unknown words copied: {', '.join(copied[:_MAX_LISTED])}{more}"


def rank_candidates(parts: Sequence[tuple[SourcePart, Sequence[Hypothesis]]]) -> list[Candidate]:
    """Join the best hypotheses of all parts, then the second best, …; an empty line has one candidate.

    A part with fewer hypotheses than others, such as a URL, repeats its last one.
    """
    count = min((len(ranked) for part, ranked in parts if part.has_text), default=1)
    return [
        Candidate([DecodedPart(part, ranked[min(i, len(ranked) - 1)]) for part, ranked in parts])
        for i in range(count)
    ]


def join_parts(texts: Sequence[TargetPart], words: Sequence[str]) -> str:
    """Join words with spaces, and parts with the whitespace from the source.

    words: the target words of all parts, with tags.
    """
    result, row, previous_has_text = "", 0, False
    for text in texts:
        part = " ".join(words[row : row + len(text.words)])
        row += len(text.words)
        both_copied = not (text.decoded.part.has_text or previous_has_text)
        separator = text.decoded.part.separator or ("" if both_copied else " ")
        result += (separator if result and part else "") + part
        previous_has_text = text.decoded.part.has_text
    return result or "".join(words)  # a line with only tags has no parts
