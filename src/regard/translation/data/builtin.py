"""Generated parallel corpus: dates, times and numbers in words, in two languages.

    Wednesday, May twenty-third, …      Mittwoch, der dreiundzwanzigste Mai …
    three forty-five in the afternoon   drei Uhr fünfundvierzig nachmittags
    sixty-two days ago                  vor zweiundsechzig Tagen

`babel` provides the word order of each language, `num2words` the numbers. The order differs between languages
(day and month, "ago" and "vor"), even within numbers: German puts units before tens.

Values are held out: no date, time or number in dev or test occurs in a training sentence. Numbers up to 20
are never held out because larger numbers contain them. The libraries do not make numbers
agree with their nouns in gender or case.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, time, timedelta
from functools import cache
from random import Random
from typing import Any, Literal, NamedTuple

from regard._util.checks import check_int
from regard._util.extras import require
from regard._util.text import type_name
from regard.errors import ArgumentError, DTypeError
from regard.translation.data.pairs import Pair, fingerprint, normalize_spaces

# Spoken forms of dates and times that the libraries lack.
_DATES = {"de": {"full": "EEEE, 'der' d. MMMM y", "long": "'der' d. MMMM y"}}
_TIMES = {"de": "h 'Uhr' m BBBB"}
_ORDINAL_DAYS = {"en", "sv"}  # in addition to languages that write a period after the day
_YEARS_IN_HUNDREDS = {"da", "de", "en", "nl", "no"}  # nineteen eighty-four
_BEFORE_NOUN = {"de": ("eins", "ein")}  # zweihunderteins, but zweihundertein Euro

_CURRENCIES = ("EUR", "USD", "CHF")
_UNITS = ("length-kilometer", "length-meter", "mass-kilogram", "volume-liter")
_SPANS = ("minute", "hour", "day", "week")
_FIRST, _DAYS = date(1600, 1, 1), 500 * 365
_NEVER_HELD_OUT = 20  # larger numbers contain these words
_HELD_OUT = 2**64 // 20  # width of the fingerprint ranges of dev and test
_MAX_HELD_OUT = 1000  # maximum number of sentences in dev and in test
_MAX_TRIES = 100_000  # maximum number of attempts to generate a new sentence

_Part = Literal["train", "dev", "test"]


class EmbeddedCorpus(NamedTuple):
    """Splits of the embedded corpus. No value in `dev`, `test` or `longer` occurs in `train`.

    longer: sentences with more values than the training sentences, made from the test values.

    >>> from regard.translation.data.builtin import embedded_corpus
    >>> corpus = embedded_corpus("en", "de", size=100)
    >>> len(corpus.train), len(corpus.dev), len(corpus.test), len(corpus.longer)
    (100, 10, 10, 10)
    """

    train: list[Pair]
    dev: list[Pair]
    test: list[Pair]
    longer: list[Pair]


def embedded_corpus(
    source: str = "en",
    target: str = "de",
    *,
    size: int = 15_000,
    values: tuple[int, int] = (1, 2),
    seed: int = 0,
) -> EmbeddedCorpus:
    """Generate distinct sentence pairs with dates, times, numbers, amounts and durations in words.

    source, target: language codes; see `languages`.
    size: number of training pairs. Dev and test each have a tenth as many, at most 1,000.
    values: minimum and maximum number of values per sentence, joined as "…, … and …". Sentences in
        `longer` have more, up to three times the maximum.
    seed: random seed.

    >>> from regard.translation.data.builtin import embedded_corpus
    >>> for pair in embedded_corpus("en", "de", size=2, values=(1, 1)).train:
    ...     print(*pair, sep=" → ")
    two hundred and eighty-one meters → zweihunderteinundachtzig Meter
    fifty-seven kilometers → siebenundfünfzig Kilometer
    """
    check_int("embedded_corpus got size", size, min=1)
    low, high = _check_values(values)
    sentences = _Sentences(Language.of(source), Language.of(target), seed)
    held_out = max(1, min(_MAX_HELD_OUT, size // 10))
    # generated first so that the held-out parts do not depend on the training pairs
    return EmbeddedCorpus(
        test=sentences.generate(held_out, "test", low, high),
        dev=sentences.generate(held_out, "dev", low, high),
        longer=sentences.generate(held_out, "test", high + 1, 3 * high),
        train=sentences.generate(size, "train", low, high),
    )


def languages() -> list[str]:
    """Return the codes of the languages that both libraries support."""
    for package in ("babel", "num2words"):
        require(package, "embedded_corpus")
    from babel.localedata import exists
    from num2words import CONVERTER_CLASSES  # type: ignore[import-untyped]

    return [code for code in sorted(CONVERTER_CLASSES) if exists(code) and Language(code).has_numbers]


@dataclass(frozen=True)
class Language:
    """Formats dates, times and numbers as words in one language.

    >>> from datetime import date, time
    >>> from regard.translation.data.builtin import Language
    >>> german = Language.of("de")
    >>> german.date(date(1984, 5, 23))
    'Mittwoch, der dreiundzwanzigste Mai neunzehnhundertvierundachtzig'
    >>> german.time(time(15, 45)), german.money(21, "EUR"), german.span(-62, "day")
    ('drei Uhr fünfundvierzig nachmittags', 'einundzwanzig Euro', 'vor zweiundsechzig Tagen')
    """

    code: str

    @classmethod
    def of(cls, code: str) -> "Language":
        """Return a language by its code; see `languages`."""
        if not isinstance(code, str):
            raise DTypeError(f"A language must be a code such as 'de', got {type_name(code)}.")
        known = languages()
        if code.replace("-", "_") not in known:
            raise ArgumentError(
                f"Language {code!r} is not supported by both babel and num2words. Choose from "
                f"{', '.join(known)}."
            )
        return cls(code.replace("-", "_"))

    @property
    def has_numbers(self) -> bool:
        """Whether num2words supports the cardinal numbers of this language."""
        return all(_words(number, self.code) for number in (2, 21, 345, 6789))

    @property
    def has_ordinals(self) -> bool:
        """Whether num2words supports the ordinal numbers of this language."""
        return all(_words(number, self.code, "ordinal") for number in (2, 23, 345))

    def number(self, number: int) -> str:
        """Format a number, such as "one thousand, nine hundred and eighty-four"."""
        return _words(number, self.code)

    def ordinal(self, number: int) -> str:
        """Format an ordinal, such as "twenty-third"; "twenty-three" in languages without ordinals."""
        return _words(number, self.code, "ordinal") or self.number(number)

    def year(self, year: int) -> str:
        """Format a year, such as "nineteen eighty-four"."""
        return _words(year, self.code, "year" if self._base in _YEARS_IN_HUNDREDS else "cardinal")

    def date(self, day: date, style: str = "full") -> str:
        """Format a date with the weekday ("full"), without it ("long"), or with a babel pattern: "MMMM d"."""
        from babel.dates import format_date

        def in_words(match: re.Match[str]) -> str:
            number, period = int(match[1]), match[2]
            if number > 31:
                return self.year(number)
            return self.ordinal(number) if period or self._base in _ORDINAL_DAYS else self.number(number)

        pattern = _DATES.get(self._base, {}).get(style, style)
        return normalize_spaces(re.sub(r"(\d+)(\.?)", in_words, format_date(day, pattern, self._locale)))

    def time(self, moment: time) -> str:
        """Format a time on a 12-hour clock, with the part of the day."""
        return self._in_words(_time_in_digits(moment, self.code))

    def money(self, number: int, currency: str) -> str:
        """Format an amount of money, such as "twenty-one euros"."""
        from babel.numbers import format_currency

        text = format_currency(
            number,
            currency,
            locale=self._locale,
            currency_digits=False,
            format_type="name",
            group_separator=False,
        )
        return self._in_words(text)

    def measure(self, number: int, unit: str) -> str:
        """Format a quantity, such as "twenty-one kilometers"; "" if the language lacks the unit."""
        from babel.units import format_unit

        text = format_unit(number, unit, format="0", locale=self._locale)
        return "" if unit in text else self._in_words(text)  # babel falls back to the unit's code

    def span(self, number: int, unit: str) -> str:
        """Format a time span: "in twenty-one days", or "twenty-one days ago" if the number is negative."""
        from babel.dates import format_timedelta

        delta = timedelta(**{f"{unit}s": number})
        exact: Any = {"granularity": unit, "threshold": 1e9}  # never convert days to weeks
        return self._in_words(format_timedelta(delta, add_direction=True, locale=self._locale, **exact))

    def moment(self, day: str, hour: str) -> str:
        """Join a date and a time in the language's order."""
        pattern = str(self._locale.datetime_formats["full"])
        return normalize_spaces(pattern.replace("'", "").format(hour, day))

    def enumeration(self, phrases: list[str]) -> str:
        """Join phrases: "…, … and …"."""
        from babel.lists import format_list

        return normalize_spaces(format_list(phrases, locale=self._locale))

    @property
    def _base(self) -> str:
        return self.code.partition("_")[0]

    @property
    def _locale(self) -> Any:
        return _locale(self.code)

    def _in_words(self, text: str) -> str:
        """Replace digits with words, in the form used before nouns."""
        ending, before_noun = _BEFORE_NOUN.get(self._base, ("", ""))

        def in_words(match: re.Match[str]) -> str:
            words = self.number(int(match[0]))
            return words.removesuffix(ending) + before_noun if ending and words.endswith(ending) else words

        return normalize_spaces(re.sub(r"\d+", in_words, text))


