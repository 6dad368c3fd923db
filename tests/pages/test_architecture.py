"""The architecture page names the files that exist."""

import re

import pytest

from pages.__main__ import ROOT

TEXT = (ROOT / "docs/reference/architecture.md").read_text("utf-8")
SOURCE = ROOT / "src/regard"
PACKAGES = sorted(path.parent.name for path in SOURCE.glob("*/__init__.py") if path.parent.name != "cli")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_file_of_a_package_is_named_and_no_other(package):
    section = re.search(rf"^## src/regard/{package}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    named = re.findall(r"`([\w/]+\.py)`", section[1])
    folder = SOURCE / package
    there = [str(path.relative_to(folder)) for path in folder.rglob("*.py") if path.name != "__init__.py"]
    assert sorted(named) == sorted(there)


def test_no_folder_is_crowded():
    for folder in {path.parent for path in SOURCE.rglob("*.py")}:
        assert len([*folder.glob("*.py")]) <= 18, folder
