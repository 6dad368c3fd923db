"""Visits to the page of `regard look`, and answers as its server would give them."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

import pytest

from regard.models.encoders.pretrained import MINILM
from regard.translation.training.train import train
from tests.translation.small import PAIRS, small_config

HOSTILE = "</script><img src=x onerror=alert(1)>"
SHOTS = Path(os.environ.get("REGARD_SHOTS", "build/screenshots"))  # for looking at; they are not compared
SIZES = ((1280, 900, "light"), (1600, 900, "dark"), (360, 740, "light"), (360, 740, "dark"))
PATIENCE = 15  # seconds
QUICK = ("training.updates=4", "training.validate_every=2", "training.accumulate=1")
ENCODER = find_spec(MINILM) is not None
needs_encoder = pytest.mark.skipif(not ENCODER, reason="minilm is not installed")


@contextmanager
def served(root: Path) -> Iterator[str]:
    """The address of a server with two trained models, one of them without attention, and minilm."""
    for kind in ("transformer", "plain"):
        train(root / kind, PAIRS, config=small_config(kind, *QUICK))
    command = [sys.executable, "-m", "regard", "look", "transformer", "plain", *["minilm"] * ENCODER]
    command += ["--no-browser", "--port", "0"]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        said = iter(server.stdout.readline, "")
        found = filter(None, (re.search(r"http://\S+", line) for line in said))
        yield next(found).group()
        server.terminate()


class Visit:
    """A page of its own."""

    def __init__(self, page, address: str) -> None:
        self.page, self.address = page, address
        page.on("dialog", lambda dialog: pytest.fail(f"something was run: {dialog.message}"))

    def enter(self, room: str, **state: str) -> None:
        """A room, as a link to it would."""
        query = "&".join(f"{name}={quote(value)}" for name, value in state.items())
        self.page.goto("about:blank")
        self.page.goto(f"{self.address}#{room}" + (f"?{query}" if query else ""))
        self.settle()

    def settle(self) -> None:
        """Until the room is there and nothing is waited for."""
        self.page.wait_for_selector("#room .stage .answer > *")
        self.until("!document.querySelector('.stage[aria-busy=true]')")

    def look(self, name: str, sizes: tuple = SIZES) -> None:
        """Screenshots in both colour schemes, wide and narrow; nothing may stick out of any."""
        SHOTS.mkdir(parents=True, exist_ok=True)
        for width, height, scheme in sizes:
            self.page.emulate_media(color_scheme=scheme)
            self.page.set_viewport_size({"width": width, "height": height})
            self.page.wait_for_timeout(80)  # charts are drawn anew
            self.page.screenshot(path=SHOTS / f"{name}-{width}-{scheme}.png", full_page=True)
            wide = self.page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"{name} is {wide} pixels wide on a screen of {width}"
        self.page.emulate_media(color_scheme="light")
        self.page.set_viewport_size({"width": 1280, "height": 900})

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def until(self, condition: str) -> None:
        """Until this JavaScript is true; the page's policy lets no page.wait_for_function look at it."""
        end = time.monotonic() + PATIENCE
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, f"not within {PATIENCE} s: {condition}"
            self.page.wait_for_timeout(30)

    def answer(self, path: str, body: dict, status: int = 200) -> None:
        """Instead of the server."""
        self.page.route(f"**/api/{path}", lambda route: route.fulfill(json=body, status=status))

    def no_markup_came_of_text(self) -> None:
        assert self.page.locator("img[src=x]").count() == 0


def translation(text: str) -> dict:
    """An answer about a sentence, with this text in every place."""
    one = {"source": text, "text": text, "score": 0.0, "tokens": [text], "note": text, "reason": text}
    more = {"alternatives": [{"text": f"{text} 2", "score": -1.0}], "alignment": None}
    return {"translations": [one | more], "exhibit": None}


def trainings(name: str, state: str = "finished") -> dict:
    return {"trainings": [{"name": name, "steps": 1, "state": state}]}


def row(step: int, judged: float | None = None) -> dict:
    """A row of a log."""
    rates = {"learning_rate": 0.1, "tokens_per_second": 9.0, "seconds": 1.0}
    return {"step": step, "loss": 5.0 - step, "dev_loss": judged, "dev_bleu": judged, **rates}


def log(text: str) -> dict:
    """What a training has logged, with this text in every place."""
    aligned = {"source_words": [text], "target_words": [text], "links": "0-0", "weights": [[1.0]]}
    sample = {"step": 1, "source": text, "text": text, "reference": text, "alignment": aligned}
    return {"steps": 1, "state": "finished", "rows": [row(1, judged=1.0)], "samples": [sample]}
