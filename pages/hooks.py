"""What the site's build does beyond Markdown: formulas that need no script, and tables that fit phones."""

import re
from html import unescape
from typing import Any
from xml.etree.ElementTree import Element, SubElement

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
SHORT = 24  # characters of code that stay on one line


def on_config(config: Any, **_: Any) -> Any:
    """Add what follows to Markdown."""
    config.markdown_extensions.append(Fitting())
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A page that stands alone needs no list of its neighbours."""
    if page.parent is None:
        page.meta.setdefault("hide", ["navigation"])
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Replace the formulas that Markdown has marked by MathML."""
    return FORMULA.sub(_mathml, html)


def _mathml(formula: re.Match[str]) -> str:
    display = "block" if formula[2] == "[" else "inline"
    return convert(unescape(formula[3]).strip(), display=display)


class Fitting(Extension):
    """Marks tables and code so that the style sheet can lay them out on any screen."""

    def extendMarkdown(self, md: Markdown) -> None:
        """As Markdown asks for."""
        md.treeprocessors.register(_Fit(md), "fitting", 0)  # after all others


class _Fit(Treeprocessor):
    def run(self, root: Element) -> None:
        for table in root.iter("table"):
            _label(table)
        in_tables = {code for cell in root.iter("td") for code in cell.iter("code")}
        in_blocks = {code for block in root.iter("pre") for code in block.iter("code")}
        for code in {*root.iter("code")} - in_blocks:
            if code in in_tables:
                _breakable(code)
            elif len("".join(code.itertext())) <= SHORT:
                code.set("class", f"{code.get('class', '')} short".strip())


def _label(table: Element) -> None:
    """Each cell knows the heading of its column, which stands before it where a row becomes a list."""
    headings = ["".join(heading.itertext()) for heading in table.iter("th")]
    for row in table.iter("tr"):
        for cell, heading in zip(row.findall("td"), headings, strict=False):
            if heading:
                cell.set("data-label", heading)


def _breakable(code: Element) -> None:
    """A long name may be broken after a slash, a dot, a bar or an underscore, and nowhere else."""
    if not code.text or len(code):
        return
    first, *others = re.split(r"(?<=[/._|])(?=\w)", code.text)
    code.text = first
    for part in others:
        SubElement(code, "wbr").tail = part
