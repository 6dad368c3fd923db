"""Run the Python blocks of a page and compare their output with the page.

A page runs from top to bottom in one namespace, in an empty folder with a subfolder `pictures`. An `output`
fence below a python fence contains the expected output. After `<!-- varies -->` numbers may differ, because
training results differ between machines.
"""

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# A fence may be indented, e.g. in a list. An unclosed fence runs to the end of the file.
CODE = re.compile(r"^(?P<indent> *)```python\b.*\n(?P<code>(?:.*\n)*?)(?:(?P=indent)```|\Z)", re.MULTILINE)
OUTPUT = re.compile(
    r"\s*(?P<varies><!-- varies -->)?\s*^(?P<indent> *)```output\n(?P<text>(?:.*\n)*?)(?P=indent)```",
    re.MULTILINE,
)
PICTURE = re.compile(r"!\[[^\]]*\]\((?P<path>[^)\s#]+)")
NUMBER = re.compile(r"[-−]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")
ROOT = Path(__file__).parents[1]
STYLE = ROOT / "docs/assets/guide.mplstyle"
# Pictures that take minutes to draw: the page contains the command that draws them.
COMMANDS = {
    "docs/pictures/demo.png": "make demo",
    "docs/pictures/lengths.png": "python -m benchmarks.lengths",
    "docs/pictures/first.webp": "regard look",
}


class Block(NamedTuple):
    """A code block, the number of lines above it, and its expected output."""

    code: str
    above: int
    expected: str | None
    varies: bool
    span: tuple[int, int]  # position of the expected output in the page
    indent: str


class PageRun(NamedTuple):
    """The text of a page when it ran, and each block with its output."""

    text: str
    blocks: list[tuple[Block, str]]


def code_blocks(text: str) -> Iterator[Block]:
    """Yield the Python blocks of a page."""
    for code in CODE.finditer(text):
        above = text.count("\n", 0, code.start("code"))
        output = OUTPUT.match(text, code.end())
        expected, varies, span, indent = None, False, (0, 0), ""
        if output:
            expected, indent = _dedent(output["text"], output["indent"]), output["indent"]
            varies, span = bool(output["varies"]), output.span("text")
        yield Block(_dedent(code["code"], code["indent"]), above, expected, varies, span, indent)


@contextlib.contextmanager
def page_environment(folder: Path) -> Iterator[None]:
    """Enter a folder with a `pictures` subfolder and use the guide's plot style; restore both afterwards."""
    import torch
    from matplotlib import pyplot, style

    (folder / "pictures").mkdir()
    pyplot.switch_backend("agg")
    threads = torch.get_num_threads()
    try:
        with contextlib.chdir(folder), style.context(STYLE):
            yield
    finally:
        pyplot.close("all")
        torch.set_num_threads(threads)


def run(page: Path) -> PageRun:
    """Run every block of a page in the working directory.

    Errors are raised as AssertionError with the page and the line.
    """
    text = page.read_text("utf-8")
    namespace = {"__name__": "__main__"}
    outputs = []
    for block in code_blocks(text + "\n"):
        printed = io.StringIO()
        try:
            # prepend blank lines, so that line numbers in tracebacks match the page
            code = compile("\n" * block.above + block.code, page, "exec")
            with contextlib.redirect_stdout(printed):
                exec(code, namespace)
        except (Exception, SystemExit) as error:
            line = _failing_line(error, page) or block.above + 1
            raise AssertionError(f"{page}:{line}: {type(error).__name__}: {error}") from error
        outputs.append((block, printed.getvalue()))
    return PageRun(text, outputs)


def differences(page: Path, result: PageRun) -> list[str]:
    """List the blocks whose output differs from the page."""
    return [
        f"{page}:{block.above}: the page shows\n{block.expected}\nbut the code prints\n{printed}"
        for block, printed in result.blocks
        if block.expected is not None and not outputs_match(block.expected, printed, varies=block.varies)
    ]


def problems(page: Path, folder: Path, result: PageRun) -> list[str]:
    """List the problems of a page that ran in this folder: wrong outputs and missing pictures."""
    absent = [picture for picture in picture_paths(page) if not (page.parent / picture).is_file()]
    return [
        *differences(page, result),
        *(f"{page}: its code does not draw {picture}" for picture in undrawn(page, folder)),
        *(f"{page}: {picture} is missing. Run python -m pages {page}" for picture in absent),
    ]


def undrawn(page: Path, folder: Path) -> list[str]:
    """List the pictures that neither the page's code, run in this folder, nor a command on the page draws."""
    text, drawn = page.read_text("utf-8"), drawn_pictures(page, folder)
    missing = []
    for picture in picture_paths(page):
        path = (page.parent / picture).resolve()
        command = COMMANDS.get(path.relative_to(ROOT).as_posix()) if path.is_relative_to(ROOT) else None
        if picture not in drawn and not (command and command in text and path.is_file()):
            missing.append(picture)
    return missing


def outputs_match(expected: str, printed: str, *, varies: bool = False) -> bool:
    """Compare two outputs: equal words and integers, decimals within 1% or one unit of the last digit."""
    if [NUMBER.sub("#", line).split() for line in expected.strip().splitlines()] != [
        NUMBER.sub("#", line).split() for line in printed.strip().splitlines()
    ]:
        return False
    pairs = zip(NUMBER.findall(expected), NUMBER.findall(printed), strict=True)
    return varies or all(_close(*pair) for pair in pairs)


def updated_text(result: PageRun) -> str:
    """Return the page's text with the new outputs."""
    text = result.text
    for block, printed in reversed(result.blocks):
        if block.expected is not None and not outputs_match(block.expected, printed):
            start, end = block.span
            lines = (f"{block.indent}{line}".rstrip() + "\n" for line in printed.splitlines())
            text = text[:start] + "".join(lines) + text[end:]
    return text


def picture_paths(page: Path) -> list[str]:
    """Return the local pictures of a page, relative to it."""
    paths = (match["path"] for match in PICTURE.finditer(page.read_text("utf-8")))
    return [path for path in paths if "://" not in path]


def drawn_pictures(page: Path, folder: Path) -> list[str]:
    """Return the pictures of a page that its code has drawn inside this folder."""
    return [
        path
        for path in picture_paths(page)
        if (folder / path).is_file() and (folder / path).resolve().is_relative_to(folder.resolve())
    ]


def _close(expected: str, printed: str) -> bool:
    a, b = (float(number.replace(",", "").replace("−", "-")) for number in (expected, printed))
    if not re.search(r"[.e]", expected + printed):
        return a == b
    mantissa, _, exponent = expected.partition("e")
    digits = len(mantissa.partition(".")[2])
    return abs(a - b) <= max(1.01 * 10.0 ** (int(exponent or 0) - digits), 0.01 * abs(b))


def _dedent(text: str, indent: str) -> str:
    return re.sub(f"^{indent}", "", text, flags=re.MULTILINE)


def _failing_line(error: BaseException, page: Path) -> int | None:
    """Return the last line of the page in the traceback."""
    if isinstance(error, SyntaxError):
        return error.lineno
    line, frame = None, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == str(page):
            line = frame.tb_lineno
        frame = frame.tb_next
    return line
