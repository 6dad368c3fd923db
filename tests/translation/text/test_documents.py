"""Documents keep their structure: HTML has the same tags, and blank lines and columns are kept."""

from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import ArgumentError
from regard.translation.text.documents import translate_document


class Upper:
    """Translates letters to capitals, except in tags."""

    def translate(self, texts, **options):
        from regard.translation.text.tags import strip_tags, write_tags

        results = []
        for text in texts:
            plain, tags = strip_tags(text)
            counts = [len(plain[: tag.position].split()) for tag in tags]
            results.append(" ".join(write_tags(tags, counts, plain.upper().split())) or text)
        return [SimpleNamespace(text=text, note="") for text in results]


class Structure(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.events = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.events.append((tag, attributes))

    def handle_endtag(self, tag):
        self.events.append(f"/{tag}")

    def handle_comment(self, text):
        self.events.append(f"<!--{text}")


PAGE = """<!DOCTYPE html><html><head><title>ein Mann</title>
<style>p > b {}</style>
<script>if (a < b) "Hund";</script></head><body class="Hund"><!-- Hund --><p id=x>Ein <b>Mann</b> f&auml;hrt
&amp; liest <a href="?a=1&amp;b=2">hier</a>.<br>Zwei <i>kleine <b>Hunde</b></i>.
<ul><li>eins<li><code>x()</code>
</ul><pre>a  b</pre><img alt="Hund" src=x.png></body></html>"""


def test_html():
    text = translate_document(Upper(), PAGE, "html").text
    assert Structure(text).events == Structure(PAGE).events
    for kept in (
        'if (a < b) "Hund";',
        "p > b {}",
        "<pre>a  b</pre>",
        "<!-- Hund -->",
        "<code>x()</code>",
        "?a=1&amp;b=2",
    ):
        assert kept in text
    for translated in ("EIN MANN", "<b>MANN</b> FÄHRT &AMP; LIEST", "<li>EINS<li>"):
        assert translated.lower() in text.lower()


def test_html_that_is_cut_off():
    for ending in ("<p cla", "<!-- Hund", '<a href="Hund', "</p"):
        text = f"<p>Ein Hund</p>{ending}"
        assert translate_document(Upper(), text, "html").text == f"<p>EIN HUND</p>{ending}"


@given(
    st.lists(
        st.sampled_from(["<p>", "</p>", "<b>", "</b>", "<", "&lt;", "Hund", " ", "\n", "<br>", "<!--x-->"])
    )
)
def test_html_that_is_not_well_formed(pieces):
    text = "".join(pieces)
    result = translate_document(Upper(), text, "html").text
    assert Structure(result).events == Structure(text).events


@given(st.text(st.sampled_from("ab .\n\r\t-#|"), max_size=40), st.sampled_from(["lines", "text"]))
def test_text_keeps_blank_lines_and_indentation(text, format):
    assert translate_document(Upper(), text, format).text.split() == text.upper().split()
    if max(map(len, text.splitlines()), default=0) < 40:

        class Same:
            def translate(self, texts, **options):
                return [SimpleNamespace(text=text, note="") for text in texts]

        assert translate_document(Same(), text, format).text == text


def test_wrapped_paragraphs_are_joined():
    lines = [
        "ein sehr langer Satz geht in der nächsten Zeile",
        "weiter, und noch eine Zeile weiter, bis er",
        "endet.",
    ]
    calls = []

    class Record(Upper):
        def translate(self, texts, **options):
            calls.extend(texts)
            return super().translate(texts)

    text = translate_document(Record(), "\n".join(lines) + "\n\n  x\n", "text").text
    assert calls == [" ".join(lines), "x"]
    assert text.endswith(".\n\n  X\n")
    assert max(map(len, text.splitlines())) <= max(map(len, lines))


def test_tsv():
    assert (
        translate_document(Upper(), "a\t b \tc\r\n\r\nd\te\n", "tsv", column=2).text
        == "a\t B \tc\r\n\r\nd\tE\n"
    )
    with pytest.raises(ArgumentError, match="Line 2 has 1 column, so column 2 cannot be translated"):
        translate_document(Upper(), "a\tb\nc\n", "tsv", column=2)


@pytest.mark.parametrize(
    ("text", "translated"),
    [
        ('1\t"ein ""Hund"" bellt"\tc\n', '1\t"EIN ""HUND"" BELLT"\tc\n'),
        ('1\t"ein\nHund"\tc\r\n2\t""\td', '1\t"EIN\nHUND"\tc\r\n2\t""\td'),
        ('1\t"ein", sagt er\n2\t"er\n', '1\t"EIN", SAGT ER\n2\t"ER\n'),  # not quoted cells
    ],
)
def test_quoted_tsv_cells_stay_quoted(text, translated):
    assert translate_document(Upper(), text, "tsv", column=2).text == translated


@given(st.text(st.sampled_from('ab"\t\r\n'), max_size=30))
def test_tsv_loses_nothing(text):
    class Same:
        def translate(self, texts, **options):
            return [SimpleNamespace(text=text, note="") for text in texts]

    assert translate_document(Same(), text, "tsv").text == text


def test_a_space_entity_separates_words():
    texts = []

    class Record(Upper):
        def translate(self, texts_, **options):
            texts.extend(texts_)
            return super().translate(texts_)

    page = "<p>ein&nbsp;Hund</p><td>&nbsp;</td><p>&nbsp;ein&#160;</p>"
    result = translate_document(Record(), page, "html").text
    assert [text.split() for text in texts if "Hund" in text] == [["ein", "Hund"]]
    assert result.lower().startswith("<p>ein hund</p><td>&nbsp;</td><p>&nbsp;ein&#160;</p>")


def test_fenced_code_and_tables():
    text = "ein Hund\n```py\nein = 1\n\nb\n```\n| ein | b\\|c |\r\n|:---|---|\n| 3 |  |\nein\n```\nHund"
    expected = "EIN HUND\n```py\nein = 1\n\nb\n```\n| EIN | B\\|C |\r\n|:---|---|\n| 3 |  |\nEIN\n```\nHUND"
    assert translate_document(Upper(), text, "text").text == expected


@pytest.mark.parametrize(
    "text",
    [
        "<p>5 > 3 && 2 < 4</p>",
        "<td>&nbsp;</td> &mdash; 1&thinsp;000 <",
        "<p translate=\"no\">ein Hund</p><div class='a notranslate'>ein <b>Hund</b></div>",
    ],
)
def test_html_without_text_to_translate_is_unchanged(text):
    assert translate_document(Upper(), text, "html").text == text


def test_excluded_elements_stay_in_their_sentence():
    text = 'ein <span translate="no">Hund</span> <b class="x">bellt</b>'
    assert translate_document(Upper(), text, "html").text == text.replace("ein", "EIN").replace(
        "bellt", "BELLT"
    )
