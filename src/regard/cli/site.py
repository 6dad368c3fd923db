"""`regard site`."""

from pathlib import Path
from typing import Annotated

import typer

from regard._util.text import format_bytes, printable
from regard.cli.shared import console


def site(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="[FOLDER …] OUTPUT",
            help='Model folders or "minilm" (default: the two small models included in regard), then the '
            "output folder.",
            show_default=False,
        ),
    ],
) -> None:
    """Build a static site whose models run in the browser: no server, nothing to install.

    OUTPUT is a new folder with one file, index.html. Open it directly, or put it on any web server. An
    existing site is replaced; a folder with other files is rejected.

    Examples:
    regard site site/  # with the models included in regard
    regard site de-en site/  # with a translator written by regard train
    """
    from regard.app.site.build import write_site

    *folders, output = paths
    page = write_site(folders, output)
    console().print(f"Site: {printable(str(page))}, {format_bytes(page.stat().st_size)}")
    console().print(f"Open {page.resolve().as_uri()}, or copy the folder to any web server.")
