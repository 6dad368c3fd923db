"""`regard site`."""

import os

from regard.app.site.build import DATES
from tests.cli.running import error_of, run


def test_a_site_is_written(tmp_path, capsys):
    run("site", str(DATES), str(tmp_path / "site"))
    out = " ".join(capsys.readouterr().out.split())
    assert "index.html" in out
    assert "file://" in out
    assert os.listdir(tmp_path / "site") == ["index.html"]


def test_folders_of_others_are_refused(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert "has files, but was not written by regard site" in error_of(capsys, "site", str(tmp_path))
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_models_that_do_not_run_in_a_browser_are_refused(tmp_path, capsys):
    assert "does not exist" in error_of(capsys, "site", "no-such-model", str(tmp_path / "site"))
    assert os.listdir(tmp_path) == []
