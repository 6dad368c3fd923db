"""python -m pages [--check] [PAGE …]: run pages and update their outputs and pictures.

--check: compare instead of updating. Without PAGE, run only pages whose text or code has changed.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pages.runner import drawn_pictures, page_environment, problems, run, updated_text
from pages.verified import ROOT, is_verified, record
from regard._util.files import write_atomic
from tests.processor import disable_broken_amx


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


def check(page: Path) -> None:
    """Run a page in a temporary folder; raise AssertionError if its outputs or pictures differ."""
    with tempfile.TemporaryDirectory() as name:
        with page_environment(Path(name)):
            result = run(page)
        assert not (messages := problems(page, Path(name), result)), "\n".join(messages)


def main(arguments: list[str]) -> int:
    """Run each page in its own process, so that the modules it imports can be recorded."""
    only_check = "--check" in arguments
    paths = [Path(name).resolve() for name in arguments if name != "--check"]
    if missing := [str(page) for page in paths if not page.is_file()]:
        sys.exit(f"No such page: {', '.join(missing)}. Pass file names, or none to run all pages.")
    if len(paths) != 1:
        paths = paths or [page for page in all_pages() if not (only_check and is_verified(page))]
        option = ["--check"] * only_check
        commands = [[sys.executable, "-m", "pages", *option, str(page)] for page in paths]
        codes = [subprocess.run(command).returncode for command in commands]
        return int(any(codes))  # negative if a signal killed the process
    disable_broken_amx()
    try:
        (check if only_check else update)(paths[0])
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 1
    record(paths[0])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
