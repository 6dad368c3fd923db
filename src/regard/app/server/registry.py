"""The models and training runs specified at startup, by name."""

import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from regard._util.files import short_names
from regard._util.text import pluralize, shorten
from regard.app.server.security import RequestError
from regard.app.trace_text import supports
from regard.app.view_model import ViewModel
from regard.errors import ArgumentError, MissingExtraError
from regard.inspection.recordings.recording import Seen
from regard.models.encoders.base import WordEncoder
from regard.models.encoders.pretrained import load_encoder
from regard.models.encoders.static import StaticEncoder
from regard.models.layers.attention import Attends
from regard.models.text_model import FORMAT as LANGUAGE_MODEL_FORMAT
from regard.models.text_model import SHIPPED, TextModel, load_language_model
from regard.translation.model_folder import CONFIG, DEV, FORMAT, LOG, MODEL, is_pretrained_translator
from regard.translation.translator import Translator, load_translator

_EXAMPLES = (
    "The animal didn't cross the street because it was too tired",
    "Dogs may bark at strangers.",
    "The bark of an old oak is rough.",
)
DATES = Path(__file__).parents[1] / "models" / "dates"  # the translator shipped with regard
_DATES_LANGUAGES = "en-de, dates, times and numbers in words only"
_DATES_EXAMPLES = ("November twenty-eighth, twenty forty-seven", "twenty-three days ago")
_STORIES = (
    "Tom had a red kite and Lily had a blue drum. Lily lost her",
    "Anna had a green ball and Ben had a yellow boat. They went to the lake. Ben lost his",
    "Lily had a red ball.",
)
_PRETRAINED = ("minilm", *SHIPPED, DATES.name)
_KINDS = {"translator": "a translator", "encoder": "an encoder", "language": "a language model"}
_MAX_EXAMPLES = 8  # example sentences from the validation set
_MAX_EXAMPLE_BYTES = 200_000  # maximum number of bytes to read from the validation set

log = logging.getLogger("regard.look")


@dataclass(frozen=True, eq=False)
class Entry:
    """A named model and its description.

    >>> import torch
    >>> from regard.models import StaticEncoder
    >>> from regard.app.server.registry import Entry
    >>> Entry.of("tiny", StaticEncoder(["dogs", "bark"], torch.eye(2))).about
    'one vector for each of 2 words'
    """

    name: str
    model: Translator | WordEncoder | TextModel
    kind: Literal["translator", "encoder", "language"]
    about: str
    layers: int
    heads: int
    max_tokens: int | None
    languages: str = ""
    examples: tuple[str, ...] = _EXAMPLES

    @property
    def traceable(self) -> bool:
        """Whether the Inside section can draw the model."""
        return supports(self.model)

    @classmethod
    def of(
        cls,
        name: str,
        model: Translator | WordEncoder | TextModel,
        *,
        languages: str = "",
        examples: Sequence[str] = (),
    ) -> "Entry":
        """Describe a model."""
        network: Any = model.model if isinstance(model, Translator | TextModel) else model
        attention = [module for module in network.modules() if isinstance(module, Attends)]
        layers, heads = len(attention), max((int(getattr(each, "heads", 1)) for each in attention), default=0)
        if isinstance(model, Translator):
            about = _describe_translator(model, heads)
            return cls(
                name, model, "translator", about, layers, heads, model.max_tokens, languages, tuple(examples)
            )
        about = f"{pluralize(layers, 'layer')}, {pluralize(heads, 'head')}"
        if isinstance(model, TextModel):
            about = f"language model, {about}, {len(model.tokens):,} words"
            return cls(name, model, "language", about, layers, heads, None, examples=tuple(examples))
        if isinstance(model, StaticEncoder):
            about = f"one vector for each of {len(model.vocabulary) - 1:,} words"
        elif not layers:
            about = "words without context"
        return cls(name, model, "encoder", about, layers, heads, getattr(model, "max_tokens", None))

    @property
    def attends(self) -> bool:
        """Whether the model has attention layers."""
        return self.layers > 0


