"""python -m pages [PAGE …]: run pages, and write what they printed and drew into them."""

import sys
import tempfile
import time
from pathlib import Path

from pages.running import drawn, prepared, renewed, run
from regard._util.files import write_atomic

ROOT = Path(__file__).parents[1]


def everything() -> list[Path]:
    """README.md and all pages of the guide."""
    return [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]


def renew(page: Path) -> None:
    """Run a page in a folder of its own; keep its text and its pictures where they changed."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with prepared(folder):
            ran = run(page)
        assert page.read_text("utf-8") == ran.text, f"{page} was edited while it ran: run it again"
        for picture in drawn(page, folder):
            write_atomic(page.parent / picture, (folder / picture).read_bytes())
    if (text := renewed(ran)) != ran.text:
        write_atomic(page, text.encode())
    print(f"{page}: {len(ran.blocks)} blocks, {time.perf_counter() - started:.1f} s", flush=True)


if __name__ == "__main__":
    asked = [Path(name).resolve() for name in sys.argv[1:]]
    if missing := [str(page) for page in asked if not page.is_file()]:
        sys.exit(f"there is no page {', '.join(missing)}; name files, or none for all")
    failed = False
    for page in asked or everything():
        try:
            renew(page)
        except AssertionError as error:
            failed = True
            print(error, file=sys.stderr)
    sys.exit(failed)
