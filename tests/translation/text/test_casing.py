"""Letter case is adapted to the training text; scripts without case are unchanged."""

from hypothesis import given
from hypothesis import strategies as st

from regard.translation.text.casing import Casing, capitals, is_all_caps

WORDS = {"Der": 5, "Mann": 9, "geht": 8, "die": 9, "Die": 3, "Straße": 4, "TV": 3}
SENTENCE = ["Der", "Mann", "geht", "die", "Straße."]


def test_capitals_and_lower_case_give_the_training_text():
    casing = Casing(WORDS)
    for variant, upper in ((str.upper, True), (str.lower, False), (str, False)):
        assert casing.normalize([variant(word) for word in SENTENCE]) == (SENTENCE, [upper] * 5)


def test_only_known_words_change_in_other_sentences():
    assert Casing(WORDS).normalize(["Der", "MANN", "sieht", "TV", "und", "NATO"]) == (
        ["Der", "Mann", "sieht", "TV", "und", "NATO"],
        [False, True, False, False, False, False],
    )


def test_headlines_and_mixed_case_give_the_training_text():
    casing = Casing(WORDS)
    assert casing.normalize(["Der", "Mann", "Geht", "Die", "Straße,", "Kassel"]) == (
        ["Der", "Mann", "geht", "die", "Straße,", "Kassel"],
        [False] * 6,
    )
    assert casing.normalize(["dER", "mANN", "gEHT", "mit", "iPhone"])[0] == [
        "Der",
        "Mann",
        "geht",
        "mit",
        "iPhone",
    ]
    names = ["Max", "Braun", "Der", "Mann"]
    assert casing.normalize(names)[0] == names  # all of them are capitalized in the training text, or unknown
    assert Casing(dict.fromkeys(["Der", "Mann", "Geht", "Die"], 1)).normalize(["Der", "Mann", "Geht", "Die"])[
        0
    ] == [*("Der", "Mann", "Geht", "Die")]


def test_an_uncased_corpus_is_lowercased():
    words, upper = Casing({"mann": 1}, lowercase=1.0).normalize(["Ein", "MANN"])
    assert (words, upper) == (["ein", "mann"], [False, True])


def test_a_corpus_in_capitals_is_kept():
    assert Casing({"MANN": 1}, uppercase=1.0).normalize(["EIN", "MANN"])[0] == ["EIN", "MANN"]


def test_turkish():
    casing = Casing({"Isparta": 0, "İstanbul": 3, "ılık": 2}, turkish=True)
    assert casing.normalize(["İSTANBUL", "ILIK"])[0] == ["İstanbul", "ılık"]
    assert capitals("ılık istanbul", turkish=True) == "ILIK İSTANBUL"


@given(st.text(st.characters(categories=["Lo", "Nd", "Po"]), max_size=20))
def test_scripts_without_case_are_untouched(text):
    words = text.split()
    assert not is_all_caps(text)
    assert Casing({}).normalize(words) == (words, [False] * len(words))
