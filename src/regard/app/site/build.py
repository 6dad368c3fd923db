"""A static site: the page of `regard look` with small models that run in the browser.

The site is one file, index.html, which contains scripts, styles and parameters. It needs no server: a file:
address is enough, and nothing is loaded from the network.
"""

import os
import re
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from regard._util.extras import installed_version
from regard._util.files import short_names, write_atomic
from regard._util.text import format_bytes
from regard.app import first_link
from regard.app.bundle import bundle_page, static, static_names
from regard.app.inline_html import content_security_policy, to_json
from regard.app.server.domain import domain_of
from regard.app.server.guide import published_guide
from regard.app.server.registry import DATES, Registry
from regard.app.server.routes import lessons
from regard.app.server.routes.models import ModelInfo
from regard.app.site.models import (
    SiteModel,
    export_config,
    export_encoder,
    export_language_model,
    export_translator,
)
from regard.app.weight_computation import formula
from regard.errors import ArgumentError
from regard.models.layers.blocks import TransformerConfig
from regard.models.text_model import TextModel
from regard.translation.translator import Translator

INDEX = "index.html"
MAX_BYTES = 1 << 27  # size of all parameters; browsers load larger pages slowly or not at all
_ORDER = TransformerConfig(width=lessons._WIDTH, heads=lessons._HEADS, layers=1)
_MARK = '<meta name="generator" content="regard site">'
_SECTIONS = ("lookup", "order", "inside", "heads", "translate")
_LINK = re.compile(r'<link rel="stylesheet" href="static/(?P<path>[^"]+)">\n')
_SCRIPT = re.compile(r'<script type="module" src="static/[^"]+"></script>\n')
_ICON = re.compile(r'"static/(?P<path>[^"]+\.svg)"')


def write_site(
    folders: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str], *, guide: str = ""
) -> Path:
    """Write a static site with models that run in the browser; return the path of its index.html.

    folders: model folders, or "minilm"; default: the models shipped with regard.
    output: a new or empty folder, or one written by this function, whose index.html is replaced.
    guide: address of the guide, relative to the site, for links to its chapters; default: chapters are named
        but not linked.

    >>> import tempfile
    >>> from regard.app.site.build import write_site
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = write_site([], f"{folder}/site")
    ...     print(page.name, page.read_text().count("<script"))
    index.html 4
    """
    index = Path(output) / INDEX
    _check_output(index)
    return write_atomic(index, make_site(load_models(folders), guide).encode())


def load_models(folders: Sequence[str | os.PathLike[str]] = ()) -> list[SiteModel]:
    """Load and export the models of a site; by default the ones shipped with regard.

    >>> from regard.app.site.build import load_models
    >>> [model.about["info"]["name"] for model in load_models()]
    ['stories', 'dates']
    """
    paths = [os.fspath(folder) for folder in folders] or ["stories", os.fspath(DATES)]
    return [_load(name, path) for name, path in zip(short_names(paths), paths, strict=True)]


def _load(name: str, path: str) -> SiteModel:
    registry = Registry.load([path])
    entries = registry.entries.values()
    if not entries:
        raise ArgumentError(f"{path!r} has no model yet: it is still being trained. Try again later.")
    (entry,) = entries
    info = {**msgspec.to_builtins(msgspec.convert(entry, ModelInfo, from_attributes=True)), "name": name}
    model = entry.model
    if isinstance(model, Translator):
        exported = export_translator(model, info)
        domain = domain_of(model, registry.folders.get(entry.name), list(entry.examples))
        words = None if domain.words is None else sorted(domain.words)
        about = {
            "domain": {
                "words": words,
                "lowest": domain.lowest,
                "unseen": domain.unseen,
                "factor": domain.factor,
            }
        }
        return exported._replace(about=exported.about | about)
    if isinstance(model, TextModel):
        return export_language_model(model.model, model.tokens, sorted(model.capitalized), info)
    return export_encoder(model, info)


