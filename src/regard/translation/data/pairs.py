"""Sentence pairs, and a train/dev/test split without leakage.

    read_pairs → clean_pairs → split_pairs → Tokenizer, EncodedCorpus

A corpus is streamed, never held in memory.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

from regard._util.checks import check_int
from regard._util.text import shorten, type_name
from regard.errors import DTypeError


class Pair(NamedTuple):
    """A sentence and its translation: `source` and `target`.

    >>> from regard.translation.data.pairs import Pair
    >>> Pair("two dogs", "zwei Hunde").target
    'zwei Hunde'
    """

    source: str
    target: str


def normalize_spaces(text: str) -> str:
    """Replace every run of whitespace, including tabs and line breaks, with one space."""
    return " ".join(text.split())


def check_pairs(pairs: Any) -> Any:
    """Raise DTypeError for a string, or anything else that is not an iterable of pairs."""
    if isinstance(pairs, str | bytes) or not isinstance(pairs, Iterable):
        raise DTypeError(f'Expected a list of pairs, [("two dogs", "zwei Hunde")], got {type_name(pairs)}.')
    return pairs


def check_pair(item: Any, index: int) -> Pair:
    """Return an item as a Pair, or raise DTypeError."""
    match item:
        case (str(source), str(target)):
            return Pair(source, target)
    raise DTypeError(f"Pair {index} must be (source, target), two strings, got {shorten(repr(item))}.")


class Splits(NamedTuple):
    """Train, dev and test pairs that share no source sentences. Iterating over `train` reads the corpus."""

    train: Iterable[Pair]
    dev: list[Pair]
    test: list[Pair]


def split_pairs(
    pairs: Sequence[Pair] | Callable[[], Iterable[Pair]], *, dev: int = 1000, test: int = 0, seed: int = 0
) -> Splits:
    """Split a corpus into train, dev and test. Pairs with the same source sentence stay together.

    pairs: a list, or a function that reads the pairs: `lambda: clean_pairs(read_pairs("a.en", "a.de"))`.
    dev, test: number of distinct source sentences in each part, capped at a tenth of the corpus.

    Dev and test contain the sentences with the lowest hashes (of sentence and seed), so the order of the
    corpus does not matter. Only dev and test are held in memory.

    >>> from regard.translation.data.pairs import Pair, split_pairs
    >>> splits = split_pairs([Pair(f"{n // 2} dogs", f"{n} Hunde") for n in range(100)], dev=3, test=1000)
    >>> len(list(splits.train)), len(splits.dev), len(splits.test)
    (84, 6, 10)
    """
    if isinstance(pairs, Iterator):
        raise DTypeError(
            f"split_pairs got {type_name(pairs)}, which can be read only once. Pass a list, or a "
            "function that reads the pairs: lambda: clean_pairs(read_pairs(...))."
        )
    read = pairs if callable(pairs) else lambda: pairs
    splitter = Splitter(dev, test, seed)
    deque(splitter.observe(read()), maxlen=0)
    return splitter.split(read)


class Splitter:
    """Selects dev and test sentences from a corpus while it is being read; see `split_pairs`."""

    def __init__(self, dev: int, test: int = 0, seed: int = 0) -> None:
        check_int("split_pairs got dev", dev)
        check_int("split_pairs got test", test)
        self._dev, self._test, self._seed = dev, test, seed
        self._held: dict[int, list[Pair]] = {}  # pairs by the hash of their source, lowest hashes only

    def observe(self, pairs: Iterable[Pair]) -> Iterator[Pair]:
        """Yield the pairs unchanged, and remember those that may be held out."""
        size = 10 * max(self._dev, self._test)
        bound = 2**64 if size else 0
        for pair in pairs:
            key = fingerprint(pair.source, self._seed)
            if key < bound:
                self._held.setdefault(key, []).append(pair)
                if len(self._held) > 2 * size:  # prune only occasionally
                    bound = sorted(self._held)[size]
                    self._held = {key: group for key, group in self._held.items() if key < bound}
            yield pair

    def split(self, read: Callable[[], Iterable[Pair]]) -> Splits:
        """Return the splits after `observe` has ended; `read` reads the same pairs again."""
        ranked = sorted(self._held)
        tenth = len(ranked) // 10
        test, dev = min(self._test, tenth), min(self._dev, tenth)
        test_pairs, dev_pairs = (
            [pair for key, group in self._held.items() if key in keys for pair in group]
            for keys in (set(ranked[:test]), set(ranked[test : test + dev]))
        )
        bound = ranked[test + dev] if ranked else 0
        return Splits(_HashAbove(read, bound, self._seed), dev=dev_pairs, test=test_pairs)


@dataclass(frozen=True)
class _HashAbove:
    """The pairs whose source sentence has a hash of at least `bound`."""

    read: Callable[[], Iterable[Pair]]
    bound: int
    seed: int

    def __iter__(self) -> Iterator[Pair]:
        return (pair for pair in self.read() if fingerprint(pair.source, self.seed) >= self.bound)


def fingerprint(sentence: str, seed: int = 0) -> int:
    """Hash a sentence to 64 bits, identically on every machine, unlike Python's hash."""
    return int.from_bytes(blake2b(f"{seed} {normalize_spaces(sentence)}".encode(), digest_size=8).digest())
