"""The shipped models and minilm give the same answers in the static site as on the server."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from regard.app.server.registry import Registry
from regard.app.server.routes import inside, views
from regard.app.server.routes.translation import TranslateRequest, translate_batch
from regard.app.server.state import AppState
from regard.app.site.build import DATES, load_models
from tests.app.site.backend import RUNTIMES, ask, needs_deno
from tests.app.site.test_sections import same
from tests.browser.visit import needs_encoder

pytestmark = needs_deno
TEXTS = {
    "stories": "Tom had a red kite and Lily had a blue drum. Lily lost her",
    "dates": "November twenty-eighth, twenty forty-seven",
    "minilm": "The animal didn't cross the street because it was too tired",
}


def requests_for(model: str) -> list[tuple[str, dict[str, Any]]]:
    text = {"model": model, "text": TEXTS[model]}
    stack = "encoder" if model == "minilm" else "decoder"
    return [
        ("api/inside", text),
        ("api/inside/layer", {**text, "stack": stack, "layer": 1}),
        ("api/look", {"model": model, "texts": [TEXTS[model]]}),
    ]


def answers_of_server(model: str, path: str) -> list[Any]:
    state = AppState(Registry.load([path]))
    handlers = (inside.inside, inside.layer, views.look)
    kinds = (inside.InsideRequest, inside.LayerRequest, views.LookRequest)
    return [
        msgspec.to_builtins(handler(state, msgspec.convert(body, kind)))
        for (_, body), handler, kind in zip(requests_for(model), handlers, kinds, strict=True)
    ]


def without(answer: dict, *names: str) -> dict:
    return {name: value for name, value in answer.items() if name not in names}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("model", "path"),
    [("stories", "stories"), ("dates", str(DATES)), pytest.param("minilm", "minilm", marks=needs_encoder)],
)
def test_inside_and_heads(model: str, path: str, tmp_path: Path) -> None:
    answered = ask(tmp_path, load_models([path]), requests_for(model))
    for own, expected in zip(answered, answers_of_server(model, path), strict=True):
        same(without(own, "id"), without(expected, "id"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_translations(runtime: str, tmp_path: Path) -> None:
    """Sentences from the validation set have the same texts, scores, alternatives and alignments."""
    lines = (DATES / "data/dev.tsv").read_text("utf-8").splitlines()
    sentences = [line.split("\t")[0] for line in lines][:12]
    body = {"model": "dates", "sentences": sentences, "beam": 4, "n_best": 2}
    (own,) = ask(tmp_path, load_models([DATES]), [("api/translate", body)], runtime)
    request = msgspec.convert(body, TranslateRequest)
    (expected,) = translate_batch(AppState(Registry.load([str(DATES)])), [request])
    assert isinstance(expected, bytes)
    same(own, msgspec.json.decode(expected))
