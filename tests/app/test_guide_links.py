"""Sections of the page and chapters of the guide link to each other."""

import re

import pytest

from regard.app.bundle import static, static_names
from tests.changed import ROOT

hooks = pytest.importorskip("pages.hooks", reason="the packages of the guide are not installed")
NAV = re.findall(r"^ +- (\d+\. .+): path/([\w-]+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)


def test_the_page_knows_every_chapter_by_its_title() -> None:
    listed = re.findall(r'^  "?([\w-]+)"?: "(\d+\. .+)",$', static("page/guide.js"), re.MULTILINE)
    assert dict(listed) == {name: title for title, name in NAV}


def test_links_go_both_ways() -> None:
    """Every chapter that a section names exists and links back to the section."""
    texts = {name: static(f"page/sections/{name}.js") for name in static_names("page/sections")}
    linked = {name: re.search(r"chapters: \[([^\]]*)\]", text) for name, text in texts.items()}
    chapters = {name: re.findall(r'"([\w-]+)"', found[1]) for name, found in linked.items() if found}
    assert {"heads", "lookup", "order", "translate", "words"} <= set(chapters)
    assert {chapter for names in chapters.values() for chapter in names} <= {name for _, name in NAV}
    for section, names in chapters.items():
        assert all(section in hooks.sections_of(chapter) for chapter in names)
    assert hooks.sections_of("no-such-chapter") == {}
