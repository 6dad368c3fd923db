"""A real browser; tests that need one are skipped if there is none."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from regard.app.server.registry import Registry
from regard.app.server.state import AppState
from regard.translation.training.train import train
from tests.app.server.live import serving
from tests.browser.visit import ENCODER, WIDE, Visit, show_at
from tests.translation.folders import write
from tests.translation.small import PAIRS, small_config

NAMES = ("chromium", "chromium-browser", "google-chrome")
# Timers of a second or more fire after 50 ms, so polling is fast; shorter ones still debounce input.
HURRY = """const { setTimeout } = window;
window.setTimeout = (work, wait, ...rest) => setTimeout(work, wait < 1000 ? wait : 50, ...rest);"""
QUICK = ("training.updates=4", "training.validate_every=2", "training.accumulate=1")


@pytest.fixture(scope="package")  # not the session: other tests run their own event loops
def browser() -> Iterator:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"none of {', '.join(NAMES)} is installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


class Tab:
    """A page shared by successive tests, because opening one takes longer than most tests."""

    def __init__(self, browser: Any) -> None:
        self.browser, self.page = browser, None
        self.errors: list[str] = []  # messages on the error console
        self.dialogs: list[str] = []  # dialogs opened by scripts, which must not happen
        self.requests: list[str] = []

    def open(self) -> None:
        self.page = page = self.browser.new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("dialog", self._dismiss)
        page.on("request", lambda request: self.requests.append(request.url))
        page.add_init_script(HURRY)

    def _dismiss(self, dialog: Any) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    @contextmanager
    def lent(self, session: pytest.Session) -> Iterator[Any]:
        """Yield the page in its initial state; after a failure, the next test gets a new page."""
        if self.page is None:
            self.open()
        show_at(self.page, *WIDE)
        self.page.emulate_media(reduced_motion="reduce")  # drawing animations takes much of the time
        self.errors.clear()
        self.requests.clear()
        failed = session.testsfailed
        yield self.page
        self.page.unroute_all(behavior="ignoreErrors")
        if session.testsfailed > failed:
            self.page.close()
            self.page = None
        assert not self.dialogs


@pytest.fixture(scope="package")
def tab(browser) -> Tab:
    return Tab(browser)


@pytest.fixture
def page(tab: Tab, request: pytest.FixtureRequest) -> Iterator:
    """A page; any message on its error console fails the test."""
    with tab.lent(request.session) as page:
        yield page
        assert not tab.errors


@pytest.fixture
def rough_page(tab: Tab, request: pytest.FixtureRequest) -> Iterator:
    """A page on which requests may fail, which the browser reports on its console."""
    with tab.lent(request.session) as page:
        yield page


@pytest.fixture(scope="package")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    """A trained model, one without attention, minilm and a language model."""
    root = tmp_path_factory.mktemp("look")
    train(root / "transformer", PAIRS, config=small_config("transformer", *QUICK))
    folders = [os.fspath(root / "transformer"), os.fspath(write(root / "plain", "plain"))]
    return Registry.load([*folders, *["minilm"] * ENCODER, "stories"])


@pytest.fixture(scope="package")
def address(browser, registry: Registry) -> Iterator[str]:
    """The address of a server with small models."""
    with serving(AppState(registry)) as server:
        yield f"{server.address}/"


@pytest.fixture
def visit(page, tab: Tab, address: str) -> Iterator[Visit]:
    """A visit whose error console must stay empty, and that loads nothing from other servers."""
    visit = Visit(page, address)
    yield visit
    visit.leave()
    assert [url for url in tab.requests if not url.startswith((address, "data:", "blob:"))] == []


@pytest.fixture
def rough(rough_page, address: str) -> Iterator[Visit]:
    """A visit on which requests may fail."""
    visit = Visit(rough_page, address)
    yield visit
    visit.leave()
