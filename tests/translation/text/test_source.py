"""Reading lines: a span is never split, and a term belongs to the part in which it begins."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.translation import Tokenizer
from regard.translation.text.profile import TextProfile
from regard.translation.text.source import SourceReader
from regard.translation.text.terms import Terms

URL = "https://example.com/" + "abc/" * 30 + "z"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.learn(["ein Hund bellt um 3 /:", "eine Frau lacht laut."] * 9, kind="characters")


@pytest.mark.parametrize("copies", [True, False])
def test_spans_are_not_split(copies, tokenizer):
    reader = SourceReader(tokenizer, TextProfile(), max_tokens=40, copies=copies)
    for line in (
        URL,
        f"ein Hund 47 {URL} bellt",
        f"{'ein Hund ' * 9}({URL}), 47 {'laut ' * 20} 48 " + "x" * 99,
    ):
        parts = reader.read(line).parts
        copied = [text for part in parts for texts in part.copies.values() for text in texts]
        assert sum(URL in text for text in copied) == 1
        assert [text for text in copied if text.isdigit()] == [w for w in ("47", "48") if w in line.split()]
        assert all(len(part.ids) <= 40 or not part.has_text for part in parts)
        assert "".join(word for part in parts for word in part.segmentation.words) == line.replace(" ", "")


def test_a_span_repeated_in_a_long_word_is_in_one_part(tokenizer):
    line = "ein " + "bellt/1a/" * 30
    parts = SourceReader(tokenizer, TextProfile(), max_tokens=40).read(line).parts
    assert len(parts) > 2
    copied = [text for part in parts for texts in part.copies.values() for text in texts]
    assert "".join(copied).count("1a") == 30


def test_terms_of_a_long_sentence(tokenizer):
    reader = SourceReader(tokenizer, TextProfile(), max_tokens=40, copies=False)
    line = "ein Hund " * 9 + "lacht laut " + "eine Frau " * 9 + "lacht"
    parts = reader.read(line, Terms({"lacht": "laughs", "laut": "loudly"})).parts
    assert len(parts) > 2
    assert not parts[0].terms
    for part in parts:
        expected = {"lacht": "laughs", "laut": "loudly"}
        assert list(part.terms) == [expected[w] for w in part.segmentation.words if w in expected]


def read(tokenizer: Tokenizer, line: str, profile: TextProfile | None = None) -> list[str]:
    """Return the tokens that the model reads."""
    reader = SourceReader(tokenizer, profile or TextProfile(), max_tokens=99)
    return [piece for part in reader.read(line).parts for piece in part.segmentation.pieces]


@given(st.sampled_from("„“”«»‚‘’*_…—¿"), st.sampled_from("„“”«»‚‘’*_…—!"))
def test_punctuation_does_not_make_a_word_unknown(before, after):
    tokenizer = Tokenizer.learn(['ein Hund bellt: "laut."', "eine Frau lacht"] * 9, kind="characters")
    reader = SourceReader(tokenizer, TextProfile(), max_tokens=99)
    (part,) = reader.read(f"ein {before}Hund{after} bellt").parts
    assert not part.copies
    assert not part.segmentation.unknown
    assert "Hund" in "".join(part.segmentation.pieces)
    assert part.segmentation.words[1] == f"{before}Hund{after}"


@given(st.sampled_from("\u200b\u200c\u200d\u200e\u202e\u2066\u00ad\ufeff\x07\x1b"), st.integers(0, 9))
def test_invisible_characters_are_not_read(tokenizer, character, at):
    line = "ein Hund bellt"
    if character != "\u200b" or line[at].isspace():  # a zero-width space separates words
        assert read(tokenizer, line[:at] + character + line[at:]) == read(tokenizer, line)
    assert read(tokenizer, "ein \x1b[31mHund\x1b[0m bellt") == read(tokenizer, line)


@pytest.mark.parametrize("text", ["👨‍👩‍👧‍👦", "👍🏽", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "می‌خواهم"])
def test_joiners_that_join_are_kept(tokenizer, text):
    reader = SourceReader(tokenizer, TextProfile(), max_tokens=99)
    assert [copy for part in reader.read(f"ein {text} bellt").parts for copy in part.copies[1]] == [text]


@pytest.mark.parametrize("text", ["x=1", "<3", "10~12", "a=b=3"])
def test_a_span_beside_unknown_symbols_is_copied_whole(tokenizer, text):
    reader = SourceReader(tokenizer, TextProfile(), max_tokens=99)
    (part,) = reader.read(f"ein {text} bellt").parts
    assert part.copies == {1: [text]}


def test_unknown_words_are_copied_as_written():
    lines = ["Ein Hund der Frau aus Kassel bellt.", "NASA KRÓW BELLT HUND"]
    tokenizer = Tokenizer.learn(lines * 9, kind="characters")
    profile = TextProfile.of([(lines[0], "A dog barks.")] * 9, 40, 40)
    reader = SourceReader(tokenizer, profile, max_tokens=99)
    for line, copies in (
        ("Ein Hund der NASA bellt", {3: ["NASA"]}),  # an acronym
        ("EIN HUND DER FRAU BELLT", {}),  # a line in capitals has no acronyms
        ("EIN HUND AUS (KRAKÓW).", {3: ["(KRAKÓW)"]}),
        ("ein hund aus kraków", {3: ["kraków"]}),
    ):
        assert reader.read(line).parts[0].copies == copies


@pytest.mark.parametrize("marker", ["-", "#", "> *", "•", "–", "- [ ]"])
def test_a_list_marker_is_a_part_of_its_own(tokenizer, marker):
    reader = SourceReader(tokenizer, TextProfile(), max_tokens=99)
    line = reader.read(f"{marker} ein Hund bellt. Frau lacht.")
    assert [part.has_text for part in line.parts] == [False, True, True]
    assert " ".join(line.parts[0].segmentation.words) == marker
    assert " ".join(line.words) == line.text
    assert line.sentences == 3
    for text in ("-5 ein Hund", "- 5", "-", "#ein Hund"):
        assert len(reader.read(text).parts) == 1


def parts(line: str, profile: TextProfile | None = None, max_tokens: int = 99) -> list[str]:
    """Return the words of each part."""
    lines = ["Ein Hund bellt. a) [x] | ()", "Eine Frau lacht um 3. - !"]
    tokenizer = Tokenizer.learn(lines * 9, kind="characters")
    reader = SourceReader(tokenizer, profile or TextProfile(), max_tokens=max_tokens)
    return [" ".join(part.segmentation.words) for part in reader.read(line).parts]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("| Ein Hund | Eine Frau |", ["|", "Ein Hund", "|", "Eine Frau", "|"]),
        ("Ein Hund\tEine Frau. Ein Hund\t3", ["Ein Hund", "Eine Frau.", "Ein Hund", "3"]),
        ("• Ein Hund • Eine Frau", ["•", "Ein Hund", "•", "Eine Frau"]),
        ("<ul><li>Ein Hund</li><li>Eine Frau</li></ul>", ["Ein Hund", "Eine Frau"]),
        ("Ein Hund<br/>Eine Frau", ["Ein Hund", "Eine Frau"]),
        ("Ein <b>Hund</b> `a | b` bellt", ["Ein Hund `a | b` bellt"]),
        ("a|b Ein Hund ||", ["a|b Ein Hund ||"]),
    ],
)
def test_cells_and_items_are_separate_parts(line, expected):
    several = TextProfile(lines=9, max_sentences=5, max_tokens=99, initial=1.0)
    assert parts(line) == expected
    assert parts(line, several)[:1] == expected[:1]


@pytest.mark.parametrize(
    "marker", ["-", "a)", "(b)", "iv)", "12)", "(3)", "- [x]", "- [ ]", "##", "> -", "*"]
)
def test_list_markers_are_copied(tokenizer, marker):
    reader = SourceReader(tokenizer, TextProfile(), max_tokens=99)
    first, second = reader.read(f"{marker} ein Hund bellt").parts
    assert not first.has_text
    assert " ".join(first.verbatim) == marker
    assert second.segmentation.text == "ein Hund bellt"
    assert len(reader.read(f"ein {marker} 3").parts) == 1


def test_a_long_part_without_text_is_whole():
    for text in ("!" * 300, "= " * 60 + "3", "-" * 50):
        assert parts(text, max_tokens=20) == [text.strip()]


def test_brackets_around_unknown_words_are_copied(tokenizer):
    reader = SourceReader(tokenizer, TextProfile(), max_tokens=99)
    (part,) = reader.read("ein (Москва), „漢字“ [laut").parts
    assert part.copies == {1: ["(Москва)"], 2: ["„漢字“"]}


def test_other_forms_of_known_letters_are_not_names():
    tokenizer = Tokenizer.learn(["Ein Hund bellt", "Eine Frau lacht"] * 9, kind="characters")
    profile = TextProfile.of([("Ein Hund bellt", "A dog barks")] * 9, 40, 400)
    (part,) = SourceReader(tokenizer, profile, max_tokens=99).read("Ｅｉｎ 𝗛𝘂𝗻𝗱 bellt").parts
    assert not part.copies


def test_all_caps_lines_may_contain_spans(tokenizer):
    profile = TextProfile.of([("ein Hund bellt", "a dog barks")] * 9, 40, 400)
    reader = SourceReader(tokenizer, profile, max_tokens=99)
    for line, expected in (
        ("EIN HUND AUS HTTPS://A.DE", True),
        ("EIN HUND {name}", True),
        ("EIN Hund", False),
    ):
        (part,) = reader.read(line).parts
        assert part.all_upper is expected


def test_unknown_names_in_capitals_are_copied():
    lines = ["Ein Hund der Frau aus Kassel bellt Szczecin"]
    tokenizer = Tokenizer.learn(lines * 9, kind="characters")
    profile = TextProfile.of([("Ein Hund der Frau aus Kassel bellt", "A dog barks.")] * 9, 40, 100)
    reader = SourceReader(tokenizer, profile, max_tokens=99)
    for line in ("EIN HUND AUS KASSEL BELLT SZECIN", "Ein Hund aus Kassel bellt SZECIN"):
        assert reader.read(line).parts[0].copies == {5: ["SZECIN"]}
