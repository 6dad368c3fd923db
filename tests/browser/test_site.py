"""The built guide in a browser: on wide and narrow screens, light and dark."""

import pytest

from pages.__main__ import ROOT
from pages.runner import code_blocks
from tests.browser.visit import redraw, screenshot, show_at

pytestmark = pytest.mark.slow  # builds the guide

DOCS = ROOT / "docs"
PAGES = sorted(page.relative_to(DOCS).with_suffix(".html").as_posix() for page in DOCS.rglob("*.md"))
NARROW, WIDE_SCREEN = (360, 740, "dark"), (1280, 900, "dark")

# Elements that scroll sideways: the page, or a code block, table or formula in it.
WIDE = """() => {
    const kinds = [".md-content pre > code", ".md-typeset__scrollwrap", "math[display=block]"];
    const boxes = document.querySelectorAll(kinds.join());
    const wide = (one) => one.scrollWidth > one.clientWidth + 1;
    return [document.scrollingElement, ...boxes].filter(wide).map((one) => one.textContent.slice(0, 99));
}"""
MISSING = "() => [...document.images].filter((one) => !one.naturalWidth).map((one) => one.src)"


def faults(page, name: str) -> list[str]:
    """Return missing images, and elements that are too wide on a narrow or a wide screen."""
    found = page.evaluate(MISSING)
    for screen in (NARROW, WIDE_SCREEN):
        show_at(page, *screen)
        redraw(page)
        screenshot(page, f"guide-{name.replace('/', '-')}-{screen[0]}", full_page=True)
        found += page.evaluate(WIDE)
    return found


def test_pages_fit_and_images_load(site, page):
    wrong = {}
    for name in PAGES:
        page.goto((site / name).as_uri())
        if found := faults(page, name):
            wrong[name] = found
    assert wrong == {}


@pytest.mark.parametrize(("scheme", "shown"), [("light", "default"), ("dark", "slate")])
def test_the_scheme_of_the_system_is_used(site, browser, scheme, shown):
    with browser.new_context(color_scheme=scheme) as fresh:  # the browser remembers the color scheme
        page = fresh.new_page()
        page.goto((site / "index.html").as_uri())
        assert page.locator("body").get_attribute("data-md-color-scheme") == shown


def test_copied_code_equals_the_source(site, page):
    """On the page, each line is a separate element."""
    page.goto((site / "path/order.html").as_uri())
    # folded code has no text until it is opened
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    copied = page.evaluate(
        """() => [...document.querySelectorAll(".language-python code")].map((code) => {
            code.setAttribute("data-md-copying", "");
            return code.innerText.trim();
        })"""
    )
    written = [block.code.strip() for block in code_blocks((DOCS / "path/order.md").read_text("utf-8"))]
    assert copied == written


def test_search_needs_no_server(site, page):
    page.goto((site / "index.html").as_uri())
    page.click("input.md-search__input")
    page.get_by_text("Type to start searching").wait_for()
    page.keyboard.type("sparsemax")
    page.wait_for_selector(".md-search-result__item a")
    assert "normalizer" in page.locator(".md-search-result__list").inner_text().lower()
