"""The architecture page lists exactly the existing files."""

import re

import pytest

from pages.__main__ import ROOT

TEXT = (ROOT / "docs/reference/architecture.md").read_text("utf-8")
SOURCE = ROOT / "src/regard"
PACKAGES = sorted(path.parent.name for path in SOURCE.glob("*/__init__.py") if path.parent.name != "cli")


@pytest.mark.parametrize("package", PACKAGES)
def test_page_lists_exactly_the_files_of_a_package(package):
    section = re.search(rf"^## src/regard/{package}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    listed = re.findall(r"`([\w/]+\.py)`", section[1])
    folder = SOURCE / package
    existing = [str(path.relative_to(folder)) for path in folder.rglob("*.py") if path.name != "__init__.py"]
    assert sorted(listed) == sorted(existing)


def test_folders_have_at_most_18_modules():
    for folder in {path.parent for path in SOURCE.rglob("*.py")}:
        assert len([*folder.glob("*.py")]) <= 18, folder
