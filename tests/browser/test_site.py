"""The built guide in a browser: on wide and narrow screens, light and dark."""

import pytest

from pages.__main__ import ROOT
from pages.runner import code_blocks
from tests.browser.visit import screenshot

DOCS = ROOT / "docs"
PAGES = sorted(page.relative_to(DOCS).with_suffix(".html").as_posix() for page in DOCS.rglob("*.md"))
SCREENS = {"wide-light": (1280, 900, "light"), "narrow-dark": (360, 740, "dark")}

# What can be scrolled sideways: the page, or a piece of code, a table or a formula within it.
WIDE = """() => {
    const kinds = [".md-content pre > code", ".md-typeset__scrollwrap", "math[display=block]"];
    const boxes = document.querySelectorAll(kinds.join());
    const wide = (one) => one.scrollWidth > one.clientWidth + 1;
    return [document.scrollingElement, ...boxes].filter(wide).map((one) => one.textContent.slice(0, 99));
}"""
MISSING = "() => [...document.images].filter((one) => !one.naturalWidth).map((one) => one.src)"


@pytest.fixture(scope="module")
def screens(browser):
    """A page for each screen, in which the pages of the guide are opened one after the other."""
    pages = {}
    for kind, (width, height, scheme) in SCREENS.items():
        viewport = {"width": width, "height": height}
        pages[kind] = browser.new_page(viewport=viewport, color_scheme=scheme)
    yield pages
    for page in pages.values():
        page.close()


@pytest.mark.parametrize("name", PAGES)
def test_pages_fit_and_images_load(site, screens, name):
    for kind, page in screens.items():
        page.goto((site / name).as_uri())
        screenshot(page, f"guide-{name.replace('/', '-')}-{kind}", full_page=True)
        assert not page.evaluate(WIDE)
        assert not page.evaluate(MISSING)
        scheme = "slate" if kind.endswith("dark") else "default"
        assert page.locator("body").get_attribute("data-md-color-scheme") == scheme


def test_copied_code_equals_the_source(site, page):
    """Each line is an element of its own on the page."""
    page.goto((site / "path/order.html").as_uri())
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
