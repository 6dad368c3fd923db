"""The built guide has no dead links and loads nothing from other hosts."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from markdown import Markdown

from pages.__main__ import ROOT
from pages.hooks import LIVE_FOLDER, SECTIONS, ResponsiveMarkup, on_page_content

LOADS = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src")}  # loaded without a click
LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<path>[^)\s#]+)[^)]*\)")


class ParsedPage(HTMLParser):
    """The references and anchors of a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.references: list[tuple[str, str, str]] = []
        self.anchors: set[str] = set()
        self.text = page.read_text("utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.references.append((tag, name, value))
            if name in ("id", "name") and value:
                self.anchors.add(value)


def parse(site: Path) -> dict[Path, ParsedPage]:
    return {page: ParsedPage(page) for page in site.rglob("*.html")}


@pytest.fixture(scope="module")
def parsed(site: Path) -> dict[Path, ParsedPage]:
    return parse(site)


def dead_links(parsed: dict[Path, ParsedPage]) -> list[str]:
    """Return references to missing pages, files or anchors."""
    dead = []
    for page, links in parsed.items():
        for _, _, reference in links.references if page.name != "404.html" else ():
            parts = urlsplit(reference)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            valid = not anchor or target not in parsed or anchor in parsed[target].anchors
            if target.parent.name == LIVE_FOLDER:  # a section and its state
                valid |= (SECTIONS / f"{anchor.partition('?')[0]}.js").exists()
            if not (target.exists() and valid):
                dead.append(f"{page.name}: {reference}")
    return dead


@pytest.mark.slow
def test_no_link_is_dead(parsed, tmp_path):
    assert not dead_links(parsed)
    links = (f'<a href="{target}">link</a>' for target in ("#top", "b.html", "#no"))
    (tmp_path / "a.html").write_text(f'<h1 id="top"></h1>{"".join(links)}')
    assert dead_links(parse(tmp_path)) == ["a.html: b.html", "a.html: #no"]
    (tmp_path / LIVE_FOLDER).mkdir()
    (tmp_path / LIVE_FOLDER / "index.html").write_text("")
    sections = (f'<a href="live/index.html#{name}?a=b">link</a>' for name in ("order", "no-section"))
    (tmp_path / "a.html").write_text("".join(sections))
    assert dead_links(parse(tmp_path)) == ["a.html: live/index.html#no-section?a=b"]


@pytest.mark.slow
def test_nothing_is_loaded_from_other_hosts_and_formulas_are_mathml(parsed):
    assert any("<math" in page.text for page in parsed.values())
    for page in parsed.values():
        loaded = (url for tag, name, url in page.references if (tag, name) in LOADS)
        assert not [url for url in loaded if urlsplit(url).netloc]
        assert "arithmatex" not in page.text
        assert not re.search(r"<m[ion]>(\\|&amp;|&)</?", page.text)  # unconverted LaTeX


def test_tables_and_inline_code_are_marked_for_small_screens():
    table = "| name | file |\n|---|---|\n| `x` | `models/layers/attention.py` |\n\n"
    text = table + "`short` and `a_longer_piece_of_code(x)`."
    html = Markdown(extensions=["tables", ResponsiveMarkup()]).convert(text)
    assert '<td data-label="file"><code>models/<wbr />layers/<wbr />attention.<wbr />py</code></td>' in html
    assert '<code class="short">short</code>' in html
    assert "<code>a_longer_piece_of_code(x)</code>" in html


def test_formula_becomes_mathml():
    html = on_page_content(r'<p>so <span class="arithmatex">\(a &lt; \tau\)</span>.</p>')
    assert html.startswith("<p>so <math")
    assert "<mi>τ</mi>" in html or "&#x003C4;" in html


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_repository_files_exist(name):
    paths = (link["path"] for link in LINK.finditer((ROOT / name).read_text("utf-8")))
    assert not [path for path in paths if "://" not in path and not (ROOT / path).exists()]
