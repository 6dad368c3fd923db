"""Word alignments, drawn in a terminal: a row per target word, a column per source word."""

import os
import unicodedata
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from regard._util.checks import check_int
from regard._util.text import printable
from regard.errors import ArgumentError, ShapeError
from regard.plot.heatmaps import Aligned
from regard.plot.style import DARK, LIGHT, Theme

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

SHADES = " ░▒▓█"
LETTERS = " .:+#"  # for a terminal that has no others
FULL = 0.5  # what is drawn strongest is the largest weight, or this if all are smaller
TALLEST = 14  # letters of a source word, which stands upright
WIDEST = 20  # columns of a target word
CELL = 2  # columns of a weight: about as wide as high, and room for a Han character
LEAST = 8  # columns that a drawing needs


def draw_alignment(alignment: Aligned, console: "Console | None" = None) -> None:
    """Draw an alignment in a terminal: colours where it has some, shades elsewhere.

    The colours are those of the pictures, on dark paper, or on light paper where the terminal says that it is
    light: in the environment variable COLORFGBG, as "0;15".

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
    from rich.console import Console

    console = console or Console(highlight=False)
    colours = console.color_system in ("256", "truecolor") and not console.no_color
    ours = SHADES if console.encoding.startswith("utf") else LETTERS
    shades = None if colours else ours
    for line in _lines(alignment, max(console.width, LEAST), shades, console.encoding):
        console.print(line, soft_wrap=True)


def alignment_lines(alignment: Aligned, *, width: int = 80, shades: str = SHADES) -> list[str]:
    """The lines that draw an alignment without colours, none wider than `width`.

    Source words stand upright above their columns; if there are more than fit, the rest follows below.
    At the end of each row stands the source word that its target word looked at most, if there is room.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> from regard.plot.terminal import alignment_lines
    >>> words = {"source_words": ["zwei", "Hunde"], "target_words": ["two", "dogs"]}
    >>> alignment = SimpleNamespace(weights=torch.eye(2), **words)
    >>> alignment_lines(alignment, shades=" .:+#")[-2:]
    ['two  ##   zwei', 'dogs   ## Hunde']
    """
    check_int("alignment_lines got width", width, min=LEAST)
    if len(shades) < 2:
        raise ArgumentError(f"alignment_lines got shades={shades!r}; give at least two, the faintest first.")
    return [line.plain.rstrip() for line in _lines(alignment, width, shades)]


def _checked(alignment: Aligned, encoding: str = "utf-8") -> tuple[list[str], list[str], Tensor]:
    """Words without control characters or any that cannot be written, and weights of the right shape."""
    given = (alignment.source_words, alignment.target_words)
    sources, targets = ([_written(printable(word), encoding) for word in words] for words in given)
    weights = alignment.weights.detach().cpu().float().nan_to_num(0)
    if tuple(weights.shape) != (len(targets), len(sources)):
        raise ShapeError(
            f"an alignment of {len(targets)} target words and {len(sources)} source words has weights of "
            f"shape {tuple(weights.shape)}; it needs a row per target word and a column per source word."
        )
    return sources, targets, weights


def _written(text: str, encoding: str) -> str:
    return text.encode(encoding, "replace").decode(encoding)


def _lines(alignment: Aligned, width: int, shades: str | None, encoding: str = "utf-8") -> "Iterator[Text]":
    """Line by line; without shades, in colours."""
    from rich.cells import cell_len
    from rich.text import Text

    sources, targets, weights = _checked(alignment, encoding)
    if not sources or not targets:
        yield Text("(no words to align)"[:width])
        return
    weights = weights / max(float(weights.max()), FULL)
    label = min(max(map(cell_len, targets)), WIDEST, (width - CELL - 1) // 2)
    panels = -(-len(sources) // ((width - label - 1) // CELL))
    columns = -(-len(sources) // panels)
    room = width - label - 1 - CELL * len(sources) - 1
    named = room >= min(LEAST, max(map(cell_len, sources)))
    for first in range(0, len(sources), columns):
        if first:
            yield Text()
        yield from _heading(sources[first : first + columns], label, _written("⋮", encoding))
        for target, row in zip(targets, weights, strict=True):
            line = Text(_fit(target, label, encoding) + " ")
            for weight in row[first : first + columns].tolist():
                line.append(*_cell(weight, shades))
            if named and float(row.max()) > 0:
                line.append(" " + _fit(sources[int(row.argmax())], room, encoding))
            if shades:
                line.rstrip()
            yield line


def _heading(words: Sequence[str], label: int, cut: str) -> "Iterator[Text]":
    """Words that stand upright, each above its column; `cut` stands where the end of one is cut."""
    from rich.cells import set_cell_size
    from rich.text import Text

    upright = [_letters(word) for word in words]
    upright = [each if len(each) <= TALLEST else [*each[: TALLEST - 1], cut] for each in upright]
    for height in range(max(map(len, upright)), 0, -1):
        letters = (each[-height] if len(each) >= height else "" for each in upright)
        line = " " * (label + 1) + "".join(set_cell_size(letter, CELL) for letter in letters)
        yield Text(line.rstrip())


def _letters(word: str) -> list[str]:
    """Characters, each with the marks that belong to it."""
    letters: list[str] = []
    for character in word:
        if letters and unicodedata.category(character) in ("Mn", "Mc", "Me", "Cf"):
            letters[-1] += character
        else:
            letters.append(character)
    return letters


def _theme() -> Theme:
    """Of this terminal: many tell their colours, text;background, of which 7 and above 8 are light."""
    background = os.environ.get("COLORFGBG", "").rpartition(";")[2]
    return LIGHT if background.isdecimal() and int(background) in (7, *range(9, 16)) else DARK


def _colour(weight: float, stops: Sequence[str]) -> str:
    """The colour of a weight between 0 and 1."""
    place = min(max(weight, 0), 1) * (len(stops) - 1)
    low = min(int(place), len(stops) - 2)
    ends = [[int(stop[i : i + 2], 16) for i in (1, 3, 5)] for stop in stops[low : low + 2]]
    mixed = (round(a + (place - low) * (b - a)) for a, b in zip(*ends, strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _cell(weight: float, shades: str | None) -> tuple[str, str]:
    """What is drawn for a weight between 0 and 1, and its style."""
    if shades is None:
        return " " * CELL, f"on {_colour(weight, _theme().weights)}"
    return shades[min(max(round(weight * (len(shades) - 1)), 0), len(shades) - 1)] * CELL, ""


def _fit(word: str, width: int, encoding: str) -> str:
    """Exactly so many columns: blanks are added, or the end is cut."""
    from rich.cells import cell_len, set_cell_size

    if cell_len(word) <= width:
        return set_cell_size(word, width)
    return set_cell_size(word, width - 1) + _written("…", encoding)
