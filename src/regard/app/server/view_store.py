"""Open views by id; the least recently used are evicted."""

import secrets
import threading
from collections import OrderedDict
from http import HTTPStatus
from typing import Any

from torch import Tensor

from regard.app.protocol import Question, Work, tau_cost
from regard.app.server.schema import ViewResponse
from regard.app.server.security import RequestError
from regard.app.view_model import ViewModel

MAX_VIEWS = 64
MAX_BYTES = 1_000_000_000
MAX_COST = 2**34  # weights that one question may read: one head of 131,072 tokens, about 30 seconds


class ViewStore:
    """LRU cache of views, bounded in number and bytes.

    >>> import torch
    >>> from regard.app.view_model import ViewModel
    >>> from regard.app.server.view_store import ViewStore
    >>> views = ViewStore(max_views=1)
    >>> first = views.add(ViewModel.of(torch.eye(3)[None]))
    >>> second = views.add(ViewModel.of(torch.eye(5)[None]))
    >>> views.find(second.id).describe()["inputs"][0]["layers"][0]["heads"]
    1
    >>> views.find(first.id)
    Traceback (most recent call last):
    regard.app.server.security.RequestError: This view has expired. Create it again.
    """

    def __init__(
        self, max_views: int = MAX_VIEWS, max_bytes: int = MAX_BYTES, max_cost: int = MAX_COST
    ) -> None:
        self._max_views, self._max_bytes, self._max_cost = max_views, max_bytes, max_cost
        self._views: OrderedDict[str, tuple[ViewModel, int]] = OrderedDict()
        self._pinned: dict[str, ViewModel] = {}
        self._lock = threading.Lock()

    def add(self, view: ViewModel) -> ViewResponse:
        """Store a view and return its description with its id."""
        view_id = secrets.token_urlsafe(12)
        self._store(view_id, view)
        return self.describe(view_id)

    def pin(self, view: ViewModel) -> str:
        """Store a view that is never evicted; return its id."""
        view_id = secrets.token_urlsafe(12)
        self._pinned[view_id] = view
        return view_id

    def find(self, view_id: str) -> ViewModel:
        """Return the view with this id."""
        if view_id in self._pinned:
            return self._pinned[view_id]
        with self._lock:
            if view_id not in self._views:
                raise RequestError(HTTPStatus.NOT_FOUND, "This view has expired. Create it again.")
            self._views.move_to_end(view_id)
            return self._views[view_id][0]

    def describe(self, view_id: str) -> ViewResponse:
        """Return the description of a view."""
        return ViewResponse(id=view_id, **self.find(view_id).describe())

    def prepare(self, view_id: str, question: Question) -> Work:
        """Check a question about a view; raise RequestError if the answer reads too many weights."""
        view = self.find(view_id)
        layer = view.layer(question)
        work = question.on(layer)
        if work.cost > self._max_cost:
            raise RequestError(
                HTTPStatus.UNPROCESSABLE_ENTITY,
                f"This request reads {work.cost:,} weights (queries × keys × heads); the limit is "
                f"{self._max_cost:,}. Request fewer heads, or a smaller tile.",
            )

        def answer() -> Any:
            result = work.answer()
            if view_id not in self._pinned:
                self._store(view_id, view)  # update its size: expensive answers are cached in the view
            return result

        return Work(work.cost + tau_cost(layer), answer)

    def _store(self, view_id: str, view: ViewModel) -> None:
        size = view_bytes(view)
        with self._lock:
            self._views[view_id] = view, size
            self._views.move_to_end(view_id)
            total = sum(size for _, size in self._views.values())
            while len(self._views) > 1 and (len(self._views) > self._max_views or total > self._max_bytes):
                total -= self._views.popitem(last=False)[1][1]

    def __len__(self) -> int:
        return len(self._views)


def view_bytes(view: ViewModel) -> int:
    """Return the bytes held by the tokens and tensors of a view; shared storage counts once."""
    storages: dict[int, int] = {}
    size = 0
    for model_input in view.inputs:
        size += sum(100 * len(text.tokens) for text in model_input.texts)
        for layer in model_input.layers:
            weights = layer.weights
            tensors = [weights] if isinstance(weights, Tensor) else weights.problem.tensors.values()
            for storage in (tensor.untyped_storage() for tensor in tensors):
                storages[storage.data_ptr()] = storage.nbytes()
            size += sum(getattr(answer, "nbytes", 0) for answer in list(layer.cache.values()))
    return size + sum(storages.values())
