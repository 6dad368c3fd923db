"""A notebook widget for Jupyter, VS Code, Colab and marimo (anywidget).

The kernel holds the weights and sends only the parts that the view requests, so inputs can be long. Script
and style are part of the widget; nothing is downloaded.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from regard._util.extras import require
from regard.app.bundle import bundle, style
from regard.app.protocol import encode_array
from regard.app.view_model import ViewModel
from regard.errors import RegardError

require("anywidget", "AttentionWidget")
import anywidget  # noqa: E402
import traitlets  # noqa: E402


class AttentionWidget(anywidget.AnyWidget):
    """The interactive view in a notebook.

    x, queries, keys, title: as in `ViewModel.of`.
    options: initial state: `view` ("lines", "matrix", "heads" or "numbers"), `layer`, `heads` and `compact`.

    >>> import torch
    >>> from regard.app.widget import AttentionWidget
    >>> widget = AttentionWidget(torch.eye(2), queries=["dogs", "bark"], view="matrix")
    >>> widget.view["inputs"][0]["texts"]
    [{'tokens': ['dogs', 'bark'], 'special': []}]
    """

    _esm = bundle("attention/widget.js")
    _css = style()
    view = traitlets.Dict().tag(sync=True)
    options = traitlets.Dict().tag(sync=True)

    def __init__(
        self,
        x: Any,
        queries: Sequence[str] | None = None,
        keys: Sequence[str] | None = None,
        title: str = "",
        **options: Any,
    ) -> None:
        self._view_model = ViewModel.of(x, queries, keys, title)
        super().__init__(view=self._view_model.describe(), options=options)
        self.on_msg(self._receive)

    def _receive(self, _: Any, message: Any, buffers: Any) -> None:
        """Answer a question. Errors are sent as messages, because an exception would not reach the view."""
        message = message if isinstance(message, Mapping) else {}
        message_id = message.get("id")
        message_id = message_id if isinstance(message_id, int | str) else None
        try:
            answer = self._view_model.ask(message.get("question", ""), message.get("arguments"))
        except RegardError as error:
            self.send({"id": message_id, "error": str(error)})
        except Exception as error:
            self.send({"id": message_id, "error": f"{type(error).__name__}: {error}"})
        else:
            if isinstance(answer, np.ndarray):
                self.send({"id": message_id}, [encode_array(answer)])
            else:
                self.send({"id": message_id, "answer": msgspec.to_builtins(answer)})