@cache
def _locale(code: str) -> Any:
    from babel import Locale

    return Locale.parse(code)


@cache
def _time_in_digits(moment: time, code: str) -> str:
    """Format a time as "3 45 in the afternoon"."""
    from babel.dates import format_time

    locale = _locale(code)
    default = str(locale.datetime_skeletons.get("Bhm", "h:mm B"))
    pattern = _TIMES.get(code.partition("_")[0], re.sub("B+", "BBBB", default))  # BBBB: not abbreviated
    return re.sub(r"(\d)[:.](\d)", r"\1 \2", format_time(moment, pattern, locale=locale))


@cache
def _words(number: int, code: str, kind: str = "cardinal") -> str:
    """Return a number in words; "" if num2words does not support it."""
    from num2words import num2words

    try:
        return str(num2words(number, lang=code, to=kind))
    except (NotImplementedError, TypeError, AttributeError, LookupError, ArithmeticError, ValueError):
        return ""


class _Value(NamedTuple):
    """A value's format function and key. The key determines the split; an empty key is never held out."""

    key: str
    say: Callable[[Language], str]


class _Random(Random):
    """Random numbers that use only `random()`, whose results are the same in every Python version."""

    def below(self, bound: int) -> int:
        return int(self.random() * bound)

    def pick(self, choices: tuple[Any, ...]) -> Any:
        return choices[self.below(len(choices))]

    def number(self, *digits: int) -> tuple[int, str]:
        """Return a number with one of the given digit counts (2: up to two digits), and its key."""
        low, bound = {2: (2, 100), 3: (100, 1000), 4: (1000, 10_000)}[self.pick(digits)]
        number = low + self.below(bound - low)
        return number, f"number {number}" if number > _NEVER_HELD_OUT else ""


