"""The guide's notebooks run as scripts, from top to bottom."""

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
