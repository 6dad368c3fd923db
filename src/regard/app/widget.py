"""A widget for notebooks: Jupyter, VS Code, Colab and marimo, through anywidget.

The kernel holds the weights and answers what the view asks, so that long inputs are looked at part by part.
Nothing is loaded from anywhere: script and style travel with the widget.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import anywidget
import numpy as np
import traitlets

from regard.app.bundle import bundle, style
from regard.app.view_model import ViewModel
from regard.errors import RegardError


class AttentionWidget(anywidget.AnyWidget):
    """The interactive view of an exhibit, or of what `ViewModel.of` makes one of, in a notebook.

    x, queries, keys, title: as of `ViewModel.of`.
    options: how it begins: view="matrix" (or "lines", "heads", "numbers"), layer=2, heads=[0], compact=True.

    >>> import torch
    >>> from regard.app.widget import AttentionWidget
    >>> AttentionWidget(torch.eye(2), queries=["dogs", "bark"], view="matrix").exhibit["inputs"][0]["texts"]
    [{'tokens': ['dogs', 'bark'], 'special': []}]
    """

    _esm = bundle("widget.js")
    _css = style()
    exhibit = traitlets.Dict().tag(sync=True)
    options = traitlets.Dict().tag(sync=True)

    def __init__(
        self,
        x: Any,
        queries: Sequence[str] | None = None,
        keys: Sequence[str] | None = None,
        title: str = "",
        **options: Any,
    ) -> None:
        self._asked = ViewModel.of(x, queries, keys, title)
        super().__init__(exhibit=self._asked.describe(), options=options)
        self.on_msg(self._receive)

    def _receive(self, _: Any, message: Any, buffers: Any) -> None:
        """Answer a question; what is wrong with it becomes a message, as an exception would go nowhere."""
        given = message if isinstance(message, Mapping) else {}
        number = given.get("id")
        number = number if isinstance(number, int | str) else None
        try:
            facts, arrays = self._asked.ask(given.get("question", ""), given.get("arguments"))
        except RegardError as error:
            self.send({"id": number, "error": str(error)})
        except Exception as error:
            self.send({"id": number, "error": f"{type(error).__name__}: {error}"})
        else:
            shapes = [list(array.shape) for array in arrays]
            sent = [np.ascontiguousarray(array, "<f4").tobytes() for array in arrays]
            self.send({"id": number, "facts": facts, "shapes": shapes}, sent)


def show(
    x: Any,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    title: str = "",
    **options: Any,
) -> AttentionWidget:
    """The interactive view of anything that can be looked at, as a widget.

    >>> import torch
    >>> from regard.app.widget import show
    >>> type(show(torch.eye(2)))
    <class 'regard.app.widget.AttentionWidget'>
    """
    return AttentionWidget(x, queries, keys, title, **options)
