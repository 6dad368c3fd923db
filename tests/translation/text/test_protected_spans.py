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
        ("§5, 20°C bei 3×4 m, 90°, 3 ‰", ["§5", "20°C", "3×4", "90°", "3 ‰"]),
        ("-5 °C, 10–12 Hunde, 5 $, 5 $6", ["-5 °C", "10–12", "5 $", "5", "$6"]),
        (r"C:\Users\Max\a.txt, (/usr/bin/ls), ~/a/b.", [r"C:\Users\Max\a.txt", "/usr/bin/ls", "~/a/b"]),
        ("und/oder, m/w/d, 1 / 2", ["1", "2"]),
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
