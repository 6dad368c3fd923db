"""Terminology: target terms that must appear where their source terms occur."""

import os
from collections.abc import Iterable, Mapping, Sequence

from regard._util.text import shorten
from regard.errors import ArgumentError, DTypeError
from regard.translation.data.formats import read_pairs
from regard.translation.text.casing import fold
from regard.translation.text.protected_spans import word_core
from regard.translation.tokens import Tokenizer


class Terms:
    """A terminology dictionary. Source terms match whole words, in any letter case.

    terms: target terms by source term. Terms that contradict each other raise ArgumentError.

    >>> from regard.translation.text.terms import Terms
    >>> terms = Terms({"Feuer": "fire", "rotes Auto": "red engine", "Auto": "car"})
    >>> terms.find(["Ein", "ROTES", "Auto."])
    [(1, 3, 'red engine')]
    """

    def __init__(self, terms: Mapping[str, str]) -> None:
        if not isinstance(terms, Mapping):
            raise DTypeError(
                f"translate got terms of type {type(terms).__name__}; pass a dictionary, such as "
                '{"Hund": "hound"}.'
            )
        written: dict[tuple[str, ...], tuple[str, str]] = {}
        for source, target in terms.items():
            key = tuple(map(_key, str(source).split()))
            if not key or not str(target).split():
                raise ArgumentError(f"The term {source!r} → {target!r} has an empty side. Remove it.")
            if key in written and written[key][1] != target:
                raise ArgumentError(
                    f"The terms {written[key][0]!r} → {written[key][1]!r} and {source!r} → {target!r} have "
                    "the same source, because letter case is ignored. Remove one of them."
                )
            written[key] = source, target
        self._targets = {key: " ".join(target.split()) for key, (_, target) in written.items()}
        self._longest = max(map(len, written), default=0)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Terms":
        """Read a TSV file with a source term and a target term per line; empty lines are skipped."""
        terms: dict[str, str] = {}
        for source, target in read_pairs(path, format="tsv"):
            if not source.strip() and not target.strip():
                continue
            if terms.setdefault(source.strip(), target.strip()) != target.strip():
                raise ArgumentError(
                    f"{os.fspath(path)!r} has two translations for {source!r}: {terms[source.strip()]!r} and "
                    f"{target!r}. Remove one of them."
                )
        return cls(terms)

    def find(self, words: Sequence[str]) -> list[tuple[int, int, str]]:
        """Return the word range of each source term in a sentence, and its target term.

        Where source terms overlap, the first one counts; if several start at the same word, the longest does.
        """
        if not self._targets:
            return []
        keys = [_key(word) for word in words]
        result, at = [], 0
        while at < len(keys):
            length = next(
                (
                    n
                    for n in range(min(self._longest, len(keys) - at), 0, -1)
                    if tuple(keys[at : at + n]) in self._targets
                ),
                0,
            )
            if length:
                result.append((at, at + length, self._targets[tuple(keys[at : at + length])]))
            at += max(length, 1)
        return result


def encode_terms(targets: Iterable[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the token ids of target terms, for constrained search."""
    phrases = []
    for target in targets:
        segmentation = tokenizer.segment(target)
        if tokenizer.special.unknown in segmentation.ids:
            unknown = next(iter(segmentation.unknown.values()))
            raise ArgumentError(
                f"The model cannot generate the term {shorten(target)!r}: its vocabulary does not contain "
                f"{shorten(unknown)!r}. Use another term."
            )
        phrases.append(segmentation.ids)
    return phrases


def _key(word: str) -> str:
    start, stop = word_core(word)
    return fold(word[start:stop])
