"""Statistics of the training text: line lengths, words, letter case, and spans that translations copy.

Preparation writes them to text.json in the model folder. Translation compares each input line with them.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from regard._util.files import read_regular, write_atomic
from regard.errors import ArgumentError, RegardError
from regard.translation.data.encoded import EncodedCorpus
from regard.translation.data.pairs import Pair
from regard.translation.model_folder import IDS, PROFILE
from regard.translation.text.casing import Casing, is_all_caps
from regard.translation.text.protected_spans import KINDS, find_spans, word_core
from regard.translation.text.sentence_splitter import sentence_ends
from regard.translation.tokens import TokenizerPair

FORMAT = "regard text 1"
_MAX_BYTES = 1 << 25
_MAX_LINES = 200_000  # maximum number of lines to examine; enough for all statistics
_MAX_EXAMINED = 10_000  # maximum number of training pairs to examine when loading an older folder
_MAX_WORDS = 300_000  # maximum number of distinct words to keep, preferring frequent words
_MIN_SPANS = 20  # with fewer spans of a kind, the copied fraction is too noisy
_COPIED = 0.5  # spans of a kind are protected if the training text copies at least this fraction of them
_CONTENT = 0.25  # a kind of span that makes up this fraction of the words is ordinary text, not protected
_TURKISH = 0.005  # text in which more words than this fraction contain a dotless ı is Turkish
_QUANTILE = 0.95


@dataclass(frozen=True)
class TextProfile:
    """Statistics of a training text. The defaults describe an unknown text: one sentence per line.

    lines: number of lines examined; 0 if the training text is unknown.
    max_sentences: sentences per line; 95% of the lines have at most this many.
    max_tokens: number of tokens in the longest source line; 0 if unknown.
    characters_per_token: mean length of a token in characters.
    lowercase, uppercase, initial: fractions of source lines that are all lowercase, that are all
        uppercase, and that begin with an uppercase letter.
    turkish, target_turkish: whether source and target use dotless ı.
    spans: for each kind of span, how often it occurs in the source and how often it is copied to the target.
    words: counts of the source words. complete: whether they include all words in the training text.

    >>> from regard.translation.text.profile import TextProfile
    >>> profile = TextProfile.of([("Ein Hund.", "A dog."), ("Zwei Hunde.", "Two dogs.")])
    >>> profile.max_sentences, profile.words["Hund"], profile.unprotected
    (1, 1, frozenset())
    """

    lines: int = 0
    max_sentences: int = 1
    max_tokens: int = 0
    characters_per_token: float = 0.0
    lowercase: float = 0.0
    uppercase: float = 0.0
    initial: float = 1.0
    turkish: bool = False
    target_turkish: bool = False
    spans: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    words: Mapping[str, int] = field(default_factory=dict, repr=False)
    complete: bool = False

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, str]], max_tokens: int = 0, tokens: int = 0) -> "TextProfile":
        """Examine sentence pairs.

        max_tokens: number of tokens in the longest source line. tokens: total number in all source lines.
        """
        builder = ProfileBuilder()
        for source, target in pairs:
            builder.add(Pair(source, target))
        return builder.build(max_tokens, tokens)

    @cached_property
    def unprotected(self) -> frozenset[str]:
        """Kinds of spans that the training text does not copy, or that make up a quarter of its words."""
        words = sum(self.words.values())
        return frozenset(
            kind
            for kind, (seen, copied) in self.spans.items()
            if seen >= _MIN_SPANS and (copied < _COPIED * seen or seen > _CONTENT * words)
        )

    @cached_property
    def casing(self) -> Casing:
        """How the training text capitalizes words."""
        return Casing(
            self.words,
            lowercase=self.lowercase,
            uppercase=self.uppercase,
            initial=self.initial,
            turkish=self.turkish,
        )

    @cached_property
    def known(self) -> frozenset[str]:
        """All source words in lowercase."""
        return frozenset(word.lower() for word in self.words)

    @cached_property
    def letters(self) -> frozenset[str]:
        """The lowercase letters of the language: those that occur in at least one in 5,000 words."""
        counts: Counter[str] = Counter()
        for word, count in self.words.items():
            for letter in set(word.lower()):
                counts[letter] += count
        total = sum(self.words.values())
        return frozenset(letter for letter, count in counts.items() if count * 5000 >= total)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the statistics as JSON."""
        content = _serialize(asdict(self))
        write_atomic(path, _header(_sha256(content)) + content[1:])

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "TextProfile":
        """Read a file written by `save`."""
        try:
            text = read_regular(path, _MAX_BYTES)
            values = json.loads(text)
            if values.pop("format") != FORMAT:
                raise ValueError
            digest = values.pop("sha256")
            header = _header(digest)
            content = b"{" + text[len(header) :] if text.startswith(header) else _serialize(values)
            # earlier versions computed the checksum of sorted keys
            if _sha256(content) != digest and _sha256(_serialize(values, sort_keys=True)) != digest:
                raise ValueError
            return _from_dict(values)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            raise ArgumentError(
                f"{os.fspath(path)!r} is corrupted, or was written by another version of regard. Copy "
                "the model folder again, or delete this file to translate without training text statistics."
            ) from None


