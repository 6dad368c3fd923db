"""The architecture's page names the files that there are."""

import re

import pytest

from pages.__main__ import ROOT

TEXT = (ROOT / "docs/reference/architecture.md").read_text("utf-8")


@pytest.mark.parametrize("room", ["mechanism", "models", "translation", "view"])
def test_every_file_of_a_room_is_named_and_no_other(room):
    section = re.search(rf"^## src/regard/{room}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    named = re.findall(r"`(\w+\.py)`", section[1])
    there = [path.name for path in (ROOT / "src/regard" / room).glob("*.py") if path.name != "__init__.py"]
    assert sorted(named) == sorted(there)
