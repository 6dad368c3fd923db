"""A real browser; tests that need one are skipped if there is none."""

import shutil
from collections.abc import Iterator

import pytest

from tests.browser.visit import Visit, served

NAMES = ("chromium", "chromium-browser", "google-chrome")


def _program() -> str:
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"none of {', '.join(NAMES)} is installed")
    return program


@pytest.fixture(scope="module")  # not longer: other tests run their own event loops
def browser() -> Iterator:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = _program()
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser) -> Iterator:
    """An empty page; any message on its error console fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(10_000)
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    context.close()
    assert not errors


@pytest.fixture(scope="session")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `regard look` with small models."""
    _program()
    with served(tmp_path_factory.mktemp("look")) as address:
        yield address


@pytest.fixture
def visit(page, address: str) -> Visit:
    """A visit whose error console must stay empty."""
    return Visit(page, address)


@pytest.fixture
def rough(browser, address: str) -> Iterator[Visit]:
    """A visit on which requests may fail, which the browser reports on its console."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(10_000)
    yield Visit(page, address)
    context.close()
