"""The sections of the static site give the same answers as the server."""

from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from regard.app.server.routes import lessons
from regard.app.view_model import look_at_translations
from regard.models import TransformerConfig
from regard.models.layers.positions import KINDS
from regard.translation import Beam
from tests.app.site.backend import ask, needs_deno
from tests.app.site.test_numbers import close, exported, make_translator

pytestmark = needs_deno


def same(first: Any, second: Any, where: str = "") -> None:
    """Compare JSON values; numbers within 1e-4."""
    if isinstance(second, dict):
        assert first.keys() == second.keys(), where
        for name, value in second.items():
            same(first[name], value, f"{where}.{name}")
    elif isinstance(second, list):
        assert len(first) == len(second), where
        for number, value in enumerate(second):
            same(first[number], value, f"{where}[{number}]")
    elif isinstance(second, float):
        assert first == pytest.approx(second, abs=1e-4, rel=1e-4), where
    else:
        assert first == second, where


def test_values_that_differ_are_not_the_same() -> None:
    for value in (1.001, "x", None, [1.0, 2.0]):
        with pytest.raises((AssertionError, TypeError)):
            same({"a": value}, {"a": 1.0})


def test_lookup(tmp_path: Path) -> None:
    """Lookups agree for every score with every mask, and for every normalizer."""
    torch.manual_seed(0)
    tables = {
        name: torch.randn(n, m).tolist() for name, n, m in (("query", 3, 5), ("key", 7, 5), ("value", 7, 2))
    }
    options = [
        {"score": score, "mask": mask, "temperature": 0.7}
        for score, mask in product(lessons._SCORES, ("none", "causal", "window"))
    ]
    options += [
        {"normalize": normalize, "mask": mask}
        for normalize, mask in product(lessons._NORMALIZERS, ("none", "causal"))
    ]
    requests = [{**tables, **option} for option in options]
    answers = ask(tmp_path, [], [("api/lookup", request) for request in requests])
    for request, answer in zip(requests, answers, strict=True):
        expected = lessons.lookup(msgspec.convert(request, lessons.LookupRequest))
        same(answer, msgspec.to_builtins(expected), str({**request, **dict.fromkeys(tables)}))


def test_a_ragged_table_is_an_error(tmp_path: Path) -> None:
    request = {"query": [[1, 2], [3]], "key": [[1, 2]], "value": [[1]]}
    (answer,) = ask(tmp_path, [], [("api/lookup", request)])
    assert answer["error"].startswith("query: row 0 has 2 numbers and row 1 has 1")


def test_order(tmp_path: Path) -> None:
    """The random block, word vectors and positions are the same as on the server."""
    requests = [
        {"sentence": sentence, "order": order, "positions": kind, "seed": seed}
        for kind in (*KINDS, "none")
        for sentence, order, seed in (
            ("the dog chased the cat", [4, 2, 0, 1, 3], 0),
            ("Äpfel sind 漢", [1, 0, 2], 5),
        )
    ]
    answers = ask(tmp_path, [], [("api/order", request) for request in requests])
    for request, answer in zip(requests, answers, strict=True):
        expected = lessons.order(msgspec.convert(request, lessons.OrderRequest))
        same(answer, msgspec.to_builtins(expected), str(request))
        if request["positions"] == "none":
            assert max(answer["change"]) < 1e-9  # the section shows no change


def test_positions(tmp_path: Path) -> None:
    sizes = [{"kind": kind, "length": 64, "width": 8} for kind in KINDS] + [
        {"kind": "learned", "length": 5, "width": 7}
    ]
    paths = ["api/positions?" + "&".join(f"{name}={value}" for name, value in size.items()) for size in sizes]
    for size, answer in zip(sizes, ask(tmp_path, [], [(path, None) for path in paths]), strict=True):
        expected = lessons.positions(msgspec.convert(size, lessons.PositionsRequest))
        same(answer, msgspec.to_builtins(expected), str(size))


def test_views(tmp_path: Path) -> None:
    """Every question about every layer of a translation has the same answer."""
    torch.manual_seed(3)
    translator = make_translator(TransformerConfig(width=24, heads=6, layers=2), "bpe")
    sentence = "Dogs bark at the red moon."
    view = look_at_translations(translator, translator.translate([sentence], strategy=Beam()), title="dogs")
    layers = len(view.inputs[0].layers)
    questions: list[tuple[str, dict]] = [
        ("tile", {"height": 64, "width": 64}),
        ("tile", {"height": 3, "width": 2, "mean": True}),
        ("topk", {"side": "key", "position": 1, "k": 3}),
        ("received", {"k": 3, "bins": 4}),
        ("heads", {}),
    ]
    asked = [(name, {**body, "layer": layer}) for layer in range(layers) for name, body in questions]
    asked += [("numbers", {"layer": layer, "head": 0, "query": 1, "key": 0}) for layer in range(1, layers)]
    requests = [("api/look", {"model": "dogs", "texts": [sentence]})]
    requests += [(f"api/views/local-1/{name}", body) for name, body in asked]
    described, *answers = ask(tmp_path, [exported(translator)], requests)
    assert described == {"id": "local-1", **view.describe(), "first": None}
    for (name, body), answer in zip(asked, answers, strict=True):
        expected = view.ask(name, body)
        if name == "tile":
            close(answer, expected.reshape(-1))
        elif name == "numbers":
            values = msgspec.to_builtins(expected)
            same(
                {key: answer[key] for key in values if key != "softcap"},
                {key: x for key, x in values.items() if key != "softcap"},
            )
        else:
            same(answer, msgspec.to_builtins(expected), f"{name} {body}")


def test_the_next_token(tmp_path: Path) -> None:
    """Temperature 0 selects the most probable token; otherwise the seed decides."""
    translator = make_translator(TransformerConfig(width=24, heads=6, layers=1), "words")
    text = {"model": "dogs", "text": "Dogs bark", "target": "Der"}
    requests = [
        ("api/inside/next", {**text, "temperature": t, "seed": seed})
        for t, seed in ((0, 0), (3, 1), (3, 1), (3, 2))
    ]
    greedy, *sampled = ask(tmp_path, [exported(translator)], requests)
    assert greedy["token"] == greedy["probabilities"][0]["token"]
    assert greedy["probabilities"][0]["probability"] == 1
    assert sampled[0] == sampled[1] != sampled[2]
    assert greedy["text"] == f"Der {greedy['token'].removeprefix('▁')}".strip()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            ("api/inside", {"model": "dogs", "text": "Dogs " * 70}),
            "The source has 71 tokens; this model reads at most 40",
        ),
        (("api/translate", {"model": "cats", "sentences": ["x"]}), "Unknown model 'cats'. Available: dogs."),
        (("api/training", {}), "This page has no api/training"),
    ],
)
def test_errors_name_the_cause(request_: tuple[str, dict], message: str, tmp_path: Path) -> None:
    translator = make_translator(TransformerConfig(width=24, heads=6, layers=1), "words")
    (answer,) = ask(tmp_path, [exported(translator)], [request_])
    assert answer["error"].startswith(message)
