"""The models that were named when the server started: no others can be reached, and these by name alone."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal, NamedTuple

from regard._util.text import shorten
from regard.app.server.security import Refused
from regard.app.view_model import ViewModel
from regard.errors import ArgumentError
from regard.inspection.watch import Seen
from regard.models.encoders.base import WordEncoder
from regard.models.encoders.pretrained import load_encoder
from regard.models.encoders.static import StaticEncoder
from regard._util.text import pluralize
from regard.models.layers.attention import Attends
from regard.translation.training.checkpoint import CONFIG, FORMAT, MODEL
from regard.translation.training.logs import LOG
from regard.translation.translator import Translator, load_translator

_EXAMPLES = (
    "Dogs may bark at strangers.",
    "The bark of an old oak is rough.",
    "The animal did not cross the street because it was too tired.",
)
_SHOWN = 8  # sentences of the dev data
_MOST = 200_000  # bytes of the dev data that are looked at


@dataclass(frozen=True, eq=False)
class Entry:
    """A model under its name, and what can be said of it.

    >>> import torch
    >>> from regard.models import StaticEncoder
    >>> from regard.app.server.registry import Entry
    >>> Entry.of("tiny", StaticEncoder(["dogs", "bark"], torch.eye(2))).about
    'one vector for each of 2 words'
    """

    name: str
    model: Translator | WordEncoder
    kind: Literal["translator", "encoder"]
    about: str
    layers: int
    heads: int
    longest: int | None
    languages: str = ""
    examples: tuple[str, ...] = _EXAMPLES

    @classmethod
    def of(
        cls, name: str, model: Translator | WordEncoder, *, languages: str = "", examples: Sequence[str] = ()
    ) -> "Entry":
        """A model under a name."""
        if isinstance(model, Translator):
            layers, heads = _sizes(model.model)
            about = _about_translator(model, heads)
            return cls(
                name, model, "translator", about, layers, heads, model.longest, languages, tuple(examples)
            )
        layers, heads = _sizes(model)
        about = f"{pluralize(layers, 'layer')}, {pluralize(heads, 'head')}" if layers else "words without context"
        if isinstance(model, StaticEncoder):
            about = f"one vector for each of {len(model.vocabulary) - 1:,} words"
        longest = getattr(model, "longest", None)
        return cls(name, model, "encoder", about, layers, heads, longest)

    @property
    def attends(self) -> bool:
        """Whether there is an attention inside."""
        return self.layers > 0


def _sizes(model: Any) -> tuple[int, int]:
    """How many attentions there are inside, and the most heads that one has."""
    found = [int(getattr(module, "heads", 1)) for module in model.modules() if isinstance(module, Attends)]
    return len(found), max(found, default=0)


def _about_translator(translator: Translator, heads: int) -> str:
    plan = translator.config.get("settings", {}).get("model", {})
    kind, layers = plan.get("kind", type(translator.model).__name__), plan.get("layers")
    parts = [str(kind)]
    if layers:
        parts.append(f"{layers} + {layers} layers")
    if not heads:
        parts.append("without attention")
    elif heads > 1:
        parts.append(f"{heads} heads")
    return ", ".join(parts)


class _Pending(NamedTuple):
    """A folder without parameters until now.

    ready: whether those that it gets are to be loaded; None if none will come.
    """

    folder: Path
    languages: str
    ready: Callable[[], bool | None]

    def is_there(self) -> bool:
        return (self.folder / MODEL).is_file() and bool(self.ready())


class Registry:
    """Models by name, and folders with the log of a training by name.

    >>> import torch
    >>> from regard.models import StaticEncoder
    >>> from regard.app.server.registry import Registry
    >>> collection = Registry({"tiny": StaticEncoder(["dogs", "bark"], torch.eye(2))})
    >>> list(collection.entries)
    ['tiny']
    """

    def __init__(
        self,
        models: Mapping[str, Translator | WordEncoder] | None = None,
        folders: Mapping[str, Path] | None = None,
    ) -> None:
        # the worker adds models while others read: each of these is replaced by a copy, and never changed
        self.entries = {name: Entry.of(name, model) for name, model in (models or {}).items()}
        self.folders = dict(folders or {})  # that trainings write to
        self.recordings: dict[str, ViewModel] = {}
        self._pending: dict[str, _Pending] = {}  # without parameters, until now

    @classmethod
    def load(cls, paths: Iterable[str], languages: Mapping[str, str] | None = None) -> "Registry":
        """The models of folders that `regard train` wrote, of encoders, and "minilm".

        A folder whose training has not written parameters yet is kept in mind for `refresh`. languages: what
        is known of them, by path.
        """
        collection, given = cls(), list(paths)
        for path, name in zip(given, names_of(given), strict=True):
            collection._add(name, path, (languages or {}).get(path, ""))
        return collection

    def expect(self, name: str, folder: Path, languages: str, ready: Callable[[], bool | None]) -> None:
        """A folder that a training is about to write; its model is loaded by `refresh` once it is ready."""
        self.folders = {**self.folders, name: folder}
        self._pending = {**self._pending, name: _Pending(folder, languages, ready)}

    def add_recordings(self, paths: Sequence[str]) -> None:
        """What `Seen.save` wrote into folders, to be looked at without the models."""
        for path, name in zip(paths, names_of(paths), strict=True):
            self.recordings = {**self.recordings, name: ViewModel.of(Seen.load(path), title=name)}

    def _add(self, name: str, path: str, languages: str) -> None:
        folder = Path(path)
        if path == "minilm" and not folder.exists():
            self._enter(Entry.of(name, load_encoder(path)))
        elif folder.is_file():
            self._enter(Entry.of(name, StaticEncoder.load(folder)))
        elif _is_training(folder):
            if (folder / MODEL).is_file():
                self.folders = {**self.folders, name: folder}
                self._add_translator(name, folder, languages)
            else:
                self.expect(name, folder, languages, lambda: True)
        elif folder.is_dir():
            self._enter(Entry.of(name, load_encoder(folder)))
        else:
            raise ArgumentError(
                f"{path!r} does not exist; name a folder that regard train wrote, a folder with an encoder, "
                'or "minilm".'
            )

    def _add_translator(self, name: str, folder: Path, languages: str) -> None:
        examples = _examples(folder)
        self._enter(Entry.of(name, load_translator(folder), languages=languages, examples=examples))

    def _enter(self, entry: Entry) -> None:
        self.entries = {**self.entries, entry.name: entry}

    def refresh(self) -> None:
        """Load the models of trainings that have written parameters meanwhile."""
        for name, one in self._pending.items():
            if one.is_there():
                with suppress(ArgumentError):  # half of it is there; it is tried again
                    self._add_translator(name, one.folder, one.languages)
                    self._pending = {other: two for other, two in self._pending.items() if other != name}

    @property
    def grows(self) -> bool:
        """Whether `refresh` may find something."""
        return any(one.is_there() for one in self._pending.values())

    @property
    def pending(self) -> list[str]:
        """The names of models that are still being trained."""
        return [name for name, one in self._pending.items() if one.ready() is not None]

    def trainings(self) -> dict[str, Path]:
        """The folders that have a log by now."""
        return {name: folder for name, folder in self.folders.items() if (folder / LOG).is_file()}

    def entry(self, name: str) -> Entry:
        """What was named so at the start."""
        if name not in self.entries:
            raise Refused(HTTPStatus.NOT_FOUND, f"there is no model {_quoted(name)}; {self._listed()}")
        return self.entries[name]

    def translator(self, name: str) -> Translator:
        """A model that translates."""
        model = self.entry(name).model
        if not isinstance(model, Translator):
            raise ArgumentError(
                f"{_quoted(name)} is an encoder, which does not translate; name a translator."
            )
        return model

    def encoder(self, name: str) -> WordEncoder:
        """A model that gives words vectors."""
        model = self.entry(name).model
        if not isinstance(model, WordEncoder):
            raise ArgumentError(
                f"{_quoted(name)} is a translator; name an encoder, or start with one: regard look minilm."
            )
        return model

    def encoders(self) -> list[str]:
        """The names of all encoders."""
        return [name for name, entry in self.entries.items() if entry.kind == "encoder"]

    def _listed(self) -> str:
        names = ", ".join(_quoted(name) for name in list(self.entries)[:20])
        return f"there are {names}." if names else "none was named when the server started."


def _quoted(name: str) -> str:
    return repr(shorten(name, 100))


def names_of(paths: Sequence[str]) -> list[str]:
    """The last part of each path, or all of it where others have the same.

    >>> from regard.app.server.registry import names_of
    >>> names_of(["runs/small", "other/small", "minilm"])
    ['runs/small', 'other/small', 'minilm']
    """
    for path in paths:
        if paths.count(path) > 1:
            raise ArgumentError(f"{path!r} is given {paths.count(path)} times; once is enough.")
    short = [_text(Path(path).resolve().name or path) for path in paths]
    return [_text(path) if short.count(name) > 1 else name for path, name in zip(paths, short, strict=True)]


def _text(path: str) -> str:
    """A name that JSON can hold: a file's name need not be UTF-8."""
    return os.fsencode(path).decode(errors="replace")


def _is_training(folder: Path) -> bool:
    if (folder / LOG).is_file():
        return True
    try:
        config = json.loads((folder / CONFIG).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and config.get("format") == FORMAT


def _examples(folder: Path) -> list[str]:
    """Sentences of the dev data that show something: neither short nor long."""
    try:
        with open(folder / "data" / "dev.tsv", "rb") as file:
            lines = file.read(_MOST).decode(errors="replace").split("\n")[:-1]
    except OSError:
        return []
    sources = [line.partition("\t")[0] for line in lines]
    fit = [source for source in sources if 4 <= len(source.split()) <= 14] or sources
    return fit[:: max(len(fit) // _SHOWN, 1)][:_SHOWN]
