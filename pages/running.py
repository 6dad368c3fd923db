"""Runs the python blocks of a page, and compares what they print with what the page says.

A page runs from top to bottom in one namespace, in an empty folder with a folder `pictures`. An `output`
fence below a python fence is what the code prints; after `<!-- varies -->` its numbers may differ, as those
of a training do between machines.
"""

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# A fence may be indented, in a list for example; one that is never closed runs to the end of the file.
CODE = re.compile(r"^(?P<indent> *)```python\b.*\n(?P<code>(?:.*\n)*?)(?:(?P=indent)```|\Z)", re.MULTILINE)
OUTPUT = re.compile(
    r"\s*(?P<varies><!-- varies -->)?\s*^(?P<indent> *)```output\n(?P<text>(?:.*\n)*?)(?P=indent)```",
    re.MULTILINE,
)
PICTURE = re.compile(r"!\[[^\]]*\]\((?P<path>[^)\s#]+)")
NUMBER = re.compile(r"[-−]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")
STYLE = Path(__file__).parents[1] / "docs/assets/guide.mplstyle"


class Block(NamedTuple):
    """A piece of code, the line above it, and what the page says it prints."""

    code: str
    above: int
    expected: str | None
    varies: bool
    span: tuple[int, int]  # of the output's text within the page
    indent: str


class Ran(NamedTuple):
    """A page as it was when it ran: its text, and each block with what it printed."""

    text: str
    blocks: list[tuple[Block, str]]


def blocks(text: str) -> Iterator[Block]:
    """The python blocks of a page."""
    for code in CODE.finditer(text):
        above = text.count("\n", 0, code.start("code"))
        output = OUTPUT.match(text, code.end())
        expected, varies, span, indent = None, False, (0, 0), ""
        if output:
            expected, indent = _dedent(output["text"], output["indent"]), output["indent"]
            varies, span = bool(output["varies"]), output.span("text")
        yield Block(_dedent(code["code"], code["indent"]), above, expected, varies, span, indent)


@contextlib.contextmanager
def prepared(folder: Path) -> Iterator[None]:
    """The folder as a page finds it, and charts in the guide's style; afterwards all is as it was."""
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


def run(page: Path) -> Ran:
    """Run every block of a page in the working directory.

    An error is raised as an AssertionError that names the page and the line.
    """
    text = page.read_text("utf-8")
    namespace = {"__name__": "__main__"}
    ran = []
    for block in blocks(text + "\n"):
        printed = io.StringIO()
        try:
            # blank lines above the code give it the line numbers of its page
            code = compile("\n" * block.above + block.code, page, "exec")
            with contextlib.redirect_stdout(printed):
                exec(code, namespace)
        except (Exception, SystemExit) as error:
            line = _failing_line(error, page) or block.above + 1
            raise AssertionError(f"{page}:{line}: {type(error).__name__}: {error}") from error
        ran.append((block, printed.getvalue()))
    return Ran(text, ran)


def differences(page: Path, ran: Ran) -> list[str]:
    """Where a page says something else than its code printed."""
    return [
        f"{page}:{block.above}: the page says\n{block.expected}\nand the code prints\n{printed}"
        for block, printed in ran.blocks
        if block.expected is not None and not agree(block.expected, printed, varies=block.varies)
    ]


def agree(expected: str, printed: str, *, varies: bool = False) -> bool:
    """Whether two outputs have the same words and whole numbers, and fractions within 1 % or a last digit."""
    if [NUMBER.sub("#", line).split() for line in expected.strip().splitlines()] != [
        NUMBER.sub("#", line).split() for line in printed.strip().splitlines()
    ]:
        return False
    pairs = zip(NUMBER.findall(expected), NUMBER.findall(printed), strict=True)
    return varies or all(_close(*pair) for pair in pairs)


def renewed(ran: Ran) -> str:
    """The page's text with what its code printed."""
    text = ran.text
    for block, printed in reversed(ran.blocks):
        if block.expected is not None and not agree(block.expected, printed):
            start, end = block.span
            lines = (f"{block.indent}{line}".rstrip() + "\n" for line in printed.splitlines())
            text = text[:start] + "".join(lines) + text[end:]
    return text


def pictures(page: Path) -> list[str]:
    """The local pictures that a page shows, relative to it."""
    found = PICTURE.finditer(page.read_text("utf-8"))
    return [one["path"] for one in found if "://" not in one["path"]]


def drawn(page: Path, folder: Path) -> list[str]:
    """Those of its pictures that its code has drawn in this folder, and not elsewhere."""
    return [
        one
        for one in pictures(page)
        if (folder / one).is_file() and (folder / one).resolve().is_relative_to(folder.resolve())
    ]


def _close(one: str, other: str) -> bool:
    a, b = (float(number.replace(",", "").replace("−", "-")) for number in (one, other))
    if not re.search(r"[.e]", one + other):
        return a == b
    mantissa, _, exponent = one.partition("e")
    digits = len(mantissa.partition(".")[2])
    return abs(a - b) <= max(1.01 * 10.0 ** (int(exponent or 0) - digits), 0.01 * abs(b))


def _dedent(text: str, indent: str) -> str:
    return re.sub(f"^{indent}", "", text, flags=re.MULTILINE)


def _failing_line(error: BaseException, page: Path) -> int | None:
    """The last line of the page that the error passed through."""
    if isinstance(error, SyntaxError):
        return error.lineno
    line, frame = None, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == str(page):
            line = frame.tb_lineno
        frame = frame.tb_next
    return line
