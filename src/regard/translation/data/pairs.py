"""Pairs of sentences, and how a corpus is split so that nothing leaks.

    read_pairs (formats) → clean (cleaning) → split → (tokens, store)

Nothing here holds a whole corpus in memory.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

from regard._util.checks import check_int
from regard._util.text import shorten
from regard.errors import DTypeError


class Pair(NamedTuple):
    """A sentence and its translation: `source` and `target`.

    >>> from regard.translation.data.pairs import Pair
    >>> Pair("two dogs", "zwei Hunde").target
    'zwei Hunde'
    """

    source: str
    target: str


def tidy(text: str) -> str:
    """A sentence in one line, with single blanks: no tab, no line break, none of Unicode's other blanks.

    >>> from regard.translation.data.pairs import tidy
    >>> tidy(" two\\tdogs\\u2028bark ")
    'two dogs bark'
    """
    return " ".join(text.split())


def listed(pairs: Any) -> Any:
    """What can be pairs at all, and no text, whose letters would be taken for them.

    >>> from regard.translation.data.pairs import listed
    >>> listed("two dogs")
    Traceback (most recent call last):
    regard.errors.DTypeError: the pairs are a str; give a list of pairs: [("two dogs", "zwei Hunde")].
    """
    if isinstance(pairs, str | bytes) or not isinstance(pairs, Iterable):
        raise DTypeError(
            f'the pairs are a {type(pairs).__name__}; give a list of pairs: [("two dogs", "zwei Hunde")].'
        )
    return pairs


def check_pair(given: Any, number: int) -> Pair:
    """A pair that somebody gave, if it is one; `number` is its place, from 0.

    >>> from regard.translation.data.pairs import check_pair
    >>> check_pair(("two dogs", "zwei Hunde"), 0).target
    'zwei Hunde'
    >>> check_pair(("two dogs", "zwei Hunde", "due cani"), 7)
    Traceback (most recent call last):
    regard.errors.DTypeError: pair 7 is ('two dogs', 'zwei Hunde', 'due cani'); a pair is (source, ...
    """
    match given:
        case (str(source), str(target)):
            return Pair(source, target)
    raise DTypeError(
        f"pair {number} is {shorten(repr(given))}; a pair is (source, target), both of them strings."
    )


class Parts(NamedTuple):
    """A corpus in three parts without a common source sentence; `train` is read anew whenever it is iterated.

    >>> from regard.translation.data.pairs import Pair, Parts
    >>> Parts(train=[Pair("two dogs", "zwei Hunde")], dev=[], test=[]).dev
    []
    """

    train: Iterable[Pair]
    dev: list[Pair]
    test: list[Pair]


def split_pairs(
    pairs: Sequence[Pair] | Callable[[], Iterable[Pair]], *, dev: int = 1000, test: int = 0, seed: int = 0
) -> Parts:
    """Hold back pairs to judge by; all pairs with one source sentence fall into the same part.

    pairs: a list, or a function that reads the pairs anew: `lambda: clean_pairs(read_pairs("a.en", "a.de"))`.
    dev, test: how many distinct source sentences each gets, but never more than a tenth of those there are.

    They are those with the lowest hashes of sentence and seed, whatever the order of the corpus. One pass
    finds them, and `train` is what is left over in the next; only dev and test are kept in memory.

    >>> from regard.translation.data.pairs import Pair, split_pairs
    >>> parts = split_pairs([Pair(f"{n // 2} dogs", f"{n} Hunde") for n in range(100)], dev=3, test=1000)
    >>> len(list(parts.train)), len(parts.dev), len(parts.test)
    (84, 6, 10)
    """
    check_int("split got dev", dev)
    check_int("split got test", test)
    if isinstance(pairs, Iterator):
        raise DTypeError(
            f"split got a {type(pairs).__name__}, which can be read only once; give a list, or a function "
            "that reads anew: lambda: clean_pairs(read_pairs(...))."
        )
    read = pairs if callable(pairs) else lambda: pairs
    held, distinct = _lowest(read(), 10 * max(dev, test), seed)
    test, dev = min(test, distinct // 10), min(dev, distinct // 10)
    ranked = sorted(held)
    parts = [
        [pair for key, some in held.items() if key in keys for pair in some]
        for keys in (set(ranked[:test]), set(ranked[test : test + dev]))
    ]
    bound = ranked[test + dev] if ranked else 0
    return Parts(_Above(read, bound, seed), dev=parts[1], test=parts[0])


@dataclass(frozen=True)
class _Above:
    """The pairs whose source has a hash that is not below a bound."""

    read: Callable[[], Iterable[Pair]]
    bound: int
    seed: int

    def __iter__(self) -> Iterator[Pair]:
        return (pair for pair in self.read() if fingerprint(pair.source, self.seed) >= self.bound)


def fingerprint(sentence: str, seed: int = 0) -> int:
    """A number below 2⁶⁴ that looks random and is the same on every machine, unlike Python's hash.

    >>> from regard.translation.data.pairs import fingerprint
    >>> fingerprint("two dogs") == fingerprint(" two  dogs ") != fingerprint("two dogs", seed=1)
    True
    """
    return int.from_bytes(blake2b(f"{seed} {tidy(sentence)}".encode(), digest_size=8).digest())


def _lowest(pairs: Iterable[Pair], most: int, seed: int) -> tuple[dict[int, list[Pair]], int]:
    """The pairs of the `most` distinct sources with the lowest hashes, and how many distinct ones there are,
    counted up to `most`."""
    held: dict[int, list[Pair]] = {}
    bound = 2**64 if most else 0
    for pair in pairs:
        key = fingerprint(pair.source, seed)
        if key < bound:
            held.setdefault(key, []).append(pair)
            if len(held) > 2 * most:  # rarely, so that it costs little
                bound = sorted(held)[most]
                held = {key: some for key, some in held.items() if key < bound}
    return held, min(len(held), most)