def _serialize(values: Mapping[str, Any], *, sort_keys: bool = False) -> bytes:
    return json.dumps(values, ensure_ascii=False, sort_keys=sort_keys).encode()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _header(digest: object) -> bytes:
    """Return the beginning of the file, up to the statistics."""
    return json.dumps({"format": FORMAT, "sha256": digest})[:-1].encode() + b", "


def _from_dict(values: Mapping[str, Any]) -> TextProfile:
    """Check the types of the values; a forged file could contain anything."""
    names = {item.name for item in fields(TextProfile)}
    if values.keys() != names:
        raise ValueError
    for name in ("lines", "max_sentences", "max_tokens"):
        if type(values[name]) is not int or values[name] < 0:
            raise ValueError
    for name in ("characters_per_token", "lowercase", "uppercase", "initial"):
        if not isinstance(values[name], int | float) or not 0 <= values[name] < 1e6:
            raise ValueError
    spans = {kind: (int(seen), int(copied)) for kind, (seen, copied) in values["spans"].items()}
    words = {str(word): int(count) for word, count in values["words"].items()}
    profile = TextProfile(**{**values, "spans": spans, "words": words})
    if profile.max_sentences < 1 or not all(type(getattr(profile, name)) is bool for name in _FLAGS):
        raise ValueError
    return profile


_FLAGS = ("turkish", "target_turkish", "complete")


class ProfileBuilder:
    """Collects the statistics for a `TextProfile` while the pairs are read."""

    def __init__(self) -> None:
        self.lines = self.seen = 0
        self._words: Counter[str] = Counter()
        self._sentences: Counter[int] = Counter()
        self._lowercase = self._uppercase = self._initial = self._dotless = self._target_dotless = 0
        self._target_words = self._characters = 0
        self._spans: dict[str, list[int]] = {kind: [0, 0] for kind in KINDS}

    def add(self, pair: Pair) -> None:
        """Examine a pair; pairs after the first 200,000 are only counted."""
        self.seen += 1
        if self.lines >= _MAX_LINES:
            return
        self.lines += 1
        source, target = pair
        spans = find_spans(source)
        for span in spans:
            counts = self._spans[span.kind]
            counts[0] += 1
            counts[1] += span.of(source) in target
        self._sentences[len(sentence_ends(source, spans))] += 1
        self._lowercase += source.islower()
        self._uppercase += is_all_caps(source)
        letter = next((character for character in source if character.isalpha()), "")
        self._initial += letter.isupper()
        self._characters += len(source)
        words = source.split()
        self._words.update(word[slice(*word_core(word))] for word in words)
        self._dotless += sum("ı" in word for word in words)
        targets = target.split()
        self._target_dotless += sum("ı" in word for word in targets)
        self._target_words += len(targets)

    def build(self, max_tokens: int = 0, tokens: int = 0) -> TextProfile:
        """Return the statistics. max_tokens, tokens: see `TextProfile.of`."""
        if not self.lines:
            return TextProfile()
        words = sum(self._words.values())
        total = 0
        for max_sentences, count in sorted(self._sentences.items()):  # noqa: B007 (used after the loop)
            total += count
            if total >= _QUANTILE * self.lines:
                break
        return TextProfile(
            lines=self.lines,
            max_sentences=max(max_sentences, 1),
            max_tokens=max_tokens,
            characters_per_token=self._characters * self.seen / self.lines / tokens if tokens else 0.0,
            lowercase=self._lowercase / self.lines,
            uppercase=self._uppercase / self.lines,
            initial=self._initial / self.lines,
            turkish=self._dotless > _TURKISH * words,
            target_turkish=self._target_dotless > _TURKISH * self._target_words,
            spans={kind: (seen, copied) for kind, (seen, copied) in self._spans.items() if seen},
            words=dict(self._words.most_common(_MAX_WORDS)),
            complete=self.seen == self.lines and len(self._words) <= _MAX_WORDS,
        )


def load_profile(folder: str | os.PathLike[str], tokens: TokenizerPair) -> TextProfile:
    """Load the profile of a model folder.

    A folder from an earlier version has no profile. Its training pairs are examined instead, if it has them;
    otherwise the training text is unknown.
    """
    path = Path(folder) / PROFILE
    if path.exists():
        return TextProfile.load(path)
    try:
        corpus = EncodedCorpus(Path(folder) / IDS)
    except (RegardError, OSError, ValueError):  # absent or corrupted
        return TextProfile()
    builder = ProfileBuilder()
    pairs = corpus[:_MAX_EXAMINED]
    sources = tokens.source.decode_batch([pair.source.tolist() for pair in pairs])
    targets = tokens.target.decode_batch([pair.target.tolist() for pair in pairs])
    for source, target in zip(sources, targets, strict=True):
        builder.add(Pair(source, target))
    sizes = corpus.sizes[:_MAX_EXAMINED, 0]
    profile = builder.build(int(sizes.max(initial=0)), int(sizes.sum()))
    return replace(profile, complete=len(corpus) <= _MAX_EXAMINED)
