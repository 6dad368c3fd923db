"""What is being looked at: exhibits under their ids, the last used ones, as long as there is room."""

import base64
import secrets
import threading
from collections import OrderedDict
from http import HTTPStatus
from typing import Any

import msgspec
import numpy as np
from torch import Tensor

from regard.app.server.schema import Array, Shown, Told
from regard.app.server.security import Refused
from regard.app.view_model import ViewModel

COUNT = 64
SIZE = 1_000_000_000  # bytes
PAIRS = 2**34  # weights that one question reads: one head of 131,072 tokens, about half a minute


class ViewStore:
    """Keeps exhibits; when there are too many or too large ones, the one that was not used longest goes.

    >>> import torch
    >>> from regard.app.view_model import ViewModel
    >>> from regard.app.server.view_store import ViewStore
    >>> exhibits = ViewStore(count=1)
    >>> first = exhibits.keep(ViewModel.of(torch.eye(3)[None]))
    >>> second = exhibits.keep(ViewModel.of(torch.eye(5)[None]))
    >>> exhibits.find(second.id).describe()["inputs"][0]["layers"][0]["heads"]
    1
    >>> exhibits.find(first.id)
    Traceback (most recent call last):
    regard.app.server.security.Refused: this view is no longer kept; look again.
    """

    def __init__(self, count: int = COUNT, size: int = SIZE, pairs: int = PAIRS) -> None:
        self._count, self._size, self._pairs = count, size, pairs
        self._kept: OrderedDict[str, tuple[ViewModel, int]] = OrderedDict()
        self._pinned: dict[str, ViewModel] = {}
        self._changing = threading.Lock()

    def keep(self, exhibit: ViewModel) -> Shown:
        """The id under which it can be asked, and what there is to see."""
        name = secrets.token_urlsafe(12)
        described: Any = exhibit.describe()
        self._weigh(name, exhibit)
        return Shown(id=name, exhibit=described)

    def pin(self, exhibit: ViewModel) -> str:
        """The id of one that never goes."""
        name = secrets.token_urlsafe(12)
        self._pinned[name] = exhibit
        return name

    def find(self, name: str) -> ViewModel:
        """The exhibit of an id."""
        if name in self._pinned:
            return self._pinned[name]
        with self._changing:
            if name not in self._kept:
                raise Refused(HTTPStatus.NOT_FOUND, "this view is no longer kept; look again.")
            self._kept.move_to_end(name)
            return self._kept[name][0]

    def pairs(self, name: str, question: str, asked: msgspec.Struct) -> int:
        """How many weights are read for an answer; refused if the answer itself takes too many."""
        exhibit = self.find(name)
        found = exhibit.pairs(question, arguments(asked))
        if found > self._pairs:
            part = "heads" if question in ("heads", "received") else "heads, or for a part: rows and columns"
            raise Refused(
                HTTPStatus.UNPROCESSABLE_ENTITY,
                f"this question reads {found:,} weights (queries × keys × heads); at most {self._pairs:,} "
                f"are read at once: ask for fewer {part}.",
            )
        return found + exhibit.unread(arguments(asked))

    def ask(self, name: str, question: str, asked: msgspec.Struct) -> Told:
        """What an exhibit answers, as JSON can hold it."""
        exhibit = self.find(name)
        answer = exhibit.ask(question, arguments(asked))
        if question != "numbers" and name not in self._pinned:
            self._weigh(name, exhibit)  # it remembers what was expensive to find
        return Told(facts=answer.facts, arrays=[_array(one) for one in answer.arrays])

    def _weigh(self, name: str, exhibit: ViewModel) -> None:
        size = held(exhibit)
        with self._changing:
            self._kept[name] = exhibit, size
            self._kept.move_to_end(name)
            while len(self._kept) > 1 and (len(self._kept) > self._count or self._used() > self._size):
                self._kept.popitem(last=False)

    def _used(self) -> int:
        return sum(size for _, size in self._kept.values())

    def __len__(self) -> int:
        return len(self._kept)


def arguments(asked: msgspec.Struct) -> dict[str, Any]:
    """A request as the arguments of a question; what is null was left out."""
    return {name: value for name, value in msgspec.structs.asdict(asked).items() if value is not None}


def _array(numbers: Any) -> Array:
    plain = np.ascontiguousarray(numbers, dtype="<f4")
    return Array(shape=list(plain.shape), data=base64.b64encode(plain.tobytes()).decode("ascii"))


def held(exhibit: ViewModel) -> int:
    """How many bytes an exhibit holds: tensors, of which what several share counts once, and its tokens."""
    storages: dict[int, int] = {}
    found = 0
    for one in exhibit.inputs:
        found += sum(100 * len(text.tokens) for text in one.texts)
        for layer in one.layers:
            for tensor in _tensors(layer.weights):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
            found += sum(getattr(answer, "nbytes", 0) for answer in list(layer.kept.values()))
    return found + sum(storages.values())


def _tensors(weights: Any) -> list[Tensor]:
    return [weights] if isinstance(weights, Tensor) else list(weights._problem.tensors.values())
