"""An exhibit as a page: one file, to be opened in any browser, that needs nothing from anywhere."""

import json
import os
import sys
import tempfile
import webbrowser
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from regard._util.files import write_atomic
from regard.app.bundle import bundle, static, style
from regard.app.embedded import embedded
from regard.app.view_model import ViewModel
from regard.errors import ArgumentError, DTypeError

ENDINGS = (".html", ".htm")


def write_page(path: str | os.PathLike[str], x: Any, *, title: str = "", about: str = "") -> Path:
    """Write a page that shows attention: lines between tokens, the matrix, all heads, and the numbers behind.

    It is one file with everything in it, to be opened in a browser. Where there are too many weights for a
    file, it holds means of blocks of them, and says so.

    x: an exhibit, or what `ViewModel.of` makes one of: weights, what `regard.watch` saw, translations. Those by
    a model without attention are shown without lines, with the reason. Alignments are read one by one, unless
    `translate(…, alignment=True)` has already read them together.
    path: of the .html file.
    title: what stands on top.
    about: a sentence below it.

    >>> import tempfile
    >>> from regard.models import TransformerConfig, Transformer
    >>> from regard.translation import Tokenizer, Translator, TokenizerPair
    >>> from regard.app.standalone import write_page
    >>> tokens = Tokenizer.learn(["ein Hund bellt", "a dog barks"] * 10, kind="words")
    >>> model = Transformer(len(tokens), TransformerConfig(width=16, heads=2, layers=1))
    >>> found = Translator(model, TokenizerPair(tokens, tokens)).translate(["ein Hund"], alignment=True)
    >>> write_page(tempfile.mkdtemp() + "/dogs.html", found, title="Dogs").name
    'dogs.html'
    """
    for name, text in (("title", title), ("about", about)):
        if not isinstance(text, str):
            raise DTypeError(f"write_page got {name}={text!r:.40}, a {type(text).__name__}; give a string.")
    if Path(path).suffix.lower() not in ENDINGS:
        raise ArgumentError(f"the page {os.fspath(path)!r} can end in {', '.join(ENDINGS)}.")
    return write_atomic(path, make_page(x, title=title, about=about).encode())


def make_page(x: Any, *, title: str = "", about: str = "") -> str:
    """The page that `write_page` writes, as text; x, title and about are its own.

    >>> from regard.app.standalone import make_page
    >>> "<title>Dogs &amp; cats</title>" in make_page([], title="Dogs & cats")
    True
    """
    nothing = isinstance(x, Sequence) and not x
    exhibit = ViewModel(title, []) if nothing else ViewModel.of(x, title=title)
    sheet, script = static("export.css") + style(), bundle("export.js")
    page = Template(static("export.html")).substitute(
        policy=escape(_policy(sheet, script)),
        title=escape(title or exhibit.title),
        about=escape(about),
        style=sheet,
        script=script,
        data=_as_json(embedded(exhibit)),
    )
    return page.encode("utf-8", "replace").decode()  # half a surrogate pair is no letter


def show(
    x: Any, *, queries: Sequence[str] | None = None, keys: Sequence[str] | None = None, title: str = ""
) -> Any:
    """Look at something: as a widget in a notebook, and elsewhere as a page in the browser.

    x, queries, keys, title: as of `ViewModel.of`.

    In a notebook the widget is returned, which shows where it stands as
    the last line of a cell. Elsewhere a page is written among the temporary files and opened, and its path is
    returned.

    >>> import regard
    >>> from regard.app.standalone import show
    >>> def look(weights: regard.Weights) -> None:
    ...     print("to be found at", show(weights, title="Dogs"))
    """
    exhibit = ViewModel.of(x, queries, keys, title)
    if _in_notebook():
        from regard.app import widget

        return widget.show(exhibit)
    path = write_page(Path(tempfile.mkdtemp(prefix="regard-")) / "attention.html", exhibit, title=title)
    webbrowser.open(path.resolve().as_uri())
    return path


def _in_notebook() -> bool:
    """Whether somebody looks at cells: a Jupyter kernel, also that of Colab and VS Code; or marimo."""
    marimo = sys.modules.get("marimo")
    if marimo is not None and getattr(marimo, "running_in_notebook", bool)():
        return True
    python = sys.modules.get("IPython")
    shell = None if python is None else python.get_ipython()
    return getattr(shell, "kernel", None) is not None


def _policy(sheet: str, script: str) -> str:
    """Our own style and script, known by their hashes, and nothing else: no address, no other script."""
    allowed = {"style-src": sheet, "script-src": script}
    hashes = {name: b64encode(sha256(text.encode()).digest()).decode() for name, text in allowed.items()}
    ours = [f"{name} 'sha256-{value}'" for name, value in hashes.items()]
    return "; ".join(["default-src 'none'", *ours, "base-uri 'none'", "form-action 'none'"])


def _as_json(data: Any) -> str:
    """JSON without any letter that HTML could take for markup, or a script for the end of a line."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate({ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"})