def _date(random: _Random) -> _Value:
    day, style = _FIRST + timedelta(random.below(_DAYS)), random.pick(("full", "long"))
    if not day.year % 100:  # ambiguous: "sixteen hundred and two" is one number, or a year and a number
        return _date(random)
    return _Value(f"date {day}", lambda language: language.date(day, style))


def _time(random: _Random) -> _Value:
    moment = time(random.below(24), 10 + random.below(50))  # "three five" is not a spoken time
    return _Value(f"time {moment}", lambda language: language.time(moment))


def _cardinal(random: _Random) -> _Value:
    number, key = random.number(2, 3, 4)
    if not number % 100:  # ambiguous, as in `_date`
        return _cardinal(random)
    return _Value(key, lambda language: language.number(number))


def _ordinal(random: _Random) -> _Value:
    number, key = random.number(2, 3)
    return _Value(key, lambda language: language.ordinal(number))


def _money(random: _Random) -> _Value:
    (number, key), currency = random.number(2, 3, 4), random.pick(_CURRENCIES)
    return _Value(key, lambda language: language.money(number, currency))


def _measure(random: _Random) -> _Value:
    (number, key), unit = random.number(2, 3, 4), random.pick(_UNITS)
    return _Value(key, lambda language: language.measure(number, unit))