def _describe_translator(translator: Translator, heads: int) -> str:
    config = translator.config.get("settings", {}).get("model", {})
    layers = f"{config['layers']} + {config['layers']} layers" if config.get("layers") else ""
    attention = {0: "without attention", 1: ""}.get(heads, f"{heads} heads")
    return ", ".join(filter(None, [config.get("kind", type(translator.model).__name__), layers, attention]))


class _PendingModel(NamedTuple):
    """A model for `refresh` to load. ready(): whether it can be loaded; None if it is not in training."""

    load: Callable[[], None]
    ready: Callable[[], bool | None]


class Demo(Protocol):
    """The demo translator, which is trained on request."""

    name: str

    @property
    def available(self) -> bool:
        """Whether the translator is neither trained nor in training."""

    def start(self) -> None:
        """Start training in the background, if the translator is available."""


class Registry:
    """Models by name, and training folders by name.

    >>> import torch
    >>> from regard.models import StaticEncoder
    >>> from regard.app.server.registry import Registry
    >>> registry = Registry({"tiny": StaticEncoder(["dogs", "bark"], torch.eye(2))})
    >>> list(registry.entries)
    ['tiny']
    """

    def __init__(
        self,
        models: Mapping[str, Translator | WordEncoder | TextModel] | None = None,
        folders: Mapping[str, Path] | None = None,
    ) -> None:
        # the worker adds models while other threads read: dictionaries are replaced, never modified
        self.entries = {name: Entry.of(name, model) for name, model in (models or {}).items()}
        self.folders = dict(folders or {})  # folders of training runs
        self.recordings: dict[str, ViewModel] = {}
        self.demo: Demo | None = None
        self._pending: dict[str, _PendingModel] = {}
        self._refreshing = threading.Lock()

    @classmethod
    def load(cls, paths: Iterable[str], languages: Mapping[str, str] | None = None) -> "Registry":
        """Load models from folders, or by the names "minilm", "stories" and "dates".

        Folders without parameters are loaded later by `refresh`. languages: the languages of models, by path.
        """
        registry, paths = cls(), list(paths)
        for path, name in zip(paths, short_names(paths), strict=True):
            registry._add(name, path, (languages or {}).get(path, ""))
        return registry

    def expect(
        self, name: str, folder: Path, languages: str | Callable[[], str], ready: Callable[[], bool | None]
    ) -> None:
        """Register a model that is being trained; `refresh` loads it when it is ready.

        ready: returns whether to load the model once it has parameters, or None if it is not in training.
        """

        def can_load() -> bool | None:
            is_ready = ready()
            return is_ready and (folder / MODEL).is_file()

        def load() -> None:
            # the folder is partly written or a package is missing: the next refresh tries again
            with suppress(ArgumentError, MissingExtraError):
                self._add_translator(name, folder, languages() if callable(languages) else languages)

        self.folders = {**self.folders, name: folder}
        self._pending = {**self._pending, name: _PendingModel(load, can_load)}

    def load_later(self, name: str) -> None:
        """Register a pretrained model, "minilm", "stories" or "dates", for the next `refresh`."""
        self._pending = {
            **self._pending,
            name: _PendingModel(partial(self._load_pretrained, name), lambda: True),
        }

    def _load_pretrained(self, name: str) -> None:
        try:
            self._add_pretrained(name, name)
        except (ArgumentError, MissingExtraError) as error:
            log.error("%s cannot be loaded: %s", name, error)
            self._drop_pending(name)

    def _drop_pending(self, name: str) -> None:
        self._pending = {other: model for other, model in self._pending.items() if other != name}

    def add_recordings(self, paths: Sequence[str]) -> None:
        """Load recordings written by `Seen.save`."""
        for path, name in zip(paths, short_names(paths), strict=True):
            self.recordings = {**self.recordings, name: ViewModel.of(Seen.load(path), title=name)}

    def _add(self, name: str, path: str, languages: str) -> None:
        folder = Path(path)
        if path in _PRETRAINED and not folder.exists():
            self._add_pretrained(name, path)
        elif _format(folder) == LANGUAGE_MODEL_FORMAT:
            self._add_entry(Entry.of(name, load_language_model(folder)))
        elif folder.is_file():
            self._add_entry(Entry.of(name, StaticEncoder.load(folder)))
        elif _is_training(folder):
            if (folder / MODEL).is_file():
                self.folders = {**self.folders, name: folder}
                self._add_translator(name, folder, languages)
            else:
                self.expect(name, folder, languages, lambda: True)
        elif is_pretrained_translator(folder):
            self._add_translator(name, folder, languages)
        elif folder.is_dir():
            self._add_entry(Entry.of(name, load_encoder(folder)))
        else:
            raise ArgumentError(
                f"{path!r} does not exist. Pass a folder written by regard train, a folder with an encoder, "
                'or "minilm".'
            )

    def _add_pretrained(self, name: str, model: str) -> None:
        if model == DATES.name:
            self._add_translator(name, DATES, "")
        elif model in SHIPPED:
            self._add_entry(Entry.of(name, load_language_model(model), examples=_STORIES))
        else:
            self._add_entry(Entry.of(name, load_encoder(model)))

    def _add_translator(self, name: str, folder: Path, languages: str) -> None:
        examples = _read_examples(folder)
        source = target = None
        if languages and is_pretrained_translator(folder):
            source, target = languages.split("-")
        if folder == DATES:
            languages, examples = _DATES_LANGUAGES, [*_DATES_EXAMPLES, *examples]
        translator = load_translator(folder, source=source, target=target)
        self._add_entry(Entry.of(name, translator, languages=languages, examples=examples))

    def _add_entry(self, entry: Entry) -> None:
        self.entries = {**self.entries, entry.name: entry}

    def refresh(self) -> None:
        """Load the pending models that are ready."""
        with self._refreshing:
            for name, model in self._pending.items():
                if model.ready():
                    model.load()
                    if name in self.entries:
                        self._drop_pending(name)

    @property
    def can_refresh(self) -> bool:
        """Whether `refresh` would load a model."""
        return any(model.ready() for model in self._pending.values())

    @property
    def pending(self) -> list[str]:
        """Names of the models in training."""
        return [name for name, model in self._pending.items() if model.ready() is not None]

    def trainings(self) -> dict[str, Path]:
        """Return the training folders that have a log."""
        return {name: folder for name, folder in self.folders.items() if (folder / LOG).is_file()}

    def entry(self, name: str) -> Entry:
        """Return the entry of a model."""
        if name not in self.entries:
            names = ", ".join(_quoted(name) for name in list(self.entries)[:20]) or "none"
            raise RequestError(HTTPStatus.NOT_FOUND, f"Unknown model {_quoted(name)}. Available: {names}.")
        return self.entries[name]

    def translator(self, name: str) -> Translator:
        """Return a translator."""
        model = self.entry(name).model
        if not isinstance(model, Translator):
            raise ArgumentError(
                f"{_quoted(name)} is {_KINDS[self.entry(name).kind]} and cannot translate. Choose a "
                "translator."
            )
        return model

    def encoder(self, name: str) -> WordEncoder:
        """Return an encoder."""
        model = self.entry(name).model
        if not isinstance(model, WordEncoder):
            raise ArgumentError(
                f"{_quoted(name)} is {_KINDS[self.entry(name).kind]}. Choose an encoder, or load one: "
                "regard look minilm."
            )
        return model

    def encoders(self) -> list[str]:
        """Return the names of all encoders."""
        return [name for name, entry in self.entries.items() if entry.kind == "encoder"]


def _quoted(name: str) -> str:
    return repr(shorten(name, 100))


def _is_training(folder: Path) -> bool:
    return (folder / LOG).is_file() or _format(folder) == FORMAT


def _format(folder: Path) -> object:
    """Return the format that a folder's config.json names, or None."""
    try:
        config = json.loads((folder / CONFIG).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return config.get("format") if isinstance(config, dict) else None


def _read_examples(folder: Path) -> list[str]:
    """Return sentences from the validation set, preferably of medium length."""
    try:
        with open(folder / DEV, "rb") as file:
            lines = file.read(_MAX_EXAMPLE_BYTES).decode(errors="replace").split("\n")[:-1]
    except OSError:
        return []
    sources = [line.partition("\t")[0] for line in lines]
    sources = [source for source in sources if 4 <= len(source.split()) <= 14] or sources
    return sources[:: max(len(sources) // _MAX_EXAMPLES, 1)][:_MAX_EXAMPLES]
