"""A corpus for every machine: dates, times and numbers in words, in two languages.

    Wednesday, May twenty-third, …      Mittwoch, der dreiundzwanzigste Mai …
    three forty-five in the afternoon   drei Uhr fünfundvierzig nachmittags
    sixty-two days ago                  vor zweiundsechzig Tagen

`babel` knows what comes in which order in a language, and `num2words` replaces the digits. The order of words
differs (day and month, "ago" and "vor"), and within a German number that of its pieces: units before tens.

What is held out are values: a date, time or number of dev or test is in no sentence of train. Numbers up to
20 are never held out, as others are made of them. Grammar goes as far as the two libraries go: a number does
not agree with its noun in gender or case.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, time, timedelta
from functools import cache
from random import Random
from typing import Any, Literal, NamedTuple

from regard._util.checks import check_int
from regard.errors import ArgumentError, DTypeError
from regard.translation.data.pairs import Pair, fingerprint, tidy

# How dates and times are read aloud, where the libraries do not say.
_DATES = {"de": {"full": "EEEE, 'der' d. MMMM y", "long": "'der' d. MMMM y"}}
_TIMES = {"de": "h 'Uhr' m BBBB"}
_ORDINAL_DAYS = {"en", "sv"}  # and all that write a point after the day
_YEARS_IN_HUNDREDS = {"da", "de", "en", "nl", "no"}  # nineteen eighty-four
_BEFORE_NOUN = {"de": ("eins", "ein")}  # zweihunderteins, but zweihundertein Euro

_CURRENCIES = ("EUR", "USD", "CHF")
_UNITS = ("length-kilometer", "length-meter", "mass-kilogram", "volume-liter")
_SPANS = ("minute", "hour", "day", "week")
_FIRST, _DAYS = date(1600, 1, 1), 500 * 365
_ATOMS = 20  # numbers up to here have words of their own
_HELD = 2**64 // 20  # of all fingerprints, those that are for dev, and for test
_MOST_HELD = 1000  # sentences of dev, and of test
_MOST_TRIES = 100_000  # to find one more sentence that is new

_Part = Literal["train", "dev", "test"]


class EmbeddedCorpus(NamedTuple):
    """The embedded corpus; no value of dev, test or longer is in train.

    longer: sentences made of more values than those of train, from the values of test.

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
    """Pairs of dates, times, numbers, amounts and spans of time in words, all of them distinct.

    source, target: languages, see `languages`.
    size: how many pairs train has; dev and test have a tenth of it, and at most 1,000.
    values: how many values a sentence joins, at least and at most: "…, … and …". A sentence of `longer` joins
        more, up to three times as many.
    seed: the same seed gives the same corpus.

    >>> from regard.translation.data.builtin import embedded_corpus
    >>> for pair in embedded_corpus("en", "de", size=2, values=(1, 1)).train:
    ...     print(*pair, sep=" → ")
    two hundred and eighty-one meters → zweihunderteinundachtzig Meter
    fifty-seven kilometers → siebenundfünfzig Kilometer
    """
    check_int("embedded got size", size, min=1)
    least, most = _checked(values)
    sentences = _Sentences(Language.of(source), Language.of(target), seed)
    held = max(1, min(_MOST_HELD, size // 10))
    # what is held out first, so that it does not depend on the size
    return EmbeddedCorpus(
        test=sentences.some(held, "test", least, most),
        dev=sentences.some(held, "dev", least, most),
        longer=sentences.some(held, "test", most + 1, 3 * most),
        train=sentences.some(size, "train", least, most),
    )


def languages() -> list[str]:
    """The languages that both libraries know well enough.

    >>> from regard.translation.data.builtin import languages
    >>> {"de", "en", "fr", "ja", "tr"} <= set(languages())
    True
    """
    try:
        from babel.localedata import exists
        from num2words import CONVERTER_CLASSES  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"The embedded corpus needs the package {error.name}: pip install babel num2words",
            name=error.name,
        ) from None
    return [code for code in sorted(CONVERTER_CLASSES) if exists(code) and Language(code).counts]


@dataclass(frozen=True)
class Language:
    """How a language says a date, a time, a number.

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
        """A language by its code; `languages` lists them."""
        if not isinstance(code, str):
            raise DTypeError(f"the language is a {type(code).__name__}; give a code such as 'de'.")
        known = languages()
        if code.replace("-", "_") not in known:
            raise ArgumentError(
                f"babel and num2words do not both know the language {code!r}; they know {', '.join(known)}."
            )
        return cls(code.replace("-", "_"))

    @property
    def counts(self) -> bool:
        """Whether it has words for all numbers that are needed here."""
        return all(_words(number, self.code) for number in (2, 21, 345, 6789))

    @property
    def orders(self) -> bool:
        """Whether it has ordinals: twenty-third."""
        return all(_words(number, self.code, "ordinal") for number in (2, 23, 345))

    def number(self, number: int) -> str:
        """One thousand, nine hundred and eighty-four."""
        return _words(number, self.code)

    def ordinal(self, number: int) -> str:
        """Twenty-third; where there is no such word, twenty-three."""
        return _words(number, self.code, "ordinal") or self.number(number)

    def year(self, year: int) -> str:
        """Nineteen eighty-four."""
        return _words(year, self.code, "year" if self._base in _YEARS_IN_HUNDREDS else "cardinal")

    def date(self, day: date, style: str = "full") -> str:
        """A day with its weekday ("full") or without ("long"), or by a pattern of babel's: "MMMM d".

        >>> from datetime import date
        >>> from regard.translation.data.builtin import Language
        >>> Language.of("en").date(date(1984, 5, 23), "EEEE, MMMM d")
        'Wednesday, May twenty-third'
        """
        from babel.dates import format_date

        def spelled(match: re.Match[str]) -> str:
            number, point = int(match[1]), match[2]
            if number > 31:
                return self.year(number)
            return self.ordinal(number) if point or self._base in _ORDINAL_DAYS else self.number(number)

        pattern = _DATES.get(self._base, {}).get(style, style)
        return tidy(re.sub(r"(\d+)(\.?)", spelled, format_date(day, pattern, self._locale)))

    def time(self, moment: time) -> str:
        """A time of twelve hours, and which part of the day it is."""
        from babel.dates import format_time

        usual = str(self._locale.datetime_skeletons.get("Bhm", "h:mm B"))
        pattern = _TIMES.get(self._base, re.sub("B+", "BBBB", usual))  # BBBB: not abbreviated
        digits = format_time(moment, pattern, locale=self._locale)
        return self._spelled(re.sub(r"(\d)[:.](\d)", r"\1 \2", digits))

    def money(self, number: int, currency: str) -> str:
        """Twenty-one euros."""
        from babel.numbers import format_currency

        named = format_currency(
            number,
            currency,
            locale=self._locale,
            currency_digits=False,
            format_type="name",
            group_separator=False,
        )
        return self._spelled(named)

    def measure(self, number: int, unit: str) -> str:
        """Twenty-one kilometers; nothing where the unit has no name."""
        from babel.units import format_unit

        named = format_unit(number, unit, format="0", locale=self._locale)
        return "" if unit in named else self._spelled(named)  # its code instead of a name: not known

    def span(self, number: int, unit: str) -> str:
        """In twenty-one days, or with a number below zero, twenty-one days ago."""
        from babel.dates import format_timedelta

        away = timedelta(**{f"{unit}s": number})
        exact: Any = {"granularity": unit, "threshold": 1e9}  # days stay days, however many
        return self._spelled(format_timedelta(away, add_direction=True, locale=self._locale, **exact))

    def moment(self, day: str, hour: str) -> str:
        """A day and a time of it, in the order of the language."""
        pattern = str(self._locale.datetime_formats["full"])
        return tidy(pattern.replace("'", "").format(hour, day))

    def joined(self, sayings: list[str]) -> str:
        """…, … and …"""
        from babel.lists import format_list

        return tidy(format_list(sayings, locale=self._locale))

    @property
    def _base(self) -> str:
        return self.code.partition("_")[0]

    @property
    def _locale(self) -> Any:
        return _locale(self.code)

    def _spelled(self, text: str) -> str:
        """Digits as words; what follows them is a noun."""
        usual, before_noun = _BEFORE_NOUN.get(self._base, ("", ""))

        def spelled(match: re.Match[str]) -> str:
            words = self.number(int(match[0]))
            return words.removesuffix(usual) + before_noun if usual and words.endswith(usual) else words

        return tidy(re.sub(r"\d+", spelled, text))


@cache
def _locale(code: str) -> Any:
    from babel import Locale

    return Locale.parse(code)


@cache
def _words(number: int, code: str, kind: str = "cardinal") -> str:
    """A number in words; "" where num2words has none, or stumbles."""
    from num2words import num2words

    try:
        return str(num2words(number, lang=code, to=kind))
    except (NotImplementedError, TypeError, AttributeError, LookupError, ArithmeticError, ValueError):
        return ""


class _Value(NamedTuple):
    """Something to be said, and the key by which it is held out or not; without one it is for training."""

    key: str
    say: Callable[[Language], str]


class _Dice(Random):
    """Random numbers that are the same in every version of Python: only `random` is promised to be."""

    def below(self, bound: int) -> int:
        return int(self.random() * bound)

    def one(self, choices: tuple[Any, ...]) -> Any:
        return choices[self.below(len(choices))]

    def number(self, *digits: int) -> tuple[int, str]:
        """A number that has one of these numbers of digits, and its key."""
        least, bound = {2: (2, 100), 3: (100, 1000), 4: (1000, 10_000)}[self.one(digits)]
        number = least + self.below(bound - least)
        return number, f"number {number}" if number > _ATOMS else ""


def _date(dice: _Dice) -> _Value:
    day, style = _FIRST + timedelta(dice.below(_DAYS)), dice.one(("full", "long"))
    if not day.year % 100:  # "sixteen hundred and two" would be one year, or a year and a number
        return _date(dice)
    return _Value(f"date {day}", lambda language: language.date(day, style))


def _time(dice: _Dice) -> _Value:
    moment = time(dice.below(24), 10 + dice.below(50))  # before ten, "three five" is not how one says it
    return _Value(f"time {moment}", lambda language: language.time(moment))


def _cardinal(dice: _Dice) -> _Value:
    number, key = dice.number(2, 3, 4)
    if not number % 100:  # as above
        return _cardinal(dice)
    return _Value(key, lambda language: language.number(number))


def _ordinal(dice: _Dice) -> _Value:
    number, key = dice.number(2, 3)
    return _Value(key, lambda language: language.ordinal(number))


def _money(dice: _Dice) -> _Value:
    (number, key), currency = dice.number(2, 3, 4), dice.one(_CURRENCIES)
    return _Value(key, lambda language: language.money(number, currency))


def _measure(dice: _Dice) -> _Value:
    (number, key), unit = dice.number(2, 3, 4), dice.one(_UNITS)
    return _Value(key, lambda language: language.measure(number, unit))


def _span(dice: _Dice) -> _Value:
    (number, key), unit, sign = dice.number(2, 3), dice.one(_SPANS), dice.one((1, -1))
    return _Value(key, lambda language: language.span(sign * number, unit))


# Each as often as it stands here.
_KINDS = (_date, _date, _date, _time, _time, _cardinal, _ordinal, _money, _measure, _span, _span)
_MOMENTS = 0.1  # of the sentences of one value: a date together with a time


class _Sentences:
    """Sentences in two languages, none of which is given twice, in either language."""

    def __init__(self, source: Language, target: Language, seed: int) -> None:
        self.sides, self.seed = (source, target), seed
        self.given: tuple[set[str], set[str]] = set(), set()
        ordinals = source.orders and target.orders
        self.kinds = tuple(kind for kind in _KINDS if ordinals or kind is not _ordinal)

    def some(self, size: int, part: _Part, least: int, most: int) -> list[Pair]:
        """So many pairs, each made of at least and at most so many values of a part of the corpus."""
        dice = _Dice(f"{self.seed} {part} {least} {most}")
        pairs: list[Pair] = []
        while len(pairs) < size:
            for _ in range(_MOST_TRIES):
                pair = self._pair(dice, part, least + dice.below(most - least + 1))
                if all(pair) and not any(side in given for side, given in zip(pair, self.given, strict=True)):
                    break
            else:
                raise ArgumentError(
                    f"embedded got size={size:,} and finds no more than {len(pairs):,} distinct sentences "
                    f"for {part}; ask for fewer, or for more values in each."
                )
            pairs.append(pair)
            for side, given in zip(pair, self.given, strict=True):
                given.add(side)
        return pairs

    def _pair(self, dice: _Dice, part: _Part, values: int) -> Pair:
        if values == 1 and dice.random() < _MOMENTS:
            day, hour = (self._value(dice, part, kind) for kind in (_date, _time))
            return Pair(*(language.moment(day(language), hour(language)) for language in self.sides))
        said = [self._value(dice, part, dice.one(self.kinds)) for _ in range(values)]
        return Pair(*(language.joined([say(language) for say in said]) for language in self.sides))

    def _value(self, dice: _Dice, part: _Part, kind: Callable[[_Dice], _Value]) -> Callable[[Language], str]:
        """How a value of a kind is said that belongs to a part."""
        while True:
            key, say = kind(dice)
            if part == (self._part(key) if key else "train"):
                return say

    def _part(self, key: str) -> _Part:
        place = fingerprint(key, self.seed) // _HELD
        return "test" if place == 0 else "dev" if place == 1 else "train"


def _checked(values: tuple[int, int]) -> tuple[int, int]:
    match values:
        case (int(least), int(most)) if 1 <= least <= most:
            return least, most
    raise ArgumentError(
        f"embedded got values={values!r}; give how many at least and at most, such as (1, 2)."
    )
