"""Sentence splitting loses nothing; abbreviations, ordinals, decimals and quotes do not end a sentence."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.translation.text.protected_spans import find_spans
from regard.translation.text.sentence_splitter import group_sentences, sentence_ends


def split(text: str) -> list[str]:
    ends = sentence_ends(text, find_spans(text))
    return [text[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize(
    "sentences",
    [
        ["Ein Mann geht.", " Eine Frau liest!", "  Und?", ' "Ja."', " Gut."],
        ["Dr. Braun kommt am 3. Mai um 15.30 Uhr.", " Er isst z. B. 2.5 kg."],
        ["Die 100. Ausgabe ist da."],
        ["Am 24./25. Dezember kommen 3 Mio. Hunde.", " Dipl.-Ing. Braun auch."],
        ["Sie wohnt in der Bahnhofstr. 5.", " Er nicht."],
        ["Im Jahr 1999.", " Danach kam J. S. Bach usw.", " Der Rest."],
        ["«Komm!» sagte sie.", " »Nein!«", " Er ging."],
        ["ein mann geht.", " eine frau liest."],
        ["EIN MANN GEHT.", " EINE FRAU LIEST."],
        ["他说：“好。”", "她笑了！", "今天？"],
        ["Ein Mann geht.", "Eine Frau liest https://a.de/x.Yz."],
        ["U.S. troops etc. are here.", " It is 5 p.m.", " He left."],
        ["She lies in the sun.", " He said no.", " See No. 5."],
        ["مرحبا؟", " نعم.", " لا."],
        ["नमस्ते।", " कैसे हो।"],
        ["Was ... ist das?!", " Ja."],
        [" . . . "],
    ],
)
def test_sentences(sentences):
    assert split("".join(sentences)) == sentences


@given(st.text(max_size=80))
def test_nothing_is_lost(text):
    ends = sentence_ends(text)
    assert ends == sorted(set(ends))
    assert not text.strip() or ends[-1] == len(text)


def test_long_texts_take_linear_time():
    start = time.process_time()
    for text in ("." * 100_000, ". " * 50_000, "a" * 100_000, "Ein Hund. " * 5000):
        sentence_ends(text)
    assert time.process_time() - start < 5


@given(st.lists(st.integers(1, 9), max_size=20), st.integers(1, 4), st.integers(1, 20))
def test_groups_cover_all_sentences(lengths, max_sentences, max_length):
    groups = group_sentences(lengths, max_sentences, max_length)
    assert sum(groups) == len(lengths)
    first = 0
    for count in groups:
        assert count == 1 or (count <= max_sentences and sum(lengths[first : first + count]) <= max_length)
        first += count