def _span(random: _Random) -> _Value:
    (number, key), unit, sign = random.number(2, 3), random.pick(_SPANS), random.pick((1, -1))
    return _Value(key, lambda language: language.span(sign * number, unit))


# Repeated entries are drawn more often.
_KINDS = (_date, _date, _date, _time, _time, _cardinal, _ordinal, _money, _measure, _span, _span)
_MOMENTS = 0.1  # fraction of one-value sentences with a date and a time


class _Sentences:
    """Generator of sentence pairs without repeated sentences in either language."""

    def __init__(self, source: Language, target: Language, seed: int) -> None:
        self.sides, self.seed = (source, target), seed
        self.used: tuple[set[str], set[str]] = set(), set()
        ordinals = source.has_ordinals and target.has_ordinals
        self.kinds = tuple(kind for kind in _KINDS if ordinals or kind is not _ordinal)

    def generate(self, size: int, part: _Part, low: int, high: int) -> list[Pair]:
        """Generate pairs with `low` to `high` values each, all from one part of the corpus."""
        random = _Random(f"{self.seed} {part} {low} {high}")
        pairs: list[Pair] = []
        while len(pairs) < size:
            for _ in range(_MAX_TRIES):
                pair = self._pair(random, part, low + random.below(high - low + 1))
                if all(pair) and not any(side in used for side, used in zip(pair, self.used, strict=True)):
                    break
            else:
                raise ArgumentError(
                    f"embedded_corpus got size={size:,}, but only {len(pairs):,} distinct sentences were "
                    f"found for {part}. Lower size, or raise values."
                )
            pairs.append(pair)
            for side, used in zip(pair, self.used, strict=True):
                used.add(side)
        return pairs

    def _pair(self, random: _Random, part: _Part, values: int) -> Pair:
        if values == 1 and random.random() < _MOMENTS:
            day, hour = (self._value(random, part, kind) for kind in (_date, _time))
            return Pair(*(language.moment(day(language), hour(language)) for language in self.sides))
        phrases = [self._value(random, part, random.pick(self.kinds)) for _ in range(values)]
        return Pair(*(language.enumeration([say(language) for say in phrases]) for language in self.sides))

    def _value(
        self, random: _Random, part: _Part, kind: Callable[[_Random], _Value]
    ) -> Callable[[Language], str]:
        """Draw values of one kind until one belongs to the given part."""
        while True:
            key, say = kind(random)
            if part == (self._part(key) if key else "train"):
                return say

    def _part(self, key: str) -> _Part:
        bucket = fingerprint(key, self.seed) // _HELD_OUT
        return "test" if bucket == 0 else "dev" if bucket == 1 else "train"


def _check_values(values: tuple[int, int]) -> tuple[int, int]:
    match values:
        case (int(low), int(high)) if 1 <= low <= high:
            return low, high
    raise ArgumentError(
        f"embedded_corpus got values={values!r}; it must be (minimum, maximum), such as (1, 2)."
    )
