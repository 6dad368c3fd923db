"""Draw word alignments in the terminal: one row per target word, one column per source word."""

import os
import unicodedata
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from regard._util.checks import check_int
from regard._util.extras import require
from regard._util.text import printable
from regard.errors import ArgumentError
from regard.plot.panels import AlignmentLike, checked_weights
from regard.plot.style import DARK, LIGHT, Theme

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

SHADES = " ░▒▓█"
ASCII_SHADES = " .:+#"  # for terminals without Unicode
MIN_FULL = 0.5  # weight of the darkest shade, unless the largest weight is greater
MAX_HEIGHT = 14  # maximum height of a source word, which is written vertically
MAX_LABEL_WIDTH = 20  # maximum width of a target word, in columns
CELL_WIDTH = 2  # columns per weight: roughly square, and wide enough for a Han character
MIN_WIDTH = 8  # minimum width of a drawing, in columns


def draw_alignment(alignment: AlignmentLike, console: "Console | None" = None) -> None:
    """Print an alignment to the terminal, in color if supported, otherwise with shading characters.

    The colors are those of the dark theme, or of the light theme if the environment variable COLORFGBG
    declares a light background, as in "0;15".

    >>> import torch
    >>> from types import SimpleNamespace
    >>> from rich.console import Console
    >>> from regard.plot.terminal import draw_alignment
    >>> weights = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    >>> words = {"source_words": ["zwei", "Hunde"], "target_words": ["two", "dogs"]}
    >>> draw_alignment(SimpleNamespace(weights=weights, **words), Console(color_system=None))
           H
         z u
         w n
         e d
         i e
    two  ██   zwei
    dogs ░░██ Hunde
    """
    require("rich", "draw_alignment")
    from rich.console import Console

    console = console or Console(highlight=False)
    shades: str | None = SHADES if console.encoding.startswith("utf") else ASCII_SHADES
    if console.color_system in ("256", "truecolor") and not console.no_color:
        shades = None
    for line in _lines(alignment, max(console.width, MIN_WIDTH), shades, console.encoding):
        console.print(line, soft_wrap=True)


def alignment_lines(alignment: AlignmentLike, *, width: int = 80, shades: str = SHADES) -> list[str]:
    """Return an alignment as lines of text without color, at most `width` columns wide.

    Source words are written vertically above their columns; columns that do not fit continue below. Each row
    ends with the source word that has the largest weight, if there is room.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> from regard.plot.terminal import alignment_lines
    >>> words = {"source_words": ["zwei", "Hunde"], "target_words": ["two", "dogs"]}
    >>> alignment = SimpleNamespace(weights=torch.eye(2), **words)
    >>> alignment_lines(alignment, shades=" .:+#")[-2:]
    ['two  ##   zwei', 'dogs   ## Hunde']
    """
    check_int("alignment_lines got width", width, min=MIN_WIDTH)
    if len(shades) < 2:
        raise ArgumentError(
            f"alignment_lines got shades={shades!r}; pass at least two characters, the lightest first."
        )
    return [line.plain.rstrip() for line in _lines(alignment, width, shades)]


def _encodable(text: str, encoding: str) -> str:
    return text.encode(encoding, "replace").decode(encoding)


def _lines(
    alignment: AlignmentLike, width: int, shades: str | None, encoding: str = "utf-8"
) -> "Iterator[Text]":
    """Yield the lines, in color if shades is None."""
    require("rich", "Drawing alignments in the terminal")
    from rich.cells import cell_len
    from rich.text import Text

    weights = checked_weights(alignment)
    sources, targets = (
        [_encodable(printable(word), encoding) for word in words]
        for words in (alignment.source_words, alignment.target_words)
    )
    if not sources or not targets:
        yield Text("(no words to align)"[:width])
        return
    weights = weights / max(float(weights.max()), MIN_FULL)
    label_width = min(max(map(cell_len, targets)), MAX_LABEL_WIDTH, (width - CELL_WIDTH - 1) // 2)
    parts = -(-len(sources) // ((width - label_width - 1) // CELL_WIDTH))
    columns = -(-len(sources) // parts)
    left = width - label_width - 1 - CELL_WIDTH * len(sources) - 1
    shows_best = left >= min(MIN_WIDTH, max(map(cell_len, sources)))
    for first in range(0, len(sources), columns):
        if first:
            yield Text()
        yield from _heading(sources[first : first + columns], label_width, _encodable("⋮", encoding))
        for target, row in zip(targets, weights, strict=True):
            line = Text(_fit(target, label_width, encoding) + " ")
            for weight in row[first : first + columns].tolist():
                line.append(*_cell(weight, shades))
            if shows_best and float(row.max()) > 0:
                line.append(" " + _fit(sources[int(row.argmax())], left, encoding))
            if shades:
                line.rstrip()
            yield line


def _heading(words: Sequence[str], label_width: int, ellipsis: str) -> "Iterator[Text]":
    """Yield the lines of words written vertically, each above its column."""
    from rich.cells import set_cell_size
    from rich.text import Text

    vertical = [_graphemes(word) for word in words]
    vertical = [word if len(word) <= MAX_HEIGHT else [*word[: MAX_HEIGHT - 1], ellipsis] for word in vertical]
    for height in range(max(map(len, vertical)), 0, -1):
        letters = (word[-height] if len(word) >= height else "" for word in vertical)
        line = " " * (label_width + 1) + "".join(set_cell_size(letter, CELL_WIDTH) for letter in letters)
        yield Text(line.rstrip())


def _graphemes(word: str) -> list[str]:
    """Split a word into characters with their combining marks."""
    graphemes: list[str] = []
    for character in word:
        if graphemes and unicodedata.category(character) in ("Mn", "Mc", "Me", "Cf"):
            graphemes[-1] += character
        else:
            graphemes.append(character)
    return graphemes


def _theme() -> Theme:
    """Return the terminal's theme. COLORFGBG is "text;background"; backgrounds 7 and 9 to 15 are light."""
    background = os.environ.get("COLORFGBG", "").rpartition(";")[2]
    return LIGHT if background.isdecimal() and int(background) in (7, *range(9, 16)) else DARK


def _color(weight: float, stops: Sequence[str]) -> str:
    """Interpolate the color of a weight between 0 and 1."""
    position = min(max(weight, 0), 1) * (len(stops) - 1)
    low = min(int(position), len(stops) - 2)
    ends = [[int(stop[i : i + 2], 16) for i in (1, 3, 5)] for stop in stops[low : low + 2]]
    channels = (round(a + (position - low) * (b - a)) for a, b in zip(*ends, strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in channels)


def _cell(weight: float, shades: str | None) -> tuple[str, str]:
    """Return the text and style of a cell for a weight between 0 and 1."""
    if shades is None:
        return " " * CELL_WIDTH, f"on {_color(weight, _theme().weights)}"
    return shades[min(max(round(weight * (len(shades) - 1)), 0), len(shades) - 1)] * CELL_WIDTH, ""


def _fit(word: str, width: int, encoding: str) -> str:
    """Pad or shorten a word to exactly `width` columns."""
    from rich.cells import cell_len, set_cell_size

    if cell_len(word) <= width:
        return set_cell_size(word, width)
    return set_cell_size(word, width - 1) + _encodable("…", encoding)
