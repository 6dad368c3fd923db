"""MkDocs hooks: formulas as MathML, tables that fit on phones, live figures and links to `regard look`.

A comment `<!-- live: order?positions=rotary -->` in a page becomes a frame with this section of the static
site that `regard site` writes, in which models run in the browser.
"""

import re
from html import escape, unescape
from pathlib import Path, PurePosixPath
from typing import Any
from xml.etree.ElementTree import Element, SubElement

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
LIVE = re.compile(r"^<!-- live: (?P<address>[a-z]+(?:\?[^\s>]+)?) -->$", re.M)
LIVE_FOLDER = "live"  # folder of the static site in the guide
SECTIONS = Path(__file__).parents[1] / "src/regard/app/static/page/sections"
ABOUT = re.compile(r'^export const about = \{.*title: "([^"]+)".*chapters: \[([^\]]*)\]', re.MULTILINE)
LOOK = "http://127.0.0.1:8000/"  # the default address of regard look
MAX_NOWRAP = 24  # inline code of up to this many characters is not wrapped


def on_config(config: Any, **_: Any) -> Any:
    """Register the Markdown extension."""
    config.markdown_extensions.append(ResponsiveMarkup())
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Hide the navigation on pages outside any section, insert live figures, and link to `regard look`."""
    if page.parent is None:
        page.meta.setdefault("hide", ["navigation"])
    root = "../" * page.url.count("/")
    markdown = LIVE.sub(lambda figure: live_figure(figure["address"], root), markdown)
    sections = sections_of(PurePosixPath(page.file.src_uri).stem)
    if not page.file.src_uri.startswith("path/") or not sections:
        return markdown
    links = " and ".join(f"[{title}]({LOOK}#{name})" for name, title in sections.items())
    return f"{markdown}\n\n---\n\nTry it: run `regard look` and open {links}.\n"


def live_figure(address: str, root: str) -> str:
    """Return a frame with a section of the static site. address: section?state; root: path to the guide."""
    name = address.partition("?")[0]
    link = escape(f"{root}{LIVE_FOLDER}/index.html#{address}")
    frame = f'<iframe src="{link}" title="Live figure: {name}" loading="lazy"></iframe>'
    caption = f'This figure runs in your browser: change it. <a href="{link}">Open it in its own page.</a>'
    return f'<figure class="live">{frame}<figcaption>{caption}</figcaption></figure>'


def on_post_build(config: Any, **_: Any) -> None:
    """Write the static site that the live figures show."""
    from regard.app.site.build import write_site

    write_site([], Path(config.site_dir) / LIVE_FOLDER, guide="..")


def sections_of(chapter: str) -> dict[str, str]:
    """Return the names and titles of the sections of `regard look` that link to a chapter."""
    found = {}
    for path in sorted(SECTIONS.glob("*.js")):
        about = ABOUT.search(path.read_text("utf-8"))
        if about and f'"{chapter}"' in about[2]:
            found[path.stem] = about[1]
    return found


def on_page_content(html: str, **_: Any) -> str:
    """Convert formulas to MathML."""
    return FORMULA.sub(_mathml, html)


def _mathml(formula: re.Match[str]) -> str:
    display = "block" if formula[2] == "[" else "inline"
    return convert(unescape(formula[3]).strip(), display=display)


class ResponsiveMarkup(Extension):
    """Marks tables and inline code for the style sheet, which adapts them to small screens."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Register the tree processor."""
        md.treeprocessors.register(_ResponsiveTree(md), "responsive", 0)  # after all others


class _ResponsiveTree(Treeprocessor):
    def run(self, root: Element) -> None:
        for table in root.iter("table"):
            _label(table)
        in_tables = {code for cell in root.iter("td") for code in cell.iter("code")}
        in_blocks = {code for block in root.iter("pre") for code in block.iter("code")}
        for code in {*root.iter("code")} - in_blocks:
            if code in in_tables:
                _breakable(code)
            elif len("".join(code.itertext())) <= MAX_NOWRAP:
                code.set("class", f"{code.get('class', '')} short".strip())


def _label(table: Element) -> None:
    """Store each column heading in its cells, because on phones a row becomes a list with headings."""
    headings = ["".join(heading.itertext()) for heading in table.iter("th")]
    for row in table.iter("tr"):
        for cell, heading in zip(row.findall("td"), headings, strict=False):
            if heading:
                cell.set("data-label", heading)


def _breakable(code: Element) -> None:
    """Allow line breaks after a slash, dot, bar or underscore only."""
    if not code.text or len(code):
        return
    first, *others = re.split(r"(?<=[/._|])(?=\w)", code.text)
    code.text = first
    for part in others:
        SubElement(code, "wbr").tail = part
