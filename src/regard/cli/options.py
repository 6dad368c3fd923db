"""Options shared by several commands, as typer annotations."""

from pathlib import Path
from typing import Annotated

import typer

ModelFolder = Annotated[
    Path,
    typer.Option(
        "--model", "-m", metavar="FOLDER", help="Folder written by regard train, or in Hugging Face format."
    ),
]
Languages = Annotated[
    str | None,
    typer.Option(
        "--languages",
        metavar="FROM-TO",
        help="Language pair for a multilingual model, such as de-en.",
    ),
]
OutputFile = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="FILE", help="Output file, written only on success.", show_default="stdout"
    ),
]
PictureFile = Annotated[
    Path, typer.Option("--output", "-o", metavar="FILE", help="Output image (.png, .svg or .pdf).")
]
