"""python -m pages.animation: record the animation in the README from the page of `regard look`.

Requires Chromium and minilm. The animation shows what each word of a sentence attends to in one head.
"""

import io
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from regard._util.files import write_atomic

TARGET = Path(__file__).parents[1] / "docs/pictures/first.webp"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SIZE = {"width": 860, "height": 1600}
HEIGHT = 730  # pixels, starting at the sentence that names the head
WORDS = ("it", "animal", "cross", "street", "because", "was", "tired")  # the mouse points at them in turn
SHORT, LONG = 700, 2500  # milliseconds


@contextmanager
def page_address() -> Iterator[str]:
    """Run `regard look` and yield its address."""
    command = [sys.executable, "-m", "regard", "look", "minilm", "--port", "0", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if found := re.search(r"http://\S+", line):
                break
        else:
            sys.exit(f"regard look ended: {said}")
        try:
            yield found[0].partition("#")[0]
        finally:
            process.terminate()


def record(page: Any, address: str) -> Iterator[tuple[bytes, int]]:
    """Yield pictures of the attention from each word, then of the matrix, each with its duration."""
    page.goto(f"{address}#heads")
    page.wait_for_selector(".first-link", timeout=60_000)
    box = page.locator(".first-link").bounding_box()
    clip = {"x": box["x"] - 12, "y": box["y"] - 2, "width": box["width"] + 24, "height": HEIGHT}
    words = page.locator(".lines-view .tokens").first
    for word in WORDS:
        words.get_by_text(word, exact=True).hover()
        page.wait_for_timeout(200)
        yield page.screenshot(clip=clip), LONG if word == WORDS[0] else SHORT
    page.get_by_role("tab", name="Matrix").click()
    page.wait_for_timeout(400)
    top = page.locator(".map").first.bounding_box()["y"]  # the row of "it" is below the first screen
    yield page.screenshot(clip=clip | {"y": round(top) - 4}), LONG


def main() -> None:
    """Record the page and write the animation."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        sys.exit(f"Recording the page needs one of {', '.join(BROWSERS)}, and none is installed.")
    with page_address() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE, device_scale_factor=1)
        frames, times = zip(*record(page, address), strict=True)
        browser.close()
    first, *others = (Image.open(io.BytesIO(frame)).convert("RGB") for frame in frames)
    content = io.BytesIO()
    options: dict[str, Any] = {"duration": list(times), "loop": 0, "lossless": True, "method": 6}
    first.save(content, "WEBP", save_all=True, append_images=others, **options)
    write_atomic(TARGET, content.getvalue())
    print(f"{TARGET.name}: {len(frames)} frames, {len(content.getvalue()):,} bytes")


if __name__ == "__main__":
    main()
