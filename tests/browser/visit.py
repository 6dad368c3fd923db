"""Visits to the page of `regard look`, and fake responses from its server."""

import os
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote, urlencode

import pytest

from regard.models.encoders.pretrained import MINILM

HOSTILE = "</script><img src=x onerror=alert(1)>"
SHOTS = os.environ.get("REGARD_SHOTS")  # folder for screenshots, for visual inspection; they are not compared
SIZES = ((1280, 900, "light"), (1600, 900, "dark"), (360, 740, "light"), (360, 740, "dark"))
SIZES = SIZES if SHOTS else SIZES[::3]  # one wide and one narrow: the color scheme does not change the layout
WIDE = SIZES[0]
PATIENCE = 60  # seconds
ENCODER = find_spec(MINILM) is not None
needs_encoder = pytest.mark.skipif(not ENCODER, reason="minilm is not installed")
# Opens a section as if its address had been entered; the previous one closes at once.
OPEN = """(address) => {
    document.querySelector("#section").replaceChildren();
    history.replaceState(null, "", address);
    dispatchEvent(new HashChangeEvent("hashchange"));
}"""
# Waits inside the page, which is faster than polling it; the page's policy forbids page.wait_for_function.
WAIT = """new Promise((resolve, reject) => {{
    const end = performance.now() + {milliseconds};
    const check = () => {{
        try {{
            const holds = {condition};
            if (holds || performance.now() > end) resolve(Boolean(holds));
            else setTimeout(check, 20);
        }} catch (error) {{
            reject(error);
        }}
    }};
    check();
}})"""
UNNAMED = """() => [...document.querySelectorAll("main :is(button, input, select)")]
    .filter((node) => !node.labels?.length && !node.ariaLabel && !node.textContent.trim())
    .map((node) => node.outerHTML)"""


def screenshot(page, name: str, **options) -> None:
    """Save a screenshot if REGARD_SHOTS is set; each takes a while."""
    if SHOTS:
        page.screenshot(path=Path(SHOTS) / f"{name}.png", **options)


def redraw(page) -> None:
    """Wait until the page has been redrawn."""
    page.evaluate("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")


def until(page, holds: Callable[[], object], condition: str = "a condition") -> None:
    """Wait until this JavaScript expression is true."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, f"not within {PATIENCE} s: {condition}"
        page.wait_for_timeout(30)


def show_at(page, width: int, height: int, scheme: str) -> None:
    """Show a page at another screen size."""
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": height})


class Visit:
    """An open page."""

    def __init__(self, page, address: str) -> None:
        self.page, self.address = page, address

    def enter(self, section: str, **state: str) -> None:
        """Open a section by its address."""
        address = f"#{section}?{urlencode(state, quote_via=quote)}".rstrip("?")
        if self.page.url.startswith(self.address):
            self.page.evaluate(OPEN, address)
        else:
            self.page.goto(self.address + address)
        self.settle()

    def leave(self) -> None:
        """Close the open section, which cancels its requests."""
        if self.page.url.startswith(self.address):
            self.page.evaluate(OPEN, "#lookup")

    def settle(self) -> None:
        """Wait until the section is open and nothing is loading."""
        self.page.wait_for_selector("#section .panel .answer > *")
        self.until("!document.querySelector('.panel[aria-busy=true]')")

    def look(self, name: str, sizes: tuple = SIZES) -> None:
        """Show the page wide and narrow, light and dark; nothing overflows and every control has a name."""
        assert self.page.evaluate(UNNAMED) == []
        for width, height, scheme in sizes:
            show_at(self.page, width, height, scheme)
            redraw(self.page)  # charts
            redraw(self.page)
            screenshot(self.page, f"{name}-{width}-{scheme}", full_page=True)
            wide = self.page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"{name} is {wide} pixels wide on a screen of {width}"
        show_at(self.page, *WIDE)

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def until(self, condition: str) -> None:
        """Wait until this JavaScript is true."""
        holds = self.page.evaluate(WAIT.format(condition=condition, milliseconds=1000 * PATIENCE))
        assert holds, f"not within {PATIENCE} s: {condition}"

    def answer(self, path: str, body: dict, status: int = 200) -> None:
        """Replace the server's response."""
        self.page.route(f"**/api/{path}", lambda route: route.fulfill(json=body, status=status))

    def no_markup_came_of_text(self) -> None:
        assert self.page.locator("img[src=x]").count() == 0


def translation(text: str) -> dict:
    """Return a response of /api/translate with this text in every field."""
    item = {
        "source": text,
        "text": text,
        "score": 0.0,
        "tokens": [text],
        "note": text,
        "reason": text,
        "warning": text,
    }
    more = {"alternatives": [{"text": f"{text} 2", "score": -1.0}], "alignment": None}
    return {"translations": [item | more], "view": None}


def model_info(text: str) -> dict:
    """Return an entry of /api/models with this text in every field."""
    numbers = {"attends": True, "layers": 1, "heads": 1, "max_tokens": None}
    return {
        "name": text,
        "kind": "translator",
        "about": text,
        "languages": text,
        "examples": [text],
        **numbers,
    }


def trainings(name: str, state: str = "finished") -> dict:
    return {"trainings": [{"name": name, "steps": 1, "state": state}]}


def row(step: int, validated: float | None = None) -> dict:
    """Return a log row."""
    rates = {"learning_rate": 0.1, "tokens_per_second": 9.0, "seconds": 1.0}
    return {"step": step, "loss": 5.0 - step, "dev_loss": validated, "dev_bleu": validated, **rates}


def log(text: str) -> dict:
    """Return a response of /api/training/NAME with this text in every field."""
    aligned = {"source_words": [text], "target_words": [text], "links": "0-0", "weights": [[1.0]]}
    sample = {"step": 1, "source": text, "text": text, "reference": text, "alignment": aligned}
    return {"steps": 1, "state": "finished", "rows": [row(1, validated=1.0)], "samples": [sample]}
