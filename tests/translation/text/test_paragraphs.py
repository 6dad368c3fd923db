"""Unwrapping restores the original paragraphs in every layout."""

import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.translation.text.documents import translate_document
from regard.translation.text.paragraphs import find_paragraphs
from tests.translation.text.test_documents import Upper

GERMAN = (
    "Als der Mann am 3. Mai nach Hause kam, saß sein Hund vor der Tür und bellte. Er hatte den ganzen Tag "
    "gewartet. Die Nachbarin, die ihn gehört hatte, brachte ihm Wasser und ein Stück Brot, das er aber nicht "
    "anrührte."
)
ENGLISH = (
    'When the man came home on 3 May, his dog was sitting at the door. "Good boy," he said. It had waited '
    "all day long, although Dr. Brown (the neighbour) had brought it water and a well-known dog food."
)


def texts(document: str) -> list[str]:
    """Return the texts passed to the translator."""
    calls: list[str] = []

    class Record(Upper):
        def translate(self, texts, **options):
            calls.extend(texts)
            return super().translate(texts)

    translate_document(Record(), document, "text")
    return calls


@pytest.mark.parametrize("text", [GERMAN, ENGLISH])
@pytest.mark.parametrize("width", [45, 60, 72, 100])
@pytest.mark.parametrize(
    ("first", "other"),
    [
        ("", ""),
        ("  ", "  "),
        ("    ", ""),
        ("> ", "> "),
        ("> > ", "> > "),
        ("- ", "  "),
        ("* ", ""),
        ("12. ", "    "),
    ],
    ids=repr,
)
def test_a_wrapped_paragraph_is_one_text(text, width, first, other):
    lines = textwrap.wrap(text, width, initial_indent=first, subsequent_indent=other)
    assert texts("\n".join(lines)) == [text]
    assert texts("\r\n".join(["Ein Titel", "", *lines, "", *lines])) == ["Ein Titel", text, text]
    # the translation has the same layout
    translated = translate_document(Upper(), "\r\n".join(lines) + "\r\n", "text").text
    expected = textwrap.wrap(
        text.upper(),
        max(map(len, lines)),
        initial_indent=first,
        subsequent_indent=other,
        break_on_hyphens=False,
    )
    assert translated == "\r\n".join(expected) + "\r\n"


def test_items_of_a_list_are_separate():
    items = [GERMAN, "Äpfel", ENGLISH]
    for mark in ("- ", "• ", "1. ", "  a) "):
        blocks = [
            textwrap.fill(item, 60, initial_indent=mark, subsequent_indent=" " * len(mark)) for item in items
        ]
        assert texts("Wir brauchen:\n" + "\n".join(blocks)) == ["Wir brauchen:", *items]


def test_indented_paragraphs_without_blank_lines():
    blocks = [textwrap.fill(text, 66, initial_indent="   ") for text in (GERMAN, ENGLISH, GERMAN)]
    assert texts("\n".join(blocks)) == [GERMAN, ENGLISH, GERMAN]


@pytest.mark.parametrize(
    "lines",
    [
        ["Anna Schmidt", "Hauptstraße 5", "10115 Berlin"],
        ["Ein Mann geht mit seinem Hund durch den Park.", "Eine Frau liest ein Buch auf einer Bank."],
        ["Ein Mann geht mit seinem Hund durch den Park", "Eine Frau liest ein Buch auf einer Parkbank"],
        ["# Eine Überschrift, die ziemlich lang geraten ist", "ein Satz darunter, der klein beginnt"],
        [
            "Eine Überschrift, die ziemlich lang geraten ist",
            "-----------------------------------------------",
        ],
        ["Name des Hundes          Alter in Jahren         Farbe", "Bello         drei       braun und weiß"],
    ],
)
def test_separate_lines_stay_separate(lines):
    assert [each for each in texts("\n".join(lines)) if any(map(str.isalnum, each))] == [
        line.removeprefix("# ") for line in lines if any(map(str.isalnum, line))
    ]


def test_a_heading_above_a_line():
    document = "\n\n".join(
        [textwrap.fill(GERMAN, 72), "Der zweite Teil der Geschichte vom Hund\nEr schlief."]
    )
    assert texts(document) == [GERMAN, "Der zweite Teil der Geschichte vom Hund", "Er schlief."]


def test_words_are_joined_as_they_were():
    lines = [
        "Dies ist eine Zeile mit einem ganz wohl-",
        "bekannten Wort und mit der Nord-, Ost-",
        "und Südseite.",
    ]
    (paragraph,) = find_paragraphs(lines)
    assert (
        paragraph.text
        == "Dies ist eine Zeile mit einem ganz wohl-bekannten Wort und mit der Nord-, Ost- und Südseite."
    )
    chinese = [
        "他今天早上带着他的狗去公园散步，然后和朋友一起吃早饭，喝咖啡，看报纸，聊天，直到中午",
        "才回家。",
    ]
    assert [paragraph.text for paragraph in find_paragraphs(chinese)] == ["".join(chinese)]


@given(st.lists(st.text(st.sampled_from("aB .-1>#•\t*\u2028\x0c漢"), min_size=1, max_size=70), max_size=6))
def test_nothing_is_lost(lines):
    text = "\n".join(lines)
    letters = [character for character in text.upper() if character.isalnum()]
    result = translate_document(Upper(), text, "text").text
    assert [character for character in result if character.isalnum()] == letters


def test_a_long_address_does_not_split_a_paragraph():
    lines = [
        "ein sehr langer Satz geht in der nächsten Zeile",
        "weiter, mit einer Adresse, die länger ist als",
        "https://example.org/" + "ordner/" * 8,
        "alle anderen Zeilen, und noch eine Zeile weiter",
        "endet er.",
    ]
    assert [paragraph.lines for paragraph in find_paragraphs(lines)] == [5]
