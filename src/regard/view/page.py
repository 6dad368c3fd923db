"""A page of translations and their word alignments: one file, that needs nothing from anywhere."""

import json
import math
import os
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from regard.errors import ArgumentError
from regard.mechanism.files import write_whole
from regard.translation.alignment import DECIMALS
from regard.translation.translator import Translation

ENDINGS = (".html", ".htm")
CELLS = 40_000  # of a matrix; a browser takes long for more


def write_page(
    path: str | os.PathLike[str], translations: Sequence[Translation], *, title: str, about: str = ""
) -> Path:
    """Write a page that shows translations and which word came from which: lines, and a matrix of weights.

    It is one file with everything in it, to be opened in a browser. Translations by a model without attention
    are shown without lines, with the reason. title: what stands on top; about: a sentence below it.

    Alignments are read one by one, unless `translate(…, alignment=True)` has already read them together.

    >>> import tempfile
    >>> from regard.models import Recipe, Transformer
    >>> from regard.translation import Tokens, Translator, TwoSides
    >>> from regard.view.page import write_page
    >>> tokens = Tokens.learn(["ein Hund bellt", "a dog barks"] * 10, kind="words")
    >>> model = Transformer(len(tokens), Recipe(width=16, heads=2, layers=1))
    >>> found = Translator(model, TwoSides(tokens, tokens)).translate(["ein Hund"], alignment=True)
    >>> write_page(tempfile.mkdtemp() + "/dogs.html", found, title="Dogs").name
    'dogs.html'
    """
    if Path(path).suffix.lower() not in ENDINGS:
        raise ArgumentError(f"the page {os.fspath(path)!r} can end in {', '.join(ENDINGS)}.")
    return write_whole(path, make_page(translations, title=title, about=about).encode())


def make_page(translations: Sequence[Translation], *, title: str, about: str = "") -> str:
    """The page that `write_page` writes, as text.

    >>> from regard.view.page import make_page
    >>> "<title>Dogs &amp; cats</title>" in make_page([], title="Dogs & cats")
    True
    """
    style, script = _static("alignments.css"), _static("alignments.js")
    page = Template(_static("alignments.html")).substitute(
        policy=escape(_policy(style, script)),
        title=escape(title),
        about=escape(about),
        style=style,
        script=script,
        data=_embedded({"pairs": [_pair(each) for each in translations]}),
    )
    return page.encode("utf-8", "replace").decode()  # half a surrogate pair is no letter


def _static(name: str) -> str:
    return (files("regard.view") / "static" / name).read_text("utf-8")


def _policy(style: str, script: str) -> str:
    """Our own style and script, known by their hashes, and nothing else: no address, no other script."""
    allowed = {"style-src": style, "script-src": script}
    hashes = {name: b64encode(sha256(text.encode()).digest()).decode() for name, text in allowed.items()}
    ours = [f"{name} 'sha256-{value}'" for name, value in hashes.items()]
    return "; ".join(["default-src 'none'", *ours, "base-uri 'none'", "form-action 'none'"])


def _embedded(data: Any) -> str:
    """JSON without any letter that HTML could take for markup, or a script for the end of a line."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate({ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"})


def _pair(translation: Translation) -> dict[str, Any]:
    """What the page knows of a translation; without weights there is a reason, or there are no words."""
    words = {"source_words": translation.source.split(), "target_words": translation.text.split()}
    read: dict[str, Any] = {**words, "weights": None}
    sizes, reason = [len(each) for each in words.values()], ""
    if math.prod(sizes) > CELLS:
        reason = f"{sizes[0]:,} source words and {sizes[1]:,} target words are too many to be drawn."
    elif all(sizes):
        try:
            read = translation.alignment.to_dict()
        except ArgumentError as error:  # the model does not attend
            reason = str(error)
    return {
        "source": translation.source,
        "text": translation.text,
        "score": round(translation.score, DECIMALS) if math.isfinite(translation.score) else None,
        "note": translation.note,
        **read,
        "reason": reason,
    }
