"""The built guide: whole, and sufficient unto itself."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from markdown import Markdown

from pages.__main__ import ROOT
from pages.hooks import Fitting, on_page_content

LOADS = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src")}  # without a click
LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<path>[^)\s#]+)[^)]*\)")


class Read(HTMLParser):
    """What a page refers to, and the places in it that others may refer to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.references: list[tuple[str, str, str]] = []
        self.places: set[str] = set()
        self.feed(page.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.references.append((tag, name, value))
            if name in ("id", "name") and value:
                self.places.add(value)


def dead(site: Path) -> list[str]:
    """References to pages, files or places that are not there."""
    read = {page: Read(page) for page in site.rglob("*.html") if page.name != "404.html"}
    found = []
    for page, one in read.items():
        for _, _, reference in one.references:
            parts = urlsplit(reference)
            if parts.scheme or parts.netloc:
                continue
            to = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            to = to / "index.html" if to.is_dir() else to
            place = unquote(parts.fragment)
            there = to.exists() and (not place or to not in read or place in read[to].places)
            if not there:
                found.append(f"{page.relative_to(site)}: {reference}")
    return found


def test_no_link_is_dead(site):
    assert not dead(site)


def test_a_dead_link_is_found(tmp_path):
    links = (f'<a href="{to}">there</a>' for to in ("#top", "b.html", "#no"))
    (tmp_path / "a.html").write_text(f'<h1 id="top"></h1>{"".join(links)}')
    assert dead(tmp_path) == ["a.html: b.html", "a.html: #no"]


def test_nothing_is_loaded_from_elsewhere(site):
    loaded = {
        reference
        for page in site.rglob("*.html")
        for tag, name, reference in Read(page).references
        if (tag, name) in LOADS and urlsplit(reference).netloc
    }
    assert not loaded


def test_formulas_are_mathml(site):
    pages = [page.read_text("utf-8") for page in site.rglob("*.html")]
    assert any("<math" in page for page in pages)
    for page in pages:
        assert "arithmatex" not in page
        assert not re.search(r"<m[ion]>(\\|&amp;|&)</?", page)  # what the converter did not understand


def test_tables_and_code_are_marked_for_phones():
    table = "| name | file |\n|---|---|\n| `x` | `models/layers/attention.py` |\n\n"
    text = table + "`short` and `a_longer_piece_of_code(x)`."
    html = Markdown(extensions=["tables", Fitting()]).convert(text)
    assert '<td data-label="file"><code>models/<wbr />heads.<wbr />py</code></td>' in html
    assert '<code class="short">short</code>' in html
    assert "<code>a_longer_piece_of_code(x)</code>" in html


def test_a_formula_becomes_mathml():
    html = on_page_content(r'<p>so <span class="arithmatex">\(a &lt; \tau\)</span>.</p>')
    assert html.startswith("<p>so <math")
    assert "<mi>τ</mi>" in html or "&#x003C4;" in html


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_the_repository_lead_somewhere(name):
    found = (link["path"] for link in LINK.finditer((ROOT / name).read_text("utf-8")))
    assert not [path for path in found if "://" not in path and not (ROOT / path).exists()]
