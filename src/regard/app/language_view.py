"""View all attention layers of a language model."""

from collections.abc import Sequence

import torch

from regard._util.checks import check_sentences
from regard._util.text import shorten
from regard.app.view_model import ViewModel
from regard.inspection.layer_view import InputView, LayerView, TextView
from regard.mechanism.weights.weights import Weights
from regard.models.layers.attention import watch_layers
from regard.models.layers.dropout import eval_mode
from regard.models.packed import Packed
from regard.models.text_model import TextModel


def look_at_language_model(model: TextModel, texts: str | Sequence[str], *, title: str = "") -> ViewModel:
    """View all attention layers of a language model, with one input per text.

    >>> import regard
    >>> from regard.app.language_view import look_at_language_model
    >>> view = look_at_language_model(regard.load_language_model("stories"), "Tom ran.")
    >>> view.describe()["inputs"][0]["texts"]
    [{'tokens': ['<s>', 'tom', 'ran', '.'], 'special': [0]}]
    """
    return ViewModel(title, [_input(model, text) for text in check_sentences(texts)])


def _input(model: TextModel, text: str) -> InputView:
    ids = model.encode(text)
    seen: list[tuple[str, Weights]] = []
    record = watch_layers(model.model, lambda name, weights: seen.append((name, weights)))
    with torch.no_grad(), eval_mode(model.model), record:
        model.model(Packed.of([ids]))
    layers = [
        LayerView(name, f"layer {number}", "self", weights) for number, (name, weights) in enumerate(seen)
    ]
    return InputView(shorten(text), [TextView(tuple(model.tokens[i] for i in ids), (0,))], layers)
