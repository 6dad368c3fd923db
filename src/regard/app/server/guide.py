"""Find the guide: built by `make docs` in a clone, where the server serves it, or published on the web."""

from functools import cache
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

PATH = "guide"  # relative to the address of the server
_CLONE = Path(__file__).parents[4]


def built_guide(clone: Path = _CLONE) -> Path | None:
    """Return the folder of the guide if it is built in a clone, otherwise None.

    >>> from pathlib import Path
    >>> from regard.app.server.guide import built_guide
    >>> print(built_guide(Path("no-such-folder")))
    None
    """
    folder = clone / "site"
    is_built = (clone / "mkdocs.yml").is_file() and (folder / "path" / "order.html").is_file()
    return folder if is_built else None


def guide_address() -> str:
    """Return the address of the built guide or, if it is not built, of the published one; "" if unknown."""
    return PATH if built_guide() else published_guide()


@cache
def published_guide() -> str:
    """Return the address of the documentation in the package's metadata, or "" if there is none."""
    try:
        addresses = metadata("regard").get_all("Project-URL") or []
    except PackageNotFoundError:
        return ""
    named = dict(address.split(", ", 1) for address in addresses)
    return named.get("Documentation", "")
