"""The words of a sentence are compared whole with the training data."""

from regard.translation.text.domain import Domain, words_of


def test_accents_and_vowel_signs_belong_to_a_word():
    domain = Domain(words_of(["Ein Ma\u0308dchen", "दिल्ली में"]), None)
    assert domain.unseen_words("ein Mädchen, Ein ma\u0308dchen, दिल्ली") == ([], 0)
    assert domain.unseen_words("दिल्लीवाला ein") == (["दिल्लीवाला"], 0.5)


def test_words_in_capitals_are_known():
    domain = Domain(words_of(["Die Straße ist groß", "ein Fluss"]), None)
    assert domain.unseen_words("DIE STRASSE IST GROSS, EIN FLUSS") == ([], 0)
    assert domain.unseen_words("Eine Strasse") == (["Eine", "Strasse"], 1)
