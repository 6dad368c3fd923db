"""`regard curves`."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard._util.files import short_names
from regard._util.text import printable
from regard.cli.options import PictureFile
from regard.cli.shared import check_picture, console, print_table
from regard.errors import ArgumentError
from regard.translation.model_folder import LOG

if TYPE_CHECKING:
    from regard.translation.training.logs import LogRow


def curves(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="FOLDER",
            help="Folders written by regard train (runs in progress are allowed), or log.csv files.",
        ),
    ],
    output: PictureFile = Path("curves.png"),
) -> None:
    """Draw training curves: loss and BLEU over updates and over time.

    Examples:
    regard curves de-en  # writes curves.png
    regard curves small large -o both.svg  # two runs in one plot
    """
    check_picture(output)
    files = [_log(folder) for folder in folders]
    names = short_names([file.parent if file.name == LOG else file for file in files])
    from regard.plot.curves import draw_curves
    from regard.translation.training.logs import read_log

    logs = {name: read_log(file) for name, file in zip(names, files, strict=True)}
    draw_curves(logs, output)
    print_table([[printable(name), _summary(rows)] for name, rows in logs.items()])
    console().print(f"Picture: {printable(str(output))}")


def _log(folder: Path) -> Path:
    """Return the log file in a model folder; a file is returned unchanged."""
    if folder.is_dir() and not (folder / LOG).is_file():
        raise ArgumentError(f"{str(folder)!r} has no {LOG}; pass a folder written by regard train.")
    if not folder.exists():
        raise ArgumentError(f"{str(folder)!r} does not exist; pass a folder written by regard train.")
    return folder / LOG if folder.is_dir() else folder


def _summary(rows: Sequence["LogRow"]) -> str:
    """Summarize the last update and the best validation."""
    from regard.translation.training.logs import best_row

    last = rows[-1]
    parts = [f"{last.step:,} update{'' if last.step == 1 else 's'}{_time(' in', last)}"]
    best = best_row(rows)
    if best is not None:
        parts.append(f"best dev BLEU {best.dev_bleu:.2f} at update {best.step:,}{_time(', after', best)}")
    losses = [row for row in rows if row.dev_loss is not None and math.isfinite(row.dev_loss)]
    if losses:
        best = min(losses, key=lambda row: row.dev_loss or 0.0)
        parts.append(f"lowest dev loss {best.dev_loss:.3f} at update {best.step:,}")
    return "; ".join(parts)


def _time(preposition: str, row: "LogRow") -> str:
    if row.seconds is None or not math.isfinite(row.seconds):
        return ""
    return f"{preposition} {row.seconds / 60:.1f} minutes"
