"""Terms match whole words in any case, the longest first; contradictions are errors."""

import pytest

from regard.errors import ArgumentError, DTypeError
from regard.translation.text.terms import Terms


def test_the_first_and_longest_term_wins():
    terms = Terms({"ein Hund": "one hound", "Hund": "hound", "Hund bellt": "hound barks"})
    assert terms.find(["Ein", "HUND,", "bellt.", "Hunde", "Hund!"]) == [(0, 2, "one hound"), (4, 5, "hound")]


def test_errors(tmp_path):
    with pytest.raises(ArgumentError, match="have the same source, because letter case is ignored"):
        Terms({"Hund": "dog", "hund": "hound"})
    with pytest.raises(ArgumentError, match="has an empty side"):
        Terms({" ": "dog"})
    with pytest.raises(DTypeError, match="pass a dictionary"):
        Terms(["Hund"])
    (tmp_path / "terms.tsv").write_text("Hund\tdog\nHund\thound\n")
    with pytest.raises(ArgumentError, match="has two translations for 'Hund': 'dog' and 'hound'"):
        Terms.load(tmp_path / "terms.tsv")


def test_empty_lines_are_skipped(tmp_path):
    (tmp_path / "terms.tsv").write_text("\nHund\thound\n\n")
    assert Terms.load(tmp_path / "terms.tsv").find(["Hund"]) == [(0, 1, "hound")]
