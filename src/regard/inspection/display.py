"""Display recordings with `app`, which no other module in `inspection` may import."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.inspection.recordings.recording import Seen


def show(seen: "Seen", title: str) -> Any:
    """Open the interactive view: a widget in a notebook, otherwise a page in the browser."""
    from regard.app.standalone import show

    return show(seen, title=title)


def to_html(seen: "Seen", path: str | os.PathLike[str], title: str) -> Path:
    """Write the interactive view to a single HTML file."""
    from regard.app.standalone import write_page

    return write_page(path, seen, title=title)
