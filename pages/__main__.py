"""python -m pages [PAGE …]: run pages, and write what they printed and drew into them."""

import shutil
import sys
import tempfile
import time
from pathlib import Path

from pages.running import pictures, prepared, renewed, run

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
        for picture in pictures(page):
            if (folder / picture).exists():
                (page.parent / picture).parent.mkdir(exist_ok=True)
                shutil.copyfile(folder / picture, page.parent / picture)
    text = renewed(page, ran)
    if text != page.read_text("utf-8"):
        beside = page.with_suffix(".md.new")
        beside.write_text(text, "utf-8")
        beside.replace(page)
    print(f"{page.relative_to(ROOT)}: {len(ran)} blocks, {time.perf_counter() - started:.1f} s", flush=True)


if __name__ == "__main__":
    failed = False
    for page in [Path(name).resolve() for name in sys.argv[1:]] or everything():
        try:
            renew(page)
        except AssertionError as error:
            failed = True
            print(error, file=sys.stderr)
    sys.exit(failed)
