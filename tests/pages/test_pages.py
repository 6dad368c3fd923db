"""The pages of the guide run as they stand, print what they say, and draw what they show."""

import re
from pathlib import Path

import pytest

from pages.__main__ import ROOT, everything, renew
from pages.running import agree, blocks, differences, drawn, pictures, prepared, run

# Pictures that take minutes: each is made by a command that its page gives.
MADE_BY = {
    "docs/pictures/demo.png": "make demo",
    "docs/pictures/lengths.png": "python -m benchmarks.lengths",
    "docs/pictures/page.png": "regard look",
}


def unmade(page: Path, folder: Path) -> list[str]:
    """The pictures of a page that neither its code has made, in this folder, nor a command that it gives."""
    text, made = page.read_text("utf-8"), drawn(page, folder)
    missing = []
    for picture in pictures(page):
        known = (page.parent / picture).resolve()
        command = MADE_BY.get(known.relative_to(ROOT).as_posix()) if known.is_relative_to(ROOT) else None
        if picture not in made and not (command and command in text and known.is_file()):
            missing.append(picture)
    return missing


@pytest.mark.parametrize("page", everything(), ids=lambda page: str(page.relative_to(ROOT)))
def test_page_runs_and_says_what_its_code_does(page, tmp_path):
    with prepared(tmp_path):
        ran = run(page)
    assert not differences(page, ran)
    assert not unmade(page, tmp_path)
    for picture in pictures(page):
        assert (page.parent / picture).is_file(), f"{picture} is not there: run python -m pages"


def written(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text)
    return page


def test_blocks_of_a_page_share_their_names(tmp_path):
    page = written(
        tmp_path,
        "```python\nx = 1\n```\n\n```text\nno\n```\n\n- item\n\n  ```python\n  assert x == 1\n  ```\n",
    )
    assert len(run(page).blocks) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# Title\n\n```python\nx = 1\nassert x == 2\n```\n", "page.md:5: AssertionError"),
        ("```python\nx = 1\n```\n\n```python\nprint(y)\n```\n", "page.md:6: NameError: name 'y'"),
        ("Text\n\n```python\nx = = 1\n```\n", "page.md:4: SyntaxError"),
        ("```python\n1 / 0", "page.md:2: ZeroDivisionError"),
        ("```python\nraise SystemExit(0)\n```\n", "page.md:2: SystemExit"),
    ],
)
def test_a_failing_block_is_named_by_page_and_line(text, message, tmp_path):
    with pytest.raises(AssertionError, match=re.escape(message)):
        run(written(tmp_path, text))


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("0.123 of 12,345\n", "0.124 of 12,345\n", True),  # a last digit
        ("0.123\n", "0.126\n", False),
        ("1e-07 or −3.5\n", "2e-07 or −3.5\n", True),
        ("−0.5\n", "0.5\n", False),
        ("torch.Size([2, 8])\n", "torch.Size([2, 7])\n", False),  # whole numbers are equal
        ("[1,2]\n", "[12]\n", False),
        ("3 heads\n", "3 rows\n", False),
        ("one\n\ntwo\n", "one\n\n  two\n", True),  # spaces do not count
        ("one\n", "one\ntwo\n", False),
    ],
)
def test_an_output_agrees_up_to_the_last_digit(expected, printed, same):
    assert agree(expected, printed) == same


def test_an_output_that_varies_agrees_in_its_words():
    assert agree("loss 2.31\n", "loss 7.05\n", varies=True)
    assert not agree("loss 2.31\n", "BLEU 2.31\n", varies=True)


def test_a_page_that_says_something_else_is_told_and_renewed(tmp_path):
    page = written(tmp_path, "- ```python\n  print(6 * 7)\n  ```\n\n  ```output\n  17\n  ```\n\nText.\n")
    page.write_text(page.read_text().replace("- ```", "  ```"))
    assert "says\n17\n" in differences(page, run(page))[0]
    renew(page)
    assert "  ```output\n  42\n  ```\n\nText." in page.read_text()
    assert not differences(page, run(page))


def test_a_page_that_is_edited_while_it_runs_is_left_alone(tmp_path):
    page = tmp_path / "page.md"
    code = f"with open({str(page)!r}, 'a') as file:\n    file.write('more')\nprint(1)"
    page.write_text(f"```python\n{code}\n```\n\n```output\n```\n")
    with pytest.raises(AssertionError, match="was edited while it ran"):
        renew(page)
    assert page.read_text().endswith("```output\n```\nmore")


@pytest.mark.parametrize("page", everything(), ids=lambda page: str(page.relative_to(ROOT)))
def test_no_code_and_no_output_of_a_page_escapes(page):
    text = page.read_text("utf-8")
    found = list(blocks(text + "\n"))
    assert len(found) == len(re.findall(r"^\s*(?:```|~~~)+\s*\{?\.?(?:python|py)\b", text, re.MULTILINE))
    assert sum(one.expected is not None for one in found) == len(
        re.findall(r"^\s*```+\s*output", text, re.MULTILINE)
    )


def test_an_output_belongs_to_the_code_right_above(tmp_path):
    one = "```python\nprint(1)\n```\n\n<!-- varies -->\n```output\n2\n```\n\n"
    other = "```python\n3\n```\n\nText.\n\n```output\n4\n```\n"
    first, second = blocks(one + other)
    assert (first.expected, first.varies, second.expected) == ("2\n", True, None)


def test_a_picture_that_nothing_draws_is_told(tmp_path):
    page = written(
        tmp_path,
        "![1](pictures/1.png) ![2](pictures/2.png)\n\n```python\nopen('pictures/2.png', 'w').close()\n```\n",
    )
    with prepared(tmp_path):
        run(page)
    assert unmade(page, tmp_path) == ["pictures/1.png"]
