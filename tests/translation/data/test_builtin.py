"""The embedded corpus is deterministic, supports any two languages, and holds out values."""

import re
import sys
from datetime import date, time
from importlib import import_module

import pytest

from regard.errors import ArgumentError, DTypeError, MissingExtraError
from regard.translation.data.builtin import EmbeddedCorpus, Language, _Sentences, embedded_corpus, languages

VALUE = re.compile(r"\d{4}-\d\d-\d\d|\d\d:\d\d|\d+")


@pytest.fixture(scope="module")
def corpus() -> EmbeddedCorpus:
    return embedded_corpus(size=2000)


class Digits(Language):
    """A language that writes digits, so that the values can be read from its sentences."""

    def number(self, number):
        return str(number)

    def ordinal(self, number):
        return f"{number}."

    def date(self, day, style="full"):
        return f"{day} {style}"

    def time(self, moment):
        return f"{moment:%H:%M}"

    def money(self, number, currency):
        return f"{number} {currency}"

    def measure(self, number, unit):
        return f"{number} {unit}"

    def span(self, number, unit):
        return f"{abs(number)} {unit} {number < 0}"

    def moment(self, day, hour):
        return f"{day} {hour}"


def test_held_out_values_are_not_in_training():
    sentences = _Sentences(Digits("en"), Digits("de"), 1)
    test, dev, longer, train = (
        {value for pair in sentences.generate(size, part, *values) for value in VALUE.findall(pair.source)}
        for size, part, values in [
            (500, "test", (1, 2)),
            (500, "dev", (1, 2)),
            (200, "test", (3, 6)),
            (5000, "train", (1, 2)),
        ]
    )
    assert len(train) > 3000
    assert not train & (dev | test | longer)
    assert not dev & (test | longer)
    assert {str(number) for number in range(2, 21)} <= train
    # some of each kind
    assert all(any(re.fullmatch(kind, value) for value in test) for kind in (r".*-.*", r".*:.*", r"\d\d\d?"))


def test_no_list_can_be_read_as_one_number(corpus):
    assert any(re.search(r"hundred and \w+$", pair.source) for pair in corpus.train)
    for pair in corpus.train:  # "six hundred and two" is "sechshundertzwei", never "sechshundert und zwei"
        assert not re.search(r"(hundert|tausend) und ", pair.target)


def test_splits_have_no_common_sentence(corpus):
    for side in range(2):
        sentences = [pair[side] for part in corpus for pair in part]
        assert len(sentences) == len(set(sentences))


def test_the_corpus_depends_only_on_the_seed(corpus):
    assert embedded_corpus(size=2000) == corpus
    reseeded = embedded_corpus(size=2000, seed=1)
    assert len({*reseeded.test} & {*corpus.test}) < 20
    assert embedded_corpus(size=300).test == corpus.test[:30]  # independent of size


def test_sizes_and_lengths(corpus):
    assert [len(part) for part in corpus] == [2000, 200, 200, 200]
    assert [len(part) for part in embedded_corpus(size=1, values=(2, 2))] == [1, 1, 1, 1]
    words = [[len(pair.source.split()) for pair in part] for part in (corpus.train, corpus.longer)]
    assert 3 < sum(words[0]) / len(words[0]) < 10
    assert sum(words[1]) / len(words[1]) > 2 * sum(words[0]) / len(words[0])


def test_english_and_german_forms():
    english, german = Language.of("en"), Language.of("de")
    for said, expected in [
        (english.date(date(1984, 5, 23)), "Wednesday, May twenty-third, nineteen eighty-four"),
        (german.date(date(1984, 5, 23)), "Mittwoch, der dreiundzwanzigste Mai neunzehnhundertvierundachtzig"),
        (english.date(date(2005, 1, 1), "long"), "January first, two thousand and five"),
        (german.date(date(2005, 1, 1), "long"), "der erste Januar zweitausendfünf"),
        (english.time(time(13, 45)), "one forty-five in the afternoon"),
        (german.time(time(13, 45)), "ein Uhr fünfundvierzig nachmittags"),
        (german.money(201, "EUR"), "zweihundertein Euro"),
        (german.number(201), "zweihunderteins"),
        (english.measure(21, "length-kilometer"), "twenty-one kilometers"),
        (english.span(-62, "day"), "sixty-two days ago"),
        (german.span(-62, "day"), "vor zweiundsechzig Tagen"),
        (german.span(500, "hour"), "in fünfhundert Stunden"),
        (german.enumeration(["eins", "zwei", "drei"]), "eins, zwei und drei"),
        (german.moment("heute", "jetzt"), "heute, jetzt"),
    ]:
        assert said == expected


def test_the_order_of_words_differs(corpus):
    ago = next(pair for pair in corpus.train if pair.source.endswith(" days ago") and "," not in pair.source)
    assert re.fullmatch(r"(.* und )?vor \w+ Tagen", ago.target)


@pytest.mark.parametrize("code", languages())
@pytest.mark.sampled(4)
def test_every_language_has_words_for_all_values(code):
    for source, target in ((code, "en"), ("en", code)):
        corpus = embedded_corpus(source, target, size=40)
        said = "".join(side for part in corpus for pair in part for side in pair)
        assert not re.search(r"\d|  |\n|\bNone\b|length-|mass-|volume-", said)
        assert all(side and side == side.strip() for part in corpus for pair in part for side in pair)


def test_language_codes_may_have_a_hyphen():
    assert Language.of("pt-BR") == Language.of("pt_BR")


def test_invalid_arguments_are_rejected():
    with pytest.raises(
        ArgumentError, match=r"Language 'tlh' is not supported .* Choose from ar, .* de, en, "
    ):
        embedded_corpus("tlh", "de")
    with pytest.raises(ArgumentError, match="Language '' is not supported"):
        embedded_corpus("en", "")
    with pytest.raises(DTypeError, match="a code such as 'de', got an int"):
        embedded_corpus("en", 7)
    for values in ((0, 1), (2, 1), (1,), 3, (1.0, 2)):
        with pytest.raises(ArgumentError, match=r"it must be \(minimum, maximum\)"):
            embedded_corpus(values=values)
    with pytest.raises(ArgumentError, match="size=0"):
        embedded_corpus(size=0)


def test_too_many_sentences_raise_an_error(monkeypatch):
    module = import_module("regard.translation.data.builtin")
    monkeypatch.setattr(module, "_MAX_TRIES", 20)
    sentences = _Sentences(Digits("en"), Digits("de"), 0)
    monkeypatch.setattr(sentences, "kinds", sentences.kinds[3:4])  # times
    monkeypatch.setattr(module, "_MOMENTS", 0)
    with pytest.raises(ArgumentError, match=r"only .* distinct sentences were found for test\. Lower size"):
        sentences.generate(2000, "test", 1, 1)


def test_a_missing_package_is_reported_with_its_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "num2words", None)
    with pytest.raises(MissingExtraError, match=r"num2words, .*regard\[translation\]"):
        embedded_corpus("en", "de", size=10)
