"""CSV files exported by spreadsheets."""

import pytest

from regard.errors import ArgumentError
from regard.translation.data.formats import contains_pairs, read_pairs
from regard.translation.data.pairs import Pair
from regard.translation.data.spreadsheet import parse_csv

PAIRS = [Pair("Ja; bitte, danke.", 'Yes, "please"; thanks.'), Pair("Nein.", "No.")]


def write(pairs, separator, quote_all=False):
    def cell(text):
        quoted = text.replace('"', '""')
        return f'"{quoted}"' if quote_all or set(text) & {separator, '"', "\n"} else text

    return [separator.join(map(cell, pair)) for pair in pairs]


def test_separators_quotes_and_headers():
    for separator in ",;\t|":
        for header in (
            None,
            ["German", "English"],
            ["de_DE", "en"],
            ["Source", "Target"],
            ["Deutsch", "English"],
        ):
            for quote_all in (False, True):
                rows = [header, *PAIRS] if header else PAIRS
                assert list(parse_csv(write(rows, separator, quote_all), "x")) == PAIRS, (separator, header)


def test_a_header_selects_the_columns():
    rows = [["ID", "translation", "checked", "source"], ["1", "a dog", "yes", "ein Hund"]]
    assert list(parse_csv(write(rows, ","), "x")) == [Pair("ein Hund", "a dog")]
    without = [["ein Hund", "a dog", "note"], ["eine Katze", "a cat", ""]]
    assert list(parse_csv(write(without, ","), "x")) == [Pair(*row[:2]) for row in without]


def test_files_with_bom_line_breaks_and_empty_rows(tmp_path):
    path = tmp_path / "sheet.csv"
    text = 'German;English\r\n"Zwei\r\nHunde";Two dogs\r\n;\r\nEin Hund;A dog\r\n'
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert contains_pairs(str(path))
    pairs = list(read_pairs(path))
    assert pairs[0].source.split() == ["Zwei", "Hunde"]
    assert pairs[1:] == [Pair("", ""), Pair("Ein Hund", "A dog")]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["ein Hund,a dog", "eine Katze"], "line 2: expected texts in columns 1 and 2"),
        (["ein Hund,a dog", '"eine Katze,a cat'], "not valid CSV"),
        (["ein Hund"], "got 1 column: 'ein Hund'"),
    ],
)
def test_errors_name_the_line_and_the_cure(lines, message):
    with pytest.raises(ArgumentError, match=message):
        list(parse_csv(lines, "'x.csv'"))


def test_a_spreadsheet_file_is_refused_with_the_cure(tmp_path):
    path = tmp_path / "sheet.xlsx"
    path.write_bytes(b"PK\x03\x04")
    with pytest.raises(ArgumentError, match=r"Export it as CSV"):
        read_pairs(path)
