"""The guide's pages run, and their outputs and pictures match."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pages import verified
from pages.__main__ import ROOT, all_pages, main, update
from pages.runner import code_blocks, differences, outputs_match, page_environment, problems, run, undrawn
from pages.verified import is_verified

every_page = pytest.mark.parametrize("page", all_pages(), ids=lambda page: page.relative_to(ROOT).as_posix())


@every_page
def test_changed_page_runs_and_its_outputs_match(page, tmp_path):
    if not is_verified(page):
        check(page, tmp_path)


@pytest.mark.slow
@every_page
def test_page_runs_and_its_outputs_match(page, tmp_path):
    check(page, tmp_path)


def check(page: Path, folder: Path) -> None:
    with page_environment(folder):
        result = run(page)
    assert not problems(page, folder, result)


def write_page(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text)
    return page


def test_blocks_of_a_page_share_a_namespace(tmp_path):
    page = write_page(
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
def test_failing_block_is_reported_with_page_and_line(text, message, tmp_path):
    with pytest.raises(AssertionError, match=re.escape(message)):
        run(write_page(tmp_path, text))


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("0.123 of 12,345\n", "0.124 of 12,345\n", True),  # last digit
        ("0.123\n", "0.126\n", False),
        ("1e-07 or −3.5\n", "2e-07 or −3.5\n", True),
        ("−0.5\n", "0.5\n", False),
        ("torch.Size([2, 8])\n", "torch.Size([2, 7])\n", False),  # integers must be equal
        ("[1,2]\n", "[12]\n", False),
        ("3 heads\n", "3 rows\n", False),
        ("one\n\ntwo\n", "one\n\n  two\n", True),  # whitespace is ignored
        ("one\n", "one\ntwo\n", False),
    ],
)
def test_outputs_match_up_to_the_last_digit(expected, printed, same):
    assert outputs_match(expected, printed) == same


def test_varying_outputs_match_in_their_words():
    assert outputs_match("loss 2.31\n", "loss 7.05\n", varies=True)
    assert not outputs_match("loss 2.31\n", "BLEU 2.31\n", varies=True)


def test_outdated_output_is_reported_and_updated(tmp_path):
    page = write_page(tmp_path, "- ```python\n  print(6 * 7)\n  ```\n\n  ```output\n  17\n  ```\n\nText.\n")
    page.write_text(page.read_text().replace("- ```", "  ```"))
    assert "shows\n17\n" in differences(page, run(page))[0]
    update(page)
    assert "  ```output\n  42\n  ```\n\nText." in page.read_text()
    assert not differences(page, run(page))


def test_page_edited_while_running_is_not_overwritten(tmp_path):
    page = tmp_path / "page.md"
    code = f"with open({str(page)!r}, 'a') as file:\n    file.write('more')\nprint(1)"
    page.write_text(f"```python\n{code}\n```\n\n```output\n```\n")
    with pytest.raises(AssertionError, match="was edited while it ran"):
        update(page)
    assert page.read_text().endswith("```output\n```\nmore")


def test_every_code_block_and_output_is_parsed():
    for page in all_pages():
        text = page.read_text("utf-8")
        blocks = list(code_blocks(text + "\n"))
        code = re.findall(r"^\s*(?:```|~~~)+\s*\{?\.?(?:python|py)\b", text, re.MULTILINE)
        outputs = re.findall(r"^\s*```+\s*output", text, re.MULTILINE)
        assert len(blocks) == len(code), page
        assert sum(block.expected is not None for block in blocks) == len(outputs), page


def test_output_belongs_to_the_code_directly_above():
    adjacent = "```python\nprint(1)\n```\n\n<!-- varies -->\n```output\n2\n```\n\n"
    separated = "```python\n3\n```\n\nText.\n\n```output\n4\n```\n"
    first, second = code_blocks(adjacent + separated)
    assert (first.expected, first.varies, second.expected) == ("2\n", True, None)


def test_undrawn_picture_is_reported(tmp_path):
    page = write_page(
        tmp_path,
        "![1](pictures/1.png) ![2](pictures/2.png)\n\n```python\nopen('pictures/2.png', 'w').close()\n```\n",
    )
    with page_environment(tmp_path):
        run(page)
    assert undrawn(page, tmp_path) == ["pictures/1.png"]


def test_a_page_is_verified_until_it_or_its_code_changes(tmp_path, monkeypatch):
    """Changes to comments and docstrings do not count as changes to code."""
    code, other, page, kernel = (
        tmp_path / name for name in ("src/a.py", "src/b.py", "page.md", "kernels/a.h")
    )
    code.parent.mkdir()
    kernel.parent.mkdir()
    kernel.write_text("int a;  // old\n")
    code.write_text('"""Old."""\nx = 1  # old\n')
    other.write_text("y = 1\n")
    page.write_text("```python\n1\n```\n")
    monkeypatch.setattr(verified, "ROOT", tmp_path)
    monkeypatch.setattr(verified, "PACKAGE", code.parent)
    monkeypatch.setattr(verified, "RECORD", tmp_path / "verified.txt")
    monkeypatch.setitem(sys.modules, "of_the_page", SimpleNamespace(__file__=str(code)))

    def current() -> bool:
        verified._of_code.cache_clear()
        verified._of_bytes.cache_clear()
        verified._of_kernel.cache_clear()
        return is_verified(page)

    assert not current()
    verified.record(page)
    assert current()
    code.write_text('"""New."""\nx = 1  # new\n')
    other.write_text("y = 2\n")
    kernel.write_text("int a;\n")
    assert current()
    code.write_text("x = 2\n")
    assert not current()
    verified.record(page)
    kernel.write_text("int b;\n")
    assert not current()
    verified.record(page)
    page.write_text("```python\n2\n```\n")
    assert not current()
    verified.record(page)
    code.unlink()
    assert not current()


@pytest.mark.parametrize("status", [1, -9])
def test_one_failed_page_fails_the_command(status, tmp_path, monkeypatch):
    paths = [tmp_path / "killed.md", tmp_path / "good.md"]
    for path in paths:
        path.touch()
    codes = iter([status, 0])
    monkeypatch.setattr("subprocess.run", lambda command: SimpleNamespace(returncode=next(codes)))
    assert main(list(map(str, paths))) == 1
