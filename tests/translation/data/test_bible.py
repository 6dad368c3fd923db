"""The Greek-English corpus is complete, and the diagonal has the published error rate."""

from importlib.metadata import PackageNotFoundError, distribution

import pytest

from regard.errors import ArgumentError, MissingExtraError
from regard.translation.data import bible as module
from regard.translation.data.bible import Verse, bible

try:
    distribution("bible-alignments")
except PackageNotFoundError:
    pytest.skip("needs the package bible-alignments", allow_module_level=True)


@pytest.fixture(scope="module")
def verses() -> list[Verse]:
    return bible()


def diagonal(verse: Verse) -> set[tuple[int, int]]:
    """Link each English word to the Greek word at the same relative position."""
    s, t = len(verse.source_words), len(verse.target_words)
    return {(min(s - 1, round(j * s / t)), j) for j in range(t)}


def error_rate(verses: list[Verse]) -> float:
    """Return the AER (Och and Ney 2003) of the diagonal; all links are sure, and punctuation is excluded."""
    common = found = gold = 0
    for verse in verses:
        links = verse.without_punctuation(diagonal(verse))
        common, found, gold = common + len(links & verse.links), found + len(links), gold + len(verse.links)
    return 1 - 2 * common / (found + gold)


def test_all_verses_and_links_are_loaded(verses):
    assert (len(verses), sum(len(verse.links) for verse in verses)) == (7919, 189_473)
    assert len({verse.reference for verse in verses}) == 7919
    assert {verse.book for verse in verses} == set(range(40, 67))


def test_the_first_verse(verses):
    first = verses[0]
    assert first.reference == "40001001"
    assert first.pair.source == "Βίβλος γενέσεως Ἰησοῦ χριστοῦ υἱοῦ Δαυὶδ υἱοῦ Ἀβραάμ"
    assert first.pair.target.startswith(
        "This is the record of the genealogy of Jesus Christ , the son of David ,"
    )
    linked = {(first.source_words[i], first.target_words[j]) for i, j in first.links}
    assert {("Βίβλος", "record"), ("γενέσεως", "genealogy"), ("Ἰησοῦ", "Jesus"), ("Δαυὶδ", "David")} <= linked


def test_links_are_in_range_and_never_to_punctuation(verses):
    for verse in verses:
        assert len(verse.punctuation) == len(verse.target_words)
        assert all(
            0 <= i < len(verse.source_words) and 0 <= j < len(verse.target_words) for i, j in verse.links
        )
        assert verse.without_punctuation(verse.links) == verse.links
        assert [any(map(str.isalnum, word)) for word in verse.target_words] == [
            not p for p in verse.punctuation
        ]


def test_pair_splits_into_the_words(verses):
    for verse in verses:
        assert verse.pair.source.split() == list(verse.source_words)
        assert verse.pair.target.split() == list(verse.target_words)


def test_the_diagonal_has_the_published_error_rate(verses):
    assert error_rate(verses) == pytest.approx(0.742, abs=0.0006)
    some = [verse for verse in verses if verse.book in range(40, 45)]
    assert error_rate(some) == pytest.approx(0.750, abs=0.0006)


def test_books_select_verses(verses):
    assert bible([64, 65]) == [verse for verse in verses if verse.book in (64, 65)]
    for wrong in ([], [39], ["64"]):
        with pytest.raises(
            ArgumentError, match=r"books must be between 40 \(Matthew\) and 66 \(Revelation\), got"
        ):
            bible(wrong)


def test_a_missing_package_is_reported_with_its_cure(monkeypatch, tmp_path):
    class Distribution:
        def locate_file(self, name: str) -> str:
            return str(tmp_path / name)

    monkeypatch.setattr(module, "distribution", lambda name: Distribution())
    with pytest.raises(ArgumentError, match=r"has no file 'data/.*pip install --no-deps bible-alignments=="):
        bible()

    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(module, "distribution", missing)
    with pytest.raises(MissingExtraError, match=r"not installed\. Run: pip install --no-deps bible-align"):
        bible()
