"""URLs, numbers, placeholders and emoji are protected as whole spans; other words are not."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.translation.text.protected_spans import find_spans, split_words


@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ("Um 15:30 am 3.5.2020, 1.234,56 € oder -5 Grad", ["15:30", "3.5.2020", "1.234,56 €", "-5"]),
        ("(http://x.de/(a)), www.foo.de/b?x=1&y=2!", ["http://x.de/(a)", "www.foo.de/b?x=1&y=2"]),
        ("a.b+c@x-y.co.uk, example.com.", ["a.b+c@x-y.co.uk", "example.com"]),
        ("{name} %s ${x} {{ a b }} %(n)d &amp;", ["{name}", "%s", "${x}", "{{ a b }}", "%(n)d", "&amp;"]),
        ("🇩🇪 👨‍👩‍👧 👍🏽 ❤️", ["🇩🇪", "👨‍👩‍👧", "👍🏽", "❤️"]),
        ("A380, 4x4, 5-jährig", ["A380", "4x4", "5"]),
        ("§5, 20°C bei 3×4 m, 90°, 3 ‰", ["§5", "20°C", "3×4 m", "90°", "3 ‰"]),
        ("-5 °C, 10–12 Hunde, 5 $, 5 $6", ["-5 °C", "10–12", "5 $", "5", "$6"]),
        (r"C:\Users\Max\a.txt, (/usr/bin/ls), ~/a/b.", [r"C:\Users\Max\a.txt", "/usr/bin/ls", "~/a/b"]),
        (
            r"./run.sh, a/b.py; (IMG_2.JPG) c.tar.gz \\srv\x",
            ["./run.sh", "a/b.py", "IMG_2.JPG", "c.tar.gz", r"\\srv\x"],
        ),
        ("v2.0.1, 3.12.1-rc2. 3.0-SNAPSHOT", ["v2.0.1", "3.12.1-rc2", "3.0-SNAPSHOT"]),
        ("2024-03-15T12:30:05Z, 2024-03-15", ["2024-03-15T12:30:05Z", "2024-03-15"]),
        (
            "+49 (0)30 1234-56, 030/1234567, (030) 1234567",
            ["+49 (0)30 1234-56", "030/1234567", "(030) 1234567"],
        ),
        ("+43 1 234 56 78 an, 0171 2345678.", ["+43 1 234 56 78", "0171 2345678"]),
        ("DE89 3704 0044 0532 0130 00 ist", ["DE89 3704 0044 0532 0130 00"]),
        ("10 000 Hunde, 1\u00a0234,5 €, 12 34", ["10 000", "1\u00a0234,5 €", "12", "34"]),
        ("§ 5 Abs. 2, € 7, H₂O, 3,5kg, 100km/h", ["§ 5", "2", "€ 7", "H₂O", "3,5kg", "100km/h"]),
        ("`a b` und ``x'', 2-3-jährig", ["`a b`", "2-3"]),
        ("Er singt.Es regnet. müller-x.de, a.b.org/c?d=1", ["müller-x.de", "a.b.org/c?d=1"]),
        ("und/oder, m/w/d, 1 / 2", ["1 / 2"]),
        (
            "3 x 4 = 12. 1 + -2,5 € ≤ 3 °C, 10:30 – 12:45",
            ["3 x 4 = 12", "1 + -2,5 € ≤ 3 °C", "10:30 – 12:45"],
        ),
        ("3 x Hund, 3x 4, 3 x 4er, 3 - Hund 4, 3 + 4.", ["3", "3x", "4", "3", "4er", "3", "4", "3 + 4"]),
        (
            "5,- oder EUR 12.–; 12. 3. 2020, 24./25. Mai, 3.–5. Klasse",
            ["5,-", "EUR 12.–", "12. 3. 2020", "24./25", "3.–5"],
        ),
        ("120 km/h, 3 m², 230 V, 5 A-Klassen, 2 Hunde", ["120 km/h", "3 m²", "230 V", "5", "2"]),
        (
            "git@a.com:b/c.git, mailto:a@b.de; arXiv:1706.03762.",
            ["git@a.com:b/c.git", "mailto:a@b.de", "arXiv:1706.03762"],
        ),
        ("@foto.graf und @a@b.social. #1 #Eis", ["@foto.graf", "@a@b.social", "#1", "#Eis"]),
        ("2001:db8::ff00:42, fe80::1, ab:cd:ef:01", ["2001:db8::ff00:42", "fe80::1", "ab:cd:ef:01"]),
        ("std::vector, file_name, getName(), iPhone", ["std::vector", "file_name", "getName()", "iPhone"]),
        ("Fahrer_innen, Läufer:innen, eIN mAnN, LehrerInnen", []),
        (r"{count, number} eins\n :smile: {a b}", ["{count, number}", r"\n", ":smile:"]),
        ("Ja :-) nein ;( <3. (gut: (sehr))", [":-)", ";(", "<3"]),
        ('":-)" :-))) ganz (xD)', [":-)", ":-)))", "xD"]),
        ("12 %(n)d, 5 %s, 5 %, 100%, 120 KM/H", ["12", "%(n)d", "5", "%s", "5 %", "100%", "120 KM/H"]),
        ("---- *** !!!!!! ___ ... ???", ["----", "***", "!!!!!!", "___"]),
        ("Kapitel Ⅷ, Ⅻ.", ["Ⅷ", "Ⅻ"]),
        ("ISBN 3-16-148410-X, 100%ig, x=1, a_b=c", ["3-16-148410-X", "100%", "x=1", "a_b=c"]),
        ("Max™ und № 5, ①②, 3 ½", ["™", "№", "5", "①②", "3", "½"]),
        ("±5, ≈3,5 und 10^6. C++, C#, H&M", ["±5", "≈3,5", "10^6", "C++", "C#", "H&M"]),
        ("Ein T-Shirt, U-Bahn: z. B. Müller & Co.", []),
    ],
)
def test_spans(text, spans):
    assert [span.of(text) for span in find_spans(text)] == spans
    assert find_spans(text, {span.kind for span in find_spans(text)}) == []


@given(st.text(max_size=60))
def test_spans_are_in_order_and_words_contain_them(text):
    spans = find_spans(text)
    assert all(first.stop <= second.start for first, second in pairwise(spans))
    words = split_words(text, spans)
    assert all(any(a <= span.start and span.stop <= b for a, b in words) for span in spans)
    if not any(character.isspace() for span in spans for character in span.of(text)):
        assert [text[a:b] for a, b in words] == text.split()


@pytest.mark.parametrize(
    "piece",
    [
        "1",
        "1.",
        "a1",
        "1-a",
        "a.",
        "a/",
        "`a",
        "0 ",
        "1 x ",
        "1 + 1a",
        "(0)",
        "ab12 ",
        "./",
        "\\",
        "-",
        "a.b-1",
        "a.1-b@",
        "a-.",
        "a_",
        "_",
        "a::",
        "a:",
        "::",
        "aB",
        "#",
        "((",
        ":a",
        "1.-",
        "1. ",
        "12. 3. ",
        "a@",
    ],
)
def test_repetitions_take_linear_time(piece):
    """Backtracking would take minutes."""
    text = piece * (40_000 // len(piece))
    assert all(0 <= span.start < span.stop <= len(text) for span in find_spans(text))
