"""The server's state, and the models it has loaded."""

from importlib.util import find_spec
from typing import Literal

import msgspec

from regard._util.extras import install_command, missing
from regard._util.text import pluralize
from regard.app.bundle import static_names
from regard.app.server.endpoints import endpoint
from regard.app.server.guide import guide_address
from regard.app.server.schema import Response
from regard.app.server.state import AppState
from regard.app.view_model import ViewModel
from regard.models.encoders.pretrained import MINILM


class HealthResponse(Response, kw_only=True):
    """Server status.

    waiting: requests in the model queue. sections: sections of the page. guide: address of the guide, or "".
    """

    status: Literal["ok"] = "ok"
    version: str
    models: int
    waiting: int
    sections: list[str]
    guide: str


class ModelInfo(Response, kw_only=True):
    """A loaded model. traceable: whether the Inside section can draw it."""

    name: str
    kind: Literal["translator", "encoder", "language"]
    about: str
    attends: bool
    traceable: bool
    layers: int
    heads: int
    max_tokens: int | None
    languages: str
    examples: list[str]


class RecordingInfo(Response, kw_only=True):
    """A recording written by `Seen.save`. id: the id of its view, which never expires."""

    name: str
    id: str
    about: str


class ModelsResponse(Response, kw_only=True):
    """Models and recordings. pending: models in training. folders: training runs with a log.

    demo: whether POST /api/demo can train the demo translator. missing: how to install a package that every
    translator requires. minilm: the command that installs minilm. Both are empty if nothing is missing.
    """

    models: list[ModelInfo]
    pending: list[str]
    demo: bool
    missing: str
    minilm: str
    folders: list[str]
    recordings: list[RecordingInfo]


@endpoint("GET", "/api/health", "Server status.")
async def health(state: AppState) -> HealthResponse:
    """Respond without a worker thread, even while all workers are busy."""
    return HealthResponse(
        version=state.version,
        models=len(state.registry.entries),
        waiting=state.worker.waiting,
        sections=static_names("page/sections"),
        guide=guide_address(),
    )


@endpoint("GET", "/api/models", "Loaded models.")
async def models(state: AppState) -> ModelsResponse:
    """Load the models that have become available, and return all models."""
    registry = state.registry
    if registry.can_refresh:
        await state.worker.run(registry.refresh)
    entries = list(registry.entries.values())
    return ModelsResponse(
        models=msgspec.convert(entries, list[ModelInfo], from_attributes=True),
        pending=registry.pending,
        demo=registry.demo is not None and registry.demo.available,
        missing="" if find_spec("sentencepiece") else str(missing("sentencepiece", "Translation")),
        minilm="" if find_spec(MINILM) else install_command(MINILM),
        folders=list(registry.trainings()),
        recordings=[
            RecordingInfo(name=name, id=view_id, about=_size(view))
            for name, (view_id, view) in state.recordings.items()
        ],
    )


def _size(view: ViewModel) -> str:
    inputs = view.inputs
    layers = pluralize(len(inputs[0].layers), "layer") if inputs else "empty"
    return layers if len(inputs) == 1 else f"{pluralize(len(inputs), 'text')}, {layers}"
