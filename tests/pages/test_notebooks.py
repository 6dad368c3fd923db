"""The guide's notebooks run as scripts, from top to bottom."""

import re
import subprocess
import sys

import pytest

from pages.__main__ import ROOT

NOTEBOOKS = sorted(ROOT.glob("docs/notebooks/*.py"))


def test_there_are_notebooks_and_each_is_on_their_page():
    page = (ROOT / "docs/notebooks/index.md").read_text("utf-8")
    assert NOTEBOOKS
    assert not [one.name for one in NOTEBOOKS if f"({one.name})" not in page]


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda one: one.stem)
def test_notebook_runs(notebook, tmp_path):
    pytest.importorskip("marimo")
    ran = subprocess.run([sys.executable, str(notebook)], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", " ", "word " * 700], ids=["empty", "blank", "long"])
@pytest.mark.parametrize("name", ["heads", "scores"])
def test_a_sentence_that_cannot_be_read_is_told_below_its_field(name, text, tmp_path):
    """As a reader would: with another text in the field, which stays where it is."""
    pytest.importorskip("marimo")
    notebook = ROOT / f"docs/notebooks/{name}.py"
    usual = re.search(r'"The animal did not [^"]*"', notebook.read_text("utf-8"))
    (tmp_path / "edited.py").write_text(notebook.read_text("utf-8").replace(usual[0], repr(text)), "utf-8")
    program = (
        "from edited import app\n"
        "for output in app.run()[0]: print(getattr(output, 'text', '').replace(chr(10), ' '))"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    field, told = (
        [number for number, line in enumerate(ran.stdout.splitlines()) if mark in line]
        for mark in ("<marimo-text", "<marimo-callout")
    )
    assert len(field) == len(told) == 1
    assert field[0] < told[0]
    assert "Type another sentence above" in ran.stdout
    assert "Traceback" not in ran.stderr
