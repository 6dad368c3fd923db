"""A view as a single HTML file that works offline.

The file contains the weights: arrays are little-endian float32 in base64, and large matrices are pooled to
block means, so browsers can open the file.
"""

import math
import os
import sys
import tempfile
import webbrowser
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard._util.files import write_atomic
from regard._util.text import type_name
from regard.app.bundle import bundle, static, style
from regard.app.inline_html import content_security_policy, to_json
from regard.app.view_model import ViewModel, join_notes
from regard.app.weight_computation import formula
from regard.errors import ArgumentError, DTypeError
from regard.inspection.layer_view import Floats, InputView, LayerView, as_floats
from regard.mechanism.weights.weights import Weights

EXTENSIONS = (".html", ".htm")
# side lengths of a pooled matrix; the largest that fits is used
_SIZES = (512, 384, 256, 192, 128, 96, 64, 48, 32)
_MAX_WEIGHTS = 6_000_000  # per file, about 32 MB
_MAX_VECTOR_NUMBERS = 2_000_000  # total size of all query and key vectors
_MAX_STATISTICS = 2**31  # head statistics are computed for layers with up to this many weights


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
            raise DTypeError(f"write_page got {name}={text!r:.40}, {type_name(text)}; it must be a string.")
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
        policy=escape(content_security_policy(css, script)),
        title=escape(title or view.title or "Attention weights"),
        about=escape(about),
        style=css,
        script=script,
        data=to_json(embedded(view)),
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


def embedded(view: ViewModel) -> dict[str, Any]:
    """Return the description and all data of a view as JSON-serializable values.

    >>> import torch
    >>> from regard.app.standalone import embedded
    >>> from regard.app.view_model import ViewModel
    >>> layer = embedded(ViewModel.of(torch.eye(3)))["inputs"][0]["layers"][0]
    >>> layer["weights"]["shape"], layer["pooled"], layer["heads"][0]["label"]
    ([1, 3, 3], False, 'same token')
    """
    layers = [layer for model_input in view.inputs for layer in model_input.layers]
    fitting = (size for size in _SIZES if sum(_pooled_size(layer, size) for layer in layers) <= _MAX_WEIGHTS)
    size = next(fitting, _SIZES[-1])
    vectors = sum(map(_vector_numbers, layers)) <= _MAX_VECTOR_NUMBERS
    description = view.describe()
    inputs = []
    for model_input, described in zip(view.inputs, description["inputs"], strict=True):
        data = [_layer(layer, size, vectors) for layer in model_input.layers]
        for layer_data, described_layer in zip(data, described["layers"], strict=True):
            described_layer["vectors"] = layer_data["query"] is not None
        described["note"] = join_notes(described["note"], _note(model_input, size))
        inputs.append({"layers": data})
    return {"view": description, "inputs": inputs}


def _pooled_size(layer: LayerView, size: int) -> int:
    queries, keys = layer.size
    return layer.heads * min(queries, size) * min(keys, size)


def _vector_numbers(layer: LayerView) -> int:
    """Return the total size of the query and key vectors of a layer."""
    if not layer.has_vectors or not isinstance(layer.weights, Weights):
        return 0
    return layer.heads * sum(layer.size) * layer.weights.problem["query"].shape[-1]


def _note(model_input: InputView, size: int) -> str:
    """Return a note about pooling, if any layer is pooled."""
    pooled = {layer.size for layer in model_input.layers if max(layer.size) > size}
    if not pooled:
        return ""
    queries, keys = max(pooled, key=math.prod)
    return (
        f"This file contains block means, at most {size} × {size} of {queries:,} × {keys:,} weights. "
        "Notebooks and regard look show every weight."
    )


def _layer(layer: LayerView, size: int, vectors: bool) -> dict[str, Any]:
    pooled = max(layer.size) > size
    heads = None
    if layer.heads * math.prod(layer.size) <= _MAX_STATISTICS:
        heads = [{"head": head, **item.to_dict()} for head, item in enumerate(layer.head_statistics())]
    weights = _encode(layer.tile(slice(None), slice(None), size, size))
    data = _vectors(layer if vectors and not pooled else None)
    return {"weights": weights, "pooled": pooled, "heads": heads, **data}


@torch.no_grad()
def _vectors(layer: LayerView | None) -> dict[str, Any]:
    """Return the query and key vectors of a layer, or None for each field if they are not available."""
    empty = dict.fromkeys(("query", "key", "scale", "normalizer", "formula", "tau"))
    if layer is None or not layer.has_vectors or not isinstance(layer.weights, Weights):
        return empty
    layer.weights.check_inputs()
    problem = layer.weights.problem
    if problem.config.softcap is not None:
        return empty

    def by_head(x: Tensor) -> Tensor:  # … g r n d -> h n d
        return x.expand(*problem.lead(), *x.shape[-2:]).reshape(layer.heads, *x.shape[-2:])

    tau = by_head(problem["tau"]).double().sum(-1)
    return {
        "query": _encode(as_floats(by_head(problem["query"]))),
        "key": _encode(as_floats(by_head(problem["key"]))),
        "scale": problem.config.scale,
        "normalizer": type(problem.config.normalize).__name__,
        "formula": formula(problem.config.normalize),
        # torch's SDPA does not return τ
        "tau": None if bool(tau.isnan().any()) else _encode(as_floats(tau)),
    }


def _encode(x: Floats) -> dict[str, Any]:
    return {"shape": list(x.shape), "data": b64encode(np.ascontiguousarray(x, "<f4").tobytes()).decode()}
