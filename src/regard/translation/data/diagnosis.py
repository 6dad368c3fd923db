"""Warnings about a corpus with misaligned, swapped, copied or repeated lines, or with several scripts.

All checks read a sample of the pairs. Each warning states the measurement and suggests a fix.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import compress, pairwise
from math import log
from typing import NamedTuple

import numpy

from regard.models.encoders.words import fold, is_word, split_words
from regard.translation.data.pairs import Pair
from regard.translation.data.statistics import CorpusStatistics, NumberedPair

_MIN_PAIRS = 100  # with fewer pairs, the measurements are too noisy
_MAX_WORDS = 60  # maximum number of words per sentence in the lexical check
# Real corpora are far from these thresholds. tests/translation/data/test_diagnosis.py checks several corpora.
_MIN_WINS = 0.58  # fraction of pairs that outscore shifted pairs; 0.5 by chance, at least 0.8 in real corpora
_MIN_CORRELATION = 0.25  # correlation of source and target lengths; 0 by chance, at least 0.5 in real corpora
_MIN_EVIDENCE = 5.0  # log likelihood ratio, beyond log(number of pairs), of consecutive misaligned pairs
_MAX_RATE = 0.9  # assumed maximum fraction of aligned pairs that outscore shifted pairs
_END = 0.03  # a misalignment that ends in this last fraction of the sample is taken to last until the end
_MAX_EQUAL = 0.2  # fraction of pairs with identical sides
_MAX_OVERLAP = 0.7  # overlap between the word distributions of both sides; German and English: 0.05
_MAX_DUPLICATES = 0.3
_MAX_FOREIGN = 0.05  # fraction of lines in a different script from the rest
_MAX_SWAPPED = 0.02  # fraction of pairs
_SWAP_MARGIN = 3.0  # log odds per side
_MAX_OVERLAP_SWAPPED = 0.5  # with a larger overlap, the two languages cannot be told apart
_MAX_ITERATIONS = 10
_MAX_GARBLED = 0.01  # fraction of pairs
_ENCODINGS = ("cp1252", "latin-1", "cp1250", "cp1251", "cp850", "cp437", "mac_roman")  # mistaken for UTF-8
_REPLACED = re.compile(r"[^\W\d_]\?[^\W\dA-Z_]")  # "M?nner"
# a Latin letter beside a Cyrillic one
_MIXED = re.compile(r"[A-Za-z][\u0400-\u04ff]|[\u0400-\u04ff][A-Za-z]")


def diagnose(statistics: CorpusStatistics, dev: Sequence[Pair] = ()) -> list[str]:
    """Return warnings about a corpus; an empty list if nothing looks wrong.

    dev: validation pairs, which should have the same translation direction.

    >>> from regard.translation.data.diagnosis import diagnose
    >>> from regard.translation.data.pairs import Pair
    >>> from regard.translation.data.statistics import CorpusStatistics
    >>> statistics = CorpusStatistics()
    >>> copied = [Pair(f"dog number {n}", f"dog number {n}") for n in range(200)]
    >>> for pair in statistics.observe(copied):
    ...     pass
    >>> print(diagnose(statistics)[0])
    200 of 200 pairs have the same text on both sides. Is one file a copy of the other?
    """
    if len(statistics.sample) < _MIN_PAIRS:
        return []
    sample = _Sample.of(statistics.sample)
    warnings = [_equal(sample), _duplicates(statistics), _garbled(sample), *_scripts(sample)]
    if warnings[0] is None:
        unswapped = sample.unswap()
        warnings += [
            _same_language(unswapped),
            _swapped(unswapped),
            _dev_swapped(unswapped, dev),
            _misaligned(sample),
        ]
    return [warning for warning in warnings if warning is not None]


class _Sample(NamedTuple):
    """Numbered pairs and, for each, the case-folded words of its source and target.

    swapped: the numbers of the pairs whose sides `unswap` has exchanged.
    """

    pairs: list[NumberedPair]
    words: list[tuple[list[str], list[str]]]
    swapped: Sequence[int] = ()

    @classmethod
    def of(cls, pairs: Sequence[NumberedPair]) -> "_Sample":
        return cls(list(pairs), [(_words(pair.source), _words(pair.target)) for _, pair in pairs])

    def counts(self) -> tuple[Counter[str], Counter[str]]:
        """Return how often each word occurs in source and target."""
        source, target = (Counter(word for pair in self.words for word in pair[side]) for side in (0, 1))
        return source, target

    def unswap(self) -> "_Sample":
        """Exchange the sides of the pairs whose languages are in the opposite order to most pairs.

        The sign of a pair is 1 or −1 for one order or the other, and 0 if it is unknown. The initial signs
        come from a single word. Then each pair is compared with the others until no sign changes. This
        finds swapped pairs even if they are half of the sample.
        """
        signs = self._initial_signs()
        margins = [(0.0, 0.0)] * len(signs)
        for _ in range(_MAX_ITERATIONS):
            odds = _Odds.of(*_Sample(self.pairs, self._in_one_order(signs)).counts())
            margins = [_margins(odds, words, sign) for words, sign in zip(self.words, signs, strict=True)]
            previous = signs
            signs = [(source > target) - (source < target) for source, target in margins]
            if signs == previous:
                break
        majority = 1 if sum(signs) >= 0 else -1
        swapped = [
            majority * source < -_SWAP_MARGIN and majority * target > _SWAP_MARGIN
            for source, target in margins
        ]
        words = [
            (target, source) if exchanged else (source, target)
            for exchanged, (source, target) in zip(swapped, self.words, strict=True)
        ]
        return _Sample(self.pairs, words, [pair.number for pair in compress(self.pairs, swapped)])

    def _initial_signs(self) -> list[int]:
        """Return 1 for pairs with the most one-sided word in the source, −1 in the target, otherwise 0.

        This is the word that the most pairs contain on only one side.
        """
        counts = Counter(word for source, target in self.words for word in {*source} ^ {*target})
        word = counts.most_common(1)[0][0] if counts else ""
        return [(word in source) - (word in target) for source, target in self.words]

    def _in_one_order(self, signs: Sequence[int]) -> list[tuple[list[str], list[str]]]:
        """Return the words of the pairs with sign 1 or −1; exchange the sides of those with sign −1."""
        return [
            (source, target) if sign > 0 else (target, source)
            for (source, target), sign in zip(self.words, signs, strict=True)
            if sign
        ]


def _margins(odds: "_Odds", words: tuple[list[str], list[str]], sign: int) -> tuple[float, float]:
    """Return the log odds of both sides of a pair according to the other pairs.

    sign: of the pair in the word counts, see `_Sample.unswap`; 0 if they do not include the pair.
    """
    source, target = words
    if sign:
        odds = odds._replace(left_out=(source, target) if sign > 0 else (target, source))
    return odds(source), odds(target)


def _words(text: str) -> list[str]:
    return [fold(word.text) for word in split_words(text)[:_MAX_WORDS] if is_word(word.text)]


def _equal(sample: _Sample) -> str | None:
    equal = sum(pair.source == pair.target and not pair.source.isdigit() for _, pair in sample.pairs)
    if equal <= _MAX_EQUAL * len(sample.pairs):
        return None
    return f"{_of(equal, sample)} have the same text on both sides. Is one file a copy of the other?"


def _duplicates(statistics: CorpusStatistics) -> str | None:
    if statistics.duplicates <= _MAX_DUPLICATES * statistics.pairs:
        return None
    return (
        f"{statistics.duplicates:,} of {statistics.pairs:,} pairs are duplicates, which count more in "
        "training. Remove them unless this is intended."
    )


def _garbled(sample: _Sample) -> str | None:
    """Detect UTF-8 that was read in another encoding, such as "Ã¼" for "ü", and letters replaced by "?"."""
    garbled = [text for _, pair in sample.pairs for text in pair if _is_garbled(text)]
    if len(garbled) <= _MAX_GARBLED * len(sample.pairs):
        return None
    return (
        f"{_of(len(garbled), sample)} contain garbled characters, such as {garbled[0][:40]!r}. Convert the "
        "text to UTF-8 again, from its original encoding."
    )


def _is_garbled(text: str) -> bool:
    if text.isascii():
        return "?" in text and "://" not in text and _REPLACED.search(text) is not None
    if "\ufffd" in text or _MIXED.search(text):
        return True
    if any(first in "ÃÂÐÑÎÏ" and "\u0080" <= second <= "\u00bf" for first, second in pairwise(text)):
        return True
    return any(_is_mistaken(text, encoding) for encoding in _ENCODINGS)


def _is_mistaken(text: str, encoding: str) -> bool:
    """Return whether a text that is not ASCII looks like UTF-8 that was read in the given encoding."""
    try:
        text.encode(encoding).decode()
    except UnicodeError:
        return False
    return True


def _scripts(sample: _Sample) -> Iterator[str]:
    for side, name in enumerate(("source", "target")):
        scripts = Counter(script for _, pair in sample.pairs if (script := _script(pair[side])))
        if len(scripts) < 2:
            continue
        (main, _), (other, count) = scripts.most_common(2)
        if count > _MAX_FOREIGN * len(sample.pairs):
            yield (
                f"{_of(count, sample)} have a {name} in {other} script, the others in {main}. Are lines in "
                "different languages mixed?"
            )


def _script(text: str) -> str:
    """Return the most frequent script: "Latin", "Greek", …; Han, kana and hangul count as "East Asian"."""
    names = [unicodedata.name(char, "").partition(" ")[0] for char in text if char.isalpha()]
    scripts = Counter("East Asian" if name in _EAST_ASIAN else name.capitalize() for name in names)
    return scripts.most_common(1)[0][0] if scripts else ""


_EAST_ASIAN = {"CJK", "HIRAGANA", "KATAKANA", "HANGUL", "KATAKANA-HIRAGANA", "HALFWIDTH", "BOPOMOFO"}


def _overlap(sample: _Sample) -> float:
    """Return the overlap of the word distributions of both sides, between 0 and 1."""
    source, target = sample.counts()
    totals = max(source.total(), 1), max(target.total(), 1)
    return sum(min(source[word] / totals[0], target[word] / totals[1]) for word in source)


def _same_language(sample: _Sample) -> str | None:
    overlap = _overlap(sample)
    if overlap <= _MAX_OVERLAP:
        return None
    return (
        f"Both sides use the same words ({overlap:.0%} of the text): they look like the same language. If "
        "this is not intended, check the files."
    )


def _swapped(sample: _Sample) -> str | None:
    swapped = sample.swapped
    if len(swapped) <= _MAX_SWAPPED * len(sample.pairs) or _overlap(sample) > _MAX_OVERLAP_SWAPPED:
        return None
    return (
        f"{_of(len(swapped), sample)} have their languages swapped, such as pair {swapped[0]:,}. Put the "
        "same language on the same side in every pair."
    )


def _dev_swapped(sample: _Sample, dev: Sequence[Pair]) -> str | None:
    odds = _Odds.of(*sample.counts())
    source, target = (sum(odds(_words(pair[side])) for pair in dev[: len(sample.pairs)]) for side in (0, 1))
    if not (source < -_SWAP_MARGIN and target > _SWAP_MARGIN):
        return None
    return (
        "The source of the validation set looks like the target of the training data, and vice versa. Swap "
        "the files of the validation set (--dev)."
    )


class _Odds(NamedTuple):
    """Log odds that words belong to the source side rather than to the target side.

    source, target: word counts. total: log odds of a word that is equally frequent on both sides.
    left_out: source and target words of a pair whose counts are subtracted.
    """

    source: Counter[str]
    target: Counter[str]
    total: float
    left_out: tuple[Sequence[str], Sequence[str]] = ((), ())

    @classmethod
    def of(cls, source: Counter[str], target: Counter[str]) -> "_Odds":
        return cls(source, target, log((target.total() + 1) / (source.total() + 1)))

    def __call__(self, words: Sequence[str]) -> float:
        result = 0.0
        for word in words:
            source = self.source[word] - self.left_out[0].count(word)
            target = self.target[word] - self.left_out[1].count(word)
            if source or target:
                result += log((source + 0.5) / (target + 0.5)) + self.total
        return result


def _misaligned(sample: _Sample) -> str | None:
    """Check that words and lengths match better than in pairs whose target is shifted by one line."""
    wins = _lexical_wins(sample)
    lengths = numpy.array([[len(text) for text in pair] for _, pair in sample.pairs], float)
    if wins.mean() < _MIN_WINS and _correlation(lengths) < _MIN_CORRELATION:
        return (
            "Source and target look unrelated: their words and lengths match no better than in "
            "shuffled lines. Line n of one side must be the translation of line n of the other."
        )
    first, stop = _misaligned_range([wins, _length_wins(lengths)])
    if first == stop or wins[first:stop].mean() >= _MIN_WINS:
        return None
    if _correlation(lengths[first:stop]) >= _MIN_CORRELATION:
        return None
    margin = max(_END * len(wins), 5)
    begin, end = sample.pairs[first].number, sample.pairs[stop - 1].number
    if stop >= len(wins) - margin:
        place = f"From about pair {begin:,} on"
    elif first <= margin:
        place = f"Up to about pair {end:,}"
    else:
        place = f"Between about pairs {begin:,} and {end:,}"
    return (
        f"{place}, source and target look unrelated. Is a line missing or added on one side? Line n of one "
        "side must be the translation of line n of the other."
    )


def _misaligned_range(tests: Sequence[numpy.ndarray]) -> tuple[int, int]:
    """Return the range of consecutive pairs that look most misaligned; an empty range if none does.

    tests: for each test, whether each pair passes it (1, 0, or 0.5 for a tie). Misaligned pairs pass half of
    the time; aligned pairs as often as the pairs outside the range.
    """
    outside = numpy.ones(len(tests[0]), bool)
    first = stop = 0
    for _ in range(_MAX_ITERATIONS):
        evidence = numpy.zeros(len(outside))
        for passed in tests:
            rate = min(max(passed[outside].mean(), 0.5), _MAX_RATE)
            evidence += numpy.where(passed == 1, log(0.5 / rate), log(0.5 / (1 - rate))) * (passed != 0.5)
        total = numpy.concatenate([[0.0], evidence.cumsum()])
        rise = total - numpy.minimum.accumulate(total)
        stop = int(rise.argmax())
        if rise[stop] < _MIN_EVIDENCE + log(len(outside)):
            return 0, 0
        first = int(total[: stop + 1].argmin())
        previous, outside = outside, numpy.ones(len(outside), bool)
        outside[first:stop] = False
        if (outside == previous).all() or outside.sum() < _MIN_PAIRS // 4:
            break
    return first, stop


def _length_wins(lengths: numpy.ndarray) -> numpy.ndarray:
    """Return, for each pair, whether its length ratio is closer to the median than with the next target.

    1: yes; 0: no; 0.5: tie.
    """
    source, target = numpy.log(lengths + 1).T
    median = numpy.median(target - source)
    own = abs(target - source - median)
    other = abs(numpy.roll(target, -1) - source - median)
    return numpy.where(own == other, 0.5, own < other)


def _lexical_wins(sample: _Sample) -> numpy.ndarray:
    """Return, for each pair, whether its source matches its own target better than the next target.

    1: yes; 0: no; 0.5: tie. Words match if they co-occur in other pairs (Dice coefficient), or are equal.
    """
    counts, together = (Counter[str](), Counter[str]()), Counter[tuple[str, str]]()
    for words in sample.words:
        source, target = set(words[0]), set(words[1])
        counts[0].update(source)
        counts[1].update(target)
        together.update((first, second) for first in source for second in target)

    def score(source: set[str], target: set[str], counted: bool) -> float:
        """Return the mean Dice coefficient of each target word's best match.

        counted: whether the counts include this pair; if so, it is subtracted.
        """
        total = 0.0
        for second in target:
            best = 1.0 if second in source else 0.0
            for first in source:
                joint = together[first, second] - counted
                if joint > 0:
                    best = max(best, 2 * joint / (counts[0][first] + counts[1][second] - counted))
            total += best
        return total / max(len(target), 1)

    sets = [(set(source), set(target)) for source, target in sample.words]
    wins = []
    for (source, target), (_, other) in pairwise([*sets, sets[0]]):
        aligned, shifted = score(source, target, True), score(source, other, False)
        wins.append(0.5 if aligned == shifted else float(aligned > shifted))
    return numpy.array(wins)


def _correlation(lengths: numpy.ndarray) -> float:
    """Return the correlation of source and target lengths; 0 if all lengths of one side are equal."""
    if (lengths.std(0) == 0).any():
        return 0.0
    return float(numpy.corrcoef(lengths.T)[0, 1])


def _of(count: int, sample: _Sample) -> str:
    return f"{count:,} of {len(sample.pairs):,} pairs"
