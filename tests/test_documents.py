"""The python blocks of README.md and docs/ run as they stand, each file from top to bottom."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("README.md"), *ROOT.glob("docs/**/*.md")])

# A fence may be indented, in a list for example; one that is never closed runs to the end of the file.
BLOCK = re.compile(r"^(?P<indent> *)```python\b.*\n(?P<code>(?:.*\n)*?)(?:(?P=indent)```|\Z)", re.MULTILINE)


def run(document: Path) -> int:
    """Run every python block in one namespace, and return how many there were."""
    text = document.read_text("utf-8") + "\n"
    namespace = {"__name__": "__main__"}
    blocks = list(BLOCK.finditer(text))
    for block in blocks:
        above = text.count("\n", 0, block.start("code"))
        code = re.sub(f"^{block['indent']}", "", block["code"], flags=re.MULTILINE)
        try:
            # blank lines above the code give it the line numbers of its document
            exec(compile("\n" * above + code, document, "exec"), namespace)
        except Exception as error:
            line = failing_line(error, document) or above + 1
            raise AssertionError(f"{document}:{line}: {type(error).__name__}: {error}") from error
    return len(blocks)


def failing_line(error: Exception, document: Path) -> int | None:
    """The last line of the document that the error passed through."""
    if isinstance(error, SyntaxError):
        return error.lineno
    line, frame = None, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == str(document):
            line = frame.tb_lineno
        frame = frame.tb_next
    return line


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_document_runs(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(document)


def test_blocks_of_a_document_share_their_names(tmp_path):
    document = tmp_path / "good.md"
    document.write_text(
        "```python\nx = 1\n```\n\n```text\nnot python\n```\n\n- item\n\n  ```python\n  assert x == 1\n  ```\n"
    )
    assert run(document) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# Title\n\n```python\nx = 1\nassert x == 2\n```\n", "bad.md:5: AssertionError"),
        ("```python\nx = 1\n```\n\n```python\nprint(y)\n```\n", "bad.md:6: NameError: name 'y'"),
        ("Text\n\n```python\nx = = 1\n```\n", "bad.md:4: SyntaxError"),
        ("```python\n1 / 0", "bad.md:2: ZeroDivisionError"),
    ],
)
def test_a_failing_block_is_named_by_file_and_line(text, message, tmp_path):
    document = tmp_path / "bad.md"
    document.write_text(text)
    with pytest.raises(AssertionError, match=re.escape(message)):
        run(document)
