"""The guide's notebooks run as scripts."""

import re
import subprocess
import sys

import pytest

from pages.__main__ import ROOT

NOTEBOOKS = sorted(ROOT.glob("docs/notebooks/*.py"))


def test_every_notebook_is_listed():
    page = (ROOT / "docs/notebooks/index.md").read_text("utf-8")
    assert NOTEBOOKS
    assert not [path.name for path in NOTEBOOKS if f"({path.name})" not in page]


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(notebook, tmp_path):
    pytest.importorskip("marimo")
    result = subprocess.run([sys.executable, str(notebook)], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", " ", "word " * 700], ids=["empty", "blank", "long"])
@pytest.mark.parametrize("name", ["heads", "scores"])
def test_invalid_sentence_shows_a_message_below_the_field(name, text, tmp_path):
    """The test replaces the text in the field; the field must stay above the message."""
    pytest.importorskip("marimo")
    notebook = ROOT / f"docs/notebooks/{name}.py"
    default = re.search(r'"The animal did not [^"]*"', notebook.read_text("utf-8"))
    (tmp_path / "edited.py").write_text(notebook.read_text("utf-8").replace(default[0], repr(text)), "utf-8")
    program = (
        "from edited import app\n"
        "for output in app.run()[0]: print(getattr(output, 'text', '').replace(chr(10), ' '))"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    field, message = (
        [number for number, line in enumerate(result.stdout.splitlines()) if mark in line]
        for mark in ("<marimo-text", "<marimo-callout")
    )
    assert len(field) == len(message) == 1
    assert field[0] < message[0]
    assert "Type another sentence above" in result.stdout
    assert "Traceback" not in result.stderr
