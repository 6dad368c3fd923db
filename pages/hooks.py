"""What the site's build does beyond Markdown: formulas become MathML, which needs no script."""

import re
from html import unescape
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(html: str, **_: Any) -> str:
    """Replace the formulas that Markdown has marked."""
    return FORMULA.sub(_mathml, html)


def _mathml(formula: re.Match[str]) -> str:
    display = "block" if formula[2] == "[" else "inline"
    return convert(unescape(formula[3]).strip(), display=display)
