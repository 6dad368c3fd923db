"""Frames per second of the static site while zooming: python -m benchmarks.frames.

Opens the site from a file: address in headless Chromium, without a network, and turns the wheel over the
canvas of Inside and over the matrix of Heads, while a counter runs in requestAnimationFrame. Needs playwright
and Chromium.
"""

import shutil
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from regard.app.site.build import write_site

SECONDS = 5.0  # per section
STEPS_IN = 25  # wheel events in one direction, then back
VIEWS = {
    "Inside": ("inside", "", "#section canvas"),
    "Heads, Matrix": ("heads", "Matrix", ".regard-attention .map canvas"),
}
COUNT = """() => {
    window.frameTimes = [];
    const count = (now) => { window.frameTimes.push(now); requestAnimationFrame(count); };
    requestAnimationFrame(count);
}"""


def measure(page: Any, address: str, section: str, tab: str, canvas: str) -> list[float]:
    """Return the milliseconds between frames while the wheel turns."""
    page.goto("about:blank")
    page.goto(f"{address}#{section}")
    page.wait_for_selector("#section .panel .answer > *")
    if tab:
        page.get_by_role("tab", name=tab).click()
    page.wait_for_selector(canvas)
    page.locator(canvas).first.scroll_into_view_if_needed()
    box = page.locator(canvas).first.bounding_box()
    page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 0.4 * box["height"])
    page.locator(canvas).first.focus()
    before = page.locator(canvas).first.screenshot()
    for _ in range(5):
        page.mouse.wheel(0, -60)
    page.evaluate("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
    assert page.locator(canvas).first.screenshot() != before, f"{section} does not zoom"
    page.evaluate(COUNT)
    end, number = time.monotonic() + SECONDS, 0
    while time.monotonic() < end:
        page.mouse.wheel(0, -60 if number // STEPS_IN % 2 == 0 else 60)
        number += 1
    times = page.evaluate("window.frameTimes")
    return [after - before for before, after in pairwise(times)]


def main() -> None:
    """Print frames per second, and the 95th percentile of the frame time, for each view."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        address = write_site([], Path(folder) / "site").as_uri()
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for width, height in ((1280, 900), (390, 844)):
            context = browser.new_context(offline=True, viewport={"width": width, "height": height})
            for name, (section, tab, canvas) in VIEWS.items():
                gaps = sorted(measure(context.new_page(), address, section, tab, canvas))
                rate, slow = 1000 * len(gaps) / sum(gaps), gaps[int(0.95 * len(gaps))]
                print(f"{width:4} px  {name:13}  {rate:3.0f} frames/s, 95% of frames within {slow:.0f} ms")
        browser.close()


if __name__ == "__main__":
    main()
