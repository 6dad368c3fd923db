"""python -m pages [PAGE …]: run pages and update their outputs and pictures."""

import sys
import tempfile
import time
from pathlib import Path

from pages.runner import drawn_pictures, page_environment, run, updated_text
from regard._util.files import write_atomic

ROOT = Path(__file__).parents[1]


def all_pages() -> list[Path]:
    """Return README.md and all pages of the guide."""
    return [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]


def update(page: Path) -> None:
    """Run a page in a temporary folder and save its outputs and pictures."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with page_environment(folder):
            result = run(page)
        assert page.read_text("utf-8") == result.text, f"{page} was edited while it ran. Run it again."
        for picture in drawn_pictures(page, folder):
            write_atomic(page.parent / picture, (folder / picture).read_bytes())
    if (text := updated_text(result)) != result.text:
        write_atomic(page, text.encode())
    print(f"{page}: {len(result.blocks)} blocks, {time.perf_counter() - started:.1f} s", flush=True)


if __name__ == "__main__":
    paths = [Path(name).resolve() for name in sys.argv[1:]]
    if missing := [str(page) for page in paths if not page.is_file()]:
        sys.exit(f"No such page: {', '.join(missing)}. Pass file names, or none to run all pages.")
    failed = False
    for page in paths or all_pages():
        try:
            update(page)
        except AssertionError as error:
            failed = True
            print(error, file=sys.stderr)
    sys.exit(failed)