def make_site(models: Sequence[SiteModel], guide: str = "") -> str:
    """Return index.html with the given models. guide: as in `write_site`.

    >>> from regard.app.site.build import make_site
    >>> "connect-src" in make_site([])  # default-src 'none' forbids connections
    False
    """
    size = sum(len(model.weights) for model in models)
    if size > MAX_BYTES:
        raise ArgumentError(
            f"The models have {format_bytes(size)} of parameters; the limit for a site is "
            f"{format_bytes(MAX_BYTES)}. Pass fewer or smaller models."
        )
    site = describe_site(models, guide)
    page = static("page/index.html")
    styles = [*(link["path"] for link in _LINK.finditer(page)), "local/site.css"]
    css = "\n".join(map(static, styles))
    script = bundle_page(
        ["local/start.js", *(f"page/sections/{name}.js" for name in site["sections"]), "page/page.js"]
    )
    policy = escape(content_security_policy(css, script, images="data: blob:"))
    head = f'{_MARK}\n<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    body = f'{_data_blocks(site, models)}\n<script type="module">{script}</script>\n</body>'
    page = _SCRIPT.sub("", _LINK.sub("", page)).replace(
        '<meta charset="utf-8">\n', f'<meta charset="utf-8">\n{head}'
    )
    page = _ICON.sub(lambda icon: f'"{_data_address(icon["path"])}"', page)
    return page.replace("</head>", f"<style>{css}</style>\n</head>").replace("</body>", body)


def _has_models(section: str, models: Sequence[SiteModel]) -> bool:
    """Return whether a section exists and, if it needs a model, has one."""
    if section not in static_names("page/sections"):
        return False
    if section == "translate":
        return any(model.about["architecture"] == "encoder-decoder" for model in models)
    return section in ("lookup", "order") or bool(models)


def describe_site(models: Sequence[SiteModel], guide: str = "") -> dict[str, Any]:
    """Return the data of a site that `static/local/backend.js` reads, except the parameters.

    guide: as in `write_site`.

    >>> from regard.app.site.build import describe_site
    >>> describe_site([])["sections"]
    ['lookup', 'order']
    """
    return {
        "version": installed_version(),
        "sections": [name for name in _SECTIONS if _has_models(name, models)],
        "models": [model.about for model in models],
        "formulas": {
            "scores": {name: text for name, (text, _) in lessons._SCORES.items()},
            "normalizers": {name: formula(value, "{s}") for name, value in lessons._NORMALIZERS.items()},
        },
        "order": export_config(_ORDER, "order"),
        "words": {"pronoun": first_link._PRONOUN.pattern, "function_word": first_link._FUNCTION_WORD.pattern},
        "guide": guide or published_guide(),
    }


def _data_blocks(site: dict[str, Any], models: Sequence[SiteModel]) -> str:
    """Return script elements with the data of the site and the parameters of each model."""
    blocks = [f'<script type="application/json" id="site-data">{to_json(site)}</script>']
    for number, model in enumerate(models):
        text = b64encode(model.weights).decode()
        blocks.append(f'<script type="text/plain" id="weights-{number}">{text}</script>')
    return "\n".join(blocks)


def _data_address(path: str) -> str:
    return f"data:image/svg+xml;base64,{b64encode(static(path).encode()).decode()}"


def _check_output(index: Path) -> None:
    """Raise an error unless the folder is new, empty or an earlier site, to protect other files."""
    folder = index.parent
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise ArgumentError(f"{os.fspath(folder)!r} is a file; pass a folder for the site.")
    if not any(folder.iterdir()):
        return
    try:
        with open(index, "rb") as file:
            is_site = _MARK.encode() in file.read(4096)
    except OSError:
        is_site = False
    if not is_site:
        raise ArgumentError(
            f"{os.fspath(folder)!r} has files, but was not written by regard site; pass a new folder, such "
            f"as {os.fspath(folder / 'site')!r}."
        )
