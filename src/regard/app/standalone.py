"""A view as a single HTML file that works offline."""

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
from regard._util.text import type_name
from regard.app.bundle import bundle, static, style
from regard.app.embedded import embedded
from regard.app.view_model import ViewModel
from regard.errors import ArgumentError, DTypeError

EXTENSIONS = (".html", ".htm")


def write_page(path: str | os.PathLike[str], x: Any, *, title: str = "", about: str = "") -> Path:
    """Write an interactive view of attention as one HTML file.

    Large weight matrices are reduced to block means; a note on the page says so.

    path: an .html file.
    x: a ViewModel, or anything `ViewModel.of` accepts: weights, a `Seen`, translations. Translations by a
    model without attention are shown without lines. Alignments are computed one by one, unless they were
    requested with `translate(…, alignment=True)`.
    title: heading of the page.
    about: a sentence below the heading.

    >>> import tempfile
    >>> from regard.models import TransformerConfig, Transformer
    >>> from regard.translation import Tokenizer, Translator, TokenizerPair
    >>> from regard.app.standalone import write_page
    >>> tokens = Tokenizer.learn(["ein Hund bellt", "a dog barks"] * 10, kind="words")
    >>> model = Transformer(len(tokens), TransformerConfig(width=16, heads=2, layers=1))
    >>> translator = Translator(model, TokenizerPair(tokens, tokens))
    >>> translations = translator.translate(["ein Hund"], alignment=True)
    >>> write_page(tempfile.mkdtemp() + "/dogs.html", translations, title="Dogs").name
    'dogs.html'
    """
    for name, text in (("title", title), ("about", about)):
        if not isinstance(text, str):
            raise DTypeError(f"write_page: {name} is {text!r:.40}, {type_name(text)}; it must be a string.")
    if Path(path).suffix.lower() not in EXTENSIONS:
        raise ArgumentError(f"Cannot write a page to {os.fspath(path)!r}. Use the extension {EXTENSIONS[0]}.")
    return write_atomic(path, make_page(x, title=title, about=about).encode())


def make_page(x: Any, *, title: str = "", about: str = "") -> str:
    """Return the page that `write_page` writes, as text.

    >>> from regard.app.standalone import make_page
    >>> "<title>Dogs &amp; cats</title>" in make_page([], title="Dogs & cats")
    True
    """
    empty = isinstance(x, Sequence) and not x
    view = ViewModel(title, []) if empty else ViewModel.of(x, title=title)
    css, script = static("export.css") + style(), bundle("attention/export.js")
    page = Template(static("export.html")).substitute(
        policy=escape(_content_security_policy(css, script)),
        title=escape(title or view.title),
        about=escape(about),
        style=css,
        script=script,
        data=_to_json(embedded(view)),
    )
    return page.encode("utf-8", "replace").decode()  # replaces lone surrogates


def show(
    x: Any, *, queries: Sequence[str] | None = None, keys: Sequence[str] | None = None, title: str = ""
) -> Any:
    """Show a view as a widget in a notebook, otherwise as a page in the browser.

    In a notebook, return the widget, which is displayed if it is the last expression of a cell. Otherwise,
    write a temporary page, open it and return its path.

    x, queries, keys, title: as in `ViewModel.of`.

    >>> import regard
    >>> from regard.app.standalone import show
    >>> def look(weights: regard.Weights) -> None:
    ...     print("saved as", show(weights, title="Dogs"))
    """
    view = ViewModel.of(x, queries, keys, title)
    if _in_notebook():
        from regard.app.widget import AttentionWidget

        return AttentionWidget(view)
    path = write_page(Path(tempfile.mkdtemp(prefix="regard-")) / "attention.html", view, title=title)
    webbrowser.open(path.resolve().as_uri())
    return path


def _in_notebook() -> bool:
    """Return whether this is a Jupyter kernel (also Colab and VS Code) or marimo."""
    marimo = sys.modules.get("marimo")
    if marimo is not None and getattr(marimo, "running_in_notebook", bool)():
        return True
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def _content_security_policy(css: str, script: str) -> str:
    """Return a policy that allows only this style and this script, identified by their hashes."""
    allowed = {"style-src": css, "script-src": script}
    hashes = {name: b64encode(sha256(text.encode()).digest()).decode() for name, text in allowed.items()}
    rules = [f"{name} 'sha256-{value}'" for name, value in hashes.items()]
    return "; ".join(["default-src 'none'", *rules, "base-uri 'none'", "form-action 'none'"])


def _to_json(data: Any) -> str:
    """Return JSON without characters that are special in HTML or that end a line in JavaScript."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate({ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"})
