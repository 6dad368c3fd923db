"""The embedded corpus: the same everywhere, any two languages, values held out that training never sees."""

import re
import sys
from datetime import date, time
from importlib import import_module

import pytest

from regard.errors import ArgumentError, DTypeError
from regard.translation.data.builtin import EmbeddedCorpus, Language, _Sentences, embedded_corpus, languages

VALUE = re.compile(r"\d{4}-\d\d-\d\d|\d\d:\d\d|\d+")


@pytest.fixture(scope="module")
def corpus() -> EmbeddedCorpus:
    return embedded_corpus(size=2000)


class Digits(Language):
    """A language that writes what it is told to say, so that the values can be read from its sentences."""

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


@pytest.mark.parametrize("seed", [0, 1])
def test_no_value_that_is_held_out_is_in_training(seed):
    sentences = _Sentences(Digits("en"), Digits("de"), seed)
    test, dev, longer, train = (
        {value for pair in sentences.some(size, part, *values) for value in VALUE.findall(pair.source)}
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
    # and of each kind there are some
    assert all(any(re.fullmatch(kind, value) for value in test) for kind in (r".*-.*", r".*:.*", r"\d\d\d?"))


def test_no_list_can_be_read_as_one_number(corpus):
    assert any(re.search(r"hundred and \w+$", pair.source) for pair in corpus.train)
    for pair in corpus.train:  # "six hundred and two" is "sechshundertzwei", never "sechshundert und zwei"
        assert not re.search(r"(hundert|tausend) und ", pair.target)


def test_the_parts_have_no_sentence_in_common(corpus):
    for side in range(2):
        sentences = [pair[side] for part in corpus for pair in part]
        assert len(sentences) == len(set(sentences))


def test_a_seed_tells_all(corpus):
    assert embedded_corpus(size=2000) == corpus
    other = embedded_corpus(size=2000, seed=1)
    assert len({*other.test} & {*corpus.test}) < 20
    assert embedded_corpus(size=300).test == corpus.test[:30]  # what is held out does not depend on the size


def test_sizes_and_lengths_are_those_asked_for(corpus):
    assert [len(part) for part in corpus] == [2000, 200, 200, 200]
    assert [len(part) for part in embedded_corpus(size=1, values=(2, 2))] == [1, 1, 1, 1]
    words = [[len(pair.source.split()) for pair in part] for part in (corpus.train, corpus.longer)]
    assert 3 < sum(words[0]) / len(words[0]) < 10
    assert sum(words[1]) / len(words[1]) > 2 * sum(words[0]) / len(words[0])


def test_english_and_german_are_as_people_say_them():
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
        (german.joined(["eins", "zwei", "drei"]), "eins, zwei und drei"),
        (german.moment("heute", "jetzt"), "heute, jetzt"),
    ]:
        assert said == expected


def test_the_order_of_words_differs(corpus):
    ago = next(pair for pair in corpus.train if pair.source.endswith(" days ago") and "," not in pair.source)
    assert re.fullmatch(r"(.* und )?vor \w+ Tagen", ago.target)


@pytest.mark.parametrize("code", languages())
def test_every_language_has_words_for_all_of_it(code):
    for source, target in ((code, "en"), ("en", code)):
        corpus = embedded_corpus(source, target, size=40)
        said = "".join(side for part in corpus for pair in part for side in pair)
        assert not re.search(r"\d|  |\n|\bNone\b|length-|mass-|volume-", said)
        assert all(side and side == side.strip() for part in corpus for pair in part for side in pair)


def test_a_language_may_be_named_with_a_hyphen():
    assert Language.of("pt-BR") == Language.of("pt_BR")


def test_what_cannot_be_is_refused():
    with pytest.raises(ArgumentError, match=r"know the language 'tlh'; they know ar, .* de, en, "):
        embedded_corpus("tlh", "de")
    with pytest.raises(ArgumentError, match="know the language ''"):
        embedded_corpus("en", "")
    with pytest.raises(DTypeError, match="give a code such as 'de'"):
        embedded_corpus("en", 7)  # type: ignore[arg-type]
    for values in ((0, 1), (2, 1), (1,), 3, (1.0, 2)):
        with pytest.raises(ArgumentError, match="give how many at least and at most"):
            embedded_corpus(values=values)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="size=0"):
        embedded_corpus(size=0)


def test_more_sentences_than_there_are_end_in_an_error(monkeypatch):
    module = import_module("regard.translation.data.builtin")  # the package's attribute is the function
    monkeypatch.setattr(module, "_MOST_TRIES", 20)
    sentences = _Sentences(Digits("en"), Digits("de"), 0)
    monkeypatch.setattr(sentences, "kinds", sentences.kinds[3:4])  # times
    monkeypatch.setattr(module, "_MOMENTS", 0)
    with pytest.raises(
        ArgumentError, match=r"finds no more than .* distinct sentences for test; ask for fewer"
    ):
        sentences.some(2000, "test", 1, 1)


def test_a_missing_extra_is_one_line_with_its_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "num2words", None)
    with pytest.raises(ModuleNotFoundError, match="num2words: pip install babel num2words"):
        embedded_corpus("en", "de", size=10)
